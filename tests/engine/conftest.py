"""Tiny models with random but lively weights, and what transformers' own `generate` says for one prompt alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the engine needs the extra hf")

import torch
import transformers as hf

torch.set_num_threads(1)  # tiny models gain nothing from more

MARGIN = 1e-3  # between the two best logits: float32 rounding stays some hundred times below
VOCABULARY = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": 0.15,
}
MIXED = ["full_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "qwen": lambda: hf.Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=24),
    "deepseek-v2": lambda: hf.DeepseekV2Config(**LATENT),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**LATENT),
    "hybrid": lambda: hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=24, layer_types=MIXED),
}


@dataclass
class Tiny:
    """A model, the folder that holds it, and the greedy answers of transformers, each asked for alone."""

    folder: Path
    model: Any
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Return the first tokens that transformers generates after a prompt, looked at once for the longest count."""
        key = tuple(prompt)
        if len(self.answers.get(key, [])) < count:
            self.answers[key] = generate(self.model, prompt, count)
        return self.answers[key][:count]


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    """Generate greedily, and hold the model to margins that rounding cannot bridge."""
    model.set_attn_implementation("sdpa")
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(found.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN, "two tokens are as good as one another: take another seed"
    return found.sequences[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def alone() -> Callable[[Any, list[int], int], list[int]]:
    """Return what asks transformers for the words that follow one prompt alone."""
    return generate


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """Return a tiny model by its name, made once."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            torch.manual_seed(3)
            hf.utils.logging.disable_progress_bar()
            model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
            model.generation_config.pad_token_id = 0
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = Tiny(folder, model)
        return made[name]

    return get


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of many lengths; the longer ones begin alike."""
    draw = random.Random(11)  # noqa: S311 - a test
    shared = [draw.randrange(VOCABULARY) for _ in range(40)]
    tails = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in (25, 9)]
    alone = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in (1, 33)]
    return [*(shared + tail for tail in tails), *alone]
