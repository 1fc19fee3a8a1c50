"""What follows from the model, the GPU and the release where a launch does not say it: backend, length, block size."""

from collections.abc import Sequence
from dataclasses import replace

from blocktable._ints import lcm
from blocktable.contracts import Contract, MultipleOf, Release, get_contract, known_engines
from blocktable.contracts.engines import catalogue
from blocktable.errors import UnknownName
from blocktable.preflight.choice import choose
from blocktable.preflight.launch import Launch
from blocktable.preflight.tpu import own_page

__all__ = ["companions", "complete", "is_part", "listed_sizes", "own_block_size"]


def complete(launch: Launch) -> tuple[Launch, tuple[str, ...]]:
    """Return the launch with what follows from its model and its GPU, the backend above all, and a sentence for each."""
    notes: list[str] = []
    model, release = launch.model, launch.release
    if launch.max_model_len is None and model and model.max_model_len:
        launch = replace(launch, max_model_len=model.max_model_len)
        notes.append(f"a longest request of {model.max_model_len} tokens, the model's own")
    if launch.hardware == "cpu" and release.engine == "vllm" and launch.backend and not _for_cpu(launch.backend):
        latent = model.kind == "mla" if model else "MLA" in launch.backend.upper()
        taken = "CPU_MLA" if latent else "CPU_ATTN"
        if latent and "AMX_MLA" in release.backends:
            taken = "CPU_MLA, or AMX_MLA where the CPU has AMX tiles"
        notes.append(f"{taken}, since {release} ignores {launch.backend} on a CPU")
        launch = replace(launch, backend=None if "," in taken else taken)
    elif launch.hardware == "tpu" and release.engine == "vllm" and launch.backend:
        latent = model.kind == "mla" if model else "MLA" in launch.backend.upper()
        own = replace(launch, backend="FLASH_ATTN")
        launch = replace(launch, backend=None) if latent or own.contract.hardware != ("tpu",) else own
        if launch.backend:
            notes.append(f"{launch.backend}, since {release} selects no other on a TPU")
    elif launch.backend is None and (choice := choose(launch)) and choice.backend:
        launch = replace(launch, backend=choice.backend)
        passed = f" (passed over {choice})" if choice.passed else ""
        notes.append(f"{choice.backend}, which {release} chooses on {launch.hardware}{passed}")
    if release.engine == "sglang" and launch.backend == "fa3" and launch.kv_dtype == "fp8_e5m2":
        launch = replace(launch, backend="triton")
        notes.append(f"triton, which {release} takes in place of fa3 for a cache of fp8_e5m2")
    return launch, tuple(notes)


def _for_cpu(backend: str) -> bool:
    return backend.upper().rpartition(":")[2].startswith(("CPU_", "AMX_"))


def companions(launch: Launch) -> tuple[Contract, ...]:
    """Return what the layers of the model bring beside the main attention: a sparse model its indexer."""
    release = launch.release
    if release.engine != "vllm" or not launch.model or not launch.model.sparse or launch.hardware in ("cpu", "xpu"):
        return ()
    try:
        return (get_contract("DEEPSEEK_V32_INDEXER", engine="vllm", version=release.version, hardware=launch.hardware),)
    except UnknownName:
        return ()  # it runs on other hardware, where no sparse attention is chosen either


def is_part(contract: Contract) -> bool:
    """Whether layers of a model bring that backend themselves, so that no selection is asked for it."""
    return contract.engine in known_engines() and contract.name in catalogue(contract.engine).parts


def own_block_size(launch: Launch, contract: Contract) -> int | None:
    """Return the block size that the release takes when none is given, before it fits a recurrent state into it.

    For a contract that does not say, by vLLM's rule: its default where the backend takes a multiple of one of its sizes,
    and else the smallest of them (AttentionBackend.get_preferred_block_size).
    """
    release = launch.release
    if contract.hardware == ("tpu",):
        return own_page(launch.max_model_len, launch.max_num_seqs) if isinstance(launch.max_model_len, int) else None
    own = _preferred(release, contract)
    if own and release.common_default:
        return lcm(own, *(min(listed_sizes(one.kernel_block_sizes)) for one in companions(launch)))
    return own


def _preferred(release: Release, contract: Contract) -> int | None:
    default = release.default_block_size
    if default is None or contract.default_block_size is not None:
        return contract.default_block_size if default else None
    sizes = listed_sizes(contract.manager_block_sizes or contract.kernel_block_sizes)
    return default if not sizes or any(default % size == 0 for size in sizes) else min(sizes)


def listed_sizes(sizes: Sequence[int | MultipleOf]) -> set[int]:
    """Return the smallest size of each entry."""
    return {size.base if isinstance(size, MultipleOf) else size for size in sizes}
