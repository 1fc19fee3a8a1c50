"""Block tables of the paged KV cache: contracts, geometry, tables, slots, pool and prefix cache.

Every public name is importable from here and loaded on first use, so that ``import blocktable`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blocktable.cache import KVCache
    from blocktable.contracts import (
        AnyWidth,
        AtLeast,
        AtMost,
        Contract,
        Exactly,
        FloatModulus,
        MultipleOf,
        TokenMultiple,
        get_contract,
        register,
    )
    from blocktable.delta import Delta
    from blocktable.errors import (
        ArgumentError,
        BlockTableError,
        CatalogueError,
        ConcurrentUse,
        ContractError,
        DeltaError,
        GeometryError,
        LawBroken,
        NeverFits,
        NotCopyable,
        OutOfBlocks,
        UnknownName,
    )
    from blocktable.geometry import Geometry, plan
    from blocktable.groups import Group
    from blocktable.prefix import salt
    from blocktable.replica import Replica
    from blocktable.tables import BlockTables

_HOME = {
    "cache": ("KVCache",),
    "contracts": (
        "AnyWidth",
        "AtLeast",
        "AtMost",
        "Contract",
        "Exactly",
        "FloatModulus",
        "MultipleOf",
        "TokenMultiple",
        "get_contract",
        "register",
    ),
    "delta": ("Delta",),
    "errors": (
        "ArgumentError",
        "BlockTableError",
        "CatalogueError",
        "ConcurrentUse",
        "ContractError",
        "DeltaError",
        "GeometryError",
        "LawBroken",
        "NeverFits",
        "NotCopyable",
        "OutOfBlocks",
        "UnknownName",
    ),
    "geometry": ("Geometry", "plan"),
    "groups": ("Group",),
    "prefix": ("salt",),
    "replica": ("Replica",),
    "tables": ("BlockTables",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: PLE0604 - computed once above, so that the lazy map and the list cannot disagree
    "__version__",
    *sorted(_MODULE_OF),
]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
