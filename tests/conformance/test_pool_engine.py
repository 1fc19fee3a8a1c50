"""The same requests through stock vLLM and through vLLM on our pool, same schedule: the same token ids and cached tokens."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance

POOL = "blocktable.integrations.vllm_pool_blocks.Pool"
SHORT = [[POOL, True]]  # its steps are shortened
TABLES = ["blocktable.integrations.vllm_tables_v1.TablesV1"]
# Pools that preempt; the platform fixes MLA's blocks to 16, and takes no prefix caching for it.
LLAMA = {"model": "llama", "block_size": 32, "num_gpu_blocks_override": 52, "enable_prefix_caching": True}
DEEPSEEK = {"model": "deepseek", "num_gpu_blocks_override": 74, "again": False}
MISTRAL = {"model": "mistral", "block_size": 32, "num_gpu_blocks_override": 52}
HYBRID = {"model": "hybrid", "block_size": 32, "num_gpu_blocks_override": 104}
ROUGH = LLAMA | {
    "rough": 70,
    "max_model_len": 512,
    "num_gpu_blocks_override": 17,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
}


def same(stock, *ours):
    for one in ours:
        assert one["digest"] == stock["digest"]
        assert one["hits"] == stock["hits"]
        assert one["preemptions"] == stock["preemptions"]
        assert (one["observers"] > 0, one["findings"]) == ("observe" in one["mode"], {})
        assert one["pools"] == SHORT
        assert one["recounts"] > 50
    assert stock["pools"] == []
    assert stock["distinct"] > 200  # outputs that would notice a wrong block


def test_a_pool_too_small_with_aborts_resets_and_priorities(engine):
    (stock, ours), _ = engine({"mode": "off", **ROUGH}, {"mode": "tables,pool,observe", **ROUGH})
    same(stock, ours)
    assert stock["preemptions"] > 100
    assert stock["cached"] > 200
    assert ours["tables"] == TABLES


def test_llama_with_preemptions_and_thousands_of_cached_tokens_and_planted_faults_change_it(engine):
    (stock, pool, both, hit, order), _ = engine(
        {"mode": "off", **LLAMA},
        {"mode": "pool", **LLAMA},
        {"mode": "tables,pool,observe", **LLAMA},
        {"mode": "pool", "plant": "hit", **LLAMA},
        {"mode": "pool", "plant": "order", **LLAMA},
    )
    same(stock, pool, both)
    assert stock["preemptions"] > 0
    assert stock["cached"] > 2000
    assert both["tables"] == TABLES
    assert hit["digest"] != stock["digest"]
    assert order["hits"] != stock["hits"]


def test_mla_with_preemptions(engine):
    (stock, pool), _ = engine({"mode": "off", **DEEPSEEK}, {"mode": "tables,pool,observe", **DEEPSEEK})
    same(stock, pool)
    assert stock["preemptions"] > 0


@pytest.mark.long
@pytest.mark.parametrize("model", [MISTRAL, HYBRID], ids=["window", "window-and-full"])
def test_sliding_windows(engine, model):
    (stock, pool, both), _ = engine(
        {"mode": "off", **model}, {"mode": "pool", **model}, {"mode": "tables,pool,observe", **model}
    )
    same(stock, pool, both)


@pytest.mark.long
def test_smollm2_answers_real_chats_alike(engine):
    if not (Path(sys.prefix) / "smollm2").is_dir():
        pytest.skip("SmolLM2 is not here: tools/peers.sh DIR smollm2 unpacks it")
    settings = {"model": "smollm2", "block_size": 32, "num_gpu_blocks_override": 40}
    (stock, pool, both), _ = engine(
        {"mode": "off", **settings}, {"mode": "pool", **settings}, {"mode": "tables,pool,observe", **settings}
    )
    assert pool["digest"] == both["digest"] == stock["digest"]
    assert pool["hits"] == both["hits"] == stock["hits"]
    assert (pool["pools"], both["findings"], stock["cached"] > 0) == (SHORT, {}, True)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_two_ranks(engine, ranks):
    # Their scheduler is in the test's own process, and so given the same requests at each step.
    settings = {**LLAMA, **ranks}
    (stock, pool, both), _ = engine(
        {"mode": "off", **settings}, {"mode": "pool", **settings}, {"mode": "tables,pool,observe", **settings}
    )
    same(stock, pool, both)
    assert stock["preemptions"] > 0
    assert stock["cached"] > 2000
    assert (both["tables"], both["observers"]) == (TABLES, 2)


@pytest.mark.long
@pytest.mark.parametrize("more", [{"async_scheduling": True}, {"async_scheduling": False}], ids=["async", "sync"])
def test_a_pool_too_small_by_either_scheduler(engine, more):
    settings = {**ROUGH, **more, "scheduling_policy": "fcfs", "rough": 200}
    (stock, ours), _ = engine({"mode": "off", **settings}, {"mode": "pool", **settings})
    same(stock, ours)
    assert stock["preemptions"] > 200


@pytest.mark.long
def test_a_connector_that_brings_tokens_from_outside(engine):
    settings = {**LLAMA, "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}}
    (stock, ours), _ = engine({"mode": "off", **settings}, {"mode": "pool", **settings})
    same(stock, ours)


def test_in_processes_of_its_own_the_plugin_comes_by_its_entry_point(engine):
    settings = {**LLAMA, "processes": True, "again": False}
    (stock,), _ = engine({"mode": "off", **settings})
    (ours,), done = engine({"mode": "tables,pool", **settings}, environment={"VLLM_LOGGING_LEVEL": "INFO"})
    assert ours["digest"] == stock["digest"]
    assert ours["tables"] == TABLES
    # The scheduler has a process of its own, in which nothing can be asked: its log says what it runs on.
    assert f"blocktable pool: {POOL}, steps shortened" in done.stdout + done.stderr
