"""`plan`: limits and contracts give a frozen `Geometry`, the one place from which every table takes its width (law L1).

>>> geometry = plan(max_model_len=9416, block_size=544, contracts=["FLASHINFER_MLA"])
>>> geometry.kernel_block_size, geometry.min_blocks, geometry.width, geometry.kernel_width, geometry.padding
(32, 18, 18, 308, 2)
>>> geometry.check((8, 308))
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, NoReturn

from blocktable._ints import align_up, ceil_div, lcm
from blocktable._remedies import explain, integer, own_policy, ways, wrong
from blocktable.contracts.contract import Contract, common_kernel_block
from blocktable.contracts.fields import describe_sizes
from blocktable.contracts.releases import Release
from blocktable.errors import ArgumentError, GeometryError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["Geometry", "plan", "ways_out"]

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
MAX_COLUMNS = 2**28
"""The widest row planned: 1 GiB of int32 ids. A wider one is a mistaken unit, not a model."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of one group's table; made by `plan`.

    ``width`` counts manager blocks, ``kernel_width`` the columns that the kernel sees; ``padding`` is what
    ``kernel_width`` has beyond ``min_blocks``. ``reasons`` says which contract decided what, in sentences.
    """

    max_model_len: int
    lookahead: int
    extra_blocks: int
    block_size: int
    kernel_block_size: int
    min_blocks: int
    width: int
    kernel_width: int
    padding: int
    cp_size: int
    cp_interleave: int
    contracts: tuple[Contract, ...]
    engine: Release | None
    reasons: tuple[str, ...]

    def __repr__(self) -> str:
        """Say the limits and the width; what is usual is left out."""
        unusual = {"lookahead": 0, "extra_blocks": 0, "kernel_block_size": self.block_size, "kernel_width": self.width}
        unusual |= {"padding": 0, "cp_size": 1, "cp_interleave": 1}
        said = [f"{name}={getattr(self, name)}" for name in ("max_model_len", "block_size", "width")]
        said += [f"{name}={getattr(self, name)}" for name, usual in unusual.items() if getattr(self, name) != usual]
        named = ", ".join(contract.name for contract in self.contracts)
        return f"Geometry({', '.join(said)}{f', for {named}' if named else ''})"

    @property
    def ratio(self) -> int:
        """Kernel blocks per manager block: manager id m becomes ratio·m .. ratio·m + ratio - 1."""
        return self.block_size // self.kernel_block_size

    @property
    def max_seq_len(self) -> int:
        """The most tokens of one row on one context-parallel rank, lookahead included."""
        return ceil_div(self.max_model_len + self.lookahead, self.cp_size)

    def check(self, shape: Sequence[int], *, strides: Sequence[int] | None = None, dtype: object = "int32") -> None:
        """Raise unless every contract accepts such a table in kernel blocks and it holds ``max_model_len``.

        Parameters
        ----------
        shape
            [B, W], or [B, 2, W] where a contract allows it; W in kernel blocks.
        strides
            In elements; None: contiguous.

        Raises `ContractError` with the kernel's own text, or `GeometryError` for a row too narrow to hold the limit.

        >>> geometry = plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"])
        >>> geometry.check((8, 296))
        >>> geometry.check((8, 295))
        Traceback (most recent call last):
        ...
        blocktable.errors.ContractError: Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32
        """
        for contract in self.contracts or (_UNRESTRICTED,):
            contract.check_table(
                shape, self.kernel_block_size, max_seq_len=self.max_seq_len, strides=strides, dtype=dtype
            )
        width, needed = int(shape[-1]), self.min_blocks * self.ratio
        if width < needed:
            raise GeometryError(
                f"{width} columns of {self.kernel_block_size} tokens are too few for a row: {needed} are needed",
                law="L1",
                values={"width": width, "needed": needed, "ways_out": [{"shape": (*shape[:-1], self.kernel_width)}]},
                remedy=f"allocate {self.kernel_width} columns",
            )

    def check_pool(self, num_blocks: int, block_stride: int) -> None:
        """Raise `GeometryError` when a pool overflows the integers in which the kernels compute id · stride.

        Parameters
        ----------
        num_blocks
            Manager blocks of the pool, null block included.
        block_stride
            Elements from one manager block to the next.

        >>> geometry = plan(max_model_len=4096, block_size=16)
        >>> geometry.check_pool(7767, 276480)
        >>> geometry.check_pool(7768, 276480)
        Traceback (most recent call last):
        ...
        blocktable.errors.GeometryError: 7768 blocks of 276480 elements reach offset 2147696640, past int32; \
