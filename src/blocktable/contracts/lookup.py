"""Find what a backend demands, by engine, backend, version and hardware.

>>> get_contract("vllm:FLASHINFER_MLA@0.32.0").kernel_block_sizes
(32, 64)
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from blocktable.contracts.contract import Contract
from blocktable.contracts.engines import catalogue, engine_name, fold, known_engines, release, unknown
from blocktable.contracts.hardware import runs_on
from blocktable.contracts.plugins import plugin_contracts, registered
from blocktable.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from packaging.version import Version

    from blocktable.contracts.catalogue import Catalogue, Record
    from blocktable.contracts.releases import Release

__all__ = ["get_contract", "list_contracts"]

Facts: TypeAlias = tuple[str | None, int | None, bool | None, bool | None, bool | None]
"""Compute capability, head size, grouped queries, a quantized KV cache and a latent one, as far as they are known."""

_DEFAULT_HARDWARE = "10.0"
_WEAKNESS = ("run", "read", "inferred", "carried")


def get_contract(
    name: str,
    *,
    engine: str | None = None,
    version: str | None = None,
    hardware: str | None = None,
    head_size: int | None = None,
    grouped: bool | None = None,
    quantized: bool | None = None,
    latent: bool | None = None,
    companions: Mapping[str, str] | None = None,
) -> Contract:
    """Return what a backend demands, in the release asked for (the newest known one without a version).

    Parameters
    ----------
    name
        ``"NAME"``, ``"engine:NAME"`` or ``"engine:NAME@version"``; aliases and any case are understood.
    hardware
        A compute capability such as ``"10.0"``, which is also what is taken where rules differ by it and none is given.
    head_size, grouped, quantized, latent
        The model's head size, whether several queries of a rank share a key, whether the KV cache is in 8 bits or fewer, and
        whether it holds a latent (MLA): where a kernel has a rule of its own for some of these; without them the rule for the others.
    companions
        Versions of kernel packages to judge by, such as ``{"flashinfer": "0.6.15"}``, in place of those that the
        release requires.

    Raises `UnknownName` naming the nearest known names or versions. Cost: the first call reads the data, tens of
    milliseconds; later ones take microseconds.

    >>> get_contract("TRTLLM_MLA").name
    'FLASHINFER_MLA'
    >>> get_contract("flashinfer:trtllm-gen@0.6.15").width_rule, get_contract("flashinfer:trtllm-gen@0.7.2").width_rule
    (FloatModulus(tokens=128), AnyWidth())
    """
    backend, engine, version = _split_name(name, engine, version)
    for contract in _matching(registered(), backend, engine, version):
        return contract
    try:
        return _from_catalogue(
            backend,
            engine,
            version,
            (hardware, head_size, grouped, quantized, latent),
            tuple((companions or {}).items()),
        )
    except UnknownName as error:
        contracts, problems = plugin_contracts()
        for contract in _matching(contracts, backend, engine, version):
            return contract
        if problems:
            error.message += f" ({'; '.join(problems)})"
        raise


def list_contracts(
    engine: str | None = None, *, version: str | None = None, hardware: str | None = None
) -> tuple[Contract, ...]:
    """Return every contract that can be selected in a release, or in the newest of every engine; plugins' come last.

    >>> [one.name for one in list_contracts("flashinfer", version="0.6.15")][:5]
    ['auto', 'cute-dsl', 'cutlass', 'trtllm-gen', 'xqa']
    """
    engines = known_engines() if engine is None else (engine_name(engine),)
    found = [
        _build(catalogue(one), name, release(one, version), (hardware, None, None, None, None), ())
        for one in engines
        for name in release(one, version).backends
        if name in catalogue(one).records
    ]
    others = (*plugin_contracts()[0], *registered())
    return (*found, *(one for one in others if engine is None or one.engine in ("", *engines)))


def _split_name(name: Any, engine: str | None, version: str | None) -> tuple[str, str | None, str | None]:
    match = re.fullmatch(r"(?:([^:@\s]+):)?([^:@\s]+)(?:@([^:@\s]+))?", name) if isinstance(name, str) else None
    if not match:
        raise ArgumentError(
            f"{name!r} names no backend",
            values={"name": name},
            remedy="write it as NAME, engine:NAME or engine:NAME@version",
        )
    return match[2], _agree("engine", match[1], engine), _agree("version", match[3], version)


def _agree(what: str, inside: str | None, beside: str | None) -> str | None:
    if inside is not None and beside is not None and fold(inside) != fold(beside):
        raise ArgumentError(
            f"two values for {what}: {inside!r} in the name and {beside!r} beside it", values={what: beside}
        )
    return inside if beside is None else beside


def _matching(contracts: Iterable[Contract], name: str, engine: str | None, version: str | None) -> Iterator[Contract]:
    for contract in contracts:
        if fold(contract.name) != fold(name) or (engine and fold(contract.engine) not in ("", fold(engine))):
            continue
        if not version or not contract.versions or _in_range(version, contract.versions):
            yield contract


def _in_range(version: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - only where somebody registered a range

    return SpecifierSet(versions).contains(version, prereleases=True)


@cache
def _from_catalogue(
    name: str, engine: str | None, version: str | None, facts: Facts, companions: tuple[tuple[str, str], ...]
) -> Contract:
    data = catalogue(engine_name(engine) if engine is not None else _home(name))
    chosen = release(data.engine, version)
    known = _known_name(data, name)
    if known is None:
        raise unknown("backend", name, chosen.backends, f" in {chosen}")
    if known not in chosen.backends and not _is_part(data, known, chosen):
        raise _absent(data, known, chosen)
    if known not in data.records:
        raise _unread(known, chosen)
    return _build(data, known, chosen, facts, companions)


def _is_part(data: "Catalogue", name: str, chosen: "Release") -> bool:
    return name in data.parts and data.parts[name].contains(chosen.data_version, prereleases=True)


def _home(name: str) -> str:
    """Return the engine that a bare name belongs to: an exact spelling wins over another case.

    vLLM and FlashInfer go before SGLang, which has some of vLLM's names in lower case.
    """
    every = [catalogue(engine) for engine in known_engines()]
    first = [one for one in every if not one.named_last]
    found = (
        [one.engine for one in first if any(name in names for names in _names(one))]
        or [one.engine for one in first if _known_name(one, name)]
        or [one.engine for one in every if one.named_last and _known_name(one, name)]
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise unknown("backend", name, sorted({backend for one in every for backend in one.exists}))
    raise ArgumentError(
        f"{name!r} is a backend of {' and of '.join(found)}",
        values={"name": name, "engines": tuple(found)},
        remedy=f"write {' or '.join(f'{engine}:{name}' for engine in found)}",
    )


def _names(data: "Catalogue") -> tuple[Iterable[str], ...]:
    return data.exists, data.parts, data.aliases, data.instead


def _known_name(data: "Catalogue", name: str) -> str | None:
    for known in chain(*_names(data)):
        if fold(known) == fold(name):
            return data.aliases.get(known, known)
    return None


def _absent(data: "Catalogue", name: str, chosen: "Release") -> UnknownName:
    holders = [one.version for one in data.releases.values() if name in one.backends or _is_part(data, name, one)]
    there = f"it exists in {holders[0]} to {holders[-1]}" if holders else "the name selects nothing"
    error = unknown("backend", name, chosen.backends, f" in {chosen}; {there}")
    error.values["exists_in"] = tuple(holders)
    if name in data.instead:
        error.remedy = data.instead[name]
    return error


def _unread(name: str, chosen: "Release") -> UnknownName:
    return UnknownName(
        f"{name} exists in {chosen}, but its rule is not in the catalogue",
        values={"what": "rule", "name": name, "engine": chosen.engine, "version": chosen.version},
        remedy="register a Contract of that name",
    )


def _build(
    data: "Catalogue", name: str, chosen: "Release", facts: Facts, companions: tuple[tuple[str, str], ...]
) -> Contract:
    from packaging.version import Version  # noqa: PLC0415 - loaded with the data, not before

    version = Version(chosen.data_version)
    record = _for_facts(_nearest(data, name, version), facts, name)
    evidence = "carried" if chosen.extrapolated else record.evidence(version)
    contract = replace(record.contract, evidence=evidence)
    if record.calls:
        kernel = record.calls.engine
        wanted = dict(companions).get(kernel) or chosen.requires.get(kernel)
        return _over(contract, _from_catalogue(record.calls.name, kernel, wanted, facts, ()))
    return contract


def _nearest(data: "Catalogue", name: str, version: "Version") -> list["Record"]:
    """Return the records that speak for a version, or else those of the release nearest to it that has any."""
    places = {release: place for place, release in enumerate(data.releases)}
    for other in sorted(places, key=lambda one: abs(places[one] - places[version])):
        found = [record for record in data.records[name] if record.speaks_for(other)]
        if found:
            return found
    return list(data.records[name])


def _for_facts(every: list["Record"], facts: Facts, name: str) -> "Record":
    hardware, head_size, grouped, quantized, latent = facts
    special = [
        record
        for record in every
        if record.special
        and record.suits(head_size, grouped, quantized, latent)
        and any(runs_on(one, hardware or _DEFAULT_HARDWARE) for one in record.contract.hardware)
    ]
    records = special or [record for record in every if not record.special]
    if len(records) == 1:
        return records[0]
    for record in records:
        if any(runs_on(one, hardware or _DEFAULT_HARDWARE) for one in record.contract.hardware):
            return record
    if hardware is None:
        return records[0]
    raise unknown(f"hardware for {name}", hardware, [one for record in records for one in record.contract.hardware])


def _over(contract: Contract, kernel: Contract) -> Contract:
    """Judge by the rule of the kernel package that a backend hands its table to, under the backend's own sizes."""
    return replace(
        contract,
        width_rule=kernel.width_rule,
        min_width=kernel.min_width,
        error_text=kernel.error_text,
        raised=kernel.raised,
        where=kernel.where,
        layout=kernel.layout,
        strides=kernel.strides,
        tail=kernel.tail,
        refusals=tuple((dict(kernel.refusals) | dict(contract.refusals)).items()),
        width_first=kernel.width_first,
        source=f"{contract.source}; {kernel.engine}: {kernel.source}",
        evidence=max(contract.evidence, kernel.evidence, key=_WEAKNESS.index),
    )
