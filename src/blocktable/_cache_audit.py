"""``KVCache.check``: recount the pool, the index and the rows from scratch, and compare with what is kept.

Slow on purpose: plain lists, one walk over every list, so that it shares no loop with what it checks.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NoReturn

import numpy as np

from blocktable import _cache_layout as c
from blocktable import _kernels as k
from blocktable.errors import LawBroken


class State:
    """The arrays of a cache as lists of records."""

    def __init__(self, core: c.Core) -> None:
        info, state, entries, _, meta, blocks, nodes, buckets, store, lines, copies = core
        self.info, self.meta, self.buckets = info[:-1].tolist(), meta.tolist(), buckets[buckets != 0].tolist()
        self.rows = int(info[-1, k.ROWS])
        self.table = state.reshape(len(self.info), self.rows, k.STATE_FIELDS).tolist()
        self.entries = entries
        self.blocks = blocks.reshape(-1, c.BLOCK_FIELDS).tolist()
        self.parts, self.unit = self.meta[c.PARTS], self.meta[c.UNIT]
        self.nodes = nodes.reshape(-1, c.NODE_FIELDS + self.parts)[: self.meta[c.SLOT_FRESH]].tolist()
        self.words = store.reshape(-1, self.unit * self.meta[c.WORDS])
        self.lines = lines.reshape(-1, c.LINE_FIELDS).tolist()
        self.copies = copies[: 3 * self.meta[c.COPIES]].reshape(-1, 3).tolist()
        self.alive = [n for n, node in enumerate(self.nodes) if n and node[c.SERIAL]]
        self.used = [row for row, line in enumerate(self.lines) if line[c.ROOT]]

    def live(self, group: int, row: int) -> list[int]:
        """Return a row's live entries, nulls included."""
        begin = self.info[group][k.BASE] + row * self.info[group][k.WIDTH]
        found: list[int] = self.entries[begin : begin + self.table[group][row][k.COUNT]].tolist()
        return found

    def root(self, node: int) -> bool:
        """Say whether a node is a salt's root."""
        return bool(self.nodes[node][c.PARENT_SERIAL] < 0)

    def seats(self, node: int) -> list[int]:
        """Return the first block of each part of a node."""
        found: list[int] = self.nodes[node][c.NODE_FIELDS :]
        return found


def audit(core: c.Core) -> None:
    """Raise LawBroken for the first thing that does not add up."""
    state = State(core)
    for check in (_owners, _places, _seats, _heirs, _paths, _rows):
        check(state)


def _owners(s: State) -> None:
    """L8, L9: a block has as many owners as rows hold it, and pending copies name blocks that are pinned."""
    for group, row in product(range(len(s.info)), range(s.rows)):
        last, tip = s.live(group, row)[-1:], s.table[group][row][c.TIP]
        if any(last) and last != [tip]:
            _broken("L3", f"row {row} of group {group} ends in block {last[0]}, {tip} is kept", row=row)
    ids = [s.live(group, row) for group in range(len(s.info)) for row in range(s.rows)]
    count = np.bincount(np.array([block for row in ids for block in row], np.int64), minlength=len(s.blocks)).tolist()
    pins = [0] * len(s.blocks)
    for _, source, target in s.copies:
        pins[source] += 1
        pins[target] += c.TARGET
    for block in range(1, s.meta[c.NUM_BLOCKS]):
        record = s.blocks[block]
        if max(record[c.REF], 0) != count[block]:
            _broken("L9", f"block {block} counts {record[c.REF]} owners, {count[block]} rows hold it", block=block)
        if record[c.PINS] != pins[block]:
            _broken("L9", f"block {block} counts pins {record[c.PINS]}, copies make {pins[block]}", block=block)


def _places(s: State) -> None:
    """L9: free + cached + held + fenced is the pool, each block in one place."""
    end = s.meta[c.NUM_BLOCKS]
    stack = list(_follow(s.meta[c.FREE_TOP], 0, lambda block: s.blocks[block][c.NEXT], end))
    free = stack + list(range(s.meta[c.FRESH], end))
    idle = list(_follow(s.blocks[0][c.NEXT], 0, lambda block: s.blocks[block][c.NEXT], end))
    fenced = list(_follow(s.blocks[end][c.NEXT], end, lambda block: s.blocks[block][c.NEXT], end))
    held = [block for block in range(1, end) if s.blocks[block][c.REF] > 0]
    listed = {*free, *idle, *fenced, *held}
    counts = [len(free), len(idle), len(held), len(fenced)]
    kept = [s.meta[field] for field in (c.FREE, c.CACHED, c.HELD, c.FENCED)]
    if counts != kept or sum(counts) != end - 1 or len(listed) != end - 1:
        off = sum(kept) - (end - 1)
        _broken(
            "L9", f"free, cached, held and fenced are {counts}, kept are {kept}: {off:+} against the pool's {end - 1}"
        )
    for block in free:
        if s.blocks[block][c.SEAT]:
            _broken("L9", f"block {block} is free and backs a node", block=block)
    for blocks, waits in ((idle, False), (fenced, True)):
        times = [-s.blocks[block][c.REF] for block in blocks]
        if times != sorted(set(times)) or (times and not 0 < times[0] <= times[-1] <= s.meta[c.CLOCK]):
            _broken("L9", f"the blocks {blocks} lost their owners at {times}, out of order, before {s.meta[c.CLOCK]}")
        for block in blocks:
            record = s.blocks[block]
            if (record[c.FENCE] > s.meta[c.RETIRED] or record[c.PINS] > 0) != waits or not (waits or record[c.SEAT]):
                _broken("L9", f"block {block} is in the wrong list: {record}, retired {s.meta[c.RETIRED]}", block=block)


