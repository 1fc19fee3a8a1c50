"""Put our tables in the place of vLLM's, in both of its model runners, and say so.

vLLM makes its tables without saying what their groups are, so the call that brings the groups to a worker is wrapped.
Where a group is of an unknown kind, that worker keeps vLLM's own tables.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from blocktable.integrations import _patches
from blocktable.integrations.vllm import logger, stay_stock
from blocktable.integrations.vllm_groups import is_strange, knowing, known, read_groups

__all__ = ["in_use", "install"]

_INPUT_BATCH, _V2, _V2_RUNNER = (
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu.block_table",
    "vllm.v1.worker.gpu.model_runner",
)
_stock: dict[str, Any] = {}


def install() -> None:
    """Replace the names under which vLLM's runners look up their tables."""
    _stock["v1"] = _patches.replace(import_module(_INPUT_BATCH), "MultiGroupBlockTable", _maker("v1"))
    _stock["v2"] = _patches.replace(import_module(_V2), "BlockTables", _maker("v2"))
    if _V2_RUNNER in sys.modules:  # it has looked the name up already
        _patches.replace(sys.modules[_V2_RUNNER], "BlockTables", _maker("v2"))
    _patches.wrap(import_module("vllm.v1.worker.worker_base").WorkerWrapperBase, "initialize_from_config", _initialize)


def _maker(runner: str) -> type:
    """Return a class, since vLLM annotates with it, whose instances are our tables, or vLLM's where ours cannot be."""

    class Tables:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if is_strange() or not kwargs.get("block_sizes"):  # a model without caches has no tables
                return _stock[runner](*args, **kwargs)
            return _ours(runner)(*args, **kwargs)

    return Tables


def _ours(runner: str) -> Any:
    """Import our tables, and with them Numba, no earlier than they are made.

    vLLM's CPU worker asks every object of every module for its ``__dict__`` when it starts, and llvmlite's library answers
    any name that it does not know with a function, on which vLLM stops. So the worker is past that by now, and a later
    one in this process finds an empty ``__dict__`` there.
    """
    module = import_module(f"blocktable.integrations.vllm_tables_{runner}")
    functions = getattr(getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})
    return getattr(module, f"Tables{runner.upper()}")


def _initialize(original: Callable[..., None], wrapper: Any, kv_cache_configs: list[Any]) -> None:
    groups = read_groups(kv_cache_configs[wrapper.global_rank])
    if isinstance(groups, str):
        stay_stock("tables", f"the cache {groups} is of a kind it does not know")
    else:
        groups = groups._replace(depth=max(wrapper.vllm_config.max_concurrent_batches, 2))
    with knowing(groups):
        original(wrapper, kv_cache_configs)
        runner = getattr(wrapper.worker, "model_runner", None)
        _make_anew(getattr(runner, "input_batch", None))
    logger.info("blocktable tables: %s", in_use(runner))


def _make_anew(batch: Any) -> None:
    """Make V1's tables again: the first are made before the groups are known, and kept where their sizes are the same."""
    first: Any = getattr(batch, "block_table", None)
    if hasattr(first, "arguments") and (is_strange() or first.known != known()):
        batch.block_table = (_stock["v1"] if is_strange() else type(first))(**first.arguments)


def in_use(runner: Any) -> str:
    """Return the full name of the class of a model runner's tables."""
    tables = getattr(getattr(runner, "input_batch", None), "block_table", None) or getattr(runner, "block_tables", None)
    kind = type(tables)
    return "this worker has none" if tables is None else f"{kind.__module__}.{kind.__qualname__}"
