"""vLLM on a TPU: the table of all rows lies in the chip's scalar memory, which bounds rows · width · 4 bytes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable import Contract, get_contract
from blocktable.cli import run
from blocktable.errors import ContractError
from blocktable.preflight.tpu import own_page

MODEL = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2}
LATENT = {**MODEL, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MIB = 2**20


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(line: str, model: Any = MODEL, release: str = "0.32.0") -> tuple[int, Any]:
        (tmp_path / "config.json").write_text(json.dumps(model))
        words = f"--json --engine vllm=={release} --gpu tpu-v6e -- vllm serve {tmp_path} {line}"
        code = run(["check", *shlex.split(words)])
        return code, json.loads(capsys.readouterr().out)

    return ask


def test_a_table_of_that_area_is_held_and_a_larger_one_is_not() -> None:
    contract = get_contract("FLASH_ATTN", engine="vllm", version="0.32.0", hardware="tpu")
    contract.check_table((256, 1024), 16)  # 256 * 1024 * 4 bytes: 1 MiB to the byte
    with pytest.raises(ContractError, match=r"at most 1,048,576 bytes, got 1,052,672 \(257 · 1024 · 4\)"):
        contract.check_table((257, 1024), 16)
    bound = Contract("MINE", max_table_bytes=4 * 6)
    for rows in range(1, 8):
        for width in range(1, 8):
            if rows * width <= 6:
                bound.check_table((rows, width), 16)
            else:
                with pytest.raises(ContractError):
                    bound.check_table((rows, width), 16)


@pytest.mark.parametrize("rows", [None, 1, 7, 256, 1000, 5000])
@pytest.mark.parametrize("length", [1, 100, 4096, 8192, 8193, 131072, 10**7])
def test_the_platforms_own_page_keeps_to_half_the_memory(length: int, rows: int | None) -> None:
    page = own_page(length, rows)
    assert page >= 16
    assert page & (page - 1) == 0
    if length > 8192 and page > 16:  # not a block less would do
        assert (rows or 256) * -(-length // (page // 2)) * 4 > MIB // 2
    assert (rows or 256) * (-(-length // page) - 1) * 4 <= MIB // 2


@pytest.mark.parametrize(
    ("line", "code", "facts"),
    [
        ("--max-model-len 131072", 0, {"block_size": 256, "width": 512}),
        ("--max-model-len 131072 --max-num-seqs 16", 0, {"block_size": 16, "width": 8192}),
        ("--max-model-len 4096 --attention-backend FLASHINFER", 0, {"backend": "FLASH_ATTN", "block_size": 256}),
        (
            "--max-model-len 131072 --block-size 16",
            1,
            {"width": 8192, "ways_out": ["--block-size 128", "--max-num-seqs 32"]},
        ),
        ("--max-model-len 131072 --block-size 128", 0, {"width": 1024, "padding": 0}),
        ("--max-model-len 4096 -tp 8 -dcp 2", 3, {"verdict": "unknown"}),
    ],
)
def test_launches(check: Any, line: str, code: int, facts: dict[str, Any]) -> None:
    found, answer = check(line, {**MODEL, "num_key_value_heads": 2})
    assert found == code, answer
    assert {name: answer[name] for name in facts} == facts
    assert answer["memory"] is None  # a TPU pads its cache


def test_what_nobody_has_read_is_not_known(check: Any) -> None:
    assert check("--max-model-len 4096", LATENT)[0] == 3
    assert check("--max-model-len 4096 --attention-backend FLASH_ATTN_MLA", LATENT)[0] == 3
    assert check("--max-model-len 4096 --attention-backend FLASH_ATTN", release="0.31.0")[0] == 3
