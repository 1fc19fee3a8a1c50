"""How the host loops are compiled: eagerly, by explicit signatures, releasing the GIL, cached on disk when possible.

A signature means that nothing is ever compiled after import: a second dtype is an error at once, not seconds later.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

i32: Any = numba.int32
i64: Any = numba.int64
nothing = numba.void


def sealed(array: Any) -> Any:
    """Return an array type that also takes arrays nobody may write, such as a delta's."""
    return numba.types.Array(array.dtype, array.ndim, array.layout, readonly=True)


def compiled(signature: Any) -> Callable[[F], F]:
    """Compile a loop for one signature, in about half a second cold and a few milliseconds from the cache.

    A cache folder that cannot be written costs a warning and the compile time of each start, nothing else.
    """

    def compile_(function: F) -> F:
        options: Any = {"nogil": True, "error_model": "numpy"}  # numpy: a division needs no branch for zero
        try:
            return cast("F", numba.njit(signature, cache=True, **options)(function))
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"compiled loops are not cached, so each start compiles them anew ({error}); "
                "set NUMBA_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
            return cast("F", numba.njit(signature, **options)(function))

    return compile_


def helper(signature: Any) -> Callable[[F], F]:
    """Compile a piece that only compiled loops call.

    The signature keeps it at one specialisation: without it, every mix of int32 and int64 arguments is another.
    """

    def compile_(function: F) -> F:
        options: Any = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return cast("F", numba.njit(signature, **options)(function))

    return compile_
