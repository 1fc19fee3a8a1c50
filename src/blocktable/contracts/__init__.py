"""What each attention kernel demands of its block table, declared once and looked up by engine, backend and version."""

from blocktable.contracts.contract import Contract
from blocktable.contracts.engines import known_engines, known_versions, resolve_engine
from blocktable.contracts.lookup import get_contract, list_contracts
from blocktable.contracts.plugins import register
from blocktable.contracts.releases import Release
from blocktable.contracts.rules import (
    AnyWidth,
    AtLeast,
    AtMost,
    Exactly,
    FloatModulus,
    MultipleOf,
    TokenMultiple,
    WidthRule,
    Widths,
)

__all__ = [
    "AnyWidth",
    "AtLeast",
    "AtMost",
    "Contract",
    "Exactly",
    "FloatModulus",
    "MultipleOf",
    "Release",
    "TokenMultiple",
    "WidthRule",
    "Widths",
    "get_contract",
    "known_engines",
    "known_versions",
    "list_contracts",
    "register",
    "resolve_engine",
]
