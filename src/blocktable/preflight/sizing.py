"""The sizes of a launch: its block, its longest request, its pool, the table that its release allocates."""

from dataclasses import replace

from blocktable.contracts import Contract
from blocktable.geometry import Geometry, plan
from blocktable.preflight.completion import companions, own_block_size
from blocktable.preflight.hybrid import block_that_holds_a_state
from blocktable.preflight.launch import Launch
from blocktable.preflight.memory import Memory, Unknown, longest_that_fits, measure, supposes_two_steps

__all__ = ["allocated", "block_of", "fit_length", "length_of", "missing_length", "pool_of"]


def length_of(launch: Launch) -> int | None:
    """Return the longest request in tokens, where it is known."""
    return launch.max_model_len if isinstance(launch.max_model_len, int) else None


def block_of(launch: Launch, contract: Contract) -> tuple[int | None, str]:
    """Return the block size that is really taken, and what is missing to know how it is aligned to a recurrent state."""
    asked = launch.block_size or own_block_size(launch, contract)
    if asked is None:
        return None, ""
    block = contract.effective_block_size(asked)
    if launch.release.engine != "vllm" or not launch.model or not launch.model.state:
        return block, ""
    try:
        return block_that_holds_a_state(launch, contract, block), ""
    except Unknown as fact:
        return launch.block_size, str(fact)


def fit_length(launch: Launch, contract: Contract, block: int | None) -> tuple[Launch, tuple[str, ...]]:
    """Return the launch with the length that ``auto`` comes to, where the memory and the model are known."""
    most = launch.model.max_model_len if launch.model else None
    if launch.max_model_len != "auto" or block is None or most is None:
        return launch, ()
    try:
        length = longest_that_fits(launch, contract, block, most)
    except Unknown:
        return launch, ()
    fitted = replace(launch, max_model_len=length) if length else launch
    return fitted, (f"a longest request of {length} tokens, which auto comes to",)


def pool_of(launch: Launch, contract: Contract | None, block: int | None) -> tuple[Memory | None, tuple[str, ...]]:
    """Return what the pool holds, and what is assumed where a pool is given of which that is not known."""
    if block is None:
        return None, ()
    given = launch.memory is not None or launch.num_blocks is not None
    try:
        memory = measure(launch, contract, block)
    except Unknown as fact:
        return None, (f"a pool that holds a request of full length: not known without {fact}",) if given else ()
    missing = memory.missing if given else ()
    assumed = [f"a pool that holds a request of full length: not known without {fact}" for fact in missing]
    if memory.blocks_per_request and supposes_two_steps(launch):
        assumed.append("asynchronous scheduling, whose two steps under way a window holds beside its own tokens")
    return memory, tuple(assumed)


def missing_length(launch: Launch) -> tuple[str, ...]:
    """Return what to say where the length is not known; nothing where it is."""
    if launch.max_model_len == "auto" and launch.memory is None and launch.num_blocks is None:
        return ("max_model_len (--max-model-len): auto is sized by the memory that the server finds (--gpu-memory)",)
    if launch.max_model_len == "auto":
        fact = "a model (--model)" if launch.model is None else "what the model keeps, and how long it may get"
        return (f"max_model_len (--max-model-len): auto follows from the memory and from {fact}",)
    if launch.max_model_len is None:
        return ("max_model_len (--max-model-len): not given, so it is the model's own",)
    return ()


def allocated(launch: Launch, contract: Contract, block: int) -> Geometry:
    """Return the table that the release allocates, unjudged; raises `GeometryError` where no kernel block fits."""
    # Where the length is not known the block size is judged alone, which one token does as well as many.
    length = launch.max_model_len if isinstance(launch.max_model_len, int) else 1
    return plan(
        max_model_len=length + (launch.lookahead if launch.release.counts_drafts else 0),
        block_size=block,
        contracts=(contract, *companions(launch)),
        engine=launch.release,
        cp_size=launch.cp_size,
        cp_interleave=launch.cp_interleave if launch.cp_size > 1 else 1,
    )
