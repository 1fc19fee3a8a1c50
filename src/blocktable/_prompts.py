"""The tokens of requests: what a trace says of them, and what makes two prompts begin alike or not.

A hash id stands for 512 fixed tokens, so that equal ids at the start of two prompts are equal tokens. What no id covers,
all that a request generates included, is one token that no other request has: nothing is shared that the trace does not say.
"""

import numpy as np
from numpy.typing import NDArray

from blocktable._ints import ceil_div
from blocktable.traces import Trace

__all__ = ["Prompts"]

HASHED = 512  # tokens that a hash id of the Mooncake format stands for
OFFSETS = np.arange(HASHED)


class Prompts:
    """Token ids of the requests of a trace, made when asked for: a trace holds too many to make them all.

    >>> from blocktable.traces import synthetic
    >>> Prompts(synthetic(seed=0, max_model_len=64)).tokens(3, 5).tolist()
    [3, 3, 3, 3, 3]
    """

    def __init__(self, trace: Trace) -> None:
        distinct, self._ids = np.unique(trace.hash_ids, return_inverse=True)  # ids may be too large to multiply
        self._first_own = distinct.size * HASHED
        self._indptr, self._length = trace.hash_indptr, trace.input_length
        self._last = (-1, np.zeros(0, np.int64))

    def own(self, request: int) -> int:
        """Return the token that only this request has."""
        return self._first_own + request

    def tokens(self, request: int, length: int) -> NDArray[np.int64]:
        """Return the first ``length`` tokens, int64, of prompt and output; the last answer is kept, not to be changed."""
        if self._last[0] != request or self._last[1].size != length:
            self._last = request, self._made(request, length)
        return self._last[1]

    def _made(self, request: int, length: int) -> NDArray[np.int64]:
        ids = self._ids[self._indptr[request] : self._indptr[request + 1]]
        hashed = min(ids.size * HASHED, int(self._length[request]), length)
        ids = ids[: ceil_div(hashed, HASHED)]
        text = np.full(length, self.own(request))
        text[:hashed] = (ids[:, None] * HASHED + OFFSETS).reshape(-1)[:hashed]
        return text
