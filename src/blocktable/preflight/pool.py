"""What the pool and the block hashes of a launch ask of its blocks, beside the width of a row."""

from blocktable.contracts import Contract
from blocktable.preflight.launch import Launch
from blocktable.preflight.memory import Memory, longest_that_fits

__all__ = ["memory_problem", "pool_problem"]

_GIB = 2**30


def memory_problem(launch: Launch, contract: Contract, block: int, memory: Memory) -> tuple[str, str] | None:
    """Return why vLLM refuses a pool too small for one request of full length, and its text; None where it may do."""
    length, blocks, needed = launch.max_model_len, memory.num_blocks, memory.blocks_per_request
    if blocks is None or needed is None or not isinstance(length, int):
        return None
    held = blocks - launch.release.reserves_null
    if needed <= held:
        return None
    fits = longest_that_fits(launch, contract, block, length)
    null = ", the null block aside" if launch.release.reserves_null else ""
    per_block = memory.bytes_per_block
    have = (blocks * per_block if launch.memory is None or launch.num_blocks else launch.memory) - (
        per_block if launch.release.reserves_null else 0
    )
    estimate = f" Based on the available memory, the estimated maximum model length is {fits}." if fits else ""
    return f"one request of {length} tokens takes {needed} blocks, and there are {held}{null}", (
        f"ValueError: To serve at least one request with the model's max seq len ({length}), "
        f"({round(needed * per_block / _GIB, 2)} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({round(have / _GIB, 2)} GiB).{estimate}"
    )


def pool_problem(launch: Launch, block: int, blocks: int | None) -> tuple[str, str] | None:
    """Return why vLLM refuses the pool or the hashes of a launch, and its text; None where nothing is known against them."""
    if launch.release.engine != "vllm":
        return None
    seqs, unit = launch.max_num_seqs, launch.prefix_match_unit
    if launch.model and launch.model.state and seqs and blocks and seqs > blocks:
        # config/compilation.py, from 0.20 on, where decodes run in full CUDA graphs.
        return f"{seqs} requests at once need as many state blocks, and there are {blocks}", (
            f"ValueError: max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({blocks}). Each decode sequence "
            "requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most "
            f"{blocks} or increase gpu_memory_utilization."
        )
    tokens = block * launch.cp_size
    if unit and unit != tokens and launch.release.match_unit_is_block and not (launch.model and launch.model.state):
        # resolve_kv_cache_block_sizes in v1/core/kv_cache_utils.py; releases before ignored the unit of a single group.
        return f"one group is hashed by its blocks of {tokens} tokens, not by {unit}", (
            f"ValueError: Invalid prefix_match_unit={unit}; with a single KV cache group, prefix-cache hits land on the "
            f"block size ({tokens}). Unset it or set it to {tokens}."
        )
    return None
