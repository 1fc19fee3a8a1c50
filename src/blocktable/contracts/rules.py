"""Width rules: how many columns a kernel accepts, each as a multiple and two bounds.

Every rule answers one question. For kernel block size b and the longest sequence in tokens, the accepted widths are the
multiples of ``multiple`` between ``low`` and ``high``. `plan` intersects these answers and the checks ask the same
objects, so the width that is computed and the width that is accepted cannot drift apart (law L1).

>>> TokenMultiple(128).widths(32)
Widths(multiple=4, low=0, high=None)
>>> 295 in TokenMultiple(128).widths(32), 296 in TokenMultiple(128).widths(32)
(False, True)
"""

import re
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol, runtime_checkable

from blocktable._ints import align_up, ceil_div
from blocktable.errors import ArgumentError, ContractError

__all__ = [
    "OWN_RULES",
    "AnyWidth",
    "AtLeast",
    "AtMost",
    "Exactly",
    "FloatModulus",
    "MultipleOf",
    "TokenMultiple",
    "WidthRule",
    "Widths",
    "count",
    "parse_rule",
    "parse_size",
]


_INT64_MAX = 2**63 - 1
_INT32_MAX = 2**31 - 1


def count(value: object, name: str, *, least: int = 1) -> int:
    """Return value as an int of at least ``least``; bools, floats and strings are refused, NumPy integers are fine."""
    if type(value) is int and least <= value <= _INT32_MAX:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}", values={name: value})
    number = int(value.__index__())
    if not least <= number <= _INT64_MAX:
        raise ArgumentError(f"{name} must be between {least} and 2**63 - 1, got {number}", values={name: number})
    return number


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Any block size that is a multiple of ``base`` tokens.

    >>> MultipleOf(16).accepts(48), MultipleOf(16).accepts(40)
    (True, False)
    """

    base: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", count(self.base, "base"))

    def accepts(self, size: int) -> bool:
        """Whether a block of ``size`` tokens is such a multiple."""
        return size % self.base == 0

    def __str__(self) -> str:
        return f"any multiple of {self.base}"


class Widths(NamedTuple):
    """The accepted widths: multiples of ``multiple`` from ``low`` to ``high`` (None: no upper bound)."""

    multiple: int
    low: int
    high: int | None

    def __contains__(self, width: object) -> bool:
        return (
            isinstance(width, int)
            and width % self.multiple == 0
            and width >= self.low
            and (self.high is None or width <= self.high)
        )


@runtime_checkable
class WidthRule(Protocol):
    """What every width rule offers; a class of your own with these two methods works as well."""

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:
        """Return the accepted widths for kernel blocks of ``block_size`` tokens and sequences of ``max_seq_len`` tokens."""
        ...

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Return the demand as the end of the sentence "the kernel needs …"."""
        ...


@dataclass(frozen=True, slots=True)
class AnyWidth:
    """Every width is accepted.

    >>> AnyWidth().widths(32)
    Widths(multiple=1, low=0, high=None)
    """

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:  # noqa: ARG002 - one interface
        """Accept everything."""
        return Widths(1, 0, None)

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:  # noqa: ARG002 - one interface
        """Say so."""
        return "any width"


