"""The same seeded admissions, steps, frees and pressure through vLLM's real `KVCacheManager` and through `KVCache`.

Both must find the same cached tokens at every admission and have as many blocks to hand out after every successful step.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from blocktable import Group, OutOfBlocks, plan
from blocktable.cache import KVCache

pytestmark = pytest.mark.conformance

ROWS = 24
OPERATIONS = 12_000


class Engine:
    """vLLM's manager of one group per window (0: full attention), called the way its scheduler calls it."""

    def __init__(self, real, block_size, num_blocks, max_model_len, windows=(0,)):
        self.request = real("vllm.v1.request").Request
        utils, specs = real("vllm.v1.core.kv_cache_utils"), real("vllm.v1.kv_cache_interface")
        hashing, params = real("vllm.utils.hashing"), real("vllm.sampling_params")
        utils.init_none_hash(hashing.sha256)
        self.hasher = utils.get_request_block_hasher(block_size, hashing.sha256)
        self.params = params.SamplingParams(max_tokens=1 << 30)
        self.params.update_from_generation_config({}, eos_token_id=-1)
        numbers = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": real("torch").float32,
        }
        groups = [
            specs.KVCacheGroupSpec(
                [f"layer.{g}"],
                specs.SlidingWindowSpec(**numbers, sliding_window=w) if w else specs.FullAttentionSpec(**numbers),
            )
            for g, w in enumerate(windows)
        ]
        config = specs.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = real("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config, max_model_len=max_model_len, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.running = {}
        self.served = 0

    @property
    def free_blocks(self):
        return self.manager.block_pool.get_num_free_blocks()

    def prepare(self, tokens):
        self.served += 1
        return self.request(
            request_id=str(self.served),
            prompt_token_ids=tokens,
            sampling_params=self.params,
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def admit(self, row, tokens, limit):
        """Return the cached tokens, and whether there was room."""
        request = self.prepare(tokens)
        blocks, cached, _ = self.manager.get_computed_blocks(request)
        count = min(len(tokens) - cached, limit)
        if self.manager.allocate_slots(request, count, cached, blocks) is None:
            return cached, False
        request.num_computed_tokens = cached + count
        self.running[row] = request
        return cached, True

    def extend(self, row, count, new_tokens=()):
        """Compute ``count`` tokens more, of which ``new_tokens`` were sampled just now; return whether there was room."""
        request = self.running[row]
        if new_tokens:
            request.append_output_token_ids(list(new_tokens))
        if self.manager.allocate_slots(request, count) is None:
            return False
        request.num_computed_tokens += count
        return True

    def free(self, row):
        self.manager.free(self.running.pop(row))


class Ours:
    """KVCache, driven alike."""

    def __init__(self, block_size, num_blocks, max_model_len, windows=(0,)):
        geometry = plan(max_model_len=max_model_len, block_size=block_size)
        groups = [Group(geometry, kind="window", window=w) if w else Group(geometry) for w in windows]
        self.cache = KVCache(groups, num_blocks=num_blocks, max_rows=ROWS)

    @property
    def free_blocks(self):
        stats = self.cache.stats()
        return stats["free"] + stats["cached"]

    def admit(self, row, tokens, limit):
        cached = int(self.cache.lookup([0, len(tokens)], tokens)[0])
        try:
            found, _ = self.cache.admit([row], [0, len(tokens)], tokens, limit=limit)
        except OutOfBlocks:
            return cached, False
        assert found[0] == cached
        return cached, True

    def extend(self, row, tokens):
        try:
            self.cache.extend([row], [0, len(tokens)], tokens)
        except OutOfBlocks:
            # vLLM moves windows on before it refuses, KVCache does not; a mark confirmed anew moves them.
            self.cache.confirm([row], [int(self.cache.final[row])])
            return False
        return True

    def free(self, row):
        self.cache.free([row])


class Drive:
    """One seeded sequence of calls, made on both sides."""

    def __init__(self, engine, ours, seed, longest):
        self.engine, self.ours, self.longest = engine, ours, longest
        self.rng = random.Random(seed)  # noqa: S311 - a test
        self.texts = [self.text(longest) for _ in range(8)]  # prompts begin alike
        self.pending = {}  # what a row has still to compute of its prompt
        self.tokens = {}
        self.counts = dict.fromkeys(("admitted", "hits", "steps", "frees", "refused"), 0)

    def text(self, length):
        return [self.rng.randrange(50) for _ in range(length)]

    def prompt(self):
        shared = self.rng.choice(self.texts)[: self.rng.randint(0, self.longest * 3 // 4)]
        return shared + self.text(self.rng.randint(1, self.longest // 4))

    def same(self):
        assert self.engine.free_blocks == self.ours.free_blocks

    def admit(self):
        rows = [row for row in range(ROWS) if row not in self.tokens]
        if not rows:
            return self.free()
        row, tokens, limit = rows[0], self.prompt(), self.rng.choice([7, 64, 10_000])
        wanted, found = self.engine.admit(row, tokens, limit), self.ours.admit(row, tokens, limit)
        assert wanted == found
        if not found[1]:
            self.counts["refused"] += 1
            return self.free()
        self.counts["admitted"] += 1
        self.counts["hits"] += found[0] > 0
        done = min(len(tokens), found[0] + limit)
        self.tokens[row], self.pending[row] = len(tokens), tokens[done:]
        return self.same()

    def step(self):
        if not self.tokens:
            return self.admit()
        row = self.rng.choice(list(self.tokens))
        chunk = self.pending[row][: self.rng.choice([5, 16, 100])]
        if not chunk and self.tokens[row] >= self.longest:
            return self.free(row)
        new = [] if chunk else [self.rng.randrange(50)]
        wanted = self.engine.extend(row, len(chunk or new), new)
        assert wanted == self.ours.extend(row, chunk or new)
        if not wanted:
            # The token that vLLM's request has got meanwhile is no part of ours: start that row over, as a preemption does.
            self.counts["refused"] += 1
            return self.free(row)
        self.pending[row] = self.pending[row][len(chunk) :]
        self.tokens[row] += len(new)
        self.counts["steps"] += 1
        return self.same()

    def free(self, row=None):
        if self.tokens:
            row = self.rng.choice(list(self.tokens)) if row is None else row
            del self.tokens[row], self.pending[row]
            self.engine.free(row)
            self.ours.free(row)
            self.counts["frees"] += 1
            self.same()

    def run(self, operations):
        for _ in range(operations):
            self.rng.choices([self.admit, self.step, self.free], [3, 12, 1])[0]()
        self.ours.cache.check()
        return self.counts


# Block size, blocks, longest row, windows. Windows leave prefixes without a block behind, of which KVCache keeps as many as
# there are blocks; vLLM has no such cap, so the pools here are large enough, or the rows short enough, for both to agree.
SIZES = [
    *((16, 140, 400, (window,)) for window in (0, 2, 17, 40, 200)),
    *((16, 2000, 400, (window,)) for window in (0, 2, 200)),
    (4, 300, 400, (0,)),
    (4, 300, 400, (200,)),
    (4, 300, 40, (7,)),
    (3, 100, 48, (0,)),
    (1, 250, 40, (0,)),
    (16, 280, 400, (0, 40)),
    (16, 280, 400, (40, 0)),
    (4, 900, 200, (0, 9, 60)),
    (16, 2000, 400, (0, 200)),
]


@pytest.mark.parametrize(("block_size", "num_blocks", "longest", "windows"), SIZES)
def test_cached_tokens_and_free_blocks_are_vllms(real, block_size, num_blocks, longest, windows):
    sizes = (block_size, num_blocks, longest, windows)
    ours = Ours(*sizes)
    counts = Drive(Engine(real, *sizes), ours, seed=sum(sizes[:3]) + sum(windows), longest=longest).run(OPERATIONS)
    assert counts["admitted"] > 500
    assert counts["hits"] > 100
    assert counts["steps"] > 5000
    assert ours.cache.stats()["evictions"] > 100
    if num_blocks * block_size < 6 * longest * len(windows) and not any(windows[:1]):
        assert counts["refused"] > 20, "no pressure"


def requests(limit=None):
    """The prompts of the Mooncake trace: each hash id expanded to 512 fixed tokens, cut at the input's length."""
    folder = os.environ.get("BLOCKTABLE_DATA")
    path = Path(folder or "", "traces", "mooncake-conversation.jsonl")
    if not folder or not path.is_file():
        pytest.skip("the Mooncake trace is not here: set BLOCKTABLE_DATA to the folder that has traces/")
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number == limit:
                return
            record = json.loads(line)
            ids = np.array(record["hash_ids"], np.int64)
            yield (ids[:, None] * 512 + np.arange(512)).reshape(-1)[: record["input_length"]].astype(np.int32)


def test_the_mooncake_trace_hits_105592_blocks_of_512() -> None:
    geometry = plan(max_model_len=131_072, block_size=512)
    cache = KVCache([geometry], num_blocks=400_000, max_rows=1)
    hits = queries = 0
    for tokens in requests():
        cached, _ = cache.admit([0], [0, tokens.size], tokens)
        cache.free([0])
        hits += int(cached[0])
        queries += tokens.size
    assert cache.stats()["evictions"] == 0
    assert (hits // 512, hits) == (105_592, 54_063_104)
    assert (cache.stats()["hit_tokens"], cache.stats()["query_tokens"]) == (hits, queries)
    cache.check()


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "limit"), [(512, 2_000, 1500), (128, 3_000, 300), (16, 20_000, 150)]
)
def test_the_mooncake_trace_under_eviction_hits_what_vllm_hits(real, block_size, num_blocks, limit):
    sizes = (block_size, num_blocks, 131_072)
    engine, ours = Engine(real, *sizes), Ours(*sizes)
    hits = 0
    for tokens in requests(limit):
        found = ours.cache.admit([0], [0, tokens.size], tokens)[0][0]
        wanted, room = engine.admit(0, tokens.tolist(), tokens.size)
        assert room
        assert found == wanted
        hits += int(found)
        assert engine.free_blocks == ours.free_blocks
        engine.free(0)
        ours.free(0)
    assert hits > 0
    assert ours.cache.stats()["evictions"] > 0
