"""A recording run again: the same calls on new objects, to the same results."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from blocktable._arrays import as_count
from blocktable._ints import lcm
from blocktable.cache import KVCache
from blocktable.contracts import Contract
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, BlockTableError, LawBroken
from blocktable.geometry import Geometry, plan
from blocktable.groups import Group
from blocktable.recording import coding
from blocktable.recording.arguments import INTEGER, NO_GROUP
from blocktable.recording.format import Record, as_bytes, read, refusal_of
from blocktable.recording.identity import Ints
from blocktable.recording.literals import LIMITS, as_literal
from blocktable.recording.record import VERSION, digest_of, fold
from blocktable.recording.shapes import SHAPE
from blocktable.recording.shared import Texts
from blocktable.recording.watched import WatchReader, of_findings
from blocktable.replica import Replica
from blocktable.sanitize.watch import watch
from blocktable.tables import BlockTables

__all__ = ["Call", "Change", "Replayed", "calls", "history", "play", "replay"]

STEPS = ("commit", "step")  # verbs that end a step: of our tables, and of a watcher
_PASSES = 8  # over what rows hold, at most: each may find what another began with
_MOST = 2**63 - 1  # of steps, rows, groups and objects
_FRESH = 2**31 - 1  # tokens of units of which it is not known whether they are like any other


@dataclass(frozen=True)
class Call:
    """One recorded call: the object's number, the verb with its arguments, and a checksum of what calls returned so far.

    ``refused`` is the type and law of the error that it raised, "" where it raised none.
    """

    number: int
    verb: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    check: int
    refused: str
    step: int  # commits of all objects, and steps of watchers, before it

    def __str__(self) -> str:
        """Say it as it would be written."""
        parts = [as_literal(arg) for arg in self.args]
        parts += [f"{name}={as_literal(value)}" for name, value in self.named.items() if value is not None]
        return f"{self.verb}({', '.join(parts)})"


@dataclass
class Replayed:
    """How far a replay came: calls and steps done, a digest of what they returned, and what was found, if anything."""

    calls: int = 0
    steps: int = 0
    finding: LawBroken | None = None
    differs: str = ""
    complete: bool = False  # does the recording have its end
    objects: list[Any] = field(default_factory=list)
    _meta: Ints = field(default_factory=lambda: np.zeros(3, np.int64))

    @property
    def digest(self) -> str:
        """The digest that the recorder had at the same call."""
        return digest_of(self._meta)


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
            Group(_geometry(shape), kind=kind, window=window, state_blocks=blocks)
            for kind, window, blocks, *shape in what["groups"]
        ]
        if "watch" in what:
            how = {name: what[name] for name in ("num_blocks", "cp_rank", "ignore", "kernel_blocks")}
            return watch(groups, mode="raise" if sanitize else "count", **how)
        rows, blocks = what["max_rows"], what["num_blocks"]
        if "prefix_cache" not in what:
            return BlockTables(groups, max_rows=rows, num_blocks=blocks, sanitize=sanitize)
        how = {"prefix_cache": what["prefix_cache"], "cp_rank": what["cp_rank"]}
        return KVCache(groups, num_blocks=blocks, max_rows=rows, sanitize=sanitize, **how)
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, LawBroken):
            raise
        raise ArgumentError(f"a recording describes no tables: {error}", remedy="record the run again") from None


def _geometry(shape: list[Any]) -> Geometry:
    """Return a geometry like the one recorded; raises ValueError for one that cannot have been planned."""
    named = dict(zip(SHAPE, shape, strict=True))
    for name, number in named.items():
        least = 0 if name in ("lookahead", "extra_blocks", "padding") else 1
        if type(number) is not int or not least <= number < 2**63:
            raise ValueError(f"{name} {number!r}")
    if named["block_size"] % named["kernel_block_size"]:
        raise ValueError(f"kernel blocks of {named['kernel_block_size']} tokens in blocks of {named['block_size']}")
    try:
        planned = plan(**{name: named[name] for name in LIMITS}, contracts=_standing_in(named))
    except ArgumentError:  # it was made without plan
        planned = None
    if planned is None or any(getattr(planned, name) != number for name, number in named.items()):
        return Geometry(**named, contracts=(), engine=None, reasons=())
    return planned


def _standing_in(named: dict[str, int]) -> tuple[Contract, ...]:
    """Return what demands the kernel blocks and the width that were planned: the contracts themselves are not recorded."""
    if named["kernel_block_size"] == named["block_size"] and not named["padding"]:
        return ()
    sizes = (named["kernel_block_size"],)
    return (Contract("recorded", kernel_block_sizes=sizes, min_width=named["kernel_width"]),)


def calls(path: str | Path) -> tuple[list[dict[str, Any]], list[Call], str]:
    """Return what a recording holds: what each object was made with, the calls in order, and the digest at its end.

    Prompts and tokens are made up such that the same prefixes are equal. Raises ArgumentError for a ring, and for records
    that no recorder writes. Cost: the whole recording in memory.
    """
    reader = _Reader(path)
    found = list(reader.calls())
    return reader.made, found, reader.end


def play(path: str | Path, *, sanitize: Any = False) -> Iterator[tuple[Call, Replayed]]:
    """Run a recording again, call by call; after each, yield it and how far the replay is.

    ``replayed.objects`` are the caches and tables, to be looked at. Stops after a call that returned something else than
    was recorded (``differs``), or at which a sanitizer found something (``finding``).
    """
    yield from _played(*_begun(path, sanitize))


def _begun(path: str | Path, sanitize: Any) -> tuple["_Reader", Replayed]:
    """Return a recording's reader, and the replay before its first call, which may be all there is."""
    reader = _Reader(path)
    return reader, Replayed(complete=bool(reader.end), objects=[make(what, sanitize) for what in reader.made])


