"""The usual calls of one recorded cache, as they wait: many are written in one go, since each by itself would cost more.

A call leaves its arrays in a journal, and goes on. What is to be said of them, and which units they finished, is worked out
for all calls that wait, in compiled loops.
"""

from time import perf_counter
from typing import Any

import numpy as np
from numpy import ndarray

from blocktable._arrays import I64, as_int64
from blocktable.delta import Delta
from blocktable.recording import coding
from blocktable.recording.format import NONE
from blocktable.recording.identity import NOWHERE, PLACE, Identity, Ints
from blocktable.recording.journal import (
    BEGIN,
    FIRST,
    GO_ON,
    LAST,
    LAST_AT,
    MOST,
    ROOM,
    WAITING,
    WRITE,
    clear,
    take,
    take_commit,
    take_extend,
)
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

CALLS, SHARE = 256, 16  # calls that may wait, and calls written for each that may
WAIT = 0.01  # seconds after which a commit writes all
NO_SLOTS = np.zeros((1, 0), np.int64)
NEVER = -2  # the size of fields of a kind of which there was no call yet: no field has it


class Pending:
    """Usual calls of one cache that wait to be written."""

    def __init__(self, recorder: Any, number: int, identity: Identity | None) -> None:
        self._recorder, self._lock, self._number = recorder, recorder.lock, number
        self._identity = identity or Identity(1, 0)
        self._whole = int(self._identity.unit > 0)  # are tokens of prompts to be known
        self._journal = np.zeros(ROOM, np.int64)
        self._written = 0
        self._go_on()
        self._when = 0.0  # some were written last
        self._place = np.zeros(PLACES, np.int64)
        self._values = np.zeros((2 * len(SEATS), 1 << 12), np.int64)
        self._sizes = np.zeros((2 * len(SEATS), MOST_FIELDS), np.int64)
        self._last = np.zeros(len(SEATS), np.int64)
        self._sizes[:] = NEVER

    # What a call leaves here, in whatever form it was done.

    def committed(self, delta: Delta) -> None:
        """Take a commit."""
        with self._lock:
            told = take_commit(self._journal, delta.spans, delta.values, delta.copies)
        if told != GO_ON or perf_counter() - self._when > WAIT:
            self._turn(told, take_commit, delta.spans, delta.values, delta.copies)

    def extended(self, rows: Any, starts: Any, tokens: Any, slots: Ints) -> None:
        """Take an extend of which there is nothing more to say than its rows, sizes and tokens."""
        if not (
            type(rows) is type(starts) is type(tokens) is ndarray and rows.dtype is starts.dtype is tokens.dtype is I64
        ):
            rows, starts, tokens = as_int64(rows, "rows"), as_int64(starts, "indptr"), as_int64(tokens, "tokens")
        with self._lock:
            told = take_extend(self._journal, rows, starts, tokens, slots)
        if told != GO_ON:
            self._turn(told, take_extend, rows, starts, tokens, slots)

    def took(
        self,
        kind: int,
        rows: Any,
        starts: Any,
        tokens: Any,
        cached: Ints = NONE,
        slots: Ints = NO_SLOTS,
        limit: int = -1,
        headroom: int = 0,
    ) -> None:
        """Take another call without salts, marks and fences; limit -1: none."""
        arrays = as_int64(rows, "rows"), as_int64(starts, "indptr"), as_int64(tokens, "tokens"), cached, slots
        call = kind, self._whole, *arrays, limit, headroom
        with self._lock:
            told = take(self._journal, *call)
        if told != GO_ON:
            self._turn(told, take, *call)

    def _turn(self, told: int, loop: Any, *call: Any) -> None:
        """Write what waits; then take a call for which there was no room, which one longer than the journal never has."""
        self._recorder.flush()
        if told <= GO_ON:
            return
        with self._recorder.writing():
            usual, told = self._journal, loop(self._journal, *call)
            while told > GO_ON:
                self._journal = np.zeros(told, np.int64)
                clear(self._journal)
                told = loop(self._journal, *call)
            if told == WRITE:
                self.write()
            if self._journal is not usual:
                self._journal = usual
                self._identity.counts[PLACE] = NOWHERE
                self._go_on()

    # What is done with it, by one at a time.

    def write(self) -> None:
        """Write what waits."""
        if self._journal[WAITING]:
            if not self._recorder.closed:
                self._write()
                self._written += int(self._journal[WAITING])
            self._go_on()
            self._when = perf_counter()

    def _go_on(self) -> None:
        """Go on with an empty journal."""
        numbered, last = int(self._identity.counts[PLACE]), int(self._journal[LAST_AT])
        clear(self._journal)
        self._identity.counts[PLACE] = BEGIN if numbered == last and self._journal[LAST] else NOWHERE
        self._journal[MOST] = min(CALLS, self._written // SHARE + 1)

    def _write(self) -> None:
        writer, known, place = self._recorder.writer, self._identity, self._place
        place[:] = 0
        place[CALL] = self._journal[FIRST]
        while not write_calls(
            *(writer.window, writer.meta, self._number, self._journal, self._values, self._sizes, self._last, place),
            *(known.rows, known.kept, known.tokens, known.lines, known.table, known.counts),
        ):
            needed = int(place[NEEDED])
            writer.room(coding.room(needed, MOST_FIELDS))
            known.room(int(place[LONGEST]))
            known.room_for_prompt(int(place[PROMPT]))
            known.room_for_units(int(place[UNITS]))
            self._room(needed)

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
        self._room(values.size)
        self._values[at, : values.size] = values
        self._sizes[at, : sizes.size] = sizes

    def _room(self, values: int) -> None:
        """Have room for so many values of a call's fields."""
        if values > self._values.shape[1]:
            more = np.zeros((len(self._values), values), np.int64)
            self._values = np.concatenate([self._values, more], axis=1)
