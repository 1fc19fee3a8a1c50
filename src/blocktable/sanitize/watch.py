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

from blocktable._arrays import as_count, as_flag
from blocktable._ints import ceil_div
from blocktable._sanitized import RECORDERS
from blocktable.errors import ArgumentError, ContractError, GeometryError
from blocktable.groups import as_groups
from blocktable.sanitize.findings import Finding, Log, Report, caller
from blocktable.sanitize.laws import (
    LAWS,
    Broken,
    Ints,
    Unit,
    each_token,
    rows_broken,
    slots_broken,
    slots_of,
    writers_broken,
)
from blocktable.sanitize.shown import Shown, shown
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

    Raises ArgumentError for what is none of these, such as a rank that the groups do not have or a law of another name.

    >>> import numpy as np
    >>> from blocktable import plan
    >>> watcher = watch([plan(max_model_len=64, block_size=16)], num_blocks=8, mode="count")
    >>> table = np.array([[3, 5, 0, 0], [6, 2, 0, 0]])
    >>> watcher.step(table, [2, 1], query_start_loc=[0, 1, 2], positions=[16, 15], slots=[80, 111, -1])
    [Finding(law='L4', message='block 2 lies behind the 1 live blocks', ...)]
    """
    arguments = (groups, num_blocks, cp_rank, Report(mode), ignore)
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
        ignore: Collection[str],
        *,
        kernel_blocks: bool,
    ) -> None:
        self.groups = as_groups(groups)
        self.report = report
        self.steps = 0
        ranks = max(group.geometry.cp_size for group in self.groups)
        self.cp_rank = as_count(cp_rank, "cp_rank", 0, ranks - 1, law="L13")
        self.num_blocks = None if num_blocks is None else as_count(num_blocks, "num_blocks", 1, 2**31, law="L3")
        self.ignore = _laws(ignore)
        remedy = "pass True where the tables hold kernel blocks"
        self.kernel_blocks = as_flag("watch", kernel_blocks, "kernel_blocks", remedy)
        units = [Unit.of(g, Shape.of(group), self.num_blocks) for g, group in enumerate(self.groups)]
        self._units = [unit.kernel for unit in units] if self.kernel_blocks else units
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

        Raises ArgumentError, and stays as it was, for arguments that are no integers or do not belong together. Cost: a few passes over the tables in NumPy, and a copy
        of what lies on a device.
        """
        given = shown(
            len(self._units),
            tables,
            num_blocks,
            rows=rows,
            query_start_loc=query_start_loc,
            positions=positions,
            slots=slots,
            lengths=lengths,
            copies=copies,
            requests=requests,
            verb=verb,
        )
        if not isinstance(frame, FrameType | None):
            raise ArgumentError(
                f"watch: frame must be a frame, got {frame!r}",
                values={"frame": frame},
                remedy="leave it out, or pass sys._getframe()",
            )
        now = self._look(given, frame or caller(1))
        for finding in now:
            self.report.add(finding)
        return now

    def _look(self, given: Shown, frame: FrameType) -> list[Finding]:
        """Look at a step's arrays; return what was found."""
        self._log.add(self.steps, given.verb, frame)
        now: list[Finding] = []
        for g, unit in enumerate(self._units):
            table = given.tables[g].copy() if given.tables[g].dtype.kind == "i" else given.tables[g].astype(np.int64)
            counts = given.counts[g]
            changed = self._note_changes(g, table)
            stays = self._goes_on(counts.size, given.asked, given.requests)[:, None] & ~changed[: counts.size]
            in_table = self._of_table(g, unit, table, counts, given.copies[g])
            in_step = self._of_step(unit, table, np.clip(counts, 0, table.shape[1]), given, stays)
            now += [self._finding(one) for one in (*in_table, *in_step) if one.law not in self.ignore]
        names = given.requests
        self._row_of = {} if names is None else dict(zip(names, given.asked.tolist(), strict=True))
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
        except GeometryError:
            pass  # narrower than its rows are long, and so not as wide as its geometry: that is said
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

    def _of_step(self, unit: Unit, table: Any, counts: Ints, given: Shown, stays: Any) -> Iterator[Broken]:
        """Look at what the step does with the table: lengths, slots, writers."""
        asked, lengths = given.asked, given.lengths
        if lengths is not None and unit.kind not in ("state", "ring"):
            needed = np.array([ceil_div(int(length), unit.span) for length in lengths])
            live = needed.copy()
            live[asked >= 0] = counts[asked[asked >= 0]]
            short = np.flatnonzero(needed > live)
            if short.size:
                i = int(short[0])
                said = f"{lengths[i]} tokens need {needed[i]} blocks, the row has {live[i]}"
                yield Broken("L7", said, unit.group, int(asked[i]), int(live[i]))
        slots, positions = given.slots[unit.group], given.positions
        if slots is None or positions is None:
            return
        request, token_row = each_token(asked, given.starts)
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


def _laws(ignore: Any) -> frozenset[str]:
    """Return the laws that are not to be looked at; a misspelt one would be looked at all the same."""
    several = not isinstance(ignore, str) and hasattr(ignore, "__iter__")
    named = list(ignore) if several else [ignore]
    unknown = [law for law in named if law not in LAWS or not several]
    if unknown:
        raise ArgumentError(
            f"watch: ignore must be a collection of laws, {LAWS[0]} to {LAWS[-1]}, got {unknown[0]!r}",
            values={"ignore": ignore},
            remedy="name each as the reports do, such as ignore={'L4'}",
        )
    return frozenset(named)
