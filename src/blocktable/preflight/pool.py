"""What the pool and the block hashes of a launch ask of its blocks, beside the width of a row."""

from blocktable.preflight.launch import Launch

__all__ = ["pool_problem"]


def pool_problem(launch: Launch, block: int) -> tuple[str, str] | None:
    """Return why vLLM refuses the pool or the hashes of a launch, and its text; None where nothing is known against them."""
    if launch.release.engine != "vllm":
        return None
    seqs, blocks, unit = launch.max_num_seqs, launch.num_blocks, launch.prefix_match_unit
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
