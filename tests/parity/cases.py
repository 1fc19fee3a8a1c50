"""The case list of every implementation of the device's kernels, and how a case is run against the plain-Python model.

Needs NumPy and torch alone, so that the script for a machine with a GPU runs the same list without pytest.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import blocktable
from blocktable import BlockTables, Contract, Delta, Group, TokenMultiple
from blocktable.device import DeviceTables
from blocktable.oracle import TablesModel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# An interpreted program takes tens of milliseconds: unless asked for the long run, that process does fewer of the same.
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
BRIEF = INTERPRETED and not LONG
MANY = 24 if BRIEF else 4096
POISON = -123457


def geometry(blocks: int, block: int = 16, ratio: int = 1, **more: Any) -> blocktable.Geometry:
    """A table of ``blocks`` manager blocks, each of ``ratio`` kernel blocks."""
    contract = Contract("test", kernel_block_sizes=(block // ratio,))
    ranks = more.get("cp_size", 1)
    return blocktable.plan(max_model_len=blocks * block * ranks, block_size=block, contracts=[contract], **more)


@dataclass
class Step:
    """What happens on the host, then what the device is asked for."""

    change: Callable[[Any], None]
    rows: list[int]
    padded: int
    lengths: list[int] | None = None
    query: list[int] = field(default_factory=list)  # tokens per row
    positions: list[int] = field(default_factory=list)
    unused: int = 3  # token slots past the last token


@dataclass
class Case:
    name: str
    kinds: str  # what of the catalogue of public failures it stands for
    groups: list[Any]
    max_rows: int
    steps: Callable[[], Iterator[Step]]
    num_blocks: int | None = None
    rank: int = 0

    @property
    def id(self) -> str:
        return f"{self.name}-{self.kinds}"


def assign(rows: list[int], ids: list[list[int]], group: int = 0) -> Callable[[Any], None]:
    indptr = np.cumsum([0, *map(len, ids)]).tolist()
    flat = [block for part in ids for block in part]
    return lambda tables: tables.assign(rows, indptr, flat, group=group)


def nothing(tables: Any) -> None:
    """No change."""


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(tables: Any) -> None:
        for change in changes:
            change(tables)

    return run


def past_the_row() -> Iterator[Step]:
    ids = list(range(7, 39))
    yield Step(assign([0], [ids]), [0], 1, [128], [5], [0, 3, 127, 128, 130])
    yield Step(assign([1], [[9]]), [1, 0], 4, [4, 128], [4, 4], [-1, 0, 4, 2**40, 31, 32, 2**31, -(2**31)])


def stale() -> Iterator[Step]:
    yield Step(assign([0, 1], [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]), [0, 1], 3, [20, 16], [1, 1], [19, 15])
    yield Step(lambda t: t.move([1], [0]), [0, 1], 2, [16, 0], [1, 1], [15, 0])  # case 12
    yield Step(lambda t: t.truncate([0], [1]), [1, 0], 3, [0, 4], [1, 2], [0, 3, 4])
    yield Step(both(lambda t: t.clear([0]), assign([0], [[9, 10]])), [0], 3, [8], [3], [0, 7, 8])  # case 17
    yield Step(lambda t: t.clear([0]), [0], 1, [0], [1], [0])
    yield Step(nothing, [], 3, [])


def window() -> Iterator[Step]:
    yield Step(assign([0], [[5, 6, 7, 8, 9]]), [0], 1, [20], [3], [0, 12, 19])
    yield Step(lambda t: t.release([0], [3], 0), [0], 2, [20], [3], [0, 12, 19])  # case 15
    yield Step(lambda t: t.append([0], [0, 2], [10, 11]), [0], 2, [28], [3], [0, 12, 27])
    yield Step(both(lambda t: t.clear([0]), assign([0], [[0, 0, 4]])), [0], 1, [12], [3], [0, 8, 11])


def padding() -> Iterator[Step]:
    yield Step(assign([0, 2], [[2], [3, 4]]), [0, -1, 2], 6, [3, 99, 20], [3, 2, 2], [0, 1, 2, 0, 1, 0, 17])
    yield Step(nothing, [-1, 2], 6, [5, 17], [2, 1], [0, 1, 16], 20)
    yield Step(nothing, [-1, -1, -1], 3, [0, 0, 0], [0, 0, 0], [])
    yield Step(nothing, [2, 2, 0, 2], 5, None, [1, 1, 1, 1], [0, 1, 2, 3])  # a row may come more than once


def split() -> Iterator[Step]:
    yield Step(assign([0], [[2, 0, 3]]), [0], 2, None, [3], [0, 700, 1919])  # case 20a: a live null block
    yield Step(both(lambda t: t.clear([0]), assign([1], [[1, 4, 9]])), [1, 0], 3, None, [2, 1], [640, 1300, 5])


def handed_over() -> Iterator[Step]:
    yield Step(assign([0], [[4, 9]]), [0], 1, [160], [2], [0, 159])  # case 20c: pages 8, 9, 18
    yield Step(nothing, [0], 2, [128], [1], [64])
    yield Step(nothing, [0], 2, [129], [1], [64])


def hybrid() -> Iterator[Step]:
    """Groups of every kind, kernel blocks of 32 in manager blocks of 544, and a table whose width is no multiple."""
    rng = np.random.default_rng(3)
    for _ in range(2 if BRIEF else 6):
        rows = rng.permutation(5)[:3].tolist()
        lengths = [int(n) for n in rng.integers(0, 64, 3)]

        def change(tables: Any, rows: list[int] = rows) -> None:
            for group in range(5):
                most = tables[group].array.shape[1] if isinstance(tables, BlockTables) else 0
                width = most or tables.groups[group].geometry.width
                counts = [1] * 3 if group == 4 else [max(1, min(width, 4 + i)) for i in range(3)]
                seed = np.random.default_rng(sum(rows) + group)
                assign(rows, [[int(b) for b in seed.integers(1, 90, n)] for n in counts], group)(tables)

        query = [2, 0, 3]
        yield Step(change, rows, 5, lengths, query, [int(p) for p in rng.integers(0, 80, sum(query))])


def ranks() -> Iterator[Step]:
    yield Step(assign([0], [[5, 8]]), [0], 2, [16], [16], list(range(16)))  # case 22
    for length in range(3, 17, 7 if BRIEF else 1):
        yield Step(nothing, [0, 0], 3, [length, 16 - length], [length, 0], list(range(length)))


def random_rows(rng: Any, tables: Any, step: int) -> Callable[[Any], None]:
    del tables, step
    row, other, verb = int(rng.integers(6)), int(rng.integers(6)), int(rng.integers(5))
    sizes = [[int(b) for b in rng.integers(1, 40, 6)] for _ in range(2)]
    cut = int(rng.integers(0, 5))

    def change(tables: Any) -> None:
        if verb == 0:
            both(*(assign([row], [ids[: cut + 1]], g) for g, ids in enumerate(sizes)))(tables)
        elif verb == 1:
            tables.move([row], [other])
        elif verb == 2 and row != other:
            tables.swap([row], [other])
        elif verb == 3:
            tables.clear([row])
        else:
            tables.copy([row], [other])

    return change


def long_sequence() -> Iterator[Step]:
    rng = np.random.default_rng(11)
    for step in range(4 if BRIEF else 40):
        rows = [int(r) for r in rng.permutation(6)[: int(rng.integers(1, 7))]]
        rows = [-1 if rng.random() < 0.15 else row for row in rows]
        query = [int(n) for n in rng.integers(0, 4, len(rows))]
        positions = [int(p) for p in rng.integers(-2, 120, sum(query))]
        yield Step(random_rows(rng, None, step), rows, len(rows) + int(rng.integers(3)), None, query, positions)


def one_long_row() -> Iterator[Step]:
    ids = np.arange(131072, dtype=np.int32)[::-1] + 1
    ends = [0, 15, 16, 131072 * 16 - 1, 131072 * 16, 65536 * 16]
    yield Step(assign([0], [ids.tolist()]), [0], 1, [131072 * 16], [len(ends)], ends)
    if not BRIEF:
        yield Step(lambda t: t.truncate([0], [70001]), [0], 1, [70001 * 16 - 5], [len(ends)], ends)
    yield Step(lambda t: t.clear([0]), [0], 1, [0], [len(ends)], ends)


def many_rows() -> Iterator[Step]:
    rows = [int(row) for row in np.random.default_rng(5).permutation(MANY)]
    yield Step(
        assign(list(range(MANY)), [[row + 1] for row in range(MANY)]), rows, MANY, [16] * MANY, [1] * MANY, [9] * MANY
    )


def large_ids() -> Iterator[Step]:
    top = 2**31 - 1
    yield Step(assign([0], [[top, top - 1, 1]]), [0], 1, [48], [4], [0, 15, 16, 47])  # slots past 2**35
    yield Step(assign([1], [[134217728, 65536]]), [1, 0], 2, [32, 40], [2, 1], [0, 16, 31])  # slot 2**31 exactly


def large_split_ids() -> Iterator[Step]:
    yield Step(assign([0], [[2**27 - 1, 1]]), [0], 1, [512], [3], [0, 255, 511])  # kernel ids up to 2**31 - 1


CASES = [
    Case("positions past the row", "K3", [geometry(32, 4)], 2, past_the_row),
    Case("rows that shrink, move and come back", "K4-K5", [geometry(6, 4)], 3, stale),
    Case("a window that gives blocks up", "K5", [Group(geometry(8, 4), kind="window", window=8)], 2, window),
    Case("rows and tokens of padding", "K6", [geometry(4), geometry(6, 8)], 3, padding),
    Case("kernel blocks in a manager block", "K7", [Group(geometry(9, 640, 5), kind="state")], 2, split),
    Case("pages handed over", "K7", [geometry(4, 128, 2)], 1, handed_over),
    *(
        Case(f"rank {rank} of 2", "K9", [geometry(2, 4, cp_size=2), geometry(4, 4)], 1, ranks, rank=rank)
        for rank in range(2)
    ),
    Case("random rows, in turn", "K4-K5-K6", [geometry(6, 16, 2), geometry(6, 12, 3)], 6, long_sequence),
    Case(
        "every kind of group",
        "K7",
        [
            blocktable.plan(
                max_model_len=9416,
                block_size=544,
                contracts=[Contract("aligned", kernel_block_sizes=(32,), width_rule=TokenMultiple(128))],
            ),
            Group(geometry(9, 16, 4), kind="window", window=20),
            Group(geometry(9, 16), kind="chunked", window=32),
            Group(geometry(12, 8), kind="state"),
            Group(geometry(1, 64, 2), kind="ring"),
        ],
        5,
        hybrid,
    ),
    Case("one row of 131072 entries", "K15", [geometry(131072)], 1, one_long_row),
    Case("many rows of one entry", "K16", [geometry(1)], MANY, many_rows),
    Case("ids up to 2^31 and slots past it", "K15", [geometry(4)], 2, large_ids),
    Case("kernel ids up to 2^31", "K15", [geometry(2, 256, 16)], 1, large_split_ids),
]


# ---- what the model says


def expected_batch(model: TablesModel, step: Step, rank: int) -> dict[str, Any]:
    rows = step.rows + [-1] * (step.padded - len(step.rows))
    found: dict[str, Any] = {"rows": rows}
    given = [0] * len(rows) if step.lengths is None else [*step.lengths, *[0] * (step.padded - len(step.rows))]
    lengths = [length if row >= 0 else 0 for row, length in zip(rows, given, strict=True)]
    found["seq_lens"] = lengths
    for g, group in enumerate(model.groups):
        shape = group.geometry
        width, ratio, page = shape.kernel_width, shape.ratio, shape.kernel_block_size
        tables = [model.kernel_row(g, row) if row >= 0 else [0] * width for row in rows]
        pages = [len(model.rows[g][row]) * ratio if row >= 0 else 0 for row in rows]
        found[f"tables {g}"], found[f"num_blocks {g}"] = tables, pages
        if step.lengths is None:
            continue
        indptr, indices, last = [0], [], []
        for table, live, length in zip(tables, pages, lengths, strict=True):
            turn, chunk = shape.cp_size * shape.cp_interleave, shape.cp_interleave
            # This rank's tokens, one turn at a time: whole turns give a chunk each, the last one what is left of it.
            local = length // turn * chunk + sum(1 for o in range(length % turn) if o // chunk == rank % shape.cp_size)
            held = min(-(-local // page), live)
            indices += table[:held]
            indptr.append(len(indices))
            last.append(min(local - (held - 1) * page, page) if held else 1)
        found[f"kv_indptr {g}"], found[f"kv_indices {g}"], found[f"last_page_len {g}"] = indptr, indices, last
    return found


def actual_batch(batch: Any, groups: int, *, csr: bool) -> dict[str, Any]:
    found = {"rows": batch.rows, "seq_lens": batch.seq_lens}
    for g in range(groups):
        found[f"tables {g}"], found[f"num_blocks {g}"] = batch.tables[g], batch.num_blocks[g]
        if csr:
            end = int(batch.kv_indptr[g][-1])
            found[f"kv_indptr {g}"], found[f"last_page_len {g}"] = batch.kv_indptr[g], batch.last_page_len[g]
            found[f"kv_indices {g}"] = batch.kv_indices[g][:end]
    return found


def same(name: str, got: Any, want: Any) -> None:
    array = got.cpu().numpy()
    wanted = np.array(want, array.dtype).reshape(array.shape)
    if not np.array_equal(array, wanted):
        where = np.argwhere(array != wanted)[:5].tolist()
        raise AssertionError(f"{name} differs, first at {where}:\n{array}\nwanted\n{wanted}")


def poisoned(device: DeviceTables, padded: int, *, csr: bool) -> Any:
    batch = device.new_batch(padded)
    if csr:
        batch._store.add_csr()
    for part in batch._store.tensors[1:]:
        if part is not None:
            part.fill_(POISON)
    return batch


def drive(case: Case, make: Callable[[BlockTables, int], DeviceTables]) -> None:
    """Run a case: the host and the model change, the device follows by the delta's bytes, all three must agree."""
    tables = BlockTables(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    model = TablesModel(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    device = make(tables, case.rank)
    for number, step in enumerate(case.steps()):
        step.change(tables)
        step.change(model)
        changes = model.commit()
        delta = Delta.from_bytes(tables.commit().to_bytes())
        before = device.stats()
        device.apply(delta)
        spent = {name: count - before[name] for name, count in device.stats().items()}
        assert spent["launches"] <= 1, "one launch for any number of groups"
        assert spent["delta_bytes"] <= changes.most_bytes(), "bytes in proportion to what changed"
        assert device.snapshot() == tables.snapshot()

        csr, mine = step.lengths is not None, number % 2 == 1
        starts = np.cumsum([0, *step.query], dtype=np.int64)
        tokens = int(starts[-1]) + step.unused
        out = poisoned(device, step.padded, csr=csr) if mine else None
        slots_out = None
        if mine:
            shape = (len(case.groups), tokens + 5)
            slots_out = torch.full(shape, POISON, dtype=torch.int64, device=device.device)
        rows, positions = np.array(step.rows, np.int32), np.array(step.positions, np.int64)
        lengths = None if step.lengths is None else np.array(step.lengths, np.int64)
        if number % 3 == 2:
            batch, slots = device.prepare(
                rows, step.padded, lengths, starts, positions, tokens, out=out, slots_out=slots_out
            )
        else:
            batch = device.gather(rows, step.padded, lengths, out=out)
            slots = device.slot_mapping(rows, starts, positions, tokens, out=slots_out)
        got, want = actual_batch(batch, len(case.groups), csr=csr), expected_batch(model, step, case.rank)
        assert got.keys() == want.keys()
        for name in want:
            same(f"step {number}: {name}", got[name], want[name])
        expected = model.slot_mapping(
            step.rows, starts.tolist(), step.positions, padded=slots.shape[1], cp_rank=case.rank
        )
        same(f"step {number}: slots", slots, expected)


def random_steps(groups: list[Group], seed: int, count: int, largest: int) -> Iterator[Step]:
    rng = np.random.default_rng(seed)
    counts = np.zeros((len(groups), 4), np.int64)
    for _ in range(count):
        row, g = int(rng.integers(4)), int(rng.integers(len(groups)))
        width = groups[g].geometry.width
        ids = [int(block) for block in rng.integers(1, largest, int(rng.integers(0, width + 1)))]
        if groups[g].kind in ("window", "chunked"):
            gone = min(len(ids), int(rng.integers(0, 3)))
            ids[:gone] = [0] * gone
        changes = [assign([row], [ids], g)]
        counts[g, row] = len(ids)
        if rng.random() < 0.3:
            source, target = (int(r) for r in rng.integers(0, 4, 2))
            changes.append(lambda t, s=source, d=target: t.move([s], [d]))
            held = counts[:, source].copy()
            counts[:, source] = 0
            counts[:, target] = held
        rows = [int(r) for r in rng.integers(-1, 4, int(rng.integers(0, 6)))]
        lengths = None
        if rng.random() < 0.7:
            lengths = [int(rng.integers(0, most_tokens(groups, counts, row) + 1)) for row in rows]
        query = [int(n) for n in rng.integers(0, 5, len(rows))]
        positions = [int(p) for p in rng.integers(-2, 100, sum(query))]
        padded = len(rows) + int(rng.integers(0, 3))
        yield Step(both(*changes), rows, padded, lengths, query, positions, int(rng.integers(0, 5)))


def most_tokens(groups: list[Group], counts: Any, row: int) -> int:
    """How many tokens a row may be said to have: its blocks must hold them in every group that keeps all tokens."""
    rooms = [
        int(counts[g, row]) * group.geometry.block_size * group.geometry.cp_size
        for g, group in enumerate(groups)
        if group.kind not in ("state", "ring")
    ]
    return min(rooms, default=40) if row >= 0 else 40
