"""Judge a table by a contract: one function per demand, and the error in the kernel's own words.

Each function returns what is wrong, in our words, or "". Where the kernel raises by itself, its text takes their place.
"""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from blocktable._ints import align_up
from blocktable.contracts.fields import FIELDS, SCALAR_TYPES, accepts, describe_sizes
from blocktable.errors import ArgumentError, ContractError

if TYPE_CHECKING:
    from blocktable.contracts.contract import Contract
    from blocktable.contracts.rules import Widths

__all__ = ["Table", "judge"]

_INT32_MAX = 2**31 - 1
_ENTRY = 4  # bytes: a column is an int32


class Table(NamedTuple):
    """A table as its kernel sees it: strides in elements (None: contiguous), the longest sequence in tokens."""

    shape: tuple[int, ...]
    block_size: int
    max_seq_len: int | None
    dtype: str
    strides: tuple[int, ...] | None


def judge(contract: "Contract", table: Table) -> None:
    """Raise `ContractError` for the first demand that is not met, in the order in which the kernel tests them."""
    for check in _WIDTH_FIRST if contract.width_first else _BLOCK_FIRST:
        if problem := check(contract, table):
            raise _error(contract, check.__name__.removeprefix("_"), problem, table)


def _layout(contract: "Contract", table: Table) -> str:
    shape = table.shape
    if len(shape) == 2 or (contract.layout == "split" and len(shape) == 3 and shape[1] == 2):
        return ""
    wanted = "[B, W] or [B, 2, W]" if contract.layout == "split" else "[B, W]"
    return f"takes a table {wanted}, got shape {list(shape)}"


def _min_width(contract: "Contract", table: Table) -> str:
    if table.shape[-1] >= contract.min_width:
        return ""
    return f"needs at least {contract.min_width} columns, got {table.shape[-1]}"


def _width(contract: "Contract", table: Table) -> str:
    width = table.shape[-1]
    multiple, low, high = contract.width_rule.widths(table.block_size, table.max_seq_len)
    if width % multiple == 0 and width >= low and (high is None or width <= high):
        return ""
    # Where the kernel has a text, it will take the place of ours.
    return contract.error_text or (
        f"needs {contract.width_rule.describe(table.block_size, table.max_seq_len)}, got {width} columns"
    )


def _area(contract: "Contract", table: Table) -> str:
    size = prod(table.shape) * _ENTRY
    if contract.max_table_bytes is None or size <= contract.max_table_bytes:
        return ""
    return f"holds tables of at most {contract.max_table_bytes:,} bytes, got {size:,} ({' · '.join(map(str, table.shape))} · {_ENTRY})"


def _block_size(contract: "Contract", table: Table) -> str:
    if accepts(contract.kernel_block_sizes, table.block_size):
        return ""
    return f"takes kernel blocks of {describe_sizes(contract.kernel_block_sizes)} tokens, got {table.block_size}"


def _dtype(contract: "Contract", table: Table) -> str:
    if table.dtype == contract.dtype:
        return ""
    return f"reads {'an' if contract.dtype.startswith('i') else 'a'} {contract.dtype} table, got {table.dtype}"


def _strides(contract: "Contract", table: Table) -> str:
    shape, strides = table.shape, table.strides
    if strides is None or contract.strides == "any":
        return ""
    if len(strides) != len(shape):
        raise ArgumentError(
            f"{len(strides)} strides for a table of {len(shape)} dimensions",
            values={"shape": shape, "strides": strides},
            remedy="give one stride per dimension, in elements",
        )
    if contract.strides == "last":
        return "" if strides[-1] == 1 else f"takes columns side by side (stride 1), got strides {list(strides)}"
    expected = 1
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        # A dimension of one element is never stepped over, so its stride cannot matter.
        if stride != expected and count != 1:
            return f"takes the width {shape[-1]} as the row stride, got strides {list(strides)}"
        expected *= count
    return ""


_BLOCK_FIRST = (_layout, _block_size, _min_width, _width, _area, _dtype, _strides)
_WIDTH_FIRST = (_layout, _min_width, _width, _area, _block_size, _dtype, _strides)


def _error(contract: "Contract", check: str, problem: str, table: Table) -> ContractError:
    """Return the error; ``raised`` in its values is empty where the kernel itself raises nothing and misreads."""
    shape, block_size, max_seq_len, dtype, strides = table
    raised, text = contract.raised, contract.error_text
    if check != "width":
        raised, _, text = dict(contract.refusals).get(check, "").partition(": ")
    values: dict[str, object] = {
        "contract": contract.name,
        "engine": contract.engine,
        "check": check,
        "shape": shape,
        "width": shape[-1] if shape else 0,
        "block_size": block_size,
        "max_seq_len": max_seq_len,
        "dtype": dtype,
        "strides": strides,
        "raised": raised,
        "where": contract.where,
    }
    if check in ("width", "min_width"):
        widths = contract.widths(block_size, max_seq_len)
        values["multiple"], values["min_width"], values["max_width"] = widths
        remedy = _better_width(table, widths)
    elif check == "block_size":
        remedy = f"use a kernel block of {describe_sizes(contract.kernel_block_sizes)} tokens"
    else:
        remedy = _REMEDIES[check]
    words = _fill(text, values, table) if text else f"{contract.name} {problem}"
    return ContractError(words, law="L1", values=values, remedy=remedy)


_REMEDIES = {
    "layout": "pass the table in the layout that the contract names",
    "area": "take larger blocks, or fewer rows",
    "dtype": "pass the table in the dtype that the contract names",
    "strides": "pass a contiguous copy",
}


def _fill(text: str, values: dict[str, object], table: Table) -> str:
    names: dict[str, object] = {
        "name": values["contract"],
        "block_num": values["width"],
        "page_size": table.block_size,
        "batch": table.shape[0] if table.shape else 0,
        "rank": len(table.shape),
        "scalar_type": SCALAR_TYPES.get(table.dtype, "Other"),
    }
    return text.format_map(dict.fromkeys(FIELDS, "?") | values | names)


def _better_width(table: Table, widths: "Widths") -> str:
    multiple, low, high = widths
    width = align_up(max(table.shape[-1], low), multiple)
    if high is not None and width > high:
        width = high // multiple * multiple
    if low <= width <= _INT32_MAX:
        return f"allocate {width} columns"
    return f"use another block size: no table of {table.block_size}-token blocks is accepted"
