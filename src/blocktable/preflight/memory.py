"""What blocks cost, how many fit, and how many requests of full length those hold: as vLLM counts when it sizes its pool.

Layers that keep the same kind of thing share a group, groups draw blocks from one pool, and a block of the pool is as large
as the largest group needs. Where a fact is missing the answer says which; nothing is estimated.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from blocktable._ints import ceil_div
from blocktable.contracts import Contract, MultipleOf
from blocktable.preflight.launch import Launch
from blocktable.preflight.layers import Layers, fullest_stage
from blocktable.preflight.model import Model

__all__ = ["Memory", "Unknown", "attention_bytes", "longest_that_fits", "measure", "state_bytes", "supposes_two_steps"]

_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_PACKED = (
    656  # bytes per token of a sparse latent in 8 bits: 512 values, 4 scales of 4 bytes, 64 rope values in 16 bits
)
_PACKING = {"FLASHMLA_SPARSE": ("fp8", "fp8_e4m3"), "FLASHINFER_MLA_SPARSE_SM120": ("auto", "fp8", "fp8_e4m3")}


class Unknown(Exception):  # noqa: N818 - an answer, not an error: the fact that is missing
    """A fact that decides is missing; the message names it."""


class Memory(NamedTuple):
    """The pool of one rank.

    ``bytes_per_token`` counts all layers, as ``bytes_per_block`` does; ``num_blocks`` is the pool, null block included,
    ``blocks_per_request`` what one of the longest length takes of it at most, and ``requests`` how many of those fit at once.
    ``missing`` names what is not known of these, with the fact that would tell.
    """

    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int | None = None
    blocks_per_request: int | None = None
    requests: float | None = None
    missing: tuple[str, ...] = ()


def measure(launch: Launch, contract: Contract | None, block: int) -> Memory:
    """Return what is known of the pool; raises `Unknown` where not even a block's size is. Cost: constant.

    Without a contract, where no backend is known, what depends on it is not known either.
    """
    pool, missing = _pool(launch, contract, block), []
    needed = None
    try:
        length = launch.max_model_len
        if isinstance(length, int):
            needed = _blocks(launch, pool, block, length)
    except Unknown as fact:
        missing.append(str(fact))
    held = launch.num_blocks
    if held is None and launch.memory is not None:
        held = launch.memory // pool.bytes_per_block
    return Memory(
        bytes_per_token=pool.bytes_per_token,
        bytes_per_block=pool.bytes_per_block,
        num_blocks=held,
        blocks_per_request=needed,
        requests=held / needed if held is not None and needed else None,
        missing=tuple(missing),
    )


def longest_that_fits(launch: Launch, contract: Contract | None, block: int, most: int) -> int:
    """Return the longest request, of at most ``most`` tokens, for which the pool has blocks; 0 where it has none.

    Raises `Unknown` where a fact is missing. Cost: a binary search.
    """
    pool = _pool(launch, contract, block)
    held = launch.num_blocks
    if held is None and launch.memory is not None:
        held = launch.memory // pool.bytes_per_block
    if held is None:
        raise Unknown("the memory of the KV cache (--gpu-memory)")
    usable = held - launch.release.reserves_null
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _blocks(launch, pool, block, middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


class _Pool(NamedTuple):
    bytes_per_token: int
    bytes_per_block: int
    groups: tuple[str, ...]  # the kind of each
    window: int | None


def _pool(launch: Launch, contract: Contract | None, block: int) -> _Pool:
    model = launch.model
    if launch.release.engine != "vllm":
        raise Unknown(f"how {launch.release.engine} sizes its pool, which is not in the catalogue")
    if model is None:
        raise Unknown("a model (--model)")
    if model.kept is None:
        raise Unknown(f"what the layers of {model.source} keep, which is not a model that the catalogue knows")
    if launch.hardware == "tpu":
        raise Unknown("how its cache is padded on a TPU")
    kept = model.kept
    if launch.pipeline_parallel > 1 and (
        kept.window or kept.state or (launch.draft.adds_layers and not launch.draft.inside)
    ):
        raise Unknown("how layers of several kinds are divided over pipeline stages")
    per_token, drafted = attention_bytes(launch, contract), _draft_bytes(launch, contract)
    if launch.pipeline_parallel > 1:
        stage = fullest_stage(kept.full, launch.pipeline_parallel, drafted // per_token, launch.partition)
        kept, drafted = Layers(stage), 0
    size, groups = _grouped(kept, one=launch.one_group)
    if kept.state and state_bytes(launch) > block * per_token:
        raise Unknown(f"the block size, since {block} tokens are less than one recurrent state")
    if kept.window and _window_block(_known(contract), block) != block:
        raise Unknown(f"how {_known(contract).name} lays out a window in blocks of {block}")
    return _Pool(
        bytes_per_token=per_token * (kept.full + kept.window) + drafted,
        bytes_per_block=block * (size * per_token + drafted),
        groups=groups,
        window=kept.window_size,
    )


def _known(contract: Contract | None) -> Contract:
    if contract is None:
        raise Unknown("the backend (--backend)")
    return contract


def _draft_bytes(launch: Launch, contract: Contract | None) -> int:
    """Return the bytes per token of the draft's layers, which join the group where both keep the whole context."""
    draft = launch.draft
    if not draft.adds_layers:
        return 0
    model, target = draft.model, launch.model
    if draft.inside and target and target.kept and target.drafting and not (target.kept.window or target.kept.state):
        return attention_bytes(launch, contract) * target.drafting
    if model is None or draft.inside or model.kept is None or target is None:
        raise Unknown("the layers of the draft model")
    if any(kept is None or kept.window or kept.state for kept in (model.kept, target.kept)):
        raise Unknown("how the layers of the draft model and those of the model are grouped")
    alone = replace(
        launch,
        model=model,
        kv_dtype=draft.kv_dtype or launch.kv_dtype,
        tensor_parallel=draft.ranks or launch.tensor_parallel,
    )
    return attention_bytes(alone, contract) * model.kept.full


