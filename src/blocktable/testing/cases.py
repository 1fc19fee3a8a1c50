"""The cases that every implementation of tables is put through: what changes on the host, then what a step asks for.

``run_parity`` runs them. The list is short where each call takes milliseconds: ``cases(brief=True)``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from blocktable.contracts import Contract, TokenMultiple
from blocktable.geometry import Geometry, plan
from blocktable.groups import Group

__all__ = ["CASES", "Case", "Step", "cases", "random_steps"]


def geometry(blocks: int, block: int = 16, ratio: int = 1, **more: Any) -> Geometry:
    """Plan a table of ``blocks`` manager blocks, each of ``ratio`` kernel blocks."""
    contract = Contract("test", kernel_block_sizes=(block // ratio,))
    ranks = more.get("cp_size", 1)
    return plan(max_model_len=blocks * block * ranks, block_size=block, contracts=[contract], **more)


@dataclass
class Step:
    """What happens to the tables, then what a step asks of them."""

    change: Callable[[Any], None]
    rows: list[int]
    padded: int
    lengths: list[int] | None = None
    query: list[int] = field(default_factory=list)  # tokens per row
    positions: list[int] = field(default_factory=list)
    unused: int = 3  # token slots past the last token


@dataclass
class Case:
    """One case: groups, rows, and the steps in order; ``kinds`` names the public failures that it stands for."""

    name: str
    kinds: str
    groups: list[Any]
    max_rows: int
    steps: Callable[[], Iterator[Step]]
    num_blocks: int | None = None
    rank: int = 0

    @property
    def id(self) -> str:
        """Name the case in a test's parameters."""
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


def hybrid(groups: list[Any], *, brief: bool) -> Iterator[Step]:
    """Yield steps of groups of every kind, kernel blocks of 32 in manager blocks of 544, a width that is no multiple."""
    widths = [group.geometry.width if isinstance(group, Group) else group.width for group in groups]
    rng = np.random.default_rng(3)
    for _ in range(2 if brief else 6):
        rows = rng.permutation(5)[:3].tolist()
        lengths = [int(n) for n in rng.integers(0, 64, 3)]

        def change(tables: Any, rows: list[int] = rows) -> None:
            for group in range(5):
                counts = [1] * 3 if group == 4 else [max(1, min(widths[group], 4 + i)) for i in range(3)]
                seed = np.random.default_rng(sum(rows) + group)
                assign(rows, [[int(b) for b in seed.integers(1, 90, n)] for n in counts], group)(tables)

        query = [2, 0, 3]
        yield Step(change, rows, 5, lengths, query, [int(p) for p in rng.integers(0, 80, sum(query))])


def ranks(*, brief: bool) -> Iterator[Step]:
    yield Step(assign([0], [[5, 8]]), [0], 2, [16], [16], list(range(16)))  # case 22
    for length in range(3, 17, 7 if brief else 1):
        yield Step(nothing, [0, 0], 3, [length, 16 - length], [length, 0], list(range(length)))


def random_rows(rng: Any) -> Callable[[Any], None]:
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


def long_sequence(*, brief: bool) -> Iterator[Step]:
    rng = np.random.default_rng(11)
    for _ in range(4 if brief else 40):
        rows = [int(r) for r in rng.permutation(6)[: int(rng.integers(1, 7))]]
        rows = [-1 if rng.random() < 0.15 else row for row in rows]
        query = [int(n) for n in rng.integers(0, 4, len(rows))]
        positions = [int(p) for p in rng.integers(-2, 120, sum(query))]
        yield Step(random_rows(rng), rows, len(rows) + int(rng.integers(3)), None, query, positions)


def one_long_row(*, brief: bool) -> Iterator[Step]:
    ids = np.arange(131072, dtype=np.int32)[::-1] + 1
    ends = [0, 15, 16, 131072 * 16 - 1, 131072 * 16, 65536 * 16]
    yield Step(assign([0], [ids.tolist()]), [0], 1, [131072 * 16], [len(ends)], ends)
    if not brief:
        yield Step(lambda t: t.truncate([0], [70001]), [0], 1, [70001 * 16 - 5], [len(ends)], ends)
    yield Step(lambda t: t.clear([0]), [0], 1, [0], [len(ends)], ends)


def many_rows(many: int) -> Iterator[Step]:
    rows = [int(row) for row in np.random.default_rng(5).permutation(many)]
    yield Step(
        assign(list(range(many)), [[row + 1] for row in range(many)]), rows, many, [16] * many, [1] * many, [9] * many
    )


def large_ids() -> Iterator[Step]:
    top = 2**31 - 1
    yield Step(assign([0], [[top, top - 1, 1]]), [0], 1, [48], [4], [0, 15, 16, 47])  # slots past 2**35
    yield Step(assign([1], [[134217728, 65536]]), [1, 0], 2, [32, 40], [2, 1], [0, 16, 31])  # slot 2**31 exactly


def large_split_ids() -> Iterator[Step]:
    yield Step(assign([0], [[2**27 - 1, 1]]), [0], 1, [512], [3], [0, 255, 511])  # kernel ids up to 2**31 - 1


def cases(*, brief: bool = False) -> list[Case]:
    """Return the cases in order."""
    many = 24 if brief else 4096
    every: list[Any] = [
        plan(
            max_model_len=9416,
            block_size=544,
            contracts=[Contract("aligned", kernel_block_sizes=(32,), width_rule=TokenMultiple(128))],
        ),
        Group(geometry(9, 16, 4), kind="window", window=20),
        Group(geometry(9, 16), kind="chunked", window=32),
        Group(geometry(12, 8), kind="state"),
        Group(geometry(1, 64, 2), kind="ring"),
    ]
    return [
        Case("positions past the row", "K3", [geometry(32, 4)], 2, past_the_row),
        Case("rows that shrink, move and come back", "K4-K5", [geometry(6, 4)], 3, stale),
        Case("a window that gives blocks up", "K5", [Group(geometry(8, 4), kind="window", window=8)], 2, window),
        Case("rows and tokens of padding", "K6", [geometry(4), geometry(6, 8)], 3, padding),
        Case("kernel blocks in a manager block", "K7", [Group(geometry(9, 640, 5), kind="state")], 2, split),
        Case("pages handed over", "K7", [geometry(4, 128, 2)], 1, handed_over),
        *(
            Case(
                f"rank {rank} of 2",
                "K9",
                [geometry(2, 4, cp_size=2), geometry(4, 4)],
                1,
                partial(ranks, brief=brief),
                rank=rank,
            )
            for rank in range(2)
        ),
        Case(
            "random rows, in turn",
            "K4-K5-K6",
            [geometry(6, 16, 2), geometry(6, 12, 3)],
            6,
            partial(long_sequence, brief=brief),
        ),
        Case("every kind of group", "K7", every, 5, partial(hybrid, every, brief=brief)),
        Case("one row of 131072 entries", "K15", [geometry(131072)], 1, partial(one_long_row, brief=brief)),
        Case("many rows of one entry", "K16", [geometry(1)], many, partial(many_rows, many)),
        Case("ids up to 2^31 and slots past it", "K15", [geometry(4)], 2, large_ids),
        Case("kernel ids up to 2^31", "K15", [geometry(2, 256, 16)], 1, large_split_ids),
    ]


CASES = cases()


def _move(source: int, target: int, tables: Any) -> None:
    tables.move([source], [target])


def random_steps(groups: list[Group], seed: int, count: int, largest: int) -> Iterator[Step]:
    """Yield random steps on four rows of groups of any kind; ids are below ``largest``."""
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
            changes.append(partial(_move, source, target))
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
