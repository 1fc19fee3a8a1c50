"""The compiled loops of a replica: look at all of a delta, then write it into tables like the host's.

The looking comes first and covers everything, so that bytes from another process can neither write outside a row nor
leave a state that the host could not have had: a refused delta changes nothing.
"""

# ruff: noqa: PLR1714, SIM109 - plain comparisons compile several times faster

from blocktable._jit import compiled, helper, i32, i64, nothing, sealed
from blocktable._kernels import (
    BAD_ID,
    BAD_SPAN,
    BASE,
    CHUNKED,
    COUNT,
    FULL,
    GONE,
    I32,
    I64,
    IDS,
    KIND,
    LISTED,
    OK,
    RING,
    ROWS,
    SENT,
    STATE_FIELDS,
    STATE_TYPES,
    WIDTH,
    WINDOW,
    fill_null,
    refuse,
)
from blocktable._runs import copy_range

# What only a delta can be refused for: ids past the live count, live entries that nobody sent, a row in two places.
BAD_TAIL, BAD_GAP, BAD_ROW = 21, 22, 23
# The columns of a span
GROUP, ROW, START, SPAN_COUNT, OFFSET, LIVE = range(6)

DELTA_TYPES = (sealed(i32[:, ::1]), sealed(i32[::1]))


@helper(i64(i64[:, ::1], DELTA_TYPES[0], DELTA_TYPES[1], i64))
def check_span(info: I64, spans: I32, values: I32, i: int) -> int:
    """Refuse a span outside its row, an id outside the pool, an id in the tail, or a null where none may be."""
    group, row, live = spans[i, GROUP], spans[i, ROW], i64(spans[i, LIVE])
    start, count, offset = i64(spans[i, START]), i64(spans[i, SPAN_COUNT]), i64(spans[i, OFFSET])
    if group < 0 or group >= info.shape[0] - 1 or row < 0 or row >= info[info.shape[0] - 1, ROWS]:
        return refuse(info, BAD_SPAN, group, i, row, row, info[info.shape[0] - 1, ROWS], start)
    width, limit = info[group, WIDTH], info[group, IDS]
    if start < 0 or count < 0 or start + count > width or live < 0 or live > width:
        return refuse(info, BAD_SPAN, group, i, row, start + count, width, start)
    if offset < -1 or (offset >= 0 and offset + count > values.size):
        return refuse(info, BAD_SPAN, group, i, row, offset + count, values.size, start)
    whole = info[group, KIND] == FULL or info[group, KIND] == RING  # every live entry is a block
    if offset < 0:
        if whole and count > 0 and start < live:
            return refuse(info, BAD_GAP, group, i, row, 0, live, start)
        return OK
    for j in range(count):
        value = values[offset + j]
        if value < 0 or value >= limit:
            return refuse(info, BAD_ID, group, i, row, value, limit, start + j)
        if start + j >= live:
            if value != 0:
                return refuse(info, BAD_TAIL, group, i, row, value, live, start + j)
        elif value == 0 and whole:
            return refuse(info, BAD_GAP, group, i, row, 0, live, start + j)
    return OK


@helper(i64(*STATE_TYPES, DELTA_TYPES[0], i64, i64))
def check_row(info: I64, state: I32, entries: I32, spans: I32, first: int, last: int) -> int:
    """Refuse spans first .. last - 1, all of one row, that leave out entries between the old live count and the new."""
    group, row, live = spans[first, GROUP], spans[first, ROW], i64(spans[first, LIVE])
    before = i64(state[(group * info[info.shape[0] - 1, ROWS] + row) * STATE_FIELDS + COUNT])
    start = info[group, BASE] + row * info[group, WIDTH]
    whole = info[group, KIND] == FULL or info[group, KIND] == RING
    at, end = min(live, before), max(live, before)
    for i in range(first, last + 1):
        # The entries from `at` up to the next span are not sent: they stay as they are, null past the old count.
        upto = min(end, i64(spans[i, START])) if i < last else end
        if live < before:
            for column in range(at, upto):
                # A device's entries are not at hand: there, only the host's own deltas are followed.
                if entries.size > 0 and entries[start + column] != 0:
                    return refuse(info, BAD_TAIL, group, first, row, entries[start + column], live, column)
        elif whole and at < upto:
            return refuse(info, BAD_GAP, group, first, row, 0, live, at)
        if i < last:
            at = max(at, i64(spans[i, START]) + i64(spans[i, SPAN_COUNT]))
    return OK


@helper(i64(*STATE_TYPES, *DELTA_TYPES, i64, i64))
def check_lead(info: I64, state: I32, entries: I32, spans: I32, values: I32, first: int, last: int) -> int:
    """Refuse spans of one windowed row that would leave a null behind a block: only the leading entries may be null.

    Cost: the columns that the spans touch and those between them; what lies before them is known by the row's GONE.
    """
    group, row, live = spans[first, GROUP], spans[first, ROW], i64(spans[first, LIVE])
    line = (group * info[info.shape[0] - 1, ROWS] + row) * STATE_FIELDS
    before, gone = i64(state[line + COUNT]), i64(state[line + GONE])
    start = info[group, BASE] + row * info[group, WIDTH]
    end = max(i64(spans[last - 1, START]) + i64(spans[last - 1, SPAN_COUNT]), gone)
    if live > before:
        end = live
    i, seen = first, 0
    for column in range(min(gone, i64(spans[first, START])), min(end, live)):
        while i < last and column >= spans[i, START] + spans[i, SPAN_COUNT]:
            i += 1
        value = i64(0)
        if i < last and column >= spans[i, START]:
            if spans[i, OFFSET] >= 0:
                value = i64(values[spans[i, OFFSET] + column - spans[i, START]])
        elif column < before:
            value = i64(entries[start + column])
        if value != 0:
            seen = 1
        elif seen:
            return refuse(info, BAD_GAP, group, first, row, 0, live, column)
    return OK


