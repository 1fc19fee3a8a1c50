"""The usual calls of one recorded cache, as they wait: many are written in one go, since each by itself would cost more.

A call notes itself in a journal, and goes on. What is to be said of them, and which units they finished, is worked out
for all calls that wait, in compiled loops.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from blocktable._journal import (
    BEGIN,
    DUE,
    FIRST,
    LAST,
    LAST_AT,
    LAST_UNKNOWN,
    MOST,
    NO_JOURNAL,
    WAITING,
    WHOLE,
    JournalFull,
    clear,
)
from blocktable.recording import coding
from blocktable.recording.identity import NOWHERE, PLACE, Identity, Ints
from blocktable.recording.steps import (
    CALL,
    FIELDS,
    LONGEST,
    MOST_FIELDS,
    NEEDED,
    PLACES,
    PROMPT,
    SEATS,
    UNITS,
    write_calls,
)

T = TypeVar("T")
CALLS, SHARE = 256, 16  # calls that may wait, and calls written for each that may
ROOM = 1 << 17  # numbers that wait at most; a call that is longer does not
WAIT = 0.01  # seconds after which a commit writes all
PATIENCE = 60.0  # seconds for which whoever writes them waits for the call in progress
NEVER = -2  # the size of fields of a kind of which there was no call yet: no field has it


class Pending:
    """Usual calls of one cache that wait to be written."""

    def __init__(self, recorder: Any, number: int, identity: Identity | None, cache: Any) -> None:
        self._recorder, self._number, self._cache = recorder, number, cache
        self.reading = cache.tables._reading
        self._identity = identity or Identity(1, 0)
        self._written = 0
        self.until = 0.0  # when a commit writes all
        self._usual = np.zeros(ROOM, np.int64)
        self.journal = cache._journal = self._usual
        self._go_on()
        self._place = np.zeros(PLACES, np.int64)
        self._values = np.zeros((2 * len(SEATS), 1 << 12), np.int64)
        self._sizes = np.zeros((2 * len(SEATS), MOST_FIELDS), np.int64)
        self._last = np.zeros(len(SEATS), np.int64)
        self._sizes[:] = NEVER

    def again(self, numbers: int, call: Callable[[], T]) -> T:
        """Make a call again that found no room: what waits is written before it, and one longer than what may wait at once."""
        while True:
            longer = BEGIN + numbers > self._usual.size
            self._write_and_use(np.zeros(BEGIN + numbers, np.int64) if longer else self._usual)
            try:
                return call()
            except JournalFull as full:
                numbers = full.numbers
            finally:
                if longer:
                    self._write_and_use(self._usual)

    def let_go(self) -> None:
        """Have no call note itself any more."""
        if self._cache._pending is self:  # of another recorder's it is not
            self._cache._journal = NO_JOURNAL
            self._cache._pending = None

    def flush_due(self) -> None:
        """Write what waits, if it is so much that it is to be written now."""
        if self.journal[DUE]:
            self.flush()

    def flush(self, *, wait: bool = True) -> None:
        """Write what waits; without ``wait``, ConcurrentUse while a call is in progress."""
        if self.journal[WAITING]:
            self._alone(self.write, PATIENCE if wait else 0.0)

    def _write_and_use(self, journal: Ints) -> None:
        """Write what waits, and go on with a journal that keeps no prompts."""

        def do() -> None:
            self.write()
            self.journal[LAST] = self.journal[LAST_UNKNOWN] = 0
            self.journal = journal
            if not self._recorder.closed:
                self._cache._journal = journal
            self._go_on()

        self._alone(do, PATIENCE)

    def _alone(self, do: Callable[[], None], patience: float) -> None:
        """Do something with the journal and the file, of which the journal is always taken first."""
        tables, recorder = self._cache.tables, self._recorder
        with tables._reading, tables._after_call("flush", patience), recorder.lock, recorder.whole:
            do()

    # What is done with it, by one at a time.

    def write(self) -> None:
        """Write what waits."""
        if self.journal[WAITING] and not self._recorder.closed:
            self._write()
            self._written += int(self.journal[WAITING])
            self._go_on()
            self.until = perf_counter() + WAIT

    def _go_on(self) -> None:
        """Go on with an empty journal."""
        numbered, last = int(self._identity.counts[PLACE]), int(self.journal[LAST_AT])
        clear(self.journal)
        self._identity.counts[PLACE] = BEGIN if numbered == last and self.journal[LAST] else NOWHERE
        self.journal[MOST] = min(CALLS, self._written // SHARE + 1)
        self.journal[WHOLE] = self._identity.unit > 0

    def _write(self) -> None:
        writer, known, place = self._recorder.writer, self._identity, self._place
        place[:] = 0
        place[CALL] = self.journal[FIRST]
        while not write_calls(
            *(writer.window, writer.meta, self._number, self.journal, self._values, self._sizes, self._last, place),
            *(known.rows, known.kept, known.tokens, known.lines, known.table, known.counts),
        ):
            needed = int(place[NEEDED])
            writer.room(coding.room(needed, MOST_FIELDS))
            known.room(int(place[LONGEST]))
            known.room_for_prompt(int(place[PROMPT]))
            known.room_for_units(int(place[UNITS]))
            self._room_for(needed)

    # The last call of each kind, for those that are written otherwise.

    def last(self, kind: int) -> tuple[Ints, Ints]:
        """Return the values and sizes of the fields of the last call of a kind."""
        seat = SEATS.index(kind)
        at = 2 * seat + int(self._last[seat])
        return self._values[at], self._sizes[at, : FIELDS[seat]]

    def keep(self, kind: int, values: Ints, sizes: Ints) -> None:
        """Have a call that was written otherwise for the last one."""
        seat = SEATS.index(kind)
        at = 2 * seat + int(self._last[seat])
        self._room_for(values.size)
        self._values[at, : values.size] = values
        self._sizes[at, : sizes.size] = sizes

    def _room_for(self, values: int) -> None:
        """Have room for so many values of a call's fields."""
        if values > self._values.shape[1]:
            more = np.zeros((len(self._values), values), np.int64)
            self._values = np.concatenate([self._values, more], axis=1)
