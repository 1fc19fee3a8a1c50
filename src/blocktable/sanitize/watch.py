"""Tables that are not ours, looked at from outside: each step's arrays against the laws.

    watcher = sanitize.watch([geometry], num_blocks=4096, mode="log")
    ...                                        # the engine's own code, once a step, before the model runs:
    watcher.step(tables, counts, rows=rows, query_start_loc=starts, positions=positions, slots=slots)

Arrays are NumPy's or torch's, of any integer type and device; nothing is kept but copies.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np

from blocktable._ints import ceil_div
from blocktable._sanitized import RECORDERS
from blocktable.errors import ArgumentError, ContractError
from blocktable.groups import as_groups
from blocktable.sanitize.findings import Finding, Log, Report, caller
from blocktable.sanitize.laws import (
    Broken,
    Ints,
    Unit,
    as_numbers,
    each_token,
    per_group,
    rows_broken,
    slots_broken,
    slots_of,
    writers_broken,
)
from blocktable.state import Shape

__all__ = ["Watch", "watch"]


def watch(
    groups: Any,
    *,
    num_blocks: int | None = None,
    cp_rank: int = 0,
    mode: str = "raise",
    ignore: Collection[str] = (),
    kernel_blocks: bool = False,
) -> "Watch":
    """Return a watcher of an engine's own tables: call its ``step`` once per engine step.

    Parameters
    ----------
    groups
        A ``Group`` or ``Geometry`` per KV cache group, as for ``BlockTables``. Its width is the one the tables must have,
        and its contracts judge their shape; one planned without contracts and with ``max_model_len = width * block_size *
        cp_size`` has exactly that width.
    num_blocks
        Blocks of the pool, the null block 0 included; without it any id that fits int32 passes.
    cp_rank
        This process's rank in its context-parallel group.
    mode
        ``"raise"`` (LawBroken at the first finding), ``"log"`` (an error of the logger ``blocktable.sanitize`` for each) or
        ``"count"``; ``watcher.report`` holds the findings and counts them by law.
    ignore
        Laws not to be looked at, such as ``{"L4"}`` for an engine that never clears its tails.
    kernel_blocks
        The tables are in kernel blocks (``kernel_width`` columns), not in manager blocks.

    >>> import numpy as np
    >>> from blocktable import plan
    >>> watcher = watch([plan(max_model_len=64, block_size=16)], num_blocks=8, mode="count")
    >>> table = np.array([[3, 5, 0, 0], [6, 2, 0, 0]])
    >>> watcher.step(table, [2, 1], query_start_loc=[0, 1, 2], positions=[16, 15], slots=[80, 111, -1])
    [Finding(law='L4', message='block 2 lies behind the 1 live blocks', ...)]
    """
    arguments = (groups, num_blocks, cp_rank, Report(mode), frozenset(ignore))
    if not RECORDERS:
        return Watch(*arguments, kernel_blocks=kernel_blocks)
    from blocktable.recording.watched import RecordedWatch  # noqa: PLC0415 - loaded by whoever began the recording

    return RecordedWatch(*arguments, kernel_blocks=kernel_blocks).recorded_by(RECORDERS[-1])


class Watch:
    """Looks at foreign tables, step by step; ``report`` has what was found. Made by ``watch``."""

    def __init__(
        self,
        groups: Any,
        num_blocks: int | None,
        cp_rank: int,
        report: Report,
        ignore: frozenset[str],
        *,
        kernel_blocks: bool,
    ) -> None:
        self.groups = as_groups(groups)
        self.report = report
        self.steps = 0
        self.num_blocks, self.cp_rank, self.ignore, self.kernel_blocks = num_blocks, cp_rank, ignore, kernel_blocks
        units = [Unit.of(g, Shape.of(group), num_blocks) for g, group in enumerate(self.groups)]
        self._units = [unit.kernel for unit in units] if kernel_blocks else units
        self._log = Log()
        # The tables of the step before, and the operation after which each entry was first seen as it is.
        self._before: list[Any] = [None] * len(self._units)
        self._touched: list[Any] = [None] * len(self._units)
        self._row_of: dict[Hashable, int] = {}

    def step(
        self,
        tables: Any,
        num_blocks: Any,
        *,
        rows: Any = None,
        query_start_loc: Any = None,
        positions: Any = None,
        slots: Any = None,
        lengths: Any = None,
        copies: Any = None,
        requests: Sequence[Hashable] | None = None,
        verb: str = "step",
        frame: FrameType | None = None,
    ) -> list[Finding]:
        """Look at one step's arrays; return what was found (in mode ``raise`` the first is raised as LawBroken).

        Parameters
        ----------
        tables
            One [rows, width] array per group (a lone array where there is one group): the whole persistent table, or the
            step's gathered batch.
        num_blocks
            Live entries of the leading rows: [groups, n], or one [n] per group, or a lone [n]. Rows from n on are padding,
            or without a request, and must be null.
        rows
            The row of each request of the step, -1 for a padding request; without it, 0, 1, 2, ...
        query_start_loc, positions, slots
            The step's slot mapping: offsets [requests + 1], positions [tokens or more], and the slots per group
            ([groups, padded], or one [padded] per group, or a lone one). Entries past the last token are padding.
        lengths
            Tokens of each request of the step, those it computes now included.
        copies
            The same tables elsewhere (on a device): [n or more, width] per group; their first n rows must be equal.
        requests
            What names each request of the step, so that one which goes on is known when its row moves; without it a row
            is taken to go on where an entry stays.
        verb
            What the findings call this operation.
        frame
            The call that the findings point to, the caller's own unless given.

        Raises ArgumentError for arrays that do not belong together. Cost: a few passes over the tables in NumPy, and a copy
        of what lies on a device.
        """
        named = {"rows": rows, "query_start_loc": query_start_loc, "positions": positions, "slots": slots}
        named |= {"lengths": lengths, "copies": copies, "requests": requests, "verb": verb}
        now = self._look(tables, num_blocks, **named, frame=frame or caller(1))
        for finding in now:
            self.report.add(finding)
        return now

    def _look(
        self,
        tables: Any,
        num_blocks: Any,
        *,
        rows: Any,
        query_start_loc: Any,
        positions: Any,
        slots: Any,
        lengths: Any,
        copies: Any,
        requests: Any,
        verb: str,
        frame: FrameType,
    ) -> list[Finding]:
        """Look at a step's arrays; return what was found."""
        size = len(self._units)
        found = per_group(tables, size, 2)
        counts = [array.astype(np.int64) for array in per_group(num_blocks, size, 1)]
        mirrors = per_group(copies, size, 2) if copies is not None else [None] * size
        mapped = per_group(slots, size, 1) if slots is not None else [None] * size
        starts = None if query_start_loc is None else as_numbers(query_start_loc).astype(np.int64)
        asked = _requests(rows, starts, lengths)
        held = None if lengths is None else as_numbers(lengths).astype(np.int64)
        where = None if positions is None else as_numbers(positions).astype(np.int64)
        _fit(self._units, found, counts, asked, starts, where, mapped)
        self._log.add(self.steps, verb, frame)
        now: list[Finding] = []
        for g, unit in enumerate(self._units):
            table = found[g].copy() if found[g].dtype.kind == "i" else found[g].astype(np.int64)
            changed = self._note_changes(g, table)
            stays = self._goes_on(counts[g].size, asked, requests)
            in_table = self._of_table(g, unit, table, counts[g], mirrors[g])
            in_step = self._of_step(
                unit,
                table,
                counts[g],
                asked,
                starts,
                where,
                mapped[g],
                held,
                stays[:, None] & ~changed[: counts[g].size],
            )
            now += [self._finding(one) for one in (*in_table, *in_step) if one.law not in self.ignore]
        self._row_of = dict(zip(requests, asked.tolist(), strict=True)) if requests is not None else {}
        self.steps += 1
        return now

    def _note_changes(self, g: int, table: Any) -> Any:
        """Remember who changed which entries; return the mask of those that are new since the step before."""
        before = self._before[g]
        if before is None or before.shape != table.shape:
            changed = np.ones(table.shape, bool)
            self._touched[g] = np.zeros(table.shape, np.int64)
        else:
            changed = table != before
        # Only now: a finding of this step names who touched the entry last, which is this step where it changed.
        self._touched[g][changed] = self._log.last
        self._before[g] = table
        return changed

    def _of_table(self, g: int, unit: Unit, table: Any, counts: Any, mirror: Any) -> Iterator[Broken]:
        """Look at the table by itself: its width, its rows, the rows past the last one, its copy."""
        if table.shape[1] != unit.width:
            yield Broken("L1", f"the table has {table.shape[1]} columns, its geometry {unit.width}", g)
        try:
            shape = table.shape if self.kernel_blocks else (len(table), self.groups[g].geometry.kernel_width)
            self.groups[g].geometry.check(shape)
        except ContractError as error:
            yield Broken("L1", f"a contract refuses {table.shape[1]} columns: {error}", g)
        n = counts.size
        yield from rows_broken(unit, table[:n], counts, np.arange(n))
        stale = np.flatnonzero((table[n:] != 0).reshape(-1))
        if stale.size:
            row, column = divmod(int(stale[0]), table.shape[1])
            block = int(table[n + row, column])
            yield Broken("L6", f"block {block} lies in a row past the last request", g, n + row, column, block)
        if mirror is None:
            return
        part = mirror[:n, : table.shape[1]]
        if part.shape != table[:n].shape:
            yield Broken("L11", f"a copy of the table is {mirror.shape}, not {table.shape}", g)
            return
        drift = np.flatnonzero((part != table[:n]).reshape(-1))
        if drift.size:
            row, column = divmod(int(drift[0]), table.shape[1])
            said = f"the copy holds {int(part[row, column])} where the table holds {int(table[row, column])}"
            yield Broken("L11", said, g, row, column, int(table[row, column]))

    def _of_step(
        self,
        unit: Unit,
        table: Any,
        counts: Any,
        asked: Ints,
        starts: Any,
        positions: Any,
        slots: Any,
        lengths: Any,
        stays: Any,
    ) -> Iterator[Broken]:
        """Look at what the step does with the table: lengths, slots, writers."""
        if lengths is not None and unit.kind not in ("state", "ring"):
            needed = np.array([ceil_div(int(length), unit.span) for length in lengths])
            live = np.where(asked >= 0, counts[np.maximum(asked, 0)], needed)
            short = np.flatnonzero(needed > live)
            if short.size:
                i = int(short[0])
                said = f"{lengths[i]} tokens need {needed[i]} blocks, the row has {live[i]}"
                yield Broken("L7", said, unit.group, int(asked[i]), int(live[i]))
        if slots is None:
            return
        request, token_row = each_token(asked, starts)
        slots = slots.astype(np.int64)
        expected = slots_of(unit, table, counts, token_row, positions[: request.size], self.cp_rank)
        yield from slots_broken(unit, slots, expected, positions, token_row, self.cp_rank)
        written = np.where((slots[: request.size] == expected) & (token_row >= 0), expected, -1)
        if unit.kind != "ring":
            live = np.arange(table.shape[1]) < counts[:, None]
            others = _other_holders(unit, table, stays & live & (table[: counts.size] != 0), written, token_row)
            yield from writers_broken(unit, written, token_row, others)

    def _goes_on(self, rows: int, asked: Ints, requests: Any) -> Any:
        """Return the mask of rows whose request is the one of the step before, as far as anybody said."""
        if requests is None:
            return np.ones(rows, bool)
        goes_on = np.zeros(rows, bool)
        for name, row in zip(requests, asked.tolist(), strict=True):
            if row >= 0:
                goes_on[row] = self._row_of.get(name) == row
        return goes_on

    def _finding(self, broken: Broken) -> Finding:
        law, message, group, row, column, block = broken
        kept = self._touched[group]
        inside = 0 <= row < kept.shape[0] and 0 <= column < kept.shape[1]
        touched = self._log.operation(int(kept[row, column])) if inside else None
        return Finding(law, message, self._log.operation(self._log.last), group, row, column, block, touched)

    def __repr__(self) -> str:
        """Say how far it is and what was found."""
        return f"<watch of {len(self._units)} groups after {self.steps} steps: {self.report!r}>"


