"""vLLM's first model runner on our tables: what stands in for ``MultiGroupBlockTable``.

The runner's batch order is the tables' row order, so the device's table is handed over as it is. It is as wide as vLLM
itself makes it and holds manager blocks. On a CPU the host's table is the device's. The runner writes into what it is
handed: null blocks into rows past the batch, -1 into slots past its tokens.
"""

# ruff: noqa: SLF001 - the tensor that vLLM writes in place is the table itself

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from blocktable.device import DeviceTables
from blocktable.errors import ArgumentError
from blocktable.groups import KINDS
from blocktable.integrations._pending import Pending
from blocktable.integrations.vllm_groups import known, make_group, pick
from blocktable.tables import BlockTables

__all__ = ["TablesV1"]


class Halves:
    """One group's table on the host and on the device, by the names that vLLM uses.

    Whoever asks for a half may write it, or put it aside and bring it back. So what waits is sent first, and the next
    commit sends the rows again.
    """

    def __init__(self, owner: "TablesV1", host: torch.Tensor, device: torch.Tensor) -> None:
        self._owner, self._host, self._device = owner, host, device

    @property
    def cpu(self) -> torch.Tensor:
        """The host's half."""
        self._owner.lend()
        return self._host

    @property
    def np(self) -> Any:
        """The host's half."""
        return self.cpu.numpy()

    @property
    def gpu(self) -> torch.Tensor:
        """The device's half."""
        self._owner.lend()
        return self._device


class GroupV1:
    """One group's part of the tables; rows of other groups are left alone."""

    def __init__(
        self, owner: "TablesV1", group: int, host: torch.Tensor, device: torch.Tensor, slots: torch.Tensor
    ) -> None:
        shape = owner.host.shapes[group]
        self._owner, self._group = owner, group
        self.host, self.device = host, device
        self.block_size, self.max_num_blocks_per_req = shape.block_size, shape.width
        self.dcp_world_size, self.dcp_rank = owner.ranks, owner.rank
        self.cp_kv_cache_interleave_size = owner.arguments["cp_kv_cache_interleave_size"]
        self.block_table, self.slot_mapping = Halves(owner, host, device), SimpleNamespace(gpu=slots)
        self.maps_nothing = KINDS[shape.kind] == "state"

    def add_row(self, block_ids: list[int], row_idx: int) -> None:
        """Make these blocks the whole row."""
        self._owner.pending.flush()
        self._owner.host.assign([row_idx], [0, len(block_ids)], block_ids, group=self._group)

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring what changed to the device."""
        self._owner.commit_block_table(num_reqs)

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        """Return the first rows of the device's table; rows past the batch may be made null in it."""
        self._owner.hand_out(self._group, num_reqs)
        return self.device[:num_reqs]

    @property
    def num_blocks_per_row(self) -> Any:
        """The live count of every row, to be read."""
        self._owner.pending.flush()
        return self._owner.host.tables[self._group].num_blocks

    def get_cpu_tensor(self) -> torch.Tensor:
        """Return the host's table, to be read."""
        self._owner.pending.flush()
        return self.host

    def get_numpy_array(self) -> Any:
        """Return the host's table, to be read."""
        return self.get_cpu_tensor().numpy()

    def clear(self) -> None:
        """Blank both halves; the rows are as they were once their contents are put back."""
        self.block_table.gpu.fill_(0)
        self.block_table.cpu.fill_(0)