use at most 7767 blocks [L12]
        """
        blocks, stride = integer(num_blocks, "num_blocks"), integer(block_stride, "block_stride")
        narrow = [one.name for one in self.contracts if one.offset_type == "int32"]
        kind, limit = ("int64", _INT64_MAX) if self.contracts and not narrow else ("int32", _INT32_MAX)
        most = min(limit // stride, (_INT32_MAX + 1) // self.ratio)
        if blocks <= most:
            return
        if blocks * stride > limit:
            text = f"{blocks} blocks of {stride} elements reach offset {blocks * stride}, past {kind}"
        else:
            text = f"{blocks} blocks of {self.ratio} kernel blocks each need ids past int32"
        raise GeometryError(
            text + (f" of {', '.join(narrow)}" if narrow else ""),
            law="L12",
            values={
                "num_blocks": blocks,
                "block_stride": stride,
                "offset_type": kind,
                "ways_out": [{"num_blocks": most}] if most else [{"num_blocks": 1, "block_stride": limit}],
            },
            remedy=f"use at most {most} blocks" if most else f"use blocks of at most {limit} elements",
        )

    def kernel_ids(self, ids: "ArrayLike", num_tokens: int | None = None) -> "NDArray[np.int32]":
        """Expand manager block ids [n] into kernel block ids, int32 [n · ratio].

        Id m becomes ratio·m .. ratio·m + ratio - 1, so the null block becomes 0 .. ratio - 1. With ``num_tokens`` only
        the ceil(num_tokens / kernel_block_size) kernel blocks that hold tokens are kept.

        >>> plan(max_model_len=512, block_size=128, contracts=["vllm:FLASHMLA"]).kernel_ids([4, 9], num_tokens=160).tolist()
        [8, 9, 18]
        """
        import numpy as np  # noqa: PLC0415 - planning and checking need no arrays

        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
            raise ArgumentError(
                f"ids must be a one-dimensional array of integers, got {given.dtype} of shape {given.shape}", law="L12"
            )
        last = _INT32_MAX // self.ratio if self.ratio > 1 else _INT32_MAX
        most = (_INT32_MAX + 1) // self.ratio - 1
        if given.size and (int(given.min()) < 0 or int(given.max()) > most):
            raise ArgumentError(
                f"block ids must be between 0 and {most}, got {int(given.min())} to {int(given.max())}",
                law="L12",
                values={"least": int(given.min()), "largest": int(given.max()), "limit": last},
            )
        blocks = given.astype(np.int64)
        kernel = (blocks[:, None] * self.ratio + np.arange(self.ratio)).astype(np.int32).reshape(-1)
        if num_tokens is None:
            return kernel
        live = ceil_div(integer(num_tokens, "num_tokens", least=0), self.kernel_block_size)
        if live > kernel.size:
            raise ArgumentError(
                f"{num_tokens} tokens need {live} kernel blocks, and {given.size} ids give {kernel.size}",
                law="L12",
                values={"num_tokens": num_tokens, "needed": live, "given": kernel.size},
            )
        return kernel[:live]


_UNRESTRICTED = Contract("the table")


def plan(
    *,
    max_model_len: int,
    block_size: int,
    contracts: Iterable[Contract | str] = (),
    engine: str | Release | None = None,
    lookahead: int = 0,
    extra_blocks: int = 0,
    cp_size: int = 1,
    cp_interleave: int = 1,
) -> Geometry:
    """Return the smallest geometry that holds the limit and that every contract accepts.

    Parameters
    ----------
    max_model_len, lookahead
        Tokens a row must hold: the limit, and speculative slots past it.
    block_size
        Tokens per manager block; the kernel block is the largest size every contract accepts that divides it.
    contracts
        `Contract` objects, or names as `get_contract` takes them (looked up in the release when an engine is given).
    engine
        A release such as ``"vllm==0.32.0"``: the width it allocates is returned instead, unjudged, and lookahead does not
        widen it; `Geometry.check` judges.
    extra_blocks
        Manager blocks beyond what the tokens need.
    cp_size, cp_interleave
        Context-parallel ranks a row is split over, and the tokens that go to one rank in turn; it divides block_size.

    Raises `GeometryError` when there is no such geometry; its ``ways_out`` are arguments that, put in place of those given,
    are accepted. Cost: microseconds, without any catalogue when no name is given.

    >>> plan(max_model_len=9416, block_size=32).kernel_width
    295
    >>> plan(max_model_len=9416, block_size=544, contracts=["FLASHINFER_MLA"], engine="vllm==0.32.0").kernel_width
    340
    >>> plan(max_model_len=9416, block_size=48, contracts=["FLASHINFER_MLA"])
    Traceback (most recent call last):
    ...
    blocktable.errors.GeometryError: no kernel block divides 48 and suits FLASHINFER_MLA (32 or 64); ways out: \
