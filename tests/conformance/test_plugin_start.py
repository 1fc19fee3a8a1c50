"""The plugin in real launches: it comes by its entry point, and refuses before any process starts or weight is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance

SCRIPT = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[1])
from plugin_engine import make_model
model = str(make_model("llama"))
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
read = []
load = DefaultModelLoader.load_weights
DefaultModelLoader.load_weights = lambda *a, **k: (read.append(1), load(*a, **k))[1]
LIMITS = dict(skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True, dtype="bfloat16", kv_cache_memory_bytes=16 << 20)

def launch(**settings):
    begin = time.monotonic()
    try:
        LLM(model=model, **LIMITS, **settings)
    except Exception as error:
        print("FOUND", json.dumps([type(error).__name__, str(error), time.monotonic() - begin, len(read)]), flush=True)
    else:
        print("FOUND", json.dumps(None), flush=True)

EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=1024).create_engine_config()  # imports are not counted below
launch(block_size=16)
from blocktable.integrations import _patches, vllm_preflight
_patches.undo()
_patches.wrap(__import__("vllm.model_executor.model_loader.base_loader", fromlist=["x"]), "initialize_model", vllm_preflight._built)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
launch(block_size=16)
"""


@pytest.fixture(scope="module")
def refusals(real):
    """Return what two launches with blocks of 16 on a CPU were refused with: by both stages, then by the second alone."""
    real("vllm")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BLOCKTABLE_VLLM")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == 2, done.stdout[-2000:] + done.stderr[-4000:]
    return found


def test_the_configuration_is_refused_in_the_users_own_process_within_a_second(refusals):
    kind, text, seconds, weights = refusals[0]
    assert kind == "PreflightError"
    assert "No common block size for 16" in text
    assert "--block-size 32" in text
    assert weights == 0
    assert seconds < 5  # 0.6 s on an idle machine


def test_the_built_model_is_refused_before_a_weight_is_read(refusals):
    kind, text, _, weights = refusals[1]
    assert kind == "PreflightError"
    assert "No common block size for 16" in text
    assert "ways out, each checked: --block-size 32" in text
    assert weights == 0
