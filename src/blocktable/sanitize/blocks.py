"""The blocks of a pool as the sanitizer sees them: how many rows hold each, what it contains, and who may still read it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from blocktable.sanitize.laws import Broken, Ints
from blocktable.sanitize.usual import ANYTHING, NOTHING

NEVER = -(2**63)  # no fence


class Blocks:
    """Every block of the pool; ``copies`` are those of copy-on-write since the last commit: (group, source, target)."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = np.zeros(num_blocks, np.int64)
        self.fence = np.full(num_blocks, NEVER, np.int64)
        self.pins = np.zeros(num_blocks, np.int64)  # pending copies that read it
        self.content = np.full(num_blocks, NOTHING, np.int64)
        self.touched = np.full(num_blocks, -1, np.int64)  # the call that handed it out or took it back last
        self.copies: list[tuple[int, int, int]] = []
        self.stamp = np.full(num_blocks, -1, np.int64)  # the call that looked at a block last
        self.retired = NEVER
        self.held = 0
        self.fenced: set[int] = set()  # nobody holds them, and they may not be handed out

    def take(self, group: int, rows: Ints, columns: Ints, ids: Ints, call: int) -> Iterator[Broken]:
        """Hand out blocks to entries, one owner each; yield those that could not be had (L3, L9)."""
        bad = (ids < 1) | (ids >= self.owners.size)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            said = f"block id {ids[i]} is outside 1..{self.owners.size - 1}"
            yield Broken("L3", said, group, int(rows[i]), int(columns[i]), int(ids[i]))
            return
        for wrong, said in (
            (self.owners[ids] > 0, "while a row holds it"),
            (self.pins[ids] > 0, "while a copy that is not committed reads it"),
            (self.fence[ids] > self.retired, "before its fence is retired"),
        ):
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                place = (group, int(rows[i]), int(columns[i]), int(ids[i]))
                yield Broken("L9", f"block {ids[i]} is handed out {said}", *place)
        self.owners[ids] = 1
        if ids.size > 1:
            order = np.sort(ids)
            same = order[1:][order[1:] == order[:-1]]
            if same.size:
                i = int(np.flatnonzero(ids == same[0])[1])
                place = (group, int(rows[i]), int(columns[i]), int(ids[i]))
                yield Broken("L9", f"block {ids[i]} is handed out twice in one call", *place)
        self.held += ids.size
        self.fence[ids], self.content[ids], self.touched[ids] = NEVER, NOTHING, call

    def adopt(self, ids: Ints, call: int) -> None:
        """Give blocks one more owner each."""
        idle = ids[self.owners[ids] == 0]
        self.held += idle.size
        self.fenced.difference_update(idle.tolist())
        self.owners[ids] += 1
        self.touched[ids] = call

    def drop(self, ids: Ints, fence: int | None, call: int) -> None:
        """Take one owner from each block, once per time it comes; a step up to ``fence`` may still read them."""
        if not ids.size:
            return
        np.subtract.at(self.owners, ids, 1)
        self.touched[ids] = call
        if fence is not None:
            self.fence[ids] = np.maximum(self.fence[ids], int(fence))
        free = np.unique(ids[self.owners[ids] == 0])
        self.held -= free.size
        if self.copies:
            self._call_off({*free.tolist()})
        self.fenced.update(free[(self.fence[free] > self.retired) | (self.pins[free] > 0)].tolist())

    def _call_off(self, free: set[int]) -> None:
        """Forget copies into blocks that nobody holds any more."""
        for copy in [copy for copy in self.copies if copy[2] in free]:
            self.copies.remove(copy)
            self._unpin(copy[1])

    def copy(self, group: int, source: int, target: int) -> None:
        """Remember a copy to be run at the next commit: until then its source may not be handed out."""
        self.copies.append((group, source, target))
        self.pins[source] += 1

    def commit(self) -> list[tuple[int, int, int]]:
        """Return the copies that the commit must carry; their sources may be handed out from here on."""
        copies, self.copies = self.copies, []
        for _, source, _ in copies:
            self._unpin(source)
        return copies

    def _unpin(self, source: int) -> None:
        self.pins[source] -= 1
        if self.pins[source] == 0 and self.fence[source] <= self.retired:
            self.fenced.discard(source)

    def retire(self, n: int) -> None:
        """Let the blocks of every fence up to n be handed out."""
        self.retired = max(self.retired, int(n))
        done = [block for block in self.fenced if self.fence[block] <= self.retired and not self.pins[block]]
        self.fenced.difference_update(done)

    def recount(self, entries: list[Any]) -> None:
        """Count owners anew from the rows as they are, after a finding; what blocks contain is not known any more."""
        held = np.concatenate([table[(table > 0) & (table < self.owners.size)] for table in entries])
        self.owners = np.bincount(held, minlength=self.owners.size)
        self.held = int(np.count_nonzero(self.owners))
        self.content[:] = ANYTHING
        idle = np.flatnonzero((self.owners == 0) & ((self.fence > self.retired) | (self.pins > 0)))
        self.fenced = {int(block) for block in idle}
