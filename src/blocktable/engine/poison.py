"""The mode that makes a wrong read visible: blocks that nobody owns hold NaN."""

import numpy as np
from numpy.typing import NDArray

from blocktable import _cache_layout as layout
from blocktable.cache import KVCache

__all__ = ["unowned"]


def unowned(cache: KVCache) -> NDArray[np.int64]:
    """Return the null block and every block that no row holds and no cached prefix lies in, int64, ascending.

    >>> import blocktable
    >>> cache = KVCache([blocktable.plan(max_model_len=8, block_size=4)], num_blocks=5, max_rows=1)
    >>> _ = cache.admit([0], [0, 5], [1, 2, 3, 4, 5])
    >>> unowned(cache).tolist()
    [0, 3, 4]
    """
    blocks = cache._core[5].reshape(-1, layout.BLOCK_FIELDS)[: cache.num_blocks]  # noqa: SLF001 - no verb tells
    idle = (blocks[:, layout.REF] <= 0) & (blocks[:, layout.SEAT] == 0)
    idle[0] = True
    return np.flatnonzero(idle)
