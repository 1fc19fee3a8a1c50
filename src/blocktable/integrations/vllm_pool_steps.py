"""What vLLM's scheduler asks of its cache for each request at each step, answered in one comparison where nothing changes.

At most steps a running request needs no block, fills none and leaves none behind its window. vLLM finds that out anew each
time, through some fifteen calls (`KVCacheManager.allocate_slots`, the coordinator, the managers of each group, the pool),
which is nearly all that a decode step costs it. Here each row of blocks remembers its ``room``: up to how many tokens
that will stay so. It is computed from vLLM's own state after vLLM's own call, and is forgotten with the row, so that a
request that was freed, preempted or resumed starts without any.

With one group of full attention, the steps that do need a block or fill one are answered here as well, and so is the
lookup of a prompt. Whatever else is asked goes to vLLM's own function, as does everything of the managers named by
`why_not`.
"""

# ruff: noqa: SLF001 - a manager's private switches decide what is plain

from importlib import import_module
from typing import Any

from blocktable.integrations.vllm_pool_blocks import Pool

__all__ = ["Row", "shorten", "why_not"]

_kinds: Any = import_module("vllm.v1.core.single_type_kv_cache_manager")
_coordinators: Any = import_module("vllm.v1.core.kv_cache_coordinator")
_FULL = _kinds.FullAttentionManager
# By the exact class: one that is derived from these may do more at a step.
_KINDS = (_FULL, _kinds.SlidingWindowManager)
_COORDINATORS = (
    _coordinators.KVCacheCoordinatorNoPrefixCache,
    _coordinators.UnitaryKVCacheCoordinator,
    _coordinators.HybridKVCacheCoordinator,
)


class Row(list[Any]):
    """A request's blocks; up to ``room`` tokens, slots for drafts included, they stay as they are."""

    __slots__ = ("room",)

    def __init__(self) -> None:
        super().__init__()
        self.room = 0


def why_not(manager: Any) -> str:
    """Return why the steps of a ``KVCacheManager`` cannot be shortened; nothing where they can."""
    coordinator, pool = manager.coordinator, manager.block_pool
    stock = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    if type(manager).allocate_slots is not stock.allocate_slots:
        return f"{type(manager).__name__} has an allocate_slots of its own"
    if type(coordinator) not in _COORDINATORS:
        return f"the coordinator is a {type(coordinator).__name__}"
    if not isinstance(pool, Pool):
        return f"the pool is a {type(pool).__module__}.{type(pool).__name__}"
    for group, one in enumerate(coordinator.single_type_managers):
        if type(one) not in _KINDS or one.block_pool is not pool:
            return f"group {group} has a {type(one).__name__}"
        if one.enable_caching and not one.kv_cache_spec.prefix_cacheable:
            return f"group {group} keeps its blocks out of the prefix cache"
        if one.enable_caching and one.block_size != pool.hash_block_size:
            return f"group {group} has blocks of {one.block_size} tokens, hashed by {pool.hash_block_size}"
    return "" if coordinator.single_type_managers else "there is no cache"


def shorten(manager: Any) -> None:
    """Put the short ways before the functions of one ``KVCacheManager``; `why_not` has found nothing."""
    managers = manager.coordinator.single_type_managers
    for one in managers:
        one.req_to_blocks.default_factory = Row
    empty = manager.empty_kv_cache_blocks
    whole = empty.get_block_ids

    def get_block_ids(allow_none: bool = False, **named: Any) -> Any:
        return None if allow_none else whole(**named)

    empty.get_block_ids = get_block_ids
    grow = None
    if len(managers) == 1 and type(managers[0]) is _FULL:
        only, drafts = managers[0], manager.coordinator.eagle_group_ids
        if only.enable_caching and not drafts and only.dcp_world_size == 1:
            manager.coordinator.find_longest_cache_hit = _lookup(only)
        if not (only._record_new_block_ids or manager.coordinator.num_reprefillable_tokens):
            grow = _grow(manager)
    manager.allocate_slots = _short(manager, grow)


def _short(manager: Any, grow: Any) -> Any:
    """Return an ``allocate_slots`` that asks ``grow``, or vLLM's own function, only past a row's room."""
    running = import_module("vllm.v1.request").RequestStatus.RUNNING
    stock, nothing = manager.allocate_slots, manager.empty_kv_cache_blocks
    managers, longest = manager.coordinator.single_type_managers, manager.max_model_len
    row_of = managers[0].req_to_blocks.get

    def allocate_slots(
        request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **named: Any
    ) -> Any:
        if args:  # by position: nobody does
            drafts = {"num_lookahead_tokens": num_lookahead_tokens} if num_lookahead_tokens else {}
            return stock(request, num_new_tokens, *args, **drafts, **named)
        if not named and num_new_tokens > 0 and request.status is running:
            row = row_of(request.request_id)
            if row:
                if request.num_computed_tokens + num_new_tokens + num_lookahead_tokens <= row.room:
                    return nothing
                if grow is not None:
                    return grow(request, row, num_new_tokens, num_lookahead_tokens)
        found = stock(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **named)
        row = row_of(request.request_id)
        if found is not None and row:
            external = named.get("num_external_computed_tokens", 0)
            computed = request.num_computed_tokens + named.get("num_new_computed_tokens", 0) + external
            processed = max(0, min(computed, longest) - request.num_in_flight_tokens)
            row.room = min(_room(one, request.request_id, processed) for one in managers)
        return found

    return allocate_slots


def _room(manager: Any, request: str, processed: int) -> int:
    """Return up to how many tokens a group's row stays as it is: no block is needed, none full, none left behind."""
    size = manager.block_size
    room: int = len(manager.req_to_blocks.get(request, ())) * size
    if manager.enable_caching:
        room = min(room, (manager.num_cached_block.get(request, 0) + 1) * size - 1)
    if type(manager) is not _FULL:
        # At most one more token is left behind per token, and what has been left behind is gone from the row.
        room = min(room, processed + size - manager.get_num_skipped_tokens(processed) % size)
    return room


def _grow(manager: Any) -> Any:
    """Return what a running request's step costs past its room, with one group of full attention."""
    only, pool, longest = manager.coordinator.single_type_managers[0], manager.block_pool, manager.max_model_len
    nothing = manager.empty_kv_cache_blocks
    made = type(nothing)
    size, group, caching = only.block_size, only.kv_cache_group_id, only.enable_caching
    cached = only.num_cached_block
    queue = pool.free_block_queue

    def grow(request: Any, row: Row, new: int, lookahead: int) -> Any:
        total = min(request.num_computed_tokens, longest) + new
        blocks = nothing
        missing = -(-min(total + lookahead, longest) // size) - len(row)
        if missing > 0:
            if missing > queue.num_free_blocks:
                return None
            fresh = pool.get_new_blocks(missing)
            row += fresh
            blocks = made((fresh,))
        room = len(row) * size
        if caching:
            full = min(total, request.num_tokens) // size
            known = cached.get(request.request_id, 0)
            if full > known:
                pool.cache_full_blocks(request, row, known, full, size, group)
                cached[request.request_id] = known = full
            room = min(room, (known + 1) * size - 1)
        row.room = room
        return blocks

    return grow


def _lookup(manager: Any) -> Any:
    """Return the coordinator's lookup for one group of full attention without drafts."""
    pool, size, group = manager.block_pool, manager.block_size, manager.kv_cache_group_id

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> tuple[tuple[list[Any], ...], int, int]:
        blocks = pool.longest_hit(block_hashes, max_cache_hit_length // size, group)
        return (blocks,), len(blocks) * size, 0

    return find_longest_cache_hit
