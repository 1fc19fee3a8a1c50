"""Contracts from outside: those a program registers, and those that installed packages declare.

A package names, in the entry-point group ``blocktable.contracts``, a `Contract`, a sequence of them, or a package of its
own whose TOML files are read. Nothing is imported until a name is missing from the catalogue or a listing is asked for.
A plugin that fails is reported by name and costs nobody else anything.
"""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from types import ModuleType

from blocktable.contracts.contract import Contract
from blocktable.errors import ArgumentError

__all__ = ["plugin_contracts", "register", "registered"]

GROUP = "blocktable.contracts"

_registered: dict[tuple[str, str], Contract] = {}


def register(contract: Contract) -> None:
    """Make a contract of your own findable by its name; registering the name again replaces it.

    >>> from blocktable import Contract, get_contract
    >>> register(Contract("DOC_KERNEL", kernel_block_sizes=(64,)))
    >>> get_contract("DOC_KERNEL").kernel_block_sizes
    (64,)
    """
    if not isinstance(contract, Contract):
        raise ArgumentError(f"register takes a Contract, got {contract!r}")
    _registered[contract.engine, contract.name] = contract


def registered() -> tuple[Contract, ...]:
    """Return the registered contracts, the latest first."""
    return tuple(reversed(_registered.values()))


@cache
def plugin_contracts() -> tuple[tuple[Contract, ...], tuple[str, ...]]:
    """Return the contracts of all installed plugins, and one sentence for each plugin that failed."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and most programs have no plugin

    contracts: list[Contract] = []
    problems: list[str] = []
    for point in entry_points(group=GROUP):
        try:
            contracts += _contracts(point.load())
        except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything at import
            problem = f"plugin {point.name!r} ({point.value}) failed: {type(error).__name__}: {error}"
            problems.append(problem)
            # Where warnings are errors, the report must not become the failure that it reports.
            with suppress(RuntimeWarning):
                warnings.warn(f"{GROUP}: {problem}", RuntimeWarning, stacklevel=2)
    return tuple(contracts), tuple(problems)


def _contracts(value: object) -> list[Contract]:
    if isinstance(value, Contract):
        return [value]
    if isinstance(value, ModuleType):
        return _from_package(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        contracts = list(value)
        if all(isinstance(one, Contract) for one in contracts):
            return contracts
    raise ArgumentError(
        f"names {type(value).__name__}, not a Contract, a sequence of them or a package with TOML files"
    )


def _from_package(package: ModuleType) -> list[Contract]:
    from importlib.resources import files  # noqa: PLC0415 - only plugins need it

    from blocktable.contracts.catalogue import read_catalogue  # noqa: PLC0415 - a plugin of plain objects needs no reader

    contracts: list[Contract] = []
    found = sorted((one for one in files(package).iterdir() if one.name.endswith(".toml")), key=lambda one: one.name)
    if not found:
        raise ArgumentError(f"package {package.__name__} holds no TOML file")
    for file in found:
        catalogue = read_catalogue(file.read_text(encoding="utf-8"), f"{package.__name__}/{file.name}")
        contracts += [record.contract for own in catalogue.records.values() for record in own]
    return contracts
