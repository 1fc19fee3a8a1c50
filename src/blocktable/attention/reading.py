"""Which cells of the memory each query token of a step reads; worked out once per step and group, used by every layer.

A row of length n whose last q tokens are queries at positions n - q .. n - 1: query p reads positions 0 .. p, or the last
``window`` of them. Rows with as many queries as each other are read together, as a decode kernel does with its rows
of one.

A kernel that ignores the tail of a row reads its live tokens and nothing else. One that walks tiles reads the last tile
whole, cells past the row's end included, and drops what it has no use for.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from blocktable._ints import align_up
from blocktable.attention.layouts import Table

__all__ = ["Part", "Reading"]


@dataclass(frozen=True)
class Part:
    """Rows that are read together: n rows of q query tokens each, over at most L cells.

    ``tokens`` int64 [n · q] are the queries' places in the step; ``cells`` int64 [planes, n, L]; ``mask`` bool
    [n, 1, q, L] says which of the cells count; ``dead`` bool [n, L] marks loaded cells that no query of the row may use
    (None: there are none).
    """

    tokens: torch.Tensor
    cells: torch.Tensor
    mask: torch.Tensor
    dead: torch.Tensor | None
    _biases: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, init=False)

    def bias(self, shared: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask as what is added to scores [n, heads, shared · q, L], 0 or -inf; made once for all layers."""
        if (shared, dtype) not in self._biases:
            zero = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            lined = zero.masked_fill_(~self.mask, float("-inf")).repeat(1, 1, shared, 1)
            self._biases[shared, dtype] = lined
        return self._biases[shared, dtype]


class Reading:
    """The parts of one step for one group.

    ``lengths`` and ``starts`` are the rows' lengths after the step and the offsets of their query tokens, as lists;
    ``window`` is 0 for full attention. Cost: some operations on index tensors per part.

    >>> table = Table(None, 2, 8, 1, torch.tensor([[5, 3]]), torch.tensor([2]), torch.tensor([[5, 3]]))
    >>> part = Reading(table, lengths=[3], starts=[0, 2]).parts[0]
    >>> part.cells[0].tolist(), part.mask[0, 0].int().tolist()
    ([[10, 11, 6]], [[1, 1, 0], [1, 1, 1]])
    """

    def __init__(self, table: Table, lengths: list[int], starts: list[int], window: int = 0) -> None:
        self.table = table
        alike: dict[int, list[int]] = {}
        for row, (before, after) in enumerate(pairwise(starts)):
            if after > before:
                alike.setdefault(after - before, []).append(row)
        pages = [table.pages(plane) for plane in range(table.planes)]
        self.parts = [
            _part(
                table,
                pages,
                rows,
                [lengths[row] for row in rows],
                [starts[row] for row in rows],
                count,
                window,
            )
            for count, rows in alike.items()
        ]


def _part(
    table: Table,
    pages: list[torch.Tensor],
    rows: list[int],
    lengths: list[int],
    starts: list[int],
    queries: int,
    window: int,
) -> Part:
    device = table.dense.device
    length = torch.tensor(lengths, device=device)[:, None]
    # A window's first reader is the row's first query; what lies before may be null already.
    first = (length - queries - window + 1).clamp(min=0) if window else torch.zeros_like(length)
    tile = table.tile() * table.block_size
    width = table.dense.shape[-1] * table.block_size
    ends = [min(align_up(n, tile), width) if tile else n for n in lengths]
    most = max(end - before for end, before in zip(ends, first[:, 0].tolist(), strict=True))
    position = first + torch.arange(most, device=device)
    # Rows of a part are padded to the longest by cells that they hold anyway.
    last = torch.tensor(ends, device=device)[:, None] - 1
    loaded = torch.minimum(position, last)
    row = torch.tensor(rows, device=device)[:, None]
    block, offset = loaded // table.block_size, loaded % table.block_size
    cells = torch.stack([page[row, block] * table.block_size + offset for page in pages])
    query = (length - queries + torch.arange(queries, device=device))[:, :, None]
    mask = position[:, None] <= query
    if window:
        mask &= position[:, None] > query - window
    dead = position >= length
    tokens = torch.tensor(starts, device=device)[:, None] + torch.arange(queries, device=device)
    return Part(tokens.view(-1), cells, mask[:, None], dead if tile and bool(dead.any()) else None)
