"""`Contract`: what one attention backend demands of its block table, as one frozen record.

>>> contract = Contract("MY_MLA", kernel_block_sizes=(32, 64), width_rule=TokenMultiple(128))
>>> contract.check_table((8, 296), 32)
>>> contract.check_table((8, 295), 32)
Traceback (most recent call last):
...
blocktable.errors.ContractError: MY_MLA needs a multiple of 4 (128 tokens / 32), got 295 columns
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast, get_args

from blocktable._ints import align_up
from blocktable.contracts.rules import AnyWidth, MultipleOf, TokenMultiple, WidthRule, Widths, positive_int
from blocktable.errors import ArgumentError, ContractError

__all__ = ["Contract", "Evidence", "Layout", "OffsetType", "Strides", "Tail"]

Layout = Literal["dense", "split", "csr"]
Strides = Literal["any", "last", "compact"]
Tail = Literal["ignored", "in-range", "null"]
OffsetType = Literal["int32", "int64"]
Evidence = Literal["run", "read", "inferred", "carried"]

_CHECKS = ("layout", "width", "min_width", "block_size", "dtype", "strides")
_FIELDS = (
    "name width block_num block_size page_size multiple min_width max_width max_seq_len batch rank shape dtype strides"
).split()
_MAX_WIDTH = 2**31 - 1


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
    width_rule, min_width
        The accepted widths in kernel blocks, and the fewest columns whatever the rule says.
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
    hardware
        Compute capabilities or platforms it runs on, such as ``"10.0"``, ``"10.x"``, ``"cpu"``; empty: not restricted.
    context_parallel, cp_max_interleave
        Whether it works under decode context parallelism (None: not known) and the largest interleave then.
    error_text, raised, where
        The text a user sees when the width is refused, with {block_num} and the like to fill in; the exception's type;
        where it is raised.
    refusals
        The same for the other checks (layout, min_width, block_size, dtype, strides), as ``"ValueError: text"``.
    width_first
        Whether the kernel tests the width before the block size, which decides the text when both are wrong.
    source, evidence, date, pitfalls
        Where the rule was read, how it is known (run · read · inferred · carried from a near release), when, and what
        bites all the same.
    """

    name: str = field(kw_only=False)
    engine: str = ""
    versions: str = ""
    kernel_block_sizes: tuple[int | MultipleOf, ...] = ()
    manager_block_sizes: tuple[int | MultipleOf, ...] = ()
    width_rule: WidthRule = AnyWidth()
    min_width: int = 0
    layout: Layout = "dense"
    tail: Tail = "ignored"
    strides: Strides = "any"
    dtype: str = "int32"
    offset_type: OffsetType = "int32"
    hardware: tuple[str, ...] = ()
    context_parallel: bool | None = None
    cp_max_interleave: int | None = None
    error_text: str = ""
    raised: str = ""
    where: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
    width_first: bool = False
    source: str = ""
    evidence: Evidence = "read"
    date: str = ""
    pitfalls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError(f"a contract's name is a non-empty string, got {self.name!r}")
        for name in ("kernel_block_sizes", "manager_block_sizes"):
            object.__setattr__(self, name, _sizes(getattr(self, name), name))
        object.__setattr__(self, "width_rule", _rule(self.width_rule))
        object.__setattr__(self, "refusals", _refusals(self.refusals))
        for name in ("hardware", "pitfalls"):
            object.__setattr__(self, name, _strings(getattr(self, name), name))
        for name, allowed in (
            ("layout", Layout),
            ("tail", Tail),
            ("strides", Strides),
            ("offset_type", OffsetType),
            ("evidence", Evidence),
        ):
            _one_of(getattr(self, name), name, get_args(allowed))
        if isinstance(self.min_width, bool) or not isinstance(self.min_width, int) or self.min_width < 0:
            raise ArgumentError(f"min_width must be an integer of at least 0, got {self.min_width!r}")
        for text in (self.error_text, *(text for _, text in self.refusals)):
            _check_template(text)

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
        readers: list[Callable[[], Any]] = []
        for method in ("get_name", "get_supported_kernel_block_sizes"):
            reader = getattr(backend, method, None)
            if not callable(reader):
                raise ArgumentError(
                    f"{backend!r} has no {method}(), so it is no backend class",
                    values={"backend": repr(backend), "missing": method},
                    remedy="pass a class with get_name() and get_supported_kernel_block_sizes(), or build a Contract",
                )
            readers.append(reader)
        kind = backend if isinstance(backend, type) else type(backend)
        return cls(
            readers[0](),
            engine=kind.__module__.partition(".")[0],
            kernel_block_sizes=tuple(readers[1]()),
            source=f"{kind.__module__}.{kind.__qualname__}",
            evidence="run",
        )

    def accepts_block(self, size: int) -> bool:
        """Whether the kernel takes blocks of ``size`` tokens."""
        return _accepts(self.kernel_block_sizes, size)

    def accepts_manager(self, size: int) -> bool:
        """Whether the backend takes a manager block of ``size`` tokens, which may still be split into kernel blocks."""
        return _accepts(self.manager_block_sizes, size)

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
        dims = _dims(shape)
        size = block_size if type(block_size) is int and block_size > 0 else positive_int(block_size, "block_size")
        if len(dims) != 2 and not (self.layout == "split" and len(dims) == 3 and dims[1] == 2):
            wanted = "[B, W] or [B, 2, W]" if self.layout == "split" else "[B, W]"
            self._refuse("layout", f"takes a table {wanted}, got shape {list(dims)}", dims, size, max_seq_len)
        if self.width_first:
            self._check_width(dims, size, max_seq_len)
            self._check_block(dims, size, max_seq_len)
        else:
            self._check_block(dims, size, max_seq_len)
            self._check_width(dims, size, max_seq_len)
        if dtype != self.dtype and (given := _dtype_name(dtype)) != self.dtype:
            article = "an" if self.dtype.startswith("i") else "a"
            text = f"reads {article} {self.dtype} table, got {given}"
            self._refuse("dtype", text, dims, size, max_seq_len, dtype=given)
        if strides is not None:
            self._check_strides(dims, _dims(strides, "strides"), size, max_seq_len)

    def _check_block(self, dims: tuple[int, ...], size: int, max_seq_len: int | None) -> None:
        if not _accepts(self.kernel_block_sizes, size):
            text = f"takes kernel blocks of {describe_sizes(self.kernel_block_sizes)} tokens, got {size}"
            self._refuse("block_size", text, dims, size, max_seq_len)

    def _check_width(self, dims: tuple[int, ...], size: int, max_seq_len: int | None) -> None:
        width = dims[-1]
        if width < self.min_width:
            self._refuse("min_width", f"needs at least {self.min_width} columns, got {width}", dims, size, max_seq_len)
        multiple, low, high = self.width_rule.widths(size, max_seq_len)
        if width % multiple or width < low or (high is not None and width > high):
            text = f"needs {self.width_rule.describe(size, max_seq_len)}, got {width} columns"
            self._refuse("width", text, dims, size, max_seq_len)

    def _check_strides(
        self, dims: tuple[int, ...], strides: tuple[int, ...], size: int, max_seq_len: int | None
    ) -> None:
        if len(strides) != len(dims):
            raise ArgumentError(
                f"{len(strides)} strides for a table of {len(dims)} dimensions",
                values={"shape": dims, "strides": strides},
                remedy="give one stride per dimension, in elements",
            )
        if self.strides == "any":
            return
        if strides[-1] != 1:
            text = f"takes columns side by side (stride 1), got strides {list(strides)}"
            self._refuse("strides", text, dims, size, max_seq_len, strides=strides)
        if self.strides == "compact":
            expected = 1
            for count, stride in zip(reversed(dims), reversed(strides), strict=True):
                # A dimension of one element is never stepped over, so its stride cannot matter.
                if stride != expected and count != 1:
                    text = f"takes the width {dims[-1]} as the row stride, got strides {list(strides)}"
                    self._refuse("strides", text, dims, size, max_seq_len, strides=strides)
                expected *= count

    def _refuse(
        self, check: str, text: str, dims: tuple[int, ...], size: int, max_seq_len: int | None, **more: object
    ) -> NoReturn:
        width = dims[-1] if dims else 0
        values: dict[str, object] = {
            "contract": self.name,
            "engine": self.engine,
            "check": check,
            "shape": dims,
            "width": width,
            "block_size": size,
            "max_seq_len": max_seq_len,
            "raised": "",
            "where": self.where,
        }
        values.update(more)
        if check == "width":
            values["multiple"], values["min_width"], values["max_width"] = self.widths(size, max_seq_len)
        raised, template = (self.raised, self.error_text) if check == "width" else self._refusal(check)
        values["raised"] = raised
        if template:
            text = template.format(
                **{name: values.get(name) for name in _FIELDS}
                | {"name": self.name, "block_num": width, "page_size": size, "batch": dims[0] if dims else 0}
                | {"rank": len(dims), "min_width": values.get("min_width", self.min_width)}
            )
        else:
            text = f"{self.name} {text}"
        raise ContractError(text, law="L1", values=values, remedy=self._remedy(check, width, size, max_seq_len))

    def _refusal(self, check: str) -> tuple[str, str]:
        for name, text in self.refusals:
            if name == check:
                raised, _, rest = text.partition(": ")
                return raised, rest
        return "", ""

    def _remedy(self, check: str, width: int, size: int, max_seq_len: int | None) -> str:
        if check == "block_size":
            return f"use a kernel block of {describe_sizes(self.kernel_block_sizes)} tokens"
        if check not in ("width", "min_width"):
            return {
                "layout": "pass the table in the layout that the contract names",
                "dtype": f"keep the table in {self.dtype}",
                "strides": "pass a contiguous copy",
            }[check]
        multiple, low, high = self.widths(size, max_seq_len)
        nearest = align_up(max(width, low), multiple)
        if high is not None and nearest > high:
            nearest = high // multiple * multiple
        if low <= nearest <= _MAX_WIDTH:
            return f"allocate {nearest} columns"
        return f"use another block size: no table of {size}-token blocks is accepted"


