"""What a launch line says, whichever engine it starts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["Launch", "Length"]

Length: TypeAlias = int | Literal["auto"] | None


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Launch(NamedTuple):
    """What a launch line says about block tables; None where it says nothing.

    ``max_model_len`` is in tokens, or ``"auto"`` where the server sizes it by the memory it finds. ``backend`` is what
    flags and files name, ``attention`` what else stands in --attention-config, ``env_backend`` what the environment names, which only old releases read. ``release`` is what the
    image of a container names, "" without one, ``device`` a platform that it names; ``overrides`` are those of the model's config.
    """

    engine: str = "vllm"
    model: str | None = None
    backend: str | None = None
    env_backend: str | None = None
    backend_per_kind: bool = False
    attention: Mapping[str, Any] = MappingProxyType({})
    max_model_len: Length = None
    block_size: int | None = None
    tensor_parallel: int = 1
    tensor_parallel_given: bool = False
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    interleave: int = 1
    speculative_tokens: int = 0
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    prefix_match_unit: int | None = None
    memory: int | None = None
    kv_dtype: str = "auto"
    dtype: str = "auto"
    conv_dtype: str = "auto"
    state_dtype: str = "auto"
    batched_tokens: int | None = None
    pipeline_parallel: int = 1
    async_scheduling: bool | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    one_group: bool = False
    draft_method: str = ""
    draft_model: str | None = None
    draft_backend: str | None = None
    draft_kv_dtype: str | None = None
    draft_ranks: int | None = None
    draft_trees: bool = False
    connector: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = _NOTHING
    release: str = ""
    device: str | None = None
