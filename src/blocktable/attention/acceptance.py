"""What a kernel does to its block table before it reads a single page: take it, or refuse it in its own words."""

import torch

from blocktable.contracts import Contract
from blocktable.errors import ContractError

__all__ = ["accept"]

_ANY = Contract("the table")


def accept(
    contract: Contract | None,
    table: torch.Tensor,
    block_size: int,
    *,
    max_seq_len: int | None = None,
    num_blocks: torch.Tensor | None = None,
) -> None:
    """Raise `ContractError`, with the kernel's own text, where the kernel of ``contract`` would refuse ``table`` or misread it.

    ``table`` is [B, W] or, split, [B, 2, W], as the kernel gets it: shape, strides and dtype are its own. ``num_blocks``
    [B] are the live kernel blocks of each row, looked at by contracts whose kernels take the rest for null. Without a
    contract the table must be int32. Cost: microseconds.

    >>> from blocktable import get_contract
    >>> accept(get_contract("FLASHINFER_MLA"), torch.zeros(8, 295, dtype=torch.int32), 32, max_seq_len=9416)
    Traceback (most recent call last):
    ...
    blocktable.errors.ContractError: Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32
    """
    kernel = contract or _ANY
    kernel.check_table(
        tuple(table.shape), block_size, max_seq_len=max_seq_len, strides=table.stride(), dtype=table.dtype
    )
    if kernel.tail == "null" and num_blocks is not None:
        _null_tail(kernel, table, num_blocks)


def _null_tail(kernel: Contract, table: torch.Tensor, num_blocks: torch.Tensor) -> None:
    column = torch.arange(table.shape[-1], device=table.device)
    tail = column >= num_blocks.view(-1, *[1] * (table.dim() - 1))
    if bool((table * tail).any()):
        raise ContractError(
            f"{kernel.name} takes entries past the live ones for the null block, and they hold something else",
            law="L4",
            values={"contract": kernel.name, "check": "tail"},
            remedy="gather the table anew, so that its tail is null",
        )
