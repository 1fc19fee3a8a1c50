"""What the layers of a model keep, from its ``config.json``: keys and values of the whole context, of a window, a state.

>>> read_layers({"model_type": "qwen2", "num_hidden_layers": 24})
Layers(full=24, window=0, window_size=None, state=0)
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from blocktable._ints import ceil_div

__all__ = ["Layers", "drafting_layers", "fullest_stage", "read_layers"]

# Models whose layers vLLM 0.32 builds as read here; another may share layers, or alternate them by a rule of its own.
_WITH_WINDOW = ("llama", "mistral", "mixtral", "phi3")
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
_FULL = (
    *("bloom", "dbrx", "ernie4_5", "ernie4_5_moe", "exaone", "falcon", "gemma", "glm4", "glm4_moe", "gpt2", "gpt_neox"),
    *("internlm2", "mimo", "nemotron", "olmo", "olmoe", "opt", "phi", "stablelm", "starcoder2"),
)
# Models whose last layers, beyond those counted, draft tokens and keep what the others keep.
_DRAFTING = ("deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "mimo")
_LISTED = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss")
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "lfm2")
_EVERY_FOURTH = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OPTIONAL_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_KINDS: Mapping[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
}


class Layers(NamedTuple):
    """How many layers keep the whole context, the last ``window_size`` tokens, and a recurrent state."""

    full: int
    window: int = 0
    window_size: int | None = None
    state: int = 0


def read_layers(config: Mapping[str, Any]) -> Layers | None:
    """Return the layers of a text model's config, None where it is no model whose layers are known. Cost: constant."""
    model, kinds = config.get("model_type"), config.get("layer_types")
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    window = config.get("sliding_window") or None
    if type(layers) is not int or layers < 1 or (window is not None and type(window) is not int):
        return None
    if (
        model in _LATENT
        or (model in _FULL and not window)
        or (model in _OPTIONAL_WINDOW and not config.get("use_sliding_window"))
    ):
        return Layers(layers)
    if model == "nemotron_h":
        return _drawn(config.get("hybrid_override_pattern"))
    if isinstance(kinds, list) and kinds:
        return _listed(kinds, window) if model in _LISTED + _HYBRID and len(kinds) == layers else None
    if model in _EVERY_FOURTH:
        every = config.get("full_attention_interval", 4)
        full = layers // every if type(every) is int and every > 0 else 0
        return Layers(full, state=layers - full) if full else None
    if model in _WITH_WINDOW:
        return Layers(0, layers, window) if window else Layers(layers)
    return None


def drafting_layers(config: Mapping[str, Any]) -> int | None:
    """Return how many layers a model brings to draft tokens (multi-token prediction), None where that is not known."""
    layers = config.get("num_nextn_predict_layers")
    return layers if config.get("model_type") in _DRAFTING and type(layers) is int and layers > 0 else None


def fullest_stage(layers: int, stages: int, drafting: int = 0, partition: tuple[int, ...] = ()) -> int:
    """Return the layers of the pipeline stage that keeps most, by vLLM's split: it gives what is left over to no last stage.

    Layers that draft are the last stage's. ``partition`` is a split of the launch's own, VLLM_PP_LAYER_PARTITION.

    >>> fullest_stage(61, 2), fullest_stage(61, 4), fullest_stage(61, 2, drafting=3), fullest_stage(61, 2, partition=(20, 41))
    (31, 16, 33, 41)
    """
    each = partition or (ceil_div(layers, stages),) * (stages - 1) + (layers // stages,)
    return max(*each[:-1], each[-1] + drafting) if len(each) > 1 else each[0] + drafting


def _drawn(pattern: Any) -> Layers | None:
    """Read a pattern of one letter per layer: M keeps a state, * a cache, - and E nothing."""
    if not isinstance(pattern, str) or not set("M*") <= set(pattern) <= set("M*-E"):
        return None
    return Layers(pattern.count("*"), state=pattern.count("M"))


def _listed(kinds: list[Any], window: int | None) -> Layers | None:
    count = Counter(_KINDS.get(str(kind)) for kind in kinds)
    if None in count or (count["window"] and not window):
        return None
    return Layers(count["full"], count["window"], window if count["window"] else None, count["state"])
