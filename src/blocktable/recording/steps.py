"""The usual calls of a cache, compiled: many are written in one go, and the units that they finished numbered.

A call leaves its arrays: of an admit its limit (or -1) and headroom; rows (but of a lookup), starts and tokens (but of a free),
and what it returned: cached tokens of a lookup, cached tokens and slots of an admit, slots of an extend, or how it was refused.
Of a commit they are its spans, values and copies, and what fills up eight bytes. All of all calls lie one behind the other, in
``longs`` as numbers of 64 bits and in ``ints`` as those of 32.
"""

from typing import Any

from blocktable._jit import compiled, helper, i32, i64, nothing, sealed
from blocktable.recording.coding import AT, NOT_GIVEN, SUM, WINDOW, of_ids, of_values, open_call, put_call, seal
from blocktable.recording.identity import (
    DONE,
    FINAL,
    LENGTH,
    NO_SALT,
    NUMBER,
    OWN,
    SALT,
    SEEN,
    UNIT,
    USED,
    Ints,
    count_finished,
    number_finished,
    number_units,
)
from blocktable.sanitize.usual import next_number

# Kinds, see ``format``. Those with fields have a seat each, where the last such call lies beside the next one.
COMMIT, LOOKUP, ADMIT, EXTEND, FREE, REFUSED = 1, 2, 4, 5, 8, 128
SEATS = (LOOKUP, ADMIT, ADMIT | REFUSED, EXTEND, FREE)
FIELDS = (5, 12, 9, 9, 2)
MOST_FIELDS = 12
# calls[k, ...]: kind, rows, tokens given, values returned, limit, headroom, where its rows begin in ``longs``; of a commit kind,
# spans, values, copies, and where they begin in ``ints``
LINE, HEAD = 7, 4
KIND = 0
# place[...]: the call that is next; what it needs room for: values, tokens of a row and of a prompt, units
CALL, NEEDED, LONGEST, PROMPT, UNITS = range(5)
PLACES = 5
# Fields of an extend; of prompts, behind the rows that an admit has; more of an admit.
ROWS, SIZES, UNKNOWN, FINISHED = 0, 1, 2, 6
OF_SIZES, OF_UNITS, OF_UNKNOWN = range(3)
LIMITS, NUMBERS, CACHED, REFUSAL, OPENED = 5, 7, 8, 8, 9

_CALLS, _LONGS, _INTS = i64[:, ::1], sealed(i64[::1]), sealed(i32[::1])
_OUT = (i64[::1], i64)  # the values of fields, and where the next one goes
_ROOM = (i64[:, ::1], i64[::1], i64[::1])  # lines, counts, place


@compiled(nothing(_CALLS, _LONGS))
def lay_out(calls: Ints, longs: Ints) -> None:
    """Note of each call where its arrays begin, and the limit and headroom of an admit."""
    at = i64(0)
    for k in range(calls.shape[0]):
        kind, n, given, returned = calls[k, :HEAD]
        calls[k, 4] = calls[k, 5] = 0
        if kind == COMMIT:
            calls[k, 6] = 2 * at
            at += (6 * n + given + 3 * returned + 1) // 2
            continue
        if kind & ~REFUSED == ADMIT:
            calls[k, 4], calls[k, 5] = longs[at], longs[at + 1]
            at += 2
        calls[k, 6] = at
        at += (n if kind != LOOKUP else 0) + (n + 1 if kind != FREE else 0) + given + returned


@helper(i64(_CALLS, i64))
def ends_run(calls: Ints, k: int) -> Any:
    """Say whether the next call that is no commit is no extend either: until then, rows' units are told together."""
    k += 1
    while k < calls.shape[0] and calls[k, KIND] == COMMIT:
        k += 1
    return i64(k == calls.shape[0] or calls[k, KIND] != EXTEND)


@helper(i64(_LONGS, i64, i64))
def count_unknown(longs: Ints, text: int, given: int) -> Any:
    """Return how many tokens are not known."""
    unknown = i64(0)
    for t in range(text, text + given):
        unknown -= longs[t] >> 63
    return unknown


