"""The same requests through stock vLLM and through vLLM on our tables, same schedule: the same token ids."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance

ENGINE = Path(__file__).with_name("plugin_engine.py")
OURS = ["blocktable.integrations.vllm_tables_v1.TablesV1"]
STOCK = ["vllm.v1.worker.block_table.MultiGroupBlockTable"]
# Pools that preempt; the platform fixes MLA's blocks to 16, and takes no prefix caching for it.
LLAMA = {"model": "llama", "block_size": 32, "num_gpu_blocks_override": 52, "enable_prefix_caching": True}
DEEPSEEK = {"model": "deepseek", "num_gpu_blocks_override": 80}
MISTRAL = {"model": "mistral", "block_size": 32, "num_gpu_blocks_override": 52}
GEMMA = {"model": "gemma", "block_size": 32, "num_gpu_blocks_override": 104}


@pytest.fixture
def engine(real):
    """Return a function that runs the engine once per setting, in one process."""
    real("vllm")

    def run(*settings, environment=None):
        import os

        done = subprocess.run(
            [sys.executable, str(ENGINE), json.dumps(settings)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
        found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
        assert len(found) == len(settings), done.stdout[-2000:] + done.stderr[-4000:]
        return found, done

    return run


def same(stock, ours):
    assert ours["digest"] == stock["digest"]
    assert ours["cached"] == stock["cached"]
    assert ours["preemptions"] == stock["preemptions"]
    assert (stock["tables"], ours["tables"]) == (STOCK, OURS)
    assert stock["distinct"] > 200  # outputs that would notice a wrong block


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_token_ids_are_the_same_under_preemption_and_a_wrong_slot_changes_them(engine, model):
    (stock, ours, planted), _ = engine(
        {"mode": "off", **model}, {"mode": "tables,observe", **model}, {"mode": "tables", "plant": True, **model}
    )
    same(stock, ours)
    assert stock["preemptions"] > 0
    assert model is DEEPSEEK or stock["cached"] > 2000
    assert (ours["observers"], ours["findings"]) == (1, {})
    assert planted["digest"] != stock["digest"]