def _seats(s: State) -> None:
    """L10: the blocks that back a node know it, and no others do."""
    seated: dict[int, int] = {}
    for node in s.alive:
        for part, first in enumerate(s.seats(node)):
            if first:
                ring = [
                    first,
                    *_follow(s.blocks[first][c.MATE_NEXT], first, lambda b: s.blocks[b][c.MATE_NEXT], len(s.blocks)),
                ]
                seated |= dict.fromkeys(ring, node * s.parts + part)
    for block in range(1, s.meta[c.NUM_BLOCKS]):
        if s.blocks[block][c.SEAT] != seated.get(block, 0):
            _broken("L10", f"block {block} sits in {s.blocks[block][c.SEAT]}, not {seated.get(block, 0)}", block=block)


def _heirs(s: State) -> None:
    """L10: a node counts its children and the rows that go on from it, and stays only for a reason."""
    heirs = dict.fromkeys(s.alive, 0)
    for node in s.alive:
        parent = s.nodes[node][c.PARENT]
        if not s.root(node) and s.nodes[parent][c.SERIAL] == s.nodes[node][c.PARENT_SERIAL]:
            heirs[parent] += 1
    for row in s.used:
        heirs[s.lines[row][c.ROOT]] += c.PIN
        if s.lines[row][c.NODE]:
            heirs[s.lines[row][c.NODE]] += c.PIN
    bare = {node for node in s.alive if not s.root(node) and not any(s.seats(node)) and heirs[node] < c.PIN}
    listed = list(_follow(s.nodes[0][c.NEWER], 0, lambda node: s.nodes[node][c.NEWER], len(s.nodes)))
    if bare != set(listed) or len(listed) != s.meta[c.BLOCKLESS]:
        _broken("L10", f"the nodes without a block are {sorted(bare)}, listed are {listed}")
    if len(listed) > s.meta[c.BLOCKLESS_MOST]:
        _broken("L10", f"{len(listed)} nodes have no block, more than {s.meta[c.BLOCKLESS_MOST]}")
    for node in s.alive:
        if s.nodes[node][c.HEIRS] != heirs[node] or (node in bare and not heirs[node]):
            _broken("L10", f"node {node} counts heirs {s.nodes[node][c.HEIRS]:#x}, it has {heirs[node]:#x}", node=node)


def _paths(s: State) -> None:
    """L10: every node is its parent's latest child or in the hash table, and no two children have the same tokens."""
    tabled = set()
    for first in s.buckets:
        tabled |= set(_follow(first, 0, lambda node: s.nodes[node][c.CHAIN], len(s.nodes)))
    seen = set()
    for node in s.alive:
        record = s.nodes[node]
        if s.root(node):
            continue
        if (node in tabled) != (record[c.CHAIN] != c.ABSENT):
            _broken("L10", f"node {node} is {'' if node in tabled else 'not '}in the hash table", node=node)
        parent = s.nodes[record[c.PARENT]]
        if parent[c.SERIAL] == record[c.PARENT_SERIAL] and parent[c.LATEST] != node and node not in tabled:
            _broken("L10", f"no path leads to node {node}", node=node)
        key = record[c.PARENT_SERIAL], s.words[node].tobytes()
        if key in seen:
            _broken("L10", f"node {node} is there twice", node=node)
        seen.add(key)


def _rows(s: State) -> None:
    """L10: a row's marks are in order, and its drafts reach from what is in nodes to its length."""
    drafts_of_all = 0
    for row in s.used:
        line = s.lines[row]
        length, final, done = line[c.LENGTH], line[c.FINAL], line[c.BASE]
        if not 0 <= done <= final <= length or done != final // s.unit * s.unit:
            _broken("L10", f"row {row} has {done} tokens in nodes, {final} final, {length} in all", row=row)
        drafts = list(_follow(line[c.HEAD], 0, lambda slot: s.nodes[slot][c.LATEST], len(s.nodes)))
        if len(drafts) != -(-(length - done) // s.unit) or (drafts and drafts[-1] != line[c.TAIL]):
            _broken("L10", f"row {row} has {len(drafts)} drafts for the positions {done}..{length - 1}", row=row)
        drafts_of_all += len(drafts)
    if len(s.alive) + drafts_of_all != s.meta[c.SLOTS]:
        _broken("L10", f"{len(s.alive)} nodes and {drafts_of_all} drafts are not {s.meta[c.SLOTS]} slots in use")


def _follow(first: int, end: int, after: Callable[[int], int], most: int) -> Iterator[int]:
    """Walk a list; one that goes in circles is broken."""
    at = first
    while at != end:
        yield at
        at = after(at)
        most -= 1
        if most < 0:
            _broken("L9", f"the list that begins at {first} does not end")


def _broken(law: str, message: str, **values: object) -> NoReturn:
    raise LawBroken(
        f"check: {message}",
        law=law,
        values=values,
        remedy="this is a defect here, or memory written from outside: report it with the calls that led here",
    )
