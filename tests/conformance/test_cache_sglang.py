"""Cached tokens beside SGLang's compiled radix core: another exact index, which compares runs of tokens and hashes nothing."""

import importlib.util
import json
import os
import random
import sys
from array import array
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blocktable import plan
from blocktable.cache import KVCache

pytestmark = pytest.mark.conformance


class Radix:
    """SGLang's tree without eviction: how far a prompt is cached, and its registration."""

    def __init__(self, real, page):
        self.torch = real("torch")
        folder = Path(sys.prefix, "sglang", "sglang", "srt", "mem_cache", "rust_tree_core")
        path = next(folder.glob("mem_cache.*.so"), None)
        if path is None:
            pytest.skip("SGLang's radix core is not here: tools/peers.sh DIR sglang unpacks it")
        spec = importlib.util.spec_from_file_location("mem_cache", path)
        self.core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.core)
        how = self.core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=page, device="cpu")
        self.tree = self.core.RustUnifiedTreeCoreBinding(how, [0])
        self.page = page

    def match(self, tokens):
        """Return the cached tokens, the last one of the prompt left to compute."""
        key = array("q", tokens[: (len(tokens) - 1) // self.page * self.page])
        return self.tree.match_prefix(self.core.MatchParamsBinding(key=key)).device_prefix_len

    def insert(self, tokens):
        whole = len(tokens) // self.page * self.page
        slots = self.torch.arange(whole, dtype=self.torch.int64)
        self.tree.insert(self.core.InsertParamsBinding(key=array("q", tokens[:whole]), value=slots))


def compare(radix, cache, prompts):
    """Admit one prompt after the other on both sides; return the tokens found."""
    hits = 0
    for tokens in prompts:
        wanted = radix.match(tokens)
        cached, _ = cache.admit([0], [0, len(tokens)], np.array(tokens))
        cache.free([0])
        radix.insert(tokens)
        assert int(cached[0]) == wanted
        hits += wanted
    assert cache.stats()["evictions"] == 0
    cache.check()
    return hits


@pytest.mark.parametrize("page", [1, 4, 16])
def test_random_prompts_hit_what_the_radix_core_hits(real, page):
    rng = random.Random(page)  # noqa: S311 - a test
    longest = 20 * page
    cache = KVCache([plan(max_model_len=longest, block_size=page)], num_blocks=60_000, max_rows=1)
    texts = [[rng.randrange(3) for _ in range(longest)] for _ in range(6)]

    def prompt():
        """Begin like an earlier prompt, at any point, and go on anew: chains split everywhere."""
        known = rng.choice(texts)[: rng.randint(0, longest)]
        tokens = (known + [rng.randrange(3) for _ in range(longest)])[: rng.randint(1, longest)]
        texts[rng.randrange(len(texts))] = tokens
        return tokens

    assert compare(Radix(real, page), cache, (prompt() for _ in range(2000))) > 1000 * page


def test_the_mooncake_trace_hits_what_the_radix_core_hits(real):
    """The first prompts of the trace, each hash id one token: the core compares them as blocks of one."""
    path = Path(os.environ.get("BLOCKTABLE_DATA", ""), "traces", "mooncake-conversation.jsonl")
    if not os.environ.get("BLOCKTABLE_DATA") or not path.is_file():
        pytest.skip("the Mooncake trace is not here: set BLOCKTABLE_DATA to the folder that has traces/")
    with path.open() as lines:
        prompts = [json.loads(line)["hash_ids"] for line in islice(lines, 4000)]
    longest = max(map(len, prompts))
    cache = KVCache([plan(max_model_len=longest, block_size=1)], num_blocks=400_000, max_rows=1)
    assert compare(Radix(real, 1), cache, prompts) > 20_000
