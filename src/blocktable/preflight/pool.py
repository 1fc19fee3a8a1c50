"""What the pool and the block hashes of a launch ask of its blocks, beside the width of a row."""

from blocktable.contracts import Contract
from blocktable.preflight.launch import Launch
from blocktable.preflight.memory import Memory, longest_that_fits
from blocktable.preflight.model import Model

__all__ = ["memory_problem", "pool_problem", "ranks_problem"]

_GIB = 2**30


def ranks_problem(launch: Launch) -> tuple[str, str] | None:
    """Return why vLLM refuses the ranks of a launch, and its text; None where it does not."""
    if launch.release.engine != "vllm":
        return None
    split, shared = launch.tensor_parallel, launch.shared_ranks
    if launch.model and launch.model.heads % split:
        return f"{launch.model.heads} heads do not split over {split} ranks", (
            f"ValueError: Total number of attention heads ({launch.model.heads}) must be divisible by tensor parallel size "
            f"({split})."
        )
    if shared and shared % launch.cp_size:
        text = f"ValueError: tp_size={shared} must be divisible by dcp_size={launch.cp_size}."
        return f"context parallelism of {launch.cp_size} does not divide {shared} tensor-parallel ranks", text
    if shared and launch.cp_size > 1 and launch.model and launch.model.kind == "gqa":
        return _copies_problem(shared, launch.cp_size, launch.model)
    return None


def _copies_problem(split: int, ranks: int, model: Model) -> tuple[str, str] | None:
    """Hold context parallelism against the copies of a key's heads, among which alone it divides the tokens.

    The rules are those of all releases, the texts those from 0.27 on (verify_with_parallel_config, config/model.py).
    """
    heads = model.kv_heads
    copies, queries = split // heads, model.heads // heads
    if split <= heads:
        return (
            f"{split} tensor-parallel ranks hold none of {heads} key heads twice, and context parallelism shares a row among such copies",
            (
                f"ValueError: Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` ({split}) to be greater than "
                f"the model's total number of KV heads ({heads}). Increase `--tensor-parallel-size` or set "
                "`--decode-context-parallel-size 1`."
            ),
        )
    if ranks > copies:
        return (
            f"{split} tensor-parallel ranks hold each of {heads} key heads {copies} times, fewer than {ranks} ranks of context parallelism",
            (
                f"ValueError: `--decode-context-parallel-size` ({ranks}) exceeds the maximum supported value ({copies}) for "
                f"`--tensor-parallel-size` ({split}) and {heads} model KV heads."
            ),
        )
    if queries % ranks:
        return f"{queries} query heads per key head do not divide over {ranks} context-parallel ranks", (
            f"ValueError: The model's number of query heads per KV head ({queries}) must be divisible by "
            f"`--decode-context-parallel-size` ({ranks}) for GQA/MQA."
        )
    return None


def memory_problem(launch: Launch, contract: Contract, block: int, memory: Memory) -> tuple[str, str] | None:
    """Return why vLLM refuses a pool too small for one request of full length, and its text; None where it may do."""
    length, blocks, needed = launch.max_model_len, memory.num_blocks, memory.blocks_per_request
    if blocks is None or needed is None or not isinstance(length, int):
        return None
    held = blocks - launch.release.reserves_null
    if needed <= held:
        return None
    if held <= 0:
        why = f"the memory holds {'the null block alone' if blocks else 'no block'}"
        return why, "ValueError: No available memory for the cache blocks."
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
    """Return why an engine refuses the pool, the steps or the hashes of a launch, and its text; None where it may not."""
    if launch.release.engine == "sglang":
        return _page_problem(launch, block)
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
    if problem := _budget_problem(launch, block):
        return problem
    tokens = block * launch.cp_size
    if unit and _hashes(launch) and (problem := _unit_problem(launch, unit, tokens)):
        return problem
    return _chunk_problem(launch, tokens)


def _page_problem(launch: Launch, block: int) -> tuple[str, str] | None:
    """Hold the chunks of SGLang's prefills against the page that is really taken (validation_hook.py)."""
    chunk = launch.batched_tokens
    if chunk is None or not block or chunk % block == 0:
        return None
    why = f"prefills go by chunks of {chunk} tokens, which pages of {block} do not fill"
    return why, "AssertionError: chunked_prefill_size must be divisible by page_size"


def _budget_problem(launch: Launch, block: int) -> tuple[str, str] | None:
    """Hold the tokens of a step against the requests at once, the longest request and the block (SchedulerConfig)."""
    budget, seqs, length = launch.batched_tokens, launch.max_num_seqs, launch.max_model_len
    if budget is None:
        return None
    if seqs and budget < seqs:
        return f"a step of {budget} tokens serves no {seqs} requests at once", (
            f"ValueError: max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({seqs})."
        )
    if launch.chunked_prefill is False and isinstance(length, int) and budget < length:
        return f"a step of {budget} tokens holds no prompt of {length}, and prefills are not chunked", (
            f"ValueError: max_num_batched_tokens ({budget}) is smaller than max_model_len ({length}). This effectively limits "
            "the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences."
        )
    if (
        launch.model
        and launch.model.state
        and launch.release.fills_states
        and launch.caches_prefixes
        and budget < block
    ):
        return f"a step of {budget} tokens fills no block of {block}, where states are cached", (
            f"AssertionError: In Mamba cache align mode, block_size ({block}) must be <= max_num_batched_tokens ({budget})."
        )
    return None


def _hashes(launch: Launch) -> bool:
    """Whether blocks are hashed at all: for prefix caching, or for a connector."""
    return launch.prefix_caching is not False or launch.connector is not None


def _unit_problem(launch: Launch, unit: int, tokens: int) -> tuple[str, str] | None:
    """Hold the unit of hashing against the blocks of all groups (resolve_kv_cache_block_sizes, v1/core/kv_cache_utils.py).

    A single group takes no other than its block; releases before that ignored the unit. Several groups share their size.
    """
    model = launch.model
    several = bool(model and (model.state or (model.kept and model.kept.window and model.kept.full)))
    if model and model.state and not launch.caches_prefixes:
        return None  # states are then not hashed, and nothing finer than a block is
    if several and tokens % unit:
        return f"blocks of {tokens} tokens are hashed by no unit of {unit}, which does not divide them", (
            f"ValueError: Invalid prefix_match_unit={unit}; prefix-cacheable KV cache group block sizes must be divisible by "
            f"prefix_match_unit. Got group block sizes=[{tokens}, …]"
        )
    if not several and unit != tokens and launch.release.match_unit_is_block:
        return f"one group is hashed by its blocks of {tokens} tokens, not by {unit}", (
            f"ValueError: Invalid prefix_match_unit={unit}; with a single KV cache group, prefix-cache hits land on the "
            f"block size ({tokens}). Unset it or set it to {tokens}."
        )
    return None


def _chunk_problem(launch: Launch, tokens: int) -> tuple[str, str] | None:
    """Hold the chunk of a connector against the block, of which it has to be a multiple."""
    connector = launch.connector
    if connector is None or connector.chunk is None or not tokens or connector.chunk % tokens == 0:
        return None
    why = f"{connector.name} carries chunks of {connector.chunk} tokens, and blocks of {tokens} do not fill them"
    if connector.name.startswith("LMCache"):
        return why, "AssertionError: LMCache chunk size should be a multiple of vLLM block size"
    return why, (
        f"ValueError: 'block_size'={connector.chunk} in kv_connector_extra_config must be a multiple of the GPU KV cache "
        f"block size ({tokens} tokens)."
    )
