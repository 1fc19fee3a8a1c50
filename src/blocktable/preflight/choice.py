"""Who will run: the backend that a release chooses by itself, and why it passes over those before it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from blocktable.contracts import Contract, MultipleOf
from blocktable.contracts.engines import catalogue
from blocktable.contracts.fields import accepts
from blocktable.contracts.hardware import runs_on
from blocktable.preflight.launch import Launch, quantized

__all__ = ["Choice", "choose", "refused_reasons", "tried"]

_REASON_OF_RANKS = (0, 29)  # from this vLLM on, the selection asks for context parallelism

# The others compute in 16 bits (supported_dtypes).
_IN_32_BITS = ("TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_ATTN")


class Choice(NamedTuple):
    """The backend chosen (None: none suits), and each one before it with the reasons for which it was passed over."""

    backend: str | None
    passed: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}: [{', '.join(reasons)}]" for name, reasons in self.passed)


def choose(launch: Launch) -> Choice | None:
    """Return what the release chooses for the launch's hardware and model; None where no order is in the catalogue.

    Cost: one lookup per candidate.
    """
    order = tried(launch)
    if order is None:
        return None
    passed: list[tuple[str, tuple[str, ...]]] = []
    if launch.hardware in ("cpu", "tpu") or launch.release.engine != "vllm":
        return Choice(order[0], ())  # taken unasked; what it cannot do shows in the worker
    for name in order:
        contract = replace(launch, backend=name).contract
        reasons = (*refused_reasons(launch, contract), *_needs(launch, contract))
        if not reasons:
            return Choice(name, tuple(passed))
        passed.append((name, reasons))
    return Choice(None, tuple(passed))


def tried(launch: Launch) -> tuple[str, ...] | None:
    """Return the order in which the release tries backends on this hardware for this model; None where nobody has read it."""
    from packaging.version import Version  # noqa: PLC0415 - loaded with the data, not before

    model, hardware = launch.model, launch.hardware
    if model is None or hardware is None or not launch.release.data_version:
        return None
    if launch.draft.trees or launch.unordered:
        return None
    heads = model.heads // launch.tensor_parallel
    for one in catalogue(launch.release.engine).priorities:
        if (
            one.model == model.kind
            and one.versions.contains(Version(launch.release.data_version), prereleases=True)
            and any(runs_on(pattern, hardware) for pattern in one.hardware)
            and (not one.families or model.family in one.families)
            and (one.max_heads is None or heads <= one.max_heads or (one.quantized and quantized(launch.kv_dtype)))
            and (one.head_size is None or one.head_size == model.head_size)
        ):
            return one.order
    return None


def refused_reasons(launch: Launch, contract: Contract) -> tuple[str, ...]:
    """Return why the selection refuses a backend, in vLLM's words and order (AttentionBackend.validate_configuration)."""
    return tuple(_reasons(launch, contract))


def _reasons(launch: Launch, contract: Contract) -> Iterator[str]:
    model, hardware = launch.model, launch.hardware
    if model and not contract.accepts_head(model.head_size):
        yield "head_size not supported"
    if launch.dtype in ("float32", "float") and contract.name not in _IN_32_BITS:
        yield "dtype not supported"
    if launch.kv_dtype != "auto" and not contract.accepts_cache(launch.kv_dtype, hardware):
        yield "kv_cache_dtype not supported"
    if launch.block_size is not None and not _selects(contract, launch.block_size):
        yield "block_size not supported"
    if model and ("MLA" in contract.name) != (model.kind == "mla"):
        yield "MLA not supported" if model.kind == "mla" else "non-MLA not supported"
    if model and model.sinks and hardware and not _takes_sinks(contract, launch, hardware):
        yield "attention sinks not supported"
    if model and ("SPARSE" in contract.name) != model.sparse:
        yield "sparse not supported" if model.sparse else "non-sparse not supported"
    if hardware and contract.hardware and not any(runs_on(one, hardware) for one in contract.hardware):
        yield "compute capability not supported"
    if launch.cp_size > 1 and contract.context_parallel is False and _asks_for_ranks(launch):
        yield "DCP not supported"
    nope = model.qk_nope_head_size if model else None
    if nope and contract.qk_nope_head_sizes and nope not in contract.qk_nope_head_sizes:
        kernel = "FlashInfer MLA Sparse" if model and model.sparse else "FlashInfer MLA"
        yield f"{kernel} kernel requires qk_nope_head_dim in {list(contract.qk_nope_head_sizes)}, but got {nope}"
    if hardware:
        yield from (why for pattern, why in contract.unsuited if pattern != "*" and runs_on(pattern, hardware))


def _takes_sinks(contract: Contract, launch: Launch, hardware: str) -> bool:
    from packaging.version import Version  # noqa: PLC0415 - loaded with the data, not before

    version = Version(launch.release.data_version)
    return any(
        on == "*" or runs_on(on, hardware)
        for one in catalogue(launch.release.engine).sinks
        if one.name == contract.name and one.versions.contains(version, prereleases=True)
        for on in one.hardware
    )


def _needs(launch: Launch, contract: Contract) -> Iterator[str]:
    if launch.kv_dtype == "auto" and not contract.accepts_cache("auto", launch.hardware):
        yield "kv_cache_dtype not supported"
    yield from (why for pattern, why in contract.unsuited if pattern == "*")


def _selects(contract: Contract, block: int) -> bool:
    """Whether the selection lets a manager block pass: a multiple of some size, also where no kernel block will fit."""
    if not accepts(contract.manager_block_sizes, block):
        return False
    sizes = [one.base if isinstance(one, MultipleOf) else one for one in contract.kernel_block_sizes]
    return not sizes or any(block % size == 0 for size in sizes)


def _asks_for_ranks(launch: Launch) -> bool:
    parts = launch.release.data_version.split(".")
    return tuple(int(part) for part in parts[:2]) >= _REASON_OF_RANKS
