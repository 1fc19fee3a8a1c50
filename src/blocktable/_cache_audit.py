"""``KVCache.check``: recount the pool, the index and the rows from scratch, and compare."""

from typing import Any

from blocktable.groups import Group


def audit(groups: tuple[Group, ...], max_rows: int, core: tuple[Any, ...]) -> None:
    """Raise LawBroken for the first thing that does not add up."""
