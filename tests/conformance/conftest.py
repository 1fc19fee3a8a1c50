"""Real engines for the conformance tests: imported where they are installed, else the test skips and says what is missing."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ENGINE = Path(__file__).with_name("plugin_engine.py")
# Programs that the tests start; nothing in them is a test, and one imports what only long runs install.
collect_ignore = ["plugin_engine.py", "triton_on_cpu.py"]


@pytest.fixture(scope="session")
def real():
    """Return a function that imports a module of a real engine by its full name, or skips."""

    def load(name):
        engine = name.partition(".")[0]
        if importlib.util.find_spec(engine) is None:
            pytest.skip(f"{engine} is not installed here: `make conformance` runs this test beside it")
        with warnings.catch_warnings():  # what an engine warns of when imported is not this project's to mend
            warnings.simplefilter("ignore")
            return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def flashinfer_version(real):
    """Return the version of the FlashInfer under test."""
    real("flashinfer")
    return version("flashinfer-python")


@pytest.fixture(scope="session")
def vllm_version(real):
    """Return the version of the vLLM under test."""
    return real("vllm").__version__.partition("+")[0]


@pytest.fixture
def engine(real):
    """Return a function that runs the engine once per setting, in one process."""
    real("vllm")

    def run(*settings, environment=None, interpreter=False):
        through = [str(ENGINE.with_name("triton_on_cpu.py"))] if interpreter else []
        done = subprocess.run(
            [sys.executable, *through, str(ENGINE), json.dumps(settings)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | (environment or {}),
        )
        found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
        assert len(found) == len(settings), done.stdout[-2000:] + done.stderr[-4000:]
        return found, done

    return run


@pytest.fixture
def ask(real):
    """Return a function that makes a request of vLLM's own.

    It has tokens, of which every ``size`` are hashed, and what it has beside them: ``images`` (name, offset, length), an
    ``adapter`` (name, number, path) and a ``salt``.
    """
    utils, inputs = real("vllm.v1.core.kv_cache_utils"), real("vllm.multimodal.inputs")
    sha256, lora = real("vllm.utils.hashing").sha256, real("vllm.lora.request").LoRARequest
    request, params = real("vllm.v1.request").Request, real("vllm").SamplingParams(max_tokens=64)
    utils.init_none_hash(sha256)
    numbers = itertools.count()

    def make(tokens, size, images=(), adapter=None, salt=None):
        places = [inputs.PlaceholderRange(offset=offset, length=length) for _, offset, length in images]
        return request(
            str(next(numbers)), tokens, params, None, block_hasher=utils.get_request_block_hasher(size, sha256),
            mm_features=[
                inputs.MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)
                for (name, _, _), place in zip(images, places, strict=True)
            ],
            lora_request=lora(*adapter) if adapter else None, cache_salt=salt,
        )  # fmt: skip

    return make