def _grouped(kept: Layers, *, one: bool) -> tuple[int, tuple[str, ...]]:
    """Return the layers of a group, and the kind of each group, as vLLM forms them: none much smaller than the others."""
    layers = {"full": kept.full, "window": kept.window, "state": kept.state}
    if one and kept.full:
        layers = {"full": kept.full + kept.window, "state": kept.state}
    layers = {kind: number for kind, number in layers.items() if number}
    least, most = min(layers.values()), max(layers.values())
    size = most if 2 * most < 3 * least else least
    return size, tuple(kind for kind, number in layers.items() for _ in range(ceil_div(number, size)))


def attention_bytes(launch: Launch, contract: Contract | None) -> int:
    """Return the bytes per token that one attention layer keeps on one rank."""
    model = launch.model
    if model is None:
        raise Unknown("a model (--model)")
    if model.kind == "gqa":
        return 2 * model.head_size * _element_bytes(launch, model) * max(1, model.kv_heads // launch.tensor_parallel)
    if not model.sparse:
        return model.head_size * _element_bytes(launch, model)
    if not model.index_size:
        raise Unknown(f"index_head_dim, which the config of {model.source} lacks")
    if launch.kv_dtype in _PACKING.get(_known(contract).name, ()):
        return _PACKED + model.index_size
    return model.head_size * _element_bytes(launch, model) + model.index_size


def _element_bytes(launch: Launch, model: Model) -> int:
    """Return the bytes of one cached value: those of the cache's dtype, or else of the model's."""
    dtype = launch.kv_dtype
    if dtype == "auto":
        dtype = model.kv_dtype
    if not dtype:
        raise Unknown("the dtype of the KV cache (--kv-cache-dtype), which the quantized checkpoint chooses")
    if dtype == "auto":
        return _model_bytes(launch)
    if dtype not in _BYTES:
        raise Unknown(f"how a KV cache of dtype {dtype} is packed, which is not in the catalogue")
    return _BYTES[dtype]


def _model_bytes(launch: Launch) -> int:
    """Return the bytes of a value of the model's dtype; vLLM halves float32, unless that is asked for."""
    return 2 if launch.dtype == "auto" else _BYTES.get(launch.dtype, 2)


def state_bytes(launch: Launch) -> int:
    """Return the bytes of one layer's recurrent state on one rank."""
    model = launch.model
    if model is None or model.recurrent is None:
        raise Unknown("the size of a recurrent state, which is not of a kind that the catalogue knows")
    size = model.recurrent.size(
        ranks=launch.tensor_parallel,
        drafts=launch.lookahead,
        element=_BYTES.get(launch.conv_dtype) or _model_bytes(launch),
        matrix=_BYTES.get(launch.state_dtype),
    )
    if size is None:
        raise Unknown(f"how {launch.tensor_parallel} ranks hold a recurrent state that they do not divide")
    return size


def _window_block(contract: Contract, block: int) -> int:
    """Return the block of a layer with a window: the largest that the kernel takes within the block asked for."""
    sizes = [
        max(one.base, block // one.base * one.base) if isinstance(one, MultipleOf) else one
        for one in contract.kernel_block_sizes
    ]
    return max((one for one in sizes if one <= block), default=min(sizes, default=block))


def _blocks(launch: Launch, pool: _Pool, block: int, length: int) -> int:
    """Return how many blocks a request of that length takes at most, over all groups."""
    return sum(_blocks_of(kind, launch, pool, block, length) for kind in pool.groups)


def _blocks_of(kind: str, launch: Launch, pool: _Pool, block: int, length: int) -> int:
    if kind == "full":
        return ceil_div(ceil_div(length, launch.cp_size), block)
    if kind == "window":
        if launch.cp_size > 1:
            raise Unknown("how a window is held under context parallelism")
        return ceil_div(min((pool.window or length) - 1 + _in_flight(launch, length), length), block) + 1
    if not launch.caches_prefixes:
        return 1 + launch.lookahead
    if launch.model and launch.model.recurrent and launch.model.recurrent.chunked:
        raise Unknown("how many states a request keeps whose kernel goes by chunks")
    return 2 + launch.lookahead


def _in_flight(launch: Launch, length: int) -> int:
    """Return the tokens that may be under way: a window holds them beside its own."""
    if launch.batched_tokens is None:
        raise Unknown("the tokens of a step (--max-num-batched-tokens), which a window holds beside its own")
    return min(_steps(launch) * launch.batched_tokens, length)


def supposes_two_steps(launch: Launch) -> bool:
    """Whether the blocks of a request rest on two steps under way, which the launch does not say."""
    windows = launch.model is not None and launch.model.kept is not None and launch.model.kept.window > 0
    return windows and launch.async_scheduling is None and _steps(launch) > 1


def _steps(launch: Launch) -> int:
    """Return how many steps are under way: two where the next is scheduled while one runs, as is usual on a GPU."""
    if not launch.release.counts_in_flight or launch.hardware == "cpu" or launch.async_scheduling is False:
        return 1
    return 2
