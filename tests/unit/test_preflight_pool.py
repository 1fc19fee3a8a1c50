"""State blocks against requests at once, hashes against blocks, drafts against an interleave; group widths by cache kind."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run
from blocktable.contracts import resolve_engine
from blocktable.preflight import Launch, judge

HYBRID = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 32768,
}
STATES = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def check(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = run(["check", "--json", *shlex.split(line)])
    return code, json.loads(capsys.readouterr().out)


def test_requests_at_once_need_state_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    line = f"--engine vllm==0.32.0 --gpu h100 -- vllm serve {tmp_path} --num-gpu-blocks-override 200 --max-num-seqs"
    code, answer = check(f"{line} 256", capsys)
    assert code == 1
    assert answer["error"].startswith(
        "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (200). Each decode sequence requires one"
    )
    assert answer["ways_out"][:2] == ["--max-num-seqs 200", "--num-gpu-blocks-override 256"]
    assert check(f"{line} 200", capsys)[0] == 3  # the block size is the release's own alignment
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID, "linear_num_key_heads": 0}))
    assert check(f"{line} 256", capsys)[0] == 0  # no state, no such bound


def test_one_group_is_hashed_by_its_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--engine vllm==0.32.0 -- vllm serve M --attention-backend TRITON_MLA --max-model-len 9416 --block-size 64"
    code, answer = check(f"{line} --prefix-match-unit 48", capsys)
    assert code == 1
    assert answer["error"].startswith("ValueError: Invalid prefix_match_unit=48; with a single KV cache group")
    assert "no --prefix-match-unit" in answer["ways_out"]
    assert check(f"{line} --prefix-match-unit 64", capsys)[0] == 0
    assert check(f"{line} --prefix-match-unit 128 -dcp 2 -tp 2", capsys)[0] == 0  # a block stands for 64 · 2 tokens
    assert check(f"{line.replace('0.32.0', '0.31.0')} --prefix-match-unit 48", capsys)[0] == 0  # ignored


@pytest.mark.parametrize(
    ("backend", "version", "verdict"),
    [
        ("FLASHMLA", "0.32.0", "refused"),
        ("FLASHMLA_SPARSE", "0.32.0", "accepted"),
        ("FLASHMLA_SPARSE", "0.29.0", "refused"),
        ("TOKENSPEED_MLA", "0.31.0", "refused"),
        ("TOKENSPEED_MLA", "0.32.0", "accepted"),
    ],
)
def test_drafts_meet_an_interleave(backend: str, version: str, verdict: str) -> None:
    release = resolve_engine(f"vllm=={version}")
    launch = Launch(release, backend, max_model_len=9416, block_size=64, cp_size=2, cp_interleave=16, lookahead=3)
    answer = judge(launch)
    assert answer.verdict == verdict
    if verdict == "refused":
        assert "no drafts with an interleave of 16" in answer.reason


# vLLM 0.32's own specs at 9416 tokens, blocks of 32 and 3 drafts: alone, and under context parallelism of 2.
WIDTHS = {
    "full": (296, 148),
    "window": (296, 148),
    "chunked": (296, 148),
    "resident": (296, 296),
    "ring": (1, 1),
    "state": (298, 298),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_who_is_divided_over_ranks(kind: Any) -> None:
    release = resolve_engine("vllm==0.32.0")
    widths = [
        release.width(max_model_len=9416, block_size=32, lookahead=3, kind=kind, cp_size=ranks) for ranks in (1, 2)
    ]
    assert tuple(widths) == WIDTHS[kind]


def test_a_state_without_prefix_caching_holds_one_block_and_its_drafts() -> None:
    for version, widths in {"0.20.2": (1, 4), "0.24.0": (4, 4), "0.26.0": (4, 4), "0.32.0": (1, 4)}.items():
        release = resolve_engine(f"vllm=={version}")
        assert widths == tuple(
            release.width(max_model_len=9416, block_size=32, lookahead=drafts, kind="state", state_mode="none")
            for drafts in (0, 3)
        )


def test_ranks_divided_state_up_to_0_25_1() -> None:
    for version, width in {"0.20.2": 148, "0.25.1": 148, "0.26.0": 296, "0.27.0": 295}.items():
        release = resolve_engine(f"vllm=={version}")
        assert release.width(max_model_len=9416, block_size=32, kind="state", cp_size=2) == width


WINDOWS = {
    **HYBRID,
    "model_type": "gemma2",
    "linear_num_key_heads": 0,
    "num_hidden_layers": 2,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONNECTOR = """ --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("--prefix-match-unit 48", 1),
        ("--prefix-match-unit 32", 0),
        (f"--prefix-match-unit 48 {CONNECTOR}", 1),
        (f"--prefix-match-unit 48 --no-enable-prefix-caching {CONNECTOR}", 1),
        ("--prefix-match-unit 48 --no-enable-prefix-caching", 0),  # nothing is hashed
        ("--hash-block-size 48", 1),
    ],
)
def test_a_unit_divides_the_blocks_of_several_groups(
    more: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWS))
    line = f"--engine vllm==0.32.0 --gpu h100 --max-model-len 9416 -- vllm serve {tmp_path} --block-size 64 {more}"
    found, answer = check(line, capsys)
    assert found == code
    if code:
        assert answer["error"].startswith(
            "ValueError: Invalid prefix_match_unit=48; prefix-cacheable KV cache group block"
        )
        assert "no --prefix-match-unit" in answer["ways_out"]


