"""The usual calls of one recorded cache, as they wait: many are written in one go, since each by itself would cost more.

A call leaves its arrays as they are, one behind the other, and goes on. What is to be said of them, and which units they
finished, is worked out for all calls that wait, in compiled loops.
"""

from io import BytesIO
from time import perf_counter
from typing import Any

import numpy as np
from numpy import ndarray

from blocktable._arrays import I64
from blocktable.delta import Delta
from blocktable.recording import coding
from blocktable.recording.format import NONE
from blocktable.recording.identity import Identity, Ints
from blocktable.recording.steps import (
    ADMIT,
    COMMIT,
    EXTEND,
    FIELDS,
    FREE,
    HEAD,
    LINE,
    LONGEST,
    LOOKUP,
    MOST_FIELDS,
    NEEDED,
    PLACES,
    PROMPT,
    REFUSED,
    SEATS,
    UNITS,
    any_unknown,
    lay_out,
    write_calls,
)

MOST, SHARE = 256, 16  # calls that may wait, and calls written for each that may
WAIT = 0.01  # seconds after which a commit writes all
MOST_BYTES = 1 << 18  # that may wait; more would not stay in a processor's cache
FILL = bytes(4)
NEVER = -2  # the size of fields of a kind of which there was no call yet: no field has it


class Pending:
    """Usual calls of one cache that wait to be written."""

    def __init__(self, recorder: Any, one: Any, number: int, identity: Identity | None) -> None:
        self._recorder, self._number, self._groups = recorder, number, len(one.groups)
        self._identity = identity or Identity(1, 0)
        # Of each: kind, rows, tokens given, values returned; or kind, spans, values, copies.
        self._calls: list[int] = []
        self._arrays: Any = BytesIO()  # kept from batch to batch: fresh memory costs more than what is written there
        self._most = HEAD  # numbers of calls that may wait
        self._written = 0
        self._when = 0.0  # some were written last
        self._place = np.zeros(PLACES, np.int64)
        self._values = np.zeros((2 * len(SEATS), 1 << 12), np.int64)
        self._sizes = np.zeros((2 * len(SEATS), MOST_FIELDS), np.int64)
        self._last = np.zeros(len(SEATS), np.int64)
        self._sizes[:] = NEVER

    # What a call leaves here, in whatever form it was done.

    def extended(self, rows: Any, starts: Any, text: Any, slots: Ints) -> None:
        """Take an extend of which there is nothing more to say than its rows, sizes and tokens."""
        if text is None:
            text = NONE
        if not (
            type(rows) is type(starts) is type(text) is ndarray and rows.dtype is starts.dtype is text.dtype is I64
        ):
            rows, starts, text = _as_longs(rows), _as_longs(starts), _as_longs(text)
        calls = self._calls
        self._arrays.writelines((rows, starts, text, slots))
        calls += (EXTEND, len(rows), len(text), slots.size)
        if len(calls) >= self._most:
            self._recorder.flush()

    def committed(self, delta: Delta) -> None:
        """Take a commit."""
        spans, values, copies, calls, arrays = delta.spans, delta.values, delta.copies, self._calls, self._arrays
        n, m = len(values), len(copies)
        arrays.writelines((spans, values, copies, FILL) if (n + m) & 1 else (spans, values, copies))
        calls += (COMMIT, len(spans), n, m)
        if len(calls) >= self._most or arrays.tell() >= MOST_BYTES or perf_counter() - self._when > WAIT:
            self._recorder.flush()

    def looked_up(self, starts: Any, text: Any, cached: Ints) -> None:
        """Take a lookup without salts."""
        text = self._prompts(text)
        self._take((LOOKUP, cached.size, text.size, cached.size), starts, text, cached)

    def admitted(self, rows: Any, starts: Any, text: Any, limit: int, headroom: int, cached: Ints, slots: Ints) -> None:
        """Take an admit without salts and marks; limit -1: none."""
        n, text = cached.size, self._prompts(text)
        self._take((ADMIT, n, text.size, n + slots.size), (limit, headroom), rows, starts, text, cached, slots)

    def not_admitted(self, rows: Any, starts: Any, text: Any, limit: int, headroom: int, refusal: Ints) -> None:
        """Take an admit that was refused for want of blocks."""
        text = self._prompts(text)
        line = ADMIT | REFUSED, len(rows), text.size, refusal.size
        self._take(line, (limit, headroom), rows, starts, text, refusal)

    def freed(self, rows: Any) -> None:
        """Take a free without a fence."""
        self._take((FREE, len(rows), 0, 0), rows)

    def _prompts(self, text: Any) -> Ints:
        """Return what is to be known of prompts: nothing, where none of their units is numbered and all tokens are known."""
        tokens = _as_longs(text)
        return tokens if self._identity.unit or any_unknown(tokens) else NONE

    def _take(self, line: tuple[int, ...], *arrays: Any) -> None:
        self._arrays.writelines(map(_as_longs, arrays))
        self._calls += line
        if len(self._calls) >= self._most or self._arrays.tell() >= MOST_BYTES:
            self._recorder.flush()

    # What is done with it, by one at a time.

    def write(self) -> None:
        """Write the calls that wait."""
        if not self._calls:
            return
        calls = np.empty((len(self._calls) // HEAD, LINE), np.int64)
        calls[:, :HEAD] = np.fromiter(self._calls, np.int64, len(self._calls)).reshape(-1, HEAD)
        self._calls.clear()
        arrays, self._arrays = self._arrays, BytesIO()  # should this end in an error, it holds on to them
        if not self._recorder.closed:
            data = arrays.getbuffer()
            longs, ints = np.frombuffer(data, np.int64, len(data) // 8), np.frombuffer(data, np.int32, len(data) // 4)
            lay_out(calls, longs)
            self._write(calls, longs, ints)
            self._written += len(calls)
            self._most = HEAD * min(MOST, self._written // SHARE + 1)
            del longs, ints, data  # or they could not be written to
        arrays.seek(0)
        self._when = perf_counter()
        self._arrays = arrays

    def _write(self, calls: Ints, longs: Ints, ints: Ints) -> None:
        writer, known, place = self._recorder.writer, self._identity, self._place
        place[:] = 0
        while not write_calls(
            *(writer.window, writer.meta, self._number, self._groups, calls, longs, ints, self._values, self._sizes),
            *(self._last, place, known.rows, known.kept, known.tokens, known.lines, known.table, known.counts),
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


def _as_longs(values: Any) -> Ints:
    return np.ascontiguousarray(values, np.int64)
