"""Pictures of a live `KVCache`: the pool with its owners, single rows, the tree of cached prefixes.

    print(view.text(cache))                        # all of it, for a terminal or a log
    print(view.row(cache, 3))                      # one row: live, lookahead, tail, alignment
    Path("cache.html").write_text(view.html(cache))

Every sign is a letter or a shape, so that no colour is needed to read it. A picture is a copy: the cache may go on.
"""

from blocktable.view.page import html
from blocktable.view.text import pool_map, prefix_tree, row, text

__all__ = ["html", "pool_map", "prefix_tree", "row", "text"]
