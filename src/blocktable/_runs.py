"""Runs of entries as one memory copy, for loops that move whole rows and deltas."""

from blocktable._jit import helper, i32, i64, nothing, sealed
from blocktable._kernels import I32


@helper(nothing(i32[::1], i64, sealed(i32[::1]), i64, i64))
def copy_range(target: I32, at: int, source: I32, begin: int, end: int) -> None:
    """Copy source[begin:end] to target[at:]."""
    if at < 0 or begin < 0:  # never so: it spares Python's indices from the end, and the loop becomes a vector's
        return
    for j in range(end - begin):
        target[at + j] = source[begin + j]