def _played(reader: "_Reader", replayed: Replayed) -> Iterator[tuple[Call, Replayed]]:
    for call in reader.calls():
        result: Any = None
        refused = ""
        try:
            result, refused = _run(replayed.objects[call.number], call)
        except LawBroken as error:
            replayed.finding = error
        replayed.calls += 1
        replayed.steps = call.step + (call.verb in STEPS)
        fold(replayed._meta, result)  # noqa: SLF001 - its own field
        check = coding.short_of(replayed._meta)  # noqa: SLF001
        if replayed.finding is None and check != call.check:
            was = f", recorded was {call.refused}" if call.refused else ""
            brief = refused or " ".join(repr(result).split())[:200]
            replayed.differs = f"{call.verb} at step {call.step} returned {brief}, not what was recorded{was}"
        yield call, replayed
        if replayed.finding or replayed.differs:
            return


def _run(one: Any, call: Call) -> tuple[Any, str]:
    """Do one call; return what it returned, or its refusal as a field and in words."""
    try:
        result = getattr(one, call.verb)(*call.args, **call.named)
    except LawBroken:
        raise
    except BlockTableError as error:
        return refusal_of(error), f"{type(error).__name__} {error.law}"
    if call.verb == "step":
        result = of_findings(result)
    return result, ""


