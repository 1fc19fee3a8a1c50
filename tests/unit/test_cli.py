"""The command line as a whole: commands, help, exit codes of what goes wrong, a terminal and a broken pipe."""

import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import blocktable
from blocktable import cli
from blocktable.errors import ArgumentError

CHECK = [
    "check",
    "--engine",
    "vllm==0.19.1",
    "--backend",
    "FLASHINFER_MLA",
    "--max-model-len",
    "9416",
    "--block-size",
    "32",
]


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"blocktable {blocktable.__version__}\n")
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "says"), [([], "usage"), (["chekc"], "did you mean check?"), (["x"], "no command 'x'")]
)
def test_no_such_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert all(name in err for name in cli.COMMANDS)


FILE = {name: ["recording"] for name in ("view", "replay", "shrink")}  # demanded before an option is looked at


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_refuses_unknown_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    assert f"blocktable {name}" in capsys.readouterr().out
    assert cli.run([name, *FILE.get(name, []), "--unheard-of"]) == 2
    assert "unheard-of" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_speaks_json_and_can_be_quiet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    told = capsys.readouterr().out
    assert all(option in told for option in ("--json", "--quiet", "-q"))


def test_a_quiet_check_answers_by_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*CHECK, "-q"]) == 1
    assert cli.run([*CHECK, "-q", "--engine", "vllm==0.32.0"]) == 0
    assert cli.run(["check", "-q", "--max-model-len", "9416"]) == 3
    assert capsys.readouterr() == ("", "")
    assert cli.run([*CHECK, "-q", "--block-size", "0"]) == 2
    assert "positive" in capsys.readouterr().err


def test_quiet_backends_are_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["backends", "-q", "--engine", "vllm==0.32.0", "--block-size", "64"]) == 0
    names = capsys.readouterr().out.split()
    assert "FLASHMLA" in names
    assert "CUTLASS_MLA" not in names


def fake(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a command in place of `check` that raises."""

    def command() -> None:
        raise error

    module = ModuleType("blocktable.cli.check")
    module.options = id  # type: ignore[attr-defined]
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "blocktable.cli.check", module)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            ArgumentError("row 9 is outside", law="L2", remedy="use row 8"),
            2,
            "blocktable check: row 9 is outside; use row 8 [L2]",
        ),
        (KeyboardInterrupt(), 130, ""),
        # A defect of ours exits neither 1 (refused) nor 0, and shows where it is.
        (ZeroDivisionError("ours"), 70, "Traceback"),
        (SystemExit(3), 3, ""),
    ],
)
def test_what_goes_wrong_has_its_exit_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, error)
    assert cli.run(["check"]) == code
    err = capsys.readouterr().err
    assert says in err
    assert ("Traceback" in err) == (code == 70)


def start(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "blocktable.cli", *arguments]


@pytest.mark.parametrize("line", ["backends", "--help", "simulate --help", "simulate --limit 2 --max-model-len 4096"])
def test_a_reader_that_leaves_is_no_error(line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(start(*line.split()), stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 141


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("line", ["--version", "backends", "simulate --limit 2 --max-model-len 4096"])
def test_a_full_disk_is_told_and_is_no_verdict(line: str) -> None:
    name, *rest = line.split()
    with FULL.open("w") as full:
        done = subprocess.run(
            start(name, *rest), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (2, f"blocktable {name}: output: No space left on device\n")


@pytest.mark.parametrize(("arguments", "code"), [(CHECK, 1), (["--version"], 0)])
def test_a_closed_output_is_no_error(arguments: list[str], code: int) -> None:
    line = f"{shlex.join(start(*arguments))} >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", line], timeout=60, check=False).returncode == code


def on_terminal(*arguments: str) -> tuple[int, str]:
    """Run a command on a terminal of 60 columns."""
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": "60", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(start(*arguments), stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        text = b""
        while select.select([leader], [], [], 60)[0]:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # how a terminal says that the other end closed
                break
            text += piece
        process.wait(timeout=60)
    os.close(leader)
    return process.returncode, text.decode()


def test_a_terminal_gets_colour_and_wrapped_lines() -> None:
    code, text = on_terminal(*CHECK)
    assert code == 1
    assert "\x1b[" in text
    assert "refused" in text
    plain = "".join(part.partition("m")[2] if index else part for index, part in enumerate(text.split("\x1b[")))
    assert max(len(line) for line in plain.splitlines()) <= 60
    assert "--attention-backend" in plain
    code, text = on_terminal("backends", "--engine", "vllm==0.19.1")
    assert code == 0
    assert "FLASHINFER_MLA" in text
