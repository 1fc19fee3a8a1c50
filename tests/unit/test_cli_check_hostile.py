"""Launch lines that nobody would write on purpose: each gets a verdict or a clear refusal of the input, never a traceback."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run

RIGHT = {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 2}
CONFIGS: dict[str, Any] = {
    "ok": RIGHT | {"max_position_embeddings": 4096},
    "list": [1, 2],
    "sparse": RIGHT | {"model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048},
    "huge": {
        **RIGHT,
        "num_attention_heads": 10**30,
        "hidden_size": 10**40,
        "num_hidden_layers": 10**30,
        "num_key_value_heads": 10**20,
        "max_position_embeddings": 10**50,
    },
    "zero": RIGHT | {"hidden_size": 0, "head_dim": 0, "num_hidden_layers": 0, "max_position_embeddings": 0},
    "weird": {
        **RIGHT,
        "model_type": ["llama"],
        "layer_types": {"a": 1},
        "sliding_window": "x",
        "rope_scaling": [1],
        "quantization_config": "no",
        "dtype": 5,
        "text_config": None,
    },
    "rope": {
        **RIGHT,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": "2", "original_max_position_embeddings": "x"},
    },
    "hyb": {
        **RIGHT,
        "model_type": "qwen3_next",
        "max_position_embeddings": 4096,
        "linear_num_key_heads": -4,
        "linear_num_value_heads": 0,
        "linear_key_head_dim": 0,
        "linear_value_head_dim": 0,
        "linear_conv_kernel_dim": 0,
        "full_attention_interval": 0,
    },
}
FILES = {
    "empty/config.json": b"",
    "bin/config.json": b"\xff\xfe\x00\x01",
    "deep/config.json": b"[" * 100_000,
    "bad.yaml": b"a: [1, 2\n",
    "list.yaml": b"- a\n- b\n",
    "null.yaml": b"",
    "int.yaml": b"1: 2\nmax-model-len: 4096\nnull: 3\nblock-size: null\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    for name in ("dirmodel", "d.yaml"):
        (place / name).mkdir()
    for name, config in CONFIGS.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    return place


# What follows `blocktable check`; V stands for --engine vllm==0.32.0.
LINES: dict[str, int] = {
    "V --gpu 7.5 --max-model-len 4096 --block-size 64 --model sparse": 1,
    "V --gpu cpu --max-model-len 4096 --block-size 64 --model sparse": 1,
    "--": 3,
    "-- ": 3,
    "-- vllm": 2,
    "-- vllm serve": 3,
    "-- vllm bench M": 2,
    "V -- vllm serve M --max-model-len": 2,
    "V -- vllm serve M --block-size": 2,
    "V -- vllm serve M --block-size sixteen": 2,
    "V -- vllm serve M --block-size 16 --block-size 32 --attention-backend FLASHINFER_MLA --max-model-len 9416": 0,
    'V -- vllm serve M --attention-backend FLASHINFER_MLA --attention-config \'{"backend":"TRITON_MLA"}\'': 2,
    "V -- vllm serve M --attention-config '{garbage'": 2,
    "V -- vllm serve M --attention-config 5": 2,
    "V -- vllm serve M --attention-config '[]'": 2,
    "V -- vllm serve M --attention-config ''": 2,
    'V -- vllm serve M -sc \'{"num_speculative_tokens": "three"}\' --attention-backend TRITON_MLA --max-model-len 9416': 2,
    "V -- vllm serve M -sc '{\"num_speculative_tokens\": -3}' --attention-backend TRITON_MLA --max-model-len 9416": 2,
    "V -- vllm serve M -sc '{\"num_speculative_tokens\": 2.5}' --attention-backend TRITON_MLA --max-model-len 9416": 2,
    "V -- vllm serve M -sc '{\"num_speculative_tokens\": [1]}' --attention-backend TRITON_MLA --max-model-len 9416": 2,
    'V -- vllm serve M -sc \'{"method": 5, "model": 7, "attention_backend": 3, "draft_tensor_parallel_size": "x", "kv_cache_dtype": 9, "num_speculative_tokens": 2}\' --attention-backend TRITON_MLA --max-model-len 9416': 2,
    'V -- vllm serve M -sc \'{"method": "eagle", "model": "ok", "draft_tensor_parallel_size": 0, "num_speculative_tokens": 2}\' --attention-backend TRITON_ATTN --max-model-len 9416': 2,
    'V -- vllm serve ok -sc \'{"method": "eagle", "model": "ok", "draft_tensor_parallel_size": "x", "num_speculative_tokens": 2}\' --attention-backend TRITON_ATTN --max-model-len 4096 --block-size 16': 2,
    'V -- vllm serve M -sc \'{"method": "eagle", "model": "list", "num_speculative_tokens": 2}\' --attention-backend TRITON_ATTN --max-model-len 9416': 2,
    'V -- vllm serve ok -sc \'{"method": "eagle", "attention_backend": "NOPE", "num_speculative_tokens": 2}\' --attention-backend TRITON_ATTN --max-model-len 4096 --block-size 16': 2,
    "V -- vllm serve M --kv-transfer-config '{' --attention-backend TRITON_MLA --max-model-len 9416": 2,
    'V -- vllm serve M --kv-transfer-config \'{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": "x"}}\' --attention-backend TRITON_MLA --max-model-len 9416': 2,
    'V -- vllm serve M --kv-transfer-config \'{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": -4}}\' --attention-backend TRITON_MLA --max-model-len 9416': 2,
    'V -- vllm serve M --kv-transfer-config \'{"kv_connector": 7, "kv_connector_extra_config": [1]}\' --attention-backend TRITON_MLA --max-model-len 9416': 0,
    "V -- vllm serve M --config nowhere.yaml": 2,
    "V -- vllm serve M --config bad.yaml": 2,
    "V -- vllm serve M --config list.yaml": 2,
    "V -- vllm serve M --config null.yaml": 2,
    "V -- vllm serve M --config int.yaml --attention-backend TRITON_MLA": 2,
    "V -- vllm serve M --config d.yaml": 2,
    "V -- vllm serve M --config": 2,
    "V -- vllm serve M --config=x.yaml": 2,
    "V -- vllm serve M --config x.json": 2,
    "V --backend FLASHINFER_MLA --max-model-len 99999999999999999999999999 --block-size 32": 2,
    "V --backend FLASHINFER_MLA --max-model-len 9223372036854775807 --block-size 32": 2,
    "V --backend FLASHINFER_MLA --max-model-len 1T --block-size 1": 1,
    "V --backend FLASHINFER_MLA --max-model-len 9416 --block-size 99999999999999999999": 2,
    "V --backend FLASHINFER_MLA --max-model-len 1 --block-size 32": 0,
    "V --backend FLASHINFER_MLA --max-model-len 0": 2,
    "V --backend FLASHINFER_MLA --max-model-len -5": 2,
    "V --backend FLASHINFER_MLA --max-model-len 9416.5": 2,
    "V --backend FLASHINFER_MLA --max-model-len \uff19\uff14\uff11\uff16 --block-size 32": 0,
    "V --backend FLASHINFER_MLA --max-model-len ''": 2,
    "V --backend FLASHINFER_MLA --max-model-len 1_000 --block-size 32": 0,
    "V --backend '' --max-model-len 9416": 3,
    "V --backend , --max-model-len 9416": 3,
    "V --backend '\uff26\uff2c\uff21\uff33\uff28' --max-model-len 9416": 2,
    "V --backend '\U0001f642' --max-model-len 9416": 2,
    "V --backend 'A B' --max-model-len 9416": 2,
    "V --backend 'vllm:x@y@z' --max-model-len 9416": 2,
    "V --backend '../../etc' --max-model-len 9416": 2,
    "V --backend 'flashinfer:auto' --max-model-len 9416 --block-size 32": 2,
    "V --backend 'vllm:FLASHINFER_MLA@0.19.1' --max-model-len 9416 --block-size 32": 2,
    "--backend 'vllm:FLASHINFER_MLA@0.19.1' --max-model-len 9416 --block-size 32": 1,
    "--engine '' --backend TRITON_MLA": 3,
    "--engine vllm==zzz --backend TRITON_MLA": 2,
    "--engine vllm==0.19.5 --backend TRITON_MLA": 2,
    "--engine vllm==0.1 --backend TRITON_MLA --max-model-len 9416": 2,
    "--engine nope==1 --backend TRITON_MLA": 2,
    "--engine 'vllm >= 0.19' --backend TRITON_MLA": 2,
    "--engine vllm==99999999999999999.0 --backend TRITON_MLA --max-model-len 9416": 0,
    "--engine vllm==0.32.0rc1 --backend TRITON_MLA --max-model-len 9416": 2,
    "--engine vllm==0.32.0+cu128 --backend TRITON_MLA --max-model-len 9416": 0,
    "V --gpu '' --backend TRITON_MLA --max-model-len 9416": 2,
    "V --gpu rtx9000 --backend TRITON_MLA --max-model-len 9416": 2,
    "V --gpu 99.99 --backend FLASHINFER_MLA --max-model-len 9416": 1,
    "V --gpu 1 --backend TRITON_MLA --max-model-len 9416": 2,
    "V --gpu sm90a --backend TRITON_MLA --max-model-len 9416": 2,
    "V --gpu h100 --max-model-len 4096 --model nowhere": 2,
    "V --gpu h100 --max-model-len 4096 --model dirmodel": 2,
    "V --gpu h100 --max-model-len 4096 --model empty": 2,
    "V --gpu h100 --max-model-len 4096 --model list": 2,
    "V --gpu h100 --max-model-len 4096 --model bin": 2,
    "V --gpu h100 --max-model-len 4096 --model deep": 2,
    "V --gpu h100 --max-model-len 4096 --model huge": 0,
    "V --gpu h100 --max-model-len 4096 --model zero": 2,
    "V --gpu h100 --max-model-len 4096 --model weird": 0,
    "V --gpu h100 --max-model-len 4096 --model rope": 0,
    "V --gpu h100 --max-model-len 4096 --model hyb": 0,
    "V --gpu h100 --max-model-len 4096 --model /dev/null": 2,
    "V --gpu h100 --max-model-len 4096 --model ok/config.json": 0,
    "V --gpu h100 --max-model-len 4096 --model ''": 2,
    "V --gpu h100 --max-model-len 4096 --model ok": 0,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model huge": 1,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model zero": 2,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model weird": 3,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model rope": 3,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model hyb": 3,
    "V --gpu h100 --max-model-len auto --gpu-memory 1G --model ok": 0,
    "V --gpu h100 --backend FLASH_ATTN --max-model-len 4096 --block-size 16 --gpu-memory 1G --model huge": 1,
    "V --gpu h100 --backend FLASH_ATTN --max-model-len 4096 --block-size 16 --gpu-memory 1G --model zero": 2,
    "V --gpu h100 --backend FLASH_ATTN --max-model-len 4096 --block-size 16 --gpu-memory 1G --model weird": 0,
    "V --gpu h100 --backend FLASH_ATTN --max-model-len 4096 --block-size 16 --gpu-memory 1G --model rope": 0,
    "V --gpu h100 --backend FLASH_ATTN --max-model-len 4096 --block-size 16 --gpu-memory 1G --model hyb": 0,
    "V --gpu-memory 0 --model ok --gpu h100 --max-model-len 4096": 2,
    "V --gpu-memory -1 --model ok --gpu h100 --max-model-len 4096": 2,
    "V --gpu-memory 1KiB --model ok --gpu h100 --max-model-len 4096": 1,
    "V --gpu-memory 1 --model ok --gpu h100 --max-model-len 4096": 2,
    "V --gpu-memory 99999999999999999T --model ok --gpu h100 --max-model-len 4096": 0,
    "V --gpu-memory 9GiBB --model ok --gpu h100": 2,
    "V --gpu-memory 1KiB --model ok --gpu h100 --max-model-len auto": 1,
    "V --gpu-memory 1 --model ok --gpu h100 --max-model-len auto": 2,
    "V --num-gpu-blocks-override 0 --model ok --gpu h100": 2,
    "V --num-gpu-blocks-override 1 --model ok --gpu h100 --max-model-len 4096": 1,
    "V --num-gpu-blocks-override 1 --model ok --gpu h100 --max-model-len auto": 1,
    "V -tp 0 --backend TRITON_MLA --max-model-len 9416": 2,
    "V -tp 3 --model ok --gpu h100 --max-model-len 4096": 1,
    "V -tp 1000000 --model ok --gpu h100 --max-model-len 4096": 1,
    "V --cp-size 0 --backend TRITON_MLA": 2,
    "V --cp-size 3 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32": 0,
    "V --cp-size 99999999999 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32": 0,
    "V --lookahead -1 --backend TRITON_MLA": 2,
    "V --lookahead 99999999999999 --backend TRITON_MLA --max-model-len 9416 --block-size 16": 0,
    "V --kv-cache-dtype '' --backend TRITON_MLA --max-model-len 9416": 0,
    "V --kv-cache-dtype garbage --backend TRITON_MLA --max-model-len 9416": 2,
    "V --kv-cache-dtype FP8 --backend TRITON_MLA --max-model-len 9416": 0,
    "V --with flashinfer --backend FLASHINFER_MLA --max-model-len 9416": 0,
    "V --with '' --backend FLASHINFER_MLA --max-model-len 9416": 0,
    "V --with nope==1 --backend FLASHINFER_MLA --max-model-len 9416": 2,
    "V --with flashinfer==0.0.1 --backend FLASHINFER_MLA --max-model-len 9416": 2,
    "V --unknown": 2,
    "V --max-model-len": 2,
    "--json": 3,
    "V --json --backend NOPE": 2,
    "V -- 'vllm serve M --max-model-len 9416' --block-size 32": 2,
    "V -- 'vllm serve \"M --max'": 2,
    "V -- 'vllm serve M && rm -rf x'": 3,
    "V -- vllm serve -- M": 3,
    "V -- sudo env A=b vllm serve M --max-model-len 9k --attention-backend TRITON_MLA": 0,
    "V -- A=b": 2,
    "V -- python -m": 2,
    "V -- python x.py": 2,
    "V -- python -m vllm.entrypoints.openai.api_server": 3,
    "V -- vllm serve M --max-num-seqs 0": 2,
    "V -- vllm serve M --max-num-batched-tokens x": 2,
    "V -- vllm serve M -dcp 2 -tp 3 --attention-backend TRITON_MLA --max-model-len 9416 --block-size 16": 1,
    "V -- vllm serve M --kv-cache-memory-bytes auto": 2,
    "V -- vllm serve M -1": 3,
    "V -- vllm serve M ---- x --- --= --=x -=": 3,
    "V -- vllm serve M -ac. x": 3,
    "V -- vllm serve M -ac.backend": 2,
    "V -- vllm serve M --attention-config.backend.x.y z --attention-backend TRITON_MLA --max-model-len 9416": 2,
    "V -- VLLM_CPU_KVCACHE_SPACE=x vllm serve M": 2,
    "V -- VLLM_CPU_KVCACHE_SPACE=0 vllm serve M": 2,
    "V -- VLLM_CPU_KVCACHE_SPACE=4 vllm serve ok --attention-backend CPU_ATTN": 0,
    "--engine sglang -- sglang serve --page-size x": 2,
    "-- sglang serve": 3,
    "-- sglang serve --model-path ok --attention-backend NOPE --context-length 9416": 2,
    "-- sglang serve --speculative-eagle-topk x --speculative-algorithm EAGLE": 2,
    "-- sglang serve --config d.yaml": 2,
    "-- python -m sglang.launch_server": 3,
    "-- sglang serve --page-size 99999999999999999999 --attention-backend fa3 --context-length 9416": 2,
    "-- sglang serve --page-size 3 --attention-backend triton --context-length 9416 --tp-size 0": 2,
    "--engine flashinfer==0.7.2 --backend trtllm-gen --max-model-len 9416": 3,
    "--engine flashinfer==0.7.2 --max-model-len 9416 --block-size 32 --gpu b200": 3,
    "--engine flashinfer==0.7.2 --backend auto --gpu cpu --max-model-len 9416 --block-size 32": 1,
    "V --gpu tpu --backend TRITON_MLA": 3,
    "V --gpu xpu --max-model-len 4096 --model ok": 3,
    "V --gpu mi300x --max-model-len 4096 --model ok": 0,
}


@pytest.mark.parametrize("line", LINES)
def test_a_verdict_or_a_clear_refusal(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = line.replace("V ", "--engine vllm==0.32.0 ", 1) if line.startswith("V ") else line
    try:
        code = run(["check", *shlex.split(words)])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == LINES[line], out + err
    assert "Traceback" not in err
    if code == 2:
        assert not out
        assert err.startswith("blocktable check: ") or "usage: " in err
    else:
        assert out
        assert not err