def replay(path: str | Path, *, to: int | None = None, until_finding: bool = False) -> Replayed:
    """Run a recording again, to its end, to a step, or to the first finding of the sanitizer.

    Steps are the commits of all objects, and the steps of watchers: ``to=0`` does no call, ``to=1`` those up to the first of
    them. The digest is that of the recorder at the same call. Raises ArgumentError for a file that is no recording, and for
    a step that it does not reach. Cost: that of the run.
    """
    if to is not None:
        as_count(to, "to", 0, _MOST)
    reader, replayed = _begun(path, "raise" if until_finding else False)
    if to == 0:
        return replayed
    for _ in _played(reader, replayed):
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

    ``number`` names the object, in the order in which they were constructed; steps are its own commits. Raises ArgumentError
    for an object, a group or a row that was never there, and for a watcher in a ring, which does not hold its tables whole.
    Cost: that of the run.
    """
    for name, value in (("row", row), ("group", group), ("number", number)):
        as_count(value, name, 0, _MOST)
    what, steps = _steps_of(path, number)
    groups, rows = len(what["groups"]), what.get("max_rows", 0)
    changes: list[Change] = []
    verbs: list[str] = []
    for verb, step, tables in steps:
        verbs.append(verb)
        if step is None:
            continue
        groups, rows = max(groups, len(tables)), max(rows, *(len(table.array) for table in tables))
        live: tuple[int, ...] = ()
        if group < len(tables) and row < len(tables[group].num_blocks):
            live = tuple(tables[group].array[row, : tables[group].num_blocks[row]].tolist())
        if not changes or changes[-1].blocks != live:
            changes.append(Change(step, tuple(verbs), live))
        verbs.clear()
    if group >= groups or row >= rows:
        raise ArgumentError(
            f"there is no row {row} of group {group}: object {number} has {groups} groups of {rows} rows",
            values={"row": row, "group": group, "rows": rows, "groups": groups},
            remedy="count both from 0",
        )
    return changes


class _Shown(NamedTuple):
    """A table as a watcher was shown it."""

    array: Any
    num_blocks: Any


_Step = tuple[str, int | None, Sequence[Any]]  # a call; where it ends a step, which, and the tables of all groups


def _steps_of(path: str | Path, number: int) -> tuple[dict[str, Any], Iterator[_Step]]:
    """Return what an object was made with, and its calls."""
    records = read(path)
    if ring := _is_ring(next(records, None), path):
        kept = list(records)
        made = {said[1]: said[2] for said in kept if not isinstance(said, Record) and said[0] == "object"}
        steps = _ring_steps(kept, number)
    else:
        reader, replayed = _begun(path, sanitize=False)
        made, steps = dict(enumerate(reader.made)), _run_steps(reader, replayed, number)
    if number not in made:
        raise ArgumentError(
            f"there is no object {number}: the recording holds {len(made)}",
            values={"number": number, "objects": len(made)},
            remedy="count them from 0, in the order in which they were constructed",
        )
    if ring and "watch" in made[number]:
        raise ArgumentError(
            f"object {number} is a watcher, whose tables are not whole in a ring",
            values={"number": number},
            remedy="record it without ring",
        )
    return made[number], steps


def _run_steps(reader: "_Reader", replayed: Replayed, number: int) -> Iterator[_Step]:
    for call, _ in _played(reader, replayed):
        if call.number == number:
            one = replayed.objects[number]
            if call.verb == "step":
                yield call.verb, one.steps, [_Shown(*part) for part in zip(*call.args, strict=True)]
                continue
            tables = one.tables if isinstance(one, KVCache) else one
            yield call.verb, (tables.seq if call.verb == "commit" else None), tables.tables


def _is_ring(first: Any, path: str | Path) -> bool:
    """Say whether the first record begins a ring; refuse one of another version."""
    if isinstance(first, list) and first[:2] == ["begin", VERSION]:
        return bool(first[2])
    raise ArgumentError(
        f"{path} does not begin as a recording of version {VERSION}",
        values={"path": str(path), "version": VERSION},
        remedy="read it with the release that made it",
    )


def _ring_steps(records: Iterable[list[Any] | Record], number: int) -> Iterator[_Step]:
    """Follow a ring: the first snapshot, or the first shape, and then the deltas."""
    tables: Any = None
    for record in records:
        if isinstance(record, Record):
            if record.number == number:
                if record.verb == "resize" and not record.refused:
                    tables = Replica(*_resized(record.fields), max_rows=tables.max_rows)
                yield record.verb, None, ()
            continue
        verb, *rest = record
        if verb in ("begin", "end") or not rest or rest[0] != number:
            continue
        if verb == "object" and tables is None:
            tables = Replica(make(rest[1]).groups, max_rows=rest[1]["max_rows"])
        elif verb == "snapshot":
            tables = Replica.from_snapshot(rest[1])
            yield verb, tables.seq, tables.tables
        elif verb == "commit":
            tables.apply(Delta.from_bytes(rest[1]))
            yield verb, tables.seq, tables.tables


class _Row:
    """What is known of the units of one row: how many are written down, and the numbers of those to come."""

    def __init__(self) -> None:
        self.done = 0
        self.coming: list[int] = []
        self.at = 0  # in ``coming``: the next one


class _Reader:
    """From records to calls, in two passes: the numbers of units come after the calls that began them.

    Where rows were forked or cut there are more, which only follow what rows hold (``shared``), until they learn no more.
    """

    def __init__(self, path: str | Path, contents: Any = None, texts: Texts | None = None) -> None:
        self._path = path
        self._contents: dict[tuple[int, int], list[int]] = contents or {}
        self._texts = texts
        self._parted = False
        self.made: list[dict[str, Any]] = []
        self.end = ""
        self._units: list[int] = []
        self._rows: dict[tuple[int, int], _Row] = {}
        self._lengths: list[dict[int, int]] = []
        self._fresh = _FRESH
        self._seen: list[int] = []
        self._watches: dict[int, WatchReader] = {}
        self._guarded(self._look)
        if self._parted and texts is None:
            self._learn()

    def _learn(self) -> None:
        """Find what units consist of that begin like others."""
        for _ in range(_PASSES):
            texts = Texts()
            with suppress(ArgumentError):  # it is told when its call is come to
                for _call in _Reader(self._path, self._contents, texts).calls():
                    pass
            if texts.units == self._contents:
                return
            self._contents = texts.units

    def _guarded(self, part: Any) -> Any:
        """Do a part; what goes wrong in it is a record that no recorder writes."""
        try:
            return part()
        except (TypeError, ValueError, IndexError, KeyError, ArithmeticError, AttributeError, MemoryError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"{self._path} holds a record that no recorder writes: {error}",
                values={"path": str(self._path)},
                remedy="record the run again",
            ) from None

    def _look(self) -> None:
        """Pass once over everything, for the objects, the end, and the units of rows."""
        records = read(self._path)
        if _is_ring(next(records, None), self._path):
            raise ArgumentError(
                "a ring holds entries, not a whole run: it cannot be run again",
                values={"path": str(self._path)},
                remedy="look at it with history, or record without ring",
            )
        for record in records:
            if not isinstance(record, Record):
                self._said(record)
                continue
            if record.verb in ("fork", "truncate") and self.made[record.number].get("prefix_cache"):
                self._parted = True
            at = _UNITS.get(record.verb)
            if at is not None and not record.refused and len(record.fields) > at + 1:
                self._note_prompts(record)
                rows, units = record.fields[at], record.fields[at + 1]
                if rows is not None:
                    for row, unit in zip(rows.tolist(), self._absolute(record.number, units).tolist(), strict=True):
                        self._row(record.number, row).coming.append(unit)
            elif record.verb in _PROMPTS:
                self._note_prompts(record)
        self._seen = [0] * len(self.made)

    def _said(self, record: list[Any]) -> None:
        verb, *rest = record
        if verb == "end":
            self.end = str(rest[0])
        elif verb == "object":
            self._begin(rest[1])
        else:
            raise ArgumentError(f"a record says {verb!r}", remedy="record the run again")

    def _note_prompts(self, record: Record) -> None:
        at = _PROMPTS.get(record.verb)
        if at is not None and record.fields[at] is not None:
            self._absolute(record.number, record.fields[at])

    def _absolute(self, number: int, units: Ints) -> Ints:
        """Return units as they are numbered throughout; records count from those seen before."""
        found: Ints = units + self._seen[number]
        if found.size:
            self._seen[number] = max(self._seen[number], int(found.max()) + 1)
        return found

    def calls(self) -> Iterator[Call]:
        """Yield the calls, in order."""
        step = 0
        self._watches = {n: WatchReader(len(what["groups"])) for n, what in enumerate(self.made) if "watch" in what}
        for record in read(self._path):
            if not isinstance(record, Record):
                continue
            yield self._guarded(lambda record=record, step=step: self._call(record, step))
            step += record.verb in STEPS

    def _begin(self, what: dict[str, Any]) -> None:
        self.made.append(what)
        spans = [shape[3 + SHAPE.index("block_size")] * shape[3 + SHAPE.index("cp_size")] for shape in what["groups"]]
        paged = [span for span, shape in zip(spans, what["groups"], strict=True) if shape[0] != "state"]
        self._units.append(lcm(*paged) if paged else 1)
        self._lengths.append({})
        self._seen.append(0)

    def _row(self, number: int, row: int) -> _Row:
        return self._rows.setdefault((number, row), _Row())

    def _call(self, record: Record, step: int) -> Call:
        verb, number, fields, check, refused = record
        if not 0 <= number < len(self.made):
            raise ArgumentError(f"a record names object {number}", remedy="record the run again")
        error = as_bytes(fields.pop()).decode() if refused else ""
        if verb == "commit":
            return Call(number, verb, (), {}, check, error, step)
        if "watch" in self.made[number]:
            if verb != "step":
                raise ArgumentError(f"a record names the verb {verb!r}", remedy="record the run again")
            args, named = self._watches[number].step(fields)
            return Call(number, verb, args, named, check, error, step)
        if "prefix_cache" not in self.made[number]:
            return Call(number, verb, _tables_arguments(verb, fields), {}, check, error, step)
        if verb not in _CACHE_VERBS:
            raise ArgumentError(f"a record names the verb {verb!r}", remedy="record the run again")
        args, named = getattr(self, f"_{verb}")(number, refused, *fields)
        if self._texts is not None and not refused:
            self._texts.follow(number, verb, args, self._lengths[number])
        at = _UNITS.get(verb)
        if at is not None and not refused and fields[at] is not None:
            names, unit = self._absolute(number, fields[at + 1]), self._units[number]
            for row, name in zip(fields[at].tolist(), names.tolist(), strict=True):
                one = self._row(number, row)
                if self._texts is not None:
                    self._texts.finished(number, row, one.done * unit, unit, name)
                one.done += 1
                one.at += 1
        return Call(number, verb, args, named, check, error, step)

    # ---- tokens

    def _behind(self, number: int, row: int, begin: int, size: int) -> Ints:
        """Return tokens of positions begin .. begin + size - 1 of a row: each unit's number, as far as it is ever known."""
        one, unit = self._row(number, row), self._units[number]
        found = np.empty(size, np.int64)
        at = begin
        while at < begin + size:
            n = at // unit - one.done
            end = min((at // unit + 1) * unit, begin + size)
            known = 0 <= n < len(one.coming) - one.at
            name = one.coming[one.at + n] if known else self._new()
            held = self._contents.get((number, name)) if known else None
            found[at - begin : end - begin] = held[at % unit : at % unit + end - at] if held else name
            at = end
        return found

    def _new(self) -> int:
        self._fresh -= 1
        return self._fresh

    def _prompts(self, number: int, sizes: Ints, units: Any, unknown: Any, rows: Any = None) -> tuple[Ints, Ints]:
        unit = self._units[number]
        symbols = np.zeros(0, np.int64) if units is None else self._absolute(number, units)
        parts, at = [], 0
        for i, size in enumerate(sizes.tolist()):
            whole = size // unit if symbols.size else 0
            names = symbols[at : at + whole]
            parts.append(np.repeat(names, unit))
            for k, name in enumerate(names.tolist() if self._contents else ()):
                if held := self._contents.get((number, name)):
                    parts[-1][k * unit : (k + 1) * unit] = held
            at += whole
            row = -1 if rows is None else int(rows[i])
            parts.append(self._behind(number, row, whole * unit, size - whole * unit))
        text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if unknown is not None:
            text[unknown] = -1
        return _starts(sizes), text

    # ---- verbs

    def _lookup(self, number: int, _r: bool, sizes: Ints, units: Any, unknown: Any, salts: Any, *_t: Any) -> Any:
        return self._prompts(number, sizes, units, unknown), {"salts": _salts(salts)}

    def _match(
        self,
        number: int,
        refused: bool,
        rows: Ints,
        sizes: Ints,
        units: Any,
        unknown: Any,
        salts: Any,
        cached: Any = None,
        *_t: Any,
    ) -> Any:
        starts, text = self._opening(number, rows, sizes, units, unknown, cached)
        if not refused:
            self._lengths[number] |= dict(zip(rows.tolist(), cached.tolist(), strict=True))
        return (rows, starts, text), {"salts": _salts(salts)}

    def _admit(
        self,
        number: int,
        refused: bool,
        rows: Ints,
        sizes: Ints,
        units: Any,
        unknown: Any,
        salts: Any,
        limits: Any,
        marks: Any,
        numbers: Ints,
        cached: Any = None,
        *_t: Any,
    ) -> Any:
        headroom, one = numbers.tolist()
        starts, text = self._opening(number, rows, sizes, units, unknown, cached)
        if not refused:
            most = sizes if limits is None else cached + np.minimum(sizes - cached, limits)
            self._lengths[number] |= dict(zip(rows.tolist(), most.tolist(), strict=True))
        limit = int(limits[0]) if limits is not None and one else limits
        return (rows, starts, text), {"salts": _salts(salts), "limit": limit, "final": marks, "headroom": headroom}

    def _opening(self, number: int, rows: Ints, sizes: Ints, units: Any, unknown: Any, cached: Any) -> Any:
        """Return the prompts of rows that begin anew on what was found cached."""
        if cached is not None:
            for row, hit in zip(rows.tolist(), cached.tolist(), strict=True):
                self._row(number, row).done = hit // self._units[number]
        return self._prompts(number, sizes, units, unknown, rows)

    def _extend(
        self,
        number: int,
        refused: bool,
        rows: Ints,
        sizes: Ints,
        unknown: Any,
        marks: Any,
        salts: Any,
        numbers: Any,
        *_t: Any,
    ) -> Any:
        partial, headroom, served = (0, 0, rows.size) if numbers is None else numbers.tolist()
        lengths = self._lengths[number]
        text = None
        if unknown is None or unknown.tolist() != [-1]:
            places = zip(rows.tolist(), sizes.tolist(), strict=True)
            parts = [self._behind(number, row, lengths.get(row, 0), size) for row, size in places]
            text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            if unknown is not None:
                text[unknown] = -1
        if not refused:
            for row, size in zip(rows[:served].tolist(), sizes[:served].tolist(), strict=True):
                lengths[row] = lengths.get(row, 0) + size
        named = {"final": marks, "salts": _salts(salts)}
        return (rows, _starts(sizes), text), named | {"partial": bool(partial), "headroom": headroom}

    def _confirm(self, number: int, _r: bool, rows: Ints, marks: Ints, sizes: Any, unknown: Any, *_t: Any) -> Any:
        if sizes is None:
            return (rows, marks), {}
        parts = [
            self._behind(number, row, mark - size, size)
            for row, mark, size in zip(rows.tolist(), marks.tolist(), sizes.tolist(), strict=True)
        ]
        text = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if unknown is not None:
            text[unknown] = -1
        return (rows, marks, _starts(sizes), text), {}

    def _truncate(self, number: int, refused: bool, rows: Ints, ends: Ints, fence: Any) -> Any:
        if not refused:
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                self._lengths[number][row] = end
                one = self._row(number, row)
                one.done = min(one.done, end // self._units[number])
        return (rows, ends), {"fence": _integer(fence)}

    def _free(self, number: int, refused: bool, rows: Ints, fence: Any) -> Any:
        if not refused:
            for row in rows.tolist():
                self._lengths[number].pop(row, None)
                self._row(number, row).done = 0
        return (rows,), {"fence": _integer(fence)}

    def _retire(self, _n: int, _r: bool, n: Ints) -> Any:
        return (int(n[0]),), {}

    def _fork(self, number: int, refused: bool, rows: Ints) -> Any:
        row, into = rows.tolist()
        if not refused:
            self._lengths[number][into] = self._lengths[number].get(row, 0)
            self._row(number, into).done = self._row(number, row).done
        return (row, into), {}

    def _reset_prefix(self, _n: int, _r: bool) -> Any:
        return (), {}


# Where records of cache verbs have units: of prompts, and, as two fields, of rows. See ``record``.
_PROMPTS = {"lookup": 1, "match": 2, "admit": 2}
_UNITS = {"match": 6, "admit": 9, "extend": 6, "confirm": 4}
_CACHE_VERBS = (*_PROMPTS, "extend", "confirm", "truncate", "free", "retire", "fork", "reset_prefix")
_TABLES_VERBS = ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy")


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)])


