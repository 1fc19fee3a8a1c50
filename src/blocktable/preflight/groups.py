"""The groups of a model's layers, each with a table of its own sizes."""

from typing import NamedTuple

from blocktable.contracts import Contract
from blocktable.geometry import Geometry
from blocktable.preflight.completion import companions
from blocktable.preflight.launch import Launch

__all__ = ["Group", "groups_of"]


class Group(NamedTuple):
    """One group of layers, with a table of its own: its kind, how many layers, who runs it, and the sizes of a row.

    Sizes are counted as in `Judgement`; ``backend`` is None where nobody has read which one runs a recurrent state.
    """

    kind: str
    block_size: int
    width: int
    layers: int | None = None
    backend: str | None = None
    kernel_block_size: int | None = None
    kernel_width: int | None = None


def groups_of(launch: Launch, contract: Contract, geometry: Geometry) -> tuple[Group, ...]:
    """Return the tables of a model's layers; those of attention are alike, and a recurrent state has its own."""
    kept = launch.model.kept if launch.model else None
    layers = {"full": kept.full, "window": kept.window} if kept else {"full": None}
    attention = [
        Group(
            kind=kind,
            layers=number,
            backend=contract.name,
            block_size=geometry.block_size,
            kernel_block_size=geometry.kernel_block_size,
            width=geometry.width,
            kernel_width=geometry.kernel_width,
        )
        for kind, number in layers.items()
        if number != 0
    ]
    attention += [attention[0]._replace(kind="index", backend=one.name) for one in companions(launch)]
    if kept is None or not kept.state or launch.release.engine != "vllm":
        return tuple(attention)
    width = launch.release.width(
        max_model_len=geometry.max_model_len,
        block_size=geometry.block_size,
        cp_size=launch.cp_size,
        lookahead=launch.lookahead,
        kind="state",
        state_mode="align" if launch.caches_prefixes else "none",
    )
    return (*attention, Group(kind="state", layers=kept.state, block_size=geometry.block_size, width=width))
