"""Slot mapping: where in the cache each token of a step is written.

The slot of position p in a full row is id * block_size + p mod block_size, where id is the entry at column
p // block_size. Under context parallelism with c ranks and interleave s a block covers block_size * c positions, and of
the offset o = p mod (block_size * c) the rank (o // s) mod c owns slot id * block_size + (o // (s * c)) * s + o mod s;
every other rank gets -1 (L13). Both are decided in manager blocks; since a manager block is split into equal kernel
blocks in order, the slot is the same number in kernel blocks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._arrays import as_int64
from blocktable._jit import compiled, i64, nothing
from blocktable.errors import ArgumentError


@compiled(nothing(i64[::1], i64[::1], i64[::1]))
def _positions(starts: NDArray[np.int64], query_start_loc: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    for i in range(starts.size):
        shift = starts[i] - query_start_loc[i]
        for t in range(query_start_loc[i], query_start_loc[i + 1]):
            out[t] = t + shift


def positions(starts: Any, query_start_loc: Any, *, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return the positions of a step's tokens: row i computes starts[i], starts[i] + 1, ... (int64, one per token).

    ``starts`` [n] counts the tokens a row has already computed, ``query_start_loc`` [n + 1] cuts the step into rows.
    With ``out`` (int64, contiguous, long enough) its leading part is filled and returned. Cost: one pass over the tokens.

    >>> positions([10, 0], [0, 2, 5]).tolist()
    [10, 11, 0, 1, 2]
    """
    begins, ends = as_int64(starts, "starts"), as_int64(query_start_loc, "query_start_loc")
    if ends.size != begins.size + 1 or ends[0] != 0 or (ends[1:] < ends[:-1]).any():
        raise ArgumentError(
            f"query_start_loc must hold {begins.size + 1} offsets that start at 0 and never fall",
            law="L7",
            values={"rows": begins.size, "offsets": ends.size},
            remedy="pass the running sum of the rows' token counts, with a leading 0",
        )
    tokens = int(ends[-1])
    if out is None:
        out = np.empty(tokens, np.int64)
    elif out.dtype != np.int64 or out.ndim != 1 or not out.flags.carray or out.size < tokens:
        raise ArgumentError(
            f"out must be a contiguous int64 array of at least {tokens} entries, got {out.dtype} {out.shape}",
            law="L7",
            values={"tokens": tokens, "shape": out.shape},
            remedy="leave out away, or make it with np.empty(n, np.int64)",
        )
    _positions(begins, ends, out)
    return out[:tokens]
