"""The functions of vLLM 0.32 that the pool mode does in fewer steps, or whose state it reads, each by a digest of its body.

`vllm_drift` compares them with the installed release; ``_bodies`` there makes the digests. One that differs may still do
the same: read it, run tests/conformance/test_pool_*.py with its digest here, and keep that if they pass.
"""

from collections.abc import Mapping

__all__ = ["BODIES"]

# file: function or method: digest
BODIES: Mapping[str, Mapping[str, str]] = {
    "v1/core/block_pool.py": {
        "BlockHashToBlockMap.get_one_block": "b821e1ba",
        "BlockHashToBlockMap.insert": "eb950e09",
        "BlockHashToBlockMap.pop": "73e0e744",
        "BlockPool.__init__": "27658af1",
        "BlockPool.get_cached_block": "7ebc869d",
        "BlockPool.cache_full_blocks": "e26f2981",
        "BlockPool._insert_block_hash": "69e3b018",
        "BlockPool._remove_cached_block_hashes": "d82d511d",
        "BlockPool._maybe_evict_cached_block": "d0aa4a4d",
        "BlockPool.get_new_blocks": "04028da2",
        "BlockPool.touch": "63e6eee3",
        "BlockPool.free_blocks": "e64802cc",
    },
    "v1/core/kv_cache_utils.py": {
        "make_block_hash_with_group_id": "a506a900",
        "KVCacheBlock.set_block_hash": "7e6445c5",
        "KVCacheBlock.reset_hash": "f3d90443",
        "FreeKVCacheBlockQueue.__init__": "2ce39003",
        "FreeKVCacheBlockQueue.popleft_n": "4c9622c2",
        "FreeKVCacheBlockQueue.remove": "7890ca5d",
    },
    "v1/core/kv_cache_manager.py": {
        "KVCacheBlocks.get_block_ids": "51c44639",
        "KVCacheManager.__init__": "4c154583",
        "KVCacheManager.allocate_slots": "8a61c133",
        "KVCacheManager.create_kv_cache_blocks": "6fe80a48",
    },
    "v1/core/kv_cache_coordinator.py": {
        "KVCacheCoordinator.get_num_blocks_to_allocate": "a37de4b3",
        "KVCacheCoordinator.allocate_new_blocks": "83688962",
        "KVCacheCoordinator.get_num_cacheable_tokens": "3c58a405",
        "KVCacheCoordinator.cache_blocks": "69582193",
        "KVCacheCoordinator.remove_skipped_blocks": "6da21231",
        "UnitaryKVCacheCoordinator.find_longest_cache_hit": "97b63711",
        "HybridKVCacheCoordinator.get_num_cacheable_tokens": "63510d0d",
    },
    "v1/core/single_type_kv_cache_manager.py": {
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate": "01144da4",
        "SingleTypeKVCacheManager.allocate_new_blocks": "38a3e360",
        "SingleTypeKVCacheManager.cache_blocks": "7c0fbdcb",
        "SingleTypeKVCacheManager.pop_blocks_for_free": "ebe7cfb7",
        "SingleTypeKVCacheManager.remove_skipped_blocks": "5f13fae9",
        "SingleTypeKVCacheManager._remove_blocks_in_range": "2939f35d",
        "SingleTypeKVCacheManager.get_num_skipped_tokens": "6cd43600",
        "FullAttentionManager.find_longest_cache_hit": "850535f1",
        "FullAttentionManager.cache_blocks": "4080dacc",
        "SlidingWindowManager.get_num_skipped_tokens": "e8ed7c12",
    },
}
