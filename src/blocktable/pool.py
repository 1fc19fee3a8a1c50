"""The pool of blocks: which ids are free, and how many owners each handed-out id has.

State is two flat arrays: one reference count per block, and a ring of the free ids. The ring is first in, first out, so
that a freed block is reissued as late as possible and a stale read shows up as old data rather than as somebody else's.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._arrays import as_int32
from blocktable.errors import ArgumentError, LawBroken, OutOfBlocks

__all__ = ["BlockPool"]

MAX_BLOCKS = 2**31  # ids are int32


class BlockPool:
    """Blocks 1 .. ``num_blocks - 1``, each free or held by one owner or more; block 0 is the null block, never handed out.

    Every verb takes a batch, costs time proportional to it, and is all or nothing (L9).

    >>> pool = BlockPool(16)
    >>> ids = pool.allocate(2)
    >>> ids.tolist(), pool.num_free
    ([1, 2], 13)
    >>> pool.share(ids[:1])
    >>> pool.free(ids)
    >>> pool.num_free, pool.references.nonzero()[0].tolist()
    (14, [1])
    >>> pool.free([2])
    Traceback (most recent call last):
        ...
    blocktable.errors.ArgumentError: block 2 is freed 1 time and held 0 times; free a block once per owner [L9]
    """

    def __init__(self, num_blocks: int) -> None:
        count = _as_count(num_blocks, "num_blocks")
        if not 1 <= count <= MAX_BLOCKS:
            raise ArgumentError(
                f"num_blocks is {count}, outside 1..{MAX_BLOCKS}",
                law="L9",
                values={"num_blocks": count, "largest": MAX_BLOCKS},
                remedy="count the null block too, and keep ids within int32",
            )
        self.num_blocks = count
        self._references = np.zeros(count, np.int64)
        self._ring = np.arange(1, count, dtype=np.int32)
        self._head = 0  # position in the ring of the id that is handed out next
        self._num_free = count - 1

    @property
    def num_free(self) -> int:
        """How many blocks can be handed out now."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """How many blocks have an owner."""
        return self.num_blocks - 1 - self._num_free

    @property
    def references(self) -> NDArray[np.int64]:
        """Owners of each block, int64 [num_blocks], read-only view; the null block has none."""
        view = self._references.view()
        view.flags.writeable = False
        return view

    def allocate(self, n: int) -> NDArray[np.int32]:
        """Hand out n free blocks with one owner each, the longest free first; return their ids, int32 [n].

        Raises OutOfBlocks (needed, available) when fewer are free.
        """
        n = _as_count(n, "n")
        if n < 0:
            raise ArgumentError(f"cannot allocate {n} blocks", law="L9", values={"n": n}, remedy="ask for 0 or more")
        if n > self._num_free:
            raise OutOfBlocks(
                f"{n} blocks needed, {self._num_free} free",
                law="L9",
                values={"needed": n, "available": self._num_free},
                remedy="free or preempt a row first",
            )
        end = self._head + n
        if end <= self._ring.size:
            ids = self._ring[self._head : end].copy()
        else:
            end -= self._ring.size
            ids = np.concatenate([self._ring[self._head :], self._ring[:end]])
        self._head = end
        self._num_free -= n
        self._references[ids] = 1
        return ids

    def share(self, ids: Any) -> None:
        """Give each of these held blocks one more owner; an id may come several times.

        Raises ArgumentError for the null block, an id of no block of this pool, and a block that nobody holds.
        """
        batch = self._known(ids)
        references = self._references[batch]
        if batch.size and references.min() == 0:
            block = int(batch[references == 0][0])
            raise ArgumentError(
                f"block {block} is free and cannot be shared",
                law="L9",
                values={"id": block, "held": 0},
                remedy="share a block only while it has an owner",
            )
        np.add.at(self._references, batch, 1)

    def free(self, ids: Any) -> None:
        """Take one owner from each of these blocks; a block that loses its last one becomes free, in the order given.

        Raises ArgumentError for the null block, an id of no block of this pool, and an id that comes more often than it
        has owners.
        """
        batch = self._known(ids)
        np.subtract.at(self._references, batch, 1)
        left = self._references[batch]
        if batch.size and left.min() < 0:
            block = int(batch[left < 0][0])
            np.add.at(self._references, batch, 1)  # back to where it was: a refused call changes nothing
            times, held = int(np.count_nonzero(batch == block)), int(self._references[block])
            raise ArgumentError(
                f"block {block} is freed {_times(times)} and held {_times(held)}",
                law="L9",
                values={"id": block, "freed": times, "held": held},
                remedy="free a block once per owner",
            )
        self._put_back(self._last_of_each(batch[left == 0]))

    def check(self) -> None:
        """Raise LawBroken unless free and held blocks are the whole pool, none of them twice (L9); O(num_blocks)."""
        free = self._ring[(self._head + np.arange(self._num_free)) % max(self._ring.size, 1)]
        in_ring = np.bincount(free, minlength=self.num_blocks)
        held = int(np.count_nonzero(self._references))
        broken = ""
        if self._references[0] or in_ring[0]:
            broken = "the null block is counted"
        elif self._references.min() < 0:
            broken = f"block {int(self._references.argmin())} has {int(self._references.min())} owners"
        elif in_ring.max() > 1:
            broken = f"block {int(in_ring.argmax())} is in the free list {int(in_ring.max())} times"
        elif np.any(self._references[free]):
            broken = f"block {int(free[self._references[free] > 0][0])} is in the free list and has an owner"
        elif held + self._num_free != self.num_blocks - 1:
            broken = f"{self._num_free} free and {held} held blocks are not the {self.num_blocks - 1} of the pool"
        if broken:
            raise LawBroken(
                broken,
                law="L9",
                values={"free": self._num_free, "held": held, "num_blocks": self.num_blocks},
                remedy="this is a defect of the pool, or its arrays were written from outside",
            )

    def _known(self, ids: Any) -> NDArray[np.int32]:
        """Return ids as int32 after refusing the null block and ids outside the pool."""
        batch = as_int32(ids, "ids")
        if batch.size and (batch.min() < 1 or batch.max() >= self.num_blocks):
            block = int(batch[(batch < 1) | (batch >= self.num_blocks)][0])
            what = "is the null block, which has no owner" if block == 0 else "is no block of this pool"
            raise ArgumentError(
                f"block {block} {what}",
                law="L9",
                values={"id": block, "num_blocks": self.num_blocks},
                remedy=f"ids of this pool are 1..{self.num_blocks - 1}",
            )
        return batch

    def _last_of_each(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drop repetitions: a block with two owners may come twice in one batch, and is free from the second time on."""
        place = np.arange(ids.size)
        self._references[ids] = place  # of equal ids the last one stays
        last: NDArray[np.int32] = ids[self._references[ids] == place]
        self._references[last] = 0
        return last

    def _put_back(self, ids: NDArray[np.int32]) -> None:
        """Append ids to the free ring."""
        if not ids.size:
            return
        start = (self._head + self._num_free) % self._ring.size
        first = min(ids.size, self._ring.size - start)
        self._ring[start : start + first] = ids[:first]
        self._ring[: ids.size - first] = ids[first:]
        self._num_free += ids.size


def _as_count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(
            f"{name} must be an integer, got {value!r}",
            law="L9",
            values={name: value},
            remedy=f"pass {name} as an integer",
        )
    return int(value)


def _times(n: int) -> str:
    return "1 time" if n == 1 else f"{n} times"
