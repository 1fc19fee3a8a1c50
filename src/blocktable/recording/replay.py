"""A recording run again: the same calls on new objects, to the same results."""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blocktable._ints import lcm
from blocktable.cache import KVCache
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, BlockTableError, LawBroken
from blocktable.geometry import Geometry
from blocktable.groups import Group
from blocktable.recording.format import read, unpack
from blocktable.recording.identity import Ints
from blocktable.recording.record import _SHAPE, checksum_of, outcome_of, refusal_of
from blocktable.replica import Replica
from blocktable.tables import BlockTables

__all__ = ["Call", "Change", "Replayed", "calls", "history", "play", "replay"]

_FRESH = 2**31 - 1  # tokens of units of which it is not known whether they are like any other


@dataclass(frozen=True)
class Call:
    """One recorded call: the object's number, the verb with its arguments, and what it returned (a refusal: its name)."""

    number: int
    verb: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    outcome: Any
    step: int  # commits of all objects before it

    def __str__(self) -> str:
        """Say it as it would be written."""
        parts = [_literal(arg) for arg in self.args]
        parts += [f"{name}={_literal(value)}" for name, value in self.named.items() if value is not None]
        return f"{self.verb}({', '.join(parts)})"


def _literal(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))},)"
    return repr(value)


@dataclass
class Replayed:
    """How far a replay came: calls and steps done, a digest of what they returned, and what was found, if anything."""

    calls: int = 0
    steps: int = 0
    finding: LawBroken | None = None
    differs: str = ""
    complete: bool = False  # does the recording have its end
    objects: list[Any] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """The digest that the recorder had at the same call."""
        return str(self._hash.hexdigest())


@dataclass(frozen=True)
class Change:
    """What a row held after a step in which it changed: the verbs since the step before, and its live blocks."""

    step: int
    verbs: tuple[str, ...]
    blocks: tuple[int, ...]


def make(what: dict[str, Any], sanitize: Any = False) -> Any:
    """Return a new object like the one recorded."""
    try:
        groups = [
            Group(
                Geometry(**dict(zip(_SHAPE, shape, strict=True)), contracts=(), engine=None, reasons=()),
                kind=kind,
                window=window,
                state_blocks=blocks,
            )
            for kind, window, blocks, *shape in what["groups"]
        ]
        rows, blocks = what["max_rows"], what["num_blocks"]
        if "prefix_cache" not in what:
            return BlockTables(groups, max_rows=rows, num_blocks=blocks, sanitize=sanitize)
        how = {"prefix_cache": what["prefix_cache"], "cp_rank": what["cp_rank"]}
        return KVCache(groups, num_blocks=blocks, max_rows=rows, sanitize=sanitize, **how)
    except (TypeError, KeyError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, LawBroken):
            raise
        raise ArgumentError(f"a recording describes no tables: {error}", remedy="record the run again") from None


def calls(path: str | Path) -> tuple[list[dict[str, Any]], list[Call], str]:
    """Return what a recording holds: what each object was made with, the calls in order, and the digest at its end.

    Prompts and tokens are made up such that the same prefixes are equal. Raises ArgumentError for a ring, and for records
    that no recorder writes. Cost: the whole recording in memory.
    """
    records = list(read(path))
    if records and records[0][0] == "begin" and len(records[0]) > 2 and records[0][2]:
        raise ArgumentError(
            "a ring holds entries, not a whole run: it cannot be run again",
            values={"path": str(path)},
            remedy="look at it with history, or record without ring",
        )
    try:
        return _Reader(records).read()
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, AttributeError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{path} holds a record that no recorder writes: {error}",
            values={"path": str(path)},
            remedy="record the run again",
        ) from None


def play(path: str | Path, *, sanitize: Any = False) -> Iterator[tuple[Call, Replayed]]:
    """Run a recording again, call by call; after each, yield it and how far the replay is.

    ``replayed.objects`` are the caches and tables, to be looked at. Stops after a call that returned something else than
    was recorded (``differs``), or at which a sanitizer found something (``finding``).
    """
    made, found, end = calls(path)
    replayed = Replayed(complete=bool(end))
    replayed.objects = [make(what, sanitize) for what in made]
    for call in found:
        outcome: Any = None
        try:
            outcome = _run(replayed.objects[call.number], call)
        except LawBroken as error:
            replayed.finding = error
        replayed.calls += 1
        replayed.steps = call.step + (call.verb == "commit")
        replayed._hash.update(repr(outcome).encode())  # noqa: SLF001 - its own field
        if replayed.finding is None and outcome != call.outcome:
            replayed.differs = f"{call.verb} at step {call.step} returned {outcome}, recorded was {call.outcome}"
        yield call, replayed
        if replayed.finding or replayed.differs:
            return


