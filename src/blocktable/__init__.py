"""Block tables of the paged KV cache: contracts, geometry, tables, slots, pool and prefix cache.

Every public name is importable from here and loaded on first use, so that ``import blocktable`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # each name under its own name again, which is how a type checker knows it for public
    from blocktable.cache import KVCache as KVCache
    from blocktable.contracts import (
        AnyWidth as AnyWidth,
        AtLeast as AtLeast,
        AtMost as AtMost,
        Contract as Contract,
        Exactly as Exactly,
        FloatModulus as FloatModulus,
        MultipleOf as MultipleOf,
        TokenMultiple as TokenMultiple,
        get_contract as get_contract,
        register as register,
    )
    from blocktable.delta import Delta as Delta
    from blocktable.errors import (
        ArgumentError as ArgumentError,
        BlockTableError as BlockTableError,
        CatalogueError as CatalogueError,
        ConcurrentUse as ConcurrentUse,
        ContractError as ContractError,
        DeltaError as DeltaError,
        GeometryError as GeometryError,
        LawBroken as LawBroken,
        NeverFits as NeverFits,
        NotCopyable as NotCopyable,
        OutOfBlocks as OutOfBlocks,
        UnknownName as UnknownName,
    )
    from blocktable.geometry import (
        Geometry as Geometry,
        plan as plan,
    )
    from blocktable.groups import Group as Group
    from blocktable.prefix import salt as salt
    from blocktable.replica import Replica as Replica
    from blocktable.tables import BlockTables as BlockTables

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
