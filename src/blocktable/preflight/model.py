"""What a model's ``config.json`` says about attention: the kind, head sizes and heads that choose a backend."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from blocktable.errors import ArgumentError
from blocktable.preflight.layers import Layers, drafting_layers, read_layers
from blocktable.preflight.states import State, read_state

__all__ = ["Model", "read_model"]

_STATE_KEYS = (
    *("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "hybrid_override_pattern", "mamba_n_heads"),
    *("linear_attn_config", "full_attn_idxs"),
)
# Where vLLM looks for the heads of a key, in its order.
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_WITH_SINKS = ("gpt_oss",)
# Where it looks for the longest request; the least counts, and Cohere's own name wins.
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
_STATE_WORDS = ("linear", "mamba", "recurrent", "conv", "ssm")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A text model as far as block tables are concerned.

    ``family`` is its type, as configs name it; ``kind`` is mla where a latent is cached, gqa where keys and values are; ``sparse``: an index chooses the tokens, from a
    cache of its own; ``state``: some layers keep a recurrent state; ``sinks``: every layer has attention sinks. ``head_size`` is that of the cache (latent and rope
    for MLA), ``heads`` those of the whole model. ``max_model_len`` is None where a scaled rope decides it. ``kept`` is what
    its layers keep, ``drafting`` the number of those that it brings to draft tokens, and ``recurrent`` the state of one, None where that is not known; ``index_size`` the bytes per token of a
    sparse layer's index; ``dtype`` that of its weights, ``kv_dtype`` the one that a quantized checkpoint asks for its cache
    ("" where that is not known).
    """

    source: str
    family: str = ""
    kind: Literal["gqa", "mla"]
    head_size: int
    heads: int
    kv_heads: int
    layers: int | None = None
    qk_nope_head_size: int | None = None
    sparse: bool = False
    state: bool = False
    sinks: bool = False
    max_model_len: int | None = None
    kept: Layers | None = None
    drafting: int | None = None
    recurrent: State | None = None
    index_size: int | None = None
    dtype: str | None = None
    kv_dtype: str = "auto"

    def grouped(self, ranks: int) -> bool:
        """Whether several queries of one of so many tensor-parallel ranks share a key; keys are repeated, never split."""
        return self.heads // ranks // max(1, self.kv_heads // ranks) > 1


def read_model(path: str | Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Model:
    """Read a folder with a ``config.json``, or such a file; raises `ArgumentError` for what is no text model's.

    Where it is the config of a model, only of a kind that nobody has read, the error's values say why under ``unread``.
    ``overrides`` replace what the config says, as vLLM's ``--hf-overrides`` do. Cost: one small file.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ArgumentError(
            f"cannot read a model from {path}: {why}",
            values={"model": str(path)},
            remedy="give a folder that holds a config.json, or that file",
        ) from None
    if not isinstance(config, dict):
        raise _unfit(path, "its config is no object")
    config = _override(config, overrides)
    text = config.get("text_config")
    outer: dict[str, Any] = {
        key: config[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in config
    }
    return _model(path, {**outer, **text} if isinstance(text, dict) else config)


def _override(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what replaces it: a config within it is changed key by key, everything else as a whole."""
    inner = {
        key: _override(config[key], value)
        for key, value in overrides.items()
        if key.endswith("_config") and isinstance(value, dict) and isinstance(config.get(key), dict)
    }
    return {**config, **overrides, **inner}


def _model(path: str | Path, config: Mapping[str, Any]) -> Model:
    if config.get("compress_ratios"):
        raise _unread(
            path, "models with compressed layers (DeepSeek V4) choose their backends and blocks by themselves"
        )
    heads = _number(path, config, "num_attention_heads") or _number(path, config, "n_head")
    if not heads:
        raise _unread(path, "its config has no num_attention_heads, as those of models that are no decoders of text")
    latent = _number(path, config, "kv_lora_rank")
    hidden = _number(path, config, "hidden_size") or _number(path, config, "n_embd") or 0
    own = _number(path, config, "head_dim") or hidden // heads
    if not latent and not own:
        raise _unfit(path, "its config has neither head_dim nor hidden_size")
    return Model(
        source=str(path),
        family=str(config.get("model_type") or ""),
        kind="mla" if latent else "gqa",
        head_size=latent + (_number(path, config, "qk_rope_head_dim") or 0) if latent else own,
        heads=heads,
        kv_heads=next(filter(None, (_number(path, config, key) for key in _KV_HEADS)), heads),
        layers=_number(path, config, "num_hidden_layers") or _number(path, config, "n_layer"),
        qk_nope_head_size=_number(path, config, "qk_nope_head_dim") if latent else None,
        sparse=bool(latent and config.get("index_topk")),
        state=_keeps_state(config),
        sinks=config.get("model_type") in _WITH_SINKS,
        max_model_len=_longest(path, config),
        kept=read_layers(config),
        drafting=drafting_layers(config),
        recurrent=read_state(config),
        index_size=_index_size(path, config),
        dtype=next((str(config[key]) for key in ("dtype", "torch_dtype") if config.get(key)), None),
        kv_dtype=_cache_dtype(config.get("quantization_config")),
    )


def _number(path: str | Path, config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise _unfit(path, f"{key} is {value!r}, not a count")


def _keeps_state(config: Mapping[str, Any]) -> bool:
    kinds, drawn, every = (config.get(key) for key in ("layer_types", "attn_type_list", "layer_group_size"))
    if (isinstance(drawn, list) and 0 in drawn) or (type(every) is int and every > 1):
        return True  # MiniMax draws a linear layer as 0; Bailing's every so many-th layer is none
    named = " ".join(map(str, kinds)) if isinstance(kinds, list) else ""
    return any(config.get(key) for key in _STATE_KEYS) or any(word in named for word in _STATE_WORDS)


def _index_size(path: str | Path, config: Mapping[str, Any]) -> int | None:
    """Return the bytes per token of an index: 8 bits a value, and a scale of 4 bytes for 128 of them."""
    head = _number(path, config, "index_head_dim")
    return head + head // 128 * 4 if head else None


def _cache_dtype(quantized: Any) -> str:
    """Return the dtype of the cache that a checkpoint asks for; many that are quantized say nothing of it."""
    if not isinstance(quantized, dict):
        return "auto"
    asked = [quantized.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    inner = quantized.get("quantization")
    if isinstance(inner, dict):
        asked += [inner.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    return "" if any(asked) else "auto"


def _longest(path: str | Path, config: Mapping[str, Any]) -> int | None:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "unknown"
    lengths = [length for key in _LENGTHS if (length := _number(path, config, key))]
    longest = _number(path, config, "model_max_length") or min(lengths, default=None)
    if kind == "yarn" and isinstance(rope.get("factor"), int | float):
        # Older releases scale the original length, newer ones take the scaled one as it is.
        scaled = (_number(path, rope, "original_max_position_embeddings") or 0) * rope["factor"]
        return longest if scaled == longest else None
    return longest if kind in ("default", "mrope", "llama3") else None


def _unfit(path: str | Path, why: str) -> ArgumentError:
    return ArgumentError(f"cannot judge the model {path}: {why}", values={"model": str(path)}, remedy="mend its config")


def _unread(path: str | Path, why: str) -> ArgumentError:
    return ArgumentError(f"cannot judge the model {path}: {why}", values={"model": str(path), "unread": why})
