"""Real engines for the conformance tests: imported where they are installed, else the test skips and says what is missing."""

import importlib.util
import os
import warnings
from importlib.metadata import version

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