class TablesV1:
    """The tables of all groups, called as vLLM's runner calls them.

    Rows wait for the commit of their step, so a refusal (a row past its width, an id outside the pool) comes from there:
    before any kernel reads the row, and with nothing changed.

    The device follows by deltas. Rows in which vLLM may have written past them are kept as a set, and sent whole by the
    first commit that has them in its batch.
    """

    alias = True  # on a CPU the device's table is the host's; a bench of the copy says otherwise

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device,
        block_sizes: list[int],
        max_num_blocks: list[int],
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_modes: list[Any] | None = None,
    ) -> None:
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        groups = len(block_sizes)
        state = [mode.value == "none" for mode in slot_mapping_modes] if slot_mapping_modes else [False] * groups
        if len(max_num_blocks) != groups or len(state) != groups:
            raise ArgumentError(
                f"{groups} block sizes, {len(max_num_blocks)} widths and {len(state)} slot mapping modes",
                values={"block_sizes": groups, "max_num_blocks": len(max_num_blocks), "slot_mapping_modes": len(state)},
                remedy="pass one of each per group",
            )
        width = import_module("vllm.v1.worker.block_table").get_block_table_width
        self.ranks, self.rank = ranks, rank = _context_parallel()
        self._cp_rank = 0 if all(state) else rank  # states are not divided over ranks
        self.known = known()
        shapes = zip(pick(self.known, state, encoder=False), max_num_blocks, block_sizes, state, strict=True)
        self.host = BlockTables(
            [
                make_group(
                    kind,
                    width(blocks, size, token_alignment=None if none else 128),
                    size,
                    ranks,
                    cp_kv_cache_interleave_size,
                )
                for kind, blocks, size, none in shapes
            ],
            max_rows=max_num_reqs,
            num_blocks=self.known.num_blocks if self.known else None,
        )
        self.pending = Pending(self.host)
        on_host = self.alias and device.type == "cpu"
        depth = self.known.depth if self.known else 2
        self.mirror = None if on_host else DeviceTables(self.host, device, cp_rank=self._cp_rank, depth=depth)
        self._slots = torch.full((groups, max_num_batched_tokens), -1, dtype=torch.int64, device=device)
        self._rows: Any = np.arange(max_num_reqs)
        self._here: Any = self._slots.numpy() if on_host else None
        if device.type != "cpu":
            self._rows = torch.arange(max_num_reqs, device=device)
        self._differ: Any = np.zeros(max_num_reqs, bool)  # rows whose device half may differ from the host's
        self._committed = 0  # rows of the last commit; those behind them may be made null
        self.block_tables = [self._view(group) for group in range(groups)]
        if device.type == "cuda":  # compiled now rather than within the first step
            self._map(0, torch.zeros(1, dtype=torch.int32, device=device), self._slots[0, :0])

    def _view(self, group: int) -> GroupV1:
        host, shape = self.host, self.host.shapes[group]
        start = sum(host.max_rows * one.width for one in host.shapes[:group])
        entries = host._entries[start : start + host.max_rows * shape.width].reshape(host.max_rows, shape.width)
        cpu = torch.from_numpy(entries)
        gpu = cpu if self.mirror is None else self.mirror.tables[group]
        return GroupV1(self, group, cpu, gpu, self._slots[group])

    def append_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        """Put blocks behind a row, one list per group."""
        self.pending.add("append", row_idx, block_ids)

    def add_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        """Make blocks the whole of a row, one list per group."""
        self.pending.add("assign", row_idx, [list(ids) for ids in block_ids])  # the runner lengthens its own lists

    def clear_row(self, row_idx: int) -> None:
        """Empty a row."""
        self.pending.add("clear", row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row; the source is empty afterwards."""
        self.pending.flush()
        self.host.move([src], [tgt])

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        self.pending.flush()
        self.host.swap([src], [tgt])

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring what changed since the last commit to the device; cost: what changed, not the table."""
        self._send()
        if self.mirror is None:
            return
        rows = np.flatnonzero(self._differ[:num_reqs])
        if rows.size:
            part = slice(rows[0], rows[-1] + 1)  # what lies between is equal already
            for group in self.block_tables:
                group.device[part].copy_(group.host[part])
            self._differ[part] = False
        self._committed = num_reqs

    def _send(self) -> None:
        self.pending.flush()
        if self.mirror is not None:
            self.mirror.apply(self.host.commit())

    def lend(self) -> None:
        """Make the halves alike; from here on any row of theirs may differ."""
        self._send()
        self._differ[:] = True

    def hand_out(self, group: int, num_reqs: int) -> None:
        """Note that one group's device rows behind the batch may be made null: a difference where they are live."""
        if num_reqs > self._committed:
            behind = slice(self._committed, num_reqs)
            self._differ[behind] |= self.host.tables[group].num_blocks[behind] > 0

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the slot of every token of the step, -1 from there to the buffer's end."""
        self._map(num_reqs, query_start_loc, positions)

    def _map(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        rows = self._rows[:num_reqs]
        if self.mirror is None:
            step = (query_start_loc.numpy(), positions.numpy())
            self.host.slot_mapping(rows, *step, cp_rank=self._cp_rank, out=self._here)
        else:
            self.mirror.slot_mapping(rows, query_start_loc, positions, self._slots.shape[1], out=self._slots)

    def clear(self) -> None:
        """Blank all tables, until their contents are put back."""
        for group in self.block_tables:
            group.clear()

    def __getitem__(self, idx: int) -> GroupV1:
        """Return one group's part."""
        return self.block_tables[idx]

    def __repr__(self) -> str:
        """Say what and where."""
        return f"TablesV1({self.mirror or 'host and device are one'}, {self.host!r})"


def _context_parallel() -> tuple[int, int]:
    """Return the size and this process's rank of the decode context-parallel group; (1, 0) where there is none."""
    try:
        group = import_module("vllm.distributed").get_dcp_group()
    except AssertionError:  # not set up, as in tests
        return 1, 0
    return group.world_size, group.rank_in_group
