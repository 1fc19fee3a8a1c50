"""`blocktable check`: verdicts, exit codes, ways out that work, and what the answer was assumed on."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable.cli import run
from blocktable.contracts import known_versions, lookup, resolve_engine
from blocktable.contracts.engines import catalogue
from blocktable.preflight import Judgement, Launch, judge
from blocktable.preflight.judgement import assess

KEYS = {
    *("verdict", "engine", "backend", "block_size", "kernel_block_size", "width", "kernel_width", "padding"),
    *("error", "ways_out", "assumed", "missing"),
}
FLOAT_RULE = "Expected block_num % (128 / block_size) == 0, got block_num={} and block_size={}"


class Answer:
    """What the command printed and how it ended."""

    def __init__(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.code = run(["check", *shlex.split(line)])
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> dict[str, Any]:
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts


@pytest.mark.parametrize(
    ("line", "code", "facts"),
    [
        (
            "--engine vllm==0.19.1 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32",
            1,
            {
                "verdict": "refused",
                "width": 295,
                "kernel_width": 295,
                "error": "ValueError: " + FLOAT_RULE.format(295, 32),
            },
        ),
        (
            "--engine vllm==0.32.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32",
            0,
            {"verdict": "accepted", "width": 296, "kernel_width": 296, "padding": 1, "error": None, "ways_out": []},
        ),
        (
            "--engine vllm==0.32.0 --backend B12X --max-model-len 8000 --block-size 64",
            1,
            {
                "verdict": "refused",
                "width": 126,
                "error": "ValueError: decode graph page_table width must fit the prepared capacity: got 126, expected 1..125",
            },
        ),
        (
            "--engine vllm==0.23.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 96",
            1,
            {
                "kernel_block_size": 32,
                "width": 99,
                "kernel_width": 297,
                "error": "ValueError: " + FLOAT_RULE.format(297, 32),
            },
        ),
        (
            "--engine flashinfer==0.7.2 --backend trtllm-gen --max-model-len 9416 --block-size 32",
            0,
            {"verdict": "accepted", "width": 295, "padding": 0},
        ),
        (
            "--engine flashinfer==0.6.15 --backend trtllm-gen --max-model-len 9416 --block-size 32",
            1,
            {"verdict": "refused", "width": 295, "error": "ValueError: " + FLOAT_RULE.format(295, 32)},
        ),
        (
            "--engine vllm==0.32.0 --backend CPU_ATTN --max-model-len 9416 --block-size 16",
            1,
            {"verdict": "refused", "width": None, "ways_out": ["--block-size 32"]},
        ),
        ("--engine vllm==0.32.0 --backend CPU_MLA --max-model-len 9416 --block-size 16", 0, {"width": 592}),
        # The platform overrides the block with a warning (platforms/cpu.py, from 0.28 on).
        (
            "--engine vllm==0.32.0 --backend CPU_MLA --max-model-len 9416 --block-size 32",
            0,
            {"width": 592, "block_size": 16},
        ),
        (
            "--engine vllm==0.28.0 --backend CPU_MLA --max-model-len 9416 --block-size 128",
            0,
            {"width": 592, "block_size": 16},
        ),
        ("--engine vllm==0.32.0 --backend TRITON_MLA --max-model-len 9416 --block-size 48", 0, {"width": 200}),
        (
            "--engine vllm==0.32.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32 --cp-size 2",
            0,
            {"width": 148},
        ),
        (
            "--engine vllm==0.32.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 544",
            0,
            {"kernel_width": 340},
        ),
        (
            "--engine vllm==0.32.0 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32 --lookahead 100",
            0,
            {"width": 296},
        ),
        (
            "--engine vllm==0.32.0 --with flashinfer==0.7.2 --backend FLASHINFER_MLA --max-model-len 9416",
            0,
            {"width": 296},
        ),
    ],
)
def test_right_values(line: str, code: int, facts: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(f"--json {line}", capsys)
    assert answer.code == code
    assert set(answer.json) >= KEYS
    assert {name: answer.json[name] for name in facts} == facts
    assert answer.err == ""


def test_a_refusal_says_what_meets_what_and_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer("--engine vllm==0.19.1 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32", capsys)
    first, error, ways, assumed = answer.out.splitlines()
    assert (
        first
        == "refused    vllm 0.19.1 allocates 295 blocks per row; FLASHINFER_MLA needs a multiple of 4 (128 tokens / 32)"
    )
    assert error.endswith("stop with: ValueError: " + FLOAT_RULE.format(295, 32))
    assert ways.endswith(
        "--max-model-len 9344, or 9441 to 9472 · --block-size 64 · vllm>=0.21 · --attention-backend TRITON_MLA"
    )
    assert "one full-attention group" in assumed
    assert "10.x" in assumed


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("--max-model-len 9416", "backend"),
        ("--backend FLASHINFER_MLA", "max_model_len"),
        ("--backend FLASHINFER_MLA --max-model-len auto", "memory"),
        ("--backend FLASHINFER_MLA --max-model-len -1", "memory"),
        ("--backend trtllm-gen --max-model-len 9416", "block_size"),
        ("--engine sglang==0.5.23 --backend ascend --max-model-len 9416", "rule"),
        (
            "--engine flashinfer==0.7.2 --backend trtllm-gen --max-model-len 9416 --block-size 32 --cp-size 2",
            "context_parallel",
        ),
        ("-- vllm serve M --max-model-len 9416", "backend"),
        ("-- vllm serve M --attention-backend FLASHINFER_MLA", "max_model_len"),
        ("-- vllm serve M --attention-backend FLASHINFER_MLA --max-model-len auto", "memory"),
        ("-- vllm serve M --max-model-len 9416 -ac.backend_per_kind.mla_attention FLASHINFER_MLA", "kind"),
        ("-- VLLM_ATTENTION_BACKEND=FLASHINFER_MLA vllm serve M --max-model-len 9416", "VLLM_ATTENTION_BACKEND"),
    ],
)
def test_what_is_not_known_is_named(line: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Answer(line, capsys)
    assert plain.code == 3
    assert plain.out.startswith("not known")
    assert missing in plain.out
    told = Answer(f"--json {line}", capsys)
    assert told.json["verdict"] == "unknown"
    assert missing in " ".join(told.json["missing"])


def test_a_block_size_is_refused_whatever_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(
        "--engine vllm==0.32.0 --json --backend FLASHINFER_MLA --block-size 48 --max-model-len auto", capsys
    )
    assert answer.code == 1
    assert "block_size not supported" in answer.json["error"]
    assert "--block-size 64" in answer.json["ways_out"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--backend FLASHINFER_MLA --max-model-len 0", "positive"),
        ("--backend FLASHINFER_MLA --max-model-len -2", "positive"),
        ("--backend FLASHINFER_MLA --max-model-len 9.5K", "fraction"),
        ("--backend FLASHINFER_MLA --max-model-len x", "whole number"),
        ("--backend FLASHINFER_MLA --block-size 0", "positive"),
        ("--backend FLASHINFER_MLA --block-size -32", "positive"),
        ("--backend FLASHINFER_MLA --block-size x", "whole number"),
        ("--backend FLASHINFER_MLA --cp-size 0", "positive"),
        ("--backend FLASHINFER_MLA --lookahead -1", "at least 0"),
        ("--backend FLASHINFER_MLA --max-model-len 99999999999999999", "more than"),
        ("--backend FLASHINFER_MAL --max-model-len 9416", "FLASHINFER_MLA"),
        ("--engine vllm==0.19.1 --backend B12X --max-model-len 9416", "0.30.0"),
        ("--engine vllm==0.32.0 --backend TREE_ATTN --max-model-len 9416", "TRITON_ATTN"),
        ("--engine vllm==0.5.0 --backend FLASHINFER_MLA --max-model-len 9416", "older than the data"),
        ("--engine vlm --backend FLASHINFER_MLA --max-model-len 9416", "vllm"),
        ("--engine vllm==x --backend FLASHINFER_MLA", "vllm"),
        ("--with flashinfer==0.1 --backend FLASHINFER_MLA", "flashinfer"),
        ("--unheard-of", "unrecognized"),
        ("--max-model-len", "expected one argument"),
        ("--engine flashinfer -- vllm serve M", "starts vLLM"),
        ("-- vllm bench latency", "does not start a server"),
        ("'vllm serve M --max-model-len 9416' --json", "before the line"),
    ],
)
def test_wrong_usage_and_input(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(line, capsys)
    assert answer.code == 2
    assert answer.out == ""
    assert says in answer.err
    assert "Traceback" not in answer.err


def test_several_backends_are_each_judged_and_the_worst_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup._from_catalogue.cache_clear()
    monkeypatch.delitem(catalogue("vllm").records._read, "FLASHMLA_SPARSE", raising=False)
    monkeypatch.delitem(catalogue("vllm").records._entries, "FLASHMLA_SPARSE")  # as if nobody had read it
    line = "--engine vllm==0.19.1 --max-model-len 9416 --block-size 32 --json"
    both = Answer(f"{line} --backend TRITON_MLA,FLASHINFER_MLA", capsys)
    assert both.code == 1
    assert both.json["backend"] == "FLASHINFER_MLA"
    assert [one["verdict"] for one in both.json["judgements"]] == ["accepted", "refused"]
    assert Answer(f"{line} --backend TRITON_MLA --backend FLASHINFER_MLA", capsys).out == both.out
    assert Answer(f"{line} --backend TRITON_MLA,FLASHMLA_SPARSE", capsys).code == 3
    assert Answer(f"{line} --backend FLASHMLA_SPARSE,FLASHINFER_MLA", capsys).code == 1
    assert Answer(f"{line} --backend TRITON_MLA,TREE_ATTN", capsys).code == 0


def test_the_page_size_that_sglang_takes_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--engine sglang==0.5.23 --backend trtllm_mla --max-model-len 9416 --block-size"
    asked = Answer(f"--json {line} 16", capsys)
    assert (asked.code, asked.json["block_size"], asked.json["width"]) == (0, 64, 192)
    assert "sglang 0.5.23 changes blocks of 16 to 64" in asked.json["reason"]
    assert "changes blocks of 16 to 64" in Answer(f"{line} 16", capsys).out
    kept = Answer(f"--json {line} 32", capsys).json
    assert (kept["block_size"], kept["width"]) == (32, 384)
    assert "changes" not in kept["reason"]


def test_a_kernel_that_starts_and_answers_wrongly_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--json --backend FLASHINFER --max-model-len 9416 --block-size 256 --engine"
    wrong = Answer(f"{line} vllm==0.26.0", capsys)
    assert (wrong.code, wrong.json["error"]) == (1, None)
    assert "answers wrongly" in wrong.json["reason"]
    assert {"--block-size 128", "vllm>=0.29"} <= set(wrong.json["ways_out"])
    assert Answer(f"{line} vllm==0.32.0", capsys).code == 0


def test_what_is_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    newest = known_versions("vllm")[-1]
    plain = Answer("--json --backend TRTLLM_MLA --max-model-len 9416", capsys).json
    assert plain["engine"] == f"vllm=={newest}"
    assert (plain["backend"], plain["block_size"]) == ("FLASHINFER_MLA", 32)
    assumed = " | ".join(plain["assumed"])
    assert f"vllm {newest}, the newest in the catalogue" in assumed
    assert "block size 32" in assumed
    assert "flashinfer" in assumed
    extrapolated = Answer("--json --engine vllm==9.0 --backend FLASHINFER_MLA --max-model-len 9416", capsys).json
    assert extrapolated["verdict"] == "accepted"
    assert f"behaves as {newest}" in " | ".join(extrapolated["assumed"])
    drafts = "--engine vllm==0.32.0 --json -- vllm serve M --attention-backend TRITON_MLA --max-model-len 9416 -sc"
    told = Answer(f"{drafts} '{{\"num_speculative_tokens\": 5}}'", capsys).json
    assert "lookahead of 5" in " | ".join(told["assumed"])


@pytest.mark.parametrize(
    ("backend", "block"),
    [
        ("FLASHINFER_MLA", 32),
        ("TRITON_MLA", 16),
        ("CUTLASS_MLA", 128),
        ("FLASHMLA", 64),
        ("B12X", 128),
        ("CPU_ATTN", 128),
    ],
)
def test_the_block_size_that_the_release_takes_by_itself(
    backend: str, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Answer(f"--json --engine vllm==0.32.0 --backend {backend} --max-model-len 9416", capsys)
    assert (answer.code, answer.json["block_size"]) == (0, block)


def test_a_launch_line_and_options_that_win_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "vllm serve M --max-model-len 9416 --block-size 32 --attention-backend FLASHINFER_MLA --port 80"
    assert Answer(f"--engine vllm==0.19.1 -- {line}", capsys).code == 1
    assert Answer(f"--engine vllm==0.19.1 {line}", capsys).code == 1
    assert Answer(f"--engine vllm==0.19.1 '{line}'", capsys).code == 1
    assert Answer(f"--engine vllm==0.32.0 -- {line}", capsys).code == 0
    for option in ("--max-model-len 9344", "--block-size 64", "--backend TRITON_MLA", "--attention-backend TRITON_MLA"):
        assert Answer(f"--engine vllm==0.19.1 {option} -- {line}", capsys).code == 0
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 9344\nattention-backend: FLASHINFER_MLA\n")
    assert Answer(f"--engine vllm==0.19.1 -- vllm serve M --config {file} --block-size 32", capsys).code == 0
    assert Answer(f"--engine vllm==0.19.1 -- {line} --config {file}", capsys).code == 1


def test_context_parallelism_of_a_launch_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "vllm serve M --max-model-len 9416 --block-size 32 --attention-backend TRITON_MLA -tp 8"
    assert Answer(f"--json --engine vllm==0.19.1 -- {line} -dcp 2", capsys).json["width"] == 148
    # Ranks of the prefill divide a row up to 0.25.1, no more from 0.26.0 on.
    assert Answer(f"--json --engine vllm==0.25.1 -- {line} -dcp 2 -pcp 2", capsys).json["width"] == 76
    assert Answer(f"--json --engine vllm==0.26.0 -- {line} -dcp 2 -pcp 2", capsys).json["width"] == 148
    odd = Answer(
        "--json --engine vllm==0.32.0 -- vllm serve M --max-model-len 9416 -dcp 2 -ac.backend TRITON_MLA", capsys
    )
    assert "--tensor-parallel-size" in " ".join(odd.json["assumed"])
    old = Answer(f"--json --engine vllm==0.19.1 -- {line} --attention-backend FLASHINFER_MLA -dcp 2", capsys)
    assert (old.code, old.json["error"]) == (1, None)
    spread = f"{line} --attention-backend FLASHINFER_MLA -dcp 2 --cp-kv-cache-interleave-size 16"
    assert "interleave" in Answer(f"--engine vllm==0.32.0 -- {spread}", capsys).out
    spread = f"--json --engine vllm==0.32.0 -- {line} --cp-kv-cache-interleave-size 64"
    assert Answer(spread, capsys).code == 0  # of one rank nobody asks
    wide = Answer(f"{spread} -dcp 2", capsys)
    assert (wide.code, wide.json["error"][:30]) == (1, "AssertionError: Block_size(32)")
    assert "--block-size 64" in wide.json["ways_out"]


# Ways out


def retry(launch: Launch, way: str) -> list[tuple[str, Judgement]]:
    """Judge again with a way out applied; a range of lengths is tried at both ends and in the middle."""
    if way.startswith("--max-model-len "):
        lengths = [
            int(word) for word in way.removeprefix("--max-model-len ").replace(", or", "").replace("to ", "").split()
        ]
        middle = [(lengths[-1] + lengths[-2]) // 2] if " to " in way else []
        return [(way, judge(replace(launch, max_model_len=length))) for length in lengths + middle]
    if way.startswith("--block-size "):
        return [(way, judge(replace(launch, block_size=int(way.split()[1]))))]
    if way.startswith(("--attention-backend ", "--backend ")):
        return [(way, judge(replace(launch, backend=way.split()[1])))]
    if way == "--decode-context-parallel-size 1":
        return [(way, judge(replace(launch, cp_size=1)))]
    engine, _, least = way.partition(">=")
    from packaging.version import Version

    newer = [one for one in known_versions(engine) if Version(one) >= Version(least)]
    return [(way, judge(replace(launch, release=resolve_engine(f"{engine}=={one}")))) for one in newer]


def replace(launch: Launch, **changes: Any) -> Launch:
    return Launch(**(vars(launch) | changes))


RELEASES = [f"vllm=={one}" for one in known_versions("vllm")] + ["flashinfer==0.6.15", "flashinfer==0.7.2"]


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    release = resolve_engine(draw(st.sampled_from(RELEASES)))
    wanted = [
        "FLASHINFER_MLA",
        "FLASHINFER_MLA",
        "B12X",
        "CPU_ATTN",
        "CUTLASS_MLA",
        "TRITON_MLA",
        "trtllm-gen",
        "auto",
        "xqa",
    ]
    return Launch(
        release,
        draw(st.sampled_from([one for one in wanted if one in release.backends])),
        max_model_len=draw(st.integers(1, 40_000)),
        block_size=draw(st.sampled_from([8, 16, 32, 48, 64, 96, 112, 128, 160, 192, 256, 544, 640])),
        cp_size=draw(st.sampled_from([1, 1, 1, 2, 3])),
    )


@given(launches())
def test_every_way_out_is_accepted(launch: Launch) -> None:
    for way in judge(launch).ways_out:
        for tried, answer in retry(launch, way):
            assert answer.verdict == "accepted", (launch, tried, answer)


@given(launches())
def test_lengths_offered_are_the_nearest(launch: Launch) -> None:
    ways = [way for way in judge(launch).ways_out if way.startswith("--max-model-len ")]
    assert isinstance(launch.max_model_len, int)
    for way in ways:
        text = way.removeprefix("--max-model-len ")
        below = [int(one) for one in text.split(", or ") if " to " not in one and int(one) < launch.max_model_len]
        above = [one for one in text.split(", or ") if " to " in one or int(one) > launch.max_model_len]
        for length in range(max([*below, launch.max_model_len - 130, 0]) + 1, launch.max_model_len + 1):
            assert not accepts(launch, length)
        if above:
            first, last = int(above[0].split(" to ")[0]), int(above[0].split(" to ")[-1])
            assert not any(
                accepts(launch, length)
                for length in range(launch.max_model_len, min(first, launch.max_model_len + 130))
            )
            assert not accepts(launch, last + 1) or launch.backend == "B12X"


def accepts(launch: Launch, length: int) -> bool:
    return assess(replace(launch, max_model_len=length)).verdict == "accepted"


@given(
    version=st.sampled_from(known_versions("vllm")),
    length=st.integers(1, 200_000),
    block=st.sampled_from([32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 544, 640, 1056]),
)
def test_the_verdict_is_that_of_the_two_formulas(version: str, length: int, block: int) -> None:
    """The release's width written out by hand, and FlashInfer's own expression in floats."""
    number = tuple(int(part) for part in version.split(".")[:2])
    width = -(-length // block)
    if (0, 21) <= number < (0, 27) and block <= 128:
        step = 128 // block
        width = -(-width // step) * step
    if number >= (0, 27):
        step = next(step for step in range(1, 129) if step * block % 128 == 0)
        width = -(-width // step) * step
    kernel = max(size for size in (32, 64) if block % size == 0)
    columns = width * block // kernel
    starts = columns % (128 / kernel) == 0
    answer = judge(Launch(resolve_engine(f"vllm=={version}"), "FLASHINFER_MLA", max_model_len=length, block_size=block))
    assert (answer.width, answer.kernel_block_size, answer.kernel_width) == (width, kernel, columns)
    assert answer.verdict == ("accepted" if starts else "refused")


# The command in a shell


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blocktable.cli", *shlex.split(line)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )


def test_output_that_is_no_terminal_is_neither_wrapped_nor_coloured() -> None:
    result = shell(
        "check --engine vllm==0.19.1 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32",
        COLUMNS="20",
        FORCE_COLOR="1",
        TERM="xterm-256color",
    )
    assert result.returncode == 1
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 4
    assert "\x1b" not in result.stdout
    assert "9441 to 9472 · --block-size 64 · vllm>=0.21 · --attention-backend TRITON_MLA" in result.stdout
    text = shell("check --help", COLUMNS="20").stdout
    assert "Two sides meet: the width that the engine's release allocates per row, and what the attention" in text


def test_a_terminal_without_such_characters_gets_the_answer_all_the_same() -> None:
    result = shell(
        "check --engine vllm==0.19.1 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32",
        PYTHONIOENCODING="ascii",
    )
    assert result.returncode == 1
    assert "9441 to 9472 ? --block-size 64" in result.stdout


def test_a_check_imports_nothing_heavy() -> None:
    code = (
        "import sys; from blocktable.cli import run; "
        "run(['check', '--engine', 'vllm==0.19.1', '--backend', 'FLASHINFER_MLA', '--max-model-len', '9416']); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'numpy', 'numba', 'torch', 'rich', 'typer', 'click', 'pydantic', 'yaml', 'llvmlite'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]"


def installed(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize("version", ["0.19.1", "0.19.1+cu128"])
def test_without_an_engine_the_vllm_installed_here_is_judged(tmp_path: Path, version: str) -> None:
    installed(tmp_path, "vllm", version)
    (tmp_path / "vllm.py").write_text("raise SystemExit('imported')")
    result = shell(
        "check --json --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32", PYTHONPATH=str(tmp_path)
    )
    assert result.returncode == 1, result.stderr
    facts = json.loads(result.stdout)
    assert facts["engine"] == "vllm==0.19.1"
    assert "vllm 0.19.1, which is installed here" in facts["assumed"]


def test_a_backend_of_a_plugin_is_found_without_an_engine(tmp_path: Path) -> None:
    installed(tmp_path, "mine", "1.0", "[blocktable.contracts]\nmine = mine_contracts:CONTRACTS\n")
    (tmp_path / "mine_contracts.py").write_text(
        "from blocktable import Contract, TokenMultiple\n"
        "CONTRACTS = [Contract('MY_KERNEL', kernel_block_sizes=(32,), width_rule=TokenMultiple(256), engine='mine'),\n"
        "             Contract('MY_VLLM_KERNEL', width_rule=TokenMultiple(256))]\n"
    )
    line = "check --json --backend {} --max-model-len 9416 --block-size 32"
    result = shell(line.format("MY_KERNEL"), PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["engine"], facts["width"]) == ("mine", 295)
    assert "does not know mine" in " ".join(facts["assumed"])
    result = shell(line.format("MY_VLLM_KERNEL"), PYTHONPATH=str(tmp_path))
    assert json.loads(result.stdout)["width"] == 296, result.stderr
    assert result.returncode == 0
