"""A real vLLM engine on the CPU whose model does nothing: one layer whose forward returns its embeddings.

A step of it is the engine's own work. The environment that vLLM reads when imported is set here.
"""

import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")

BLOCK, TOKENS = 32, 64
# 97.5 %, by degrees of freedom
STUDENT = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 29: 2.045, 59: 2.001, 99: 1.984}


def start_engine(**given: Any) -> Any:
    """Return the engine; ``given`` are its arguments beside those that every bench here has."""
    import torch
    import transformers
    from vllm import LLM
    from vllm.model_executor.models.llama import LlamaModel

    folder = Path(tempfile.mkdtemp())
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=256,
        max_position_embeddings=given["max_model_len"],
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)

    def forward(self: Any, input_ids: Any, *_: Any, **__: Any) -> Any:
        return self.embed_input_ids(input_ids)

    LlamaModel.forward = forward
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_num_batched_tokens=8192,
        block_size=BLOCK,
        async_scheduling=False,
        **given,
    )


def serve(llm: Any, prompts: list[list[int]]) -> float:
    """Let every prompt be answered with the same number of tokens; return the seconds."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    begin = time.perf_counter()
    out = llm.generate(asked, params, use_tqdm=False)
    spent = time.perf_counter() - begin
    assert sum(len(one.outputs[0].token_ids) for one in out) == len(prompts) * TOKENS
    return spent


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of their mean."""
    wide = STUDENT[max(n for n in STUDENT if n < len(ratios))] * stdev(ratios) / len(ratios) ** 0.5
    return mean(ratios) - wide, mean(ratios) + wide
