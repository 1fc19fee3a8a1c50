"""vLLM's real `KVCacheManager` and requests, driven as its scheduler drives them, with its worker's tables behind."""

from typing import Any

import numpy as np
from _vllm import torch, v1_tables
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

BLOCK = 16
torch.set_num_threads(1)  # the host loop of one process, not a race of its helpers
kv_cache_utils.init_none_hash(sha256)
HASHER = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
PARAMS = SamplingParams(max_tokens=1 << 30)
PARAMS.update_from_generation_config({}, eos_token_id=-1)


def manager(num_blocks: int, max_model_len: int, windows: tuple[int, ...] = (0,)) -> KVCacheManager:
    """Return a manager of one group per window (0: full attention)."""
    numbers: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(
            [f"layer.{i}"], SlidingWindowSpec(**numbers, sliding_window=w) if w else FullAttentionSpec(**numbers)
        )
        for i, w in enumerate(windows)
    ]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=max_model_len, scheduler_block_size=BLOCK, hash_block_size=BLOCK, log_stats=False
    )


def request(name: str, tokens: list[int]) -> Request:
    """Return a request, its prompt hashed, as vLLM's front makes one."""
    return Request(
        request_id=name, prompt_token_ids=tokens, sampling_params=PARAMS, pooling_params=None, block_hasher=HASHER
    )


class Engine:
    """Requests that decode together: manager, tables, commit and slot mapping of a step."""

    def __init__(self, rows: int, num_blocks: int, max_model_len: int, windows: tuple[int, ...] = (0,)) -> None:
        self.manager = manager(num_blocks, max_model_len, windows)
        self.tables = v1_tables(rows, [-(-max_model_len // BLOCK)] * len(windows), BLOCK, tokens=max(rows, 8192))
        for table in self.tables.block_tables:  # as CPUModelRunner does
            table.block_table.gpu = table.block_table.cpu
            table.slot_mapping.gpu = table.slot_mapping.cpu
        self.requests: list[Request] = []
        self.starts = torch.arange(rows + 1, dtype=torch.int32)
        self.positions = torch.zeros(rows, dtype=torch.int64)

    def admit(self, tokens: list[int]) -> None:
        """Compute a prompt as the next row."""
        row = len(self.requests)
        one = request(str(row), tokens)
        blocks, cached, _ = self.manager.get_computed_blocks(one)
        if self.manager.allocate_slots(one, len(tokens) - cached, cached, blocks) is None:
            raise RuntimeError("the pool is too small")
        one.num_computed_tokens = len(tokens)
        self.tables.add_row(self.manager.get_block_ids(one.request_id), row)
        self.requests.append(one)
        self.positions[row] = len(tokens) - 1

    def step(self, tokens: list[int]) -> Any:
        """Give every row its sampled token, blocks and slots for it."""
        manager, tables = self.manager, self.tables
        for row, one in enumerate(self.requests):
            one.append_output_token_ids(tokens[row])
            blocks = manager.allocate_slots(one, 1)
            one.num_computed_tokens += 1
            new = blocks.get_block_ids(allow_none=True)
            if new is not None:
                tables.append_row(new, row)
        tables.commit_block_table(len(self.requests))
        self.positions += 1
        tables.compute_slot_mapping(len(self.requests), self.starts, self.positions)
        return tables.block_tables[0].slot_mapping.gpu

    def slots(self) -> np.ndarray:
        """Return the slots of the last step, of every group."""
        n = len(self.requests)
        return np.stack([table.slot_mapping.gpu.numpy()[:n] for table in self.tables.block_tables])
