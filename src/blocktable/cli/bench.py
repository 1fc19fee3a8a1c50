"""`blocktable bench`: every claim of speed, measured here beside the engines that are installed here."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktable.cli.output import print_columns
from blocktable.errors import ArgumentError

__all__ = ["command", "options"]

PACKAGE = Path(__file__).parents[1]
# In a wheel the scripts are part of the package; in a checkout they stay where their authors edit them.
SCRIPTS = PACKAGE / "_bench" if (PACKAGE / "_bench").is_dir() else PACKAGE.parents[1] / "bench"


def options(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    parser.description = (
        "Time our code beside the real classes of vLLM and SGLang, as far as they are installed in this environment: "
        "interleaved rounds, medians, ratios with their spread. Exit status: 0 done, 1 a goal was missed or nothing could run."
    )
    add("names", nargs="*", metavar="NAME", help=f"which ({', '.join(_names())}; default: all)")
    add("--rounds", metavar="N", help="rounds per case (default: each bench's own)")
    add(
        "--out",
        metavar="DIR",
        help="where results are written (default: bench/results of a checkout, else ./bench-results)",
    )
    add("--summarise", action="store_true", help="run nothing: only write the table of the results that are there")
    add("--quiet", "-q", action="store_true", help="do not show what the benches print")
    add("--json", dest="as_json", action="store_true", help="print one JSON object with every result")


def command(
    *, names: Sequence[str], rounds: str | None, out: str | None, summarise: bool, quiet: bool, as_json: bool
) -> int:
    """Run the benches, write RESULTS.md from all results in the folder, and return the exit code."""
    if rounds is not None and not (rounds.isascii() and rounds.isdigit() and int(rounds) > 0):
        raise ArgumentError(f"--rounds must be a positive number, got {rounds!r}", values={"rounds": rounds})
    for name in names:
        if name not in _names():
            raise ArgumentError(f"there is no bench {name!r}", remedy=f"name some of {', '.join(_names())}")
    home = SCRIPTS / "results" if SCRIPTS.name == "bench" else Path("bench-results")
    folder = home if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    if not summarise:
        for name in names or _names():
            if why := _run(name, rounds, folder, quiet=quiet or as_json):
                failed[name] = why
    found = _read(folder)
    table = folder.parent / "RESULTS.md" if out is None and SCRIPTS.name == "bench" else folder / "RESULTS.md"
    table.write_text(markdown(found), encoding="utf-8")
    if as_json:
        print(json.dumps({"results": found, "not_run": failed}, ensure_ascii=False))  # noqa: T201 - a command's output
    else:
        _print(found, failed, table)
    missed = any(not goal["met"] for result in found.values() for goal in result["goals"])
    return 1 if missed or not found else 0


def _names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if not path.stem.startswith("_"))


def _run(name: str, rounds: str | None, folder: Path, *, quiet: bool) -> str:
    """Run one bench in a process of its own; return why there is no result, or nothing."""
    result = folder / f"{name}.json"
    before = result.stat().st_mtime_ns if result.exists() else 0
    done = subprocess.run(  # noqa: S603 - a script of this package
        [sys.executable, str(SCRIPTS / f"{name}.py"), *([rounds] if rounds else [])],
        env=os.environ | {"BLOCKTABLE_BENCH_RESULTS": str(folder.resolve())},
        stdout=subprocess.DEVNULL if quiet else 2,  # beside the progress, not among the results
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.exists() and result.stat().st_mtime_ns > before:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _read(folder: Path) -> dict[str, Any]:
    return {path.stem: _result(path) for path in sorted(folder.glob("*.json"))}


def _result(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        markdown({path.stem: found})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ArgumentError(
            f"{path} holds no result of a bench", values={"path": str(path)}, remedy="remove it, or run its bench again"
        ) from None
    return found


def _print(found: Mapping[str, Any], failed: Mapping[str, str], table: Path) -> None:
    lines = [
        (name, row["case"], _number(row["ours_us"]), *_beside(row))
        for name, result in found.items()
        for row in result["rows"]
    ]
    print_columns([("bench", "case", "ours, µs", "peer", "peer, µs", "ratio", "low .. high"), *lines])
    for name, why in failed.items():
        print(f"{name} was not run: {why}")  # noqa: T201 - a command's output
    print(f"written: {table}")  # noqa: T201


def _beside(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return peer, its time, the ratio and its spread; a case without a peer has a spread of times alone."""
    if "peer" in row:
        return row["peer"], _number(row["peer_us"]), _number(row["ratio"]), _spread(row["low"], row["high"])
    return "", "", "", f"{_spread(row['low_us'], row['high_us'])} µs"


def _spread(low: float, high: float) -> str:
    return f"{_number(low)} .. {_number(high)}"


def _number(value: float) -> str:
    """Return three digits, all before the point where there are more of them."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(found: Mapping[str, Any]) -> str:
    """Return the results as a page: per bench the machine, the versions, a table and the goals."""
    lines = [
        "# Measured",
        "",
        "Written by `blocktable bench`; [docs/bench.md](../docs/bench.md) tells how each case is measured. A ratio is the",
        "peer's time over ours, median over interleaved rounds, with the 10th and 90th percentile. A high load widens them.",
    ]
    for name, result in found.items():
        machine, versions = result["machine"], result["versions"]
        lines += [
            "",
            f"## {name}",
            "",
            ", ".join(
                [machine["cpu"], f"{machine['cores']} cores", f"load {machine['load']}", f"Python {machine['python']}"]
            ),
            f"({', '.join(f'{package} {version}' for package, version in versions.items())})",
            "",
            "| case | ours, µs | peer | peer, µs | ratio | low .. high |",
            "| --- | ---: | --- | ---: | ---: | --- |",
            *(f"| `{r['case']}` | {_number(r['ours_us'])} | {' | '.join(_beside(r))} |" for r in result["rows"]),
            "",
            *(
                f"- {'met' if goal['met'] else '**missed**'}: {goal['text']}, {'≤' if goal['at_most'] else '≥'} "
                f"{goal['limit']:g}, measured {goal['measured']:g}"
                for goal in result["goals"]
            ),
        ]
    return "\n".join(lines) + "\n"
