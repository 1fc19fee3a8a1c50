"""The usual step, compiled: rows are lengthened, the call is written, and the units that it finished are numbered, in one go."""

from typing import Any

from blocktable._jit import compiled, i64, sealed
from blocktable.recording.coding import AT, NOT_GIVEN, SUM, WINDOW, of_values, put_call
from blocktable.recording.identity import (
    DONE,
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

# The fields of extend.
ROWS, SIZES, UNKNOWN, FINAL, SALTS, NUMBERS, UNIT_ROWS, UNITS, KEPT = range(9)
FIELDS = 9
NO_SALT = 2  # the number that a prompt without a salt begins with
_MARKS = sealed(i64[:])


@compiled(
    i64(
        *WINDOW,
        *(i64, i64),
        *(i64[::1], i64[::1], sealed(i64[::1]), sealed(i64[::1])),
        *(_MARKS, _MARKS),
        *(i64[::1], i64[::1], sealed(i64[::1]), sealed(i64[:, :])),
        *OWN,
    )
)
def write_extend(
    window: Ints,
    meta: Ints,
    kind: int,
    number: int,
    values: Ints,
    sizes: Ints,
    before: Ints,
    before_sizes: Ints,
    lengths: Ints,
    final: Ints,
    rows: Ints,
    starts: Ints,
    text: Ints,
    slots: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
) -> Any:
    """Write an extend of all its rows; return 0, or the values there must be room for, having changed nothing.

    ``lengths`` and ``final`` are those after the call; empty ``text``: no token is known. Without units (UNIT 0) nothing
    is numbered.
    """
    n, unit, units = rows.size, counts[UNIT], i64(0)
    longest = i64(0)
    if unit:
        for i in range(n):
            row = rows[i]
            longest = max(longest, lengths[row])
            if lines[row, USED] == 0:
                lines[row, DONE], lines[row, NUMBER] = 0, NO_SALT
                lines[row, SALT], lines[row, USED] = NO_SALT, 1
        units = count_finished(rows, n, final, lines, counts)
    most = 2 * n + starts[n] + 1 + 2 * units
    if most > values.size or meta[AT] + 64 + 21 * most + 12 * FIELDS > window.size:
        return most
    if unit and (longest > tokens.shape[1] or 2 * (counts[SEEN] + units) > table.shape[0]):
        return most
    for g in range(slots.shape[0]):
        meta[SUM] = of_values(meta[SUM], slots[g])
    for i in range(n):
        values[i] = rows[i]
        values[n + i] = starts[i + 1] - starts[i]
    at = 2 * n
    for field in range(FIELDS):
        sizes[field] = NOT_GIVEN
    sizes[ROWS] = sizes[SIZES] = n
    if text.size == 0 and starts[n] > 0:
        values[at] = -1
        at += 1
        sizes[UNKNOWN] = 1
    else:
        begin = at
        for t in range(text.size):
            if text[t] < 0:
                values[at] = t
                at += 1
        if at > begin:
            sizes[UNKNOWN] = at - begin
    if unit:
        for i in range(n):
            row, first = rows[i], lengths[rows[i]] - (starts[i + 1] - starts[i])
            for t in range(starts[i + 1] - starts[i]):
                tokens[row, first + t] = text[starts[i] + t] if text.size else -1
    if units:
        number_finished(rows, n, final, tokens, lines, table, counts, values, at, at + units)
        sizes[UNIT_ROWS] = sizes[UNITS] = units
    put_call(window, meta, kind, number, values, sizes, before, before_sizes)
    return 0
