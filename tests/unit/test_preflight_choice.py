"""Who will run: the release's own choice by GPU and model, what it passes over, and what a named backend is refused for."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.contracts import MultipleOf, resolve_engine
from blocktable.contracts.hardware import capability
from blocktable.errors import ArgumentError, UnknownName
from blocktable.preflight import Launch, Model, judge, read_model
from blocktable.preflight.choice import choose

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40},
}
SPARSE = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048}
HYBRID = {**LLAMA, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("--backend FLASH_ATTN_MLA --block-size 64 --kv-cache-dtype fp8", "refused"),
        ("--backend FLASH_ATTN_MLA --block-size 64 --kv-cache-dtype bfloat16", "accepted"),
        ("--backend FLASH_ATTN --block-size 64 --kv-cache-dtype fp8 --gpu h100", "accepted"),
        ("--backend FLASH_ATTN --block-size 64 --kv-cache-dtype fp8 --gpu a100", "refused"),
        ("--backend FLASH_ATTN --block-size 64 --kv-cache-dtype fp8_e5m2", "refused"),
        ("--backend TOKENSPEED_MLA --block-size 64 --kv-cache-dtype fp8", "accepted"),
        ("--backend TOKENSPEED_MLA --block-size 64 --kv-cache-dtype bfloat16", "refused"),
        ("--backend CPU_MLA --kv-cache-dtype fp8", "refused"),
        ("--backend TURBOQUANT --block-size 64 --kv-cache-dtype turboquant_k8v4", "accepted"),
    ],
)
def test_the_dtype_of_the_cache_decides(line: str, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["check", "--json", "--engine", "vllm==0.32.0", "--max-model-len", "9416", *line.split()])
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == verdict
    if verdict == "refused" and "CPU" not in line:
        assert "kv_cache_dtype not supported" in answer["error"]
        assert "--kv-cache-dtype auto" in answer["ways_out"] or "TOKENSPEED" in line


@pytest.mark.parametrize(
    ("head", "gpu", "backend", "dtype", "block", "kernel"),
    [
        (512, "h100", "FLASH_ATTN", "fp8", 16, None),  # FA4's page is its tile of 64
        (512, "h100", "FLASH_ATTN", "fp8", 128, 64),
        (512, "h100", "FLASH_ATTN", "bfloat16", 128, 128),
        (128, "h100", "FLASH_ATTN", "fp8", 16, 16),
        (None, "b200", "FLASHMLA_SPARSE", "fp8", 128, 64),
        (None, "b200", "FLASHMLA_SPARSE", "bfloat16", 128, 64),  # the indexer takes 64 only
        (None, "h100", "FLASHMLA_SPARSE", "fp8", 128, 64),
    ],
)
def test_kernel_blocks_depend_on_the_dtype_of_the_cache(
    head: int | None, gpu: str, backend: str, dtype: str, block: int, kernel: int | None, tmp_path: Path
) -> None:
    config = SPARSE if head is None else {**LLAMA, "head_dim": head}
    (tmp_path / "config.json").write_text(json.dumps(config))
    launch = Launch(
        resolve_engine("vllm==0.32.0"),
        backend,
        max_model_len=9416,
        block_size=block,
        hardware=capability(gpu),
        model=read_model(tmp_path),
        kv_dtype=dtype,
    )
    answer = judge(launch)
    assert (answer.verdict, answer.kernel_block_size) == ("refused" if kernel is None else "accepted", kernel)
    if backend == "FLASHMLA_SPARSE":
        alone = launch.contract.kernel_block_sizes
        assert alone == ((64,) if (gpu, dtype) == ("b200", "fp8") else (MultipleOf(64),))


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path)

    return write


def test_a_config_is_read(model: Any, tmp_path: Path) -> None:
    llama = model(LLAMA)
    assert (llama.kind, llama.head_size, llama.heads, llama.kv_heads, llama.layers) == ("gqa", 128, 32, 8, 32)
    assert (llama.sparse, llama.state, llama.max_model_len) == (False, False, 8192)
    assert read_model(tmp_path / "config.json").head_size == 128
    deepseek = model(DEEPSEEK)
    assert (deepseek.kind, deepseek.head_size, deepseek.qk_nope_head_size) == ("mla", 576, 128)
    assert deepseek.max_model_len is None  # a scaled rope decides it
    assert model(SPARSE).sparse
    assert model(HYBRID).state
    assert model({"model_type": "gemma3", "text_config": {**LLAMA, "head_dim": 256}}).head_size == 256


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no num_attention_heads"),
        ([], "no object"),
        ({"num_attention_heads": "many"}, "not a count"),
        ({"num_attention_heads": 8}, "neither head_dim nor hidden_size"),
        ({**DEEPSEEK, "compress_ratios": [4]}, "compressed layers"),
    ],
)
def test_what_is_no_text_model_is_refused(config: Any, says: str, model: Any) -> None:
    with pytest.raises(ArgumentError, match=says):
        model(config)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read a model"):
        read_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="it is no JSON"):
        read_model(tmp_path)


def test_gpus_by_name() -> None:
    named = {"h100": "9.0", "H200": "9.0", "b200": "10.0", "b300": "10.3", "rtx-pro-6000": "12.0", "mi300x": "rocm"}
    assert {name: capability(name) for name in named} == named
    assert [capability(one) for one in ("cpu", "9.0", "sm120", "NVIDIA H100")] == ["cpu", "9.0", "12.0", "9.0"]
    with pytest.raises(UnknownName, match="no GPU 'h1000'"):
        capability("h1000")


# Release, GPU, model, tensor-parallel ranks: what vLLM's own selection comes to.
CHOICES = [
    ("0.32.0", "h100", LLAMA, 1, "FLASH_ATTN"),
    ("0.32.0", "b200", LLAMA, 1, "FLASHINFER"),
    ("0.32.0", "rtx-pro-6000", LLAMA, 1, "FLASH_ATTN"),
    ("0.32.0", "mi300x", LLAMA, 1, "ROCM_ATTN"),
    ("0.32.0", "cpu", LLAMA, 1, "CPU_ATTN"),
    ("0.32.0", "h100", DEEPSEEK, 1, "FLASH_ATTN_MLA"),
    ("0.32.0", "b200", DEEPSEEK, 1, "FLASHINFER_MLA"),
    ("0.32.0", "b300", {**DEEPSEEK, "qk_nope_head_dim": 256}, 1, "CUTLASS_MLA"),
    ("0.32.0", "rtx-pro-6000", DEEPSEEK, 1, "TRITON_MLA"),
    ("0.23.0", "rtx-pro-6000", DEEPSEEK, 1, "TRITON_MLA"),
    ("0.32.0", "mi300x", DEEPSEEK, 1, "TRITON_MLA"),
    ("0.32.0", "h100", SPARSE, 1, "FLASH_ATTN_MLA_SPARSE"),
    ("0.24.0", "h100", SPARSE, 1, "FLASHMLA_SPARSE"),
    ("0.32.0", "b200", SPARSE, 1, "FLASHMLA_SPARSE"),
    ("0.32.0", "b200", SPARSE, 8, "FLASHINFER_MLA_SPARSE"),
    ("0.32.0", "rtx-pro-6000", SPARSE, 8, "FLASHINFER_MLA_SPARSE_SM120"),
    ("0.32.0", "a100", {**LLAMA, "head_dim": 512}, 1, "FLASHINFER"),
    ("0.26.0", "a100", {**LLAMA, "head_dim": 512}, 1, "TRITON_ATTN"),
    ("0.32.0", "h100", {**LLAMA, "head_dim": 512}, 1, "FLASH_ATTN"),
    # Attention sinks: FlashAttention 2 takes none, and FlashInfer on Hopper and RTX only from some release on.
    ("0.32.0", "a100", {**LLAMA, "model_type": "gpt_oss"}, 1, "TRITON_ATTN"),
    ("0.32.0", "h100", {**LLAMA, "model_type": "gpt_oss"}, 1, "FLASH_ATTN"),
    ("0.32.0", "b200", {**LLAMA, "model_type": "gpt_oss"}, 1, "FLASHINFER"),
    ("0.32.0", "rtx-pro-6000", {**LLAMA, "model_type": "gpt_oss"}, 1, "FLASHINFER"),
    ("0.27.0", "rtx-pro-6000", {**LLAMA, "model_type": "gpt_oss"}, 1, "TRITON_ATTN"),
    ("0.19.0", "b200", {**LLAMA, "model_type": "gpt_oss"}, 1, "FLASHINFER"),
    ("0.32.0", "mi300x", {**LLAMA, "model_type": "gpt_oss"}, 1, "TRITON_ATTN"),
]


@pytest.mark.parametrize(("version", "gpu", "config", "ranks", "chosen"), CHOICES)
def test_the_choice(version: str, gpu: str, config: dict[str, Any], ranks: int, chosen: str, model: Any) -> None:
    release = resolve_engine(f"vllm=={version}")
    launch = Launch(release, None, hardware=capability(gpu), model=model(config), tensor_parallel=ranks)
    choice = choose(launch)
    assert choice is not None
    assert choice.backend == chosen
    assert all(reasons for _, reasons in choice.passed)


class Answer:
    """What the command printed and how it ended."""

    def __init__(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.code = run(["check", "--json", *shlex.split(line)])
        self.json = json.loads(capsys.readouterr().out)


def test_the_indexer_of_a_sparse_model_decides_with_its_attention(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(SPARSE)
    line = f"--gpu b200 --model {tmp_path} --max-model-len 9416 --engine"
    first = Answer(f"{line} vllm==0.30.0 -- vllm serve X -tp 8", capsys)  # takes the first backend's 32
    assert (first.code, first.json["block_size"]) == (1, 32)
    assert "DEEPSEEK_V32_INDEXER (64)" in first.json["reason"]
    assert {"--block-size 64", "vllm>=0.31"} <= set(first.json["ways_out"])
    common = Answer(f"{line} vllm==0.32.0 -- vllm serve X -tp 8", capsys)
    assert (common.code, common.json["block_size"]) == (0, 64)
    asked = Answer(f"{line} vllm==0.32.0 --block-size 16", capsys)
    assert asked.code == 1
    assert asked.json["ways_out"] == ["--block-size 64"]


def test_no_dense_backend_takes_blocks_of_8(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(LLAMA)
    for gpu in ("h100", "b200", "rtx-pro-6000"):
        answer = Answer(f"--engine vllm==0.32.0 --gpu {gpu} --model {tmp_path} --block-size 8", capsys)
        assert answer.code == 1
        assert "No valid attention backend found" in answer.json["error"]
        assert answer.json["ways_out"] == ["--block-size 16"]


@pytest.mark.parametrize(
    ("version", "gpu", "named", "config", "reasons"),
    [
        ("0.32.0", "h100", "FLASHINFER_MLA", DEEPSEEK, "['compute capability not supported']"),
        ("0.26.0", "h100", "FLASHINFER", {**LLAMA, "head_dim": 512}, "['head_size not supported']"),
        ("0.32.0", "b200", "TRITON_MLA", LLAMA, "['non-MLA not supported']"),
        ("0.32.0", "b200", "FLASHMLA", DEEPSEEK, "['FlashMLA Dense is only supported on Hopper devices.']"),
        (
            "0.32.0",
            "b200",
            "FLASHINFER_MLA",
            {**DEEPSEEK, "qk_nope_head_dim": 256},
            "['FlashInfer MLA kernel requires qk_nope_head_dim in [64, 128, 192], but got 256']",
        ),
    ],
)
def test_a_named_backend_that_does_not_suit(
    version: str,
    gpu: str,
    named: str,
    config: dict[str, Any],
    reasons: str,
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model(config)
    line = f"--engine vllm=={version} --gpu {gpu} --backend {named} --model {tmp_path} --max-model-len 9416"
    answer = Answer(line, capsys)
    assert answer.code == 1
    text = f"Selected backend AttentionBackendEnum.{named} is not valid for this configuration. Reason: {reasons}"
    assert answer.json["error"] == f"ValueError: {text}"


def test_what_is_missing_is_named(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(LLAMA)
    alone = Answer("--engine vllm==0.32.0 --gpu h100 --max-model-len 9416", capsys)
    assert (alone.code, alone.json["verdict"]) == (3, "unknown")
    assert "nor a model" in alone.json["missing"][0]
    alone = Answer(f"--engine vllm==0.32.0 --model {tmp_path}", capsys)
    assert alone.code == 3
    assert "nor a GPU" in alone.json["missing"][0]
    model(HYBRID)
    hybrid = Answer(f"--engine vllm==0.32.0 --gpu h100 --model {tmp_path}", capsys)
    assert hybrid.code == 3
    assert "recurrent state" in hybrid.json["missing"][0]
    asked = Answer(f"--engine vllm==0.32.0 --gpu h100 --model {tmp_path} --block-size 544", capsys)
    assert asked.code == 0
    assert any("may align it to the recurrent state" in one for one in asked.json["assumed"])
    model(DEEPSEEK)
    amx = Answer(f"--engine vllm==0.32.0 --gpu cpu --model {tmp_path} --max-model-len 9416", capsys)
    assert amx.code == 3
    assert "AMX" in amx.json["missing"][0]
    model({**DEEPSEEK, "model_type": "novel"})
    sglang = Answer(f"--engine sglang==0.5.23 --gpu h100 --model {tmp_path} --max-model-len 9416", capsys)
    assert sglang.code == 3
    assert "not in the catalogue" in sglang.json["missing"][0]


def test_what_a_layer_brings_itself_is_refused_in_the_worker(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--engine vllm==0.32.0 --backend DEEPSEEK_V32_INDEXER --max-model-len 9416 --block-size"
    refused = Answer(f"{line} 16", capsys)
    assert (refused.code, refused.json["error"]) == (1, "ValueError: No common block size for 16")
    assert Answer(f"{line} 64", capsys).code == 0


def test_a_cpu_ignores_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer("--engine vllm==0.32.0 --gpu cpu --backend FLASHINFER --max-model-len 9416 --block-size 16", capsys)
    assert (answer.code, answer.json["backend"]) == (1, "CPU_ATTN")
    assert "ignores FLASHINFER" in answer.json["assumed"][0]


def test_the_length_is_the_models_own(model: Any) -> None:
    launch = Launch(resolve_engine("vllm==0.32.0"), None, hardware="9.0", model=model(LLAMA))
    answer = judge(launch)
    assert (answer.verdict, answer.width) == ("accepted", 512)
    assert "8192" in answer.assumed[0]


@pytest.mark.parametrize(
    ("version", "gpu", "kv_heads", "code", "kernel"),
    [
        ("0.32.0", "b200", 8, 0, 256),
        ("0.32.0", "b200", 32, 0, 64),
        ("0.26.0", "b200", 8, 1, None),  # FlashInfer issue 4347
        ("0.26.0", "b200", 32, 0, 64),
        ("0.26.0", "h100", 8, 0, 64),
    ],
)
def test_pages_of_flashinfer_follow_the_gpu_and_the_heads(
    version: str,
    gpu: str,
    kv_heads: int,
    code: int,
    kernel: int | None,
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model({**LLAMA, "num_key_value_heads": kv_heads})
    line = f"--engine vllm=={version} --gpu {gpu} --model {tmp_path} --backend FLASHINFER --block-size 256"
    answer = Answer(line, capsys)
    assert (answer.code, answer.json["kernel_block_size"]) == (code, kernel)


@pytest.mark.parametrize(
    "line",
    [
        "--engine flashinfer==0.7.2 --backend auto --block-size 64 --gpu h100",
        "--engine sglang==0.5.23 --backend trtllm_mla --gpu h100",
        "--engine vllm==0.32.0 --backend CPU_ATTN --gpu h100",
    ],
)
def test_hardware_on_which_a_backend_does_not_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(f"{line} --max-model-len 9416", capsys)
    assert (answer.code, answer.json["error"]) == (1, None)
    assert "not on 9.0" in answer.json["reason"]


def test_a_length_past_the_models_own_is_said(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(LLAMA)
    line = f"--engine vllm==0.32.0 --gpu h100 --model {tmp_path} --max-model-len"
    longer = Answer(f"{line} 8193", capsys).json["assumed"]
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, since 8193 tokens are more than the 8192 of the model's config" in longer
    assert not any("ALLOW_LONG" in one for one in Answer(f"{line} 8192", capsys).json["assumed"])


def test_what_a_cpu_lacks_is_refused(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config, version, error in (
        (DEEPSEEK, "0.27.0", "NotImplementedError: MLA is not supported on CPU."),
        (SPARSE, "0.27.0", "NotImplementedError: MLA is not supported on CPU."),
        (SPARSE, "0.32.0", "NotImplementedError: Sparse Attention is not supported on CPU."),
    ):
        model(config)
        answer = Answer(f"--engine vllm=={version} --gpu cpu --model {tmp_path} --max-model-len 9416", capsys)
        assert (answer.code, answer.json["error"]) == (1, error)


def test_which_mla_runs_on_a_cpu_hangs_on_its_tiles(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model({name: value for name, value in DEEPSEEK.items() if name != "rope_scaling"})
    line = f"--gpu cpu --model {tmp_path} --max-model-len 9416 --backend"
    for version, backend, code, runs in (
        ("0.32.0", "FLASHMLA", 3, None),
        ("0.32.0", "CPU_MLA", 0, "CPU_MLA"),
        ("0.32.0", "AMX_MLA", 0, "AMX_MLA"),
        ("0.28.0", "FLASHMLA", 0, "CPU_MLA"),
    ):
        answer = Answer(f"--engine vllm=={version} {line} {backend}", capsys)
        assert (answer.code, answer.json["backend"]) == (code, runs)
        if backend == "FLASHMLA":
            assert any("ignores FLASHMLA on a CPU" in text for text in answer.json["assumed"])
