"""What a contract's fields may be: each helper returns a clean value or says what is wrong with the given one."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from blocktable.contracts.rules import OWN_RULES, AnyWidth, MultipleOf, TokenMultiple, WidthRule, count
from blocktable.errors import ArgumentError

__all__ = [
    "CHECKS",
    "FIELDS",
    "SCALAR_TYPES",
    "Sizes",
    "accepts",
    "as_refusals",
    "as_rule",
    "as_sizes",
    "as_strings",
    "check_template",
    "describe_sizes",
    "dimensions",
    "dtype_name",
    "one_of",
]

Sizes: TypeAlias = tuple[int | MultipleOf, ...]

CHECKS = ("layout", "width", "min_width", "area", "block_size", "dtype", "strides")
FIELDS = (
    *("name", "width", "block_num", "block_size", "page_size", "multiple", "min_width", "max_width"),
    *("max_seq_len", "batch", "rank", "shape", "dtype", "scalar_type", "strides"),
)
"""The values that an error text may name in braces."""

SCALAR_TYPES = {
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "bfloat16": "BFloat16",
    "bool": "Bool",
}
"""What torch calls a dtype in its messages: {scalar_type}."""


def describe_sizes(sizes: Sizes) -> str:
    """Write block sizes as users read them.

    >>> describe_sizes((16, MultipleOf(32)))
    '16 or any multiple of 32'
    """
    names = [str(size) for size in sizes] or ["any number of"]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def accepts(sizes: Sizes, size: int) -> bool:
    """Whether one of the sizes is met; no sizes at all accept any."""
    if not sizes:
        return True
    return any(size == one if type(one) is int else cast("MultipleOf", one).accepts(size) for one in sizes)


def as_sizes(value: Any, name: str) -> Sizes:
    """Return block sizes given as ints, as `MultipleOf`, or as an engine's objects with ``base``."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = (value,)
    sizes: list[int | MultipleOf] = []
    for one in value:
        if isinstance(one, MultipleOf):
            sizes.append(one)
        elif hasattr(one, "base") and not hasattr(one, "__index__"):
            sizes.append(MultipleOf(one.base))
        else:
            sizes.append(count(one, name))
    return tuple(sizes)


def as_rule(value: Any) -> WidthRule:
    """Return a width rule; the class of one that needs no number stands for the rule."""
    if isinstance(value, type):
        value = _without_arguments(value)
    # The rules of this package first: a protocol is slow to ask for.
    if not isinstance(value, OWN_RULES) and not isinstance(value, WidthRule):
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


def as_refusals(value: Any) -> tuple[tuple[str, str], ...]:
    """Return refusals as pairs of (check, "ValueError: text")."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
    for check, text in pairs:
        one_of(check, "refusals", tuple(name for name in CHECKS if name != "width"))
        if not re.match(r"\w+: .", text):
            raise ArgumentError(
                f"a refusal is written as 'ValueError: text', got {text!r}", values={"check": check, "text": text}
            )
    return pairs


def as_strings(value: Any, name: str) -> tuple[str, ...]:
    """Return a tuple of strings; a lone string counts as one."""
    items = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(item, str) for item in items):
        raise ArgumentError(f"{name} must be strings, got {value!r}")
    return items


def one_of(value: object, name: str, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not in the list."""
    if value not in allowed:
        raise ArgumentError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}", values={name: value, "allowed": allowed}
        )


def check_template(text: str, name: str) -> None:
    """Refuse an error text with braces that no value fills."""
    if "{" not in text and "}" not in text:
        return
    import string  # noqa: PLC0415 - most contracts of a program have no text of their own

    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ArgumentError(f"{name} {text!r} has unbalanced braces: {error}") from None
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ArgumentError(
            f"{name} {text!r} has no value for {{{unknown[0]}}}",
            values={"text": text, "fields": tuple(FIELDS)},
            remedy=f"use {', '.join(FIELDS)}, or double a literal brace",
        )


def dimensions(shape: Any, name: str = "shape") -> tuple[int, ...]:
    """Return a shape or strides as a tuple of ints; NumPy integers and torch sizes are fine."""
    dims = None if isinstance(shape, str) or not isinstance(shape, Iterable) else tuple(shape)
    if dims is not None and all(type(dim) is int and dim >= 0 for dim in dims):
        return dims
    if dims is None or not all(hasattr(dim, "__index__") and not isinstance(dim, bool) for dim in dims):
        raise ArgumentError(f"{name} must be a sequence of integers, got {shape!r}", values={name: repr(shape)})
    numbers = tuple(int(dim.__index__()) for dim in dims)
    if name == "shape" and min(numbers, default=0) < 0:
        raise ArgumentError(f"shape has a negative dimension: {list(numbers)}", values={name: numbers})
    return numbers


def dtype_name(dtype: object) -> str:
    """Return the name of a NumPy or torch dtype, or of a dtype given by name."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    # NumPy dtypes have a name, NumPy scalar types a __name__, torch dtypes print as "torch.int32".
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")
