"""The usual steps, compiled: many calls of extend and commit are written in one go, and the units that they finished numbered.

A call is a line of four numbers. Of an extend: its kind, rows, tokens given, groups; its arrays are rows, starts, tokens and
the slots it returned, one after the other in ``longs``. Of a commit: its kind, spans, values, copies, in ``ints``.
"""

from typing import Any

from blocktable._jit import compiled, helper, i32, i64, nothing, sealed
from blocktable.recording.coding import AT, NOT_GIVEN, SUM, WINDOW, of_ids, of_values, open_call, put_call, seal
from blocktable.recording.identity import (
    DONE,
    LENGTH,
    NUMBER,
    OWN,
    SALT,
    SEEN,
    UNIT,
    USED,
    Ints,
    count_finished,
    number_finished,
)

COMMIT, EXTEND = 1, 5  # kinds, see ``format``
# The fields of extend.
ROWS, SIZES, UNKNOWN, FINAL, SALTS, NUMBERS, UNIT_ROWS, UNITS, KEPT = range(9)
FIELDS = 9
NO_SALT = 2  # the number that a prompt without a salt begins with
# place[...]: the call, and the numbers of ``longs`` and ``ints``, that are next; the values which that call needs room for;
# which of the two buffers holds the extend before it; the last extend of all, where the units are told that they finished
CALL, LONG, INT, NEEDED, LAST, FINAL_EXTEND = range(6)
PLACES = 6
_MARKS = sealed(i64[:])
_CALLS, _LONGS, _INTS = i64[:, ::1], sealed(i64[::1]), sealed(i32[::1])


@compiled(i64(_CALLS, _LONGS, _MARKS, i64[:, ::1]))
def begin_rows(calls: Ints, longs: Ints, lengths: Ints, lines: Ints) -> Any:
    """Set rows' lengths to what they were before all these calls, and open unused ones; return the longest afterwards."""
    longest = i64(0)
    for way in range(2):
        at = i64(0)
        for k in range(calls.shape[0]):
            if calls[k, 0] != EXTEND:
                continue
            n, starts = calls[k, 1], at + calls[k, 1]
            for i in range(n):
                row = longs[at + i]
                if way == 0:
                    lines[row, LENGTH] = lengths[row]
                    longest = max(longest, lengths[row])
                else:
                    lines[row, LENGTH] -= longs[starts + i + 1] - longs[starts + i]
                if lines[row, USED] == 0:
                    lines[row, DONE], lines[row, NUMBER] = 0, NO_SALT
                    lines[row, SALT], lines[row, USED] = NO_SALT, 1
            at = starts + n + 1 + calls[k, 2] + calls[k, 3] * longs[starts + n]
    return longest


@helper(i64(_LONGS, i64, i64, i64, i64[::1], i64[::1]))
def say_extend(longs: Ints, at: int, n: int, given: int, values: Ints, sizes: Ints) -> int:
    """Write the fields of an extend, but for its units; return where these go."""
    for field in range(FIELDS):
        sizes[field] = NOT_GIVEN
    sizes[ROWS] = sizes[SIZES] = n
    starts, text = at + n, at + 2 * n + 1
    for i in range(n):
        values[i] = longs[at + i]
        values[n + i] = longs[starts + i + 1] - longs[starts + i]
    end = begin = 2 * n
    if given == 0 and longs[starts + n] > 0:
        values[end] = -1
        end += 1
    for t in range(given):
        if longs[text + t] < 0:
            values[end] = t
            end += 1
    if end > begin:
        sizes[UNKNOWN] = end - begin
    return end


@helper(nothing(_LONGS, i64, i64, i64, i64[:, ::1], i64[:, ::1]))
def keep_extend(longs: Ints, at: int, n: int, given: int, tokens: Ints, lines: Ints) -> None:
    """Keep the tokens of an extend behind those that its rows have."""
    starts, text = at + n, at + 2 * n + 1
    for i in range(n):
        row = longs[at + i]
        for t in range(longs[starts + i], longs[starts + i + 1]):
            tokens[row, lines[row, LENGTH]] = longs[text + t] if given else -1
            lines[row, LENGTH] += 1


@compiled(
    i64(*WINDOW, i64, _CALLS, _LONGS, _INTS, i64[:, ::1], i64[:, ::1], i64[::1], i64[::1], _MARKS, *OWN),
)
def write_steps(
    window: Ints,
    meta: Ints,
    number: int,
    calls: Ints,
    longs: Ints,
    ints: Ints,
    values: Ints,
    sizes: Ints,
    place: Ints,
    rows: Ints,
    final: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
) -> int:
    """Write calls from place[CALL] on; return 0 before one that there is no room for, to be called again.

    All units that these calls finished (``rows``: every row) are told with the last extend. Without units (UNIT 0) nothing
    is numbered.
    """
    while place[CALL] < calls.shape[0]:
        kind, n, given, groups = calls[place[CALL]]
        begin = meta[AT]
        if kind == COMMIT:
            if begin + 64 > window.size:
                place[NEEDED] = 0
                return 0
            at, total = place[INT], meta[SUM]
            for i in range(n):
                total = of_ids(total, ints[at + 6 * i : at + 6 * i + 6])
            at += 6 * n
            total = of_ids(total, ints[at : at + given])
            at += given
            for i in range(groups):
                total = of_ids(total, ints[at + 3 * i : at + 3 * i + 3])
            meta[SUM], place[INT] = total, at + 3 * groups
            seal(window, meta, begin, open_call(window, meta, kind, number))
            place[CALL] += 1
            continue
        at, units = place[LONG], i64(0)
        if place[CALL] == place[FINAL_EXTEND] and counts[UNIT]:
            units = count_finished(rows, rows.size, final, lines, counts)
        place[NEEDED] = 2 * n + given + 1 + 2 * units
        if place[NEEDED] > values.shape[1] or begin + 64 + 21 * place[NEEDED] + 12 * FIELDS > window.size:
            return 0
        if counts[UNIT] and 2 * (counts[SEEN] + units) > table.shape[0]:
            return 0
        slots, size = at + 2 * n + 1 + given, longs[at + 2 * n]
        for g in range(groups):
            meta[SUM] = of_values(meta[SUM], longs[slots + g * size : slots + (g + 1) * size])
        now = 1 - place[LAST]
        end = say_extend(longs, at, n, given, values[now], sizes[now])
        if counts[UNIT]:
            keep_extend(longs, at, n, given, tokens, lines)
        if units:
            number_finished(rows, rows.size, final, tokens, lines, table, counts, values[now], end, end + units)
            sizes[now, UNIT_ROWS] = sizes[now, UNITS] = units
        put_call(window, meta, kind, number, values[now], sizes[now], values[1 - now], sizes[1 - now])
        place[LAST], place[LONG] = now, slots + groups * size
        place[CALL] += 1
    return 1
