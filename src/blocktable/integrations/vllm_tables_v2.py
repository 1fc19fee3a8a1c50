"""vLLM's second model runner on our tables: what stands in for its ``BlockTables``.

Rows are request numbers, and each step gathers the rows of its batch into tables at fixed addresses:

    append_block_ids ... apply_staged_writes     host tables -> one delta -> the device's persistent tables
    gather_block_tables                          persistent tables -> the step's, padded rows null
    compute_slot_mappings                        persistent tables -> slots, padded ones -1

A row is never cleared, only overwritten by the next request that gets its number.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from blocktable.device import DeviceTables
from blocktable.integrations._pending import Pending
from blocktable.integrations.vllm_groups import known, make_group, pick
from blocktable.tables import BlockTables

__all__ = ["TablesV2"]


class TablesV2:
    """The tables of all groups, called as vLLM's runner calls them. Refusals come from ``apply_staged_writes``."""

    redirect_writes_to_null_block = False  # vLLM sets it while requests made for a warm-up run

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: list[bool] | None = None,
        dcp_sharded: list[bool] | None = None,
    ) -> None:
        groups = len(block_sizes)
        enabled, sharded = slot_mapping_enabled or [True] * groups, dcp_sharded or [True] * groups
        self.block_sizes, self.num_kv_cache_groups = block_sizes, groups
        self.max_num_reqs, self.max_num_batched_tokens, self.device = max_num_reqs, max_num_batched_tokens, device
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave
        self.slot_mapping_enabled, self.dcp_sharded = enabled, sharded
        self.known = known()
        kinds = pick(self.known, [not one for one in enabled], encoder=True)
        shapes = zip(kinds, max_num_blocks_per_group, block_sizes, sharded, strict=True)
        self.host = BlockTables(
            [
                make_group(kind, width, size, cp_size if split else 1, cp_interleave)
                for kind, width, size, split in shapes
            ],
            max_rows=max_num_reqs,
            num_blocks=self.known.num_blocks if self.known else None,
        )
        self.pending = Pending(self.host)
        ranks = max(shape.cp_size for shape in self.host.shapes)
        depth = self.known.depth if self.known else 2
        self.mirror = DeviceTables(self.host, device, cp_rank=cp_rank if ranks > 1 else 0, depth=depth)
        self.block_tables = [SimpleNamespace(gpu=table) for table in self.mirror.tables]
        self.num_blocks = SimpleNamespace(np=[table.num_blocks for table in self.host.tables])
        # The first batch has room for all rows: every later one of a step is a part of it, at the same addresses.
        self._batch = self.mirror.gather([], max_num_reqs)
        self._written = False  # the runner may have written into the batch
        self.input_block_tables = list(self._batch.tables)
        self.slot_mappings = torch.full((groups, max_num_batched_tokens), -1, dtype=torch.int64, device=device)

    def append_block_ids(self, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool) -> None:
        """Put blocks behind a row, or make them the whole row; one list per group."""
        if self.redirect_writes_to_null_block:
            new_block_ids = [[] for _ in self.block_sizes]  # an empty row reads the null block and writes nowhere
        if overwrite:
            self.pending.add("assign", req_index, [list(ids) for ids in new_block_ids])
        else:
            self.pending.add("append", req_index, new_block_ids)

    def apply_staged_writes(self) -> None:
        """Bring what changed to the device; cost: what changed."""
        self.pending.flush()
        self.mirror.apply(self.host.commit())

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: tuple[torch.Tensor, ...] | None = None,
        out_ptrs: torch.Tensor | None = None,  # noqa: ARG002 - vLLM's kernel wants addresses
    ) -> tuple[torch.Tensor, ...]:
        """Return the tables of the requests of a step, padded rows null, in the persistent tables or in ``out``."""
        if out is not None:
            return tuple(
                _gather(table, idx_mapping, target[:num_reqs_padded])
                for table, target in zip(self.mirror.tables, out, strict=True)
            )
        into, self._written = self._batch if self._written else None, False
        return self.mirror.gather(idx_mapping, num_reqs_padded, out=into).tables

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Return the step's tables with null rows, which the runner may fill for a dummy run."""
        self._written = True
        return tuple(table[:num_reqs].zero_() for table in self.input_block_tables)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slots of a step's tokens per group, -1 from its last token to the buffer's end."""
        target = self.slot_mappings if out is None else out
        starts = query_start_loc[: idx_mapping.shape[0] + 1]
        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        self.mirror.slot_mapping(idx_mapping, starts, positions, target.shape[1], out=into)
        if into is not target:
            target.copy_(into)
        return target[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Return the slots of a dummy run: all -1."""
        self.slot_mappings.fill_(-1)
        return self.slot_mappings[:, :num_tokens]

    def __repr__(self) -> str:
        """Say what and where."""
        return f"TablesV2({self.mirror!r})"


def _gather(table: Any, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy rows of a table into foreign memory; row -1 and all past the rows are null."""
    count = rows.shape[0]
    torch.index_select(table, 0, rows.clamp(min=0), out=target[:count])
    target[:count].mul_((rows >= 0)[:, None])
    target[count:].zero_()
    return target
