"""Modules whose examples cannot run here, because what they are for is not installed, are left out by name."""

from importlib.util import find_spec

DEVICE = "src/blocktable/device"
collect_ignore = [] if find_spec("triton") else [f"{DEVICE}/kernels.py"]
collect_ignore_glob = [] if find_spec("torch") else [f"{DEVICE}/*.py", "src/blocktable/attention/*.py"]
collect_ignore_glob += [] if find_spec("transformers") else ["src/blocktable/engine/*.py"]
collect_ignore_glob += [] if find_spec("vllm") else ["src/blocktable/integrations/vllm_pool_*.py"]
