"""Block tables as plain lists: one row at a time, one entry at a time.

A row is the list of its live block ids; what lies behind, up to the width, is null (0) and not stored.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from blocktable.groups import Group


class Refused(Exception):  # noqa: N818 - a refusal is what the model says, not a failure of the model
    """The model refuses a call, naming the law; the real object must refuse it too, and change nothing."""

    def __init__(self, law: str, why: str) -> None:
        super().__init__(f"{why} [{law}]")
        self.law = law


@dataclass(frozen=True)
class Changes:
    """What a delta must say: entries {(group, row, column): block}, and counts {(group, row): live} that differ."""

    entries: dict[tuple[int, int, int], int]
    counts: dict[tuple[int, int], int]

    def runs(self) -> int:
        """Return how many stretches of neighbouring changed entries there are."""
        return sum((group, row, column - 1) not in self.entries for group, row, column in self.entries)

    def most_bytes(self) -> int:
        """Return the most a delta may weigh: 4 bytes an entry, 24 a stretch, 24 a row whose count alone changed."""
        changed_rows = {(group, row) for group, row, _ in self.entries}
        return 4 * len(self.entries) + 24 * (self.runs() + len(self.counts.keys() - changed_rows))

    def differ_from(self, delta: Any) -> str:
        """Return in words what is wrong with a delta that should say exactly this, or an empty string."""
        said: dict[tuple[int, int, int], int] = {}
        for group, row, start, count, offset, live in delta.spans.tolist():
            if (group, row) in self.counts and self.counts[group, row] != live:
                return f"row {row} of group {group} should have {self.counts[group, row]} blocks, the span says {live}"
            for k in range(count):
                place = (group, row, start + k)
                if place in said:
                    return f"{place} is sent twice"
                said[place] = 0 if offset == -1 else int(delta.values[offset + k])
        if said != self.entries:
            return f"sent {said}, changed {self.entries}"
        missing = self.counts.keys() - {(group, row) for group, row, *_ in delta.spans.tolist()}
        if missing:
            return f"the new counts of {sorted(missing)} are not sent"
        weight = 24 * len(delta.spans) + 4 * len(delta.values)
        if weight > self.most_bytes():
            return f"{weight} bytes, {self.most_bytes()} would do"
        return ""


class TablesModel:
    """The tables of all groups: the same verbs as ``BlockTables``, on lists of Python integers.

    >>> import blocktable
    >>> model = TablesModel([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
    >>> model.append([0], [0, 3], [3, 7, 9])
    >>> model.full_row(0, 0)
    [3, 7, 9, 0]
    >>> model.append([0], [0, 2], [5, 6])
    Traceback (most recent call last):
    blocktable.oracle.tables.Refused: row 0 of group 0 would hold 5 blocks of 4 [L2]
    """

    def __init__(self, groups: Sequence[Any], *, max_rows: int, num_blocks: int | None = None) -> None:
        self.groups = [group if isinstance(group, Group) else Group(group) for group in groups]
        self.max_rows = max_rows
        self.num_blocks = num_blocks
        self.rows: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in self.groups]
        self.sent = self._copy()
        self.seq = 0

    # ---- verbs

    def append(self, rows: Sequence[int], indptr: Any, ids: Any, group: int | None = 0) -> None:
        """Put each row's part of ids behind its live entries."""
        self._write(rows, indptr, ids, group, replace=False)

    def assign(self, rows: Sequence[int], indptr: Any, ids: Any, group: int | None = 0) -> None:
        """Make each row its part of ids."""
        self._write(rows, indptr, ids, group, replace=True)

    def _write(self, rows: Sequence[int], indptr: Any, ids: Any, group: int | None, *, replace: bool) -> None:
        with self._all_or_nothing():
            self._known(rows)
            for g, offsets, blocks in self._parts(group, indptr, ids):
                self._cuts(offsets, rows, blocks)
                for i, row in enumerate(rows):
                    old = [] if replace else self.rows[g][row]
                    self.rows[g][row] = old + list(blocks[offsets[i] : offsets[i + 1]])
                    self._lawful(g, row)

    def truncate(self, rows: Sequence[int], num_blocks: Any, group: int | None = 0) -> None:
        """Keep the first entries of each row."""
        with self._all_or_nothing():
            self._known(rows)
            for g, counts in self._parts(group, num_blocks):
                self._one_each(counts, rows)
                for row, count in zip(rows, counts, strict=True):
                    if not 0 <= count <= len(self.rows[g][row]):
                        raise Refused("L2", f"row {row} of group {g} has {len(self.rows[g][row])} blocks, not {count}")
                    self.rows[g][row] = self.rows[g][row][:count]

    def clear(self, rows: Sequence[int]) -> None:
        """Empty rows in all groups."""
        self._known(rows)
        for table in self.rows:
            for row in rows:
                table[row] = []

    def release(self, rows: Sequence[int], counts: Sequence[int], group: int) -> None:
        """Make the first counts[i] entries null; the live count stays."""
        with self._all_or_nothing():
            self._group(group)
            self._known(rows)
            self._one_each(counts, rows)
            if self.groups[group].kind in ("full", "ring"):
                raise Refused("L3", f"every entry of group {group} is read")
            for row, count in zip(rows, counts, strict=True):
                old = self.rows[group][row]
                if not 0 <= count <= len(old):
                    raise Refused("L2", f"row {row} of group {group} has {len(old)} blocks, not {count}")
                self.rows[group][row] = [0] * count + old[count:]

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Read every source, then replace the targets; a source that is no target is empty."""
        self._one_each(dst, src)
        self._known(src)
        self._known(dst)
        for g, table in enumerate(self.rows):
            read = [list(table[row]) for row in src]
            for row in src:
                self.rows[g][row] = []
            for row, blocks in zip(dst, read, strict=True):
                self.rows[g][row] = blocks

    def swap(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Exchange rows, pair by pair; no row is in two pairs."""
        self._one_each(b, a)
        self._known([*a, *b])
        for table in self.rows:
            for one, other in zip(a, b, strict=True):
                table[one], table[other] = table[other], table[one]

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Make targets hold what sources hold, pair after pair."""
        self._one_each(dst, src)
        self._known(dst)
        for row in src:
            self._row(row)
        for table in self.rows:
            for one, other in zip(src, dst, strict=True):
                table[other] = list(table[one])

    def resize(self, groups: Sequence[Any]) -> None:
        """Take other geometries while no row is live."""
        if any(row for table in self.rows for row in table):
            raise Refused("L1", "a row is live")
        self.groups = [group if isinstance(group, Group) else Group(group) for group in groups]
        self.rows = [[[] for _ in range(self.max_rows)] for _ in self.groups]
        self.sent = self._copy()

    # ---- deltas

    def changes(self) -> Changes:
        """Return what differs from the last commit."""
        entries, counts = {}, {}
        for g, table in enumerate(self.rows):
            for row in range(self.max_rows):
                old, new = self._padded(g, self.sent[g][row]), self.full_row(g, row)
                for column, block in enumerate(new):
                    if block != old[column]:
                        entries[g, row, column] = block
                if len(table[row]) != len(self.sent[g][row]):
                    counts[g, row] = len(table[row])
        return Changes(entries, counts)

    def commit(self) -> Changes:
        """Return what changed since the last commit, and start anew."""
        changes = self.changes()
        self.sent = self._copy()
        self.seq += 1
        return changes

    def apply(self, delta: Any) -> None:
        """Follow another object's tables by its delta, as a replica does."""
        full: dict[tuple[int, int], list[int]] = {}
        for g, row, start, count, offset, _ in delta.spans.tolist():
            line = full.setdefault((g, row), self.full_row(g, row))
            for k in range(count):
                line[start + k] = 0 if offset == -1 else int(delta.values[offset + k])
        for g, row, _, _, _, live in delta.spans.tolist():
            if any(full[g, row][live:]):
                raise Refused("L4", f"row {row} of group {g} is not null behind its {live} blocks")
            self.rows[g][row] = full[g, row][:live]
        self.sent = self._copy()
        self.seq = delta.seq

    # ---- what kernels see

    def full_row(self, group: int, row: int) -> list[int]:
        """Return a row at its full width, null behind the live entries."""
        return self._padded(group, self.rows[group][row])

    def kernel_row(self, group: int, row: int) -> list[int]:
        """Return a row in kernel blocks: manager block m becomes r*m .. r*m + r - 1, the tail is 0."""
        geometry = self.groups[group].geometry
        ratio = geometry.block_size // geometry.kernel_block_size
        live = [block * ratio + k for block in self.rows[group][row] for k in range(ratio)]
        return live + [0] * (geometry.kernel_width - len(live))

    def slot(self, group: int, row: int, position: int, cp_rank: int = 0) -> int:
        """Return the slot of one token, or -1 where it has none."""
        geometry, kind = self.groups[group].geometry, self.groups[group].kind
        if row == -1 or position < 0 or kind == "state":
            return -1
        size, ranks, chunk = geometry.block_size, geometry.cp_size, geometry.cp_interleave
        offset = position % (size * ranks)
        if offset // chunk % ranks != cp_rank and ranks > 1:
            return -1
        column = 0 if kind == "ring" else position // (size * ranks)
        blocks = self.rows[group][row]
        if column >= len(blocks) or blocks[column] == 0:
            return -1
        return blocks[column] * size + offset // (chunk * ranks) * chunk + offset % chunk

    def slot_mapping(
        self,
        rows: Sequence[int],
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        *,
        padded: int | None = None,
        cp_rank: int = 0,
    ) -> list[list[int]]:
        """Return the slots of a step's tokens, one list per group, padded with -1."""
        self._cuts(query_start_loc, rows, positions[: query_start_loc[-1]] if len(query_start_loc) else [])
        for row in rows:
            if row != -1:
                self._row(row)
        tokens = query_start_loc[-1]
        size = tokens if padded is None else padded
        if size < tokens:
            raise Refused("L6", f"{tokens} tokens do not fit {size}")
        if not 0 <= cp_rank < max(group.geometry.cp_size for group in self.groups):
            raise Refused("L13", f"there is no rank {cp_rank}")
        found = []
        for g in range(len(self.groups)):
            line = [-1] * size
            for i, row in enumerate(rows):
                for t in range(query_start_loc[i], query_start_loc[i + 1]):
                    line[t] = self.slot(g, row, positions[t], cp_rank)
            found.append(line)
        return found

    # ---- rules

    def _lawful(self, g: int, row: int) -> None:
        blocks, geometry, kind = self.rows[g][row], self.groups[g].geometry, self.groups[g].kind
        if len(blocks) > geometry.width:
            raise Refused("L2", f"row {row} of group {g} would hold {len(blocks)} blocks of {geometry.width}")
        ratio = geometry.block_size // geometry.kernel_block_size
        limit = 2**31 // ratio if self.num_blocks is None else self.num_blocks
        if not all(0 <= block < limit for block in blocks):
            raise Refused("L3", f"row {row} of group {g} would hold an id outside 1..{limit - 1}")
        leading = 0
        while leading < len(blocks) and blocks[leading] == 0:
            leading += 1
        if kind in ("full", "ring") and 0 in blocks:
            raise Refused("L3", f"row {row} of group {g} would hold the null block")
        if kind in ("window", "chunked") and 0 in blocks[leading:]:
            raise Refused("L3", f"row {row} of group {g} would hold the null block behind a live one")

    def _row(self, row: int) -> None:
        if not 0 <= row < self.max_rows:
            raise Refused("L2", f"there is no row {row}")

    def _known(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._row(row)
        if len(set(rows)) != len(rows):
            raise Refused("L8", f"a row comes twice in {list(rows)}")

    def _group(self, group: int) -> None:
        if not 0 <= group < len(self.groups):
            raise Refused("L2", f"there is no group {group}")

    def _parts(self, group: int | None, *arrays: Any) -> list[tuple[Any, ...]]:
        """Return (group, its array, ...) for each group that a call writes."""
        if group is not None:
            self._group(group)
            return [(group, *arrays)]
        if any(len(array) != len(self.groups) for array in arrays):
            raise Refused("L2", "group=None takes one array per group")
        return [(g, *(array[g] for array in arrays)) for g in range(len(self.groups))]

    def _cuts(self, indptr: Sequence[int], rows: Sequence[int], values: Sequence[int]) -> None:
        falling = any(indptr[i] > indptr[i + 1] for i in range(len(indptr) - 1))
        if len(indptr) != len(rows) + 1 or indptr[0] != 0 or falling or indptr[-1] != len(values):
            raise Refused("L2", f"{list(indptr)} does not cut {len(values)} values into {len(rows)} parts")

    def _one_each(self, values: Sequence[int], rows: Sequence[int]) -> None:
        if len(values) != len(rows):
            raise Refused("L2", f"{len(values)} values for {len(rows)} rows")

    def _padded(self, group: int, blocks: list[int]) -> list[int]:
        return blocks + [0] * (self.groups[group].geometry.width - len(blocks))

    def _copy(self) -> list[list[list[int]]]:
        return [[list(row) for row in table] for table in self.rows]

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = self._copy()
        try:
            yield
        except Refused:
            self.rows = before
            raise