@pytest.mark.parametrize(
    ("connector", "environment", "error"),
    [
        (
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": 96}},
            "",
            "'block_size'=96",
        ),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": 256}}, "", None),
        ({"kv_connector": "OffloadingConnector"}, "", None),
        ({"kv_connector": "LMCacheMPConnector"}, "LMCACHE_CHUNK_SIZE=96 ", "LMCache chunk size should be a multiple"),
        ({"kv_connector": "LMCacheMPConnector"}, "LMCACHE_CHUNK_SIZE=256 ", None),
        ({"kv_connector": "LMCacheConnectorV1"}, "LMCACHE_CHUNK_SIZE=96 ", None),
    ],
)
def test_a_chunk_of_a_connector_is_whole_blocks(
    connector: Any, environment: str, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "vllm serve M --attention-backend TRITON_MLA --max-model-len 9416 --block-size 64 --kv-transfer-config "
    words = f"{environment}{line}{shlex.quote(json.dumps(connector))}"
    code, answer = check(f"--engine vllm==0.32.0 -- {shlex.quote(words)}", capsys)
    assert code == (0 if error is None else 1)
    assert error is None or error in answer["error"]


def test_the_memory_bounds_requests_at_once_where_a_state_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | STATES))
    line = f"--engine vllm==0.32.0 --gpu h100 --gpu-memory 200MiB -- vllm serve {tmp_path} --max-model-len 9416 --max-num-seqs"
    code, answer = check(f"{line} 256", capsys)
    assert (code, answer["block_size"]) == (1, 544)
    blocks = answer["memory"]["num_blocks"]
    assert answer["ways_out"][0] == f"--max-num-seqs {blocks}"
    assert check(f"{line} {blocks}", capsys)[0] == 0


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            "--max-num-batched-tokens 128 --max-num-seqs 256",
            "max_num_batched_tokens (128) must be greater than or equal to",
        ),
        ("--max-num-batched-tokens 256 --max-num-seqs 256", None),
        ("--max-num-batched-tokens 4096 --no-enable-chunked-prefill", "max_num_batched_tokens (4096) is smaller than"),
        ("--max-num-batched-tokens 4096", None),
        ("--max-num-batched-tokens 9416 --no-enable-chunked-prefill", None),
    ],
)
def test_a_step_has_tokens_enough(more: str, error: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--engine vllm==0.32.0 -- vllm serve M --attention-backend TRITON_MLA --max-model-len 9416 --block-size 64"
    code, answer = check(f"{line} {more}", capsys)
    assert code == (0 if error is None else 1)
    if error:
        assert error in answer["error"]
        (way,) = (way for way in answer["ways_out"] if way.startswith("--max-num-batched-tokens"))
        assert check(f"{line} {more} {way}", capsys)[0] == 0


def test_a_step_fills_a_block_of_states_up_to_0_26(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | STATES))
    line = f"--gpu h100 -- vllm serve {tmp_path} --max-model-len 9416 --max-num-batched-tokens 512"
    code, answer = check(f"--engine vllm==0.26.0 {line}", capsys)
    assert (code, answer["block_size"]) == (1, 544)
    assert "block_size (544) must be <= max_num_batched_tokens (512)" in answer["error"]
    assert check(f"--engine vllm==0.27.0 {line}", capsys)[0] == 0
    assert check(f"--engine vllm==0.25.1 {line}", capsys)[0] == 0  # states are not cached unless that is asked for
    assert check(f"--engine vllm==0.25.1 {line} --enable-prefix-caching", capsys)[0] == 1