@helper(i64(*STATE_TYPES, *DELTA_TYPES))
def check_spans(info: I64, state: I32, entries: I32, spans: I32, values: I32) -> int:
    """Look at each span, and at those of each row together; the rows seen are left marked."""
    first = i64(0)
    for i in range(spans.shape[0]):
        code = check_span(info, spans, values, i)
        if code != OK:
            return code
        line = (spans[i, GROUP] * info[info.shape[0] - 1, ROWS] + spans[i, ROW]) * STATE_FIELDS
        if i > first and spans[i, LIVE] != spans[first, LIVE]:
            return refuse(info, BAD_ROW, spans[i, GROUP], i, spans[i, ROW], spans[i, LIVE], spans[first, LIVE], 0)
        if i == first and state[line + LISTED]:
            return refuse(info, BAD_ROW, spans[i, GROUP], i, spans[i, ROW], spans[i, LIVE], spans[i, LIVE], 0)
        state[line + LISTED] = 1
        if i > first and spans[i, START] < i64(spans[i - 1, START]) + i64(spans[i - 1, SPAN_COUNT]):
            return refuse(info, BAD_SPAN, spans[i, GROUP], i, spans[i, ROW], spans[i, START], spans[i - 1, START], 0)
        last = i + 1
        if last == spans.shape[0] or spans[last, ROW] != spans[i, ROW] or spans[last, GROUP] != spans[i, GROUP]:
            code = check_row(info, state, entries, spans, first, last)
            if code != OK:
                return code
            kind = info[spans[i, GROUP], KIND]
            if entries.size > 0 and (kind == WINDOW or kind == CHUNKED):
                code = check_lead(info, state, entries, spans, values, first, last)
                if code != OK:
                    return code
            first = i64(last)
    return OK


@helper(i64(*STATE_TYPES, *DELTA_TYPES))
def check(info: I64, state: I32, entries: I32, spans: I32, values: I32) -> int:
    """Look at all of a delta; cost: one pass over it, and one over its spans.

    The spans of a row stand together and name one live count. A replica lists no row as pending, so LISTED marks those seen.
    """
    code = check_spans(info, state, entries, spans, values)
    total = info[info.shape[0] - 1, ROWS]
    for i in range(spans.shape[0]):
        group, row = spans[i, GROUP], spans[i, ROW]
        if 0 <= group < info.shape[0] - 1 and 0 <= row < total:
            state[(group * total + row) * STATE_FIELDS + LISTED] = 0
    return code


@helper(nothing(i64[:, ::1], i32[::1], DELTA_TYPES[0]))
def write_counts(info: I64, state: I32, spans: I32) -> None:
    """Take over the live count of every row that a delta names."""
    total = info[info.shape[0] - 1, ROWS]
    for i in range(spans.shape[0]):
        line = (spans[i, GROUP] * total + spans[i, ROW]) * STATE_FIELDS
        state[line + COUNT] = spans[i, LIVE]
        state[line + SENT] = spans[i, LIVE]


@helper(nothing(*STATE_TYPES, DELTA_TYPES[0]))
def write_leads(info: I64, state: I32, entries: I32, spans: I32) -> None:
    """Count the leading nulls of every windowed row that a delta names, from where it changed on."""
    total = info[info.shape[0] - 1, ROWS]
    for i in range(spans.shape[0]):
        kind = info[spans[i, GROUP], KIND]
        if kind == WINDOW or kind == CHUNKED:
            line = (spans[i, GROUP] * total + spans[i, ROW]) * STATE_FIELDS
            start = info[spans[i, GROUP], BASE] + spans[i, ROW] * info[spans[i, GROUP], WIDTH]
            gone = min(state[line + GONE], spans[i, START])
            while gone < spans[i, LIVE] and entries[start + gone] == 0:
                gone += 1
            state[line + GONE] = min(gone, spans[i, LIVE])


@compiled(i64(*STATE_TYPES, *DELTA_TYPES))
def apply(info: I64, state: I32, entries: I32, spans: I32, values: I32) -> int:
    """Write a delta into a replica's tables."""
    code = check(info, state, entries, spans, values)
    if code != OK:
        return code
    for i in range(spans.shape[0]):
        offset, count = i64(spans[i, OFFSET]), i64(spans[i, SPAN_COUNT])
        at = info[spans[i, GROUP], BASE] + spans[i, ROW] * info[spans[i, GROUP], WIDTH] + spans[i, START]
        if offset < 0:
            fill_null(entries, at, at + count)
        else:
            copy_range(entries, at, values, offset, offset + count)
    write_counts(info, state, spans)
    write_leads(info, state, entries, spans)
    return OK


@compiled(i64(*STATE_TYPES, *DELTA_TYPES, i32[::1]))
def stage(info: I64, state: I32, entries: I32, spans: I32, values: I32, staging: I32) -> int:
    """Take over a delta's counts and put its spans and values one after the other into a buffer to be sent."""
    code = check(info, state, entries, spans, values)
    if code != OK:
        return code
    at = i64(0)
    for i in range(spans.shape[0]):
        for field in range(6):
            staging[at] = spans[i, field]
            at += 1
    copy_range(staging, at, values, 0, values.size)
    write_counts(info, state, spans)
    return OK