@compiled(i64(_LONGS))
def any_unknown(text: Ints) -> Any:
    """Say whether some token is not known."""
    return count_unknown(text, 0, text.size)


@helper(nothing(_CALLS, _LONGS, i64, *_ROOM))
def measure(calls: Ints, longs: Ints, told: int, lines: Ints, counts: Ints, place: Ints) -> None:
    """Note what the next call needs room for, at most."""
    kind, n, given, returned, _, _, at = calls[place[CALL]]
    place[NEEDED] = place[LONGEST] = place[PROMPT] = place[UNITS] = 0
    if kind == COMMIT:
        return
    starts, unit = at + (n if kind != LOOKUP else 0), counts[UNIT]
    text = starts + n + 1
    place[NEEDED] = 3 * n + 3 + (returned if kind & REFUSED else 0) + count_unknown(longs, text, given)
    if unit == 0 or kind == FREE:
        return
    longest = i64(0)
    for i in range(n):
        begin = lines[longs[at + i], LENGTH] if kind == EXTEND else i64(0)
        longest = max(longest, begin + longs[starts + i + 1] - longs[starts + i])
    if kind != LOOKUP:
        place[LONGEST] = longest
    more = longs[starts + n]
    if kind != EXTEND:
        place[PROMPT] = longest
        place[UNITS] = 2 * (more // unit)
    elif told:
        for row in range(lines.shape[0]):
            more += lines[row, LENGTH] - lines[row, DONE] if lines[row, USED] else 0
        place[UNITS] = more // unit
    place[NEEDED] += 2 * place[UNITS]


# ---- fields


@helper(i64(_LONGS, i64, i64, *_OUT))
def say(longs: Ints, at: int, n: int, out: Ints, end: int) -> int:
    """Write an argument as it is; return where the next field goes."""
    for j in range(n):
        out[end + j] = longs[at + j]
    return end + n


@helper(i64(_LONGS, i64, i64, *_OUT))
def say_sizes(longs: Ints, starts: int, n: int, out: Ints, end: int) -> int:
    """Write how many tokens each row was given."""
    for i in range(n):
        out[end + i] = longs[starts + i + 1] - longs[starts + i]
    return end + n


@helper(i64(_LONGS, i64, i64, *_OUT))
def say_unknown(longs: Ints, text: int, given: int, out: Ints, end: int) -> int:
    """Write which tokens are not known."""
    if count_unknown(longs, text, given):
        for t in range(given):
            if longs[text + t] < 0:
                out[end] = t
                end += 1
    return end


@helper(i64(_LONGS, i64, i64, i64, i64[:, ::1], *OWN[2:], *_OUT))
def say_units(
    longs: Ints, starts: int, text: int, n: int, kept: Ints, table: Ints, counts: Ints, out: Ints, end: int
) -> int:
    """Write the units of prompts without a salt, counted back from those seen before."""
    seen, begin = counts[SEEN], end
    for i in range(n):
        prompt = longs[text + longs[starts + i] : text + longs[starts + i + 1]]
        end += number_units(NO_SALT, prompt, kept, table, counts, out, end)
    for j in range(begin, end):
        out[j] -= seen
    return end


@helper(nothing(sealed(i64[::1]), *OWN, i64[::1], i64, *_OUT))
def say_finished(
    rows: Ints, tokens: Ints, lines: Ints, table: Ints, counts: Ints, sizes: Ints, field: int, out: Ints, end: int
) -> None:
    """Write the units that have become final, as two fields, where there are any."""
    units = count_finished(rows, lines, counts)
    if units:
        number_finished(rows, tokens, lines, table, counts, out, end, end + units)
        sizes[field] = sizes[field + 1] = units


# ---- rows


@helper(nothing(i64, i64[:, ::1], i64[:, ::1]))
def settle(row: int, tokens: Ints, lines: Ints) -> None:
    """Raise the final mark of a row to its first unknown token, as the cache does where no mark is given."""
    mark = lines[row, FINAL]
    while mark < lines[row, LENGTH] and tokens[row, mark] >= 0:
        mark += 1
    lines[row, FINAL] = mark


@helper(nothing(_LONGS, i64, i64, i64, i64, *OWN[:2]))
def open_rows(longs: Ints, at: int, n: int, answer: int, limit: int, tokens: Ints, lines: Ints) -> None:
    """Begin rows on what was found cached of their prompts, and lengthen them by what is computed behind it."""
    starts, text = at + n, at + 2 * n + 1
    for i in range(n):
        row, hit, number = longs[at + i], longs[answer + i], i64(NO_SALT)
        begin, length = text + longs[starts + i], longs[starts + i + 1] - longs[starts + i]
        if limit >= 0:
            length = min(length, hit + limit)
        for t in range(length):
            tokens[row, t] = longs[begin + t]
        for t in range(hit):
            number = next_number(number, longs[begin + t])
        lines[row, USED], lines[row, LENGTH] = 1, length
        lines[row, NUMBER], lines[row, SALT] = number, NO_SALT
        lines[row, DONE] = lines[row, FINAL] = hit
        settle(row, tokens, lines)


@helper(nothing(_LONGS, i64, i64, i64, *OWN[:2]))
def lengthen_rows(longs: Ints, at: int, n: int, given: int, tokens: Ints, lines: Ints) -> None:
    """Put the tokens of an extend behind those that its rows have; open those that are not in use."""
    starts, text = at + n, at + 2 * n + 1
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


# ---- calls: each fills the fields, takes what it returned into the checksum, and follows its rows


@helper(i64(i64, i64, _LONGS, i64, i64))
def of_slots(total: int, groups: int, longs: Ints, at: int, n: int) -> int:
    """Take slots into a checksum, each group's by themselves."""
    size = n // groups
    for g in range(groups):
        total = of_values(total, longs[at + g * size : at + (g + 1) * size])
    return total


@helper(nothing(i64[::1], i64, sealed(i64[::1]), _LONGS, i64[:, ::1], *OWN, i64[::1], i64[::1]))
def tell_prompts(
    meta: Ints,
    groups: int,
    call: Ints,
    longs: Ints,
    kept: Ints,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
    out: Ints,
    sizes: Ints,
) -> None:
    """Tell a lookup, an admit, or an admit that was refused."""
    kind, n, given, returned, limit, headroom, at = call
    starts, first, end = at, i64(0), i64(0)
    if kind != LOOKUP:
        sizes[ROWS], end = n, say(longs, at, n, out, end)
        starts, first = at + n, i64(1)
    text = starts + n + 1
    answer = text + given
    sizes[first + OF_SIZES], end = n, say_sizes(longs, starts, n, out, end)
    if counts[UNIT]:
        before, end = end, say_units(longs, starts, text, n, kept, table, counts, out, end)
        sizes[first + OF_UNITS] = end - before
    before, end = end, say_unknown(longs, text, given, out, end)
    if end > before:
        sizes[first + OF_UNKNOWN] = end - before
    if kind != LOOKUP:
        if limit >= 0:
            sizes[LIMITS], out[end] = 1, limit
            end += 1
        sizes[NUMBERS], out[end], out[end + 1] = 2, headroom, 1
        end += 2
    if kind & REFUSED:
        sizes[REFUSAL] = returned
        say(longs, answer, returned, out, end)
        meta[SUM] = of_values(meta[SUM], longs[answer : answer + returned])
        return
    meta[SUM] = of_values(meta[SUM], longs[answer : answer + n])
    if kind == LOOKUP:
        return
    meta[SUM] = of_slots(meta[SUM], groups, longs, answer + n, returned - n)
    sizes[CACHED], end = n, say(longs, answer, n, out, end)
    if counts[UNIT]:
        open_rows(longs, at, n, answer, limit, tokens, lines)
        say_finished(longs[at : at + n], tokens, lines, table, counts, sizes, OPENED, out, end)


@helper(nothing(i64[::1], i64, sealed(i64[::1]), _LONGS, i64[::1], i64, *OWN, i64[::1], i64[::1]))
def tell_extend(
    meta: Ints,
    groups: int,
    call: Ints,
    longs: Ints,
    rows: Ints,
    told: int,
    tokens: Ints,
    lines: Ints,
    table: Ints,
    counts: Ints,
    out: Ints,
    sizes: Ints,
) -> None:
    """Tell an extend of which there is nothing more to say than its rows, sizes and tokens."""
    _, n, given, returned, _, _, at = call
    starts, text = at + n, at + 2 * n + 1
    sizes[ROWS] = sizes[SIZES] = n
    end = say_sizes(longs, starts, n, out, say(longs, at, n, out, 0))
    before = end
    if given == 0 and longs[starts + n] > 0:
        out[end] = -1
        end += 1
    end = say_unknown(longs, text, given, out, end)
    if end > before:
        sizes[UNKNOWN] = end - before
    meta[SUM] = of_slots(meta[SUM], groups, longs, text + given, returned)
    if counts[UNIT]:
        lengthen_rows(longs, at, n, given, tokens, lines)
    if told:
        say_finished(rows, tokens, lines, table, counts, sizes, FINISHED, out, end)


@helper(nothing(sealed(i64[::1]), _LONGS, i64[:, ::1], i64[::1], i64[::1], i64[::1]))
def tell_free(call: Ints, longs: Ints, lines: Ints, counts: Ints, out: Ints, sizes: Ints) -> None:
    """Tell a free."""
    _, n, _, _, _, _, at = call
    sizes[ROWS] = say(longs, at, n, out, 0)
    for i in range(n if counts[UNIT] else 0):
        row = longs[at + i]
        lines[row, USED] = lines[row, LENGTH] = lines[row, FINAL] = 0


@helper(nothing(*WINDOW, i64, sealed(i64[::1]), _INTS))
def write_commit(window: Ints, meta: Ints, number: int, call: Ints, ints: Ints) -> None:
    """Write a commit: its delta is taken into the checksum, and is not kept."""
    _, spans, values, copies, _, _, at = call
    total = meta[SUM]
    for i in range(spans):
        total = of_ids(total, ints[at + 6 * i : at + 6 * i + 6])
    at += 6 * spans
    total = of_ids(total, ints[at : at + values])
    at += values
    for i in range(copies):
        total = of_ids(total, ints[at + 3 * i : at + 3 * i + 3])
    meta[SUM] = total
    begin = meta[AT]
    seal(window, meta, begin, open_call(window, meta, COMMIT, number))


@compiled(
    i64(*WINDOW, i64, i64, _CALLS, _LONGS, _INTS, *[i64[:, ::1]] * 2, *[i64[::1]] * 3, i64[:, ::1], *OWN),
)
def write_calls(
    window: Ints,
    meta: Ints,
    number: int,
    groups: int,
    calls: Ints,
    longs: Ints,
    ints: Ints,
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
    """Write calls from place[CALL] on; return 0 before one that there is no room for, to be called again.

    The last call of a seat's kind is values[2 * seat + last[seat]], with its sizes. Units that rows finish by extends one
    after the other are told with the last of these, of all ``rows``; with UNIT 0 nothing is numbered.
    """
    while place[CALL] < calls.shape[0]:
        call = calls[place[CALL]]
        kind = call[KIND]
        told = i64(0)
        if kind == EXTEND and counts[UNIT]:
            told = ends_run(calls, place[CALL])
        measure(calls, longs, told, lines, counts, place)
        if place[NEEDED] > values.shape[1] or meta[AT] + 64 + 21 * place[NEEDED] + 12 * MOST_FIELDS > window.size:
            return 0
        if place[LONGEST] > tokens.shape[1] or place[PROMPT] > kept.shape[1]:
            return 0
        if 2 * (counts[SEEN] + place[UNITS]) > table.shape[0]:
            return 0
        place[CALL] += 1
        if kind == COMMIT:
            write_commit(window, meta, number, call, ints)
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
            tell_extend(meta, groups, call, longs, rows, told, tokens, lines, table, counts, out, size)
        elif kind == FREE:
            tell_free(call, longs, lines, counts, out, size)
        else:
            tell_prompts(meta, groups, call, longs, kept, tokens, lines, table, counts, out, size)
        put_call(window, meta, kind, number, out, size[: FIELDS[seat]], values[before], sizes[before, : FIELDS[seat]])
        last[seat] = 1 - last[seat]
    return 1
