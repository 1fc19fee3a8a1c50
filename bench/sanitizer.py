"""What watching costs: a step of 256 decoding rows by itself, sanitized, and recorded; a simulation recorded.

The "peer" is the same object watched, so the ratio says how many times longer a step takes.
"""

import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median

import numpy as np
from _harness import Bench, Side, pick_rounds

from blocktable import KVCache, plan, recording
from blocktable.simulate import Simulation
from blocktable.traces import synthetic

BLOCK, ROWS, CONTEXT, CALLS = 16, 256, 8192, 32
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


def simulated(steps: int, *, record: bool) -> tuple[float, int, int]:
    """Return seconds, bytes after compression and changed entries of a simulated run."""
    path = FOLDER / "simulated"
    recorder = recording.record(path) if record else None
    run = Simulation(synthetic(seed=0, max_model_len=8192), plan(max_model_len=8192, block_size=16), num_blocks=40_000)
    began = time.process_time()
    while run.steps < steps and not run.done:
        run.step()
    spent = time.process_time() - began
    if recorder:
        recorder.close()
    size = len(zlib.compress(path.read_bytes())) if record else 0
    return spent, size, run.summary().changed_entries


def main() -> int:
    """Compare a step off, sanitized and recorded, then a simulated run with and without a recording."""
    bench = Bench("sanitizer", (), pick_rounds())
    off = side("off", cache(bench.rounds))
    bench.compare("decode/256/8k", off, side("sanitized", cache(bench.rounds, sanitize=True)))
    bench.goal("a sanitized step of 256 rows, times the plain one", bench.rows[-1].ratio, 5, at_most=True)
    ratios, size, entries = [], 0, 1
    for _ in range(3):
        plain, _, entries = simulated(2000, record=False)
        watched, size, _ = simulated(2000, record=True)
        ratios.append(watched / plain)
    bench.goal("a simulated run recorded, times the plain one", median(ratios), 1.1, at_most=True)
    bench.goal("bytes of a recording per changed entry, compressed", size / entries, 3, at_most=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
