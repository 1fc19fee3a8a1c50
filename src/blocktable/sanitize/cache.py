"""A sanitized ``KVCache``: each verb once more from its documentation, with the blocks that the cache took."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from blocktable._arrays import as_given
from blocktable._ints import lcm
from blocktable._sanitized import joined
from blocktable.cache import KVCache
from blocktable.delta import Delta
from blocktable.errors import BlockTableError, ConcurrentUse, LawBroken, NeverFits, OutOfBlocks
from blocktable.groups import Group
from blocktable.sanitize import usual
from blocktable.sanitize.blocks import Blocks
from blocktable.sanitize.findings import Report, caller
from blocktable.sanitize.laws import Broken, Ints, Unit, slots_broken, slots_of
from blocktable.sanitize.reading import CheckedTable, Looks, Reading, integers
from blocktable.sanitize.shadow import Shadow, Write, ragged
from blocktable.sanitize.tables import Committing, look_at_bytes, widths_broken
from blocktable.sanitize.usual import ANYTHING, NOTHING

KINDS = ("full", "window", "chunked")  # of groups whose usual step is compiled
ORDER = {"admit": ("rows", "indptr", "tokens", "salts", "limit"), "extend": ("rows", "indptr", "tokens")}
FEW = 8  # rows: a call of no more is looked at in every way there is
AUDITED = 64  # blocks: a pool of no more is recounted by its own check at every call, a larger one more rarely
_NONE = np.zeros(0, np.int64)


class CacheSanitizer(Looks):
    """The shadow of one ``KVCache``: rows, blocks, tokens and marks; ``report`` has what was found."""

    def __init__(self, cache: Any, report: Report) -> None:
        self.report = report
        self._cache = cache
        self._groups: Sequence[Group] = cache.groups
        tables = cache.tables
        self.units = [Unit.of(g, shape, tables.num_blocks) for g, shape in enumerate(tables.shapes)]
        self.shadow = Shadow(self.units, cache.max_rows, report)
        self.shadow.show(tables.tables)
        self.blocks = Blocks(cache.num_blocks)
        paged = [unit.span for unit in self.units if unit.kind != "state"]
        self._unit = lcm(*paged) if paged else 1
        self._caches = cache.prefix_cache and len(paged) == len(self.units)
        rows, groups = cache.max_rows, len(self.units)
        self.open = np.zeros(rows, np.int64)
        self.indexed = np.zeros(rows, np.int64)  # does what the row computes answer prompts
        self.length = np.zeros(rows, np.int64)
        self.final = np.zeros(rows, np.int64)
        self.known = np.zeros(rows, np.int64)  # leading tokens that are known
        self.salts: list[bytes] = [b""] * rows
        self.entered = np.zeros(rows, np.int64)  # tokens whose blocks' contents are written down
        self.number = np.zeros(rows, np.int64)  # of the prefix of so many tokens
        self.tokens = np.zeros((rows, 64), np.int64)
        self.gone = np.zeros((groups, rows), np.int64)  # leading blocks that a window gave up
        self.largest = longest(self._groups, cache.num_blocks - 1)
        self._marks = cache.lengths, cache.final
        self._steady = all(unit.kind in KINDS for unit in self.units)
        self._numbers = np.array([self._describe(g) for g in range(groups)], np.int64)
        self._writes: list[Write] = []
        self._calls = 0
        self._every = 1 if cache.num_blocks <= AUDITED else cache.num_blocks

    def _describe(self, g: int) -> list[int]:
        """Return a group's numbers, as the compiled loops take them."""
        unit = self.units[g]
        kind = KINDS.index(unit.kind) if unit.kind in KINDS else -1
        rank = self._cache.cp_rank if unit.ranks > 1 else 0
        shape = (unit.width, unit.block, unit.ranks, unit.interleave)
        return [kind, self._groups[g].window, *shape, rank, int(self.shadow.base[g])]

    def call(self, frame: Any, verb: str, real: Callable[..., Any], args: Any, named: Any) -> Any:
        """Run a verb of the cache, then its meaning, and compare."""
        args, named = tuple(map(as_given, args)), {name: as_given(value) for name, value in named.items()}
        self.shadow.begin(verb, frame)
        self._writes = []
        try:
            result = real(*args, **named)
        except ConcurrentUse:
            raise
        except BlockTableError as error:
            self._judge(verb, error, args, named)
            self._compare(_NONE, "a refused call left a trace")
            raise
        rows = getattr(self, f"_{verb}")(result, *args, **named)
        if named.get("headroom") and rows is not None and rows.size:
            self._kept(int(named["headroom"]))
        if rows is None:
            self.shadow.sweep()  # nothing unusual happened: what can still be wrong is elsewhere
        else:
            self._compare(rows)
        return result

    def _find(self, broken: Broken) -> None:
        touched = None
        if 0 < broken.block < self.blocks.owners.size and broken.law in ("L8", "L9", "L10"):
            touched = int(self.blocks.touched[broken.block])
        self.shadow.find(broken, touched)

    def _write(self, group: int, at: Ints, values: Any, rows: Ints, counts: Ints) -> None:
        write = Write(group, at, values, rows, counts)
        self._writes.append(write)
        self.shadow.write([write])

    # ---- after each call

    def _compare(self, rows: Ints, why: str = "") -> None:
        """Compare tables, lengths, marks and the pool's counts; recount the pool by its own check now and then."""
        shadow, cache = self.shadow, self._cache
        if why:
            shadow.sweep(why)
        else:
            shadow.compare(self._writes)
        if cache.max_rows <= AUDITED:
            rows = np.arange(cache.max_rows)
        if rows.size:
            self._compare_rows(rows)
        self._conserved(KVCache.stats(cache))
        self._calls += 1
        if self._calls % self._every == 0:
            try:
                KVCache.check(cache)
            except LawBroken as error:
                row, block = (int(error.values.get(name, -1)) for name in ("row", "block"))  # type: ignore[call-overload]
                self._find(Broken(error.law, error.message, -1, row, -1, block))
        if not shadow.clean:
            self._follow()

    def _compare_rows(self, rows: Ints) -> None:
        """Compare lengths and final marks."""
        cache = self._cache
        for name, law, there, right in (
            ("length", "L2", cache.lengths, self.length),
            ("final mark", "L10", cache.final, self.final),
        ):
            off = np.flatnonzero(there[rows] != right[rows])
            if off.size:
                row = int(rows[off[0]])
                self._find(Broken(law, f"the {name} is {there[row]}, it should be {right[row]}", row=row))

    def _kept(self, headroom: int) -> None:
        """L9: what a call was told to leave is there."""
        stats = KVCache.stats(self._cache)
        left = stats["free"] + stats["cached"]
        if left < headroom:
            self._find(Broken("L9", f"{headroom} blocks were to stay free, {left} are left"))

    def _conserved(self, stats: dict[str, int]) -> None:
        """L9: free, cached, held and fenced blocks are the whole pool, and as many as rows and fences say."""
        counts = {name: stats[name] for name in ("free", "cached", "held", "fenced")}
        usable = self.blocks.owners.size - 1
        if sum(counts.values()) != usable or min(counts.values()) < 0:
            self._find(Broken("L9", f"{counts} are not the {usable} blocks of the pool"))
        elif (counts["held"], counts["fenced"]) != (self.blocks.held, len(self.blocks.fenced)):
            right = f"rows hold {self.blocks.held}, {len(self.blocks.fenced)} are fenced"
            self._find(Broken("L9", f"{counts['held']} blocks count as held, {counts['fenced']} as fenced: {right}"))
        elif counts["cached"] and not self._caches:
            self._find(Broken("L9", f"{counts['cached']} blocks count as cached, and nothing is"))

    def _follow(self) -> None:
        """Take everything as it is, after a finding: one fault is to be found once."""
        cache = self._cache
        self.shadow.follow()
        self.length[:], self.final[:] = cache.lengths, cache.final
        self.known = np.clip(self.known, self.final, self.length)
        self.blocks.recount(self.shadow.entries)
        live = self.shadow.counts.any(axis=0)
        self.open |= live

    # ---- refusals

    def _judge(self, verb: str, error: BlockTableError, args: Any, named: Any) -> None:
        """Find a refusal for want of blocks or width where there were enough of both (L9)."""
        if not isinstance(error, (OutOfBlocks, NeverFits)) or verb not in ("admit", "extend"):
            return
        named = dict(zip(ORDER[verb], args, strict=False)) | named
        rows, indptr = integers(named["rows"]), integers(named["indptr"])
        sizes, begin = np.diff(indptr), self.length[rows] * (verb == "extend")
        if isinstance(error, NeverFits):
            if (begin + sizes <= self.largest).all():
                self._find(Broken("L9", f"refused for ever, though rows of {self.largest} tokens fit: {error.message}"))
            return
        if (begin + sizes > self.largest).any() and not named.get("partial"):
            self._find(Broken("L9", f"told to wait for blocks, though no pool of this size holds it: {error.message}"))
            return
        if named.get("limit") is not None:
            return  # what is computed lies behind what is cached, which is not known of a refused call
        # The most it can take, and the least there is: nothing found cached, no window moved.
        end = begin + sizes
        needed = 0
        for g in range(len(self.units)):
            held = self.shadow.counts[g, rows] * (verb == "extend")
            needed += int((self._columns(g, end) - held).sum())
            if verb == "extend":
                old = self._written(g, rows, begin, sizes > 0)[1]
                needed += int(np.count_nonzero(self.blocks.owners[old] > 1))
        there = self.blocks.owners.size - 1 - self.blocks.held - len(self.blocks.fenced)
        if needed + int(named.get("headroom", 0)) <= there:
            self._find(Broken("L9", f"refused for want of blocks: at most {needed} are needed, {there} can be had"))

    # ---- verbs

    def _lookup(self, result: Any, indptr: Any, tokens: Any, salts: Any = None) -> Ints:
        del tokens, salts
        self._check_hits(result, np.diff(integers(indptr)), np.full(len(result), -1))
        return _NONE

    def _match(self, result: Any, rows: Any, indptr: Any, tokens: Any, salts: Any = None) -> Ints:
        opened, starts, text = integers(rows), integers(indptr), integers(tokens)
        self._check_hits(result, np.diff(starts), opened)
        for i, row in enumerate(opened.tolist()):
            self._open(row, text[starts[i] : starts[i + 1]], int(result[i]), salts[i] if salts else None)
        return opened

    def _admit(
        self,
        result: Any,
        rows: Any,
        indptr: Any,
        tokens: Any,
        salts: Any = None,
        limit: Any = None,
        *,
        final: Any = None,
        headroom: int = 0,
    ) -> Ints:
        del headroom
        cached, slots = result
        opened, starts, text = integers(rows), integers(indptr), integers(tokens)
        self._check_hits(cached, np.diff(starts), opened)
        limits = np.broadcast_to(np.asarray(2**62 if limit is None else limit), opened.shape)
        marks = None if final is None else integers(final)
        at = 0
        for i, row in enumerate(opened.tolist()):
            prompt, begin = text[starts[i] : starts[i + 1]], int(cached[i])
            end = min(prompt.size, begin + int(limits[i]))
            self._open(row, prompt, begin, salts[i] if salts else None)
            one = np.array([row])
            mark = None if marks is None else marks[i : i + 1]
            self._lengthen(one, np.array([end - begin]), prompt[begin:end], mark, slots[:, at : at + end - begin])
            at += end - begin
        if slots.shape[1] != at:
            self._find(Broken("L7", f"{slots.shape[1]} slots for {at} tokens"))
        return opened

    def _extend(
        self,
        result: Any,
        rows: Any,
        indptr: Any,
        tokens: Any = None,
        *,
        final: Any = None,
        salts: Any = None,
        partial: bool = False,
        headroom: int = 0,
    ) -> Ints | None:
        del headroom
        wanted, starts = integers(rows), integers(indptr)
        slots, served = result if partial else (result, wanted.size)
        wanted, starts = wanted[:served], starts[: served + 1]
        if final is None and self._as_usual(wanted, starts, tokens, slots):
            return None
        for i in np.flatnonzero(self.open[wanted] == 0).tolist():
            self._start(int(wanted[i]), salts[i] if salts else None)
        text = None if tokens is None else integers(tokens)[: starts[-1]]
        self._lengthen(wanted, np.diff(starts), text, None if final is None else integers(final)[:served], slots)
        return wanted

    def _as_usual(self, rows: Ints, starts: Ints, tokens: Any, slots: Any) -> bool:
        """Follow a call in which nothing unusual happened; return False, having followed nothing, where something did."""
        if not self._steady or rows.size < FEW:
            return False
        shadow, blocks = self.shadow, self.blocks
        text = _NONE if tokens is None else integers(tokens)[: starts[-1]]
        lines = (rows, starts, self.length)
        most = usual.plain(*lines, self.final, self.known, text, self.open, self.largest, *self._marks)
        if not most:
            return False
        shadow.pool[usual.RETIRED], shadow.pool[usual.HELD] = blocks.retired, blocks.held
        held = (shadow.pool, blocks.owners, blocks.pins, blocks.fence, blocks.stamp)
        for g in range(len(self.units)):
            table = (shadow.counts[g], shadow.flat, *shadow.seen(g), self.gone[g])
            if not usual.as_it_should(self._numbers[g], *lines, self.final, *table, *held, slots[g]):
                return False
        for g in range(len(self.units)):
            note: Any = usual.note_blocks
            copies = (
                shadow.counts[g],
                shadow.sent_counts[g],
                shadow.flat,
                shadow.sent,
                shadow.touched,
                shadow.seen(g)[0],
            )
            note(self._numbers[g], *lines, *copies, *held[:2], blocks.touched)
        blocks.held = int(shadow.pool[usual.HELD])
        self._room(most)
        known = (self.final, self.known, text, self.tokens)
        usual.note_tokens(*lines, *known, self._numbers, shadow.flat, blocks.content)
        self._note_contents(rows)
        return True

    def _note_contents(self, rows: Ints) -> None:
        if self._caches:
            kept = (self.entered, self.number, self.tokens, self._numbers)
            usual.note_contents(rows, self.final, *kept, self.shadow.flat, self.blocks.content, self.indexed)

    def _confirm(self, result: Any, rows: Any, lengths: Any, indptr: Any = None, tokens: Any = None) -> Ints:
        del result
        wanted, marks = integers(rows), integers(lengths)
        starts, text = (integers(indptr), integers(tokens)) if tokens is not None else (None, None)
        for i, row in enumerate(wanted.tolist()):
            if starts is not None and text is not None:
                part = text[starts[i] : starts[i + 1]]
                held = self.tokens[row, self.final[row] : marks[i]]
                held[part >= 0] = part[part >= 0]
            unknown = np.flatnonzero(self.tokens[row, self.known[row] : self.length[row]] < 0)
            self.known[row] = self.known[row] + unknown[0] if unknown.size else self.length[row]
        self._marked(wanted, marks)
        self._advance(wanted, self.final[wanted])
        return wanted

    def _truncate(self, result: Any, rows: Any, lengths: Any, fence: int | None = None) -> Ints:
        del result
        wanted, ends = integers(rows), integers(lengths)
        dropped = []
        for g in range(len(self.units)):
            before = self.shadow.counts[g, wanted]
            after = np.minimum(self._columns(g, ends), before)
            dropped.append(self._emptied(g, wanted, after, before, after))
        self.blocks.drop(np.concatenate(dropped), fence, self.shadow.log.last)
        self.length[wanted] = ends
        self.final[wanted] = np.minimum(self.final[wanted], ends)
        self.known[wanted] = np.minimum(self.known[wanted], ends)
        for row in wanted[self.entered[wanted] > self.final[wanted]].tolist():
            found = self._numbers_of(self.tokens[row, : self.final[row]], self.salts[row])
            self.entered[row], self.number[row] = found.size, found[-1] if found.size else _number(self.salts[row])
        return wanted

    def _free(self, result: Any, rows: Any, fence: int | None = None) -> Ints:
        del result
        wanted = integers(rows)
        none = np.zeros(wanted.size, np.int64)
        for g in range(len(self.units)):
            blocks = self._emptied(g, wanted, none, self.shadow.counts[g, wanted], none)
            self.blocks.drop(blocks, fence, self.shadow.log.last)
        self.open[wanted] = False
        self.length[wanted] = self.final[wanted] = self.known[wanted] = 0
        self.gone[:, wanted] = 0
        self.entered[wanted] = 0
        return wanted

    def _retire(self, result: Any, n: int) -> Ints:
        del result
        self.blocks.retire(int(n))
        return _NONE

    def _fork(self, result: Any, row: int, into: int) -> Ints:
        del result
        row, into = int(row), int(into)  # an index out of uint64 and int64 would be a float
        for g, unit in enumerate(self.units):
            live = self.shadow.entries[g][row, : self.shadow.counts[g, row]].astype(np.int64)
            self.blocks.adopt(live[live > 0], self.shadow.log.last)
            at = self.shadow.place(g, into, 0) + np.arange(live.size)
            self._write(unit.group, at, live, np.array([into]), np.array([live.size]))
        for array in (self.length, self.final, self.known, self.entered, self.number, self.open, self.indexed):
            array[into] = array[row]
        self.gone[:, into] = self.gone[:, row]
        self.tokens[into] = self.tokens[row]
        self.salts[into] = self.salts[row]
        return np.array([into])

    def _reset_prefix(self, result: Any) -> Ints:
        del result
        self.blocks.content[:] = NOTHING
        self.indexed[:] = 0
        return _NONE

    def committed(self, delta: Delta) -> None:
        """Look at a delta: copies that had to be (L8), and what it makes of a replica (L11)."""
        shadow = self.shadow
        wanted, given = sorted(self.blocks.commit()), sorted(map(tuple, delta.copies.tolist()))
        if wanted != given:
            group, source, _ = next(iter(set(wanted) ^ set(given)))
            self._find(Broken("L8", f"copies to be run are {wanted}, the delta has {given}", group, block=source))
        if delta.seq != shadow.step + 1:
            self._find(Broken("L11", f"delta {delta.seq} follows {shadow.step}"))
        for broken in shadow.apply(delta):
            self._find(broken)
        shadow.committed()
        look_at_bytes(shadow, delta)
        self._writes = []
        self._compare(_NONE)

    def close(self) -> None:
        """Report what was never given back (L9): rows in use, blocks held or fenced."""
        self.shadow.begin("close", caller(1))
        self._writes = []
        self._compare(np.arange(self.length.size))
        if self.open.any():
            row = int(np.flatnonzero(self.open)[0])
            self._find(Broken("L9", f"{np.count_nonzero(self.open)} rows are still in use", row=row))
        elif self.blocks.held or self.blocks.fenced:
            some = next(iter(self.blocks.fenced), -1)
            said = f"{self.blocks.held} blocks are held by no row, {len(self.blocks.fenced)} wait for their fence"
            self._find(Broken("L9", said, block=some))

    # ---- parts of verbs

    def _columns(self, g: int, tokens: Any) -> Ints:
        """Return the entries of rows of so many tokens."""
        if self.units[g].kind == "state":
            return np.where(tokens > 0, self._groups[g].state_blocks, 0)
        return -(-np.asarray(tokens) // self.units[g].span)

    def _check_hits(self, cached: Any, lengths: Ints, rows: Ints) -> None:
        """Find a hit that is no whole number of units, or that leaves nothing to compute (L10)."""
        allowed = np.maximum(lengths - 1, 0) * self._caches
        bad = np.flatnonzero((cached < 0) | (cached > allowed) | (cached % self._unit != 0))
        if bad.size:
            i = int(bad[0])
            said = f"{cached[i]} of {lengths[i]} tokens are found cached, in units of {self._unit}"
            self._find(Broken("L10", said, row=int(rows[i])))

    def _start(self, row: int, salt: bytes | None) -> None:
        """Open a row, empty."""
        if self.open[row]:
            self._find(Broken("L8", "a row in use is opened again", row=row))
        self.open[row] = self.indexed[row] = 1
        self.salts[row] = salt or b""
        self.entered[row], self.number[row] = 0, _number(self.salts[row])

    def _open(self, row: int, prompt: Ints, cached: int, salt: bytes | None) -> None:
        """Open a row on a cached prefix: each block must contain just those tokens, that history and that salt (L10)."""
        self._start(row, salt)
        self._room(cached)
        self.tokens[row, :cached] = prompt[:cached]
        self.length[row] = self.final[row] = self.known[row] = cached
        one = np.array([row])
        prefixes = self._numbers_of(prompt[:cached], self.salts[row])
        if cached:
            self.entered[row], self.number[row] = cached, prefixes[-1]
        for g, unit in enumerate(self.units):
            if unit.kind == "state":
                continue
            columns = cached // unit.span
            dead = min(int(self._dead(g, np.array([cached]))[0]), columns)
            at = self.shadow.place(g, row, 0) + np.arange(columns)
            ids = self.shadow.observed(g, at).astype(np.int64)
            self._adopt(g, row, prefixes[unit.span - 1 :: unit.span] ^ g, dead, ids)
            self.gone[g, row] = dead
            ids[:dead] = 0
            self._write(g, at, ids, one, np.array([columns]))

    def _adopt(self, g: int, row: int, numbers: Ints, dead: int, ids: Ints) -> None:
        """Take over blocks behind the ``dead`` ones, which must contain prefixes of these numbers."""
        columns = np.arange(dead, ids.size)
        ids = ids[dead:]
        inside = (ids > 0) & (ids < self.blocks.owners.size)
        found = self.blocks.content[np.where(inside, ids, 0)]
        wrong = np.flatnonzero(~inside | ((found != numbers[dead:]) & (found != ANYTHING)))
        if wrong.size:
            i = int(wrong[0])
            what = "contains nothing that is final" if found[i] == NOTHING else "contains something else"
            said = f"a hit of {self.length[row]} tokens takes block {ids[i]}, which {what}"
            self._find(Broken("L10", said, g, row, int(columns[i]), int(ids[i])))
        self.blocks.adopt(ids[inside], self.shadow.log.last)

    def _numbers_of(self, tokens: Ints, salt: bytes) -> Ints:
        """Return the number of each prefix of a prompt under its salt."""
        found = np.empty(tokens.size, np.int64)
        usual.numbers(_number(salt), np.ascontiguousarray(tokens), found)
        return found

    def _lengthen(self, rows: Ints, sizes: Ints, text: Ints | None, marks: Ints | None, slots: Any) -> None:
        """Windows first, then blocks, then tokens and slots, then the marks."""
        begin = self.length[rows]
        end = begin + sizes
        if sizes.size and (end > self.largest).any():
            i = int(np.argmax(end))
            said = f"{end[i]} tokens are accepted, no row can hold more than {self.largest}"
            self._find(Broken("L2", said, row=int(rows[i])))
        marks_before, growing = np.minimum(self.final[rows], begin), sizes > 0
        # Row after row where that makes a difference: a row copies what it shares with one whose window moves on after it.
        alone = self._lets_go_of_shared(rows, marks_before)
        for turn in [slice(i, i + 1) for i in range(rows.size)] if alone else [slice(None)]:
            some = rows[turn]
            self._advance(some, marks_before[turn])
            for g in range(len(self.units)):
                self._rewritten(g, some, begin[turn], growing[turn])
                after = np.where(growing[turn], self._columns(g, end[turn]), self.shadow.counts[g, some])
                self._grown(g, some, after)
        self._room(int(end.max()) if end.size else 0)
        at = ragged(rows * self.tokens.shape[1] + begin, sizes)
        self.tokens.reshape(-1)[at] = -1 if text is None else text
        self.length[rows] = end
        self._learn(rows, begin, end, text)
        self._slotted(rows, begin, sizes, slots)
        self._marked(rows, self.known[rows] if marks is None else marks)

    def _learn(self, rows: Ints, begin: Ints, end: Ints, text: Ints | None) -> None:
        """Move the number of leading known tokens on."""
        if text is None:
            return
        whole = self.known[rows] == begin
        if not text.size or text.min() >= 0:
            self.known[rows] = np.where(whole, end, self.known[rows])
            return
        for i in np.flatnonzero(whole).tolist():
            part = self.tokens[rows[i], begin[i] : end[i]]
            unknown = np.flatnonzero(part < 0)
            self.known[rows[i]] = begin[i] + unknown[0] if unknown.size else end[i]

    def _room(self, tokens: int) -> None:
        if tokens > self.tokens.shape[1]:
            wider = np.zeros((len(self.tokens), max(tokens, 2 * self.tokens.shape[1])), np.int64)
            wider[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = wider

    def _dead(self, g: int, marks: Ints) -> Ints:
        """Return the leading blocks that a group no longer reads once so many tokens are final."""
        window = self._groups[g].window
        if self.units[g].kind == "window":
            return np.maximum(marks - window + 1, 0) // self.units[g].span
        if self.units[g].kind == "chunked":
            return marks // window * window // self.units[g].span
        return np.zeros_like(marks)

    def _moves(self, rows: Ints, marks: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each windowed group that moves on, with the leading blocks that its rows gave up before, and do now."""
        for g, unit in enumerate(self.units):
            if unit.kind not in ("window", "chunked"):
                continue
            gone = self.gone[g, rows]
            dead = np.maximum(np.minimum(self._dead(g, marks), self.shadow.counts[g, rows]), gone)
            if (dead > gone).any():
                yield g, gone, dead

    def _lets_go_of_shared(self, rows: Ints, marks: Ints) -> bool:
        """Say whether windows that move on give up blocks that other rows hold too."""
        for g, gone, dead in self._moves(rows, marks):
            at = ragged(self.shadow.base[g] + rows * self.units[g].width + gone, dead - gone)
            blocks = self.shadow.flat[at]
            inside = blocks[(blocks > 0) & (blocks < self.blocks.owners.size)]
            if (self.blocks.owners[inside] > 1).any():
                return True
        return False

    def _advance(self, rows: Ints, marks: Ints) -> None:
        """Take from windows what they no longer read."""
        for g, gone, dead in self._moves(rows, marks):
            blocks = self._emptied(g, rows, gone, dead, self.shadow.counts[g, rows])
            self.blocks.drop(blocks, None, self.shadow.log.last)
            self.gone[g, rows] = dead

    def _emptied(self, g: int, rows: Ints, begin: Ints, end: Ints, counts: Ints) -> Ints:
        """Make entries null; return the blocks that were there."""
        at = ragged(self.shadow.base[g] + rows * self.units[g].width + begin, np.maximum(end - begin, 0))
        blocks = self.shadow.flat[at].astype(np.int64)
        self._write(g, at, np.zeros(at.size, np.int64), rows, counts)
        return blocks[blocks > 0]

    def _rewritten(self, g: int, rows: Ints, begin: Ints, growing: Any) -> None:
        """Follow the blocks that exist and that tokens from ``begin`` on are written into; shared ones are copied (L8)."""
        at, old, each, columns = self._written(g, rows, begin, growing)
        if (self.blocks.owners[old] > 1).any():
            new = self.shadow.observed(g, at).astype(np.int64)
            for i in range(old.size):
                if self.blocks.owners[old[i]] > 1:
                    self._copied(g, int(each[i]), int(columns[i]), int(old[i]), int(new[i]))
                    old[i] = new[i]
            self._write(g, at, new, each, self.shadow.counts[g, each])
        inside = old[(old > 0) & (old < self.blocks.owners.size)]
        self.blocks.content[inside] = NOTHING

    def _written(self, g: int, rows: Ints, begin: Ints, growing: Any) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the entries that exist and that tokens from ``begin`` on are written into: place, block, row, column."""
        unit, counts = self.units[g], self.shadow.counts[g, rows]
        if unit.kind == "state":
            sizes = np.where(growing, counts, 0)
            each, columns = np.repeat(rows, sizes), ragged(np.zeros_like(sizes), sizes)
        else:
            partly = growing & (begin % unit.span != 0)
            each, columns = rows[partly], begin[partly] // unit.span
        at = self.shadow.base[g] + each * unit.width + columns
        return at, self.shadow.flat[at].astype(np.int64), each, columns

    def _copied(self, g: int, row: int, column: int, old: int, new: int) -> None:
        """Follow one copy-on-write."""
        if new == old:
            said = f"block {old} is written in place while {self.blocks.owners[old]} rows hold it"
            self._find(Broken("L8", said, g, row, column, old))
            return
        one = np.array([row]), np.array([column]), np.array([new])
        for broken in self.blocks.take(g, *one, self.shadow.log.last):
            self._find(broken)
        self.blocks.copy(g, old, new)
        self.blocks.drop(np.array([old]), None, self.shadow.log.last)

    def _grown(self, g: int, rows: Ints, after: Ints) -> None:
        """Follow the blocks that rows are given behind those they have."""
        before = self.shadow.counts[g, rows]
        if (after == before).all():
            return
        sizes = np.maximum(after - before, 0)
        columns, each = ragged(before, sizes), np.repeat(rows, sizes)
        at = self.shadow.base[g] + each * self.units[g].width + columns
        ids = self.shadow.observed(g, at).astype(np.int64)
        for broken in self.blocks.take(g, each, columns, ids, self.shadow.log.last):
            self._find(broken)
        self._write(g, at, ids, rows, after)

    def _slotted(self, rows: Ints, begin: Ints, sizes: Ints, slots: Any) -> None:
        """Look at the slots that the call returned (L6, L7, L13), and at who else holds their blocks (L8)."""
        where, token_row = ragged(begin, sizes), np.repeat(rows, sizes)
        for g, unit in enumerate(self.units):
            if slots[g].size != where.size:
                self._find(Broken("L7", f"{slots[g].size} slots for {where.size} tokens", g))
                continue
            rank = self._cache.cp_rank if unit.ranks > 1 else 0
            right = slots_of(unit, self.shadow.entries[g], self.shadow.counts[g], token_row, where, rank)
            if (slots[g] != right).any():
                for broken in slots_broken(unit, slots[g], right, where, token_row, rank):
                    self._find(broken)
                continue
            blocks = np.maximum(right, 0) // unit.block
            shared = np.flatnonzero((self.blocks.owners[blocks] > 1) & (right >= 0))
            if shared.size:
                block, row = int(blocks[shared[0]]), int(token_row[shared[0]])
                said = f"block {block} is written while {self.blocks.owners[block]} rows hold it"
                self._find(Broken("L8", said, g, row, block=block))

    def _marked(self, rows: Ints, marks: Ints) -> None:
        """Raise final marks, and write down what the blocks wholly below them contain."""
        self.final[rows] = np.maximum(self.final[rows], marks)
        late = np.flatnonzero(self.final[rows] > self.known[rows])
        if late.size:
            row = int(rows[late[0]])
            said = f"the mark passes position {self.known[row]}, whose token is not known"
            self._find(Broken("L10", said, row=row))
        self._note_contents(rows)


def _number(salt: bytes) -> int:
    """Return the number of an empty prefix under a salt."""
    return hash(salt) & (2**62 - 1) if salt else 2


def longest(groups: Sequence[Group], usable: int) -> int:
    """Return the most tokens of a row that every width holds and that an empty pool can."""

    def fits(tokens: int) -> bool:
        held = 0
        for group in groups:
            span = group.geometry.block_size * group.geometry.cp_size
            columns = -(-tokens // span)
            if group.kind == "state":
                held += group.state_blocks
                continue
            if columns > group.geometry.width:
                return False
            held += min(columns, -(-group.window // span) + 1) if group.window else columns
        return held <= usable

    paged = [g.geometry.width * g.geometry.block_size * g.geometry.cp_size for g in groups if g.kind != "state"]
    low, high = 0, min(paged or [g.geometry.max_model_len + g.geometry.lookahead for g in groups])
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# ---- the classes that take the place of those constructed


class SanitizedCacheTables(Reading):
    """Comes before ``CacheTables`` in the class of a sanitized cache's tables."""


def _verb(name: str) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        real = getattr(super(SanitizedCache, self), name)
        return self.sanitizer.call(caller(1), name, real, args, named)

    checked.__name__ = name
    return checked


class SanitizedCache(Committing):
    """Comes before ``KVCache`` in the class of sanitized ones."""

    def __init__(self, *args: Any, sanitize: Any = None, **named: Any) -> None:
        super().__init__(*args, **named)
        cache: Any = self
        kind = type(cache.tables)
        cache.tables.__class__ = joined(kind, kind, SanitizedCacheTables)
        cache.tables.tables = tuple(CheckedTable(cache.tables, g) for g in range(len(cache.groups)))
        self.sanitizer = cache.tables.sanitizer = CacheSanitizer(cache, Report.of(sanitize))
        self.sanitizer.shadow.begin("KVCache", caller(1))
        for broken in widths_broken(cache.groups, cache.tables.tables):
            self.sanitizer.shadow.find(broken)


for _name in ("lookup", "match", "admit", "extend", "confirm", "truncate", "free", "retire", "fork", "reset_prefix"):
    setattr(SanitizedCache, _name, _verb(_name))
