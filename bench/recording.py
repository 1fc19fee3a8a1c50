"""A long recording: a simulated run of a million steps with and without one, what it holds, and the run again from it.

The two runs take turns, a slice of steps at a time; the ratio is of their processor time, what waits to be written included.
25,000 steps a round, so that the default makes a million. Then the recording is compressed, and replayed to its digest.
"""

import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median

from _harness import Bench, Row, pick_rounds

from blocktable import plan, recording
from blocktable.simulate import Simulation
from blocktable.traces import synthetic

STEPS, SLICE = 25_000, 500  # steps of a round, and those that are timed at once
STEP_SECONDS = 0.03  # simulated


def simulated(steps: int) -> Simulation:
    """Return a run of chats and documents, one request a second, that lasts at least so many steps."""
    trace = synthetic(seed=0, max_model_len=8192, seconds=1.1 * steps * STEP_SECONDS)
    return Simulation(trace, plan(max_model_len=8192, block_size=16), num_blocks=40_000, max_rows=256)


def timed(run: Simulation, recorder: recording.Recorder | None) -> float:
    """Return the processor time of a slice: scheduler, cache, commit, kernel check, statistics, and what is recorded."""
    began = time.process_time()
    for _ in range(SLICE):
        run.step()
    if recorder is not None:
        recorder.flush()
    return time.process_time() - began


def compressed(path: Path) -> int:
    """Return the bytes of a file after compression."""
    packer, size = zlib.compressobj(), 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            size += len(packer.compress(part))
    return size + len(packer.flush())


def main() -> int:
    """Run both, then look at the recording."""
    bench = Bench("recording", (), pick_rounds())
    steps = STEPS * bench.rounds
    path = Path(tempfile.mkdtemp(prefix="recording")) / "run.btr"
    plain, times = simulated(steps), []
    with recording.record(path) as recorder:
        watched = simulated(steps)
        for turn in range(steps // SLICE):
            first, second = ((plain, None), (watched, recorder)) if turn % 2 else ((watched, recorder), (plain, None))
            spent = {run: timed(run, which) for run, which in (first, second)}
            times.append((spent[plain], spent[watched]))
    ratios = sorted(b / a for a, b in times)
    ratio, low, high = median(ratios), ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    without, with_it = (median(column) / SLICE * 1e6 for column in zip(*times, strict=True))
    figures = [round(number, 3) for number in (with_it, ratio, low, high)]
    row = Row(f"simulate/{steps}-steps", round(without, 3), "recorded", *figures)
    bench.rows.append(row)
    entries = watched.summary().changed_entries
    began = time.monotonic()
    replayed = recording.replay(path)
    print(
        f"{steps} steps, {entries} changed entries, {path.stat().st_size} bytes, {replayed.calls} calls replayed in {time.monotonic() - began:.0f} s"
    )
    bench.goal(f"a run of {steps} steps recorded, times the plain one", ratio, 1.1, at_most=True)
    bench.goal("its recording, bytes per changed entry, compressed", compressed(path) / entries, 3, at_most=True)
    bench.goal("its replay comes to the same digest (1: yes)", float(replayed.digest == recorder.digest), 1)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
