"""Blocks and requests at once, by vLLM's own functions and by an engine that starts; blocks that hold a recurrent state."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib import import_module
from random import Random
from types import SimpleNamespace

import pytest

from blocktable.contracts import resolve_engine
from blocktable.preflight import Draft, Launch, read_model
from blocktable.preflight.hybrid import block_that_holds_a_state
from blocktable.preflight.memory import longest_that_fits, measure

pytestmark = pytest.mark.conformance

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LATENT = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 4,
}


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


STARTS = textwrap.dedent(
    """
    import gc, json, os, sys
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    for settings in json.loads(sys.argv[1]):
        llm = LLM(load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=4, **settings)
        config = llm.llm_engine.engine_core.engine_core.vllm_config
        cache = config.cache_config
        told = [cache.num_gpu_blocks, cache.block_size, cache.kv_cache_max_concurrency, config.model_config.max_model_len]
        print("SEEN", json.dumps(told), flush=True)
        del llm, config, cache
        gc.collect()
        cleanup_dist_env_and_memory()
    """
)


def test_an_engine_that_starts(real, vllm_version, tmp_path):
    real("vllm")
    llama, latent = write(tmp_path / "llama", LLAMA), write(tmp_path / "latent", LATENT)
    starts = [
        {"model": str(llama), "max_model_len": 4096, "block_size": 32, "kv_cache_memory_bytes": int(4.4 * 2**20)},
        {"model": str(llama), "max_model_len": -1, "block_size": 32, "kv_cache_memory_bytes": int(4.4 * 2**20)},
        {"model": str(latent), "max_model_len": 4096, "block_size": 16, "kv_cache_memory_bytes": int(9.7 * 2**20)},
    ]
    done = subprocess.run(
        [sys.executable, "-c", STARTS, json.dumps(starts)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    seen = [json.loads(line.removeprefix("SEEN ")) for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert len(seen) == len(starts), done.stderr[-3000:]
    assert [one[0] for one in seen] == [140, 140, 275]
    for start, (blocks, block, requests, length) in zip(starts, seen, strict=True):
        backend = "CPU_MLA" if start["model"] == str(latent) else "CPU_ATTN"
        launch = Launch(
            resolve_engine(f"vllm=={vllm_version}"),
            backend,
            max_model_len=length,
            model=read_model(start["model"]),
            hardware="cpu",
            memory=start["kv_cache_memory_bytes"],
        )
        ours = measure(launch, launch.contract, block)
        assert (ours.num_blocks, ours.requests) == (blocks, pytest.approx(requests))
        if start["max_model_len"] == -1:
            assert longest_that_fits(launch, launch.contract, block, 16384) == length


@pytest.fixture
def vllm_sizes(real):
    """Return a function that sizes a pool as vLLM does: blocks and requests at once, or None where it refuses."""
    utils, specs, torch = real("vllm.v1.core.kv_cache_utils"), real("vllm.v1.kv_cache_interface"), real("torch")
    layout = real("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
    stage_of = real("vllm.distributed.utils").get_pp_indices

    def size(model, launch, block):
        heads = max(1, model.kv_heads // launch.tensor_parallel)
        dtype = torch.uint8 if launch.kv_dtype == "fp8" else torch.bfloat16
        common = {"block_size": block, "dtype": dtype}
        if model.kind == "mla":
            layers = [specs.MLAAttentionSpec(num_kv_heads=1, head_size=model.head_size, **common)] * model.kept.full
        else:
            common |= {"num_kv_heads": heads, "head_size": model.head_size}
            layers = [specs.FullAttentionSpec(**common)] * model.kept.full
            layers += [specs.SlidingWindowSpec(sliding_window=model.kept.window_size, **common)] * model.kept.window
        length = launch.max_model_len
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=launch.num_blocks,
                prefix_cache_retention_interval=None,
                get_resolved_kv_cache_layout=lambda: layout,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=launch.cp_size, tensor_parallel_size=launch.tensor_parallel
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=launch.one_group),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=launch.batched_tokens,
        )
        stages, drafting = launch.pipeline_parallel, (model.drafting or 0) if launch.draft.inside else 0
        named = [
            {f"model.layers.{number}.attn": layers[number] for number in range(*stage_of(len(layers), stage, stages))}
            for stage in range(stages)
        ]
        named[-1] |= {f"model.layers.{len(layers) + number}.attn": layers[0] for number in range(drafting)}
        try:
            pool, *_ = utils.get_kv_cache_configs(config, named, [launch.memory] * stages)
        except ValueError as refused:
            assert "To serve at least one request" in str(refused) or "No available memory" in str(refused)  # noqa: PT017
            return None
        return pool.num_blocks, utils.get_max_concurrency_for_kv_cache_config(config, pool)

    return size


def a_model(random, tmp_path):
    layers = random.randrange(1, 12)
    kind = random.choice(["full", "window", "mixed", "latent"])
    config = {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": random.choice([1, 2, 4])}
    config["head_dim"] = random.choice([64, 128])
    if kind == "latent":
        config = {
            **LATENT,
            "num_hidden_layers": layers,
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": layers % 3,
        }
    elif kind == "full":
        config["model_type"] = "llama"
    elif kind == "window":
        config |= {"model_type": "mistral", "sliding_window": random.randrange(1, 3000)}
    else:
        kinds = [random.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
        config |= {"model_type": "gemma2", "sliding_window": random.randrange(1, 3000), "layer_types": kinds}
    return read_model(write(tmp_path / "model", config))


def test_random_pools(vllm_sizes, vllm_version, tmp_path):
    random = Random(0)  # noqa: S311 - examples, no secrets
    release = resolve_engine(f"vllm=={vllm_version}")
    sized = refused = 0
    for _ in range(600):
        model = a_model(random, tmp_path)
        latent, windows = model.kind == "mla", bool(model.kept.window)
        stages = 1 if windows or random.random() < 0.5 else random.randrange(1, 1 + min(4, model.kept.full))
        launch = Launch(
            release,
            "TRITON_MLA" if latent else "TRITON_ATTN",
            max_model_len=random.randrange(1, 9000),
            cp_size=1 if windows else random.choice([1, 1, 2, 4]),
            model=model,
            tensor_parallel=random.choice([1, 2, 4]),
            kv_dtype=random.choice(["auto", "fp8"]),
            memory=random.randrange(2**16, 2**26),
            num_blocks=random.choice([None, None, random.randrange(2, 900)]),
            batched_tokens=random.randrange(1, 4000),
            async_scheduling=False,
            one_group=random.random() < 0.2,
            pipeline_parallel=stages,
            draft=Draft(method="mtp" if model.drafting and random.random() < 0.7 else ""),
        )
        block = random.choice([16, 32, 64, 128, 256])
        theirs, ours = vllm_sizes(model, launch, block), measure(launch, launch.contract, block)
        if theirs is None:
            refused += 1
            assert ours.blocks_per_request + 1 > ours.num_blocks
            continue
        sized += 1
        assert (ours.num_blocks, ours.requests) == (theirs[0], pytest.approx(theirs[1]))
    assert sized > 200
    assert refused > 50


HYBRIDS = {
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1"),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
}


def a_hybrid(random, model_type):
    heads, head, width, groups = (
        random.choice(some) for some in ((8, 16, 32), (32, 64, 128), (16, 64, 128), (1, 2, 8))
    )
    return {
        **SIZES,
        "model_type": model_type,
        "num_key_value_heads": random.choice([1, 2, 4, 8]),
        "head_dim": random.choice([64, 128, 256]),
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": head,
        "linear_conv_kernel_dim": 4,
        "mamba_expand": 2,
        "mamba_n_heads": heads,
        "mamba_d_head": head,
        "mamba_d_state": width,
        "mamba_d_conv": 4,
        "mamba_n_groups": groups,
        "mamba_d_ssm": random.choice([None, 1024]),
        "mamba_num_heads": heads,
        "mamba_head_dim": head,
        "ssm_state_size": width,
        "conv_kernel": 4,
        "n_groups": groups,
        "conv_dim": random.choice([1024, 2048]),
        "conv_L_cache": 3,
    }


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_blocks_that_hold_a_state(real, vllm_version, model_type, monkeypatch, tmp_path):
    platform, torch = real("vllm.platforms.interface").Platform, real("torch")
    registry, attention = real("vllm.model_executor.models").ModelRegistry, real("vllm.v1.attention.backends.registry")
    architecture, module = HYBRIDS[model_type]
    model_class = getattr(real(f"vllm.model_executor.models.{module}"), architecture)
    monkeypatch.setattr(registry, "resolve_model_cls", lambda *_, **__: (model_class, architecture), raising=False)
    monkeypatch.setattr(import_module("vllm.config.vllm"), "set_current_vllm_config", contextlib.nullcontext)
    random = Random(0)  # noqa: S311 - examples, no secrets
    release = resolve_engine(f"vllm=={vllm_version}")
    for _ in range(60):
        config = a_hybrid(random, model_type)
        model = replace(read_model(write(tmp_path / "model", config)), state=True)
        name = random.choice(["TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "CPU_ATTN"])
        launch = Launch(
            release,
            name,
            hardware="cpu" if name == "CPU_ATTN" else "9.0",
            model=model,
            tensor_parallel=random.choice([1, 2, 4]),
            lookahead=random.choice([0, 3]),
            kv_dtype=random.choice(["auto", "fp8"]),
            state_dtype=random.choice(["auto", "float32"]) if model_type != "lfm2" else "auto",
        )
        block = random.choice([16, 32, 64, 128, 4096])
        asked = block if name != "CPU_ATTN" else max(block, 32)
        text = SimpleNamespace(**config)
        cache = SimpleNamespace(
            cache_dtype=launch.kv_dtype,
            block_size=asked,
            mamba_cache_mode="align",
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="float32"
            if model_type == "nemotron_h" and launch.state_dtype == "auto"
            else launch.state_dtype,
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
            use_replayssm=False,
        )
        backend = attention.AttentionBackendEnum[name].get_class()
        monkeypatch.setattr(platform, "_find_non_ssm_backends", classmethod(lambda *_, one=backend: [one]))
        heads = max(1, model.kv_heads // launch.tensor_parallel)
        platform._align_hybrid_block_size(
            SimpleNamespace(
                cache_config=cache,
                model_config=SimpleNamespace(
                    dtype=torch.bfloat16,
                    use_mla=False,
                    architecture=architecture,
                    hf_config=text,
                    hf_text_config=text,
                    get_num_kv_heads=lambda _, heads=heads: heads,
                    get_head_size=lambda size=model.head_size: size,
                ),
                parallel_config=SimpleNamespace(tensor_parallel_size=launch.tensor_parallel),
                speculative_config=SimpleNamespace(num_speculative_tokens=launch.lookahead)
                if launch.lookahead
                else None,
                num_speculative_tokens=launch.lookahead,
            ),
            backend,
        )
        assert block_that_holds_a_state(launch, launch.contract, asked) == cache.block_size, (config, launch)
