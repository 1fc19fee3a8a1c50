"""What tables are asked, sanitized: slots and the kernel's view of rows, compared with what the copy of the tables gives."""

from typing import Any

import numpy as np

from blocktable.sanitize.findings import caller
from blocktable.sanitize.laws import Broken, Ints, each_token, slots_broken, slots_of, writers_broken
from blocktable.sanitize.shadow import Shadow
from blocktable.state import GroupTable


class Unreadable(Exception):  # noqa: N818
    """The arguments are no arrays of integers that belong together: refused, if all is well, before any law."""


def integers(value: Any) -> Ints:
    """Return a one-dimensional array of integers as int64; anything else cannot be judged."""
    if type(value) is np.ndarray and value.dtype == np.int64 and value.ndim == 1 and value.flags.carray:
        return value
    array = np.asarray(value)
    given = isinstance(value, np.ndarray) or array.size  # an empty list has no type of its own
    if array.ndim != 1 or (given and array.dtype.kind not in "iu"):
        raise Unreadable
    if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
        raise Unreadable
    return array.astype(np.int64)


class Looks:
    """The part of every sanitizer that looks at answers."""

    shadow: Shadow

    def mapped(self, slots: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int) -> None:
        """Report what is wrong with a step's slots, int64 [groups, padded] (L6, L7, L8, L13)."""
        shadow = self.shadow
        named, offsets, where = integers(rows), integers(query_start_loc), integers(positions)
        _, token_row = each_token(named, offsets)
        where = where[: token_row.size]
        nobody = np.zeros(token_row.size, np.int64)
        for g, unit in enumerate(shadow.units):
            right = slots_of(unit, shadow.entries[g], shadow.counts[g], token_row, where, rank)
            for broken in slots_broken(unit, slots[g], right, where, token_row, rank):
                shadow.find(broken)
            if unit.kind != "ring":
                for broken in writers_broken(unit, slots[g][: token_row.size], token_row, nobody):
                    shadow.find(broken)

    def expanded(self, group: int, found: Any, rows: Any) -> None:
        """Report what is wrong with rows in kernel blocks (L4, L12)."""
        wanted = integers(rows)
        live = self.shadow.counts[group, wanted] * self.shadow.units[group].ratio
        for broken in kernel_rows_broken(group, found, self.shadow.kernel_rows(group, wanted), wanted, live):
            self.shadow.find(broken)


def kernel_rows_broken(group: int, found: Any, right: Any, rows: Ints, live: Ints) -> Any:
    """Yield what is wrong with rows in kernel blocks: ``right`` is what they should be, ``live`` columns of each count."""
    if found.shape != right.shape:
        yield Broken("L1", f"the kernel's table is {found.shape}, not {right.shape}", group)
        return
    wrong = np.flatnonzero((found != right).reshape(-1))
    if not wrong.size:
        return
    i, column = divmod(int(wrong[0]), right.shape[1])
    there, should = int(found[i, column]), int(right[i, column])
    row = int(rows[i])
    if row < 0:
        yield Broken("L6", f"kernel block {there} lies in a padding row", group, -1, column, there)
    elif column >= live[i]:
        yield Broken("L4", f"kernel block {there} lies behind the {live[i]} live ones", group, row, column, there)
    else:
        yield Broken(
            "L12", f"kernel column {column} is {there}, its manager block gives {should}", group, row, -1, there
        )


class CheckedTable(GroupTable):
    """One group's table; the kernel's view of it is compared."""

    def kernel_array(self, rows: Any) -> Any:
        """Do what the table does, and look at the result."""
        found = super().kernel_array(rows)
        sanitizer = self._state.sanitizer  # type: ignore[attr-defined]
        sanitizer.shadow.begin("kernel_array", caller(1))
        sanitizer.expanded(self._group, found, rows)
        return found


class Reading:
    """What host tables of every sort are asked: the answers are compared."""

    sanitizer: Any
    tables: Any

    def _allocate(self, *arguments: Any) -> None:
        super()._allocate(*arguments)  # type: ignore[misc]
        self.tables = tuple(CheckedTable(self, g) for g in range(len(self.tables)))  # type: ignore[arg-type]

    def slot_mapping(self, rows: Any, query_start_loc: Any, positions: Any, **named: Any) -> Any:
        """Do what the tables do, and look at the result."""
        found = super().slot_mapping(rows, query_start_loc, positions, **named)  # type: ignore[misc]
        self.sanitizer.shadow.begin("slot_mapping", caller(1))
        self.sanitizer.mapped(found, rows, query_start_loc, positions, named.get("cp_rank", 0))
        return found
