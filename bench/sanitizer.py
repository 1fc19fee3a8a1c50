"""What watching costs: a step of 256 decoding rows by itself, sanitized, and recorded; a simulation recorded.

The "peer" is the same object watched, so the ratio says how many times longer a step takes.
"""

import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from _harness import Bench, Side, pick_rounds

from blocktable import KVCache, plan, recording
from blocktable.simulate import Simulation
from blocktable.traces import read_trace, synthetic

BLOCK, ROWS, CONTEXT, CALLS = 16, 256, 8192, 32
SLICE = 200  # steps of a simulated run that are timed at once, what waits to be written included
FOLDER = Path(tempfile.mkdtemp(prefix="sanitizer"))


def cache(rounds: int, **how: object) -> KVCache:
    """Return a cache of 256 rows of 8k tokens of different lengths."""
    room = CONTEXT + (rounds + 4) * CALLS + 64
    room += -room % BLOCK
    made = KVCache(
        [plan(max_model_len=room, block_size=BLOCK)], num_blocks=ROWS * (room // BLOCK) + 1, max_rows=ROWS, **how
    )
    rng = np.random.default_rng(0)
    for row in range(ROWS):
        tokens = rng.integers(0, 30_000, CONTEXT - row % BLOCK, dtype=np.int32)
        made.admit([row], [0, tokens.size], tokens)
    made.commit()
    return made


def side(name: str, made: KVCache) -> Side:
    """Return a decode step: every row one token, and the commit."""
    rows, indptr = np.arange(ROWS), np.arange(ROWS + 1)
    tokens = np.random.default_rng(1).integers(0, 30_000, (CALLS, ROWS), dtype=np.int32)

    def step(i: int) -> None:
        made.extend(rows, indptr, tokens[i])
        made.commit()

    return Side(name, step, calls=CALLS)


def simulated(rate: float) -> Simulation:
    """Return a run of chats and documents, so many a second; 4 are more than 256 rows can serve, so that many are refused."""
    trace = synthetic(seed=0, max_model_len=8192, rate=rate)
    return Simulation(trace, plan(max_model_len=8192, block_size=BLOCK), num_blocks=40_000, max_rows=ROWS)


def cpu(run: Simulation, steps: int) -> float:
    """Return the processor time of so many steps: scheduler, cache, commit, kernel check and statistics."""
    began = time.process_time()
    for _ in range(steps):
        run.step()
    return time.process_time() - began


def conversations() -> Simulation:
    """Return a run of Mooncake's conversations: prompts of 12,000 tokens, many of which begin alike."""
    trace = read_trace(Path(os.environ["BLOCKTABLE_DATA"]) / "traces/mooncake-conversation.jsonl")
    return Simulation(trace, plan(max_model_len=131_072, block_size=BLOCK), num_blocks=40_000, max_rows=ROWS)


def recorded(run: Callable[[], Simulation], slices: int) -> tuple[float, float, float]:
    """Return how many times longer a recorded run takes, the bytes per changed entry, compressed, and the mean of rows."""
    path = FOLDER / "simulated"
    plain = run()
    with recording.record(path) as recorder:
        watched = run()
        times, rows = [], []
        for turn in range(slices):
            first, second = (plain, watched) if turn % 2 else (watched, plain)
            spent = {first: cpu(first, SLICE), second: cpu(second, SLICE)}
            times.append((spent[plain], spent[watched]))
            rows.append(watched.running)
        recorder.flush()
    size = len(zlib.compress(path.read_bytes()))
    ratio = median(b / a for a, b in times[slices // 4 :])  # the first quarter fills the rows
    return ratio, size / watched.summary().changed_entries, sum(rows[slices // 4 :]) / len(rows[slices // 4 :])


def main() -> int:
    """Compare a step off, sanitized and recorded, then a simulated run with and without a recording."""
    bench = Bench("sanitizer", (), pick_rounds())
    off = side("off", cache(bench.rounds))
    with recording.record(FOLDER / "steps"):
        kept = side("recorded", cache(bench.rounds))
        bench.compare("decode/256/8k", off, side("sanitized", cache(bench.rounds, sanitize=True)), kept)
    sanitized = bench.rows[0]
    bench.goal("a sanitized step of 256 rows, times the plain one", sanitized.ratio, 5, at_most=True)
    runs = {f"{rate} requests/s": partial(simulated, rate) for rate in (1, 4)}
    if os.environ.get("BLOCKTABLE_DATA"):
        runs["Mooncake's conversations"] = conversations
    for name, run in runs.items():
        ratio, size, rows = recorded(run, 2 * bench.rounds)
        print(f"simulated, {name}: {2 * bench.rounds * SLICE} steps, {rows:.0f} rows")
        bench.goal(f"a simulated run of {name} recorded, times the plain one", ratio, 1.1, at_most=True)
        bench.goal(f"bytes of its recording per changed entry, compressed ({name})", size, 3, at_most=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
