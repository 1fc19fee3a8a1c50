"""The layouts in which kernels take block tables, each resolved to pages of the memory.

dense   [B, W]      kernel blocks; K of block m is page 2m, V page 2m + 1 (latents: page m)
split   [B, 2, W]   the pages of K and of V themselves
csr     indptr [B + 1], indices: the live kernel blocks of one row behind those of another
"""

from dataclasses import dataclass
from typing import Any

import torch

from blocktable.attention.acceptance import accept
from blocktable.contracts import Contract

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """One group's block table of one step, in the layout that the kernel of ``contract`` takes.

    ``dense`` is [B, W] int32, ``handed`` what the kernel gets of it: ``dense`` itself, [B, 2, W], or (indptr, indices).
    ``num_blocks`` [B] are the live kernel blocks of each row, ``block_size`` the kernel block in tokens, ``planes`` as in
    ``BlockMemory``.
    """

    contract: Contract | None
    block_size: int
    max_seq_len: int
    planes: int
    dense: torch.Tensor
    num_blocks: torch.Tensor
    handed: Any

    @classmethod
    def of(
        cls, batch: Any, group: int, contract: Contract | None, block_size: int, max_seq_len: int, planes: int
    ) -> "Table":
        """Take a group's table from a ``blocktable.device`` batch, gathered with lengths.

        >>> import blocktable
        >>> from blocktable.device import DeviceTables
        >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
        >>> tables.append([1], [0, 3], [3, 7, 9])
        >>> device = DeviceTables(tables, "cpu")
        >>> device.apply(tables.commit())
        >>> Table.of(device.gather([1], 1, [40]), 0, None, 16, 64, planes=2).pages(0).tolist()
        [[6, 14, 18, 0]]
        """
        layout = "dense" if contract is None else contract.layout
        handed: Any = batch.tables[group]
        if layout == "split" and planes == 2:
            handed = batch.split(group)
        elif layout == "csr":
            handed = batch.kv_indptr[group], batch.kv_indices[group]
        dense = batch.tables[group]
        return cls(contract, block_size, max_seq_len, planes, dense, batch.num_blocks[group], handed)

    def accept(self) -> None:
        """Raise `ContractError` where the kernel would refuse the table; a flat table is judged by the one it was made from."""
        table = self.dense if isinstance(self.handed, tuple) else self.handed
        accept(self.contract, table, self.block_size, max_seq_len=self.max_seq_len, num_blocks=self.num_blocks)

    def tile(self) -> int:
        """Columns that the kernel loads at a time: it reads the last tile of a row whole, unless it ignores the tail."""
        if self.contract is None or self.contract.tail == "ignored":
            return 0
        return self.contract.widths(self.block_size, self.max_seq_len).multiple

    def pages(self, plane: int) -> torch.Tensor:
        """Return int64 [B, W], the pages of K (plane 0) or V (plane 1); null past the live ones."""
        if isinstance(self.handed, tuple):
            return self._blocks_of_csr(*self.handed) * self.planes + plane
        whole: torch.Tensor = self.handed.long()
        return whole[:, plane] if whole.dim() == 3 else whole * self.planes + plane

    def _blocks_of_csr(self, indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        column = torch.arange(self.dense.shape[1], device=indptr.device)
        live = column < (indptr[1:] - indptr[:-1])[:, None]
        return torch.where(live, indices[(indptr[:-1, None] + column) * live].long(), 0)