def _integer(field: Any) -> int | None:
    return None if field is None else int(field[0])


def _salts(numbers: Any) -> Any:
    if numbers is None:
        return None
    return [b"" if number < 0 else b"salt %d" % number if number else None for number in numbers.tolist()]


def _tables_arguments(verb: str, fields: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of a verb of tables."""
    if verb == "resize":
        return _resized(fields)
    if verb not in _TABLES_VERBS:
        raise ArgumentError(f"a record names the verb {verb!r}", remedy="record the run again")
    what, *rest = fields
    found: list[Any] = []
    at = 0
    for kind in what.tolist():
        size = kind if kind >= 0 else 0 if kind == NO_GROUP else 1
        parts = rest[at : at + size]
        if len(parts) < size or any(part is None for part in parts):
            raise ArgumentError("a record holds other fields than its arguments", remedy="record the run again")
        at += size
        found.append(tuple(parts) if kind >= 0 else None if kind == NO_GROUP else parts[0])
        if kind == INTEGER:
            found[-1] = int(parts[0][0])
    signature(getattr(BlockTables, verb)).bind(None, *found)  # as many as the verb takes
    return tuple(found)


def _resized(fields: list[Any]) -> tuple[tuple[Group, ...]]:
    """Return the argument of a resize: the groups that were taken."""
    try:
        groups = msgspec.msgpack.decode(as_bytes(fields[0]))
    except msgspec.DecodeError:
        raise ArgumentError("a record describes no groups", remedy="record the run again") from None
    return (make({"groups": groups, "max_rows": 1, "num_blocks": None}).groups,)
