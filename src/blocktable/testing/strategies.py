"""Hypothesis strategies: geometries and groups of any sort, and schedules, which are the calls of a run.

@given(groups=strategies.groups(), seed=strategies.seeds())
def test_my_tables(groups, seed): ...
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from blocktable.contracts import Contract, TokenMultiple
from blocktable.geometry import Geometry, plan
from blocktable.groups import KINDS, Group

__all__ = ["geometries", "groups", "schedules", "seeds"]


def seeds() -> st.SearchStrategy[int]:
    """Draw a seed for a workload: one number stands for all of a run, which costs far less than to draw each argument."""
    return st.integers(0, 2**32 - 1)


@st.composite
def geometries(draw: st.DrawFn, *, max_blocks: int = 6, max_ratio: int = 4, ranks: int | None = None) -> Geometry:
    """Draw a geometry a few columns wide, split into kernel blocks, padded by a rule, sharded over ranks."""
    kernel, ratio = draw(st.integers(1, 4)), draw(st.integers(1, max_ratio))
    block = kernel * ratio
    size = ranks or draw(st.integers(1, 3))
    rule = TokenMultiple(draw(st.integers(1, 5)) * kernel)
    return plan(
        max_model_len=draw(st.integers(1, max_blocks)) * block * size,
        block_size=block,
        contracts=[Contract("drawn", kernel_block_sizes=(kernel,), width_rule=rule)],
        cp_size=size,
        cp_interleave=draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
    )


@st.composite
def groups(draw: st.DrawFn, *, kinds: Sequence[str] = KINDS, max_groups: int = 3) -> list[Group]:
    """Draw the groups of a model; those that are sharded have the same ranks, state groups none."""
    found = []
    ranks = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, max_groups))):
        kind: Any = draw(st.sampled_from(list(kinds)))
        geometry = draw(geometries(ranks=1 if kind == "state" else ranks))
        window = draw(st.integers(1, 9)) if kind in ("window", "chunked") else 0
        found.append(Group(geometry, kind=kind, window=window))
    return found


@st.composite
def schedules(draw: st.DrawFn, *, rows: int = 4, steps: int = 20, longest: int = 24) -> list[list[tuple[int, int]]]:
    """Draw what an engine computes: per step, (row, tokens) of each row that takes part, no row past ``longest``.

    A row that was never in a step before, or was left out after it was full, begins anew.
    """
    held = [0] * rows
    found = []
    for _ in range(draw(st.integers(1, steps))):
        step = []
        for row in draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True)):
            held[row] = 0 if held[row] >= longest else held[row]
            tokens = draw(st.integers(1, longest - held[row])) if held[row] == 0 else 1
            held[row] += tokens
            step.append((row, tokens))
        found.append(step)
    return found
