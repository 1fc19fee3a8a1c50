"""What a backend refuses before any table is made: the model, the hardware, the cache's dtype, the ranks.

Each function returns why, in our words, and the server's own text where it has one; None where nothing is refused.
"""

from collections.abc import Sequence

from blocktable.contracts import Contract
from blocktable.contracts.hardware import runs_on
from blocktable.preflight.choice import refused_reasons
from blocktable.preflight.launch import Launch
from blocktable.preflight.pool import ranks_problem

__all__ = ["cpu_problem", "parallel_problem", "selection", "selection_problem"]


def cpu_problem(launch: Launch) -> tuple[str, str] | None:
    """Ask whether vLLM has the model's attention on a CPU at all (get_attn_backend_cls, platforms/cpu.py)."""
    model, release = launch.model, launch.release
    if release.engine != "vllm" or launch.hardware != "cpu" or model is None:
        return None
    lacking = "Sparse Attention" if model.sparse else ""
    if model.kind == "mla" and "CPU_MLA" not in release.backends:
        lacking = "MLA"
    if not lacking:
        return None
    return f"{release} has no {lacking} for a CPU", f"NotImplementedError: {lacking} is not supported on CPU."


def selection_problem(launch: Launch, contract: Contract) -> tuple[str, str] | None:
    """Hold a backend that is named against what its engine asks of it: the model, the hardware, the cache, the ranks."""
    release, hardware = launch.release, launch.hardware
    reasons = (
        refused_reasons(launch, contract)
        if release.engine == "vllm" and not {"cpu", "tpu"} & set(contract.hardware)
        else ()
    )
    if any(reason != "block_size not supported" for reason in reasons):
        return f"{release} does not select {contract.name}: {', '.join(reasons)}", selection(contract, reasons)
    if hardware and contract.hardware and not any(runs_on(one, hardware) for one in contract.hardware):
        return f"{contract.name} runs on {', '.join(contract.hardware)}, not on {hardware}", ""
    if launch.kv_dtype != "auto" and not contract.accepts_cache(launch.kv_dtype, hardware):
        return f"{contract.name} reads no KV cache of dtype {launch.kv_dtype}", ""
    return ranks_problem(launch)


def parallel_problem(launch: Launch, contract: Contract, block: int) -> tuple[str, str] | None:
    """Hold the ranks of context parallelism, and their interleave, against the backend and the block."""
    name, interleave = contract.name, launch.cp_interleave
    if launch.cp_size == 1:
        return None
    if contract.context_parallel is False:
        return f"{name} does not run under context parallelism (size {launch.cp_size})", ""
    if contract.cp_max_interleave and interleave > contract.cp_max_interleave:
        most = f"an interleave of at most {contract.cp_max_interleave}"
        return f"{name} takes {most} under context parallelism, got {interleave}", ""
    if interleave > 1 and launch.lookahead and _drafts_need_interleave_1(launch, contract):
        return f"{name} takes no drafts with an interleave of {interleave}", ""
    if block % interleave and not _interleaves_by_block(launch):
        sizes = f"({block}) should be greater than or equal to and divisible by cp_kv_cache_interleave_size"
        text = f"AssertionError: Block_size{sizes} ({interleave})." if launch.release.engine == "vllm" else ""
        return f"an interleave of {interleave} does not divide blocks of {block}", text
    return None


def selection(contract: Contract, reasons: Sequence[str]) -> str:
    """Return what vLLM says when a backend that was named does not suit (get_attn_backend_cls in platforms/cuda.py)."""
    name = f"AttentionBackendEnum.{contract.name}"
    return f"ValueError: Selected backend {name} is not valid for this configuration. Reason: {list(reasons)}"


def _interleaves_by_block(launch: Launch) -> bool:
    """Whether a connector sets the interleave to the block by itself."""
    return launch.connector is not None and launch.connector.name == "NixlConnector"


def _drafts_need_interleave_1(launch: Launch, contract: Contract) -> bool:
    return launch.release.engine == "vllm" and bool(contract.context_parallel) and not contract.cp_drafts_interleave
