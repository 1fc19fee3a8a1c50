"""Host block tables: which physical block holds which tokens of which request, for all groups of a model.

    tables = BlockTables([geometry], max_rows=256)
    tables.append(rows, indptr, ids)     # ragged: row rows[i] gets ids[indptr[i] : indptr[i + 1]]
    delta = tables.commit()              # what changed, for devices and other processes

Every verb is batched, checks everything before it writes anything, and is all or nothing across rows and groups.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable import _kernels as k
from blocktable._arrays import as_count, as_int32, as_int64
from blocktable._faults import fault
from blocktable._journal import LINE, NO_JOURNAL, JournalFull
from blocktable.delta import NO_COPIES, Delta
from blocktable.errors import ArgumentError
from blocktable.groups import KINDS, Group, as_groups
from blocktable.snapshot import pack
from blocktable.state import Shape, TableState

LOW32 = 2**32 - 1
NO_IDS = np.zeros(0, np.int32)


class BlockTables(TableState):
    """The tables of all groups on the host: the truth that deltas carry to devices and replicas.

    ``groups`` is a sequence of ``Group`` or ``Geometry``. Block ids are 1 .. num_blocks - 1; without ``num_blocks``
    they must fit int32 as kernel ids. ``tables[g].array`` (short for ``tables.tables[g].array``) is group g's table. State: 8 bytes per entry (the table, and
    what the last commit sent). One thread owns the object. ``sanitize`` (True or a mode) checks the laws at each call.

    >>> import blocktable
    >>> tables = BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
    >>> tables.append([0], [0, 3], [3, 7, 9])
    >>> tables[0].array.tolist()
    [[3, 7, 9, 0], [0, 0, 0, 0]]
    >>> tables.append([0], [0, 2], [5, 6])
    Traceback (most recent call last):
    blocktable.errors.ArgumentError: append: row 0 of group 0 would hold 5 blocks, its width is 4; append at most 1 here, or plan a larger max_model_len [L2]
    """

    def __init__(self, groups: Any, *, max_rows: int, num_blocks: int | None = None, sanitize: Any = None) -> None:  # noqa: ARG002 - read by __new__
        self.groups: tuple[Group, ...] = as_groups(groups)
        self._seq = 0
        self._origin = 0
        # Scratch for the common commit: a thousand changed entries leave in one pass.
        self._spans, self._values = np.empty((2048, 6), np.int32), np.empty(2048, np.int32)
        super().__init__([Shape.of(group) for group in self.groups], max_rows, num_blocks)

    def append(self, rows: Any, indptr: Any, ids: Any, group: int | None = 0) -> None:
        """Put ids[indptr[i] : indptr[i + 1]] behind the live entries of row rows[i].

        With ``group=None``, ``indptr`` and ``ids`` are tuples, one array per group, and the call is one transaction.
        Raises ArgumentError, changing nothing, for a row past its width (L2), an id out of range or null where none may
        be (L3), a row that does not exist or comes twice. Cost: one compiled pass over rows and ids.
        """
        self._write("append", rows, indptr, ids, group, 0)

    def assign(self, rows: Any, indptr: Any, ids: Any, group: int | None = 0) -> None:
        """Make ids[indptr[i] : indptr[i + 1]] the whole of row rows[i]; what it held before is gone (L5).

        Arguments, errors and cost are those of ``append``.
        """
        self._write("assign", rows, indptr, ids, group, 1)

    def _write(self, verb: str, rows: Any, indptr: Any, ids: Any, group: int | None, replace: int) -> None:
        wanted = as_int64(rows, "rows")
        if group is not None:
            starts, blocks = as_int64(indptr, "indptr"), as_int32(ids, "ids")
            index = self._index(verb, group)
            if self._busy.locked():  # as ``_sole`` and ``_run`` do, without their calls: every step comes here
                self._await(verb)
            with self._busy:
                state = self._info, self._state, self._entries, self._dirty
                code = k.write(*state, index, wanted, starts, blocks, replace, k.BOTH)
                if code:
                    raise fault(code, verb, self._info)
            return
        parts = zip(self._per_group(verb, indptr), self._per_group(verb, ids), strict=True)
        calls = [(g, wanted, as_int64(p, "indptr"), as_int32(b, "ids"), replace) for g, (p, b) in enumerate(parts)]
        with self._sole(verb):
            self._all_or_none(verb, k.write, calls)

    def truncate(self, rows: Any, num_blocks: Any, group: int | None = 0) -> None:
        """Shorten row rows[i] to its first num_blocks[i] entries; the rest becomes null (L4).

        With ``group=None``, ``num_blocks`` is a tuple, one array per group. Raises ArgumentError for a count above the
        live one. Cost: one pass over the rows and the entries that go.
        """
        wanted = as_int64(rows, "rows")
        if group is None:
            given = dict(enumerate(self._per_group("truncate", num_blocks)))
        else:
            given = {self._index("truncate", group): num_blocks}
        calls = [(g, wanted, as_int64(counts, "num_blocks"), 0) for g, counts in given.items()]
        for _, _, counts, _ in calls:
            _same_length("truncate", "num_blocks", counts, wanted)
        with self._sole("truncate"):
            self._all_or_none("truncate", k.shorten, calls)

    def clear(self, rows: Any) -> None:
        """Empty rows in all groups; cost: one pass over their live entries."""
        wanted = as_int64(rows, "rows")
        none = np.zeros(wanted.size, np.int64)
        with self._sole("clear"):
            self._all_or_none("clear", k.shorten, [(g, wanted, none, 0) for g in range(len(self.shapes))])

    def release(self, rows: Any, counts: Any, group: int) -> None:
        """Make the first counts[i] entries of row rows[i] null, as a window gives them up; the live count stays.

        ``counts`` are totals, not increments: a smaller total than before changes nothing. Raises ArgumentError for a
        total above the live count, and for a group whose layers read every block (L3).

        >>> import blocktable
        >>> geometry = blocktable.plan(max_model_len=32, block_size=4)
        >>> tables = BlockTables([Group(geometry, kind="window", window=8)], max_rows=1)
        >>> tables.append([0], [0, 5], [5, 6, 7, 8, 9])
        >>> tables.release([0], [3], 0)
        >>> tables.tables[0].array[0].tolist(), int(tables.tables[0].num_blocks[0])
        ([0, 0, 0, 8, 9, 0, 0, 0], 5)
        """
        index = self._index("release", group)
        kind = KINDS[self.shapes[index].kind]
        if kind in ("full", "ring"):
            raise ArgumentError(
                f"release: group {index} is of kind {kind!r}, whose entries are all read",
                law="L3",
                values={"group": index, "kind": kind},
                remedy="release only in window, chunked and state groups; truncate or clear elsewhere",
            )
        wanted, totals = as_int64(rows, "rows"), as_int64(counts, "counts")
        _same_length("release", "counts", totals, wanted)
        self._run("release", k.shorten, self._dirty, index, wanted, totals, 1, k.BOTH)

    def move(self, src: Any, dst: Any) -> None:
        """Move row src[i] to row dst[i] in all groups.

        Every source is read before any row is written, targets are replaced, and a source that is no target is left
        empty. Raises ArgumentError where a source or a target comes twice. Cost: one pass over the entries moved.
        """
        self._transfer("move", as_int64(src, "src"), as_int64(dst, "dst"), keep=0)

    def swap(self, a: Any, b: Any) -> None:
        """Exchange row a[i] with row b[i] in all groups; no row may be in two pairs. Cost: as ``move``."""
        left, right = as_int64(a, "a"), as_int64(b, "b")
        _same_length("swap", "b", right, left)
        self._transfer("swap", np.concatenate([left, right]), np.concatenate([right, left]), keep=0)

    def copy(self, src: Any, dst: Any) -> None:
        """Make row dst[i] hold what row src[i] holds, in all groups, pair after pair; both then name the same blocks.

        Raises ArgumentError where a target comes twice. Cost: one pass over the entries copied.
        """
        self._transfer("copy", as_int64(src, "src"), as_int64(dst, "dst"), keep=1)

    def _transfer(self, verb: str, src: NDArray[np.int64], dst: NDArray[np.int64], *, keep: int) -> None:
        """Assign to every target what its source holds now; without ``keep``, empty the sources that are no targets."""
        _same_length(verb, "dst", dst, src)
        with self._sole(verb):
            self._known(verb, src)
            read, written = src.tolist(), dst.tolist()
            emptied: list[int] = []
            if keep:  # pair after pair: a source that an earlier pair wrote holds what that pair read
                holds: dict[int, int] = {}
                for i, target in enumerate(written):
                    read[i] = holds[target] = holds.get(read[i], read[i])
            else:
                none = (0, src, np.zeros(src.size + 1, np.int64), NO_IDS, 1)
                self._each(verb, k.write, [none], k.CHECK)  # no source comes twice
                emptied = [row for row in read if row not in set(written)]
            targets = np.concatenate([dst, np.array(emptied, np.int64)])
            calls = []
            for g, table in enumerate(self._arrays):
                pieces = [table[row, : self._counts[g][row]] for row in read]
                starts = np.cumsum([0, *map(len, pieces), *[0] * len(emptied)])
                calls.append((g, targets, starts, np.concatenate([NO_IDS, *pieces]), 1))
            self._all_or_none(verb, k.write, calls)

    def resize(self, groups: Any) -> None:
        """Take other groups, with the widths of other limits, while no row is live.

        ``tables[g].array`` then shows the new shape. Replicas and device tables refuse what is committed afterwards
        until they are made anew or start from a snapshot. Raises ArgumentError while a row is live. Cost: new arrays.

        >>> import blocktable
        >>> tables = BlockTables([blocktable.plan(max_model_len=202752, block_size=64)], max_rows=51)
        >>> tables.resize([blocktable.plan(max_model_len=157696, block_size=64)])
        >>> tables[0].array.shape
        (51, 2464)
        """
        new = as_groups(groups)
        with self._sole("resize"):
            live = {g: int(np.count_nonzero(counts)) for g, counts in enumerate(self._counts)}
            if any(live.values()):
                raise ArgumentError(
                    f"resize: {max(live.values())} rows are live",
                    law="L1",
                    values={"live": live},
                    remedy="clear them first, or wait until their requests are done",
                )
            self._allocate(tuple(Shape.of(group) for group in new), self.max_rows, self.num_blocks)
            self.groups = new
            self._origin = self._seq

    def commit(self) -> Delta:
        """Return what changed since the last commit, as a Delta with the next sequence number.

        Never committing is legal: pending changes are kept as one range per row. Cost: one pass over the ranges of the
        rows touched, whatever the width; a whole row's worth of nulls is one span without values.
        """
        if self._busy.locked():  # as ``_sole`` does, without its call
            self._await("commit")
        with self._busy:
            spans, values = self._difference()
            return Delta(self._seq, spans, values, NO_COPIES, self._origin, self.layout)

    def _difference(self, journal: NDArray[np.int64] = NO_JOURNAL) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the spans and values of the next delta, by way of scratch arrays where they are few.

        It is counted first: where an exception of a signal handler keeps it from whoever asked, the next one is not taken for it.
        """
        self._seq += 1
        arrays = (self._info, self._state, self._entries, self._sent, self._dirty)
        spans, values = self._spans, self._values
        sizes = k.difference(*arrays, spans, values, journal)
        while sizes < 0:
            if sizes == k.JOURNAL_FULL:
                self._seq -= 1
                raise JournalFull(LINE)
            spans, values = np.empty((~sizes, 6), np.int32), np.empty(~sizes, np.int32)
            sizes = k.difference(*arrays, spans, values, journal)
        return spans[: sizes >> 32].copy(), values[: sizes & LOW32].copy()

    def _is_used(self) -> bool:
        """Say whether anything has happened."""
        return bool(self._seq or self._state.any())

    def snapshot(self) -> bytes:
        """Return the state of the last commit with its seq, for a replica to start from; cost: the live entries."""
        with self._sole("snapshot"):
            return pack(self, self._seq, self._origin)

    @property
    def seq(self) -> int:
        """The seq of the last commit, 0 before the first."""
        return self._seq

    def __repr__(self) -> str:
        """Say the shapes and what is pending."""
        pending = int(self._info[:-1, k.TOUCHED].sum())
        return f"BlockTables(seq={self._seq}, pending rows={pending}, {', '.join(map(repr, self.tables))})"

    def _index(self, verb: str, group: Any) -> int:
        if type(group) is int and 0 <= group < len(self.shapes):
            return group
        return as_count(group, f"{verb}: group", 0, len(self.shapes) - 1)

    def _per_group(self, verb: str, parts: Any) -> Any:
        if not isinstance(parts, (tuple, list)) or len(parts) != len(self.shapes):
            raise ArgumentError(
                f"{verb}: group=None takes one array per group, {len(self.shapes)} in all",
                values={"groups": len(self.shapes)},
                remedy="pass tuples of arrays, or name one group",
            )
        return parts

    def _all_or_none(self, verb: str, loop: Callable[..., int], calls: Sequence[tuple[Any, ...]]) -> None:
        """Run a loop once per group: all look at their arguments before the first writes."""
        self._each(verb, loop, calls, k.CHECK)
        before = self._info[:, k.WRITTEN].tolist()
        try:
            self._each(verb, loop, calls, k.WRITE)
        except BaseException:  # of a signal handler: what has begun is done before it goes on
            rest = [call for call in calls if self._info[call[0], k.WRITTEN] == before[call[0]]]
            self._each(verb, loop, rest, k.WRITE)
            raise

    def _each(self, verb: str, loop: Callable[..., int], calls: Sequence[tuple[Any, ...]], phase: int) -> None:
        for call in calls:
            code = loop(self._info, self._state, self._entries, self._dirty, *call, phase)
            if code != k.OK:
                raise fault(code, verb, self._info)


def _same_length(verb: str, name: str, array: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    if array.size != rows.size:
        raise ArgumentError(
            f"{verb}: {rows.size} rows, but {name} has {array.size} entries",
            values={"rows": rows.size, name: array.size},
            remedy="pass one per row",
        )