@dataclass(frozen=True, slots=True)
class TokenMultiple:
    """A row spans whole multiples of ``tokens`` tokens: W · b mod tokens = 0, in integers.

    >>> TokenMultiple(128).widths(48)
    Widths(multiple=8, low=0, high=None)
    """

    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", count(self.tokens, "tokens"))

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:  # noqa: ARG002 - one interface
        """Accept the multiples of tokens / gcd(tokens, block_size)."""
        return Widths(self.tokens // gcd(self.tokens, block_size), 0, None)

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Name the multiple and where it comes from."""
        multiple = self.widths(block_size, max_seq_len).multiple
        return f"a multiple of {multiple} ({self.tokens} tokens / {block_size})"


@dataclass(frozen=True, slots=True)
class FloatModulus:
    """``W % (tokens / block_size) == 0.0`` as floating point evaluates it.

    The quotient is the double p / q in lowest terms, and a remainder by a double is exact, so the test holds when p
    divides W. A power-of-two block size gives the integer rule; 256 tokens give 1/2, which every width meets; 96 tokens
    give a p near 2**52, which no table meets, also where a row spans whole multiples of 128 tokens.

    >>> FloatModulus(128).widths(32).multiple, FloatModulus(128).widths(256).multiple
    (4, 1)
    >>> 4 in FloatModulus(128).widths(96), 4 % (128 / 96) == 0.0
    (False, False)
    """

    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", count(self.tokens, "tokens"))

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:  # noqa: ARG002 - one interface
        """Accept the multiples of the numerator of tokens / block_size."""
        numerator, _ = (self.tokens / block_size).as_integer_ratio()
        return Widths(numerator, 0, None)

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Name the multiple, or say that none is in reach."""
        multiple = self.widths(block_size, max_seq_len).multiple
        if multiple > _INT32_MAX:
            return f"W % ({self.tokens} / {block_size}) == 0.0 in floats, which no width meets"
        return f"a multiple of {multiple} ({self.tokens} tokens / {block_size})"


def _blocks(block_size: int, max_seq_len: int | None, rule: str) -> int:
    if max_seq_len is None:
        raise ContractError(
            f"{rule} compares the width with ceil(max_seq_len / {block_size}), and max_seq_len was not given",
            law="L1",
            values={"missing": "max_seq_len", "rule": rule, "block_size": block_size},
            remedy="pass max_seq_len, the longest sequence in tokens",
        )
    return ceil_div(max_seq_len, block_size)


@dataclass(frozen=True, slots=True)
class AtMost:
    """No wider than the longest sequence needs: W <= ceil(max_seq_len / b).

    >>> AtMost().widths(64, 8000)
    Widths(multiple=1, low=0, high=125)
    """

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:
        """Accept 0 .. ceil(max_seq_len / block_size)."""
        return Widths(1, 0, _blocks(block_size, max_seq_len, "AtMost"))

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Name the bound."""
        return f"at most {_blocks(block_size, max_seq_len, 'AtMost')} ({max_seq_len} tokens / {block_size})"


@dataclass(frozen=True, slots=True, repr=False)
class AtLeast:
    """Wide enough for the longest sequence, which counts in whole ``tokens``: W >= ceil(max_seq_len / b) for one.

    >>> AtLeast().widths(64, 8000), AtLeast(256).widths(64, 8000)
    (Widths(multiple=1, low=125, high=None), Widths(multiple=1, low=128, high=None))
    """

    tokens: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", count(self.tokens, "tokens"))

    def __repr__(self) -> str:
        return "AtLeast()" if self.tokens == 1 else f"AtLeast(tokens={self.tokens})"

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:
        """Accept what holds max_seq_len, rounded up to whole ``tokens``, and more."""
        blocks = _blocks(block_size, max_seq_len, "AtLeast")
        if max_seq_len is not None and self.tokens > 1:
            blocks = ceil_div(align_up(max_seq_len, self.tokens), block_size)
        return Widths(1, blocks, None)

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Name the bound."""
        whole = f" in whole {self.tokens}s" if self.tokens > 1 else ""
        return f"at least {self.widths(block_size, max_seq_len).low} ({max_seq_len} tokens{whole} / {block_size})"


@dataclass(frozen=True, slots=True)
class Exactly:
    """Exactly what the longest sequence needs: W = ceil(max_seq_len / b).

    >>> Exactly().widths(128, 9416)
    Widths(multiple=1, low=74, high=74)
    """

    def widths(self, block_size: int, max_seq_len: int | None = None) -> Widths:
        """Accept ceil(max_seq_len / block_size) alone."""
        blocks = _blocks(block_size, max_seq_len, "Exactly")
        return Widths(1, blocks, blocks)

    def describe(self, block_size: int, max_seq_len: int | None = None) -> str:
        """Name the width."""
        return f"exactly {_blocks(block_size, max_seq_len, 'Exactly')} ({max_seq_len} tokens / {block_size})"


_PLAIN: dict[str, type[AnyWidth | AtMost | AtLeast | Exactly]] = {
    "AnyWidth": AnyWidth,
    "AtLeast": AtLeast,
    "AtMost": AtMost,
    "Exactly": Exactly,
}
_COUNTED: dict[str, type[TokenMultiple | FloatModulus | AtLeast]] = {
    "TokenMultiple": TokenMultiple,
    "FloatModulus": FloatModulus,
    "AtLeast": AtLeast,
}

OWN_RULES = (*_PLAIN.values(), *_COUNTED.values())


def parse_rule(text: str) -> WidthRule:
    """Read a rule as data files write it: the same words as in Python.

    >>> parse_rule("TokenMultiple(128)"), parse_rule("AtMost")
    (TokenMultiple(tokens=128), AtMost())
    """
    match = re.fullmatch(r"(\w+)(?:\((\d*)\))?", text)
    name, tokens = match.groups() if match else ("", None)
    if name in _PLAIN and not tokens:
        return _PLAIN[name]()
    if name in _COUNTED and tokens:
        return _COUNTED[name](int(tokens))
    known = [*(f"{rule}(tokens)" for rule in _COUNTED), *_PLAIN]
    raise ArgumentError(
        f"unknown width rule {text!r}", values={"rule": text}, remedy=f"write one of {', '.join(known)}"
    )


def parse_size(value: int | str) -> int | MultipleOf:
    """Read a block size as data files write it: a number, or ``"MultipleOf(16)"``.

    >>> parse_size(64), parse_size("MultipleOf(16)")
    (64, MultipleOf(base=16))
    """
    if isinstance(value, str):
        match = re.fullmatch(r"MultipleOf\((\d+)\)", value)
        if not match:
            raise ArgumentError(
                f"unknown block size {value!r}", values={"size": value}, remedy='write a number or "MultipleOf(n)"'
            )
        return MultipleOf(int(match[1]))
    return count(value, "block size")
