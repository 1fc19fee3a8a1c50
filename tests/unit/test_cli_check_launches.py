"""Launch lines as people post them: what decides is read from the line, the model and the environment, or is named."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.contracts.hardware import capability

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
}
LATENT = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "latent": LATENT,
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    "falcon": {
        **LLAMA,
        "model_type": "falcon",
        "num_key_value_heads": None,
        "num_kv_heads": 1,
        "num_attention_heads": 64,
    },
    "gemma": {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}},
    "kimi": {**LATENT, "model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1, 2, 3]}},
    "minimax-01": {**LLAMA, "model_type": "minimax_text_01", "attn_type_list": [0, 0, 1]},
    "minimax-m2": {**LLAMA, "model_type": "minimax_m2", "attn_type_list": [1, 1, 1]},
    "nemotron": {
        **LLAMA,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M*-M-M*-EM",
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def check(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(folder)

    def ask(line: str) -> tuple[int, Any]:
        code = run(["check", "--json", *shlex.split(line)])
        return code, json.loads(capsys.readouterr().out)

    return ask


NEWEST = "--engine vllm==0.32.0"


@pytest.mark.parametrize(
    ("line", "code", "facts"),
    [
        # The image's tag names the release; the model is where the container finds it, so its config is given beside it.
        (
            "--gpu b200 --model latent -- docker run --gpus all vllm/vllm-openai:v0.19.1 --model X -tp 8 --max-model-len 9416",
            1,
            {"engine": "vllm==0.19.1", "backend": "FLASHINFER_MLA", "width": 295},
        ),
        (
            f"{NEWEST} --gpu b200 --model latent -- docker run vllm/vllm-openai:v0.19.1 --model X -tp 8 --max-model-len 9416",
            0,
            {"engine": "vllm==0.32.0", "width": 296},
        ),
        (f"{NEWEST} --gpu h100 -- vllm serve gpt2", 0, {"max_model_len": 1024, "width": 64}),
        (
            f"{NEWEST} --gpu h100 -- vllm serve llama --hf-overrides '{{\"max_position_embeddings\": 262144}}'",
            0,
            {"max_model_len": 262144},
        ),
        (
            f"{NEWEST} --gpu h100 -- vllm serve gemma --hf-overrides.text_config.max_position_embeddings 4096",
            0,
            {"max_model_len": 4096},
        ),
        (
            "-- python -m sglang.launch_server --model-path llama --attention-backend fa3 --chunked-prefill-size 1000 --page-size 64",
            1,
            {"ways_out": ["--chunked-prefill-size 1024"]},
        ),
        (
            f"{NEWEST} --gpu h100 -- vllm serve llama --max-num-seqs 256 --max-num-batched-tokens 128",
            1,
            {"ways_out": ["--max-num-batched-tokens 256"]},
        ),
        # Whether the block is aligned to a state decides, and for these nobody has read how.
        (f"{NEWEST} --gpu h100 -- vllm serve kimi --max-model-len 9416", 3, {"width": None}),
        (f"{NEWEST} --gpu h100 -- vllm serve minimax-01 --max-model-len 9416", 3, {"width": None}),
        (f"{NEWEST} --gpu h100 -- vllm serve minimax-m2 --max-model-len 9416", 0, {"width": 592}),
        # Attention in 32 bits is Triton's alone.
        (
            f"{NEWEST} --gpu h100 -- vllm serve llama --dtype float32 --max-model-len 9416",
            0,
            {"backend": "TRITON_ATTN"},
        ),
        (
            f"{NEWEST} --gpu h100 -- vllm serve llama --dtype float32 --attention-backend FLASH_ATTN --max-model-len 9416",
            1,
            {"reason": "vllm 0.32.0 does not select FLASH_ATTN: dtype not supported"},
        ),
        (f"{NEWEST} --gpu cpu -- vllm serve llama --dtype float32 --max-model-len 9416", 0, {"backend": "CPU_ATTN"}),
        # A key of one head is on every rank, so that eight of them share a row.
        (f"{NEWEST} --gpu h100 -- vllm serve falcon -tp 8 -dcp 8 --max-model-len 9416", 0, {"width": 80}),
    ],
)
def test_what_a_line_decides(check: Any, line: str, code: int, facts: dict[str, Any]) -> None:
    found, answer = check(line)
    assert found == code, answer
    assert {name: answer[name] for name in facts} == facts


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (f"{NEWEST} --gpu mi300x -- VLLM_ROCM_USE_AITER=1 vllm serve latent --block-size 1", "VLLM_ROCM_USE_AITER"),
        (f"{NEWEST} --gpu h100 -- VLLM_MLA_DISABLE=1 vllm serve latent", "VLLM_MLA_DISABLE"),
        (
            f'{NEWEST} --gpu h100 -- vllm serve llama -ac \'{{"backend_per_kind": {{"full": "FLASHINFER"}}}}\'',
            "--attention-config",
        ),
        (f"{NEWEST} --gpu h100 -- vllm serve org/model --max-model-len 9416", "--model"),
        (f"{NEWEST} -- vllm serve llama --max-model-len 9416", "--gpu"),
        (
            f"{NEWEST} -- VLLM_ATTENTION_BACKEND=FLASHMLA vllm serve org/model --max-model-len 9416",
            "--attention-backend",
        ),
    ],
)
def test_what_decides_and_is_not_known_is_named(check: Any, line: str, names: str) -> None:
    code, answer = check(line)
    assert (code, names in answer["missing"][0]) == (3, True), answer["missing"]


def test_switched_off_switches_change_nothing(check: Any) -> None:
    line = "vllm serve latent --max-model-len 9416"
    plain = check(f"{NEWEST} --gpu mi300x -- {line}")
    assert check(f"{NEWEST} --gpu mi300x -- VLLM_ROCM_USE_AITER=0 VLLM_MLA_DISABLE=0 {line}") == plain
    assert plain[0] == 0


def test_a_variable_that_vllm_ignores_is_said_to_be_ignored(check: Any) -> None:
    answer = check(f"{NEWEST} --gpu b200 -- VLLM_ATTENTION_BACKEND=CUTLASS_MLA vllm serve latent --max-model-len 9416")[
        1
    ]
    assert answer["backend"] == "FLASHINFER_MLA"
    assert answer["assumed"][-1].startswith("nothing of VLLM_ATTENTION_BACKEND=CUTLASS_MLA")


def test_the_layers_of_a_drawn_hybrid(check: Any) -> None:
    groups = check(f"{NEWEST} --gpu h100 -- vllm serve nemotron --max-model-len 9416")[1]["groups"]
    assert [(one["kind"], one["layers"]) for one in groups] == [("full", 2), ("state", 6)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("Tesla-T4", "7.5"),
        ("t4", "7.5"),
        ("L4", "8.9"),
        ("l40s", "8.9"),
        ("4090", "8.9"),
        ("GeForce RTX 3090", "8.6"),
        ("A100-SXM4-80GB", "8.0"),
        ("AMD Instinct MI300X", "rocm"),
        ("rtx pro 6000 blackwell", "12.0"),
        ("h1000", None),
    ],
)
def test_names_of_gpus(name: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(LookupError):
            capability(name)
    else:
        assert capability(name) == expected
