"""What a pool holds: the figures that vLLM 0.32 logged for the same models on a CPU, and what is not known."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.cli.flags import parse_bytes
from blocktable.errors import ArgumentError

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
LLAMA = {**SIZES, "model_type": "llama"}
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "max_position_embeddings": 16384,
}
SPARSE = {**LATENT, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
WINDOW = {**SIZES, "model_type": "mistral", "sliding_window": 1024}
SIX = {
    **SIZES,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
ALTERNATING = {**SIX, "model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"] * 3}
THREE_TO_FOUR = {
    **SIX,
    "model_type": "llama",
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 4,
}
HYBRID = {
    **SIZES,
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT_80B = {
    **HYBRID,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(config: dict[str, Any], line: str, *, engine: str = "vllm==0.32.0") -> tuple[int, Any]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        before, _, after = line.partition("--")
        code = run(
            ["check", "--json", "--engine", engine, "--model", str(tmp_path), *shlex.split(f"{before}--{after}")]
        )
        return code, json.loads(capsys.readouterr().out)

    return ask


# Blocks, requests of full length at once and the length, as vLLM 0.32.0 itself logged them here.
SEEN = [
    (LLAMA, "--max-model-len 4096 --block-size 32 --gpu-memory 4.4MiB", 140, 1.09375, 4096),
    (LLAMA, "--max-model-len auto --block-size 32 --gpu-memory 4.4MiB", 140, 140 / 139, 4448),
    (LLAMA, "--max-model-len 4096 --block-size 32 --num-gpu-blocks-override 129", 129, 129 / 128, 4096),
    (LLAMA, "--max-model-len 4096 --gpu-memory 6MiB", 48, 1.5, 4096),
    (LATENT, "--max-model-len 4096 --backend CPU_MLA --gpu-memory 9.7MiB", 275, 1.07421875, 4096),
    (LATENT, "--max-model-len auto --backend CPU_MLA --gpu-memory 9.7MiB", 275, 275 / 274, 4384),
    (WINDOW, "-- vllm serve M --max-num-batched-tokens 512 --kv-cache-memory-bytes 6M", 192, 3.9183673469387754, 4096),
    (SIX, "-- vllm serve M --max-num-batched-tokens 512 --kv-cache-memory-bytes 8M", 512, 1.7474402730375427, 4096),
    (ALTERNATING, "-- vllm serve M --max-num-batched-tokens 512 --kv-cache-memory-bytes 9M", 192, 192 / 161, 4096),
    (THREE_TO_FOUR, "-- vllm serve M --max-num-batched-tokens 512 --kv-cache-memory-bytes 12M", 192, 192 / 161, 4096),
    (HYBRID, "--max-model-len 4096 --gpu-memory 12MiB", 192, 192 / 38, 4096),
]


@pytest.mark.parametrize(("config", "line", "blocks", "requests", "length"), SEEN)
def test_blocks_and_requests_are_those_that_the_engine_logs(
    config: Any, line: str, blocks: int, requests: float, length: int, check: Any
) -> None:
    words = f"--max-model-len {length} --block-size 32 {line}" if line.startswith("-- ") else line
    code, answer = check(config, f"--gpu cpu {words}")
    assert (code, answer["max_model_len"]) == (0, length)
    assert answer["memory"]["num_blocks"] == blocks
    assert answer["memory"]["requests"] == pytest.approx(requests)


LAYERS_61 = {**LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
PER_LAYER = 576 * 2  # bytes per token of a latent in 16 bits
STAGES = [  # a launch, and how many layers the stage keeps that keeps most
    ("", 61),
    ("-pp 2", 31),
    ("-pp 4", 16),
    ("-pp 61", 1),
    ("-pp 1 -sc.method mtp -sc.num_speculative_tokens 2", 62),
    ("-pp 2 -sc.method mtp -sc.num_speculative_tokens 2", 31),
    ("-pp 61 -sc.method mtp -sc.num_speculative_tokens 2", 2),
]


@pytest.mark.parametrize(("line", "layers"), STAGES)
def test_the_fullest_stage_decides_and_the_last_one_has_the_layers_that_draft(
    line: str, layers: int, check: Any
) -> None:
    words = (
        f"--gpu h100 --backend TRITON_MLA --gpu-memory 1GiB -- vllm serve M --max-model-len 8192 --block-size 64 {line}"
    )
    code, answer = check(LAYERS_61, words)
    assert code == 0
    assert answer["memory"]["bytes_per_token"] == layers * PER_LAYER
    assert answer["memory"]["num_blocks"] == 2**30 // (64 * layers * PER_LAYER)
    draft = [group["layers"] for group in answer["groups"] if group["kind"] == "draft full"]
    assert draft == ([1] if "mtp" in line else [])


def test_a_partition_of_the_launchs_own(check: Any) -> None:
    line = (
        "--backend TRITON_MLA -- VLLM_PP_LAYER_PARTITION=20,41 vllm serve M --max-model-len 8192 -pp 2 --block-size 64"
    )
    assert check(LAYERS_61, line)[1]["memory"]["bytes_per_token"] == 41 * PER_LAYER
    assert run(["check", *shlex.split(line.replace("20,41", "20,30,11"))]) == 2
    assert run(["check", *shlex.split(line.replace("20,41", "20,many"))]) == 2


@pytest.mark.parametrize("family", ["glm4_moe", "falcon", "gpt_neox", "olmoe"])
def test_families_whose_layers_all_keep_the_whole_context(family: str, check: Any) -> None:
    answer = check(
        {**LLAMA, "model_type": family}, "--gpu h100 --max-model-len 4096 --gpu-memory 4.4MiB --block-size 32"
    )[1]
    assert answer["memory"]["num_blocks"] == 140  # as a Llama of these sizes
    assert not any("full-attention group" in text for text in answer["assumed"])


def test_a_pool_too_small_for_one_request_is_refused(check: Any) -> None:
    line = "--gpu cpu --max-model-len 8192 --block-size 32 --gpu-memory 4.4MiB"
    code, answer = check(LLAMA, line)
    assert code == 1
    assert answer["error"].startswith(
        "ValueError: To serve at least one request with the model's max seq len (8192), (0.01 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum model "
        "length is 4448."
    )
    for way in answer["ways_out"]:
        assert check(LLAMA, f"{line} {way.replace('--kv-cache-memory-bytes', '--gpu-memory')}")[0] == 0, way
    assert {"--max-model-len 4448", f"--kv-cache-memory-bytes {257 * 32768}"} <= set(answer["ways_out"])


def test_the_null_block_is_set_aside_since_0_29(check: Any) -> None:
    line = "--gpu h100 --max-model-len 4096 --block-size 32 --num-gpu-blocks-override 128"
    assert check(LLAMA, line, engine="vllm==0.29.0")[0] == 1
    assert check(LLAMA, line, engine="vllm==0.28.0")[0] == 0


def test_heads_are_split_over_ranks_and_latents_are_not(check: Any) -> None:
    for ranks, per_token in ((1, 1024), (2, 512), (4, 512)):
        answer = check(LLAMA, f"--gpu h100 --max-model-len 4096 -tp {ranks}")[1]
        assert answer["memory"]["bytes_per_token"] == per_token
        answer = check(LATENT, f"--gpu h100 --max-model-len 4096 -tp {ranks}")[1]
        assert answer["memory"]["bytes_per_token"] == 2 * 576 * 2


@pytest.mark.parametrize(("dtype", "per_token"), [("auto", 1024), ("bfloat16", 1024), ("fp8", 512), ("fp8_e4m3", 512)])
def test_the_dtype_of_the_cache_decides_its_bytes(dtype: str, per_token: int, check: Any) -> None:
    line = f"--gpu h100 --backend FLASH_ATTN --max-model-len 4096 --kv-cache-dtype {dtype}"
    assert check(LLAMA, line)[1]["memory"]["bytes_per_token"] == per_token


def test_a_sparse_model_keeps_an_index_beside_its_latent(check: Any) -> None:
    line = "--gpu h100 --max-model-len 4096 --block-size 64 --backend FLASHMLA_SPARSE --kv-cache-dtype"
    assert check(SPARSE, f"{line} bfloat16")[1]["memory"]["bytes_per_token"] == 2 * (576 * 2 + 132)
    assert check(SPARSE, f"{line} fp8")[1]["memory"]["bytes_per_token"] == 2 * (656 + 132)
    assert check(SPARSE, f"{line} auto")[1]["memory"]["bytes_per_token"] == 2 * (576 * 2 + 132)


def test_ranks_share_a_request(check: Any) -> None:
    line = "--gpu h100 --max-model-len 4096 --block-size 64 --backend FLASHMLA --gpu-memory 9.7MiB"
    assert check(LATENT, line)[1]["memory"]["blocks_per_request"] == 64
    assert check(LATENT, f"{line} --cp-size 2")[1]["memory"]["blocks_per_request"] == 32


def test_what_is_missing_is_named(check: Any) -> None:
    code, answer = check(WINDOW, "--gpu h100 --max-model-len 4096 --gpu-memory 6MiB")
    assert code == 0
    assert "--max-num-batched-tokens" in answer["memory"]["missing"][0]
    assert any("a pool that holds a request" in text for text in answer["assumed"])
    code, answer = check({**LLAMA, "model_type": "novel"}, "--gpu h100 --max-model-len 4096 --gpu-memory 6MiB")
    assert answer["memory"] is None
    assert any("what the layers of" in text for text in answer["assumed"])
    code, answer = check({**LLAMA, "model_type": "novel"}, "--gpu h100 --max-model-len auto --gpu-memory 6MiB")
    assert code == 3
    assert "auto follows from the memory and from what the model keeps" in answer["missing"][0]
    quantized = {**LLAMA, "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    assert check(quantized, "--gpu h100 --max-model-len 4096")[1]["memory"] is None
    assert (
        check(quantized, "--gpu h100 --max-model-len 4096 --kv-cache-dtype fp8")[1]["memory"]["bytes_per_token"] == 512
    )


@pytest.mark.parametrize(
    ("config", "engine", "line", "block"),
    [
        (QWEN3_NEXT_80B, "vllm==0.32.0", "", 544),
        (QWEN3_NEXT_80B, "vllm==0.20.0", "", 544),
        (QWEN3_NEXT_80B, "vllm==0.32.0", "--block-size 16", 544),
        (QWEN3_NEXT_80B, "vllm==0.32.0", "--block-size 1024", 1024),
        (QWEN3_NEXT_80B, "vllm==0.32.0", "--kv-cache-dtype fp8", 1072),
        (HYBRID, "vllm==0.32.0", "", 80),
    ],
)
def test_the_block_of_a_hybrid_model_holds_its_state(
    config: Any, engine: str, line: str, block: int, check: Any
) -> None:
    answer = check(config, f"--gpu h100 --max-model-len 9416 {line}", engine=engine)[1]
    assert (answer["verdict"], answer["block_size"]) == ("accepted", block)


def test_a_state_that_is_not_known_leaves_the_block_open(check: Any) -> None:
    code, answer = check({**HYBRID, "linear_conv_kernel_dim": None}, "--gpu h100 --max-model-len 9416")
    assert code == 3
    assert answer["missing"][0].startswith("block_size (--block-size): the size of a recurrent state")
    assert check(QWEN3_NEXT_80B, "--gpu h100 --max-model-len 9416", engine="vllm==0.19.1")[0] == 3


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "9.7MiBs", "1.5K", "auto", "ten", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_bytes(text, "--gpu-memory")


def test_two_steps_under_way_are_said(check: Any) -> None:
    line = (
        "--gpu h100 --max-model-len 4096 --block-size 32 --gpu-memory 6MiB -- vllm serve M --max-num-batched-tokens 512"
    )
    answer = check(WINDOW, line)[1]
    assert answer["memory"]["blocks_per_request"] == 65  # 1023 of the window and 2 · 512 under way, in blocks of 32
    assert any("asynchronous scheduling" in text for text in answer["assumed"])
    for more, engine, blocks in (
        ("--no-async-scheduling", "0.32.0", 49),
        ("--async-scheduling", "0.32.0", 65),
        ("", "0.25.1", 49),
    ):
        answer = check(WINDOW, f"{line} {more}", engine=f"vllm=={engine}")[1]
        assert answer["memory"]["blocks_per_request"] == blocks
        assert not any("asynchronous scheduling" in text for text in answer["assumed"])
