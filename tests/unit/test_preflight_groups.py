"""Several groups at once: full attention, windows, an index, a recurrent state, a draft model, each with its own sizes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
WINDOWS = {
    **LLAMA,
    "model_type": "gemma2",
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SPARSE = {
    **LLAMA,
    "model_type": "deepseek_v32",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "index_topk": 2048,
    "index_head_dim": 128,
}
HYBRID = {
    **LLAMA,
    "model_type": "qwen3_next",
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(config: Any, line: str, *, draft: Any = None, **speculative: Any) -> tuple[int, Any]:
        for name, one in {"model": config, "draft": draft}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(one))
        if draft:
            speculative["model"] = str(tmp_path / "draft")
        extra = f"-sc {shlex.quote(json.dumps(speculative))}" if speculative else ""
        words = f"--engine vllm==0.32.0 --gpu h100 -- vllm serve {tmp_path}/model --max-model-len 9416 {line} {extra}"
        code = run(["check", "--json", *shlex.split(words)])
        return code, json.loads(capsys.readouterr().out)

    return ask


def sizes(answer: Any) -> dict[str, Any]:
    return {one["kind"]: (one["layers"], one["backend"], one["block_size"], one["width"]) for one in answer["groups"]}


def test_windows_and_full_attention(check: Any) -> None:
    code, answer = check(WINDOWS, "--block-size 64")
    assert (code, sizes(answer)) == (0, {"full": (2, "FLASH_ATTN", 64, 148), "window": (2, "FLASH_ATTN", 64, 148)})


def test_a_sparse_model_has_an_index(check: Any) -> None:
    code, answer = check(SPARSE, "--attention-backend FLASHMLA_SPARSE --block-size 64")
    assert (code, sizes(answer)["index"]) == (0, (4, "DEEPSEEK_V32_INDEXER", 64, 148))


def test_a_state_is_widened_by_drafts_and_not_divided(check: Any) -> None:
    plain = check(HYBRID, "-tp 1")[1]
    assert sizes(plain) == {"full": (1, "FLASH_ATTN", 544, 20), "state": (3, None, 544, 18)}
    drafting = check(HYBRID, "", method="mtp", num_speculative_tokens=3)[1]
    assert drafting["block_size"] > 544  # the convolution keeps the inputs of drafts too
    rows = -(-9416 // drafting["block_size"])
    assert sizes(drafting)["state"][3] == rows + 3
    assert check(HYBRID, "--no-enable-prefix-caching")[1]["groups"][-1]["width"] == 1


def test_context_parallel_ranks_divide_attention_and_not_the_state(check: Any) -> None:
    # By hand: a quarter of a state is 274,432 bytes, 268 tokens of 1,024, so blocks are of 272. Two ranks share a row of
    # attention: ceil(9416 / (272 * 2)) = 18 blocks, a multiple of 128 / gcd(128, 272) = 8: 24. The row of the state is
    # whole on each rank: ceil(9416 / 272) = 35.
    answer = check(HYBRID, "-tp 4 -dcp 2")[1]
    assert sizes(answer) == {"full": (1, "FLASH_ATTN", 272, 24), "state": (3, None, 272, 35)}
    assert sizes(check(HYBRID, "-tp 4")[1]) == {"full": (1, "FLASH_ATTN", 272, 40), "state": (3, None, 272, 35)}


COPIES = [  # queries and keys of a model, tensor-parallel and context-parallel ranks, and what vLLM says
    (16, 2, 2, 2, "to be greater than the model's total number of KV heads (2)"),
    (16, 2, 4, 4, "exceeds the maximum supported value (2) for `--tensor-parallel-size` (4) and 2 model KV heads."),
    (48, 8, 48, 4, "heads per KV head (6) must be divisible by `--decode-context-parallel-size` (4) for GQA/MQA."),
]


@pytest.mark.parametrize(("heads", "keys", "split", "ranks", "error"), COPIES)
def test_context_parallelism_shares_a_row_among_the_copies_of_a_key(
    check: Any, heads: int, keys: int, split: int, ranks: int, error: str
) -> None:
    model = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": keys}
    code, answer = check(model, f"--block-size 64 -tp {split} -dcp {ranks}")
    assert (code, error in answer["error"]) == (1, True)
    assert "--decode-context-parallel-size 1" in answer["ways_out"]
    assert check(LLAMA, "--block-size 64 -tp 4 -dcp 2")[0] == 0


def test_a_draft_model_chooses_for_itself(check: Any) -> None:
    code, answer = check(
        LLAMA, "--block-size 64", draft={**LLAMA, "num_hidden_layers": 1}, method="eagle3", num_speculative_tokens=2
    )
    assert code == 0
    assert sizes(answer)["draft full"] == (1, "FLASH_ATTN", 64, 148)
    assert answer["memory"]["bytes_per_token"] == 5 * 2 * 2 * 128 * 2  # its layers join the pool


def test_a_draft_model_that_takes_other_blocks_is_refused(check: Any) -> None:
    code, answer = check(
        LLAMA,
        "--block-size 16 --attention-backend FLASH_ATTN",
        draft=LLAMA,
        method="draft_model",
        num_speculative_tokens=2,
        attention_backend="hpc_attn",
    )
    assert code == 1
    assert answer["reason"].startswith("the draft model: no kernel block divides 16 and suits HPC_ATTN (64)")
    assert "no --speculative-config" in answer["ways_out"]


def test_a_draft_model_elsewhere_is_assumed_to_fit(check: Any) -> None:
    code, answer = check(LLAMA, "--block-size 64", method="eagle3", model="org/draft", num_speculative_tokens=2)
    assert code == 0
    assert any("a draft model whose attention takes blocks of this size" in text for text in answer["assumed"])
    assert answer["memory"] is None
    assert not any(
        "draft model" in text for text in check(LLAMA, "", method="ngram", num_speculative_tokens=2)[1]["assumed"]
    )