def _run(one: Any, call: Call) -> Any:
    """Do one call; return its outcome as it is recorded."""
    try:
        result = getattr(one, call.verb)(*call.args, **call.named)
    except LawBroken:
        raise
    except BlockTableError as error:
        return refusal_of(error)
    return checksum_of(result) if isinstance(result, Delta) else outcome_of(result)


def replay(path: str | Path, *, to: int | None = None, until_finding: bool = False) -> Replayed:
    """Run a recording again, to its end, to a step (commits), or to the first finding of the sanitizer.

    The digest is that of the recorder at the same call. Raises ArgumentError for a file that is no recording, and for a
    step that it does not reach. Cost: that of the run.
    """
    replayed = Replayed()
    for _, replayed in play(path, sanitize="raise" if until_finding else False):
        if to is not None and replayed.steps >= to:
            break
    if to is not None and replayed.steps < to and not (replayed.finding or replayed.differs):
        raise ArgumentError(
            f"the recording ends at step {replayed.steps}", values={"steps": replayed.steps, "to": to},
            remedy=f"ask for a step of 0..{replayed.steps}",
        )  # fmt: skip
    return replayed


def history(path: str | Path, row: int, *, group: int = 0, number: int = 0) -> list[Change]:
    """Return what a row held, step by step, where it changed; of a ring from its first snapshot on.

    ``number`` names the object, in the order in which they were constructed.
    """
    records = read(path)
    first = next(records, ["begin", 0, 0])
    ring = len(first) > 2 and bool(first[2])
    changes: list[Change] = []
    verbs: list[str] = []
    for verb, step, tables in _ring_steps(records, number) if ring else _run_steps(path, number):
        verbs.append(verb)
        if step is None:
            continue
        live = tuple(int(block) for block in tables[group].array[row, : tables[group].num_blocks[row]])
        if not changes or changes[-1].blocks != live:
            changes.append(Change(step, tuple(verbs), live))
        verbs.clear()
    return changes


def _run_steps(path: str | Path, number: int) -> Iterator[tuple[str, int | None, Any]]:
    for call, replayed in play(path):
        if call.number == number:
            one = replayed.objects[number]
            tables = one.tables if isinstance(one, KVCache) else one
            yield call.verb, (tables.seq if call.verb == "commit" else None), tables


def _ring_steps(records: Iterator[list[Any]], number: int) -> Iterator[tuple[str, int | None, Any]]:
    """Follow a ring: the first snapshot, or the first shape, and then the deltas."""
    tables: Any = None
    for verb, *rest in records:
        if verb in ("begin", "end") or not rest or rest[0] != number:
            continue
        if verb == "object" and tables is None:
            tables = Replica(make(rest[1]).groups, max_rows=rest[1]["max_rows"])
        elif verb == "snapshot":
            tables = Replica.from_snapshot(rest[1])
            yield verb, tables.seq, tables
        elif verb == "commit":
            tables.apply(Delta.from_bytes(rest[1]))
            yield verb, tables.seq, tables
        elif verb != "object":
            yield verb, None, tables


class _Row:
    """What is known of the units of one row: how many are written down, and the numbers of those to come."""

    def __init__(self) -> None:
        self.done = 0
        self.coming: deque[int] = deque()