block_size 32, 64, 128 or 256 [L1]
    """
    release = _as_release(engine)
    request: dict[str, Any] = {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "contracts": _as_contracts(contracts, release),
        "engine": release,
        "lookahead": lookahead,
        "extra_blocks": extra_blocks,
        "cp_size": cp_size,
        "cp_interleave": cp_interleave,
    }
    try:
        return _solve(**request)
    except GeometryError as error:
        raise explain(error, request, _solve) from None


def ways_out(geometry: Geometry) -> list[dict[str, Any]]:
    """Return changes to the arguments of `plan` under which the result passes its own check, each of them tried.

    For a geometry whose own table is refused, as an engine's width may be. ``max_model_len`` comes as the nearest length
    below and both ends of the nearest range above.

    >>> refused = plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"], engine="vllm==0.19.1")
    >>> ways_out(refused)[:3]
    [{'max_model_len': 9344}, {'max_model_len': 9441}, {'max_model_len': 9472}]
    """
    return ways({name: getattr(geometry, name) for name in _ARGUMENTS}, _solve_and_check)


_ARGUMENTS = (
    *("max_model_len", "block_size", "contracts", "engine"),
    *("lookahead", "extra_blocks", "cp_size", "cp_interleave"),
)


def _solve_and_check(**request: Any) -> None:
    geometry = _solve(**request)
    geometry.check((1, geometry.kernel_width))


def _as_release(engine: str | Release | None) -> Release | None:
    if engine is None or isinstance(engine, Release):
        return engine
    from blocktable.contracts.engines import resolve_engine  # noqa: PLC0415 - no catalogue unless a release is named

    return resolve_engine(engine)


def _as_contracts(contracts: Any, release: Release | None) -> tuple[Contract, ...]:
    if isinstance(contracts, str | Contract) or not isinstance(contracts, Iterable):
        better: list[Any] = [contracts] if isinstance(contracts, str | Contract) else []
        raise GeometryError(
            f"contracts must be a sequence of contracts or names, got {contracts!r}",
            values={"contracts": contracts, "ways_out": [{"contracts": better}]},
            remedy=f"write contracts={better}",
        )
    return tuple(_as_contract(one, release) for one in contracts)


def _as_contract(contract: Any, release: Release | None) -> Contract:
    if isinstance(contract, Contract):
        return contract
    from blocktable.contracts.lookup import get_contract  # noqa: PLC0415 - no catalogue unless a name is given

    if release is not None and isinstance(contract, str) and ":" not in contract and "@" not in contract:
        return get_contract(contract, engine=release.engine, version=release.version)
    return get_contract(contract)


def _solve(
    *,
    max_model_len: Any,
    block_size: Any,
    contracts: tuple[Contract, ...],
    engine: Release | None,
    lookahead: Any,
    extra_blocks: Any,
    cp_size: Any,
    cp_interleave: Any,
) -> Geometry:
    limit, block = integer(max_model_len, "max_model_len"), integer(block_size, "block_size")
    ahead, extra = integer(lookahead, "lookahead", least=0), integer(extra_blocks, "extra_blocks", least=0)
    ranks, interleave = integer(cp_size, "cp_size"), integer(cp_interleave, "cp_interleave")
    if block % interleave:
        wrong(f"cp_interleave {interleave} does not divide block_size {block}", "cp_interleave", gcd(interleave, block))
    if engine is not None:
        ahead = 0
        if extra:
            wrong(f"extra_blocks is none of the engine's: {engine} allocates what it allocates", "extra_blocks", 0)
    kernel = _kernel_block(block, contracts)
    ratio = block // kernel
    needed = ceil_div(limit + ahead, block * ranks) + extra
    if needed * ratio > MAX_COLUMNS:
        _too_wide(needed * ratio, limit, ahead, extra, (MAX_COLUMNS // ratio - extra) * block * ranks - ahead)
    if engine is None:
        columns, reasons = _fewest_columns(needed * ratio, kernel, ceil_div(limit + ahead, ranks), contracts)
        width = columns // ratio
    else:
        width = engine.width(max_model_len=limit, block_size=block, cp_size=ranks, policy=own_policy(contracts))
        columns = width * ratio
        reasons = (f"{engine} allocates {width} blocks per row, {columns} kernel columns",)
    return Geometry(
        max_model_len=limit,
        lookahead=ahead,
        extra_blocks=extra,
        block_size=block,
        kernel_block_size=kernel,
        min_blocks=needed,
        width=width,
        kernel_width=columns,
        padding=columns - needed * ratio,
        cp_size=ranks,
        cp_interleave=interleave,
        contracts=contracts,
        engine=engine,
        reasons=(_why_kernel(kernel, block, contracts), *reasons),
    )


def _too_wide(columns: int, limit: int, ahead: int, extra: int, longest: int) -> NoReturn:
    """Refuse a row wider than any real one, and suggest a value for the setting that makes it so."""
    text = f"a row of {columns} columns is more than {MAX_COLUMNS}"
    if longest >= 1:
        wrong(text, "max_model_len", longest, max_model_len=limit)
    if extra or ahead:
        wrong(text, "extra_blocks" if extra else "lookahead", 0, extra_blocks=extra, lookahead=ahead)
    wrong(text, "block_size", 64)


def _kernel_block(block: int, contracts: tuple[Contract, ...]) -> int:
    for contract in contracts:
        if not contract.accepts_manager(block):
            sizes = describe_sizes(contract.manager_block_sizes)
            raise GeometryError(
                f"{contract.name} takes manager blocks of {sizes} tokens, got {block}",
                law="L1",
                values={"contract": contract.name, "block_size": block, "accepted": contract.manager_block_sizes},
            )
        if contract.answers_wrongly(block):
            raise GeometryError(
                f"{contract.name} answers wrongly with blocks of {block} tokens: {contract.wrong_why}",
                law="L1",
                values={"contract": contract.name, "block_size": block, "wrong": contract.wrong_blocks},
            )
    kernel = common_kernel_block(block, contracts)
    if kernel is not None:
        return kernel
    sets = " and ".join(f"{one.name} ({describe_sizes(one.kernel_block_sizes)})" for one in contracts)
    raise GeometryError(
        f"no kernel block divides {block} and suits {sets}",
        law="L1",
        values={"block_size": block, "accepted": {one.name: one.kernel_block_sizes for one in contracts}},
    )


def _why_kernel(size: int, block: int, contracts: tuple[Contract, ...]) -> str:
    if size == block:
        return f"the kernel takes manager blocks of {block} tokens whole"
    deciding = [one for one in contracts if not one.accepts_block(block)]
    sets = " and ".join(f"{one.name} ({describe_sizes(one.kernel_block_sizes)})" for one in deciding)
    return f"kernel block {size}: the largest that divides {block} and suits {sets}"


def _fewest_columns(
    needed: int, kernel: int, max_seq_len: int, contracts: tuple[Contract, ...]
) -> tuple[int, tuple[str, ...]]:
    """Return the smallest width of at least ``needed`` columns that every contract accepts, and why."""
    multiple, low, high = 1, needed, None
    for contract in contracts:
        widths = contract.widths(kernel, max_seq_len)
        multiple, low = lcm(multiple, widths.multiple), max(low, widths.low)
        high = widths.high if high is None else min(high, high if widths.high is None else widths.high)
    columns = align_up(low, multiple)
    if columns > MAX_COLUMNS or (high is not None and columns > high):
        demands = [
            f"{one.name} needs {one.width_rule.describe(kernel, max_seq_len)}"
            for one in contracts
            if one.widths(kernel, max_seq_len) != (1, 0, None)
        ]
        raise GeometryError(
            f"no width of {needed} or more columns of {kernel} tokens: {'; '.join(demands)}",
            law="L1",
            values={"needed": needed, "kernel_block_size": kernel, "multiple": multiple, "low": low, "high": high},
        )
    if columns == needed:
        return columns, (f"no padding: {needed} columns are accepted as they are",)
    return columns, tuple(
        f"{columns} columns in place of {needed}: {one.name} needs {one.width_rule.describe(kernel, max_seq_len)}"
        for one in contracts
        if needed not in one.widths(kernel, max_seq_len)
    )
