"""`blocktable simulate` as users and scripts meet it: output, exit status, interruption, a terminal and a pipe."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from blocktable._cache_layout import FREE
from blocktable.cli.simulate import command
from blocktable.simulate import Simulation

FIELDS = {
    "requests",
    "steps",
    "preemptions",
    "peak_blocks",
    "changed_entries",
    "full_copy_entries",
    "prefix_hit_tokens",
    "prefix_query_tokens",
    "evictions",
    "prefix_cache",
}
SMALL = ["--max-model-len", "256", "--block-size", "16", "--num-blocks", "40", "--max-rows", "8"]

app = typer.Typer(add_completion=False)
app.command()(command)


class Result:
    def __init__(self, *arguments: str) -> None:
        result = CliRunner().invoke(app, list(arguments))
        self.status, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def facts(self) -> dict[str, object]:
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., str]:
    def write(*lengths: tuple[int, int], bad: int = 0, ids: tuple[int, ...] = ()) -> str:
        lines = [
            json.dumps({"timestamp": 1000 * i, "input_length": prompt, "output_length": output, "hash_ids": ids})
            for i, (prompt, output) in enumerate(lengths)
        ]
        lines[1:1] = ["no request"] * bad
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def test_json_is_one_object_with_the_promised_fields() -> None:
    result = Result(*SMALL, "--limit", "5", "--json", "--check")
    assert (result.status, result.err) == (0, "")
    facts = result.facts
    assert facts.keys() >= FIELDS
    assert (facts["requests"], facts["finished"], facts["interrupted"], facts["finding"]) == (5, 5, False, None)
    assert facts["law_checks"] == facts["kernel_checks"] == facts["steps"]
    assert (facts["prefix_hit_tokens"], facts["prefix_query_tokens"]) == (0, 0)
    assert result.out.count("\n") == 1


@pytest.mark.compiled
def test_the_same_seed_gives_the_same_object_and_another_seed_another() -> None:
    first, again, other = (Result(*SMALL, "--limit", "20", "--json", "--seed", seed).facts for seed in "778")
    for facts in (first, again, other):
        del facts["us_per_step"]
    assert first == again != other


@pytest.mark.compiled
def test_a_small_pool_preempts_and_still_finishes_everything() -> None:
    facts = Result(*SMALL, "--num-blocks", "17", "--limit", "60", "--step-ms", "500", "--json").facts
    assert facts["preemptions"] > 0  # type: ignore[operator]
    assert facts["finished"] == 60
    assert facts["peak_blocks"] == 16


def test_plain_text_is_neither_coloured_wrapped_nor_cut(
    trace: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = Result(trace((20, 4), (300, 1)), *SMALL)
    assert result.status == 0
    assert "\x1b" not in result.out
    assert "1 of 2 finished" in result.out
    assert "1 longer than 256 tokens: line 2" in result.out
    labels = [line.split()[0] for line in result.out.splitlines()]
    assert labels == [
        "requests",
        "refused",
        "steps",
        "tokens",
        "prefixes",
        "preemptions",
        "blocks",
        "wasted",
        "entries",
        "kernel",
    ]


def test_limits_that_are_not_given() -> None:
    """A pool that holds less than 131,072 tokens sets the limit; a limit past the pool's 524,288 tokens sets the pool."""
    facts = Result("--num-blocks", "65", "--limit", "1", "--json").facts
    assert facts["max_model_len"] == 64 * 32
    facts = Result("--limit", "1", "--json", "--max-rows", "2").facts
    assert (facts["max_model_len"], facts["num_blocks"]) == (131072, 16385)
    facts = Result("--limit", "1", "--json", "--max-rows", "2", "--max-model-len", "600000").facts
    assert facts["num_blocks"] == 18751


def test_the_backend_decides_the_columns_and_is_asked_at_every_step() -> None:
    result = Result("--max-model-len", "9416", "--backend", "FLASHINFER_MLA", "--limit", "3")
    assert result.status == 0
    assert "tables of 296 columns accepted by FLASHINFER_MLA" in result.out


