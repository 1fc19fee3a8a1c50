"""Put our block pool in the place of vLLM's, shorten what its scheduler asks of it per step, and say so.

Not through ``scheduler_cls``, vLLM's own way to another scheduler: that names one class for both of vLLM's schedulers, and
a pool put in after its constructor comes too late for the connectors that were bound to the first one there.
"""

from importlib import import_module
from typing import Any
from weakref import WeakSet

from blocktable.integrations import _patches
from blocktable.integrations.vllm import logger, stay_stock

__all__ = ["in_use", "install", "managers"]

_made: WeakSet[Any] = WeakSet()


def install() -> None:
    """Replace the name under which vLLM's coordinators look up their pool, and look at each manager once it is made."""
    pool = import_module("blocktable.integrations.vllm_pool_blocks").Pool
    _patches.replace(import_module("vllm.v1.core.kv_cache_coordinator"), "BlockPool", pool)
    _patches.wrap(import_module("vllm.v1.core.kv_cache_manager").KVCacheManager, "__init__", _initialize)


def _initialize(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    steps = import_module("blocktable.integrations.vllm_pool_steps")
    _made.add(manager)
    if not in_use(manager).startswith("blocktable."):
        stay_stock("pool", f"the pool is a {in_use(manager)}")
        return
    why = steps.why_not(manager)
    if not why:
        steps.shorten(manager)
    logger.info("blocktable pool: %s, %s", in_use(manager), f"steps as vLLM's: {why}" if why else "steps shortened")


def managers() -> list[Any]:
    """Return the live ``KVCacheManager`` objects of this process that were made since `install`."""
    return list(_made)


def in_use(manager: Any) -> str:
    """Return the full name of the class of a manager's pool."""
    kind = type(manager.block_pool)
    return f"{kind.__module__}.{kind.__qualname__}"
