"""The KV cache of an engine, on the host: pool, prefix index and block tables behind one set of verbs.

    cache = KVCache([geometry], num_blocks=4096, max_rows=256)
    cached, slots = cache.admit(rows, indptr, prompts)     # open rows on the longest cached prefixes
    slots = cache.extend(rows, indptr, tokens)             # one step: decode, drafts or a chunk, tokens now or later
    delta = cache.commit()                                 # what changed, for devices and other processes
    cache.free(rows)                                       # blocks go back; what they hold answers later prompts

Every verb is batched and one compiled call, checks everything before it changes anything, and is all or nothing.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from blocktable import _admit_kernels as a
from blocktable import _cache_kernels as v
from blocktable import _cache_layout as c
from blocktable import _extend_kernels as e
from blocktable import _kernels as k
from blocktable import _pool_kernels as pool
from blocktable import _prefix_kernels as index
from blocktable._arrays import as_flag, as_int64, is_integer
from blocktable._cache_audit import audit
from blocktable._cache_faults import refusal, short
from blocktable._cache_plan import Plan, span
from blocktable._copying import Uncopied
from blocktable._journal import LINE, NO_JOURNAL, JournalFull, is_full, is_usual, is_usual_admit
from blocktable._sanitized import Sanitizable
from blocktable.delta import NO_COPIES, Delta
from blocktable.errors import ArgumentError
from blocktable.groups import KINDS, Group, as_groups
from blocktable.state import GroupTable
from blocktable.tables import BlockTables

__all__ = ["KVCache"]

_I32 = np.dtype(np.int32)
_NONE = np.zeros(0, np.int64)
_NO_SLOTS = np.zeros((1, 0), np.int64)
_MOST_BLOCKS = 2**29  # of 16 tokens a cache of them takes 90 GB here
_MOST_EPOCHS = 2**30  # fences are numbered in int32, anew once so many are done
_NO_SALT = 1  # the root of rows without a salt


class CacheTables(BlockTables):
    """The tables of a cache, to be read and mirrored: what changes them are the verbs of the cache."""

    def _closed(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            "these tables belong to a KVCache, whose verbs alone change them",
            law="L9",
            remedy="use admit, extend, truncate, free, fork and commit of the cache",
        )

    def __getitem__(self, group: int) -> GroupTable:
        """Return one group's table: ``cache.tables[g].array``."""
        return self.tables[group]

    append = assign = truncate = clear = release = move = swap = copy = resize = commit = _closed


