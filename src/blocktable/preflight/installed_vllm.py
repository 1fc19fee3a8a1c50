"""Hold the catalogue against the vLLM installed here: names, block sizes, dtypes, GPUs, widths, the order of its choice."""

import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blocktable.contracts import Contract, Release, get_contract, list_contracts, resolve_engine
from blocktable.contracts.hardware import runs_on
from blocktable.errors import BlockTableError, UnknownName
from blocktable.preflight.choice import tried
from blocktable.preflight.findings import Finding
from blocktable.preflight.launch import Launch, quantized
from blocktable.preflight.lifting import lift
from blocktable.preflight.model import Model

__all__ = ["ask_vllm"]

_ELSEWHERE = frozenset({"rocm", "xpu", "tpu"})  # importing another platform's modules can end the process
_GPUS = ("8.0", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")


def ask_vllm(version: str) -> Iterator[Finding]:
    """Yield a finding for the names, the widths, the order of choice, and every backend class that imports here."""
    release = resolve_engine(f"vllm=={version}")
    if release.extrapolated:
        yield Finding(str(release), "release", f"the catalogue ends at {release.data_version}")
    registry = _load("vllm.v1.attention.backends.registry").AttentionBackendEnum
    yield from _names(release, set(registry.__members__))
    yield _widths(release)
    yield _orders(release)
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
    differ = [
        f"{blocks} blocks of {block}: the engine allocates {theirs}, the catalogue says {ours}"
        for block in range(1, 1025)
        for blocks in (1, 2, 3, 255, 256, 257)
        if (ours := release.width(max_model_len=blocks * block, block_size=block)) != (theirs := helper(blocks, block))
    ]
    more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
    return Finding(str(release), "width of a row", differ[0] + more if differ else "")


def _orders(release: Release) -> Finding:
    """Compare the order in which backends are tried, for every GPU and kind of model."""
    subject = "order of its own choice"
    try:
        file = Path(_load("vllm.v1.attention.backends.registry").__file__).parents[3] / "platforms" / "cuda.py"
        names = SimpleNamespace(**{name: name for name in release.backends})
        scope = {"AttentionBackendEnum": names, "is_quantized_kv_cache": quantized, "cache": cache}
        theirs_for = lift(file, "_get_backend_priorities", scope)
    except (OSError, LookupError, SyntaxError) as error:
        return Finding(str(release), subject, skipped=str(error))
    differ = []
    for gpu, latent, heads, kv_dtype in product(_GPUS, (False, True), (16, 128), ("auto", "fp8")):
        major, minor = map(int, gpu.split("."))
        size = 576 if latent else 128
        model = Model(source="", kind="mla" if latent else "gqa", head_size=size, heads=heads, kv_heads=heads)
        ours = tried(Launch(release, None, hardware=gpu, model=model, kv_dtype=kv_dtype))
        try:
            theirs = theirs_for(
                use_mla=latent,
                device_capability=SimpleNamespace(major=major, minor=minor),
                num_heads=heads,
                kv_cache_dtype=kv_dtype,
            )
        except (AttributeError, NameError, TypeError) as error:  # another signature, or a name that the catalogue lacks
            return Finding(str(release), subject, skipped=f"it asks for more than this command knows: {error}")
        if list(ours or ()) != list(theirs):
            kind = "MLA" if latent else "GQA"
            differ.append(f"{kind} on {gpu} with {heads} heads, {kv_dtype} cache: the engine tries {', '.join(theirs)}")
    return Finding(str(release), subject, "; ".join(differ))


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
    theirs = set(getattr(backend, "supported_kv_cache_dtypes", ()))  # a class of an old release may list none
    here = [one for gpu in _GPUS if (one := _on(release, contract.name, gpu))] or [contract]
    ours = {dtype for one in here for _, some in one.kv_dtypes for dtype in some}
    return (
        ""
        if not ours or not theirs or ours == theirs
        else f"KV cache dtypes {_show(theirs)}, in the catalogue {_show(ours)}"
    )


def _gpus(release: Release, contract: Contract, backend: Any) -> str:
    if "cpu" in contract.hardware:
        return ""
    differ = []
    for gpu in _GPUS:
        major, minor = map(int, gpu.split("."))
        capability = _load("vllm.platforms.interface").DeviceCapability(major, minor)
        theirs = bool(backend.supports_compute_capability(capability))
        here = _on(release, contract.name, gpu)
        if theirs != (here is not None and (not here.hardware or any(runs_on(one, gpu) for one in here.hardware))):
            differ.append(f"compute capability {gpu}: the engine says {'yes' if theirs else 'no'}")
    return "; ".join(differ)


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
