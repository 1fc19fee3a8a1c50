"""A KV cache group: the layers that share one table, and which of a row's blocks those layers still read."""

from dataclasses import dataclass
from typing import Literal, get_args

from blocktable.errors import ArgumentError
from blocktable.geometry import Geometry

Kind = Literal["full", "window", "chunked", "state", "ring"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Group:
    """One group of a hybrid model: its geometry and the kind of attention that reads it.

    ``full`` reads every block; ``window`` the last ``window`` tokens; ``chunked`` the tokens of the current chunk of
    ``window``; ``state`` a fixed number of blocks per row (``state_blocks``, speculative ones included), which no slot
    maps to; ``ring`` one block per row that positions wrap around in.

    >>> import blocktable
    >>> Group(blocktable.plan(max_model_len=64, block_size=16), kind="window", window=32).window
    32
    """

    geometry: Geometry
    kind: Kind = "full"
    window: int = 0
    state_blocks: int = 1

    def __post_init__(self) -> None:
        """Refuse a combination that no layer has."""
        if not isinstance(self.geometry, Geometry):
            raise ArgumentError(
                f"a group needs a Geometry, got {type(self.geometry).__name__}",
                remedy="make one with blocktable.plan(...)",
            )
        if self.kind not in KINDS:
            raise ArgumentError(
                f"unknown kind of group {self.kind!r}",
                values={"kind": self.kind},
                remedy=f"use one of {', '.join(KINDS)}",
            )
        windowed = self.kind in ("window", "chunked")
        if windowed != (self.window > 0) or self.window < 0:
            raise ArgumentError(
                f"a group of kind {self.kind!r} has window {self.window}",
                values={"kind": self.kind, "window": self.window},
                remedy="give window and chunked groups a positive window in tokens, and no other kind one",
            )
        if self.state_blocks < 1 or (self.kind != "state" and self.state_blocks != 1):
            raise ArgumentError(
                f"a group of kind {self.kind!r} has state_blocks {self.state_blocks}",
                values={"kind": self.kind, "state_blocks": self.state_blocks},
                remedy="give state groups at least one block per row, and leave the others at 1",
            )


def as_groups(groups: object) -> tuple[Group, ...]:
    """Return groups as a tuple; a bare Geometry is a full group, and a lone group is an error rather than guessed at."""
    if isinstance(groups, (Group, Geometry)) or not hasattr(groups, "__iter__"):
        raise ArgumentError(
            f"groups must be a sequence, got a {type(groups).__name__}", remedy="pass a list, also for one group"
        )
    found = tuple(group if isinstance(group, Group) else Group(group) for group in groups)
    if not found:
        raise ArgumentError("there must be at least one group", remedy="pass the geometries of the model's groups")
    return found
