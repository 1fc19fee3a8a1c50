"""What the laws ask of arrays, worked out from their meaning alone: no loop here is one of those that it judges."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.groups import KINDS
from blocktable.state import Shape

Ints = NDArray[np.int64]
LAWS = tuple(f"L{number}" for number in range(1, 14))


class Broken(NamedTuple):
    """A place where a law does not hold: the law, what is wrong, and where (-1: does not apply)."""

    law: str
    message: str
    group: int = -1
    row: int = -1
    column: int = -1
    block: int = -1


class Unit(NamedTuple):
    """What one group's table is counted in: its width in columns, tokens per block, and the first id that is none."""

    group: int
    kind: str
    width: int
    block: int
    ranks: int
    interleave: int
    limit: int
    ratio: int
    kernel_width: int

    @classmethod
    def of(cls, group: int, shape: Shape, num_blocks: int | None) -> "Unit":
        """Read a group's numbers off its shape."""
        ratio = shape.block_size // shape.kernel_block_size
        limit = 2**31 // ratio if num_blocks is None else num_blocks
        kind, ranks, interleave = KINDS[shape.kind], shape.cp_size, shape.cp_interleave
        return cls(group, kind, shape.width, shape.block_size, ranks, interleave, limit, ratio, shape.kernel_width)

    @property
    def kernel(self) -> "Unit":
        """The same table as the kernel sees it, in kernel blocks."""
        block, limit = self.block // self.ratio, self.limit * self.ratio
        return self._replace(width=self.kernel_width, block=block, limit=limit, ratio=1)

    @property
    def span(self) -> int:
        """Tokens that a block stands for over all ranks."""
        return self.block * self.ranks


def rows_broken(unit: Unit, table: Any, counts: Any, rows: Any) -> Iterator[Broken]:
    """Yield what is wrong with rows of a table, one finding per law: counts (L2), live entries (L3), tails (L4, L5).

    ``table`` [n, width] and ``counts`` [n] are of the rows named by ``rows`` [n].
    """
    bad = np.flatnonzero((counts < 0) | (counts > table.shape[1]))
    if bad.size:
        i = int(bad[0])
        yield Broken("L2", f"{counts[i]} live blocks in a row {table.shape[1]} wide", unit.group, int(rows[i]))
        counts = np.clip(counts, 0, table.shape[1])
    columns = np.arange(table.shape[1])
    live = columns < counts[:, None]
    tail = np.flatnonzero((~live & (table != 0)).reshape(-1))
    if tail.size:
        i, column = divmod(int(tail[0]), table.shape[1])
        law, what = ("L4", f"behind the {counts[i]} live blocks") if counts[i] else ("L5", "in a row without blocks")
        block = int(table[i, column])
        yield Broken(law, f"block {block} lies {what}", unit.group, int(rows[i]), column, block)
    outside = np.flatnonzero((live & ((table < 0) | (table >= unit.limit))).reshape(-1))
    if outside.size:
        i, column = divmod(int(outside[0]), table.shape[1])
        block = int(table[i, column])
        yield Broken("L3", f"block id {block} is outside 1..{unit.limit - 1}", unit.group, int(rows[i]), column, block)
    yield from _nulls_broken(unit, table, live, rows)


def _nulls_broken(unit: Unit, table: Any, live: Any, rows: Any) -> Iterator[Broken]:
    """Yield a null block where the kind of group allows none (L3)."""
    if unit.kind == "state":
        return
    null = live & (table == 0)
    if unit.kind in ("window", "chunked"):
        null &= np.maximum.accumulate(live & (table != 0), axis=1)  # only behind a block that is there
    found = np.flatnonzero(null.reshape(-1))
    if found.size:
        i, column = divmod(int(found[0]), table.shape[1])
        yield Broken("L3", "the null block is a live entry", unit.group, int(rows[i]), column, 0)


def slots_of(unit: Unit, blocks: Any, counts: Any, table_row: Any, positions: Any, rank: int) -> Ints:
    """Return the slot of each token, -1 where it has none: ``table_row`` [tokens] says which row of ``blocks``.

    ``blocks`` [n, width] and ``counts`` [n]; a ``table_row`` of -1 is a padding request.
    """
    at = np.asarray(positions, np.int64)
    if unit.kind == "state" or not len(blocks):
        return np.full(at.size, -1, np.int64)
    column, offset = np.divmod(at, unit.span)
    if unit.kind == "ring":
        column = np.zeros_like(column)
    known = (table_row >= 0) & (at >= 0)
    known[known] = column[known] < counts[table_row[known]]
    block = np.zeros(at.size, np.int64)
    block[known] = blocks[table_row[known], column[known]]
    owner = offset // unit.interleave % unit.ranks
    inside = offset // (unit.interleave * unit.ranks) * unit.interleave + offset % unit.interleave
    known &= (block > 0) & ((owner == rank) | (unit.ranks == 1))
    return np.where(known, block * unit.block + inside, -1)


