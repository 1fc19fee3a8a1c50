"""What a `KVCache`, or tables alone, hold at one moment, read once from their arrays, for text and HTML alike to draw."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blocktable import _cache_layout as c
from blocktable._cache_audit import State
from blocktable._ints import ceil_div
from blocktable.cache import KVCache
from blocktable.errors import ArgumentError
from blocktable.tables import BlockTables

__all__ = ["Node", "Part", "Picture", "RowPicture"]

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Part(NamedTuple):
    """Neighbouring columns of a row: from ``start``, ``size`` of them, with the ids of those that hold blocks."""

    name: str
    start: int
    size: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class RowPicture:
    """One row of one group: its parts from left to right, and how long it is in tokens."""

    row: int
    group: int
    kind: str
    length: int | None  # tables alone do not know it
    final: int | None
    block_tokens: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A prefix of the index: its last tokens, the blocks that back it, and the prefixes that go on from it."""

    tokens: list[int]
    blocks: list[int]
    children: list["Node"]


class Picture:
    """A copy of everything that is drawn; the cache may go on meanwhile. Cost: passes over all state, in plain Python."""

    roots: list[tuple[bytes, list[Node]]]

    def __init__(self, cache: Any) -> None:
        if isinstance(cache, KVCache):
            with cache._sole("view"):
                self._read(cache)
        elif isinstance(cache, BlockTables):
            with cache._sole("view"):
                self._read_tables(cache)
        else:
            raise ArgumentError(
                f"a picture is taken of a KVCache or of BlockTables, got {type(cache).__name__}",
                remedy="pass the engine's cache or tables",
            )

    def _read_tables(self, tables: BlockTables) -> None:
        """Read tables without a pool: what no row holds, and how many tokens there are, nobody here knows."""
        self.groups = tables.groups
        counts = [table.num_blocks.tolist() for table in tables.tables]
        self.used = [row for row in range(tables.max_rows) if any(count[row] for count in counts)]
        self._live = {
            (g, row): table.array[row, : counts[g][row]].tolist()
            for g, table in enumerate(tables.tables)
            for row in self.used
        }
        self._lines: dict[int, tuple[int | None, int | None]] = dict.fromkeys(self.used, (None, None))
        self._count_owners()
        self.num_blocks = tables.num_blocks or max(self.owners, default=0) + 1
        self.status = ["held" if b in self.owners else "free" for b in range(self.num_blocks)]
        self.counts = {"in rows": len(self.owners)}
        self.roots = []

    def _count_owners(self) -> None:
        self.owners: dict[int, list[int]] = defaultdict(list)
        for (_, row), ids in self._live.items():
            for block in filter(None, ids):
                self.owners[block].append(row)

    def _read(self, cache: KVCache) -> None:
        state = State(cache._core)
        self.num_blocks, self.groups = cache.num_blocks, cache.groups
        self.counts = {
            name: state.meta[field]
            for name, field in (("free", c.FREE), ("cached", c.CACHED), ("held", c.HELD), ("fenced", c.FENCED))
        }
        self.used = state.used
        self._live = {(g, row): state.live(g, row) for g in range(len(self.groups)) for row in self.used}
        self._lines = {row: (state.lines[row][c.LENGTH], state.lines[row][c.FINAL]) for row in self.used}
        self._count_owners()
        seat = [record[c.SEAT] for record in state.blocks]
        waits = [record[c.FENCE] > state.meta[c.RETIRED] or record[c.PINS] > 0 for record in state.blocks]
        self.status = [
            "held" if b in self.owners else "fenced" if waits[b] else "cached" if seat[b] else "free"
            for b in range(self.num_blocks)
        ]
        self.roots = self._tree(state, {root: salt for salt, root in cache._roots.items()})

    def letter(self, row: int) -> str:
        """Return the sign of a row; beyond 52 rows in use they share ``*``."""
        place = self.used.index(row)
        return LETTERS[place] if place < len(LETTERS) else "*"

    def mark(self, block: int) -> str:
        """Return the sign of a block: ``.`` free, ``-`` cached, ``!`` fenced, its row's letter, ``#`` several rows'."""
        owners = set(self.owners.get(block, ()))
        if len(owners) > 1:
            return "#"
        return self.letter(owners.pop()) if owners else {"free": ".", "cached": "-", "fenced": "!"}[self.status[block]]

    def row(self, row: int, group: int = 0) -> RowPicture:
        """Return one row of one group; raises ArgumentError for one that is not in use."""
        if row not in self._lines or not 0 <= group < len(self.groups):
            raise ArgumentError(
                f"row {row} of group {group} is not in use",
                values={"row": row, "group": group, "in_use": tuple(self.used[:10])},
                remedy=f"rows in use: {', '.join(map(str, self.used[:10])) or 'none'}",
            )
        length, final = self._lines[row]
        described, ids = self.groups[group], self._live[group, row]
        geometry = described.geometry
        span = geometry.block_size * geometry.cp_size
        gone = next((i for i, block in enumerate(ids) if block), len(ids)) if described.kind != "state" else 0
        known = final is not None and described.kind != "state"
        sure = min(max(ceil_div(final or 0, span), gone), len(ids)) if known else len(ids)
        need = max(min(geometry.min_blocks, geometry.width), len(ids))
        edges = (
            ("gone", 0, gone),
            ("live", gone, sure),
            ("lookahead", sure, len(ids)),
            ("tail", len(ids), need),
            ("alignment", need, geometry.width),
        )
        parts = tuple(Part(name, a, b - a, ids[a:b]) for name, a, b in edges if b > a)
        return RowPicture(row, group, described.kind, length, final, span, parts)

    @staticmethod
    def _tree(state: State, salts: dict[int, bytes]) -> list[tuple[bytes, list[Node]]]:
        """Return each salt with the prefixes that begin under it; salts without any are left out."""
        children: dict[int, list[int]] = defaultdict(list)
        for node in state.alive:
            record = state.nodes[node]
            if not state.root(node) and state.nodes[record[c.PARENT]][c.SERIAL] == record[c.PARENT_SERIAL]:
                children[record[c.PARENT]].append(node)
        wide = state.meta[c.WORDS] == 2
        made: dict[int, Node] = {}
        for node in _leaves_first(children, [node for node in state.alive if state.root(node)]):
            words = state.words[node]
            tokens = (words.view(np.int64) if wide else words).tolist()
            blocks = [block for block in state.seats(node) if block]
            made[node] = Node(tokens, blocks, [made[child] for child in children[node]])
        return [
            (salts.get(node, b""), made[node].children) for node in state.alive if state.root(node) and children[node]
        ]


def _leaves_first(children: dict[int, list[int]], roots: list[int]) -> list[int]:
    """Return every node after all that go on from it, without recursion: a prefix may be thousands of nodes long."""
    order, stack = [], list(roots)
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children[node]
    return order[::-1]
