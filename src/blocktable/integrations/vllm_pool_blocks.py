"""vLLM's block pool with the work of a call done in one loop: what stands in for ``BlockPool``.

Blocks stay vLLM's own objects, in vLLM's own list and map, because its managers, connectors and offloaders read and link
them: a pool in flat arrays would have to mirror each of them, and a compiled call costs more than these loops do for the
one or two blocks of a decode step. What is seldom asked for (partial blocks, moved hashes, pins, a reset, events and
metrics where they are on) is vLLM's own code on the same structures, and so the same by construction.

Two things are added. A block that is given back more often than it was taken is refused (L9): vLLM counts it below zero
and never hands it out again. And `check` recounts the pool from scratch.
"""

# ruff: noqa: SLF001 - a block's fields without its properties, twice as fast

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, NoReturn

from blocktable.errors import LawBroken

__all__ = ["Pool"]

_BlockPool: Any = import_module("vllm.v1.core.block_pool").BlockPool
_Block: Any = import_module("vllm.v1.core.kv_cache_utils").KVCacheBlock


def _suffix(group: int) -> bytes:
    """Return what a block's hash ends with in a group."""
    return group.to_bytes(4, "big")


class Pool(_BlockPool):  # type: ignore[misc]
    """A ``BlockPool`` with the same hits, order of eviction, events and metrics, at a fraction of the time per block."""

    def longest_hit(self, block_hashes: Iterable[bytes], count: int, group: int) -> list[Any]:
        """Return the cached blocks of the first ``count`` hashes, up to the first that has none; cost: their number."""
        found: list[Any] = []
        get, suffix = self.cached_block_hash_to_block._cache.get, _suffix(group)
        for block_hash in islice(block_hashes, count):
            block = get(block_hash + suffix)
            if block is None:
                break
            found.append(block if block.__class__ is _Block else next(iter(block.values())))
        return found

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Any] | None:
        """Return a block with this hash for each of the groups, the first that was cached; None where one has none."""
        found: list[Any] = []
        get = self.cached_block_hash_to_block._cache.get
        for group in kv_cache_group_ids:
            block = get(block_hash + _suffix(group))
            if block is None:
                return None
            found.append(block if block.__class__ is _Block else next(iter(block.values())))
        return found

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Let a request's blocks that became full be found by their hashes."""
        first = num_cached_blocks
        if block_mask is None and block_size == self.hash_block_size and not self.enable_kv_cache_events:
            first = self._cache_plain(request.block_hashes, blocks, first, num_full_blocks, kv_cache_group_id)
        if first < num_full_blocks:
            super().cache_full_blocks(
                request, blocks, first, num_full_blocks, block_size, kv_cache_group_id, block_mask=block_mask
            )

    def _cache_plain(self, hashes: Sequence[bytes], blocks: list[Any], first: int, last: int, group: int) -> int:
        """Cache blocks up to ``last`` or one that has a hash already, which was partial; return where that is."""
        found, suffix, size = self.cached_block_hash_to_block, _suffix(group), self.hash_block_size
        claim = found._cache.setdefault
        for i in range(first, last):
            block = blocks[i]
            if block.is_null:
                continue
            if block._block_hash is not None:
                return i
            block._block_hash = key = hashes[i] + suffix
            block._block_hash_num_tokens = (i + 1) * size
            if claim(key, block) is not block:
                found.insert(key, block)
        return last

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks from the front of the free list, and out of the prefix cache; ValueError where they are too few."""
        queue = self.free_block_queue
        if (
            num_blocks > queue.num_free_blocks
            or self._reuse_watchers
            or self.metrics_collector
            or self.enable_kv_cache_events
        ):
            taken: list[Any] = super().get_new_blocks(num_blocks)
            return taken
        cached, more = self.cached_block_hash_to_block._cache, self.cached_block_hashes_by_block
        taken, head = [], queue.fake_free_list_head
        block = head.next_free_block
        for _ in range(num_blocks):
            if block.ref_cnt:
                self._broken(f"block {block.block_id} is free and has {block.ref_cnt} owners", block)
            taken.append(block)
            key = block._block_hash
            if key is not None:
                block._block_hash = block._block_hash_num_tokens = None
                if cached.get(key) is block:
                    del cached[key]
                else:
                    self.cached_block_hash_to_block.pop(key, block.block_id)
                for other in more.pop(block.block_id, ()) if more else ():
                    self.cached_block_hash_to_block.pop(other, block.block_id)
            block.ref_cnt = 1
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        head.next_free_block, block.prev_free_block = block, head
        queue.num_free_blocks -= num_blocks
        return taken

    def touch(self, blocks: Sequence[Any]) -> None:
        """Give blocks one more owner each; those that had none leave the free list."""
        if self.metrics_collector:
            super().touch(blocks)
            return
        left = 0
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                before, after = block.prev_free_block, block.next_free_block
                if before is None or after is None:
                    self._broken(f"block {block.block_id} has no owner and is not free", block)
                before.next_free_block, after.prev_free_block = after, before
                block.prev_free_block = block.next_free_block = None
                left += 1
            block.ref_cnt += 1
        self.free_block_queue.num_free_blocks -= left

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Take one owner from each block; those with none left are handed out again, cached ones last."""
        blocks = list(ordered_blocks)
        first: list[Any] = []
        last: list[Any] = []
        others: dict[Any, list[Any]] = {}
        caching = self.enable_caching
        for at, block in enumerate(blocks):
            if block.pool is not self and block.pool is not None:
                others.setdefault(block.pool, []).append(block)
                continue
            block.ref_cnt = left = block.ref_cnt - 1
            if left > 0 or block.is_null:
                continue
            if left < 0:
                for one in blocks[: at + 1]:
                    one.ref_cnt += one.pool is self or one.pool is None
                self._broken(f"block {block.block_id} was given back and has no owner", block)
            (first if block._block_hash is None or not caching else last).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)
        for pool, theirs in others.items():
            pool.free_blocks(theirs)

    def check(self, rows: Iterable[Iterable[Any]] | None = None) -> None:
        """Recount the pool; raises `LawBroken` (L9, L10) for what does not add up. Cost: the pool's size.

        ``rows`` are the lists of blocks of all requests, and of whatever else holds any: each block then has as many
        owners as it stands in them.
        """
        queue = self.free_block_queue
        free, before, block = set(), queue.fake_free_list_head, queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail:
            if block.prev_free_block is not before or block.block_id in free or block.ref_cnt or block.is_null:
                self._broken(f"block {block.block_id} is wrongly in the free list: {block!r}", block)
            free.add(block.block_id)
            before, block = block, block.next_free_block
        owners = {one.block_id: one.ref_cnt for one in self.blocks if one.block_id not in free and not one.is_null}
        if len(free) != queue.num_free_blocks or any(count < 1 for count in owners.values()):
            self._broken(f"{len(free)} blocks are in the free list, {queue.num_free_blocks} are counted: {owners}")
        if rows is not None:
            held = Counter(one.block_id for row in rows for one in row if not one.is_null)
            if held != owners:
                differ = {
                    key: (held[key], owners.get(key, 0)) for key in held.keys() | owners if held[key] != owners.get(key)
                }
                self._broken(f"blocks stand in rows and have owners: {differ}")
        self._check_hashes()

    def _check_hashes(self) -> None:
        """L10: a block is found by the hashes that it has, and by no other."""
        own = {(one.block_hash, one.block_id) for one in self.blocks if one.block_hash is not None}
        own |= {(key, number) for number, keys in self.cached_block_hashes_by_block.items() for key in keys}
        found = set()
        for key, value in self.cached_block_hash_to_block._cache.items():
            found |= {(key, number) for number in ([value.block_id] if isinstance(value, _Block) else value)}
        if own != found:
            raise LawBroken(
                f"{len(own - found)} hashes of blocks are not found, {len(found - own)} lead to blocks without them",
                law="L10",
                values={"lost": len(own - found), "strange": len(found - own)},
            )

    def _broken(self, what: str, block: Any = None) -> NoReturn:
        raise LawBroken(what, law="L9", values={"block": getattr(block, "block_id", None)})
