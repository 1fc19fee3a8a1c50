"""The arrays behind host tables and replicas, and everything that only reads them.

column   0 ........ gone ............ count ............... width
         | given up | live            | tail               |
entry    | null     | block ids       | null (L4)          |
"""

import zlib
from collections.abc import Callable, Sequence
from threading import Lock, RLock
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable import _kernels as k
from blocktable._arrays import as_count, as_int64
from blocktable._audit import Finding, first_broken
from blocktable._copying import Uncopied
from blocktable._faults import fault, no_row
from blocktable._sanitized import Sanitizable
from blocktable.errors import ArgumentError, ConcurrentUse, LawBroken
from blocktable.groups import KINDS, Group

MOST = 2**31 - 1  # rows, and tokens of one step
POLL = 2e-5  # seconds between two looks of whoever reads what calls leave, and waits for one


class Shape(NamedTuple):
    """The numbers of one group that its tables depend on."""

    kind: int
    width: int
    kernel_width: int
    block_size: int
    kernel_block_size: int
    cp_size: int
    cp_interleave: int

    @classmethod
    def of(cls, group: Group) -> "Shape":
        """Read them off a group."""
        g = group.geometry
        return cls(
            KINDS.index(group.kind),
            g.width,
            g.kernel_width,
            g.block_size,
            g.kernel_block_size,
            g.cp_size,
            g.cp_interleave,
        )


class GroupTable:
    """One group's table, to look at: its arrays are read-only views of the live state.

    They show every later change and stay valid until ``resize``; after it, read the attributes again.
    """

    def __init__(self, state: "TableState", group: int) -> None:
        self._state = state
        self._group = group

    @property
    def array(self) -> NDArray[np.int32]:
        """int32 [max_rows, width]: the manager blocks of every row, null past its live count."""
        return self._state._arrays[self._group]

    @property
    def num_blocks(self) -> NDArray[np.int32]:
        """int32 [max_rows]: the live count of every row."""
        return self._state._counts[self._group]

    def kernel_array(self, rows: Any) -> NDArray[np.int32]:
        """Return int32 [len(rows), kernel_width], a copy: live manager blocks m as r*m .. r*m + r - 1, the tail 0.

        Cost: one pass over the result.
        """
        wanted, state = as_int64(rows, "rows"), self._state
        shape = state.shapes[self._group]
        ratio = shape.block_size // shape.kernel_block_size
        out = np.zeros((wanted.size, shape.kernel_width), np.int32)
        with state._sole("kernel_array"):
            state._known("kernel_array", wanted)
            blocks, counts = self.array[wanted], self.num_blocks[wanted]
        live = np.arange(shape.width) < counts[:, None]
        for part in range(ratio):
            out[:, part : ratio * shape.width : ratio] = np.where(live, blocks * ratio + part, 0)
        return out

    def __repr__(self) -> str:
        """Say the shape and how many rows are live."""
        rows, width = self.array.shape
        kind = KINDS[self._state.shapes[self._group].kind]
        return f"<table {self._group}, {kind}: {rows} rows of {width}, {np.count_nonzero(self.num_blocks)} live>"


