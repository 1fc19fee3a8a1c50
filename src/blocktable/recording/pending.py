"""The usual calls of one recorded cache, as they wait: many are written in one go, since each by itself would cost more.

What waits is bounded three ways, so that a killed process loses little: 256 calls, a fraction of those written so
far, and nothing once some milliseconds have passed at the next call. An engine whose steps take that long loses nothing.
"""

from time import perf_counter
from typing import Any

import numpy as np

from blocktable.delta import Delta
from blocktable.recording import coding
from blocktable.recording.identity import Identity, Ints
from blocktable.recording.steps import (
    COMMIT,
    EXTEND,
    FIELDS,
    FINAL_EXTEND,
    LAST,
    NEEDED,
    PLACES,
    begin_rows,
    write_steps,
)

MOST, SHARE = 256, 16  # calls that may wait, and calls written for each that may
WAIT = 0.01  # seconds after which none waits for the next
_NONE = np.zeros(0, np.int64)


class Nobody:
    """Stands for the identity of a cache without a prefix index."""

    tokens = lines = table = np.zeros((1, 8), np.int64)
    counts = rows = np.zeros(2, np.int64)

    def room_for_units(self, _: int) -> None:
        """Nothing is numbered."""


NOBODY = Nobody()


class Pending:
    """Extends and commits of one cache that wait to be written."""

    def __init__(self, recorder: Any, one: Any, number: int, identity: Identity | None) -> None:
        self._recorder, self._number, self._identity = recorder, number, identity
        self._lengths, self._final = one.lengths, one.final
        self._calls: list[int] = []
        self._longs = np.zeros(
            1 << 16, np.int64
        )  # one place for all: fresh memory costs more than what is written there
        self._used = 0
        self._ints: list[Any] = []
        self._waiting = 0
        self._extend = -1  # the last extend of these calls
        self._last = 0.0  # when some were written last
        self._written = 0
        self._place = np.zeros(PLACES, np.int64)
        self._values, self._sizes = np.zeros((2, 1 << 12), np.int64), np.zeros((2, FIELDS), np.int64)
        self._before: Any = None  # the last extend, where it lies in the buffers

    def extended(self, rows: Any, starts: Any, text: Any, slots: Any) -> None:
        """Take an extend of which there is nothing more to say than its rows, sizes and tokens, in whatever form it was done."""
        n, given = len(rows), 0 if text is None else len(text)
        at = self._used
        middle = at + n + n + 1
        after = middle + given
        end = after + slots.size
        if end > self._longs.size:
            self._longs = np.concatenate([self._longs, np.zeros(end, np.int64)])
        longs = self._longs
        longs[at : at + n] = rows
        longs[at + n : middle] = starts
        if given:
            longs[middle:after] = text
        longs[after:end] = slots[0] if len(slots) == 1 else slots.reshape(-1)
        self._used = end
        self._extend = self._waiting
        self._calls += (EXTEND, n, given, len(slots))
        self._more()

    def committed(self, delta: Delta) -> None:
        """Take a commit."""
        spans, values, copies = delta.spans, delta.values, delta.copies
        self._ints += (spans, values, copies)
        self._calls += (COMMIT, len(spans), len(values), len(copies))
        self._more()

    def _more(self) -> None:
        """Write what waits, once there is enough of it: the first calls, and those of slow steps, at once."""
        self._waiting += 1
        now = perf_counter()
        if self._waiting >= MOST or self._waiting * SHARE > self._written or now - self._last > WAIT:
            self.flush()
            self._last = now

    def flush(self) -> None:
        """Write the calls that wait."""
        if not self._waiting:
            return
        calls = np.array(self._calls, np.int64).reshape(-1, 4)
        longs, ints = self._longs[: self._used], np.frombuffer(b"".join(self._ints), np.int32)
        self._calls, self._used, self._ints = [], 0, []
        self._written, self._waiting = self._written + self._waiting, 0
        with self._recorder.lock:
            if not self._recorder.closed:
                self._write(calls, longs, ints)
        self._extend = -1

    def _write(self, calls: Ints, longs: Ints, ints: Ints) -> None:
        writer, identity, place, number = self._recorder.writer, self._identity, self._place, self._number
        if identity is not None:
            identity.room(begin_rows(calls, longs, self._lengths, identity.lines))
        known: Any = identity or NOBODY
        place[:] = 0
        place[LAST], place[FINAL_EXTEND] = self._load(), self._extend
        while not write_steps(
            *(writer.window, writer.meta, number, calls, longs, ints, self._values, self._sizes, place, known.rows),
            *(self._final, known.tokens, known.lines, known.table, known.counts),
        ):
            needed = int(place[NEEDED])
            writer.room(coding.room(needed, FIELDS))
            known.room_for_units(needed)
            if needed > self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros((2, needed), np.int64)], axis=1)
        now = int(place[LAST])
        self._before = self._values[now], self._sizes[now], now
        self._recorder.before[EXTEND, number] = self._before

    def _load(self) -> int:
        """Have the last extend in one of the two buffers; return in which."""
        before = self._recorder.before.get((EXTEND, self._number), (_NONE, _NONE))
        if before is self._before:
            return int(before[2])
        values, sizes = before[:2]
        if values.size > self._values.shape[1]:
            self._values = np.zeros((2, 2 * values.size), np.int64)
        self._values[0, : values.size] = values
        self._sizes[0] = -2  # no field has this size
        self._sizes[0, : sizes.size] = sizes
        return 0