def slots_broken(unit: Unit, found: Any, expected: Ints, positions: Any, token_row: Any, rank: int) -> Iterator[Broken]:
    """Yield what is wrong with a step's slots: each token's (L7, L13), no two alike (L7), padding -1 (L6)."""
    tokens = expected.size
    wrong = np.flatnonzero(found[:tokens] != expected)
    if wrong.size:
        i = int(wrong[0])
        yield _slot_broken(unit, int(found[i]), int(expected[i]), int(positions[i]), int(token_row[i]), rank)
    stray = np.flatnonzero(found[tokens:] != -1)
    if stray.size:
        i = tokens + int(stray[0])
        block = int(found[i]) // unit.block if found[i] >= 0 else -1
        yield Broken("L6", f"padding entry {i} has slot {found[i]}, not -1", unit.group, block=block)
    if unit.kind == "ring":
        return
    used = np.sort(found[:tokens][found[:tokens] >= 0])
    twice = used[1:][used[1:] == used[:-1]]
    if twice.size:
        slot = int(twice[0])
        row = int(token_row[int(np.flatnonzero(found[:tokens] == slot)[1])])
        yield Broken("L7", f"slot {slot} is written twice in one step", unit.group, row, block=slot // unit.block)


def _slot_broken(unit: Unit, slot: int, right: int, position: int, row: int, rank: int) -> Broken:
    """Say what is wrong with the slot of one token."""
    column = 0 if unit.kind == "ring" else max(position, 0) // unit.span
    block = slot // unit.block if slot >= 0 else -1
    place = (unit.group, row, column, block)
    said = f"position {position} has slot {slot}"
    if row < 0 or position < 0 or slot < -1:
        return Broken("L6", f"{said}, {'a padding token has none' if slot >= 0 else 'padding is -1'}", *place)
    owner = position % unit.span // unit.interleave % unit.ranks
    if unit.ranks > 1 and (slot < 0) != (right < 0):
        return Broken("L13", f"{said} on rank {rank}, its owner is rank {owner}", *place)
    if slot >= 0 and block == 0:
        return Broken("L6", f"{said}, in the null block", *place)
    return Broken("L7", f"{said} instead of {right}", *place)


def writers_broken(unit: Unit, slots: Any, token_row: Any, others: Any) -> Iterator[Broken]:
    """Yield a block that is written while another row holds it too, or through two rows in one step (L8).

    ``token_row`` names the row of each token, ``others`` how many other rows have held its block since before the step:
    one that came to it in this step reads what the step writes, which is no fault.
    """
    at = np.flatnonzero(slots >= 0)
    blocks, rows = slots[at] // unit.block, token_row[at]
    shared = np.flatnonzero(others[at] > 0)
    if shared.size:
        i = int(shared[0])
        block, row = int(blocks[i]), int(rows[i])
        said = f"block {block} is written while {int(others[at[i]])} other rows hold it"
        yield Broken("L8", said, unit.group, row, block=block)
        return
    order = np.lexsort((rows, blocks))
    blocks, rows = blocks[order], rows[order]
    twice = np.flatnonzero((blocks[1:] == blocks[:-1]) & (rows[1:] != rows[:-1]))
    if twice.size:
        i = int(twice[0])
        block, one, other = int(blocks[i]), int(rows[i]), int(rows[i + 1])
        said = f"rows {one} and {other} both write block {block} in one step"
        yield Broken("L8", said, unit.group, other, block=block)


def each_token(rows: Any, query_start_loc: Any) -> tuple[Ints, Ints]:
    """Return, per token of a step, the index of its request and its row."""
    request = np.repeat(np.arange(len(rows)), np.diff(query_start_loc))
    return request, np.asarray(rows, np.int64)[request]


def as_numbers(value: Any) -> Ints:
    """Return NumPy arrays, lists and tensors of any device as a NumPy array of integers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
