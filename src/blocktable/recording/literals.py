"""What calls and objects are given, as a test would write it."""

from typing import Any

import numpy as np

from blocktable.contracts import Contract
from blocktable.geometry import Geometry
from blocktable.groups import Group
from blocktable.recording.shapes import SHAPE

__all__ = ["LIMITS", "as_literal"]

LIMITS = ("max_model_len", "block_size", "lookahead", "extra_blocks", "cp_size", "cp_interleave")
"""What `plan` is given, contracts aside."""


def as_literal(value: Any) -> str:
    """Return a value as Python; of this package it has the names of ``import blocktable`` and of ``Group``.

    >>> as_literal((np.arange(3), None))
    '([0, 1, 2], None,)'
    """
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if isinstance(value, tuple):
        return f"({', '.join(map(as_literal, value))}{',' * bool(value)})"
    return _group(value) if isinstance(value, Group) else repr(value)


def _group(group: Group) -> str:
    more = f", window={group.window}" if group.window else ""
    more += f", state_blocks={group.state_blocks}" if group.kind == "state" else ""
    return f"Group({_geometry(group.geometry)}, kind={group.kind!r}{more})"


def _geometry(geometry: Geometry) -> str:
    """Return the plan of a geometry; one that was made without has no reasons, and is written as it is."""
    if not geometry.reasons:
        return f"blocktable.Geometry({_named(geometry, SHAPE)}, contracts=(), engine=None, reasons=())"
    contracts = ", ".join(map(_contract, geometry.contracts))
    return f"blocktable.plan({_named(geometry, LIMITS)}{f', contracts=[{contracts}]' if contracts else ''})"


def _contract(contract: Contract) -> str:
    sizes, width = contract.kernel_block_sizes, contract.min_width
    return f"blocktable.Contract({contract.name!r}, kernel_block_sizes={sizes!r}, min_width={width})"


def _named(geometry: Geometry, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={getattr(geometry, name)}" for name in names)
