"""What callers hand over, as the compiled loops need it: one-dimensional, contiguous, of one dtype.

An array that already fits passes as it is. Lists and other integer arrays are converted once, when every value fits;
floats, booleans and objects are refused rather than rounded.
"""

from array import array
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from blocktable.errors import ArgumentError

I32 = np.dtype(np.int32)
I64 = np.dtype(np.int64)
FLAGS = (bool, np.bool_)
I64_BOUNDS = np.iinfo(np.int64)
CODES = {I32: "i", I64: "q"}


def as_int64(value: Any, name: str) -> NDArray[np.int64]:
    """Return rows, indptr, ids, counts, lengths or positions as int64."""
    # carray: aligned, contiguous and writable, which the compiled signatures ask for.
    if type(value) is ndarray and value.ndim == 1:
        if value.dtype is I64 and value.flags.carray:
            return value
        if value.dtype is I32:
            return value.astype(I64)
    return _convert(value, name, I64)


def as_int32(value: Any, name: str) -> NDArray[np.int32]:
    """Return block ids as int32; what int32 cannot hold is no block id (L3)."""
    if type(value) is ndarray and value.dtype is I32 and value.ndim == 1 and value.flags.carray:
        return value
    return _convert(value, name, I32)


def _convert(value: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if type(value) is list and value and type(value[0]) is int:
        try:  # half the time of NumPy's own way, range check included
            return np.frombuffer(array(CODES[dtype], value), dtype)
        except (TypeError, OverflowError):
            pass  # what is wrong with it is said below
    try:
        given = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise _refused(name, f"{type(value).__name__} ({error})") from None
    if given.size == 0 and given.ndim == 1 and not isinstance(value, np.ndarray):
        return np.zeros(0, dtype)  # an empty list has no dtype of its own
    if given.ndim != 1:
        raise _refused(name, f"an array of {given.ndim} dimensions")
    if given.dtype.kind not in "iu":
        raise _refused(name, f"dtype {given.dtype}")
    if given.dtype != dtype and given.size:
        bounds = np.iinfo(dtype)
        low, high = int(given.min()), int(given.max())
        if low < bounds.min or high > bounds.max:
            value = low if low < bounds.min else high
            raise ArgumentError(
                f"{name} holds {value}, which does not fit {dtype}",
                law="L3" if dtype == I32 and I64_BOUNDS.min <= value <= I64_BOUNDS.max else "L12",
                values={"name": name, "low": low, "high": high},
                remedy=f"keep {name} within {bounds.min}..{bounds.max}",
            )
    given = given.astype(dtype, copy=False)
    return given if given.flags.carray else given.copy()


def _refused(name: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{name} must be a one-dimensional array or list of integers, got {what}",
        values={"name": name, "got": what},
        remedy=f"pass {name} as integers, one per entry",
    )


def as_given(argument: Any) -> Any:
    """Return an argument as it is now: a view of what a cache holds changes as the verb is done."""
    return argument.copy() if isinstance(argument, np.ndarray) and argument.base is not None else argument


def is_integer(value: Any) -> bool:
    """Say whether a value is one integer: bools, floats and strings are none, NumPy's are."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_flag(verb: str, value: Any, name: str, remedy: str) -> bool:
    """Return True or False; anything else is refused."""
    if isinstance(value, FLAGS):
        return bool(value)
    raise ArgumentError(f"{verb}: {name} must be True or False, got {value!r}", values={name: value}, remedy=remedy)


def as_count(value: Any, name: str, low: int, high: int, *, law: str = "") -> int:
    """Return a whole number within low..high."""
    if is_integer(value):
        number = int(value)
        if low <= number <= high:
            return number
    raise ArgumentError(
        f"{name} must be an integer in {low}..{high}, got {value!r}",
        law=law,
        values={name: value, "low": low, "high": high},
        remedy=f"pass {name} as an integer in that range",
    )