class _Reader:
    """From records to calls, in two passes: the numbers of units come after the calls that began them."""

    def __init__(self, records: list[list[Any]]) -> None:
        self._records = records
        self._made: list[dict[str, Any]] = []
        self._units: list[int] = []
        self._rows: dict[tuple[int, int], _Row] = {}
        self._lengths: list[dict[int, int]] = []
        self._fresh = _FRESH

    def read(self) -> tuple[list[dict[str, Any]], list[Call], str]:
        """Return objects, calls and the digest at the end."""
        caches = set()
        for verb, *rest in self._records:
            if verb == "object" and "prefix_cache" in rest[1]:
                caches.add(rest[0])
            elif verb not in ("begin", "object", "end", "commit") and rest[0] in caches and rest[-2] is not None:
                for row, symbol in zip(*map(unpack, rest[-2]), strict=True):
                    self._row(rest[0], int(row)).coming.append(int(symbol))
        found: list[Call] = []
        step, end = 0, ""
        for verb, *rest in self._records:
            if verb == "begin":
                continue
            if verb == "end":
                end = str(rest[0])
            elif verb == "object":
                self._begin(rest[1])
            else:
                call = self._call(verb, rest, step)
                if call is not None:
                    found.append(call)
                step += verb == "commit"
        return self._made, found, end

    def _begin(self, what: dict[str, Any]) -> None:
        self._made.append(what)
        spans = [shape[3 + _SHAPE.index("block_size")] * shape[3 + _SHAPE.index("cp_size")] for shape in what["groups"]]
        paged = [span for span, shape in zip(spans, what["groups"], strict=True) if shape[0] != "state"]
        self._units.append(lcm(*paged) if paged else 1)
        self._lengths.append({})

    def _row(self, number: int, row: int) -> _Row:
        return self._rows.setdefault((number, row), _Row())

    def _call(self, verb: str, rest: list[Any], step: int) -> Call | None:
        number, *arguments, outcome = rest
        if not isinstance(number, int) or not 0 <= number < len(self._made):
            raise ArgumentError(f"a record names object {number}", remedy="record the run again")
        if "prefix_cache" not in self._made[number]:
            args = _tables_arguments(verb, arguments)
            return None if args is None else Call(number, verb, args, {}, outcome, step)
        if verb == "commit":
            return Call(number, verb, (), {}, outcome, step)
        units = arguments.pop()
        refused = isinstance(outcome, list) and len(outcome) == 2 and isinstance(outcome[0], str)
        args, named = getattr(self, f"_{verb}")(number, outcome, refused, *arguments)
        if units is not None:
            for row in unpack(units[0]).tolist():
                one = self._row(number, row)
                one.done += 1
                one.coming.popleft()
        return Call(number, verb, args, named, outcome, step)

    # ---- tokens

    def _behind(self, number: int, row: int, begin: int, size: int) -> Ints:
        """Return tokens of positions begin .. begin + size - 1 of a row: each unit's number, as far as it is ever known."""
        one, unit = self._row(number, row), self._units[number]
        which = np.arange(begin, begin + size) // unit - one.done
        found = np.empty(size, np.int64)
        for n in np.unique(which).tolist():
            known = 0 <= n < len(one.coming)
            found[which == n] = one.coming[n] if known else self._new()
        return found

    def _new(self) -> int:
        self._fresh -= 1
        return self._fresh

    def _prompt(self, number: int, row: int, begin: int, size: int, symbols: Ints) -> Ints:
        unit = self._units[number]
        text = np.repeat(symbols, unit)
        return np.concatenate([text, self._behind(number, row, begin + text.size, size - text.size)])

    def _prompts(self, number: int, sizes: Any, symbols: Any, unknown: Any, rows: Any = None) -> tuple[Ints, Ints]:
        sizes, symbols = unpack(sizes), unpack(symbols)
        whole = sizes // self._units[number] if symbols.size else np.zeros_like(sizes)
        ends = np.cumsum(whole)
        parts = [
            self._prompt(
                number, -1 if rows is None else int(rows[i]), 0, int(size), symbols[ends[i] - whole[i] : ends[i]]
            )
            for i, size in enumerate(sizes.tolist())
        ]
        text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if unknown is not None:
            text[unpack(unknown)] = -1
        return np.concatenate([[0], np.cumsum(sizes)]), text

    # ---- verbs

    def _lookup(
        self, number: int, _o: Any, _r: bool, sizes: Any, symbols: Any, unknown: Any, salts: Any, *_t: Any
    ) -> Any:
        starts, text = self._prompts(number, sizes, symbols, unknown)
        return (starts, text), {"salts": _salts(salts)}

    def _match(
        self,
        number: int,
        outcome: Any,
        refused: bool,
        rows: Any,
        sizes: Any,
        symbols: Any,
        unknown: Any,
        salts: Any,
        *_t: Any,
    ) -> Any:
        opened = unpack(rows)
        starts, text = self._opening(number, opened, sizes, symbols, unknown, None if refused else unpack(outcome))
        if not refused:
            for row, cached in zip(opened.tolist(), unpack(outcome).tolist(), strict=True):
                self._lengths[number][row] = cached
        return (opened, starts, text), {"salts": _salts(salts)}

    def _admit(
        self,
        number: int,
        outcome: Any,
        refused: bool,
        rows: Any,
        sizes: Any,
        symbols: Any,
        unknown: Any,
        salts: Any,
        limit: Any,
        final: Any,
        headroom: int,
        *_t: Any,
    ) -> Any:
        opened = unpack(rows)
        cached = None if refused else unpack(outcome[0])
        starts, text = self._opening(number, opened, sizes, symbols, unknown, cached)
        limits = None if limit is None else limit[0] if isinstance(limit[0], int) else unpack(limit[0])
        if cached is not None:
            most = np.diff(starts) if limits is None else np.minimum(np.diff(starts), cached + limits)
            self._lengths[number] |= dict(zip(opened.tolist(), most.tolist(), strict=True))
        marks = None if final is None else unpack(final)
        return (opened, starts, text), {"salts": _salts(salts), "limit": limits, "final": marks, "headroom": headroom}

    def _opening(self, number: int, rows: Ints, sizes: Any, symbols: Any, unknown: Any, cached: Any) -> Any:
        """Return the prompts of rows that begin anew on what was found cached."""
        if cached is not None:
            for row, hit in zip(rows.tolist(), cached.tolist(), strict=True):
                self._row(number, row).done = hit // self._units[number]
        return self._prompts(number, sizes, symbols, unknown, rows)

    def _extend(
        self,
        number: int,
        outcome: Any,
        refused: bool,
        rows: Any,
        sizes: Any,
        unknown: Any,
        final: Any,
        salts: Any,
        partial: int,
        headroom: int,
        *_t: Any,
    ) -> Any:
        wanted, counts = unpack(rows), unpack(sizes)
        starts, lengths = np.concatenate([[0], np.cumsum(counts)]), self._lengths[number]
        text: Any = None
        if unknown is not True:
            parts = [
                self._behind(number, row, lengths.get(row, 0), size)
                for row, size in zip(wanted.tolist(), counts.tolist(), strict=True)
            ]
            text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            if unknown is not None:
                text[unpack(unknown)] = -1
        served = 0 if refused else outcome[1] if partial else wanted.size
        for row, size in zip(wanted[:served].tolist(), counts[:served].tolist(), strict=True):
            lengths[row] = lengths.get(row, 0) + size
        named = {"final": None if final is None else unpack(final), "salts": _salts(salts)}
        return (wanted, starts, text), named | {"partial": bool(partial), "headroom": headroom}

    def _confirm(
        self, number: int, _o: Any, _r: bool, rows: Any, lengths: Any, sizes: Any, unknown: Any, *_t: Any
    ) -> Any:
        wanted, marks = unpack(rows), unpack(lengths)
        if sizes is None:
            return (wanted, marks), {}
        counts = unpack(sizes)
        parts = [
            self._behind(number, row, mark - size, size)
            for row, mark, size in zip(wanted.tolist(), marks.tolist(), counts.tolist(), strict=True)
        ]
        text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if unknown is not None:
            text[unpack(unknown)] = -1
        return (wanted, marks, np.concatenate([[0], np.cumsum(counts)]), text), {}

    def _truncate(self, number: int, _o: Any, refused: bool, rows: Any, lengths: Any, fence: Any) -> Any:
        wanted, ends = unpack(rows), unpack(lengths)
        if not refused:
            for row, end in zip(wanted.tolist(), ends.tolist(), strict=True):
                self._lengths[number][row] = end
                one = self._row(number, row)
                one.done = min(one.done, end // self._units[number])
        return (wanted, ends), {"fence": fence}

    def _free(self, number: int, _o: Any, refused: bool, rows: Any, fence: Any) -> Any:
        wanted = unpack(rows)
        if not refused:
            for row in wanted.tolist():
                self._lengths[number].pop(row, None)
                self._row(number, row).done = 0
        return (wanted,), {"fence": fence}

    def _retire(self, _n: int, _o: Any, _r: bool, n: int) -> Any:
        return (n,), {}

    def _fork(self, number: int, _o: Any, refused: bool, row: int, into: int) -> Any:
        if not refused:
            self._lengths[number][into] = self._lengths[number].get(row, 0)
            self._row(number, into).done = self._row(number, row).done
        return (row, into), {}

    def _reset_prefix(self, _n: int, _o: Any, _r: bool) -> Any:
        return (), {}


def _salts(numbers: Any) -> Any:
    if numbers is None:
        return None
    return [b"salt %d" % number if number else None for number in numbers]


def _tables_arguments(verb: str, arguments: list[Any]) -> tuple[Any, ...] | None:
    """Return the arguments of a verb of tables; None where they were none that anybody could have done."""
    if verb == "commit":
        return ()
    if verb == "resize":
        what = {"groups": arguments[0], "max_rows": 1, "num_blocks": None}
        return (make(what).groups,)
    if verb not in ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy"):
        raise ArgumentError(f"a record names the verb {verb!r}", remedy="record the run again")
    found = [_argument(argument) for argument in arguments]
    return None if any(argument is _UNREADABLE for argument in found) else tuple(found)


_UNREADABLE = object()


def _argument(packed: Any) -> Any:
    if isinstance(packed, dict):
        if "parts" in packed:
            parts = tuple(_argument(part) for part in packed["parts"])
            return _UNREADABLE if any(part is _UNREADABLE for part in parts) else parts
        return packed.get("group", _UNREADABLE)
    return unpack(packed)
