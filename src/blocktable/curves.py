"""A simulation over time, in bounded memory: buckets of equally many steps, each with its least, mean and most.

When the buckets are full, neighbours are merged and each then stands for twice as many steps. So a peak of one step stays
visible however long the run is, and a picture of 10^5 steps has as many points as one of 10^3.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.simulate import Simulation

__all__ = ["COUNTERS", "GAUGES", "POINTS", "Curves"]

POINTS = 256  # buckets, when full; half as many at the least
GAUGES = ("running", "waiting", "held", "cached", "free", "wasted_tokens")
COUNTERS = ("hit_tokens", "query_tokens", "evictions", "delta_bytes", "preemptions")
_LENGTHS = 33  # powers of two up to the largest length


class Curves:
    """What a run's steps looked like; ``add`` after each step costs some ten microseconds.

    >>> from blocktable import plan
    >>> from blocktable.traces import synthetic
    >>> geometry, trace = plan(max_model_len=4096, block_size=32), synthetic(seed=0, max_model_len=4096).first(20)
    >>> run, curves = Simulation(trace, geometry, num_blocks=1024), Curves()
    >>> summary = run.run(lambda: curves.add(run))
    >>> found = curves.as_dict()
    >>> max(found["held"]["max"]) == summary.peak_blocks, found["step"][-1] == summary.steps
    (True, True)
    """

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._per_bucket, self._bucket, self._filled = (
            1,
            0,
            0,
        )  # steps per bucket; the one being filled, and by how many
        self._low = np.full((points, len(GAUGES)), np.iinfo(np.int64).max)
        self._high = np.zeros((points, len(GAUGES)), np.int64)
        self._sum = np.zeros((points, len(GAUGES)), np.int64)
        self._count = np.zeros(points, np.int64)
        self._counters = np.zeros((points, len(COUNTERS)), np.int64)
        self._seconds = np.zeros(points)
        self._lengths = np.zeros(_LENGTHS, np.int64)

    def add(self, run: Simulation) -> None:
        """Take in the step that ``run`` has just made."""
        stats, i = run.stats, self._bucket
        gauges = np.array([run.running, run.waiting, stats["held"], stats["cached"], stats["free"], run.wasted_tokens])
        np.minimum(self._low[i], gauges, out=self._low[i])
        np.maximum(self._high[i], gauges, out=self._high[i])
        self._sum[i] += gauges
        self._count[i] += 1
        self._counters[i] = *(stats[name] for name in COUNTERS[:-1]), run.preemptions
        self._seconds[i] = run.clock
        # A row of up to 2^e tokens, and more than half of that, is counted at e.
        self._lengths += np.bincount(np.frexp(run.row_lengths - 0.5)[1], minlength=_LENGTHS)
        self._filled += 1
        if self._filled == self._per_bucket:
            self._filled, self._bucket = 0, i + 1
            if self._bucket == self._points:
                self._merge()

    def _merge(self) -> None:
        half = self._points // 2
        self._low[:half] = np.minimum(self._low[::2], self._low[1::2])
        self._high[:half] = np.maximum(self._high[::2], self._high[1::2])
        self._sum[:half] = self._sum[::2] + self._sum[1::2]
        self._count[:half] = self._count[::2] + self._count[1::2]
        self._counters[:half], self._seconds[:half] = self._counters[1::2], self._seconds[1::2]
        self._low[half:] = np.iinfo(np.int64).max
        for array in (self._high, self._sum, self._count):
            array[half:] = 0
        self._bucket, self._per_bucket = half, 2 * self._per_bucket

    def as_dict(self) -> dict[str, Any]:
        """Return lists of one entry per bucket, as JSON takes them.

        ``step`` and ``seconds`` (simulated) at a bucket's end; ``min``, ``mean`` and ``max`` of each gauge; each counter as
        it stood at the end; ``steps_per_point``; and ``row_lengths``: over all steps, the rows of up to so many tokens.
        """
        used = slice(self._bucket + (self._filled > 0))
        count = self._count[used]
        found: dict[str, Any] = {
            "steps_per_point": self._per_bucket,
            "step": np.cumsum(count).tolist(),
            "seconds": _rounded(self._seconds[used]),
        }
        for g, name in enumerate(GAUGES):
            mean = _rounded(self._sum[used, g] / count)
            found[name] = {"min": self._low[used, g].tolist(), "mean": mean, "max": self._high[used, g].tolist()}
        found |= {name: self._counters[used, c].tolist() for c, name in enumerate(COUNTERS)}
        seen = np.flatnonzero(self._lengths)
        found["row_lengths"] = {"up_to": (2**seen).tolist(), "rows": self._lengths[seen].tolist()}
        return found


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
