"""`blocktable bench`: runs what can run here, says why the rest did not, and writes one table of all results."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import blocktable.cli.bench
from blocktable.cli import run

GOOD = """
import json, os, sys
from pathlib import Path
row = {"case": "a/1", "ours_us": 2.0, "peer": "vllm thing", "peer_us": 4000.0, "ratio": 2000.0, "low": 1.5, "high": 2500.0}
alone = {"case": "start", "ours_us": 150000, "low_us": 140000, "high_us": 160000, "rounds": 3}
machine = {"cpu": "x", "cores": 2, "memory_gib": 1, "load": 0.5, "system": "Linux", "python": "3.11"}
goal = {"text": "fast", "measured": 2000.0, "limit": 15, "at_most": False, "met": MET}
result = {"machine": machine, "versions": {"numpy": "2"}, "rounds": sys.argv[1:], "rows": [row, alone], "goals": [goal]}
Path(os.environ["BLOCKTABLE_BENCH_RESULTS"], "NAME.json").write_text(json.dumps(result))
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "_harness.py").write_text("")
    monkeypatch.setattr(blocktable.cli.bench, "SCRIPTS", folder)

    def write(name: str, text: str) -> Path:
        (folder / f"{name}.py").write_text(text.replace("NAME", name))
        return folder

    return write


def test_results_are_written_shown_and_gathered(
    scripts: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scripts("tables", GOOD.replace("MET", "True"))
    scripts("step", "import vllm_that_is_not_here")
    assert run(["bench", "--rounds", "3"]) == 0
    out = capsys.readouterr().out
    assert "step was not run: ModuleNotFoundError: No module named 'vllm_that_is_not_here'" in out
    assert "tables  a/1    2         vllm thing  4,000     2,000  1.5 .. 2,500" in out
    table = (tmp_path / "bench" / "RESULTS.md").read_text()
    assert "| `a/1` | 2 | vllm thing | 4,000 | 2,000 | 1.5 .. 2,500 |" in table
    assert "- met: fast, ≥ 15, measured 2000" in table
    assert json.loads((folder / "results" / "tables.json").read_text())["rounds"] == ["3"]


def test_a_missed_goal_and_nothing_at_all_exit_1(scripts: Callable[..., Path], tmp_path: Path) -> None:
    scripts("step", "raise SystemExit(1)")
    assert run(["bench", "-q", "--out", str(tmp_path / "none")]) == 1
    scripts("tables", GOOD.replace("MET", "False"))
    assert run(["bench", "tables", "-q", "--out", str(tmp_path / "one")]) == 1
    assert "**missed**: fast" in (tmp_path / "one" / "RESULTS.md").read_text()


def test_an_old_result_is_no_new_one(scripts: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    scripts("tables", GOOD.replace("MET", "True"))
    run(["bench", "-q"])
    scripts("tables", "raise SystemExit('it broke')")
    capsys.readouterr()
    run(["bench", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["not_run"] == {"tables": "it broke"}
    assert said["results"]["tables"]["rows"][0]["ratio"] == 2000.0


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"rows": 3}', "3", '{"machine": {}, "versions": [], "rows": [], "goals": []}']
)
def test_a_damaged_result_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tables.json").write_text(text)
    assert run(["bench", "--summarise", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / 'tables.json'} holds no result of a bench" in capsys.readouterr().err
    assert run(["bench", "--summarise", "--out", str(tmp_path / "tables.json")]) == 2
    assert "tables.json: File exists" in capsys.readouterr().err


def test_summarise_runs_nothing(scripts: Callable[..., Path], tmp_path: Path) -> None:
    scripts("tables", GOOD.replace("MET", "True"))
    run(["bench", "-q"])
    scripts("tables", "raise SystemExit('it must not run')")
    (tmp_path / "bench" / "RESULTS.md").unlink()
    assert run(["bench", "--summarise"]) == 0
    assert "vllm thing" in (tmp_path / "bench" / "RESULTS.md").read_text()


@pytest.mark.parametrize("arguments", [["nothing"], ["--rounds", "0"], ["--rounds", "x"], ["--rounds", "-1"]])
def test_wrong_usage_exits_2(arguments: list[str], scripts: Callable[..., Path]) -> None:
    scripts("tables", GOOD)
    assert run(["bench", *arguments]) == 2
