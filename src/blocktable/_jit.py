"""How the host loops are compiled: eagerly, by explicit signatures, releasing the GIL, cached on disk when possible.

A signature means that nothing is ever compiled after import: a second dtype is an error at once, not seconds later.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

i32: Any = numba.int32
i64: Any = numba.int64
u64: Any = numba.uint64
nothing = numba.void


def sealed(array: Any) -> Any:
    """Return an array type that also takes arrays nobody may write, such as a delta's."""
    return numba.types.Array(array.dtype, array.ndim, array.layout, readonly=True)


def compiled(signature: Any) -> Callable[[F], F]:
    """Compile a loop for one signature, in about half a second cold and a few milliseconds from the cache."""
    return _compiler(signature, no_cfunc_wrapper=True)


def helper(signature: Any) -> Callable[[F], F]:
    """Compile a piece that only compiled loops call.

    The signature keeps it at one specialisation: without it, every mix of int32 and int64 arguments is another.
    """
    return _compiler(signature, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compiler(signature: Any, **more: bool) -> Callable[[F], F]:
    """Return the decorator; a cache folder that cannot be written costs one warning and each start's compile time."""
    options: Any = {
        "nogil": True,
        "error_model": "numpy",
        "_nrt": False,
        **more,
    }  # numpy: a division needs no branch for zero

    def compile_(function: F) -> F:
        try:
            return cast("F", numba.njit(signature, cache=True, **options)(function))
        except (RuntimeError, OSError):
            _warn_once()
            return cast("F", numba.njit(signature, **options)(function))

    return compile_


@cache
def _warn_once() -> None:
    """Say it for the first loop; the others have the same folder."""
    warnings.warn(
        "no folder for compiled loops can be written, so each start compiles them anew; "
        "set NUMBA_CACHE_DIR to one that can",
        RuntimeWarning,
        stacklevel=4,
    )
