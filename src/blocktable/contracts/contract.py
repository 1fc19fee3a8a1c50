"""`Contract`: what one attention backend demands of its block table, as one frozen record.

>>> from blocktable import TokenMultiple
>>> contract = Contract("MY_MLA", kernel_block_sizes=(32, 64), width_rule=TokenMultiple(128))
>>> contract.check_table((8, 296), 32)
>>> contract.check_table((8, 295), 32)
Traceback (most recent call last):
...
blocktable.errors.ContractError: MY_MLA needs a multiple of 4 (128 tokens / 32), got 295 columns
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from blocktable.contracts.fields import (
    Sizes,
    accepts,
    as_refusals,
    as_rule,
    as_sizes,
    as_strings,
    check_template,
    dimensions,
    dtype_name,
    one_of,
)
from blocktable.contracts.hardware import runs_on
from blocktable.contracts.judging import Table, judge
from blocktable.contracts.releases import WidthPolicy
from blocktable.contracts.rules import AnyWidth, WidthRule, Widths, count
from blocktable.errors import ArgumentError

__all__ = ["Contract", "Evidence", "Layout", "OffsetType", "Strides", "Tail", "common_kernel_block"]

Layout = Literal["dense", "split", "csr"]
Strides = Literal["any", "last", "compact"]
Tail = Literal["ignored", "in-range", "null"]
OffsetType = Literal["int32", "int64"]
Evidence = Literal["run", "read", "inferred", "carried"]

_ANY_WIDTH = AnyWidth()


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What an attention backend demands of its table; `plan` computes from it and `check_table` judges by it.

    Parameters
    ----------
    name, engine, versions
        The backend, the engine it belongs to and the releases it speaks for (a PEP 440 range, ``""`` for all).
    kernel_block_sizes
        Kernel block sizes in tokens, each an int or a `MultipleOf`; empty: any size.
    manager_block_sizes
        The same for manager blocks, where a backend restricts those too.
    default_block_size
        The manager block that the engine takes when none is asked for.
    width_rule, min_width
        The accepted widths in kernel blocks, and the fewest columns whatever the rule says.
    max_table_bytes
        The most that a table may take, rows · width · 4 bytes, where the kernel holds it whole in a memory of its own.
    layout
        ``"dense"`` [B, W] · ``"split"`` [B, W], or [B, 2, W] with ids of K and V apart · ``"csr"``: the engine
        flattens its dense [B, W] table before the call.
    tail
        What entries past the live ones must hold: ``"ignored"`` anything · ``"in-range"`` any id of the pool, the kernel
        loads it · ``"null"`` the null block.
    strides
        ``"any"`` honoured · ``"last"`` stride 1 in the last dimension · ``"compact"`` W is taken as the row stride.
    dtype, offset_type
        The table's dtype, and the integers in which the kernel computes id · stride.
    hardware, head_sizes, max_head_size
        Compute capabilities or platforms it runs on, such as ``"10.0"``, ``"10.x"``, ``"cpu"``, and the head sizes it
        takes; empty or None: not restricted.
    kv_dtypes
        The dtypes of a KV cache that it takes: pairs of a hardware pattern and those dtypes, ``"*"`` for all other hardware;
        empty: not restricted.
    qk_nope_head_sizes
        For MLA models, the head sizes without position that it takes; empty: not restricted.
    unsuited
        Why it does not run all the same: pairs of a hardware pattern and the engine's reason; ``"*"`` for needs that an
        engine's own choice does not meet by itself, such as a package or a KV cache dtype.
    context_parallel, cp_max_interleave, cp_drafts_interleave
        Whether it works under decode context parallelism (None: not known), the largest interleave then, and whether
        drafts may meet an interleave of more than 1.
    fallback_block_size
        The manager block that the engine takes, with a warning at most, in place of one that is not accepted.
    width_policy
        How the engine sizes the rows of this backend, where it differs from its release's policy.
    wrong_blocks, wrong_why
        Manager blocks with which the kernel starts and answers wrongly, and who found that.
    error_text, raised, where
        The text a user sees when the width is refused, with {block_num} and the like to fill in; the exception's type;
        where it is raised.
    refusals
        The same for the other checks (layout, min_width, area, block_size, dtype, strides), as ``"ValueError: text"``.
    width_first
        Whether the kernel tests the width before the block size, which decides the text when both are wrong.
    source, evidence, date, pitfalls
        Where the rule was read, how it is known (run · read · inferred · carried from a near release), when, and what
        bites all the same.
    """

    name: str = field(kw_only=False)
    engine: str = ""
    versions: str = ""
    kernel_block_sizes: Sizes = ()
    manager_block_sizes: Sizes = ()
    default_block_size: int | None = None
    width_rule: WidthRule = _ANY_WIDTH
    min_width: int = 0
    max_table_bytes: int | None = None
    layout: Layout = "dense"
    tail: Tail = "ignored"
    strides: Strides = "any"
    dtype: str = "int32"
    offset_type: OffsetType = "int32"
    hardware: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    max_head_size: int | None = None
    kv_dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    qk_nope_head_sizes: tuple[int, ...] = ()
    unsuited: tuple[tuple[str, str], ...] = ()
    context_parallel: bool | None = None
    cp_max_interleave: int | None = None
    cp_drafts_interleave: bool = False
    fallback_block_size: int | None = None
    width_policy: WidthPolicy | None = None
    wrong_blocks: Sizes = ()
    wrong_why: str = ""
    error_text: str = ""
    raised: str = ""
    where: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
    width_first: bool = False
    source: str = ""
    evidence: Evidence = "read"
    date: str = ""
    pitfalls: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Say whose it is and what it demands of sizes; the rest are attributes."""
        home = f"{self.engine}:" if self.engine else ""
        versions = f"@{self.versions}" if self.versions else ""
        sizes = f"kernel_block_sizes={self.kernel_block_sizes}, " if self.kernel_block_sizes else ""
        return f"Contract('{home}{self.name}{versions}', {sizes}width_rule={self.width_rule})"

    def __post_init__(self) -> None:
        given: object = self.name
        if not isinstance(given, str) or not given:
            raise ArgumentError(f"a contract's name is a non-empty string, got {given!r}")
        for name in ("kernel_block_sizes", "manager_block_sizes", "wrong_blocks"):
            object.__setattr__(self, name, as_sizes(getattr(self, name), name))
        for name in ("head_sizes", "qk_nope_head_sizes"):
            object.__setattr__(self, name, tuple(count(size, name) for size in getattr(self, name)))
        object.__setattr__(
            self, "kv_dtypes", tuple((on, as_strings(some, "kv_dtypes")) for on, some in dict(self.kv_dtypes).items())
        )
        object.__setattr__(self, "unsuited", tuple(dict(self.unsuited).items()))
        object.__setattr__(self, "width_rule", as_rule(self.width_rule))
        object.__setattr__(self, "refusals", as_refusals(self.refusals))
        for name in ("hardware", "pitfalls"):
            object.__setattr__(self, name, as_strings(getattr(self, name), name))
        for name, allowed in (
            ("layout", Layout),
            ("tail", Tail),
            ("strides", Strides),
            ("offset_type", OffsetType),
            ("evidence", Evidence),
        ):
            one_of(getattr(self, name), name, get_args(allowed))
        if self.width_policy is not None:
            one_of(self.width_policy, "width_policy", get_args(WidthPolicy))
        object.__setattr__(self, "min_width", count(self.min_width, "min_width", least=0))
        for name in ("default_block_size", "fallback_block_size", "max_head_size", "max_table_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(getattr(self, name), name))
        check_template(self.error_text, "error_text")
        for _, text in self.refusals:
            check_template(text, "refusals")

    @classmethod
    def from_backend(cls, backend: Any) -> "Contract":
        """Read a contract from an engine's backend class: its name and its supported kernel block sizes.

        The class offers ``get_name()`` and ``get_supported_kernel_block_sizes()``, as vLLM's do; a size is an int or an
        object with ``base``. Such a class states no width rule, so every width is accepted.

        >>> class Backend:
        ...     get_name = staticmethod(lambda: "MINE")
        ...     get_supported_kernel_block_sizes = staticmethod(lambda: [16, 32])
        >>> Contract.from_backend(Backend).kernel_block_sizes
        (16, 32)
        """
        kind = backend if isinstance(backend, type) else type(backend)
        return cls(
            _ask(backend, "get_name"),
            engine=kind.__module__.partition(".")[0],
            kernel_block_sizes=_ask(backend, "get_supported_kernel_block_sizes"),
            source=f"{kind.__module__}.{kind.__qualname__}",
            evidence="run",
        )

    def accepts_block(self, size: int) -> bool:
        """Whether the kernel takes blocks of ``size`` tokens."""
        return accepts(self.kernel_block_sizes, size)

    def accepts_manager(self, size: int) -> bool:
        """Whether the backend takes a manager block of ``size`` tokens, which may still be split into kernel blocks."""
        return accepts(self.manager_block_sizes, size)

    def accepts_head(self, size: int) -> bool:
        """Whether the kernel takes heads of ``size`` elements."""
        return (not self.head_sizes or size in self.head_sizes) and size <= (self.max_head_size or size)

    def accepts_cache(self, dtype: str, hardware: str | None = None) -> bool:
        """Whether the kernel reads a KV cache of that dtype, on that hardware or on some where it is not given.

        >>> contract = Contract("EIGHT_BITS", kv_dtypes={"*": ["auto"], "9.0": ["auto", "fp8"]})
        >>> contract.accepts_cache("fp8"), contract.accepts_cache("fp8", "10.0")
        (True, False)
        """
        if hardware is None:
            return not self.kv_dtypes or any(dtype in some for _, some in self.kv_dtypes)
        found = [some for on, some in self.kv_dtypes if runs_on(on, hardware)]
        found += [some for on, some in self.kv_dtypes if on == "*"]
        return not found or dtype in found[0]

    def effective_block_size(self, size: int) -> int:
        """Return the manager block that the engine really takes when ``size`` is asked for.

        >>> Contract("FORCING", kernel_block_sizes=(32, 64), fallback_block_size=64).effective_block_size(16)
        64
        """
        sizes = self.manager_block_sizes or self.kernel_block_sizes
        return size if self.fallback_block_size is None or accepts(sizes, size) else self.fallback_block_size

    def answers_wrongly(self, size: int) -> bool:
        """Whether the kernel is known to start with a manager block of ``size`` tokens and to answer wrongly."""
        return bool(self.wrong_blocks) and accepts(self.wrong_blocks, size)

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:
        """Return the accepted widths for kernel blocks of ``block_size`` tokens."""
        multiple, low, high = self.width_rule.widths(block_size, max_seq_len)
        return Widths(multiple, max(low, self.min_width), high)

    def check_table(
        self,
        shape: Sequence[int],
        block_size: int,
        *,
        max_seq_len: int | None = None,
        strides: Sequence[int] | None = None,
        dtype: object = "int32",
    ) -> None:
        """Raise `ContractError`, in the kernel's own words, when the kernel would refuse such a table or misread it.

        Parameters
        ----------
        shape
            [B, W], or [B, 2, W] where the layout is split.
        block_size
            The kernel block size in tokens.
        max_seq_len
            The longest sequence in tokens (per context-parallel rank), for rules that compare with it.
        strides
            In elements, as torch counts them; None: contiguous.
        dtype
            The table's dtype, by name or as a NumPy or torch dtype.

        >>> Contract("ANY").check_table((8, 295), 32, dtype="int64")
        Traceback (most recent call last):
        ...
        blocktable.errors.ContractError: ANY reads an int32 table, got int64
        """
        judge(
            self,
            Table(
                shape=dimensions(shape),
                block_size=count(block_size, "block_size"),
                max_seq_len=None if max_seq_len is None else count(max_seq_len, "max_seq_len"),
                dtype=dtype_name(dtype),
                strides=None if strides is None else dimensions(strides, "strides"),
            ),
        )


def _ask(backend: Any, method: str) -> Any:
    reader = getattr(backend, method, None)
    if not callable(reader):
        raise ArgumentError(
            f"{backend!r} has no {method}(), so it is no backend class",
            values={"backend": repr(backend), "missing": method},
            remedy="pass a class with get_name() and get_supported_kernel_block_sizes(), or build a Contract",
        )
    try:
        return reader()
    except Exception as error:
        raise ArgumentError(
            f"{backend!r}.{method}() raised {type(error).__name__}: {error}",
            values={"backend": repr(backend), "method": method},
            remedy="call it where the engine's configuration is set, or build a Contract",
        ) from error


def common_kernel_block(manager_block: int, contracts: Iterable[Contract]) -> int | None:
    """Return the largest kernel block that divides the manager block and that every contract accepts, if any.

    A divisor that is accepted as a multiple of n makes the manager block such a multiple too, so besides the manager
    block itself only listed sizes can be the answer.

    >>> common_kernel_block(672, [Contract("A", kernel_block_sizes=(16, 32, 64)), Contract("B")])
    32
    """
    every = tuple(contracts)
    listed = {size for one in every for size in one.kernel_block_sizes if isinstance(size, int)}
    for size in sorted({manager_block, *listed}, reverse=True):
        if manager_block % size == 0 and all(contract.accepts_block(size) for contract in every):
            return size
    return None
