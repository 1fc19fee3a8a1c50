"""Garbage collection put off where nearly all that is made lives."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Put garbage collection off, as around Numba's import and its compiler, of whose time it is a tenth."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
