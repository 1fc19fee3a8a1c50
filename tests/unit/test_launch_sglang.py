"""SGLang's launch lines: read as SGLang reads them, judged by its release, answered in its flags."""

import json
import shlex
from pathlib import Path
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
        "environment": {"CUDA_VISIBLE_DEVICES": "0"},
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
        ("sglang serve --config nowhere.yaml", "cannot be read"),
        ("sglang serve --config x.json", "SGLang reads .yaml"),
        ("sglang serve --config", "names one file"),
        ("sglang serve --config=x.yaml", "SGLang does not read"),
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


def test_a_file_comes_before_the_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model-path: M\npage_size: 16\nattention-backend: trtllm_mla\ntrust-remote-code: true\n")
    read = read_launch(["sglang", "serve", "--config", str(file), "--page-size", "32"])
    assert (read.model, read.block_size, read.backend) == ("M", 32, "trtllm_mla")


SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 4, "max_position_embeddings": 32768}
LATENT = {**SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "gpu", "more", "backend", "block"),
    [
        ({**SIZES, "model_type": "llama"}, "h100", "", "fa3", 1),
        ({**SIZES, "model_type": "llama"}, "h100", "--page-size 16", "fa3", 16),
        ({**SIZES, "model_type": "llama"}, "b200", "", "trtllm_mha", 64),
        ({**SIZES, "model_type": "llama"}, "rtx-pro-6000", "", "flashinfer", 1),
        ({**SIZES, "model_type": "llama"}, "mi300x", "", "aiter", 1),
        ({**SIZES, "model_type": "llama"}, "cpu", "", "intel_amx", 1),
        ({**SIZES, "model_type": "glm4_moe"}, "b200", "", "trtllm_mha", 64),
        ({"text_config": {**SIZES, "model_type": "gemma3_text"}}, "h100", "", "fa3", 1),
        ({"text_config": {**SIZES, "model_type": "llama4_text"}}, "rtx-pro-6000", "", "triton", 1),
        ({**SIZES, "model_type": "gpt_oss"}, "a100", "", "triton", 1),
        ({**SIZES, "model_type": "llama"}, "h100", "--kv-cache-dtype fp8_e5m2", "triton", 1),
        ({**SIZES, "model_type": "llama"}, "h100", "--attention-backend fa3 --kv-cache-dtype fp8_e5m2", "triton", 1),
        ({**LATENT, "model_type": "deepseek_v2"}, "cpu", "", "intel_amx", 1),
        ({**LATENT, "model_type": "deepseek_v2"}, "b200", "", "flashinfer", 1),
        ({**LATENT, "model_type": "deepseek_v3"}, "b200", "--page-size 16", "trtllm_mla", 64),
        ({**LATENT, "model_type": "deepseek_v3"}, "h100", "", "fa3", 1),
        ({**LATENT, "model_type": "deepseek_v3"}, "rtx-pro-6000", "", "triton", 1),
        ({**LATENT, "model_type": "deepseek_v32", "index_topk": 2048}, "b200", "--page-size 16", "dsa", 64),
        ({**SIZES, "model_type": "llama"}, "b200", "--attention-backend fa4 --page-size 16", "fa4", 128),
        ({**LATENT, "model_type": "deepseek_v3"}, "b200", "--attention-backend fa4 --page-size 16", "fa4", 16),
        ({**SIZES, "model_type": "llama"}, "xpu", "--attention-backend intel_xpu --page-size 16", "intel_xpu", 128),
        (
            {**LATENT, "model_type": "deepseek_v3"},
            "xpu",
            "--attention-backend intel_xpu --page-size 16",
            "intel_xpu",
            16,
        ),
    ],
)
def test_what_it_takes_by_itself(
    config: Any, gpu: str, more: str, backend: str, block: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, answer = check(f"--gpu {gpu} -- sglang serve --model-path {tmp_path} --context-length 9416 {more}", capsys)
    assert (code, answer["backend"], answer["block_size"]) == (0, backend, block)


@pytest.mark.parametrize(
    "more", ["--speculative-algorithm EAGLE", "--speculative-algorithm EAGLE --speculative-eagle-topk 4"]
)
def test_trees_of_drafts_leave_its_choice_open(more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    line = f"--gpu b200 -- sglang serve --model-path {tmp_path} --context-length 9416"
    assert check(f"{line} {more}", capsys)[0] == 3
    assert check(f"{line} --speculative-algorithm EAGLE --speculative-eagle-topk 1", capsys)[0] == 0
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "novel"}))
    code, answer = check(line, capsys)
    assert code == 3
    assert "the order in which sglang 0.5.23 tries backends on 10.0" in answer["missing"][0]


def test_a_device_is_hardware_and_overrides_are_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    line = f"-- sglang serve --model-path {tmp_path}"
    code, answer = check(
        f"{line} --device cpu --json-model-override-args '{{\"max_position_embeddings\": 100}}'", capsys
    )
    assert (code, answer["backend"], answer["max_model_len"]) == (0, "intel_amx", 100)
    assert check(f"{line} --device cuda", capsys)[0] == 3
    assert check(f"{line} --json-model-override-args {{a}}", capsys)[0] == 2
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "novel"}))
    answer = check(f"{line} --device cpu", capsys)[1]
    assert "the order in which sglang 0.5.23 tries backends on cpu" in answer["missing"][0]


def test_a_verification_widens_rows(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-- sglang serve --attention-backend trtllm_mha --page-size 16 --context-length"
    plain = check(f"{line} 9408", capsys)[1]
    drafting = check(f"{line} 9408 --speculative-num-draft-tokens 4", capsys)[1]
    assert (plain["width"], drafting["width"]) == (588, 589)
    assert any("4 draft tokens of a verification" in text for text in drafting["assumed"])


def test_chunks_of_a_prefill_are_whole_pages(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-- sglang serve --attention-backend trtllm_mla --context-length 9416 --page-size 16 --chunked-prefill-size"
    code, answer = check(f"{line} 2080", capsys)  # whole pages of 16, but the page becomes 64
    assert (code, answer["error"]) == (1, "AssertionError: chunked_prefill_size must be divisible by page_size")
    for chunk in ("2048", "-1", "0"):
        assert check(f"{line} {chunk}", capsys)[0] == 0
    assert check(f"{line} many", capsys)[0] == 2
