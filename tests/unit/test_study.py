"""Studies: every cell is what `simulate` says alone, finished cells survive what stops a study, and the front is right."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import blocktable.study
from blocktable.curves import COUNTERS, GAUGES, Curves
from blocktable.errors import ArgumentError
from blocktable.results import write_results
from blocktable.simulate import Simulation
from blocktable.study import Cell, Record, Source, Study, grid, mark_front, run_cell

SOURCE = Source(seed=3, limit=8)
CELLS = grid(block_size=[16, 32], max_model_len=[2048], num_blocks=[None], pool_tokens=[4096, 8192])


def counts(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != "us_per_step"}


def test_a_grid_is_every_combination_once() -> None:
    cells = grid(block_size=[16, 32, 16], backends=[("A",), ("B", "C")])
    assert [(cell.block_size, cell.backends) for cell in cells] == [
        (16, ("A",)),
        (16, ("B", "C")),
        (32, ("A",)),
        (32, ("B", "C")),
    ]


def test_pools_of_as_many_tokens_have_blocks_accordingly_and_the_null_block() -> None:
    assert [cell.size()[1] for cell in CELLS] == [257, 513, 129, 257]


@pytest.mark.compiled
def test_a_cell_is_the_same_in_a_process_of_its_own_in_a_study_and_again() -> None:
    alone = [counts(run_cell(cell, SOURCE)) for cell in CELLS]
    assert [counts(record) for record in Study(CELLS, SOURCE, jobs=1).run()] == alone
    assert len({json.dumps(record) for record in alone}) == len(CELLS)


@pytest.mark.compiled
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
def test_processes_give_the_same_records_in_the_order_of_the_cells() -> None:
    pytest.importorskip("joblib", reason="joblib is not installed: extra `report`")
    together = Study(CELLS, SOURCE, jobs=2).run()
    assert [counts(record) for record in together] == [counts(run_cell(cell, SOURCE)) for cell in CELLS]


@pytest.mark.compiled
def test_what_is_kept_is_not_run_again_and_another_release_or_trace_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, ran = tmp_path / "kept", []
    right = blocktable.study.run_cell
    monkeypatch.setattr(blocktable.study, "run_cell", lambda cell, *rest: ran.append(cell) or right(cell, *rest))
    first = Study(CELLS[:2], SOURCE, jobs=1, kept=kept).run()
    with kept.open("a") as file:
        file.write('{"key": "cut off in the mi')
    again = Study(CELLS, SOURCE, jobs=1, kept=kept).run()
    assert ran == CELLS
    assert [counts(record) for record in again[:2]] == [counts(json.loads(json.dumps(record))) for record in first]
    Study(CELLS[:1], Source(seed=4, limit=8), jobs=1, kept=kept).run()
    monkeypatch.setattr(blocktable, "__version__", "99")
    Study(CELLS[:1], SOURCE, jobs=1, kept=kept).run()
    assert len(ran) == len(CELLS) + 2


@pytest.mark.compiled
def test_a_cut_line_costs_only_itself(tmp_path: Path) -> None:
    """What an interruption left half written must not swallow the cell that is appended after it."""
    kept = tmp_path / "kept"
    Study(CELLS[:1], SOURCE, jobs=1, kept=kept).run()
    kept.write_bytes(kept.read_bytes()[:-10])
    Study(CELLS[:2], SOURCE, jobs=1, kept=kept).run()
    assert len(Study(CELLS, SOURCE, jobs=1, kept=kept).done()) == 2


@pytest.mark.compiled
def test_what_else_stands_in_the_file_is_stepped_over_and_kept(tmp_path: Path) -> None:
    kept, foreign = tmp_path / "kept", bytes(range(256)) + b'\n[1]\n{"key": 5}\n'
    kept.write_bytes(foreign)
    Study(CELLS[:1], SOURCE, jobs=1, kept=kept).run()
    assert kept.read_bytes().startswith(foreign)
    assert len(Study(CELLS[:1], SOURCE, jobs=1, kept=kept).done()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="no folder that refuses every file")
def test_where_nothing_can_be_kept_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocktable.study, "run_cell", lambda *_: pytest.fail("it ran"))
    with pytest.raises(OSError, match="/proc/kept"):
        Study(CELLS, SOURCE, jobs=1, kept=Path("/proc/kept")).run()


@pytest.mark.compiled
def test_two_studies_at_once_share_a_file(tmp_path: Path) -> None:
    """Each appends whole lines, however long; what both ran is there twice and counts once."""
    kept = tmp_path / "kept"
    both = [subprocess.Popen([sys.executable, "-c", SCRIPT, str(kept), "1"]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(CELLS) <= len(lines)
    assert len(Study(CELLS, SOURCE, jobs=1, kept=kept).done()) == len(CELLS)


SCRIPT = """
import sys
from pathlib import Path
from blocktable.study import Source, Study, grid
cells = grid(block_size=[16, 32], max_model_len=[2048], num_blocks=[None], pool_tokens=[4096, 8192])
Study(cells, Source(seed=3, limit=8), jobs=int(sys.argv[2]), kept=Path(sys.argv[1])).run()
"""


@pytest.mark.compiled
def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(kept), "1"])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (kept.exists() and kept.read_text().count("\n")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    study = Study(CELLS, SOURCE, jobs=1, kept=kept)
    assert len(study.done()) >= 1
    assert [counts(json.loads(json.dumps(r))) for r in study.run()] == [
        counts(json.loads(json.dumps(run_cell(cell, SOURCE)))) for cell in CELLS
    ]


def workers() -> Iterator[int]:
    """The processes that this one has started to share its work."""
    for pid in Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split():
        if b"popen_loky" in Path(f"/proc/{pid}/cmdline").read_bytes():
            yield int(pid)


@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
def test_a_worker_that_is_killed_costs_no_cell(tmp_path: Path) -> None:
    """After the first cell one of the processes is killed, as the kernel does when memory runs out."""
    pytest.importorskip("joblib", reason="joblib is not installed: extra `report`")
    told: list[int] = []
    losses: list[int] = []

    def kill_one(i: int) -> None:
        told.append(i)
        if len(told) == 1:
            losses.append(next(workers()))
            os.kill(losses[0], signal.SIGKILL)

    records = Study(CELLS, SOURCE, jobs=2, kept=tmp_path / "kept").run(kill_one)
    assert losses
    assert [counts(record) for record in records] == [counts(run_cell(cell, SOURCE)) for cell in CELLS]
    assert sorted(told) == list(range(len(CELLS)))


def test_a_worker_whose_study_is_gone_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)
    with pytest.raises(SystemExit):
        blocktable.study._one(0, CELLS[0], SOURCE, None, None)


def test_a_cell_that_fails_ends_the_study_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Record:
        raise ZeroDivisionError

    monkeypatch.setattr(blocktable.study, "run_cell", fails)
    with pytest.raises(ZeroDivisionError):
        Study(CELLS, SOURCE, jobs=1).run()


def test_cells_that_cannot_run_say_why() -> None:
    small = Cell(num_blocks=9, max_model_len=4096)
    odd = Cell(block_size=48, max_model_len=4096, backends=("FLASHINFER_MLA",))
    for cell, text in ((small, "129 blocks"), (odd, "no kernel block divides 48")):
        record = run_cell(cell, SOURCE)
        assert text in record["unfit"] or "128 blocks" in record["unfit"]
        assert "steps" not in record


def test_check_speaks_of_the_release_that_was_asked_for() -> None:
    """The launch at 9416: vLLM 0.19.1 allocates 295 blocks, 0.32.0 296."""
    cell = Cell(block_size=32, max_model_len=9416, backends=("FLASHINFER_MLA",))
    assert cell.verdict("vllm==0.19.1")["verdict"] == "refused"
    assert cell.verdict("vllm==0.32.0")["verdict"] == "accepted"
    assert Cell().verdict()["verdict"] is None


scores = st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=12)


@given(scores, st.data())
def test_the_front_is_what_brute_force_says(found: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    names = ("pool_tokens", "hit_rate", "preemptions", "mean_first_token_steps")
    out = [data.draw(st.sampled_from(["", "", "unfit", "refused", "finding"])) for _ in found]
    records: list[dict[str, Any]] = [
        dict(zip(names, score, strict=True))
        | {"unfit": "x" if why == "unfit" else None, "finding": "x" if why == "finding" else None}
        | {"verdict": "refused" if why == "refused" else None}
        for score, why in zip(found, out, strict=True)
    ]
    mark_front(records)
    standing = [record for record, why in zip(records, out, strict=True) if not why]

    def beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
        as_good = (
            a["pool_tokens"] <= b["pool_tokens"]
            and a["hit_rate"] >= b["hit_rate"]
            and a["preemptions"] <= b["preemptions"]
            and a["mean_first_token_steps"] <= b["mean_first_token_steps"]
        )
        return as_good and any(a[name] != b[name] for name in names)

    for record, why in zip(records, out, strict=True):
        assert record["front"] == (not why and not any(beats(other, record) for other in standing))


@pytest.mark.compiled
def test_results_are_the_same_as_csv_and_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: extra `report`")
    records = [run_cell(cell, SOURCE) for cell in (*CELLS, Cell(num_blocks=9, max_model_len=4096))]
    mark_front(records)
    write_results(tmp_path / "r.csv", records)
    write_results(tmp_path / "r.parquet", records)
    with (tmp_path / "r.csv").open(newline="") as file:
        text = list(csv.DictReader(file))
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert len(text) == len(rows) == len(records)
    for line, row, record in zip(text, rows, records, strict=True):
        assert row == {name: record.get(name) for name in row}
        assert line == {name: "" if record.get(name) is None else str(record[name]) for name in line}
        assert "curves" not in row


class Steps:
    """Stand in for a simulation whose every number is known."""

    def __init__(self) -> None:
        self.steps, self.clock, self.random = 0, 0.0, np.random.default_rng(0)
        self.counter = dict.fromkeys(COUNTERS, 0)
        self.seen: list[dict[str, int]] = []

    def step(self) -> None:
        self.steps += 1
        self.clock += 0.03
        gauges = dict(zip(GAUGES, self.random.integers(0, 1000, len(GAUGES)).tolist(), strict=True))
        for name in self.counter:
            self.counter[name] += int(self.random.integers(0, 5))
        self.running, self.waiting, self.wasted_tokens = (gauges[n] for n in ("running", "waiting", "wasted_tokens"))
        self.stats = {name: gauges[name] for name in ("held", "cached", "free")} | self.counter
        self.preemptions = self.counter["preemptions"]
        self.row_lengths = self.random.integers(1, 100, 5)
        self.seen.append(gauges | self.counter | {f"row {i}": int(n) for i, n in enumerate(self.row_lengths)})


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 63, 64, 1000])
def test_curves_keep_every_peak_in_bounded_memory(steps: int) -> None:
    run, curves = Steps(), Curves(points=8)
    for _ in range(steps):
        run.step()
        curves.add(run)  # type: ignore[arg-type]
    found = curves.as_dict()
    ends = [0, *found["step"]]
    assert ends[-1] == steps
    assert len(ends) <= 9
    assert {b - a for a, b in itertools.pairwise(ends[:-1])} <= {found["steps_per_point"]}
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        part = run.seen[a:b]
        for name in GAUGES:
            values = [step[name] for step in part]
            assert (found[name]["min"][i], found[name]["max"][i]) == (min(values), max(values))
            assert found[name]["mean"][i] == pytest.approx(sum(values) / len(values), abs=1e-3)
        for name in COUNTERS:
            assert found[name][i] == part[-1][name]
        assert found["seconds"][i] == pytest.approx(0.03 * b, abs=1e-3)
    lengths = [step[f"row {i}"] for step in run.seen for i in range(5)]
    shown = dict(zip(found["row_lengths"]["up_to"], found["row_lengths"]["rows"], strict=True))
    assert shown == {n: c for n in (2**e for e in range(9)) if (c := sum(n // 2 < x <= n for x in lengths))}


@pytest.mark.compiled
def test_curves_agree_with_the_summary() -> None:
    record = run_cell(CELLS[0], SOURCE)
    curves = record["curves"]
    weights = np.diff([0, *curves["step"]])
    assert max(curves["held"]["max"]) == record["peak_blocks"]
    assert np.dot(curves["held"]["mean"], weights) / record["steps"] == pytest.approx(record["mean_blocks"], rel=1e-3)
    wasted = np.dot(curves["wasted_tokens"]["mean"], weights) / record["steps"]
    assert wasted == pytest.approx(record["mean_wasted_tokens"], rel=1e-3)
    assert curves["preemptions"][-1] == record["preemptions"]
    assert curves["delta_bytes"][-1] == record["delta_bytes"]
    assert Simulation.waiting.__doc__


MEASURE = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "blocktable.cli", "simulate", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is Linux's")
def test_a_study_of_a_day_on_two_cores_fits_a_gibibyte(tmp_path: Path) -> None:
    """Two cells at once of two million tokens in small blocks, and the process that started them."""
    trace = Path(os.environ.get("BLOCKTABLE_DATA", "")) / "traces" / "mooncake-conversation.jsonl"
    if not trace.exists():
        pytest.skip("mooncake-conversation.jsonl is not under BLOCKTABLE_DATA/traces")
    cell = ["--block-size", "16", "--pool-tokens", "2M", "--prefix-cache", "lru", "--results", str(tmp_path / "r.csv")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(trace), *cell], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 3 * int(done.stdout) < 2**20  # KiB


def test_more_than_one_process_needs_joblib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocktable.study, "find_spec", lambda _name: None)
    with pytest.raises(ArgumentError, match="--jobs 1"):
        Study(CELLS, SOURCE, jobs=2)
    Study(CELLS, SOURCE, jobs=1)
