"""What recorded objects were made with, as plain numbers."""

from typing import Any

from blocktable.cache import KVCache
from blocktable.groups import Group
from blocktable.sanitize.watch import Watch

SHAPE = (
    *("max_model_len", "lookahead", "extra_blocks", "block_size", "kernel_block_size"),
    *("min_blocks", "width", "kernel_width", "padding", "cp_size", "cp_interleave"),
)
"""The numbers of a geometry, in the order of a recording."""


def describe(one: Any) -> dict[str, Any]:
    """Return what an object was made with, as plain numbers."""
    if isinstance(one, Watch):
        return {
            "watch": 1,
            "groups": [describe_group(group) for group in one.groups],
            "num_blocks": one.num_blocks,
            "cp_rank": one.cp_rank,
            "ignore": sorted(one.ignore),
            "kernel_blocks": one.kernel_blocks,
        }
    made = {
        "groups": [describe_group(group) for group in one.groups],
        "max_rows": one.max_rows,
        "num_blocks": one.num_blocks,
    }
    if isinstance(one, KVCache):
        made |= {"prefix_cache": one.prefix_cache, "cp_rank": one.cp_rank}
    return made


def describe_group(group: Group) -> list[Any]:
    """Return a group as its kind, window, state blocks and the numbers of its shape."""
    shape = [getattr(group.geometry, name) for name in SHAPE]
    return [group.kind, group.window, group.state_blocks, *shape]
