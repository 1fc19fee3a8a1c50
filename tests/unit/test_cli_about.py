"""Versions, completion in a real shell, colours only where they are wanted."""

import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from blocktable.cli import COMMANDS, run


def test_the_version_brings_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "blocktable 0.1.0"
    assert lines[1] == f"python {sys.version.split()[0]}"
    assert any(re.fullmatch(r"numpy \d+\.\d+.*", line) for line in lines)
    assert any(re.fullmatch(r"numba \d+\.\d+.*", line) for line in lines)


def complete(line: str) -> set[str]:
    """What bash offers at the end of a line."""
    script = subprocess.run(
        [sys.executable, "-m", "blocktable.cli", "--completion", "bash"], capture_output=True, text=True, check=True
    )
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"{script.stdout}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _blocktable; echo ${{COMPREPLY[@]}}"
    return set(subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_their_options() -> None:
    assert complete("blocktable ") == {*COMMANDS, "--help", "--version"}
    assert complete("blocktable si") == {"simulate"}
    assert complete("blocktable simulate --block") == {"--block-size"}
    assert complete("blocktable check --max") == {"--max-model-len"}
    assert complete("blocktable check --pool") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if program := shutil.which(shell):
        subprocess.run([program, "-c" if shell == "fish" else "-fc", script], check=True, timeout=30)


def test_an_unknown_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


REFUSED = ["--backend", "FLASHINFER_MLA", "--max-model-len", "9416", "--block-size", "32"]


def on_a_terminal(**environment: str) -> str:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "blocktable.cli", "check", "--engine=vllm==0.19.1", *REFUSED],
        stdout=inside,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        | {"TERM": "xterm-256color", "COLUMNS": "200"}
        | environment,
    )
    os.close(inside)
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # Linux reports a terminal whose other side has closed as an input error
        pass
    os.close(terminal)
    assert process.wait() == 1
    return seen.decode()


def test_a_terminal_gets_colour_unless_no_color_is_set() -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert coloured.search(on_a_terminal())
    assert not coloured.search(on_a_terminal(NO_COLOR="1"))