class KVCache(Uncopied, Sanitizable):
    """Pool, prefix index and host tables of all groups of a model.

    ``groups`` is a sequence of ``Group`` or ``Geometry`` (no rings); ``num_blocks`` counts the null block. Row numbers are
    the caller's; a row is in use from the first ``match``, ``admit`` or ``extend`` on it until ``free``. One thread owns the
    object. Raises NeverFits when the pool cannot hold one row of ``max_model_len``. State: 32 bytes per block, 72 per node
    of the index and 4 per token, for about as many nodes as there are blocks.

    >>> import blocktable
    >>> cache = KVCache([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
    >>> cached, slots = cache.admit([0], [0, 6], [5, 6, 7, 8, 9, 10])
    >>> cached.tolist(), slots.tolist()
    ([0], [[4, 5, 6, 7, 8, 9]])
    >>> cache.extend([0], [0, 1], [11]).tolist()
    [[10]]
    >>> cache.free([0])
    >>> cached, slots = cache.admit([1], [0, 6], [5, 6, 7, 8, 1, 2])
    >>> cached.tolist(), cache.tables.tables[0].array[1, :3].tolist()
    ([4], [1, 2, 0])
    """

    copy_instead = "make another one; a mirror of its tables is a Replica, fed by snapshot() and deltas"

    def __init__(
        self,
        groups: Any,
        *,
        num_blocks: int,
        max_rows: int,
        prefix_cache: bool = True,
        cp_rank: int = 0,
        sanitize: Any = None,  # noqa: ARG002 - read by __new__
    ) -> None:
        self.groups: tuple[Group, ...] = as_groups(groups)
        self.num_blocks = _integer(num_blocks, "num_blocks", 1)
        if self.num_blocks > _MOST_BLOCKS:
            raise ArgumentError(
                f"num_blocks is {num_blocks}, outside 1..{_MOST_BLOCKS}",
                law="L9",
                values={"num_blocks": self.num_blocks, "largest": _MOST_BLOCKS},
                remedy="make larger blocks: lists and nodes of the pool are numbered in int32",
            )
        self._plan = plan = Plan.of(self.groups, self.num_blocks - 1)
        ranks = max(group.geometry.cp_size for group in self.groups)
        if _integer(cp_rank, "cp_rank", 0) >= ranks:
            raise ArgumentError(
                f"rank {cp_rank} is outside 0..{ranks - 1}",
                law="L13",
                values={"cp_rank": cp_rank, "cp_size": ranks},
                remedy="pass this process's rank in its context-parallel group",
            )
        self.prefix_cache, self.cp_rank = bool(prefix_cache), int(cp_rank)
        self.tables = CacheTables(self.groups, max_rows=max_rows, num_blocks=self.num_blocks)
        self.max_rows = self.tables.max_rows
        self._busy, self._sole = self.tables._busy, self.tables._sole
        parts = self._describe_groups()
        # A node per block, and the drafts of a large step: more are made room for when a call finds them short.
        slots = self.num_blocks // parts + 2 * self.max_rows + 64 + 2**17 // plan.unit
        meta = np.zeros(c.META_FIELDS, np.int64)
        meta[c.NUM_BLOCKS] = meta[c.BLOCKLESS_MOST] = self.num_blocks
        meta[c.FREE], meta[c.FRESH], meta[c.SLOT_FRESH] = self.num_blocks - 1, 1, 1
        meta[c.UNIT], meta[c.WORDS], meta[c.PARTS] = plan.unit, 1, parts
        meta[c.INDEXED] = bool(prefix_cache) and all(group.kind != "state" for group in self.groups)
        meta[c.SEED] = int.from_bytes(os.urandom(8), "little") >> 2
        meta[c.RANK], meta[c.LARGEST] = cp_rank, plan.largest
        blocks = np.zeros((self.num_blocks + 1) * c.BLOCK_FIELDS, np.int32)
        end = self.num_blocks * c.BLOCK_FIELDS
        blocks[end + c.NEXT] = blocks[end + c.PREV] = self.num_blocks
        nodes = np.zeros(slots * (c.NODE_FIELDS + parts), np.int64)
        buckets = np.zeros(1 << slots.bit_length(), np.int32)
        store = np.zeros(slots * plan.unit, np.int32)
        lines = np.zeros(self.max_rows * c.LINE_FIELDS, np.int64)
        self._meta, self._lines = meta, lines
        self._core: c.Core = self._assembled(blocks, nodes, buckets, store, np.zeros(3 * 64, np.int32))
        self._path = np.zeros(plan.largest // plan.unit + len(self.groups) + 1, np.int64)
        self._unlimited = np.full(self.max_rows, c.NO_LIMIT, np.int64)
        fields = lines.reshape(self.max_rows, c.LINE_FIELDS)
        self.lengths = _sealed(fields[:, c.LENGTH])
        self.final = _sealed(fields[:, c.FINAL])
        self._roots: dict[bytes, int] = {}
        self._sweep_at = 64
        self._fences: list[int] = []  # not retired, rising; the last one given stays on as _last_fence
        self._epochs: list[int] = []
        self._last_fence: int | None = None
        self._retired: int | None = None
        self._cells = self._delta_bytes = 0
        self._journal = NO_JOURNAL
        self._new_root()

    def _describe_groups(self) -> int:
        """Add to the tables' constants what the cache needs of each group; return the parts of a node."""
        info, parts = self.tables._info, 0
        for g, group in enumerate(self.groups):
            state = group.kind == "state"
            if state and group.state_blocks > group.geometry.width:
                raise ArgumentError(
                    f"group {g} has {group.state_blocks} state blocks per row, its width is {group.geometry.width}",
                    law="L2",
                    values={"group": g, "state_blocks": group.state_blocks, "width": group.geometry.width},
                    remedy="plan it with extra_blocks for what it holds beyond the tokens' blocks",
                )
            dense = 0 if state else self._plan.unit // span(group)
            info[g, c.SPAN], info[g, c.REACH] = span(group), group.window
            info[g, c.FIXED] = group.state_blocks if state else 1
            info[g, c.DENSE], info[g, c.SEAT_BASE] = dense, parts
            parts += dense
        return max(parts, 1)

    def _assembled(self, blocks: Any, nodes: Any, buckets: Any, store: Any, copies: Any) -> c.Core:
        t = self.tables
        return (
            t._info,
            t._state,
            t._entries,
            t._dirty,
            self._meta,
            blocks,
            nodes,
            buckets,
            store,
            self._lines,
            copies,
        )

    # Rows and steps

    def lookup(self, indptr: Any, tokens: Any, salts: Any = None) -> NDArray[np.int64]:
        """Return how many leading tokens of each prompt are cached, int64 [n]; changes nothing.

        A multiple of the unit, and never the whole prompt: its last token is left to compute. Cost: one compare per
        token found.
        """
        return self._find("lookup", _NONE, indptr, tokens, salts, a.LOOKUP)

    def match(self, rows: Any, indptr: Any, tokens: Any, salts: Any = None) -> NDArray[np.int64]:
        """Open unused rows on the longest cached prefixes of prompts; return the tokens each now holds, int64 [n].

        Raises ArgumentError for a row in use (L8). Cost: as ``lookup``, and a few nanoseconds per block adopted.
        """
        return self._find("match", rows, indptr, tokens, salts, a.MATCH)

    def _find(self, verb: str, rows: Any, indptr: Any, tokens: Any, salts: Any, mode: int) -> NDArray[np.int64]:
        with self._sole(verb):
            wanted, starts = as_int64(rows, "rows"), as_int64(indptr, "indptr")
            n = max(starts.size - 1, 0)
            roots = self._salted(verb, salts, n, create=mode != a.LOOKUP)
            cached = np.empty(n, np.int64)
            journal = self._journal if salts is None and mode == a.LOOKUP else NO_JOURNAL
            self._admit(verb, wanted, starts, tokens, mode, _NONE, _NONE, roots, 0, cached, _NO_SLOTS, journal)
            return cached

    def admit(
        self,
        rows: Any,
        indptr: Any,
        tokens: Any,
        salts: Any = None,
        limit: Any = None,
        *,
        final: Any = None,
        headroom: int = 0,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Open unused rows on the cached prefixes of prompts and make room for what is to be computed behind them.

        ``limit`` is the most tokens computed per row (an integer or one per row; the rest comes by ``extend``).
        ``final`` [n] is as in ``extend``, no more than the row will hold; the mark never lies below what was cached. Returns the
        cached tokens, int64 [n], and the slots of the positions cached[i] .. min(len_i, cached[i] + limit_i) - 1, row
        after row, int64 [groups, tokens]. All or nothing: raises OutOfBlocks when the pool is short (``headroom`` blocks
        are to stay free), NeverFits for a prompt that no empty pool could hold, ArgumentError for a row in use. Cost:
        one pass over the tokens; for several rows under pressure, a copy of the state beside.
        """
        with self._sole("admit"):
            wanted, starts = as_int64(rows, "rows"), as_int64(indptr, "indptr")
            n = max(starts.size - 1, 0)
            finals = _NONE if final is None else _per_row("admit", final, "final", n)
            limits = self._unlimited if limit is None else _per_row("admit", limit, "limit", n)
            if type(headroom) is not int or headroom:
                headroom = min(_integer(headroom, "headroom", 0), c.NO_LIMIT)
            roots = _NONE if salts is None else self._salted("admit", salts, n, create=True)
            room = int(starts[-1]) if n else 0
            if limit is not None:
                room = int(np.minimum(np.diff(starts), limits).sum())
            room = max(0, min(room, self._plan.largest * n))  # prompts of more are refused
            cached, slots = np.empty(n, np.int64), np.empty((len(self.groups), room), np.int64)
            journal = self._journal if is_usual_admit(salts, limit, final) else NO_JOURNAL
            self._admit(
                "admit", wanted, starts, tokens, a.ADMIT, limits, finals, roots, headroom, cached, slots, journal
            )
            written = self._meta[c.TOKENS]
            return cached, slots if written == room else slots[:, :written].copy()

    def _admit(
        self,
        verb: str,
        rows: Any,
        starts: Any,
        tokens: Any,
        mode: int,
        limits: Any,
        finals: Any,
        roots: Any,
        headroom: int,
        cached: Any,
        slots: Any,
        journal: Any,
    ) -> None:
        words, first, saved = self._words(tokens), 0, None
        while True:
            code = a.admit(
                *self._core,
                rows,
                starts,
                *words,
                mode,
                limits,
                finals,
                roots,
                headroom,
                first,
                saved is not None,
                self._path,
                cached,
                slots,
                journal,
            )
            if code == k.OK:
                return
            if code == c.GROW:
                first = int(self._meta[c.SERVED])
                self._grow(int((starts[first + 1] - starts[first]) // self._plan.unit) + 4)
            elif code == c.WIDEN:
                self._widen(verb, tokens)
                words = self._words(tokens)
            elif code == c.SAVE:
                saved = self._core, [array.copy() for array in self._core]
            else:
                error = self._refused(code, verb, rows, headroom)
                if saved:
                    self._restore(*saved)
                raise error

    def extend(
        self,
        rows: Any,
        indptr: Any,
        tokens: Any = None,
        *,
        final: Any = None,
        salts: Any = None,
        partial: bool = False,
        headroom: int = 0,
    ) -> Any:
        """Lengthen row rows[i] by indptr[i + 1] - indptr[i] tokens; return their slots, int64 [groups, n].

        Decode (one token), drafts (several) and chunks of a prompt alike. ``tokens`` (int32 or int64): -1, or None for
        all, where not yet known. ``final`` [n] is the length up to which each row's tokens are final and computed; without
        it, up to the row's first unknown token. Raises OutOfBlocks, changing nothing; with ``partial`` the first rows
        that fit are served instead, and the number of rows comes beside the slots. ``headroom`` blocks are to stay free.
        NeverFits: a row longer than its width or the pool allow. Cost: a few nanoseconds per row that stays within its
        block, about 100 for one that does not.
        """
        if self._busy.locked():  # as ``_sole`` does, without its call: every step comes here
            self.tables._await("extend")
        with self._busy:
            wanted, starts = as_int64(rows, "rows"), as_int64(indptr, "indptr")
            words, stride = (e.UNKNOWN, 0) if tokens is None else self._words(tokens)
            finals = _NONE if final is None else _per_row("extend", final, "final", wanted.size)
            roots = _NONE if salts is None else self._salted("extend", salts, wanted.size, create=True)
            if type(headroom) is not int or headroom:
                headroom = min(_integer(headroom, "headroom", 0), c.NO_LIMIT)
            if partial is not False:
                partial = as_flag("extend", partial, "partial", "pass partial=True to serve the first rows that fit")
            total = int(starts[-1]) if starts.size else 0
            total = max(0, min(total, self._plan.largest * wanted.size))  # rows of more are not served
            slots = np.empty((len(self.groups), total), np.int64)
            journal = self._journal
            if journal is not NO_JOURNAL and not is_usual(final, salts, partial, headroom):
                journal = NO_JOURNAL
            code = e.extend(
                *self._core, wanted, starts, words, stride, finals, roots, headroom, partial, slots, journal
            )
            while code != k.OK:
                if code == c.GROW:
                    self._grow(int(self._meta[c.NEEDED]))
                elif code == c.WIDEN:
                    self._widen("extend", tokens)
                    words, stride = self._words(tokens)
                else:
                    raise self._refused(code, "extend", wanted, headroom)
                code = e.extend(
                    *self._core, wanted, starts, words, stride, finals, roots, headroom, partial, slots, journal
                )
            if not partial:
                return slots
            served = int(self._meta[c.SERVED])
            return slots if served == wanted.size else slots[:, : starts[served]].copy(), served

    def confirm(self, rows: Any, lengths: Any, indptr: Any = None, tokens: Any = None) -> None:
        """Raise the final marks of rows to lengths[i]; windows move on at once.

        tokens[indptr[i] : indptr[i + 1]], if given, are those of positions final[row] .. lengths[i] - 1 and replace what
        was held there; -1 keeps it. Raises ArgumentError, changing nothing, for a length below the mark or past the row,
        and where a token below the new mark would stay unknown (L10). Cost: one pass over the tokens.
        """
        with self._sole("confirm"):
            wanted = as_int64(rows, "rows")
            marks = _per_row("confirm", lengths, "lengths", wanted.size)
            if (indptr is None) != (tokens is None):
                raise ArgumentError("confirm: indptr and tokens come together", remedy="pass both or neither")
            starts, words = _NONE, (e.UNKNOWN, 0)
            if tokens is not None:
                starts, words = as_int64(indptr, "indptr"), self._words(tokens)
            code = v.confirm(*self._core, wanted, marks, starts, *words)
            if code == c.WIDEN:
                self._widen("confirm", tokens)
                code = v.confirm(*self._core, wanted, marks, starts, *self._words(tokens))
            if code != k.OK:
                raise self._refused(code, "confirm", wanted, 0)

    def truncate(self, rows: Any, lengths: Any, fence: int | None = None) -> None:
        """Cut rows to lengths[i] tokens: drafts that were rejected, or a history to go on from elsewhere.

        Blocks beyond go back, after ``retire`` of ``fence`` where one is given; a unit that is cut through is no prefix of
        the index any more, unless another row holds it whole. Raises ArgumentError, naming the least possible length,
        below what a window gave back or, with a state group, below the final mark. Cost: the blocks that go.
        """
        with self._sole("truncate"):
            wanted = as_int64(rows, "rows")
            self._shorten("truncate", wanted, _per_row("truncate", lengths, "lengths", wanted.size), fence, close=0)

    def free(self, rows: Any, fence: int | None = None) -> None:
        """Take rows out of use. Blocks with a cached prefix become idle, the leaves first to be evicted; others are free.

        With ``fence``, an integer that only rises, no block is reissued before ``retire`` of it: until then a step may
        still read them. Raises ArgumentError for a row that is not in use, changing nothing. Cost: the rows' blocks.
        """
        with self._sole("free"):
            self._shorten("free", as_int64(rows, "rows"), _NONE, fence, close=1)

    def _shorten(self, verb: str, rows: Any, lengths: Any, fence: int | None, *, close: int) -> None:
        before = self._last_fence, self._fences, self._epochs
        epoch = 0
        if fence is not None:
            epoch = self._epoch(verb, fence)
            if fence != self._last_fence:  # first, so that no block is under a fence that nobody knows
                self._last_fence, self._fences, self._epochs = (
                    int(fence),
                    [*self._fences, int(fence)],
                    [*self._epochs, epoch],
                )
        journal = self._journal if close and fence is None else NO_JOURNAL
        code = v.shorten(*self._core, rows, lengths, epoch, close, journal)
        if code == c.GROW:
            self._grow(int(self._meta[c.NEEDED]))
            code = v.shorten(*self._core, rows, lengths, epoch, close, journal)
        if code != k.OK:
            self._last_fence, self._fences, self._epochs = before
            raise self._refused(code, verb, rows, 0)

    def _epoch(self, verb: str, fence: Any) -> int:
        """Return the small number that stands for a fence in the blocks."""
        value = _number(fence, "fence")
        floor = max((n for n in (self._last_fence, self._retired) if n is not None), default=value)
        if value < floor or value == self._retired:
            raise ArgumentError(
                f"{verb}: fence {value} does not rise: {floor} was given or retired before",
                law="L9",
                values={"fence": value, "last": self._last_fence, "retired": self._retired},
                remedy="number the steps upwards, and fence with the last one that may read the blocks",
            )
        last = self._epochs[-1] if self._epochs else int(self._meta[c.RETIRED])
        return last if value == self._last_fence else last + 1

    def retire(self, n: int) -> None:
        """Let the blocks of every fence up to ``n`` be reissued: the steps that read them are done."""
        with self._sole("retire"):
            value = _number(n, "n")
            done = bisect_right(self._fences, value)
            if done:
                pool.retire(self._meta, self._core[5], self._epochs[done - 1])
                del self._fences[:done], self._epochs[:done]
                if self._meta[c.RETIRED] > _MOST_EPOCHS and not self._epochs:
                    self._core[5][c.FENCE :: c.BLOCK_FIELDS] = 0
                    self._meta[c.RETIRED] = 0
            self._retired = value if self._retired is None else max(value, self._retired)

    def fork(self, row: int, into: int) -> None:
        """Let the unused row ``into`` hold what ``row`` holds: the same tokens, marks, salt and blocks; needs no block.

        Whichever row first writes into a block that both hold gets a new one instead, and the copy leaves once in
        ``Delta.copies``. Cost: the row's blocks.
        """
        with self._sole("fork"):
            pair = _number(row, "row"), _number(into, "into")
            code = self._forked(*pair)
            if code == c.GROW:
                self._grow(int(self._meta[c.NEEDED]))
                code = self._forked(*pair)
            if code != k.OK:
                raise self._refused(code, "fork", _NONE, 0)

    def _forked(self, row: int, into: int) -> int:
        info, state, entries, dirty, meta, blocks, nodes, _, store, lines, _ = self._core
        return v.fork(info, state, entries, dirty, meta, blocks, nodes, store, lines, row, into)

    def acquire_rows(self, n: int) -> NDArray[np.int64]:
        """Return the ``n`` lowest row numbers not in use, int64; they stay unused until a verb opens them."""
        with self._sole("acquire_rows"):
            unused = np.flatnonzero(self._lines[c.ROOT :: c.LINE_FIELDS] == 0)
            if _integer(n, "n", 0) > unused.size:
                raise ArgumentError(
                    f"acquire_rows: {n} rows are asked for, {unused.size} of {self.max_rows} are not in use",
                    law="L2",
                    values={"n": n, "unused": unused.size, "max_rows": self.max_rows},
                    remedy="free rows, or make the cache with more",
                )
            return unused[:n].astype(np.int64, copy=False)

    # Commits, and what is known of the whole

    def commit(self) -> Delta:
        """Return what changed since the last commit, with the copies to run before the step's writes.

        Cost: as ``BlockTables.commit``; copied sources may be reissued from here on.
        """
        if self._busy.locked():  # as ``_sole`` does, without its call: every step comes here
            self.tables._await("commit")
        with self._busy:
            tables = self.tables
            journal = self._journal
            copies = NO_COPIES
            pending = self._meta[c.COPIES]
            if pending:
                if is_full(journal):
                    raise JournalFull(LINE)
                copies = self._core[10][: 3 * pending].reshape(-1, 3).copy()
                spans, values = tables._difference()
                pool.copied(self._meta, self._core[5], self._core[10], journal, spans, values)
            else:
                spans, values = tables._difference(journal)
            self._cells += values.size
            self._delta_bytes += 40 + 24 * len(spans) + 4 * values.size + 12 * len(copies)
            return Delta(tables._seq, spans, values, copies, tables._origin, tables.layout)

    def _is_used(self) -> bool:
        """Say whether anything has happened."""
        fenced = self._last_fence is not None or self._retired is not None
        return bool(self.tables._is_used() or fenced or self._lines.any())

    def snapshot(self) -> bytes:
        """Return the tables of the last commit with its seq, for a replica to start from; cost: the live entries."""
        return self.tables.snapshot()

    def reset_prefix(self) -> None:
        """Forget every cached prefix, as after an update of the weights.

        Idle blocks become free. Rows in use stay as they are; what they computed, and what they compute on top of it,
        answers no prompt. Cost: one pass over the pool.
        """
        with self._sole("reset_prefix"):
            _, _, _, _, meta, blocks, nodes, buckets, _, lines, _ = self._core
            pool.forget_all(meta, blocks, nodes, buckets, lines)

    def stats(self) -> dict[str, int]:
        """Return the pool's blocks (free, cached, held, fenced) and counters since the start; changes nothing.

        hit_tokens of query_tokens: found by match and admit; evictions: idle blocks reissued; cells_written, delta_bytes:
        entries and bytes that commits carried; blocks_popped, blocks_pushed: handed out and come back; tokens_hashed,
        tokens_compared: by the index. For a step's own numbers subtract those of the step before.
        """
        with self._sole("stats"):
            m = self._meta.tolist()
            return {
                "free": m[c.FREE],
                "cached": m[c.CACHED],
                "held": m[c.HELD],
                "fenced": m[c.FENCED],
                "hit_tokens": m[c.HIT_TOKENS],
                "query_tokens": m[c.QUERY_TOKENS],
                "evictions": m[c.EVICTIONS],
                "cells_written": self._cells,
                "delta_bytes": self._delta_bytes,
                "blocks_popped": m[c.POPPED],
                "blocks_pushed": m[c.PUSHED],
                "tokens_hashed": m[c.HASHED],
                "tokens_compared": m[c.COMPARED],
            }

    def check(self) -> None:
        """Look at every row, block and node (L2 to L5, L8 to L11); raise LawBroken. Cost: passes over all state."""
        self.tables.check()
        with self._sole("check"):
            audit(self._core)

    def __repr__(self) -> str:
        """Say what holds the pool."""
        m = self._meta
        kinds = ", ".join(KINDS[shape.kind] for shape in self.tables.shapes)
        return (
            f"<KVCache of {self.num_blocks} blocks ({kinds}): {m[c.FREE]} free, {m[c.CACHED]} cached, "
            f"{m[c.HELD]} held, {m[c.FENCED]} fenced>"
        )

    # Inside

    def _refused(self, code: int, verb: str, rows: Any, headroom: int) -> Exception:
        if code == c.JOURNAL_FULL:  # no refusal: what waits is written, and the call made again
            return JournalFull(int(self._meta[c.NEEDED]))
        if code == c.SHORT_OF_BLOCKS:
            return short(verb, self._meta, rows[self._meta[c.SERVED] :].tolist(), headroom, self._plan.usable)
        return refusal(code, verb, self.tables._info, self._plan)

    def _words(self, tokens: Any) -> c.Words:
        """Return tokens as 32-bit words, and the words from one to the next, in units of what the store takes."""
        if type(tokens) is np.ndarray and tokens.dtype is _I32 and tokens.ndim == 1 and tokens.flags.carray:
            if self._meta[c.WORDS] == 1:
                return tokens, 1
            return tokens.astype(np.int64).view(np.int32), 1
        wide = as_int64(tokens, "tokens").view(np.int32)
        return wide, 2 if self._meta[c.WORDS] == 1 else 1

    def _widen(self, verb: str, tokens: Any) -> None:
        """Give every token of the store two words, since one came that needs them."""
        if as_int64(tokens, "tokens").min() < -1:
            raise ArgumentError(
                f"{verb}: a token lies below -1", law="L10", remedy="tokens are 0 or more, or -1 where not yet known"
            )
        _, _, _, _, _, blocks, nodes, buckets, store, _, copies = self._core
        core = self._assembled(blocks, nodes, buckets, store.astype(np.int64).view(np.int32), copies)
        self._meta[c.WORDS] = 2
        self._core = core

    def _grow(self, more: int) -> None:
        """Make room for more node slots, and as much again as there was for copies."""
        _, _, _, _, meta, blocks, nodes, buckets, store, _, copies = self._core
        width, words = c.NODE_FIELDS + meta[c.PARTS], meta[c.UNIT] * meta[c.WORDS]
        before = nodes.size // width
        after = max(before + before // 2, int(meta[c.SLOTS]) + more + 2)
        grown = np.zeros(after * width, np.int64), np.zeros(after * words, np.int32)
        grown[0][: nodes.size], grown[1][: store.size] = nodes, store
        self._core = self._assembled(blocks, grown[0], buckets, grown[1], np.resize(copies, 2 * copies.size))

    def _restore(self, core: c.Core, saved: list[Any]) -> None:
        """Put every array back to what it was before a call that was refused half way."""
        for array, before in zip(core, saved, strict=True):
            array[...] = before
        self._core = core

    def _salted(self, verb: str, salts: Any, n: int, *, create: bool) -> NDArray[np.int64]:
        """Return the root of each row's salt: 0 where none is given, -1 where none is known."""
        if salts is None:
            return _NONE
        if isinstance(salts, (bytes, str)) or not isinstance(salts, Sequence) or len(salts) != n:
            raise ArgumentError(
                f"{verb}: salts must be None or a list of {n}, one bytes or None per row",
                law="L10",
                values={"rows": n},
                remedy="make salts with blocktable.salt(...), one per row",
            )
        if len(self._roots) > self._sweep_at:
            self._sweep()
        return np.array([self._root(verb, one, create=create) for one in salts], np.int64)

    def _root(self, verb: str, salt: Any, *, create: bool) -> int:
        if salt is None:
            return 0
        if not isinstance(salt, bytes):
            raise ArgumentError(
                f"{verb}: a salt must be bytes, got {type(salt).__name__}",
                law="L10",
                values={"got": type(salt).__name__},
                remedy="make it with blocktable.salt(...)",
            )
        if not salt:
            return _NO_SALT
        root = self._roots.get(salt, -1)
        if root < 0 and create:
            root = self._roots[salt] = self._new_root()
        return root

    def _new_root(self) -> int:
        meta, nodes = self._meta, self._core[6]
        width = c.NODE_FIELDS + int(meta[c.PARTS])
        if meta[c.SLOTS] + 3 > nodes.size // width:
            self._grow(3)
            nodes = self._core[6]
        root = int(index.take_slot(meta, nodes))
        meta[c.SERIAL_LAST] += 1
        nodes[root * width + c.SERIAL] = meta[c.SERIAL_LAST]
        nodes[root * width + c.PARENT] = 0
        nodes[root * width + c.PARENT_SERIAL] = -1
        return root

    def _sweep(self) -> None:
        """Drop salts that no row and no node uses any more."""
        meta, nodes = self._meta, self._core[6]
        width = c.NODE_FIELDS + int(meta[c.PARTS])
        for salt, root in list(self._roots.items()):
            if nodes[root * width + c.HEIRS] == 0:
                index.give_slot(meta, nodes, root)
                del self._roots[salt]
        self._sweep_at = 2 * len(self._roots) + 64


def _per_row(verb: str, value: Any, name: str, n: int) -> NDArray[np.int64]:
    if is_integer(value) and name == "limit":
        return np.full(n, max(-(2**63), min(value, c.NO_LIMIT)), np.int64)
    found = as_int64(value, name)
    if found.size != n:
        raise ArgumentError(
            f"{verb}: {n} rows, but {name} has {found.size} entries",
            values={"rows": n, name: found.size},
            remedy="pass one per row",
        )
    return found


def _integer(value: Any, name: str, least: int | None) -> int:
    if not is_integer(value) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ArgumentError(
            f"{name} must be an integer{bound}, got {value!r}",
            values={name: value},
            remedy=f"pass {name} as an integer",
        )
    return int(value)


def _number(value: Any, name: str) -> int:
    """Return an integer that is positive or negative, of 64 bits."""
    found = _integer(value, name, None)
    if abs(found) >= 2**63:
        raise ArgumentError(
            f"{name} is {found}, which does not fit int64",
            law="L12",
            values={name: found},
            remedy=f"keep {name} within {1 - 2**63}..{2**63 - 1}",
        )
    return found


def _sealed(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.flags.writeable = False
    return array
