"""The usual calls of a cache, compiled: many are written in one go, and the units that they finished numbered."""

from typing import Any

from blocktable._checksums import behind
from blocktable._jit import compiled, helper, i64, nothing, sealed
from blocktable._journal import (
    ADMIT,
    CHECK,
    COMMIT,
    END,
    EXTEND,
    FREE,
    HEADROOM,
    KIND,
    LIMIT,
    LONGS,
    LOOKUP,
    N_CACHED,
    N_ROWS,
    N_STARTS,
    N_TOKENS,
    NEXT,
    REFUSED,
    RETURNED,
    TOKENS,
    UNKNOWN,
    parts,
    put_down,
)
from blocktable.recording.coding import AT, NOT_GIVEN, SUM, WINDOW, open_call, put_call, room, seal
from blocktable.recording.identity import (
    DONE,
    FINAL,
    LENGTH,
    NO_SALT,
    NUMBER,
    OWN,
    PLACE,
    PREFIX,
    SALT,
    SEEN,
    UNIT,
    USED,
    Ints,
    count_finished,
    number_finished,
    number_units,
)

# Kinds with fields have a seat each, where the last such call lies beside the next one.
SEATS = (LOOKUP, ADMIT, ADMIT | REFUSED, EXTEND, FREE)
FIELDS = (5, 12, 9, 9, 2)
MOST_FIELDS = 12
# place[...]: where the next call is; what it needs room for: values, tokens of a row and of a prompt, units
CALL, NEEDED, LONGEST, PROMPT, UNITS = range(5)
PLACES = 5
# Fields of an extend; of prompts, behind the rows that an admit has; more of an admit.
ROWS, SIZES, NOT_KNOWN, FINISHED = 0, 1, 2, 6
OF_SIZES, OF_UNITS, OF_UNKNOWN = range(3)
LIMITS, NUMBERS, CACHED, REFUSAL, OPENED = 5, 7, 8, 8, 9

_OUT = (i64[::1], i64)  # the values of fields, and where the next one goes
_ROOM = (i64[:, ::1], i64[::1], i64[::1])  # lines, counts, place


@helper(i64(LONGS, i64))
def ends_run(journal: Ints, at: int) -> Any:
    """Say whether the next call that is no commit is no extend either: until then, rows' units are told together."""
    at = journal[at + NEXT]
    while at < journal[END] and journal[at + KIND] == COMMIT:
        at = journal[at + NEXT]
    return i64(at == journal[END] or journal[at + KIND] != EXTEND)


