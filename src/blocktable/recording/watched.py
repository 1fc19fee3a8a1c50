"""Foreign tables in a recording: what a watcher was shown, entry by entry where it changed, and what it found."""

from collections.abc import Iterator
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.errors import ArgumentError
from blocktable.recording.format import of_text
from blocktable.recording.identity import Ints
from blocktable.sanitize.findings import Finding
from blocktable.sanitize.shown import Shown
from blocktable.sanitize.watch import Watch

# The fields of a step: these of all groups, then of each its table, live counts, slots, and its copy.
ROWS, STARTS, POSITIONS, LENGTHS, REQUESTS, VERB = range(6)
HEAD, EACH = 6, 8
SHAPE, PLACES, VALUES, COUNTS, SLOTS, COPY_SHAPE, COPY_PLACES, COPY_VALUES = range(EACH)
MOST = 1 << 26  # entries of a table: more are not made for a record that may be damaged


class RecordedWatch(Watch):
    """A watcher whose steps are recorded: tables as what changed in them, all else as it was given."""

    _recorder: Any = None
    _number = 0

    def recorded_by(self, recorder: Any) -> "RecordedWatch":
        """Write to a recorder from here on."""
        self._seen: list[Any] = [None] * len(self.groups)
        self._names: dict[Any, int] = {}
        self._counter = count()
        recorder.begin(self)
        return self

    def _look(self, given: Shown, frame: FrameType) -> list[Finding]:
        for name, parts in (("tables", given.tables), ("copies", given.copies)):
            for g, part in enumerate(parts):
                if part is not None and part.size > MOST:
                    raise ArgumentError(
                        f"watch: {name} of group {g} have {part.size} entries, a recording holds up to {MOST} of each",
                        values={"group": g, "entries": part.size, "most": MOST},
                        remedy="show the rows in use alone, or watch these tables without recording them",
                    )
        found = super()._look(given, frame)
        self._recorder.write("step", self._number, list(self._fields(given)), of_findings(found))
        return found

    def _fields(self, given: Shown) -> Iterator[Ints | None]:
        yield from (given.rows, given.starts, given.positions, given.lengths)
        yield None if given.requests is None else np.array([self._name(one) for one in given.requests], np.int64)
        yield of_text(given.verb)
        for g, table in enumerate(given.tables):
            yield from difference(table, self._seen[g])
            self._seen[g] = np.array(table, np.int64)
            yield given.counts[g]
            yield given.slots[g]
            yield from (None, None, None) if given.copies[g] is None else difference(given.copies[g], self._seen[g])

    def _name(self, request: Any) -> int:
        found = self._names.get(request)
        if found is None:
            found = self._names[request] = next(self._counter)
        return found


def _flat(array: Any) -> Ints:
    return np.ascontiguousarray(array, np.int64).reshape(-1)


def of_findings(found: list[Finding]) -> Ints:
    """Return findings as numbers; those of widths (L1) are left out, since contracts are not recorded."""
    places = [f"{one.law} {one.group} {one.row} {one.column} {one.block}" for one in found if one.law != "L1"]
    return of_text("\n".join(places))


def difference(table: Any, before: Any) -> Iterator[Ints]:
    """Yield a table's shape, the places (flat) where it is not what was there before, and what is there now."""
    base = _over(np.shape(table), before)
    flat, changed = _flat(table), np.flatnonzero(np.asarray(table).reshape(-1) != base.reshape(-1))
    yield np.array(np.shape(table), np.int64)
    yield changed
    yield flat[changed]


def _over(shape: tuple[int, ...], before: Any) -> NDArray[np.int64]:
    """Return what was there before in a table of another shape, 0 where nothing was."""
    base = np.zeros(shape, np.int64)
    if before is not None:
        rows, columns = (min(a, b) for a, b in zip(shape, before.shape, strict=True))
        base[:rows, :columns] = before[:rows, :columns]
    return base


class WatchReader:
    """From the fields of steps to the arrays that a watcher is shown."""

    def __init__(self, groups: int) -> None:
        self._seen: list[Any] = [None] * groups

    def step(self, fields: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one step."""
        if len(fields) != HEAD + EACH * len(self._seen):
            raise _damaged()
        parts = [fields[HEAD + EACH * g : HEAD + EACH * (g + 1)] for g in range(len(self._seen))]
        tables, copies = [], []
        for g, part in enumerate(parts):
            self._seen[g] = self._table(part[SHAPE], part[PLACES], part[VALUES], self._seen[g])
            tables.append(self._seen[g].copy())
            copy = part[COPY_SHAPE], part[COPY_PLACES], part[COPY_VALUES]
            copies.append(None if copy[0] is None else self._table(*copy, self._seen[g]))
        slots = [part[SLOTS] for part in parts]
        named: dict[str, Any] = {
            "rows": fields[ROWS],
            "query_start_loc": fields[STARTS],
            "positions": fields[POSITIONS],
            "slots": None if any(one is None for one in slots) else tuple(slots),
            "lengths": fields[LENGTHS],
            "copies": None if any(one is None for one in copies) else tuple(copies),
            "requests": None if fields[REQUESTS] is None else fields[REQUESTS].tolist(),
            "verb": bytes(fields[VERB].astype(np.uint8)).decode(),
        }
        return (tuple(tables), tuple(part[COUNTS] for part in parts)), named

    def _table(self, shape: Ints, places: Ints, values: Ints, before: Any) -> NDArray[np.int64]:
        rows, columns = shape.tolist()
        if min(rows, columns) < 0 or rows * columns > MOST:
            raise _damaged()
        table = _over((rows, columns), before)
        table.reshape(-1)[places] = values
        return table


def _damaged() -> ArgumentError:
    return ArgumentError("a record holds a step that no watcher was shown", remedy="record the run again")
