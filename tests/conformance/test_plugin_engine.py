"""The same requests through stock vLLM and through vLLM on our tables, same schedule: the same token ids."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance

OURS = ["blocktable.integrations.vllm_tables_v1.TablesV1"]
STOCK = ["vllm.v1.worker.block_table.MultiGroupBlockTable"]
POOL = "blocktable.integrations.vllm_pool_blocks.Pool"
COMPARED = ("digest", "hits", "preemptions")  # token ids, cached tokens of each request
# Pools that preempt; the platform fixes MLA's blocks to 16, and takes no prefix caching for it.
LLAMA = {"model": "llama", "block_size": 32, "num_gpu_blocks_override": 52, "enable_prefix_caching": True}
DEEPSEEK = {"model": "deepseek", "num_gpu_blocks_override": 74, "again": False}
MISTRAL = {"model": "mistral", "block_size": 32, "num_gpu_blocks_override": 52}
HYBRID = {"model": "hybrid", "block_size": 32, "num_gpu_blocks_override": 104}


def alike(stock, *ours):
    for one in ours:
        assert [one[what] for what in COMPARED] == [stock[what] for what in COMPARED]
        assert (one["observers"] > 0, one["findings"]) == ("observe" in one["mode"], {})


def same(stock, ours):
    alike(stock, ours)
    assert (stock["tables"], ours["tables"]) == (STOCK, OURS)
    assert stock["distinct"] > 200  # outputs that would notice a wrong block


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_token_ids_are_the_same_under_preemption_and_a_wrong_slot_changes_them(engine, model):
    (stock, ours, planted), _ = engine(
        {"mode": "off", **model}, {"mode": "tables,observe", **model}, {"mode": "tables", "plant": "slot", **model}
    )
    same(stock, ours)
    assert stock["preemptions"] > 0
    assert model is DEEPSEEK or stock["cached"] > 2000
    assert planted["digest"] != stock["digest"]


@pytest.mark.long
@pytest.mark.parametrize("model", [MISTRAL, HYBRID], ids=["window", "window-and-full"])
def test_sliding_windows(engine, model):
    (stock, ours), _ = engine({"mode": "off", **model}, {"mode": "tables,observe", **model})
    same(stock, ours)


@pytest.mark.long
def test_smollm2_answers_real_chats_alike(engine):
    if not (Path(sys.prefix) / "smollm2").is_dir():
        pytest.skip("SmolLM2 is not here: tools/peers.sh DIR smollm2 unpacks it")
    settings = {"model": "smollm2", "block_size": 32, "num_gpu_blocks_override": 40}
    (stock, ours), _ = engine({"mode": "off", **settings}, {"mode": "tables,observe", **settings})
    alike(stock, ours)
    assert (ours["tables"], stock["cached"] > 0) == (OURS, True)


@pytest.mark.long
def test_asynchronous_scheduling(engine):
    settings = {**LLAMA, "async_scheduling": True}
    (stock, ours), _ = engine({"mode": "off", **settings}, {"mode": "tables,observe", **settings})
    same(stock, ours)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["1", "tp2", "pp2"]
)
def test_in_processes_of_their_own_the_plugin_comes_by_its_entry_point(engine, ranks):
    settings = {**LLAMA, "processes": True, **ranks}
    (stock,), _ = engine({"mode": "off", **settings})
    for mode in ("tables,observe", "tables,pool,observe"):
        (ours,), done = engine({"mode": mode, **settings}, environment={"VLLM_LOGGING_LEVEL": "INFO"})
        assert ours["digest"] == stock["digest"]
        # How many requests the engine has seen at its first step is up to its processes, and with it what is cached by then.
        assert min(stock["cached"], ours["cached"]) > 1000
        assert (stock["tables"], ours["tables"]) == (STOCK, OURS)
        assert (ours["observers"], ours["findings"]) == (2 if ranks else 1, {})
        # The scheduler has a process of its own, in which nothing can be asked: its log says what it runs on.
        assert (f"blocktable pool: {POOL}, steps shortened" in done.stdout + done.stderr) == ("pool" in mode)


@pytest.fixture
def trace():
    path = Path(os.environ.get("BLOCKTABLE_DATA", ""), "traces", "mooncake-conversation.jsonl")
    if not os.environ.get("BLOCKTABLE_DATA") or not path.is_file():
        pytest.skip("the Mooncake trace is not here: set BLOCKTABLE_DATA to the folder that has traces/")
    return str(path)


@pytest.mark.parametrize("count", [600, pytest.param(12031, marks=pytest.mark.long)])
def test_the_mooncake_trace_breaks_no_law_on_our_tables(engine, trace, count):
    settings = {**LLAMA, "max_model_len": 2048, "max_num_seqs": 64, "num_gpu_blocks_override": 400}
    (found,), _ = engine({"mode": "tables,observe", "trace": trace, "count": count, **settings})
    assert found["tables"] == OURS
    assert (found["observers"], found["findings"]) == (1, {})
    assert found["cached"] > 0


SECOND = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.mark.long
def test_the_second_runner_in_tritons_interpreter(real, engine):
    real("triton")
    settings = {**LLAMA, "num_gpu_blocks_override": 27, "max_model_len": 768, "small": True}
    (stock, ours, pool, both, planted), _ = engine(
        {"mode": "off", **settings},
        {"mode": "tables,observe", **settings},
        {"mode": "pool", **settings},
        {"mode": "tables,pool,observe", **settings},
        {"mode": "tables", "plant": "slot", **settings},
        environment=SECOND,
        interpreter=True,
    )
    alike(stock, ours, pool, both)
    assert stock["preemptions"] > 0
    assert stock["cached"] > 0
    assert planted["digest"] != stock["digest"]
    assert ours["tables"] == both["tables"] == ["blocktable.integrations.vllm_tables_v2.TablesV2"]
    assert pool["pools"] == both["pools"] == [[POOL, True]]