def test_prefixes_are_cached_where_the_trace_says_which_or_where_asked(trace: Callable[..., str]) -> None:
    """16 of the second prompt's 20 tokens are a whole block of the first; `off` and traces without ids count nothing."""
    shared = trace((20, 2), (20, 2), ids=(7,))
    facts = Result(shared, *SMALL, "--json", "--check").facts
    assert (facts["prefix_cache"], facts["prefix_hit_tokens"], facts["prefix_query_tokens"]) == ("lru", 16, 40)
    out = Result(shared, *SMALL, "--prefix-cache", "lru").out
    assert "prefixes     40.0 % hit, 16 of 40 tokens; 0 cached blocks evicted" in out
    off = Result(shared, *SMALL, "--json", "--prefix-cache", "off").facts
    assert (off["prefix_cache"], off["prefix_hit_tokens"], off["prefix_query_tokens"]) == ("off", 0, 0)
    alone = trace((20, 2), (20, 2))
    assert Result(alone, *SMALL, "--json").facts["prefix_cache"] == "off"
    assert "prefixes     not cached" in Result(alone, *SMALL).out
    facts = Result(alone, *SMALL, "--json", "--prefix-cache", "lru").facts
    assert (facts["prefix_hit_tokens"], facts["prefix_query_tokens"]) == (0, 40)


