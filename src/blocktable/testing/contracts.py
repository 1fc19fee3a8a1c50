"""For the tests of engines and kernels: a contract says what the kernel does, and everybody uses one width."""

from collections.abc import Callable, Iterable, Mapping

from blocktable.contracts.contract import Contract
from blocktable.errors import ArgumentError, ContractError
from blocktable.geometry import Geometry

__all__ = ["assert_widths_agree", "check_contract"]


def check_contract(
    contract: Contract,
    validator: Callable[[tuple[int, int], int], object],
    block_sizes: Iterable[int] = range(1, 1025),
    widths: Iterable[int] = range(1, 257),
    *,
    max_seq_len: int | None = None,
) -> None:
    """Raise `AssertionError` at the first table that a contract and the kernel's own validator judge differently.

    Parameters
    ----------
    validator
        ``validator(shape, block_size)`` raises, whatever it likes, where the kernel would refuse an int32 table of shape
        (1, width) in blocks of ``block_size`` tokens.
    max_seq_len
        The longest sequence in tokens, for contracts whose width rule compares with it.

    Cost: one call of both per block size and width, a few seconds for the default 262,144.

    >>> from blocktable import FloatModulus
    >>> def validator(shape, block_size):
    ...     if shape[-1] % (128 / block_size):
    ...         raise ValueError("misaligned")
    >>> check_contract(Contract("MINE", width_rule=FloatModulus(128)), validator, block_sizes=(32, 96, 256))
    >>> check_contract(Contract("MINE"), validator, block_sizes=(32,))
    Traceback (most recent call last):
    ...
    AssertionError: MINE, block size 32, width 1: the contract accepts what the kernel refuses (ValueError: misaligned)
    """
    every_width = tuple(widths)
    for block_size in block_sizes:
        for width in every_width:
            ours = _contract_refusal(contract, width, block_size, max_seq_len)
            theirs = _kernel_refusal(validator, width, block_size)
            if (ours is None) != (theirs is None):
                verdict = (
                    f"accepts what the kernel refuses ({theirs})"
                    if ours is None
                    else f"refuses ({ours}) what the kernel accepts"
                )
                raise AssertionError(f"{contract.name}, block size {block_size}, width {width}: the contract {verdict}")


def _contract_refusal(contract: Contract, width: int, block_size: int, max_seq_len: int | None) -> str | None:
    try:
        contract.check_table((1, width), block_size, max_seq_len=max_seq_len)
    except ContractError as error:
        if "missing" in error.values:
            raise  # a question that cannot be answered is no refusal
        return str(error)
    return None


def _kernel_refusal(validator: Callable[[tuple[int, int], int], object], width: int, block_size: int) -> str | None:
    try:
        validator((1, width), block_size)
    except Exception as error:  # noqa: BLE001 - a kernel's validator raises what it likes
        return f"{type(error).__name__}: {error}"
    return None


def assert_widths_agree(widths: Mapping[str, int], geometry: Geometry) -> None:
    """Raise `AssertionError` unless every buffer of one table has the geometry's width, and all the same one.

    Parameters
    ----------
    widths
        Where a width is computed, and what it is: ``{"group spec": …, "metadata builder": …, "indexer": …}``. All of them
        in manager blocks (``geometry.width``), or all in kernel blocks (``geometry.kernel_width``).

    >>> from blocktable import plan
    >>> geometry = plan(max_model_len=120_000, block_size=64, contracts=["FLASHINFER_MLA"])
    >>> assert_widths_agree({"runner": 1876, "indexer": 1876}, geometry)
    >>> assert_widths_agree({"runner": 1876, "indexer": 1875}, geometry)
    Traceback (most recent call last):
    ...
    AssertionError: widths disagree: runner 1876, indexer 1875; the geometry has 1876
    """
    if not widths:
        raise ArgumentError("no widths to compare", remedy="name each place that computes a width")
    allowed = (geometry.width, geometry.kernel_width)
    if any(all(width == one for width in widths.values()) for one in allowed):
        return
    named = ", ".join(f"{name} {width}" for name, width in widths.items())
    units = f"{allowed[1]}" if geometry.ratio == 1 else f"{allowed[0]} manager blocks, {allowed[1]} kernel blocks"
    raise AssertionError(f"widths disagree: {named}; the geometry has {units}")
