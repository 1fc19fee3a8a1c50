"""The worker: tables on its device, the memory behind them, and a model that reads it. It knows steps, not requests."""

import zlib
from typing import Any

import numpy as np
import torch

from blocktable.attention import BlockMemory, Reading, Table
from blocktable.device import DeviceTables
from blocktable.engine.models import Model, Shape
from blocktable.engine.sampling import draw
from blocktable.engine.step import Step
from blocktable.geometry import Geometry

__all__ = ["PagedStep", "Worker"]


class PagedStep:
    """What the attention layers of one forward pass need: where to write, what to read. Made by ``Worker.run``."""

    def __init__(self, shape: Shape, memories: list[BlockMemory]) -> None:
        self.shape, self._memories = shape, memories
        self.readings: list[Reading] = []
        self.places: list[torch.Tensor] = []

    def write(self, layer: int, *planes: torch.Tensor) -> None:
        """Write the step's keys and values, or latents, of one layer into the slots of its group."""
        group, seat = self.shape.seats[layer]
        self._memories[seat].write(self.places[group], *planes)

    def of(self, layer: int) -> tuple[BlockMemory, Reading]:
        """Return the memory of a layer, and where its group reads."""
        group, seat = self.shape.seats[layer]
        return self._memories[seat], self.readings[group]


class Worker:
    """Follows the scheduler's deltas and runs its steps, one after the other.

    ``snapshot`` is the host's; ``geometries`` are those of the model's groups, with the contracts that are enforced.
    Layers that have the same seat in different groups share one memory: block ids are handed out across groups, so no
    two of them use the same block at once.
    """

    def __init__(self, model: Model, geometries: list[Geometry], num_blocks: int, snapshot: bytes) -> None:
        self.model, self.shape, self.geometries = model, model.shape, geometries
        self.tables = DeviceTables.from_snapshot(snapshot, model.device, num_blocks=num_blocks)
        first = geometries[0]
        self.memories = [
            BlockMemory(
                num_blocks=num_blocks,
                block_size=first.block_size,
                heads=self.shape.heads,
                head_dim=self.shape.head_dim,
                planes=self.shape.planes,
                dtype=model.dtype,
                device=model.device,
            )
            for _ in range(1 + max(seat for _, seat in self.shape.seats))
        ]
        self._last = torch.zeros(self.tables.max_rows, dtype=torch.int64, device=model.device)

    def run(self, step: Step) -> list[int]:
        """Run one step and return the tokens that it draws."""
        with torch.inference_mode():
            self.follow(step)
            tokens, positions = torch.from_numpy(step.tokens.copy()), step.positions()
            unknown = np.flatnonzero(step.tokens < 0)
            if unknown.size:
                owners = np.repeat(step.rows, np.diff(step.starts))[unknown]
                tokens[unknown] = self._last[torch.from_numpy(owners.astype(np.int64))].cpu()
            logits = self.model.forward(tokens, torch.from_numpy(positions), self.gather(step, positions), step.at)
            if not step.at.size:
                return []
            drawn = draw(logits, positions[step.at] + 1, step.seeds, step.temperatures)
            kept = step.into >= 0
            self._last[torch.from_numpy(step.into[kept])] = drawn[torch.from_numpy(kept)]
            found: list[int] = drawn.tolist()
            return found

    def follow(self, step: Step) -> None:
        """Bring the tables to the step's commit, run its copies, and poison what it names."""
        delta = step.read_delta()
        self.tables.apply(delta)
        if len(delta.copies):
            self._copy(torch.from_numpy(delta.copies.astype(np.int64)))
        if step.poison.size:
            blocks = torch.from_numpy(step.poison.copy())
            for memory in self.memories:
                memory.poison(blocks)

    def _copy(self, copies: torch.Tensor) -> None:
        for group in set(copies[:, 0].tolist()):
            _, sources, targets = copies[copies[:, 0] == group].T
            for seat in {seat for member, seat in self.shape.seats if member == group}:
                self.memories[seat].copy(sources, targets)

    def gather(self, step: Step, positions: Any) -> PagedStep:
        """Gather the step's tables, map its slots, and work out what each group reads."""
        size = int(step.tokens.size)
        rows, starts = step.rows, step.starts
        batch, slots = self.tables.prepare(rows, len(rows), step.lengths, starts, positions, size)
        shape = self.shape
        paged = PagedStep(shape, self.memories)
        lengths = step.lengths.tolist()
        for group, geometry in enumerate(self.geometries):
            contract = geometry.contracts[0] if geometry.contracts else None
            table = Table.of(batch, group, contract, geometry.kernel_block_size, geometry.max_seq_len, shape.planes)
            paged.readings.append(Reading(table, lengths, starts.tolist(), shape.groups[group].window))
            paged.places.append(self.memories[0].places(slots[group, :size], geometry.kernel_block_size))
            if step.poison.size:
                self._poison_tails(table, lengths, group)
        return paged

    def _poison_tails(self, table: Table, lengths: list[int], group: int) -> None:
        """Fill the cells behind a row's last token, in the blocks that it holds."""
        block = table.block_size
        for row, length in enumerate(lengths):
            live = table.dense[row, : int(table.num_blocks[row])].long()
            tail = torch.arange(length, live.numel() * block)
            slots = live[tail // block] * block + tail % block
            for seat in {seat for member, seat in self.shape.seats if member == group}:
                self.memories[seat].poison_slots(slots, block)

    def checksum(self) -> int:
        """Return a digest of the tables, equal to that of the host's snapshot at the same commit."""
        return zlib.crc32(self.tables.snapshot())
