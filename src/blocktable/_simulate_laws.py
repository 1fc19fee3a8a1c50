"""The laws in a simulation, verified after each commit against something that does not share the code it judges."""

import numpy as np
from numpy.typing import NDArray

from blocktable._ints import align_up, ceil_div
from blocktable.cache import KVCache
from blocktable.delta import Delta
from blocktable.errors import LawBroken
from blocktable.geometry import Geometry
from blocktable.replica import Replica

__all__ = ["Laws"]

PADDING = 64  # tokens: engines pad the tokens of a step to the sizes of their captured graphs
AUDITED = 64  # blocks per step: the cache recounts itself in plain Python, a long walk for a large pool

Ints = NDArray[np.int64]


class Laws:
    """A replica that only the deltas feed, and the checks of each step.

    The cache's own recount of pool, index and rows takes time in proportion to the pool, so it comes at every step of a
    pool of 64 blocks, at one in 257 where there are 16,385, and after the last.
    """

    def __init__(self, cache: KVCache, geometry: Geometry) -> None:
        self.checks = 0
        self._cache, self._geometry = cache, geometry
        self._every = ceil_div(cache.num_blocks, AUDITED)
        self._replica = Replica([geometry], max_rows=cache.max_rows)

    def verify(self, delta: Delta, rows: Ints, computed: Ints, tokens: Ints, slots: Ints) -> None:
        """Raise LawBroken or ContractError; ``rows`` hold ``computed`` tokens and compute ``tokens`` at ``slots``."""
        if self.checks % self._every == 0:
            self.recount()
        else:
            self._cache.tables.check()
        self._replica.apply(delta)
        table, block_size = self._cache.tables.tables[0], self._geometry.block_size
        _check_replica(table.array, self._replica.tables[0].array)
        kernel_table = table.kernel_array(rows)
        self._geometry.check(kernel_table.shape, dtype=kernel_table.dtype)

        start = np.concatenate([[0], np.cumsum(tokens)])
        positions = np.repeat(computed - start[:-1], tokens) + np.arange(start[-1])
        writers = np.repeat(rows, tokens)
        blocks = table.array[writers, positions // block_size].astype(np.int64)
        _check_writers(blocks, writers, self._cache.max_rows)
        _check_conservation(table.array, table.num_blocks, self._cache)
        expected = blocks * block_size + positions % block_size
        _check_slots(expected, slots)
        mapped = self._replica.slot_mapping(rows, start, positions, padded=align_up(int(start[-1]), PADDING))[0]
        _check_slots(expected, mapped)
        self.checks += 1

    def recount(self) -> None:
        """Raise LawBroken unless pool, index and rows add up."""
        self._cache.check()


def _check_writers(blocks: Ints, rows: Ints, max_rows: int) -> None:
    """Raise LawBroken where two rows write one block in a step (L8); a later row may read what an earlier one writes."""
    written = np.unique(blocks * max_rows + rows) // max_rows
    twice = written[1:][written[1:] == written[:-1]]
    if twice.size:
        raise LawBroken(f"two rows write block {twice[0]} in one step", law="L8", values={"id": int(twice[0])})


def _check_conservation(array: NDArray[np.int32], live: NDArray[np.int32], cache: KVCache) -> None:
    """Raise LawBroken unless the counts of the pool are its size, and those held are those in rows (L9)."""
    ids = np.concatenate([array[row, : live[row]] for row in np.flatnonzero(live)])
    in_rows, counts = np.unique(ids).size, cache.stats()
    total = sum(counts[name] for name in ("free", "cached", "held", "fenced"))
    if counts["held"] != in_rows or total != cache.num_blocks - 1:
        raise LawBroken(
            f"{counts['held']} blocks of {total} are held, the rows hold {in_rows} of {cache.num_blocks - 1}",
            law="L9",
            values={"held": counts["held"], "in_rows": in_rows, "counted": total, "usable": cache.num_blocks - 1},
        )


def _check_replica(host: NDArray[np.int32], replica: NDArray[np.int32]) -> None:
    """Raise LawBroken unless the deltas alone have made the same table elsewhere (L11)."""
    if not np.array_equal(host, replica):
        row, column = np.argwhere(host != replica)[0].tolist()
        raise LawBroken(
            f"row {row} column {column} is {host[row, column]} on the host and {replica[row, column]} on a replica",
            law="L11",
            values={"row": row, "column": column},
        )


def _check_slots(expected: Ints, slots: Ints) -> None:
    """Raise LawBroken unless each token has its own slot, no two the same, and padding is -1 (L6, L7)."""
    in_order = np.sort(expected)
    twice = in_order[1:][(in_order[1:] == in_order[:-1]) | (in_order[1:] < 0)]
    if twice.size:
        raise LawBroken(f"two tokens of a step share slot {twice[0]}", law="L7", values={"slot": int(twice[0])})
    wrong = np.flatnonzero(slots[: expected.size] != expected)
    if wrong.size:
        i = int(wrong[0])
        raise LawBroken(
            f"token {i} of the step has slot {slots[i]} instead of {expected[i]}",
            law="L7",
            values={"index": i, "slot": int(slots[i]), "expected": int(expected[i])},
        )
    stray = np.flatnonzero(slots[expected.size :] != -1)
    if stray.size:
        i = expected.size + int(stray[0])
        raise LawBroken(
            f"slot {slots[i]} stands at {i}, past the {expected.size} tokens of the step",
            law="L6",
            values={"index": i, "slot": int(slots[i])},
        )
