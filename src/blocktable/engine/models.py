"""Hugging Face models that read their keys and values through a block table.

transformers lets a model's attention be replaced by a registered function, which gets every layer's query, key and value.
Ours writes keys and values into the step's slots and reads the row's cells back. DeepSeek's latents are smaller before
they are expanded; they pass a cache layer before that, and there they are written instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache
from transformers.utils import logging

from blocktable.attention import latent_attention, paged_attention
from blocktable.engine.packed import pack
from blocktable.errors import ArgumentError, BlockTableError

__all__ = ["LayerGroup", "Model", "Shape", "load_tokenizer", "read_shape"]

NAME = "blocktable"
_KINDS: dict[str, Literal["full", "window"]] = {"full_attention": "full", "sliding_attention": "window"}


class LayerGroup(NamedTuple):
    """Layers that share one table: "full" attention, or a "window" of so many tokens."""

    kind: Literal["full", "window"]
    window: int


class Shape:
    """What a model's configuration says of its cache; raises ArgumentError for a model that is not served.

    ``long_rope`` is the length past which transformers turns the rotary embedding of a whole forward pass into another,
    for models that have two; 0 for the rest.
    ``groups`` are the kinds of layers, ``seats[layer]`` a layer's group and its place among the layers of that group.
    A token takes ``planes`` of ``heads`` times ``head_dim`` numbers per layer: keys and values, or one latent with its rope.
    """

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        if getattr(config, "is_encoder_decoder", False):
            raise _unserved(config, "it is an encoder with a decoder")
        if getattr(text, "attn_logit_softcapping", None):
            raise _unserved(config, "its attention caps logits")
        self.latent = getattr(text, "kv_lora_rank", None) is not None
        if self.latent and config.model_type not in ("deepseek_v2", "deepseek_v3"):
            raise _unserved(config, "its latents are not DeepSeek-V2's or V3's")
        if self.latent:
            self.planes, self.heads, self.head_dim = 1, 1, text.kv_lora_rank + text.qk_rope_head_dim
        else:
            self.planes, self.heads = 2, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.groups, self.seats = _groups(text)
        self.max_positions = int(text.max_position_embeddings)
        self.vocabulary = int(text.vocab_size)
        self.long_rope = _long_rope(text)
        self.end = text.eos_token_id


class Model:
    """A causal language model whose attention layers read through ``PagedStep``."""

    def __init__(self, model: Any) -> None:
        self.shape = Shape(model.config)
        if not getattr(model, "_supports_attention_backend", False):
            raise _unserved(model.config, "transformers does not let its attention be replaced")
        model.set_attn_implementation(NAME)
        self.model = model.eval()
        self.dtype, self.device = model.dtype, model.device

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype | None = None) -> "Model":
        """Load a model from a local folder; raises ArgumentError where there is none that can be read or served."""
        read_shape(folder)
        with _reading(folder):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
        pack(model)
        return cls(model)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, paged: Any, at: Any) -> torch.Tensor:
        """Run the tokens of a step [T] at their positions and return the logits at places ``at``, float32 [S, vocabulary]."""
        result = self.model(
            input_ids=tokens.to(self.device)[None],
            position_ids=positions.to(self.device)[None],
            past_key_values=LatentCache(paged) if self.shape.latent else None,
            use_cache=False,
            logits_to_keep=torch.from_numpy(at.copy()),
            paged=paged,
        )
        logits: torch.Tensor = result.logits[0].float()
        return logits


def read_shape(folder: Path) -> Shape:
    """Read a folder's configuration alone."""
    if not (folder / "config.json").is_file():
        what = "it holds no config.json" if folder.is_dir() else "there is no such folder"
        raise ArgumentError(
            f"no model at {folder}: {what}",
            values={"model": str(folder)},
            remedy="pass a local folder with a Hugging Face model (config.json and safetensors)",
        )
    with _reading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return Shape(config)


def load_tokenizer(folder: Path | None) -> Any:
    """Load the tokenizer in a model's folder."""
    if folder is None:
        raise ArgumentError("a model that was loaded elsewhere has no tokenizer here", remedy="pass token ids")
    with _reading(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Keep transformers quiet and off the network; what it raises about files becomes one sentence."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except BlockTableError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArgumentError(
            f"the model at {folder} cannot be read: {reason}",
            values={"model": str(folder), "raised": type(error).__name__},
            remedy="fetch its files again, or pass another folder",
        ) from error


class LatentCache(Cache):
    """A cache whose layers write DeepSeek's latents into the step's slots, and hand the new tokens back as they came."""

    def __init__(self, paged: Any) -> None:
        super().__init__(layers=[])
        self.paged = paged

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the latents [1, 1, T, latent] and their rope [1, 1, T, rope] as one cell per token."""
        self.paged.write(layer_idx, torch.cat((key_states, value_states), dim=-1)[0].transpose(0, 1))
        return key_states, value_states


def paged_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,  # noqa: ARG001 - ours follows from the rows
    scaling: float,
    *,
    paged: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Do one layer's attention, as transformers calls it: query [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
    if paged is None:
        raise ArgumentError(
            "this model's attention reads block tables since an engine was made of it",
            remedy='call model.set_attn_implementation("sdpa") to use it by itself again, or load it once more',
        )
    unusual = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unusual:
        raise _unserved(module.config, f"its attention uses {' and '.join(unusual)}")
    layer, queries = module.layer_idx, query[0].transpose(0, 1)
    if paged.shape.latent:
        memory, reading = paged.of(layer)
        weight = module.kv_b_proj.weight.view(query.shape[1], -1, module.kv_lora_rank)
        to_key, to_value = weight.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        found = latent_attention(queries, memory, reading, to_key=to_key, to_value=to_value, scale=scaling)
        return found[None], None
    paged.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    memory, reading = paged.of(layer)
    return paged_attention(queries, memory, reading, scale=scaling)[None], None


AttentionInterface.register(NAME, paged_forward)


def _groups(config: Any) -> tuple[list[LayerGroup], list[tuple[int, int]]]:
    """Sort the layers into groups that share a table."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    groups: list[LayerGroup] = []
    seats: list[tuple[int, int]] = []
    taken: dict[LayerGroup, int] = {}
    for kind in kinds:
        if kind not in _KINDS:
            raise _unserved(config, f"it has layers of kind {kind}")
        group = LayerGroup(_KINDS[kind], window if kind == "sliding_attention" else 0)
        if group not in groups:
            groups.append(group)
        seats.append((groups.index(group), taken.get(group, 0)))
        taken[group] = taken.get(group, 0) + 1
    return groups, seats


def _long_rope(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    if not any(one.get("rope_type", one.get("type")) == "longrope" for one in kinds):
        return 0
    lengths = [one.get("original_max_position_embeddings") for one in kinds]
    lengths.append(getattr(config, "original_max_position_embeddings", None))
    return min((int(length) for length in lengths if length), default=int(config.max_position_embeddings))


def _unserved(config: Any, why: str) -> ArgumentError:
    return ArgumentError(
        f"models of type {config.model_type} are not served: {why}",
        values={"model_type": config.model_type},
        remedy="use a causal language model with plain or sliding attention (Llama, Qwen, Mistral), or DeepSeek-V2 or V3",
    )