def describe_sizes(sizes: tuple[int | MultipleOf, ...]) -> str:
    """Write block sizes as users read them.

    >>> describe_sizes((16, MultipleOf(32)))
    '16 or any multiple of 32'
    """
    names = [str(size) for size in sizes] or ["any number of"]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _accepts(sizes: tuple[int | MultipleOf, ...], size: int) -> bool:
    if not sizes:
        return True
    return any(size == one if type(one) is int else cast("MultipleOf", one).accepts(size) for one in sizes)


def _sizes(value: Any, name: str) -> tuple[int | MultipleOf, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = (value,)
    sizes: list[int | MultipleOf] = []
    for one in value:
        if isinstance(one, MultipleOf):
            sizes.append(one)
        elif hasattr(one, "base") and not hasattr(one, "__index__"):
            sizes.append(MultipleOf(one.base))
        else:
            sizes.append(positive_int(one, name))
    return tuple(sizes)


def _rule(value: Any) -> WidthRule:
    if isinstance(value, type):
        value = _without_arguments(value)
    if not isinstance(value, WidthRule):
        raise ArgumentError(
            f"width_rule must be a width rule, got {value!r}",
            values={"width_rule": repr(value)},
            remedy=f"pass a rule such as {TokenMultiple(128)} or {AnyWidth()}",
        )
    return value


def _without_arguments(rule: type) -> Any:
    try:
        return rule()
    except TypeError:
        raise ArgumentError(
            f"width_rule {rule.__name__} needs its number of tokens, as in {rule.__name__}(128)"
        ) from None


def _refusals(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
    for check, text in pairs:
        _one_of(check, "refusals", tuple(name for name in _CHECKS if name != "width"))
        if not re.match(r"\w+: .", text):
            raise ArgumentError(
                f"a refusal is written as 'ValueError: text', got {text!r}", values={"check": check, "text": text}
            )
    return pairs


def _strings(value: Any, name: str) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(item, str) for item in items):
        raise ArgumentError(f"{name} must be strings, got {value!r}")
    return items


def _one_of(value: object, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}", values={name: value, "allowed": allowed}
        )


def _check_template(text: str) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ArgumentError(f"error text {text!r} has unbalanced braces: {error}") from None
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise ArgumentError(
            f"error text {text!r} has no value for {{{unknown[0]}}}",
            values={"text": text, "fields": tuple(_FIELDS)},
            remedy=f"use {', '.join(_FIELDS)}, or double a literal brace",
        )


def _dims(shape: Sequence[int], name: str = "shape") -> tuple[int, ...]:
    dims = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else None
    if dims is not None and all(type(dim) is int and dim >= 0 for dim in dims):
        return dims
    if dims is None or not all(hasattr(dim, "__index__") and not isinstance(dim, bool) for dim in dims):
        raise ArgumentError(f"{name} must be a sequence of integers, got {shape!r}", values={name: repr(shape)})
    numbers = tuple(int(dim.__index__()) for dim in dims)
    if name == "shape" and min(numbers, default=0) < 0:
        raise ArgumentError(f"shape has a negative dimension: {list(numbers)}", values={name: numbers})
    return numbers


def _dtype_name(dtype: object) -> str:
    # NumPy dtypes have a name, NumPy scalar types a __name__, torch dtypes print as "torch.int32".
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")
