"""Launch lines gathered from public posts and scripts: each is accepted, refused, not known, or wrong input, and says why."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blocktable.cli import run

DENSE = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "max_position_embeddings": 131072,
}
LATENT = {
    **DENSE,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
SPARSE = {**LATENT, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
STATE = {
    **DENSE,
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}
SINKS = {
    **DENSE,
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128,
}
MODELS: dict[str, Any] = {
    "dense": DENSE,
    "latent": LATENT,
    "sparse": SPARSE,
    "state": STATE,
    "sinks": SINKS,
    "compressed": {**SPARSE, "model_type": "deepseek_v4", "compress_ratios": [0, 4, 128]},
    "speech": {"model_type": "whisper", "d_model": 1280, "decoder_attention_heads": 20, "max_target_positions": 448},
}

# What follows `blocktable check`, vLLM being 0.32.0 and SGLang 0.5.23 where nothing else is said, and the exit status.
LINES = {
    "-- vllm serve org/M --port 8000": 3,
    "--gpu h100 -- vllm serve org/M --lora-modules my_adapter=./peft_adapter": 3,
    "--gpu h100 -- vllm serve dense --lora-modules my_adapter=./peft_adapter": 0,
    "--gpu a100 -- vllm serve dense --swap-space 16 --disable-log-requests --tensor_parallel_size 1 --max_model_len 65000": 0,
    '--gpu h100 -- vllm serve dense --max-model-len "${MAXLEN:-6144}" --kv-cache-dtype fp8': 2,
    '--gpu h100 -- vllm serve dense --enable-prefix-caching --speculative_config \'{"method": "ngram", "num_speculative_tokens": 5}\'': 0,
    "--gpu h200 -- VLLM_MLA_DISABLE=1 VLLM_USE_V1=1 vllm serve latent -tp 8 --max-model-len 65536 --enforce-eager --block-size 64": 3,
    "--gpu b200 -- vllm serve compressed --kv-cache-dtype fp8 --block-size 256 --pipeline-parallel-size 3": 3,
    "--gpu b200 --backend FLASHMLA_SPARSE -- vllm serve compressed --kv-cache-dtype fp8 --block-size 256": 3,
    "--gpu b200 --backend NOT_ONE -- vllm serve compressed --kv-cache-dtype fp8 --block-size 256": 2,
    "--gpu l40s -- vllm serve speech": 3,
    '--gpu h100 -- vllm serve dense -tp 2 --block-size 128 --swap-space 0 --kv-transfer-config \'{"kv_connector":"DynamoNixlConnector"}\' --enable-chunked-prefill false': 0,
    '--gpu h200 -- VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve sparse -tp 8 --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both", "kv_connector_extra_config": {"enforce_handshake_compat": false}}\' --chat-template-content-format=string --speculative-config=\'{"method":"mtp","num_speculative_tokens":1}\'': 0,
    '--gpu h100 -- docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface --env "HF_TOKEN=$HF_TOKEN" -p 8000:8000 --ipc=host vllm/vllm-openai:latest --model dense': 0,
    "--gpu h100 -- docker run --gpus all --rm -it vllm/vllm-openai:v0.26.0 --model=dense --max-model-len=32768": 0,
    "--gpu b200 --model latent -- docker run --gpus all vllm/vllm-openai:v0.19.1 --model X -tp 8 --max-model-len=9416": 1,
    "--gpu b200 -- vllm serve latent --trust-remote-code -dp 8 --enable-expert-parallel --attention-backend CUTLASS_MLA --block-size 128": 0,
    "--gpu b200 -- vllm serve latent -tp 8 -dcp 8 --attention-backend FLASHINFER_MLA": 0,
    "--gpu h100 -- vllm serve latent -tp 8 --attention-backend FLASHINFER_MLA": 1,
    '--gpu h100 -- vllm serve state -tp 4 --speculative-config \'{"method":"qwen3_next_mtp","num_speculative_tokens":2}\'': 0,
    "--gpu rtx-pro-6000 -- vllm serve state --kv-cache-dtype nvfp4 --attention-backend FLASHINFER": 3,
    "--gpu h200 --engine vllm==0.19.0 -- vllm serve sparse -tp 8 --block-size 16": 1,
    "--gpu h200 -- vllm serve sparse -tp 8 --tokenizer-mode deepseek_v32": 0,
    "--gpu mi300x -- VLLM_USE_V1=1 VLLM_ROCM_USE_AITER=1 vllm serve latent -tp 8 --block-size 1 --max_seq_len_to_capture 32768": 3,
    "--gpu mi300x -- vllm serve dense -tp 8 --dtype float16 --kv-cache-dtype fp8 --attention-backend ROCM_ATTN": 0,
    "--gpu cpu -- VLLM_CPU_KVCACHE_SPACE=400 VLLM_CPU_OMP_THREADS_BIND=0-31 vllm serve dense --dtype=bfloat16": 0,
    "--gpu cpu -- vllm serve sparse": 1,
    "--gpu a100 -- vllm serve sinks --attention-backend FLASH_ATTN": 1,
    "--gpu a100 -- vllm serve sinks --dtype auto --port 8000 --host 0.0.0.0": 0,
    "--gpu b200 -- vllm serve sinks --attention-config '{\"use_trtllm_attention\": true}' --kv-cache-dtype fp8": 0,
    "--gpu h100 -- vllm serve sinks --attention-backend FLASH_ATTN --attention-config.flash_attn_version 2": 3,
    "--gpu h100 -- vllm serve sinks --attention-backend FLASH_ATTN --attention-config.flash_attn_version 3": 0,
    "--gpu h100 -- vllm serve sinks --attention-backend TRITON_ATTN --attention-config.flash_attn_version 2": 0,
    "-- vllm serve dense --attention-backend FLASH_ATTN --attention-config.flash_attn_version 3": 3,
    "--gpu b200 -- vllm serve sinks --attention-config '{\"use_trtllm_attention\": false}'": 3,
    '--gpu h200 -- vllm serve sparse -tp 8 --attention-config \'{"hisparse_config": {"device_buffer_size": 8}}\'': 3,
    "--gpu h100 -- python3 -m vllm.entrypoints.openai.api_server --model dense --tensor-parallel-size 4 --block-size 8 --swap-space 4": 1,
    '--gpu h100 -- vllm serve dense -tp 4 --kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\' --block-size 16': 0,
    "--gpu h100 -- vllm serve dense -tp 3": 1,
    "-- python -m vllm.entrypoints.api_server --model dense --attention-backend XFORMERS": 2,
    '-- srun --gpus=8 bash -c "vllm serve dense -tp 8 --attention-backend FLASH_ATTN"': 0,
    '--gpu h100 -- kubectl exec -it pod -- bash -lc "VLLM_MLA_DISABLE=1 vllm serve latent -tp 8"': 3,
    "-- ray job submit -- vllm serve dense --attention-backend FLASH_ATTN": 0,
    "-- apptainer exec --nv vllm.sif vllm serve dense --attention-backend FLASH_ATTN": 0,
    "-- nohup vllm serve dense -tp 8 --attention-backend FLASH_ATTN > out.log 2>&1 &": 0,
    "-- CUDA_VISIBLE_DEVICES=0 uv run --with vllm vllm serve dense --attention-backend FLASH_ATTN": 0,
    "-- bash start.sh": 2,
    "-- srun bash start.sh": 2,
    "-- vllm serve dense --attention-backend FLASH_ATTN \u2014block-size 8": 2,
    "-- 'vllm serve dense --attention-backend FLASH_ATTN -\u2013block-size 8'": 2,
    "-- python -m sglang.launch_server --model-path dense \u2013-attention-backend fa3": 2,
    "-- ollama run llama3": 2,
    "-- trtllm-serve org/M --max_seq_len 9416": 2,
    '-- docker run --gpus 1 --shm-size 32g -p 30000:30000 --env "HF_TOKEN=XXXX" --ipc=host lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path org/M --host 0.0.0.0 --port 30000': 3,
    "--gpu h100 -- docker run --gpus 1 lmsysorg/sglang:v0.5.23-cu128 python3 -m sglang.launch_server --model-path dense --port 30000": 0,
    "--gpu b200 -- python -m sglang.launch_server --model-path latent --quantization modelopt_fp4 --moe-runner-backend flashinfer_trtllm": 0,
    "--gpu h200 -- python3 -m sglang.launch_server --model-path latent --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --tp 8": 0,
    "-- SGLANG_ENABLE_SPEC_V2=1 sglang serve --model-path latent --tensor-parallel-size 4 --speculative-algorithm EAGLE3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": 3,
    "--gpu h100 -- python -m sglang.launch_server --model dense --speculative-algo EAGLE --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --disable-cuda-graph": 3,
    "-- python3 -m sglang.launch_server --model-path $model_path --context-length $max_model_len --kv-cache-dtype fp8_e4m3 --tp-size $tp": 2,
    "-- python -m sglang.launch_server --model-path org/M --device cpu --host 0.0.0.0 --port 30000": 3,
    "--gpu b200 -- python3 -m sglang.launch_server --model-path latent --tp 8 --attention-backend cutlass_mla --page-size 32": 2,
    "--gpu h200 -- python3 -m sglang.launch_server --model-path sparse --tp 8 --dp 8 --enable-dp-attention": 0,
    "--gpu h100 -- python3 -m sglang.launch_server --model-path compressed --tp 8": 3,
}
VERDICTS = {0: "accepted", 1: "refused", 3: "unknown"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("posted")
    for name, config in MODELS.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("line", LINES)
def test_a_posted_line(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("blocktable.preflight.launch._installed", lambda *_names: None)
    code = run(["check", "--json", *shlex.split(line)])
    out, err = capsys.readouterr()
    assert code == LINES[line], out + err
    if code == 2:
        assert not out
        assert err.startswith("blocktable check: ")
        return
    answer = json.loads(out)
    assert not err
    assert answer["verdict"] == VERDICTS[code]
    assert bool(answer["missing"]) == (code == 3)
    assert not (code == 0 and answer["width"] is None)
