"""SGLang's launch lines: read as SGLang reads them, judged by its release, answered in its flags."""

import json
import shlex
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.cli.launch import Launch, read_launch
from blocktable.errors import ArgumentError

LINES: dict[str, dict[str, Any]] = {
    "python -m sglang.launch_server --model-path M --attention-backend trtllm_mla --page-size 16": {
        "model": "M",
        "backend": "trtllm_mla",
        "block_size": 16,
    },
    "CUDA_VISIBLE_DEVICES=0 python3.11 -m sglang.launch_server --model=M --tp 8 --dcp-size 2 --context-length=9416": {
        "model": "M",
        "tensor_parallel": 8,
        "decode_context_parallel": 2,
        "max_model_len": 9416,
    },
    "sglang serve --model-path M --attention-backend fa3 --decode-attention-backend flashmla --port 30000": {
        "model": "M",
        "backend": "flashmla",
    },
    "sglang serve --model-path M --page-size 16 --page-size 32 --speculative-num-draft-tokens 4": {
        "model": "M",
        "block_size": 32,
        "speculative_tokens": 4,
    },
    "sglang serve --model-path M --trust-remote-code --mem-fraction-static 0.8": {"model": "M"},
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_read(line: str) -> None:
    facts = LINES[line]
    read = read_launch([line])
    assert read == Launch(engine="sglang", **facts)
    assert read == read_launch(shlex.split(line))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sglang serve --page-size", "expected one argument"),
        ("sglang serve --page-size 0", "must be positive"),
        ("sglang serve --page-size many", "--page-size"),
        ("sglang serve --config x.yaml", "from a file"),
        ("sglang generate M", "does not start a server"),
    ],
)
def test_what_is_no_launch_is_refused(line: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        read_launch([line])


def check(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = run(["check", "--json", *shlex.split(line)])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_the_effective_page_of_a_launch_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-- sglang serve --model-path M --attention-backend trtllm_mla --context-length 9416 --page-size 16"
    code, answer = check(line, capsys)
    assert (code, answer["engine"], answer["block_size"], answer["width"]) == (0, "sglang==0.5.23", 64, 192)
    assert "changes blocks of 16 to 64" in answer["reason"]
    options = "--engine sglang==0.5.23 --backend trtllm_mla --page-size 16 --context-length 9416"
    assert check(options, capsys)[1]["reason"] == answer["reason"]


def test_aliases_of_a_launch_line(capsys: pytest.CaptureFixture[str]) -> None:
    for alias, name in {"nsa": "dsa", "tokenspeed_mla": "cutedsl_mla", "compressed": "dsv4"}.items():
        code, answer = check(f"-- sglang serve --attention-backend {alias} --context-length 9416", capsys)
        assert (code, answer["backend"]) == (0, name)
    assert check("-- sglang serve --attention-backend cutlass_mla --context-length 9416", capsys)[0] == 2


def test_a_line_and_a_release_of_another_engine_are_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--engine vllm==0.32.0 -- sglang serve --model-path M", capsys)[0] == 2
    assert check("--engine sglang -- vllm serve M", capsys)[0] == 2
