"""A second copy of the tables, written from what was asked for alone, and compared with what is there.

The copy is flat: all groups' tables one after another, so that an index array names entries of any of them. What a call
wrote is compared at once; the rest is compared in turn, a fixed amount at each call, all of it where tables are small.
"""

from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.sanitize import usual
from blocktable.sanitize.findings import Finding, Log, Report
from blocktable.sanitize.laws import Broken, Ints, Unit

SWEPT = 1 << 12  # entries compared at each call beyond those that it wrote


class Write(NamedTuple):
    """What a call does to one group: entries ``at`` (flat) become ``values``, ``rows`` have ``counts`` live blocks."""

    group: int
    at: Ints
    values: Any
    rows: Ints
    counts: Ints


def ragged(starts: Any, sizes: Any) -> Ints:
    """Return starts[0], starts[0] + 1, ... (sizes[0] of them), starts[1], ... in one array."""
    sizes = np.asarray(sizes, np.int64)
    ends = np.cumsum(sizes)
    shifts: Ints = np.repeat(np.asarray(starts) - (ends - sizes), sizes)
    shifts += np.arange(shifts.size)
    return shifts


class Shadow:
    """The copy, the calls that made it what it is, and where findings go."""

    def __init__(self, units: Sequence[Unit], max_rows: int, report: Report) -> None:
        self.report, self.log = report, Log()
        self.step = 0
        self.clean = True  # has the call in progress found nothing so far
        self.max_rows = max_rows
        self.arrange(units)

    def arrange(self, units: Sequence[Unit]) -> None:
        """Take groups, all rows empty and nothing pending."""
        self.units = units
        widths = [unit.width for unit in units]
        self.base = np.concatenate([[0], np.cumsum(np.array(widths) * self.max_rows)])
        self.flat = np.zeros(self.base[-1], np.int32)
        self.sent = np.zeros_like(self.flat)
        self.touched = np.full(self.flat.size, -1, np.int32)  # the call that last wrote each entry
        self.counts = np.zeros((len(widths), self.max_rows), np.int64)
        self.sent_counts = np.zeros_like(self.counts)
        parts = zip(self.base[:-1], self.base[1:], widths, strict=True)
        self.entries = [self.flat[a:b].reshape(self.max_rows, width) for a, b, width in parts]
        self.pool = np.zeros(8, np.int64)  # see ``usual``
        self.widths = np.array(widths, np.int64)
        self._ends = self.base.tolist()
        self._actual: list[Any] = []
        self._sweep = (0, 0)  # group and entry that are next to be compared

    def show(self, tables: Any) -> None:
        """Say where the tables to be compared lie: they are views, so once is enough for one shape."""
        self._actual = [table.array for table in tables]
        self._flat = [array.reshape(-1) for array in self._actual]
        self._counts = [table.num_blocks for table in tables]

    def seen(self, group: int) -> tuple[Any, Any]:
        """Return one group's entries, flat, and live counts, as they are in the tables."""
        return self._flat[group], self._counts[group]

    # ---- calls

    def begin(self, verb: str, frame: FrameType) -> None:
        """Note a call."""
        self.pool[usual.CALL] = self.log.add(self.step, verb, frame)
        self.clean = True

    def find(self, broken: Broken, touched: int | None = None) -> None:
        """Report a broken law, naming the call in progress and the one that last wrote the entry."""
        law, message, group, row, column, block = broken
        before = touched
        if before is None and 0 <= row < self.max_rows and 0 <= column < (self.units[group].width if group >= 0 else 0):
            before = int(self.touched[self.place(group, row, column)])
        self.clean = False
        last = self.log.operation(before) if before is not None else None
        self.report.add(Finding(law, message, self.log.operation(self.log.last), group, row, column, block, last))

    def place(self, group: int, row: int, column: int) -> int:
        """Return where an entry lies in the flat copy."""
        return int(self.base[group]) + row * self.units[group].width + column

    def where(self, at: int) -> tuple[int, int, int]:
        """Return (group, row, column) of a place in the flat copy."""
        group = int(np.searchsorted(self.base, at, side="right")) - 1
        row, column = divmod(at - int(self.base[group]), self.units[group].width)
        return group, row, column

    # ---- what is asked for

    def write(self, writes: Sequence[Write]) -> None:
        """Do in the copy what a call was asked to do."""
        for group, at, values, rows, counts in writes:
            sent, sent_counts = self.sent[at], self.sent_counts[group, rows]
            before, counted = np.count_nonzero(sent != self.flat[at]), self.counts[group, rows]
            self.flat[at] = values
            self.counts[group, rows] = counts
            self.pool[usual.BEHIND] += np.count_nonzero(sent != self.flat[at]) - before
            off = np.count_nonzero(sent_counts != counts) - np.count_nonzero(sent_counts != counted)
            self.pool[usual.MISCOUNTED] += off

    # ---- what is there

    def compare_places(self, at: Ints) -> None:
        """Compare entries anywhere."""
        groups = np.searchsorted(self.base, at, side="right") - 1
        for group in np.unique(groups).tolist():
            mine = at[groups == group]
            wrong = np.flatnonzero(self._flat[group][mine - self.base[group]] != self.flat[mine])
            if wrong.size:
                self._differs(int(mine[wrong[0]]), "")

    def compare(self, writes: Sequence[Write]) -> None:
        """Compare the entries and counts that a call wrote, then remember it as the one that touched them."""
        for group, at, _, rows, _ in writes:
            wrong = np.flatnonzero(self.observed(group, at) != self.flat[at])
            if wrong.size:
                self._differs(int(at[wrong[0]]), "")
            off = np.flatnonzero(self._counts[group][rows] != self.counts[group, rows])
            if off.size:
                self._miscounted(group, int(rows[off[0]]))
            self.touched[at] = self.log.last
        self.sweep()

    def observed(self, group: int, at: Ints) -> Any:
        """Return what the tables hold at places of one group."""
        return self._flat[group][at - self.base[group]]

    def sweep(self, why: str = "") -> None:
        """Compare the next stretch of all tables; a difference there is from a call that had nothing to do with it."""
        todo = min(SWEPT, self.flat.size)
        while todo > 0:
            group, begin = self._sweep
            base = self._ends[group]
            size = self._ends[group + 1] - base
            end = min(begin + todo, size)
            wrong = usual.first_difference(self._flat[group], self.flat, base, begin, end)
            if wrong >= 0:
                self._differs(base + wrong, why)
            todo -= end - begin
            self._sweep = (group, end) if end < size else ((group + 1) % len(self.units), 0)
        if self.max_rows * len(self.units) <= SWEPT:
            for group, counts in enumerate(self._counts):
                row = usual.first_miscounted(counts, self.counts[group])
                if row >= 0:
                    self._miscounted(group, row)

    def _differs(self, at: int, why: str) -> None:
        """Report an entry that is not what it should be."""
        group, row, column = self.where(at)
        there, right, live = int(self._actual[group][row, column]), int(self.flat[at]), int(self.counts[group, row])
        law, said = entry_broken(self.units[group], there, right, column, live)
        if why:
            law, said = "L2", f"{why}: {said}"
        self.find(Broken(law, said, group, row, column, there))

    def _miscounted(self, group: int, row: int) -> None:
        there, right = int(self._counts[group][row]), int(self.counts[group, row])
        self.find(Broken("L2", f"the row counts {there} live blocks, it holds {right}", group, row))

    def follow(self) -> None:
        """Take the tables as they are, after a finding: one fault is to be found once."""
        for group, actual in enumerate(self._flat):
            self.flat[self.base[group] : self.base[group + 1]] = actual
            self.counts[group] = self._counts[group]
        self.pool[usual.BEHIND] = np.count_nonzero(self.flat != self.sent)
        self.pool[usual.MISCOUNTED] = np.count_nonzero(self.counts != self.sent_counts)

    # ---- commits

    def apply(self, delta: Any) -> Iterator[Broken]:
        """Follow a delta in the copy of what was sent; yield what is wrong with it by itself."""
        copies = (self.sent, self.flat, self.sent_counts, self.counts)
        bad = usual.follow_delta(delta.spans, delta.values, self.base, self.widths, self.max_rows, *copies, self.pool)
        if bad >= 0:
            yield Broken("L11", f"a span of the delta reaches outside the tables: {delta.spans[bad].tolist()}")

    def committed(self) -> None:
        """Compare what was sent with the tables (L11): as many entries differ as were changed and not sent, or wrongly."""
        if self.pool[usual.BEHIND]:
            wrong = np.flatnonzero(self.sent != self.flat)
            group, row, column = self.where(int(wrong[0]))
            there, right = int(self.sent[wrong[0]]), int(self.flat[wrong[0]])
            said = f"a replica holds {there} after this commit, the host {right}"
            self.find(Broken("L11", said, group, row, column, right))
        if self.pool[usual.MISCOUNTED]:
            group, row = np.argwhere(self.sent_counts != self.counts)[0].tolist()
            there, right = int(self.sent_counts[group, row]), int(self.counts[group, row])
            self.find(Broken("L11", f"a replica counts {there} live blocks, the host {right}", group, row))
        if not self.clean:
            self.sent[:], self.sent_counts[:] = self.flat, self.counts
            self.pool[usual.BEHIND] = self.pool[usual.MISCOUNTED] = 0
        self.step += 1

    # ---- what kernels see

    def kernel_rows(self, group: int, rows: Ints) -> NDArray[np.int64]:
        """Return rows in kernel blocks, 0 behind the live ones."""
        ratio, kernel_width = self.units[group].ratio, self.units[group].kernel_width
        blocks = self.entries[group][rows].astype(np.int64)
        found = np.zeros((len(rows), kernel_width), np.int64)
        split = (blocks[:, :, None] * ratio + np.arange(ratio)).reshape(len(rows), blocks.shape[1] * ratio)
        found[:, : split.shape[1]] = split[:, :kernel_width]
        found[np.arange(kernel_width) >= self.counts[group, rows][:, None] * ratio] = 0
        return found


def entry_broken(unit: Unit, there: int, right: int, column: int, live: int) -> tuple[str, str]:
    """Return the law and the words for an entry that holds something else than it should."""
    if column >= live:
        where = f"behind the {live} live blocks" if live else "in a row without blocks"
        return ("L4" if live else "L5"), f"block {there} lies {where}"
    if not 0 <= there < unit.limit:
        return "L3", f"block id {there} is outside 1..{unit.limit - 1}"
    if right == 0:
        return "L3", f"block {there} is still an entry, though it was given up"
    return "L3", f"a live entry is {f'block {there}' if there else 'the null block'}, it was given block {right}"