class TableState(Uncopied, Sanitizable):
    """Tables of all groups, to be read; ``BlockTables`` and ``Replica`` add how they change."""

    copy_instead = "send snapshot() and start a Replica from it, or mirror the deltas"

    def __init__(self, shapes: Sequence[Shape], max_rows: int, num_blocks: int | None) -> None:
        self._busy = Lock()
        # Whoever reads what calls leave has this one first, and waits for the call in progress. A call of a signal handler
        # that interrupted him is refused, as beside a call: it would wait for him for ever.
        self._reading = RLock()
        self._allocate(tuple(shapes), max_rows, num_blocks)

    def _allocate(self, shapes: tuple[Shape, ...], max_rows: int, num_blocks: int | None) -> None:
        info = np.zeros((len(shapes) + 1, k.INFO_FIELDS), np.int64)
        max_rows = as_count(max_rows, "max_rows", 1, MOST)
        if num_blocks is not None:
            num_blocks = as_count(num_blocks, "num_blocks", 1, 2**31, law="L3")
        info[-1, k.ROWS] = max_rows
        total = 0
        for g, shape in enumerate(shapes):
            ratio = shape.block_size // shape.kernel_block_size
            limit = 2**31 // ratio  # kernel ids are int32
            if num_blocks is not None:
                if num_blocks > limit:
                    raise ArgumentError(
                        f"{num_blocks} blocks split into {ratio} kernel blocks each overflow int32 ids",
                        law="L12",
                        values={"num_blocks": num_blocks, "ratio": ratio, "limit": limit},
                        remedy=f"use at most {limit} blocks, or a kernel that takes larger ones",
                    )
                limit = num_blocks
            info[g, k.WIDTH], info[g, k.BASE], info[g, k.KERNEL_WIDTH] = shape.width, total, shape.kernel_width
            info[g, k.BLOCK], info[g, k.KIND], info[g, k.RATIO] = shape.block_size, shape.kind, ratio
            info[g, k.CP], info[g, k.INTERLEAVE], info[g, k.IDS] = shape.cp_size, shape.cp_interleave, limit
            total += max_rows * shape.width
        try:
            state = np.zeros(len(shapes) * max_rows * k.STATE_FIELDS, np.int32)
            entries, sent = np.zeros(total, np.int32), np.zeros(total, np.int32)
            dirty = np.zeros((len(shapes), max_rows), np.int32)
        except (MemoryError, ValueError):
            raise ArgumentError(
                f"tables of {max_rows} rows need {8 * total} bytes, more than there are",
                law="L1",
                values={"max_rows": max_rows, "bytes": 8 * total},
                remedy="lower max_rows or max_model_len",
            ) from None
        self.shapes, self.max_rows, self.num_blocks = shapes, max_rows, num_blocks
        self._info, self._state, self._entries, self._sent, self._dirty = info, state, entries, sent, dirty
        fields = state.reshape(len(shapes), max_rows, k.STATE_FIELDS)
        self._counts = [_sealed(fields[g, :, k.COUNT]) for g in range(len(shapes))]
        bases = [*(int(base) for base in info[:-1, k.BASE]), total]
        self._arrays = [
            _sealed(entries[bases[g] : bases[g + 1]].reshape(max_rows, shape.width)) for g, shape in enumerate(shapes)
        ]
        self._ranks = max(shape.cp_size for shape in shapes)
        self.layout = zlib.crc32(repr((max_rows, [tuple(shape) for shape in shapes])).encode())
        self.tables = tuple(GroupTable(self, g) for g in range(len(shapes)))

    def __getitem__(self, group: int) -> GroupTable:
        """Return one group's table: ``tables[g]`` is ``tables.tables[g]``."""
        return self.tables[group]

    def slot_mapping(
        self,
        rows: Any,
        query_start_loc: Any,
        positions: Any,
        *,
        padded: int | None = None,
        cp_rank: int = 0,
        out: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Return the slot of every token of a step, int64 [groups, padded], padded to ``padded`` tokens with -1.

        ``rows`` [n] names a row per request (-1: a padding request), ``query_start_loc`` [n + 1] cuts the tokens into
        requests, ``positions`` holds each token's position in its row. A token gets -1 where its position is negative
        or past the row's live blocks, where its column holds the null block, where another rank owns it, and in state
        groups throughout. Reads the tables as they are now, committed or not. ``out`` (int64, contiguous, [groups,
        padded]) is filled instead of a new array. Cost: one pass over the tokens per group. Source: the formulas of
        ``blocktable.slots``.

        >>> import blocktable
        >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=128, block_size=4)], max_rows=1)
        >>> tables.append([0], [0, 2], [7, 8])
        >>> tables.slot_mapping([0], [0, 4], [0, 3, 7, 8], padded=6).tolist()
        [[28, 31, 35, -1, -1, -1]]
        """
        wanted = as_int64(rows, "rows")
        starts = as_int64(query_start_loc, "query_start_loc")
        where = as_int64(positions, "positions")
        if starts.size != wanted.size + 1:
            raise ArgumentError(
                f"slot_mapping: {wanted.size} rows need {wanted.size + 1} offsets in query_start_loc, got {starts.size}",
                law="L7",
                values={"rows": wanted.size, "offsets": starts.size},
                remedy="pass the running sum of the rows' token counts, with a leading 0",
            )
        rank = as_count(cp_rank, "cp_rank", 0, self._ranks - 1, law="L13")
        tokens = as_count(starts[-1], "query_start_loc[-1]", 0, MOST, law="L7")
        if out is not None:
            length = _length(out, len(self.shapes)) if padded is None else padded
        else:
            length = tokens if padded is None else padded
        length = as_count(length, "padded", tokens, MOST, law="L6")
        shape = (len(self.shapes), length)
        if out is None:
            out = np.empty(shape, np.int64)
        elif _length(out, len(self.shapes)) != length or out.dtype != np.int64 or not out.flags.carray:
            raise ArgumentError(
                f"slot_mapping: out must be a contiguous int64 array {shape}, got {out.dtype} {out.shape}",
                law="L7",
                values={"want": shape, "got": out.shape},
                remedy="leave out away, or make it with np.empty(shape, np.int64)",
            )
        self._run("slot_mapping", k.slots, wanted, starts, where, rank, out.reshape(-1))
        return out

    def check(self) -> None:
        """Look at every entry of every row (L2, L3, L4, L5, L11) and every width (L1, L12); raise LawBroken with the state.

        Cost: one pass over the tables, about 10 milliseconds per 10^7 entries.
        """
        for g, shape in enumerate(self.shapes):
            ratio = shape.block_size // shape.kernel_block_size
            if ratio * shape.kernel_block_size != shape.block_size or shape.width != shape.kernel_width // ratio:
                raise LawBroken(f"check: the shape of group {g} contradicts itself: {shape}", law="L12")
        with self._sole("check"):
            found = first_broken(self)
        if found is not None:
            raise self._broken(found)

    def _broken(self, found: Finding) -> LawBroken:
        law, group, row, column, entry = found
        line = self._state.reshape(len(self.shapes), self.max_rows, k.STATE_FIELDS)[group, row]
        entries = np.array2string(self._arrays[group][row], threshold=64, edgeitems=16)
        return LawBroken(
            f"check: row {row} of group {group} breaks the law at column {column}: count {line[k.COUNT]}, "
            f"given up {line[k.GONE]}, sent {line[k.SENT]}, width {self.shapes[group].width}, entries {entries}",
            law=law,
            values={"group": group, "row": row, "column": column, "entry": entry},
            remedy="this is a defect here, or memory written from outside: report it with the calls that led here",
        )

    def _sole(self, verb: str) -> Lock:
        """Return the lock to hold for a call, which refuses where another call holds it, and waits for a reader.

        ``with`` takes a lock in one step. An exception of a signal handler between ``acquire`` and ``try`` would leave it held.
        """
        if self._busy.locked():
            self._await(verb)
        return self._busy

    def _await(self, verb: str) -> None:
        """Wait for whoever reads what calls left; refuse where another call holds the object."""
        with self._reading:
            if self._busy.locked():
                raise _busy(verb, "another call on this object is in progress")

    def _after_call(self, verb: str, patience: float) -> Lock:
        """Return the lock to hold for reading what calls left, once the call in progress is done; ``_reading`` is held."""
        until = monotonic() + patience
        while self._busy.locked():
            if monotonic() > until:  # it may be the reader's own
                raise _busy(verb, f"another call on this object is in progress for {patience:g} s")
            sleep(POLL)
        return self._busy

    def _known(self, verb: str, rows: NDArray[np.int64]) -> None:
        """Refuse rows that do not exist."""
        outside = (rows < 0) | (rows >= self.max_rows)
        if outside.any():
            index = int(outside.argmax())
            raise no_row(verb, index, int(rows[index]), self.max_rows)

    def _run(self, verb: str, loop: Callable[..., int], *arguments: Any) -> None:
        """Run a compiled loop over the state, alone; raise what it refused."""
        with self._sole(verb):
            code = loop(self._info, self._state, self._entries, *arguments)
            if code != k.OK:
                raise fault(code, verb, self._info)


def _busy(verb: str, why: str) -> ConcurrentUse:
    """Return the error of a call that does not get the object."""
    return ConcurrentUse(
        f"{verb}: {why}",
        values={"verb": verb},
        remedy="let one thread own the object; a Delta may go to other threads",
    )


def _length(out: Any, groups: int) -> int:
    """Return how many tokens ``out`` has room for, or refuse it."""
    if not isinstance(out, np.ndarray) or out.ndim != 2 or out.shape[0] != groups:
        raise ArgumentError(
            f"slot_mapping: out must be an int64 array [{groups}, tokens], got {type(out).__name__}",
            law="L7",
            values={"groups": groups, "got": getattr(out, "shape", None)},
            remedy="leave out away, or make it with np.empty(shape, np.int64)",
        )
    return int(out.shape[1])


def _sealed(array: NDArray[np.int32]) -> NDArray[np.int32]:
    array.flags.writeable = False
    return array