@helper(nothing(LONGS, i64, i64, *_ROOM))
def measure(journal: Ints, at: int, told: int, lines: Ints, counts: Ints, place: Ints) -> None:
    """Note what a call needs room for, at most."""
    rows, starts, _, _ = parts(journal, at)
    kind, n, unit = journal[at + KIND], journal[at + N_ROWS], counts[UNIT]
    if kind == LOOKUP:
        n = journal[at + N_STARTS] - 1
    place[NEEDED] = place[LONGEST] = place[PROMPT] = place[UNITS] = 0
    if kind == COMMIT:
        return
    refusal = journal[at + N_CACHED] if kind & REFUSED else i64(0)
    place[NEEDED] = 3 * n + 3 + refusal + journal[at + UNKNOWN]
    if unit == 0 or kind == FREE:
        return
    longest = i64(0)
    for i in range(n):
        begin = lines[journal[rows + i], LENGTH] if kind == EXTEND else i64(0)
        longest = max(longest, begin + journal[starts + i + 1] - journal[starts + i])
    if kind != LOOKUP:
        place[LONGEST] = longest
    more = journal[starts + n]
    if kind != EXTEND:
        place[PROMPT] = longest
        place[UNITS] = 2 * (more // unit)
    elif told:
        for row in range(lines.shape[0]):
            more += lines[row, LENGTH] - lines[row, DONE] if lines[row, USED] else 0
        place[UNITS] = more // unit
    place[NEEDED] += 2 * place[UNITS]


# ---- rows


@helper(nothing(i64, i64[:, ::1], i64[:, ::1]))
def settle(row: int, tokens: Ints, lines: Ints) -> None:
    """Raise the final mark of a row to its first unknown token, as the cache does where no mark is given."""
    mark = lines[row, FINAL]
    while mark < lines[row, LENGTH] and tokens[row, mark] >= 0:
        mark += 1
    lines[row, FINAL] = mark


@helper(nothing(i64, LONGS, i64, i64, i64[:, ::1], *OWN[:2], i64[::1]))
def open_row(
    row: int, prompt: Ints, hit: int, unknown: int, kept: Ints, tokens: Ints, lines: Ints, counts: Ints
) -> None:
    """Begin a row on what was found cached of the prompt whose units were numbered last, or on the first part of it."""
    put_down(tokens[row], 0, prompt)
    lines[row, USED], lines[row, LENGTH], lines[row, SALT] = 1, prompt.size, NO_SALT
    lines[row, FINAL] = hit if unknown else prompt.size
    settle(row, tokens, lines)
    units = lines[row, FINAL] // counts[UNIT]
    lines[row, DONE], lines[row, NUMBER] = units * counts[UNIT], NO_SALT
    if units:
        lines[row, NUMBER] = kept[PREFIX, units - 1]


@helper(nothing(LONGS, i64, i64, i64, i64, *OWN[:2]))
def lengthen_rows(longs: Ints, at: int, n: int, text: int, given: int, tokens: Ints, lines: Ints) -> None:
    """Put the tokens of an extend behind those that its rows have; open those that are not in use."""
    starts = at + n
    for i in range(n):
        row = longs[at + i]
        if lines[row, USED] == 0:
            lines[row, USED], lines[row, DONE] = 1, 0
            lines[row, NUMBER] = lines[row, SALT] = NO_SALT
        length = lines[row, LENGTH]
        for t in range(longs[starts + i], longs[starts + i + 1]):
            tokens[row, length] = longs[text + t] if given else -1
            length += 1
        lines[row, LENGTH] = length
        settle(row, tokens, lines)


# ---- fields


@helper(i64(LONGS, i64, i64, *_OUT))
def say(longs: Ints, at: int, n: int, out: Ints, end: int) -> int:
    """Write an argument as it is; return where the next field goes."""
    for j in range(n):
        out[end + j] = longs[at + j]
    return end + n


@helper(i64(LONGS, i64, i64, *_OUT))
def say_sizes(longs: Ints, starts: int, n: int, out: Ints, end: int) -> int:
    """Write how many tokens each row was given."""
    for i in range(n):
        out[end + i] = longs[starts + i + 1] - longs[starts + i]
    return end + n


@helper(i64(LONGS, i64, *_OUT))
def say_unknown(journal: Ints, at: int, out: Ints, end: int) -> int:
    """Write which tokens of a call are not known."""
    text = journal[at + TOKENS]
    for t in range(journal[at + N_TOKENS] if journal[at + UNKNOWN] else 0):
        if journal[text + t] < 0:
            out[end] = t
            end += 1
    return end


@helper(i64(LONGS, i64, i64, i64[:, ::1], *OWN, *_OUT))
def say_units(
    journal: Ints,
    at: int,
    opens: int,
    kept: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
    out: Ints,
    end: int,
) -> int:
    """Write the units of prompts without a salt, counted back from those seen before; of an admit, open the rows."""
    rows, starts, text, cached = parts(journal, at)
    seen, first = counts[SEEN], end
    for i in range(journal[at + N_STARTS] - 1):
        begin = text + journal[starts + i]
        prompt = journal[begin : text + journal[starts + i + 1]]
        end += number_units(NO_SALT, prompt, i64(begin == counts[PLACE]), kept, table, counts, out, end)
        counts[PLACE] = begin
        if opens:
            hit, limit = journal[cached + i], journal[at + LIMIT]
            length = hit + limit if 0 <= limit < prompt.size - hit else prompt.size
            open_row(journal[rows + i], prompt[:length], hit, journal[at + UNKNOWN], kept, tokens, lines, counts)
    for j in range(first, end):
        out[j] -= seen
    return end


@helper(nothing(LONGS, i64, i64, i64, *_ROOM[:2], i64[::1], *_OUT))
def say_opened(
    journal: Ints, at: int, units: int, seen: int, lines: Ints, counts: Ints, sizes: Ints, out: Ints, end: int
) -> None:
    """Write which of the prompts' units, which were written from ``units`` on, rows begin with beyond what was cached."""
    rows, starts, _, cached = parts(journal, at)
    unit, total, k = counts[UNIT], i64(0), i64(0)
    n = journal[at + N_ROWS]
    for i in range(n):
        total += (lines[journal[rows + i], DONE] - journal[cached + i]) // unit
    for i in range(n):
        row, hit = journal[rows + i], journal[cached + i]
        for j in range(hit // unit, lines[row, DONE] // unit):
            out[end + k], out[end + total + k] = row, out[units + j] + seen - counts[SEEN]
            k += 1
        units += (journal[starts + i + 1] - journal[starts + i]) // unit
    if total:
        sizes[OPENED] = sizes[OPENED + 1] = total


@helper(nothing(sealed(i64[::1]), *OWN, i64[::1], i64, *_OUT))
def say_finished(
    rows: Ints, tokens: Ints, lines: Ints, table: Ints, counts: Ints, sizes: Ints, field: int, out: Ints, end: int
) -> None:
    """Write the units that have become final, as two fields, where there are any."""
    units = count_finished(rows, lines, counts)
    if units:
        number_finished(rows, tokens, lines, table, counts, out, end, end + units)
        sizes[field] = sizes[field + 1] = units


# ---- calls: each fills the fields, and follows its rows


@helper(nothing(LONGS, i64, i64[:, ::1], *OWN, i64[::1], i64[::1]))
def tell_prompts(
    journal: Ints,
    at: int,
    kept: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
    out: Ints,
    sizes: Ints,
) -> None:
    """Tell a lookup, an admit, or an admit that was refused."""
    rows, starts, _, cached = parts(journal, at)
    kind, limit = journal[at + KIND], journal[at + LIMIT]
    n, found = journal[at + N_STARTS] - 1, journal[at + N_CACHED]
    first = end = i64(0)
    if kind != LOOKUP:
        sizes[ROWS], end = n, say(journal, rows, n, out, end)
        first = i64(1)
    sizes[first + OF_SIZES], end = n, say_sizes(journal, starts, n, out, end)
    units, seen = end, counts[SEEN]
    if counts[UNIT]:
        end = say_units(journal, at, i64(kind == ADMIT), kept, tokens, lines, table, counts, out, end)
        sizes[first + OF_UNITS] = end - units
    before, end = end, say_unknown(journal, at, out, end)
    if end > before:
        sizes[first + OF_UNKNOWN] = end - before
    if kind == LOOKUP:
        return
    if limit >= 0:
        sizes[LIMITS], out[end] = 1, limit
        end += 1
    sizes[NUMBERS], out[end], out[end + 1] = 2, journal[at + HEADROOM], 1
    end += 2
    sizes[REFUSAL if kind & REFUSED else CACHED], end = found, say(journal, cached, found, out, end)
    if kind == ADMIT and counts[UNIT]:
        say_opened(journal, at, units, seen, lines, counts, sizes, out, end)


@helper(nothing(LONGS, i64, LONGS, i64, *OWN, i64[::1], i64[::1]))
def tell_extend(
    journal: Ints,
    at: int,
    every: Ints,
    told: int,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
    out: Ints,
    sizes: Ints,
) -> None:
    """Tell an extend of which there is nothing more to say than its rows, sizes and tokens."""
    rows, starts, text, _ = parts(journal, at)
    n, given = journal[at + N_ROWS], journal[at + N_TOKENS]
    sizes[ROWS] = sizes[SIZES] = n
    end = say_sizes(journal, starts, n, out, say(journal, rows, n, out, 0))
    before = end
    if given == 0 and journal[starts + n] > 0:
        out[end] = -1
        end += 1
    end = say_unknown(journal, at, out, end)
    if end > before:
        sizes[NOT_KNOWN] = end - before
    if counts[UNIT]:
        lengthen_rows(journal, rows, n, text, given, tokens, lines)
    if told:
        say_finished(every, tokens, lines, table, counts, sizes, FINISHED, out, end)


@helper(nothing(LONGS, i64, i64[:, ::1], i64[::1], i64[::1], i64[::1]))
def tell_free(journal: Ints, at: int, lines: Ints, counts: Ints, out: Ints, sizes: Ints) -> None:
    """Tell a free."""
    rows, n = parts(journal, at)[0], journal[at + N_ROWS]
    sizes[ROWS] = say(journal, rows, n, out, 0)
    for i in range(n if counts[UNIT] else 0):
        row = journal[rows + i]
        lines[row, USED] = lines[row, LENGTH] = lines[row, FINAL] = 0


@compiled(
    i64(*WINDOW, i64, i64[::1], *[i64[:, ::1]] * 2, *[i64[::1]] * 3, i64[:, ::1], *OWN),
)
def write_calls(
    window: Ints,
    meta: Ints,
    number: int,
    journal: Ints,
    values: Ints,
    sizes: Ints,
    last: Ints,
    place: Ints,
    rows: Ints,
    kept: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
) -> int:
    """Write what waits from ``place`` on; return 0 before a call that there is no room for, to be called again.

    The last call of a seat's kind is values[2 * seat + last[seat]], with its sizes. Units that rows finish by extends one
    after the other are told with the last of these, of all ``rows``; with UNIT 0 nothing is numbered.
    """
    while place[CALL] < journal[END]:
        at = place[CALL]
        kind, told = journal[at + KIND], i64(0)
        if kind == EXTEND and counts[UNIT]:
            told = ends_run(journal, at)
        measure(journal, at, told, lines, counts, place)
        if place[NEEDED] > values.shape[1] or meta[AT] + room(place[NEEDED], MOST_FIELDS) > window.size:
            return 0
        if place[LONGEST] > tokens.shape[1] or place[PROMPT] > kept.shape[1]:
            return 0
        if 2 * (counts[SEEN] + place[UNITS]) > table.shape[0]:
            return 0
        place[CALL] = journal[at + NEXT]
        meta[SUM] = behind(meta[SUM], journal[at + CHECK], journal[at + RETURNED])
        if kind == COMMIT:
            begin = meta[AT]
            seal(window, meta, begin, open_call(window, meta, kind, number))
            continue
        seat = i64(0)
        while SEATS[seat] != kind:
            seat += 1
        before = 2 * seat + last[seat]
        now = 2 * seat + 1 - last[seat]
        out, size = values[now], sizes[now]
        for field in range(MOST_FIELDS):
            size[field] = NOT_GIVEN
        if kind == EXTEND:
            tell_extend(journal, at, rows, told, tokens, lines, table, counts, out, size)
        elif kind == FREE:
            tell_free(journal, at, lines, counts, out, size)
        else:
            tell_prompts(journal, at, kept, tokens, lines, table, counts, out, size)
        put_call(window, meta, kind, number, out, size[: FIELDS[seat]], values[before], sizes[before, : FIELDS[seat]])
        last[seat] = 1 - last[seat]
    return 1
