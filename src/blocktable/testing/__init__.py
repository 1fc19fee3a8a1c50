"""For the tests of others: contracts against kernels, tables and caches against plain-Python models.

``check_contract`` and ``assert_widths_agree`` are for kernels and engines; ``run_parity`` puts anybody's tables through
the cases of ours; ``TablesModel`` and ``CacheModel`` are the models, slow and obvious. With Hypothesis installed,
``TablesMachine`` and ``CacheMachine`` are state machines that drive tables and caches beside the models, and
``strategies`` draws geometries, groups and schedules.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from blocktable.testing.contracts import assert_widths_agree, check_contract

if TYPE_CHECKING:
    from blocktable.oracle import Refused, TablesModel
    from blocktable.oracle.cache import CacheModel
    from blocktable.testing import strategies
    from blocktable.testing.cache_machine import CacheMachine
    from blocktable.testing.cases import CASES, Case, Step
    from blocktable.testing.parity import run_parity
    from blocktable.testing.tables_machine import TablesMachine
    from blocktable.testing.workload import CacheWorkload, TablesWorkload

_HOME = {
    "CASES": "testing.cases",
    "CacheMachine": "testing.cache_machine",
    "CacheModel": "oracle.cache",
    "CacheWorkload": "testing.workload",
    "Case": "testing.cases",
    "Refused": "oracle",
    "Step": "testing.cases",
    "TablesMachine": "testing.tables_machine",
    "TablesModel": "oracle",
    "TablesWorkload": "testing.workload",
    "run_parity": "testing.parity",
}

__all__ = [
    "CASES",
    "CacheMachine",
    "CacheModel",
    "CacheWorkload",
    "Case",
    "Refused",
    "Step",
    "TablesMachine",
    "TablesModel",
    "TablesWorkload",
    "assert_widths_agree",
    "check_contract",
    "run_parity",
    "strategies",
]


def __getattr__(name: str) -> object:
    if name == "strategies":
        return import_module("blocktable.testing.strategies")
    if name not in _HOME:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"blocktable.{_HOME[name]}"), name)
    globals()[name] = value
    return value
