"""A mirror of the host tables in another place, kept equal by deltas alone (L11)."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from blocktable import _kernels as k
from blocktable._apply import BAD_GAP, BAD_ROW, BAD_TAIL, apply
from blocktable._audit import first_broken
from blocktable.delta import Delta, damaged
from blocktable.errors import ArgumentError, DeltaError
from blocktable.groups import as_groups
from blocktable.snapshot import pack, unpack
from blocktable.state import Shape, TableState


class Replica(TableState):
    """Tables that follow those of another process, bit for bit: ``tables`` and ``slot_mapping`` as on the host.

    A delta that repeats, skips, or belongs to tables of another shape raises DeltaError and changes nothing; then start
    again with ``Replica.from_snapshot(host.snapshot())``. Every span is looked at before the first is written, so that
    a delta made by hand is refused too, or leaves a lawful table.

    >>> import blocktable
    >>> groups = [blocktable.plan(max_model_len=64, block_size=16)]
    >>> host, mirror = blocktable.BlockTables(groups, max_rows=1), Replica(groups, max_rows=1)
    >>> host.append([0], [0, 2], [7, 9])
    >>> mirror.apply(host.commit())
    >>> mirror.tables[0].array.tolist()
    [[7, 9, 0, 0]]
    """

    def __init__(self, groups: Any, *, max_rows: int, sanitize: Any = None) -> None:  # noqa: ARG002 - read by __new__
        super().__init__([Shape.of(group) for group in as_groups(groups)], max_rows, None)
        self._sent = self._entries  # a replica has nothing pending
        self._seq: int | None = None  # nothing applied yet: the first delta after an empty state will do
        self._origin = 0

    @property
    def seq(self) -> int:
        """The seq of the delta applied last, 0 before the first."""
        return self._seq or 0

    def apply(self, delta: Delta) -> None:
        """Take over the changes of one commit; cost: one pass over its spans and values.

        Raises DeltaError, changing nothing, for a repeat, a gap, tables of another shape, a span outside its row, an id
        outside the pool or behind the live count, spans of one row that are apart or disagree on it (L2, L3, L4, L11).
        """
        with self._sole("apply"):
            self._follow(delta)
            self._take(delta, apply, delta.spans, delta.values)

    def __repr__(self) -> str:
        """Say which commit it stands at, and its tables."""
        return f"Replica(seq={self.seq}, {', '.join(map(repr, self.tables))})"

    def _follow(self, delta: Delta) -> None:
        """Refuse what is not the next delta of these tables."""
        if not isinstance(delta, Delta):
            raise ArgumentError(
                f"apply takes a Delta, got {type(delta).__name__}", law="L11", remedy="read bytes with Delta.from_bytes"
            )
        if delta.layout != self.layout:
            raise _refused(f"delta {delta.seq} belongs to tables of another shape", delta, self.seq)
        if self._seq is None and delta.seq != delta.origin + 1:
            raise _refused(f"a new replica needs delta {delta.origin + 1} first, got {delta.seq}", delta, 0)
        if self._seq is not None and (delta.seq != self._seq + 1 or delta.origin != self._origin):
            what = "was already applied" if delta.seq <= self._seq else "does not follow"
            raise _refused(f"delta {delta.seq} {what}: this replica is at {self._seq}", delta, self._seq)

    def _take(self, delta: Delta, loop: Callable[..., int], *arguments: Any) -> None:
        """Run a loop over a delta's arrays; then this replica is at its seq."""
        code = loop(self._info, self._state, self._entries, *arguments)
        if code != k.OK:
            raise _unlawful(code, delta, self._info[-1])
        self._seq, self._origin = delta.seq, delta.origin

    def snapshot(self) -> bytes:
        """Return the state and its seq, for another replica to start from."""
        with self._sole("snapshot"):
            return pack(self, self.seq, self._origin)

    @classmethod
    def from_snapshot(cls, data: bytes) -> Self:
        """Start from a host's or another replica's snapshot; damaged bytes raise DeltaError."""
        snapshot = unpack(data)
        replica = cls.__new__(cls)
        TableState.__init__(
            replica, [Shape(*(int(n) for n in row)) for row in snapshot.shapes], snapshot.counts.shape[1], None
        )
        replica._sent = replica._entries
        replica._seq, replica._origin = snapshot.seq, snapshot.origin
        replica._fill(snapshot.counts, snapshot.live)
        broken = first_broken(replica)
        if broken is not None:
            raise damaged(f"the snapshot's row {broken.row} breaks law {broken.law}")
        return replica

    def _fill(self, counts: Any, live: Any) -> None:
        state = self._state.reshape(len(self.shapes), self.max_rows, k.STATE_FIELDS)
        state[:, :, k.COUNT] = state[:, :, k.SENT] = counts
        begin = 0
        for g, row in np.argwhere(counts):
            start = int(self._info[g, k.BASE]) + int(row) * self.shapes[g].width
            count = int(counts[g, row])
            self._entries[start : start + count] = live[begin : begin + count]
            taken = np.flatnonzero(live[begin : begin + count])
            state[g, row, k.GONE] = taken[0] if taken.size else count
            begin += count


def _refused(message: str, delta: Delta, seq: int) -> DeltaError:
    return DeltaError(
        message,
        law="L11",
        values={"seq": delta.seq, "origin": delta.origin, "at": seq},
        remedy="start from a snapshot: Replica.from_snapshot(host.snapshot())",
    )


def _unlawful(code: int, delta: Delta, scratch: Any) -> DeltaError:
    """Return the error of a delta that no host sends, from the values that the loop left."""
    fields = (k.FAULT_GROUP, k.FAULT_INDEX, k.FAULT_ROW, k.FAULT_VALUE, k.FAULT_LIMIT, k.FAULT_COLUMN)
    group, index, row, value, limit, column = (int(scratch[field]) for field in fields)
    law, what = {
        k.BAD_ID: ("L3", f"block id {value} in column {column} is outside 0..{limit - 1}"),
        BAD_TAIL: ("L4", f"block {value} in column {column} would lie behind its {limit} live blocks"),
        BAD_ROW: ("L11", f"the row's spans are apart or name several live counts: {value} here, {limit} before"),
        BAD_GAP: ("L3", f"column {column} of its {limit} live blocks would be null"),
    }.get(code, ("L2", f"it reaches {value}, the limit is {limit}"))
    return DeltaError(
        f"delta {delta.seq}: span {index} (row {row} of group {group}): {what}",
        law=law,
        values={"seq": delta.seq, "span": index, "group": group, "row": row, "column": column, "value": value},
        remedy="start from a snapshot: Replica.from_snapshot(host.snapshot())",
    )