def test_bad_lines_are_named_and_counted(trace: Callable[..., str]) -> None:
    path = trace(*[(5, 2)] * 1500, bad=12)
    result = Result(path, *SMALL, "--limit", "10", "--json")
    assert result.status == 0
    assert f"{path} line 2 is no request: " in result.err
    assert "line 11 is no request" in result.err
    assert "line 12 is no request" not in result.err
    assert "2 more lines" in result.err
    assert [line["number"] for line in result.facts["bad_lines"]] == list(range(2, 14))  # type: ignore[attr-defined]
    assert "12 of the trace are no requests" in Result(path, *SMALL, "--limit", "10").out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.jsonl"], "cannot read nothing.jsonl: No such file"),
        (["."], "cannot read .: Is a directory"),
        (["--backend", "NO_SUCH_KERNEL"], "NO_SUCH_KERNEL"),
        (["--backend", "FLASHINFER_MLA", "--block-size", "48"], "48"),
        (["--block-size", "0"], "block-size"),
        (["--num-blocks", "1"], "num-blocks"),
        (["--num-blocks", "10", "--max-model-len", "1000"], "32 blocks"),
        (["--max-model-len", "1"], "max_model_len"),
        (["--max-model-len", "-5"], "max-model-len"),
        (["--max-model-len", "99999999999999"], "max_model_len"),
        (["--max-rows", "0"], "max-rows"),
        (["--max-rows", "99999999999999"], "."),
        (["--token-budget", "0"], "token-budget"),
        (["--limit", "0"], "limit"),
        (["--pool-tokens", "31"], "a pool of 31 tokens holds no block of 32"),
        (["--seed", "-1"], "seed"),
        (["--prefix-cache", "fifo"], "prefix-cache"),
        (["--step-ms", "0"], "step_ms"),
        (["--step-ms", "nan"], "step_ms"),
        (["--step-ms", "soon"], "step-ms"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_usage_or_input_exits_2_and_says_why(arguments: list[str], text: str) -> None:
    result = Result(*arguments)
    assert result.status == 2
    assert text in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_damaged_trace_and_one_of_too_long_requests_exit_2(trace: Callable[..., str]) -> None:
    result = Result(trace((5, 2), (5, 2), bad=1))
    assert (result.status, result.out) == (2, "")
    assert "line 2: " in result.err
    result = Result(trace((500, 2), (5000, 2)), *SMALL)
    assert (result.status, result.out) == (2, "")
    assert "--max-model-len 5002" in result.err


def fail_at(step: int, failure: Callable[[Simulation], object], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Simulation.step

    def wrong(self: Simulation) -> None:
        if self.steps == step:
            failure(self)
        right(self)

    monkeypatch.setattr(Simulation, "step", wrong)


def test_a_broken_law_exits_1_with_the_law_and_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(5, lambda run: run._cache._meta.__setitem__(FREE, 0), monkeypatch)
    result = Result(*SMALL, "--limit", "9", "--check", "--json")
    assert result.status == 1
    assert "finding at step 6: " in result.err
    assert "[L9]" in result.err
    assert result.facts["steps"] == 5
    assert "[L9]" in str(result.facts["finding"])


def test_a_table_that_the_kernel_refuses_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(2, lambda run: setattr(run, "_kernel_width", 295), monkeypatch)
    result = Result("--max-model-len", "9416", "--backend", "FLASHINFER_MLA", "--limit", "3")
    assert result.status == 1
    assert "Expected block_num % (128 / block_size) == 0, got block_num=295" in result.err
    assert "296 columns accepted" in result.out


def test_an_interrupt_prints_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(7, lambda _run: signal.raise_signal(signal.SIGINT), monkeypatch)
    result = Result(*SMALL, "--json")
    assert result.status == 130
    assert (result.facts["interrupted"], result.facts["steps"]) == (True, 7)
    text = Result(*SMALL).out
    assert text.startswith("interrupted ")
    assert "\nsteps        7 in " in text


def test_an_interrupt_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktable.study.synthetic", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = Result(*SMALL)
    assert (result.status, result.out) == (130, "")
    assert "interrupted before the first step" in result.err


def test_lists_make_a_grid_of_which_every_cell_is_compared(tmp_path: Path) -> None:
    """Two of four cells suit the kernel; those that cannot run say why, and are never on the front."""
    grid = ["--block-size", "16,32", "--pool-tokens", "1k,2k", "--max-model-len", "256", "--jobs", "1", "--limit", "8"]
    result = Result(*grid, "--backend", "FLASHINFER_MLA", "--json")
    assert result.status == 0
    cells = result.facts["cells"]
    assert isinstance(cells, list)
    assert [cell["verdict"] for cell in cells] == ["refused", "refused", "accepted", "accepted"]
    assert [cell["front"] for cell in cells[:2]] == [False, False]
    assert all(cell["unfit"] and "steps" not in cell for cell in cells[:2])
    for cell in cells[2:]:
        size = ["--block-size", str(cell["block_size"]), "--num-blocks", str(cell["num_blocks"]), "--limit", "8"]
        alone = Result(*SMALL[:2], *size, "--json").facts
        assert {name: cell[name] for name in alone if name != "us_per_step"} == {
            name: value for name, value in alone.items() if name != "us_per_step"
        }
        assert cell.keys() >= {"hit_rate", "waste", "peak", "pool_tokens", "front", "verdict_reason"}
    text = Result(*grid, "--backend", "FLASHINFER_MLA", "--results", str(tmp_path / "r.csv")).out
    assert "block 16 · pool 1,000" in text
    assert "block 16 · pool 1,000: no kernel block divides 16" in text
    assert (tmp_path / "r.csv").read_text().count("\n") == 5
    again = Result(*grid, "--backend", "FLASHINFER_MLA", "--results", str(tmp_path / "r.csv"))
    assert "4 of 4 cells are done already" in again.err
    assert again.out == text


def test_a_grid_of_backends_and_prefix_caches() -> None:
    names = ["--backend", "FLASHINFER_MLA,TRITON_MLA", "--prefix-cache", "off,lru", "--jobs", "1"]
    cells = Result(*SMALL[:2], "--block-size", "32", "--limit", "3", *names, "--json").facts["cells"]
    assert isinstance(cells, list)
    assert [(cell["backend"], cell["prefix_cache"]) for cell in cells] == [
        ("FLASHINFER_MLA", "off"),
        ("FLASHINFER_MLA", "lru"),
        ("TRITON_MLA", "off"),
        ("TRITON_MLA", "lru"),
    ]


def test_an_interrupted_grid_keeps_what_is_done_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [*SMALL[:2], "--block-size", "16,32,64", "--limit", "4", "--jobs", "1", "--results", str(tmp_path / "r.csv")]
    right, begun = Simulation.run, []

    def stops(self: Simulation, *rest: Callable[[], object]) -> object:
        begun.append(self.geometry.block_size)
        if len(begun) == 2:
            signal.raise_signal(signal.SIGINT)
        return right(self, *rest)

    monkeypatch.setattr(Simulation, "run", stops)
    result = Result(*line)
    assert result.status == 130
    assert "interrupted after 1 of 3 cells; run the same line again to go on" in result.err
    assert Result(*line).status == 0
    assert begun == [16, 32, 32, 64]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--num-blocks", "10", "--pool-tokens", "20"], "both set the pool"),
        (["--results", "r.xlsx"], ".parquet"),
        (["--results", "no/such/folder/r.csv"], "does not exist"),
        (["--report", "no/such/folder/r.html"], "does not exist"),
        (["--block-size", "16,,x"], "block-size"),
        (["--block-size", ","], "block-size"),
        (["--block-size", "16,auto"], "block-size"),
        (["--prefix-cache", "off,fifo"], "fifo"),
        (["--block-size", "16,32", "--backend", "NO_SUCH"], "NO_SUCH"),
        (["--block-size", "16,32", "--engine", "vllm==0.1"], "0.1"),
        (["nothing.jsonl", "--block-size", "16,32"], "cannot read nothing.jsonl"),
        (["--block-size", "16,32", "--ray", "local", "--jobs", "0"], "jobs"),
    ],
)
def test_wrong_grids_exit_2_before_anything_runs(more: list[str], text: str) -> None:
    result = Result(*more)
    assert result.status == 2
    assert text in result.err
    assert result.out == ""


