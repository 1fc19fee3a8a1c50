"""The memory of a paged KV cache: one tensor per layer, cut into blocks."""

from typing import Any

import torch

from blocktable.errors import ArgumentError

__all__ = ["BlockMemory"]


class BlockMemory:
    """Blocks of one layer's keys and values (two planes), or of its latents (one plane), at fixed addresses.

    ``blocks`` [num_blocks, elements] is a manager block per line. For a kernel with blocks of b tokens the same bytes are
    *pages* of b tokens: K of kernel block m is page 2m and V page 2m + 1, as in the split table layout; a latent of kernel
    block m is page m. A *cell* is one token's heads in a page: [heads, head_dim].

    >>> memory = BlockMemory(num_blocks=4, block_size=2, heads=1, head_dim=3, planes=2)
    >>> memory.write(memory.places(torch.tensor([2, 3]), 2), torch.ones(2, 1, 3), 2 * torch.ones(2, 1, 3))
    >>> memory.cells(2)[4:8, 0, 0].tolist()              # block 1: two keys, then two values
    [1.0, 1.0, 2.0, 2.0]
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        heads: int,
        head_dim: int,
        planes: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ) -> None:
        self.num_blocks, self.block_size, self.planes = num_blocks, block_size, planes
        self.heads, self.head_dim = heads, head_dim
        self.blocks = torch.zeros(num_blocks, planes * block_size * heads * head_dim, dtype=dtype, device=device)
        self._cells = self.blocks.view(-1, heads, head_dim)

    def cells(self, kernel_block: int) -> torch.Tensor:
        """Return the memory as cells [pages · kernel_block, heads, head_dim] of a kernel with such blocks."""
        if self.block_size % kernel_block:
            raise ArgumentError(
                f"kernel blocks of {kernel_block} tokens do not cut manager blocks of {self.block_size}",
                law="L12",
                values={"block_size": self.block_size, "kernel_block_size": kernel_block},
                remedy="take the kernel block of the group's geometry",
            )
        return self._cells

    def places(self, slots: torch.Tensor, kernel_block: int) -> torch.Tensor:
        """Return where slots [n] (int64) lie in ``cells``, a line per plane: int64 [planes, n]; leave pad slots out."""
        self.cells(kernel_block)  # refuses blocks that do not cut these
        first = slots + (self.planes - 1) * (slots // kernel_block * kernel_block)
        return torch.stack([first + plane * kernel_block for plane in range(self.planes)])

    def write(self, places: torch.Tensor, *planes: torch.Tensor) -> None:
        """Write tokens [n, heads, head_dim] into the cells that ``places`` returned, one tensor per plane."""
        for place, tokens in zip(places, planes, strict=True):
            self._cells.index_copy_(0, place, tokens)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole manager blocks, before a step's writes (copy-on-write)."""
        self.blocks[targets] = self.blocks[sources]

    def poison(self, blocks: torch.Tensor) -> None:
        """Fill manager blocks with NaN, so that whoever reads them shows it."""
        self.blocks[blocks] = float("nan")

    def poison_slots(self, slots: torch.Tensor, kernel_block: int) -> None:
        """Fill single slots [n] with NaN."""
        self._cells[self.places(slots, kernel_block).view(-1)] = float("nan")
