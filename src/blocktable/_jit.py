"""How the host loops are compiled: eagerly, by explicit signatures, releasing the GIL, cached on disk when possible.

A signature means that nothing is ever compiled after import: a second dtype is an error at once, not seconds later.
A start that finds its loops in the cache loads nothing else, neither their helpers nor Numba's own compiler.
"""

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from numbers import Number
from typing import Any, TypeVar, cast

from blocktable._garbage import no_collection

with no_collection():
    import numba
    from numba.core import caching
    from numba.core.dispatcher import Dispatcher

F = TypeVar("F", bound=Callable[..., Any])

i32: Any = numba.int32
i64: Any = numba.int64
u64: Any = numba.uint64
nothing = numba.void
njit: Any = numba.njit  # its own types know half of its options
FunctionCache: Any = caching.FunctionCache

OPTIONS: Any = {
    "nogil": True,
    "error_model": "numpy",  # a division needs no branch for zero
    "_nrt": False,  # nothing is allocated
    "no_cfunc_wrapper": True,
    "no_rewrites": True,  # there are no array expressions to rewrite
}
_MADE: dict[Any, tuple[Any, str]] = {}
"""Every loop and helper, with its signature and a digest of what it is made of."""


def sealed(array: Any) -> Any:
    """Return an array type that also takes arrays nobody may write, such as a delta's."""
    return numba.types.Array(array.dtype, array.ndim, array.layout, readonly=True)


def compiled(signature: Any) -> Callable[[F], F]:
    """Compile a loop for one signature, in about half a second cold and a few milliseconds from the cache."""

    def compile_(function: F) -> F:
        loop = njit(**OPTIONS)(function)
        if isinstance(loop, Dispatcher):  # not with NUMBA_DISABLE_JIT=1, where it is the function itself
            _make(loop, function, signature)
            _compile([loop])
        return cast("F", loop)

    return compile_


def helper(signature: Any) -> Callable[[F], F]:
    """Compile a piece that only compiled loops call, when the first of them is not found in the cache.

    The signature keeps it at one specialisation: without it, every mix of int32 and int64 arguments is another.
    """

    def compile_(function: F) -> F:
        piece = njit(no_cpython_wrapper=True, **OPTIONS)(function)
        if isinstance(piece, Dispatcher):
            _make(piece, function, signature)
        return cast("F", piece)

    return compile_


def _make(loop: Any, function: Callable[..., Any], signature: Any) -> None:
    """Note what a loop is made of, and give it its place in the cache.

    A folder that cannot be written costs one warning and each start's compile time.
    """
    code = function.__code__
    named = [function.__globals__.get(name) for name in code.co_names]
    helpers = [value for value in named if isinstance(value, Dispatcher)]
    numbers = [value for value in named if isinstance(value, Number)]
    parts = (code.co_code, code.co_consts, numbers, [_MADE[piece][1] for piece in helpers])
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    _MADE[loop] = signature, digest
    try:
        loop._cache = _Cache(function, helpers, digest)  # noqa: SLF001 - as its enable_caching does
    except (RuntimeError, OSError):
        _warn_once()
        _compile(helpers)


def _compile(loops: list[Any]) -> None:
    """Compile loops, or load them, each for its one signature."""
    for loop in loops:
        if loop.overloads:
            continue
        try:
            with no_collection():
                loop.compile(_MADE[loop][0])
        except OSError:  # compiled, but not saved
            _warn_once()
        loop.disable_compile()


class _Cache(FunctionCache):  # type: ignore[misc]  # an Any, since it ships without types
    """The compiled code of one loop on disk, valid until something that it was made of changes."""

    def __init__(self, function: Any, helpers: list[Any], digest: str) -> None:
        super().__init__(function)
        self._helpers, self._digest = helpers, digest

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Add the helpers and constants, which may be of other files, to what Numba looks at."""
        return (*super()._index_key(sig, codegen), self._digest)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load without Numba's refresh of all that can be compiled, a third of a second; what is missing does it."""
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        if found is None:
            _compile(self._helpers)
        return found


@cache
def _warn_once() -> None:
    """Say it for the first loop; the others have the same folder."""
    warnings.warn(
        "no folder for compiled loops can be written, so each start compiles them anew; "
        "set NUMBA_CACHE_DIR to one that can",
        RuntimeWarning,
        stacklevel=4,
    )
