"""Time our code beside a peer's: interleaved rounds, medians, and what the numbers were measured on.

A bench describes each side as a `Side`, hands both to `Bench.compare`, adds its goals, and calls `Bench.finish`, which
prints one table and writes bench/results/NAME.json.
"""

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median

RESULTS = Path(os.environ.get("BLOCKTABLE_BENCH_RESULTS", Path(__file__).parent / "results"))
ROUNDS = 41


@dataclass(frozen=True)
class Side:
    """One side of a comparison: ``step(i)`` is timed, ``calls`` times a round; ``before(i)`` runs ahead of it, untimed."""

    name: str
    step: Callable[[int], object]
    calls: int = 32
    before: Callable[[int], object] | None = None

    def time(self) -> float:
        """Return the microseconds of one step, as the median over one round.

        Each step is timed by itself, clock included (about 0.1 µs), so that a step which another process interrupts
        does not count for the round.
        """
        step, before, clock = self.step, self.before, time.perf_counter_ns
        spent = []
        for i in range(self.calls):
            if before is not None:
                before(i)
            start = clock()
            step(i)
            spent.append(clock() - start)
        return median(spent) / 1000


@dataclass(frozen=True)
class Row:
    """One case beside one peer: medians over rounds, and the ratio's 10th and 90th percentile over rounds."""

    case: str
    ours_us: float
    peer: str
    peer_us: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Goal:
    """A number that must hold: ``measured`` is at least, or at most, ``limit``."""

    text: str
    measured: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


@dataclass
class Bench:
    """A run of one bench: its name, the packages whose versions matter, and what has been measured so far."""

    name: str
    packages: tuple[str, ...]
    rounds: int = ROUNDS
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def compare(self, case: str, ours: Side, *peers: Side) -> Row:
        """Time all sides in interleaved rounds and return the row beside the first peer."""
        sides = [ours, *peers]
        for side in sides:  # warm-up: compile, fill caches, grow buffers
            side.time()
            side.time()
        times: list[list[float]] = [[] for _ in sides]
        gc.collect()
        gc.disable()
        try:
            for turn in range(self.rounds):
                # Who goes first takes turns, so that a drift of the machine's speed favours nobody.
                for index in [(turn + shift) % len(sides) for shift in range(len(sides))]:
                    times[index].append(sides[index].time())
        finally:
            gc.enable()
        rows = [_row(case, times[0], peer.name, times[1 + i]) for i, peer in enumerate(peers)]
        self.rows += rows
        return rows[0]

    def goal(self, text: str, measured: float, limit: float, *, at_most: bool = False) -> None:
        """Hold the run to a limit; it is shown beside the measured value and decides the exit status."""
        self.goals.append(Goal(text, round(measured, 3), limit, at_most))

    def finish(self) -> int:
        """Print the table, write the result file, and return 1 if a goal was missed."""
        machine, versions = describe_machine(), describe_versions(self.packages)
        print(f"{self.name}: {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}")
        print("  ".join(f"{name} {version}" for name, version in versions.items()))
        print(f"\n{'case':<28}{'ours µs':>11}  {'peer':<34}{'peer µs':>12}{'ratio':>9}   low .. high")
        for row in self.rows:
            spread = f"{row.low:.4g} .. {row.high:.4g}"
            print(f"{row.case:<28}{row.ours_us:>11.4g}  {row.peer:<34}{row.peer_us:>12.5g}{row.ratio:>9.4g}   {spread}")
        print(f"\n{'goal':<78}{'limit':>8}{'measured':>10}")
        for goal in self.goals:
            limit = f"{'≤' if goal.at_most else '≥'} {goal.limit:g}"
            print(f"{goal.text:<78}{limit:>8}{goal.measured:>10.4g}  {'met' if goal.met else 'MISSED'}")
        RESULTS.mkdir(exist_ok=True)
        result = {
            "machine": machine,
            "versions": versions,
            "rounds": self.rounds,
            "rows": [asdict(row) for row in self.rows],
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals],
        }
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (RESULTS / f"{self.name}.json").write_text(text, encoding="utf-8")
        return 0 if all(goal.met for goal in self.goals) else 1


def _row(case: str, ours: list[float], peer: str, theirs: list[float]) -> Row:
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    last = len(ratios) - 1
    mine, other = median(ours), median(theirs)
    numbers = (other / mine, ratios[round(last * 0.1)], ratios[round(last * 0.9)])
    ratio, low, high = (round(number, 3) for number in numbers)
    return Row(case, round(mine, 3), peer, round(other, 3), ratio, low, high)


def describe_machine() -> dict[str, object]:
    """Return what the numbers depend on: processor, cores that may be used, memory, system, Python."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(memory, 1),
        "load": round(load, 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def describe_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed packages among these; blocktable's own comes first."""
    found = {}
    for package in ("blocktable", "numpy", "numba", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def pick_rounds() -> int:
    """Return the number of rounds: the first command line argument, or the default."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
