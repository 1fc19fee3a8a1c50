"""`blocktable view`: a recording drawn as it stood, the same picture as of the live cache at that step."""

import json
import os
from pathlib import Path

import pytest

from blocktable import BlockTables, KVCache, plan, recording, view
from blocktable.cli import run


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[str, list[str]]:
    """A recording, and what the live cache looked like after each commit."""
    path, live = tmp_path / "run.btr", []
    with recording.record(path):
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=30, max_rows=4)
        tables = BlockTables([plan(max_model_len=64, block_size=16)], max_rows=2, num_blocks=9)
        for row in range(3):
            cache.admit([row], [0, 9], [1, 2, 3, 4, 5, 6, 7, 8, row])
            cache.commit()
            live.append(view.pool_map(cache))
        tables.append([1], [0, 2], [5, 6])
    return str(path), live


def test_the_picture_is_that_of_the_live_cache_at_the_step(
    recorded: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, live = recorded
    assert run(["view", path, "--to", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "29 blocks: 29 free, 0 cached, 0 held, 0 fenced"
    for step in (1, 2, 3):
        assert run(["view", path, "--to" if step % 2 else "--step", str(step)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"after step {step}; ")
        assert live[step - 1] in out
    assert run(["view", path]) == 0
    assert live[-1] in capsys.readouterr().out


def test_a_row_an_object_json_and_a_page(
    recorded: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = recorded
    assert run(["view", path, "--row", "2"]) == 0
    assert capsys.readouterr().out.startswith("row 2 (c), group 0 full: 9 tokens, 9 final, 3 blocks of 4\n===......")
    assert run(["view", path, "--object", "1"]) == 0
    out = capsys.readouterr().out
    assert "8 blocks: 2 in rows\n....aa..\n" in out
    assert "row 1 (a), group 0 full, 2 blocks of 16\n==..\n" in out
    assert run(["view", path, "--json", "--row", "0"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(part["name"], part["start"], part["count"]) for part in facts["rows"][0]["parts"]] == [
        ("live", 0, 3),
        ("tail", 3, 13),
    ]
    assert run(["view", path, "--html", str(tmp_path / "out.html")]) == 0
    assert "run.btr after 3 steps" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("more", [["--to", "-1"], ["--to", "99"], ["--object", "2"], ["--row", "3"], ["--row", "x"]])
def test_wrong_usage_exits_2(recorded: tuple[str, list[str]], more: list[str]) -> None:
    assert run(["view", recorded[0], *more]) == 2


def test_what_is_no_recording_exits_2(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    assert run(["view", str(tmp_path / "x")]) == 2
    assert run(["view", str(tmp_path / "y")]) == 2


@pytest.mark.parametrize("more", [["--row", "0"], ["--row", "99"], ["--json"], ["--row", "0", "--json"]])
def test_what_a_page_does_not_take_is_refused(
    recorded: tuple[str, list[str]], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["view", recorded[0], "--html", str(tmp_path / "x.html"), *more]) == 2
    told = capsys.readouterr()
    assert (told.out, (tmp_path / "x.html").exists()) == ("", False)
    assert f"--html draws everything on a page, without {more[0]}" in told.err


@pytest.mark.parametrize("line", [["view", "--html"], ["shrink", "--out"]])
def test_no_command_writes_over_the_recording_that_it_reads(
    recorded: tuple[str, list[str]], line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by another name, nor where a ring has its older half, whether it is there or not."""
    (name, option), path = line, Path(recorded[0])
    before, folder = path.read_bytes(), path.parent
    (folder / "link").symlink_to(path)
    os.link(path, folder / "hard")
    (folder / "beside").symlink_to(folder)
    names = [path, folder / "link", folder / "hard", folder / "beside" / path.name, f"{path}.old"]
    for out in [*names, folder / "beside" / f"{path.name}.old"]:
        assert run([name, str(path), option, str(out)]) == 2
        assert f"cannot write {out} over {path}" in capsys.readouterr().err
    assert run([name, str(folder / "link"), option, str(path)]) == 2
    assert path.read_bytes() == before
    assert not Path(f"{path}.old").exists()


def test_a_page_that_cannot_be_written_is_refused_before_the_run_is_done_again(
    recorded: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "replay", lambda *_args, **_named: pytest.fail("it ran"))
    assert run(["view", recorded[0], "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