@pytest.mark.parametrize("option", ["--report", "--results"])
def test_what_could_not_be_written_is_refused_before_anything_runs(
    option: str, trace: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "step", lambda _self: pytest.fail("it ran"))
    path, link = trace((5, 2)), tmp_path / "link.csv"
    (tmp_path / "folder.csv").mkdir()
    link.symlink_to(link)
    for named, why in ((tmp_path / "folder.csv", "it is a folder"), (link, "it is a link to nothing")):
        result = Result(path, option, str(named))
        assert (result.status, result.out) == (2, "")
        assert why in result.err


def test_no_file_is_named_twice(tmp_path: Path) -> None:
    """A report over the trace, over the results, or over the cells that are kept, would destroy what took hours."""
    trace, link, hard, kept = (tmp_path / name for name in ("trace.csv", "link.csv", "hard.csv", "x.csv.cells.jsonl"))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00,5,2\n")
    before, x = trace.read_bytes(), str(tmp_path / "x.csv")
    link.symlink_to(trace)
    os.link(trace, hard)
    for options in (["--report", str(link)], ["--report", str(hard)], ["--results", str(trace)]):
        told = Result(str(trace), *options)
        assert (told.status, told.out) == (2, "")
        assert f" over {trace}, which this command reads" in told.err
    for report in (x, str(kept)):
        twice = Result(*SMALL, "--limit", "2", "--report", report, "--results", x)
        assert (twice.status, Path(x).exists(), kept.exists()) == (2, False, False)
    os.link(trace, kept)
    over = Result(str(trace), "--results", x)
    assert (over.status, over.out, trace.read_bytes()) == (2, "", before)
    assert f"cannot write {kept} over {trace}" in over.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_was_counted_is_told_though_the_report_cannot_be_written() -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: extra `report`")
    line = [
        sys.executable,
        "-m",
        "blocktable.cli",
        "simulate",
        *SMALL,
        "--limit",
        "2",
        "--report",
        "/dev/full",
        "--json",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "blocktable simulate: output: No space left on device\n")
    assert json.loads(done.stdout)["finished"] == 2


def test_a_grid_in_which_no_cell_can_run_exits_2() -> None:
    assert Result("--block-size", "16,48", "--backend", "FLASHINFER_MLA", "--limit", "2", "--jobs", "1").status == 2


def test_a_single_run_can_be_a_report_too(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: extra `report`")
    path = tmp_path / "out.html"
    assert Result(*SMALL, "--limit", "5", "--report", str(path)).status == 0
    assert "the first 5 requests of a synthetic hour (seed 0)" in path.read_text()


RUN = "import typer; from blocktable.cli.simulate import command; app = typer.Typer(); app.command()(command); app()"


@pytest.mark.compiled
def test_a_terminal_gets_a_bar_with_rate_and_time_left_and_ctrl_c_a_summary() -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *SMALL, "--json", "--check"],
        stdout=subprocess.PIPE,
        stderr=inside,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(inside)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not re.search(rb"[1-9][0-9,]* steps/s.* left", seen):
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    os.close(terminal)
    assert re.search(rb"requests .* [1-9][0-9,]* steps/s .* left", seen)
    assert process.returncode == 130
    facts = json.loads(out)
    assert facts["interrupted"] is True
    assert facts["steps"] > 0


@pytest.mark.compiled
def test_a_terminal_gets_the_summary_as_a_table() -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *SMALL, "--limit", "5"],
        stdout=inside,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(inside)
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # Linux reports a terminal whose other side has closed as an input error
        pass
    assert process.wait(timeout=60) == 0
    os.close(terminal)
    assert b"5 of 5 finished" in seen
    assert b"\x1b[1mrequests" in seen


def test_help_and_wrong_usage_load_neither_numba_nor_rich_bars() -> None:
    code = "import sys, blocktable.cli.simulate; print(*sorted({'numba', 'numpy', 'rich.progress', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