def _other_holders(unit: Unit, table: Any, stays: Any, slots: Any, token_row: Any) -> Ints:
    """Return, per token, how many other rows hold the block of its slot, of the entries that were there before."""
    ids, holders = np.unique(table[: len(stays)][stays], return_counts=True)
    blocks = np.maximum(slots, 0) // unit.block
    at = np.minimum(np.searchsorted(ids, blocks), max(ids.size - 1, 0))
    known = (slots >= 0) & (ids[at] == blocks if ids.size else False)
    rows, blocks = token_row[known], blocks[known]
    own = (stays[rows] & (table[rows] == blocks[:, None])).any(axis=1)
    others = np.zeros(slots.size, np.int64)
    others[known] = holders[at[known]] - own
    return others


def _requests(rows: Any, starts: Any, lengths: Any) -> Ints:
    """Return the row of each request of the step."""
    if rows is not None:
        return as_numbers(rows).astype(np.int64)
    count = len(starts) - 1 if starts is not None else len(as_numbers(lengths)) if lengths is not None else 0
    return np.arange(count, dtype=np.int64)


def _fit(units: Any, tables: Any, counts: Any, rows: Ints, starts: Any, positions: Any, slots: Any) -> None:
    """Refuse arrays that do not belong together."""
    problem = ""
    if len(tables) != len(units) or len(counts) != len(units):
        problem = f"{len(units)} groups, {len(tables)} tables and {len(counts)} arrays of counts"
    elif any(table.ndim != 2 or count.ndim != 1 for table, count in zip(tables, counts, strict=True)):
        problem = "a table is [rows, width] and its counts are [rows]"
    elif any(count.size > len(table) for table, count in zip(tables, counts, strict=True)):
        problem = "there are more counts than rows"
    elif rows.size and not (rows.min() >= -1 and rows.max() < min(map(len, counts))):
        problem = f"a request has row {int(rows.max())}, counts are given of {min(map(len, counts))} rows"
    elif slots[0] is not None:
        if starts is None or positions is None:
            problem = "slots come with query_start_loc and positions"
        elif starts.size != rows.size + 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
            problem = f"query_start_loc does not cut tokens into {rows.size} requests"
        elif positions.size < starts[-1] or any(array.ndim != 1 or array.size < starts[-1] for array in slots):
            problem = f"there are {int(starts[-1])} tokens, and fewer positions or slots"
    if problem:
        raise ArgumentError(f"watch: {problem}", remedy="see the parameters of Watch.step")
