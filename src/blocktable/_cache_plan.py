"""The numbers of a cache that follow from its groups and its pool: units, and the longest row that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blocktable._ints import ceil_div, lcm
from blocktable.errors import ArgumentError, NeverFits
from blocktable.groups import Group


def span(group: Group) -> int:
    """Return the tokens that one block of a group stands for, over all context-parallel ranks."""
    return group.geometry.block_size * group.geometry.cp_size


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups of a cache, and what its pool can hold of them."""

    groups: tuple[Group, ...]
    usable: int
    unit: int
    largest: int

    @classmethod
    def of(cls, groups: Sequence[Group], usable: int) -> "Plan":
        """Work out the unit and the longest row; refuse a pool that cannot hold one row of ``max_model_len``."""
        rings = [g for g, group in enumerate(groups) if group.kind == "ring"]
        if rings:
            raise ArgumentError(
                f"KVCache: group {rings[0]} is of kind 'ring', whose one block wraps around",
                law="L8",
                values={"group": rings[0], "kind": "ring"},
                remedy="keep ring groups in BlockTables beside the cache",
            )
        paged = [group for group in groups if group.kind != "state"]
        unit = lcm(*(span(group) for group in paged or groups))
        if paged:
            widest = min(group.geometry.width * span(group) for group in paged)
        else:
            widest = min(group.geometry.max_model_len + group.geometry.lookahead for group in groups)
        plan = cls(tuple(groups), usable, unit, widest)
        needed = sum(most(group, group.geometry.min_blocks) for group in groups)
        if needed > usable:
            limit = min(group.geometry.max_model_len for group in groups)
            fits = _longest(lambda n: sum(most(g, _min_blocks(g, n)) for g in groups) <= usable, limit)
            raise NeverFits(
                f"KVCache: one row of max_model_len {limit} needs {needed} blocks, the pool has {usable}",
                law="L9",
                values={"needed": needed, "usable": usable, "largest": fits},
                remedy=f"give the pool {needed + 1} blocks (the null block included), or plan max_model_len={fits}",
            )
        return cls(tuple(groups), usable, unit, _longest(lambda n: plan.needs(n) <= usable, widest))

    def needs(self, tokens: int) -> int:
        """Return the blocks that a row of so many tokens holds, its windows moved as far as they go."""
        return sum(most(group, ceil_div(tokens, span(group))) for group in self.groups) if tokens else 0

    def obstacle(self, tokens: int) -> tuple[int, int, str]:
        """Say what a row of too many tokens fails at: blocks needed, blocks there are, and of what."""
        for g, group in enumerate(self.groups):
            needed = ceil_div(tokens, span(group))
            if group.kind != "state" and needed > group.geometry.width:
                return needed, group.geometry.width, f"its width in group {g} is"
        return self.needs(tokens), self.usable, "the pool has"


def most(group: Group, blocks: int) -> int:
    """Return how many of a row's ``blocks`` a group holds at once."""
    if group.kind == "state":
        return group.state_blocks
    if group.window:
        return min(blocks, ceil_div(group.window, span(group)) + 1)
    return blocks


def _min_blocks(group: Group, max_model_len: int) -> int:
    g = group.geometry
    return ceil_div(max_model_len + g.lookahead, span(group)) + g.extra_blocks


def _longest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number of 0 .. limit for which ``fits`` holds, given that it holds up to some number."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
