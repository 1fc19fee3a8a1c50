"""The compiled loops of the host tables, over plain NumPy arrays.

The state of all groups is four arrays:

    info     int64 [groups + 1, 16]         the group's constants (WIDTH ...); the last row holds the fault of a refused
                                            call, the mark that finds duplicate rows, and the
                                            number of rows
    state    int32 [groups x rows x 8]      one row's numbers (COUNT ...), together so that a row costs one cache line:
                                            field F of row r of group g is state[(g * rows + r) * 8 + F]
    entries  int32 [sum of rows x width]    the tables, one group after another, each row contiguous
    sent     int32, as entries              what the last commit sent; the difference is the next delta
    dirty    int32 [groups, rows]           the rows touched since the last commit, in order; info[g, TOUCHED] of them

Every verb looks at all its arguments before it writes the first entry: it returns 0, or the code of what it refused
with the values in the fault row, and then nothing has changed (L2).

The loops are spelled out in single indices, and nothing is allocated inside: Numba compiles that several times faster
than slices and tuples of indices, and every process without a warm cache waits for it.
"""

from typing import Any

from numpy.typing import NDArray

from blocktable._jit import compiled, helper, i32, i64, nothing, sealed, u64

# Inside a loop an element is a number of the machine, not a NumPy scalar: Any keeps the type checker out of that.
I32 = NDArray[Any]
I64 = NDArray[Any]

# info[g]: constants of a group, and how many of its rows are dirty
WIDTH, BASE, BLOCK, KIND, RATIO, CP, INTERLEAVE, IDS, TOUCHED, KERNEL_WIDTH = range(10)
INFO_FIELDS = 16
# info[groups]: what a refused call tells, the mark that finds duplicates, rows, and the size of the next delta
FAULT_GROUP, FAULT_INDEX, FAULT_ROW, FAULT_VALUE, FAULT_LIMIT, FAULT_COLUMN, MARK, ROWS, SPANS, VALUES = range(10)
# state[g, row]: live entries; leading entries given up; live entries as sent; dirty columns LOW..HIGH; is it listed
COUNT, GONE, SENT, LOW, HIGH, LISTED, SEEN = range(7)
STATE_FIELDS = 8
# kinds of group
FULL, WINDOW, CHUNKED, STATE, RING = range(5)
# what a call was refused for
OK, BAD_ROW, DUPLICATE_ROW, BAD_INDPTR, OVERFLOW, BAD_ID, NULL_ID, BAD_COUNT, BAD_QUERY, BAD_SPAN, SHORT = range(11)
# laws that an audit can find broken
BROKEN_L2, BROKEN_L3, BROKEN_L4, BROKEN_L11 = 2, 3, 4, 11

MOST_POSITION = 2**63 - 1

# A stretch of nulls longer than two span headers (2 x 6 numbers) is cheaper as a span of its own.
LONG_NULL = 12

STATE_TYPES = (i64[:, ::1], i32[::1], i32[::1])


@helper(i64(i64[:, ::1], i64, i64, i64, i64, i64, i64, i64))
def refuse(info: I64, code: int, group: int, index: int, row: int, value: int, limit: int, column: int) -> int:
    """Leave the values of a refusal in the fault row and return its code."""
    fault = info.shape[0] - 1
    info[fault, FAULT_GROUP] = group
    info[fault, FAULT_INDEX] = index
    info[fault, FAULT_ROW] = row
    info[fault, FAULT_VALUE] = value
    info[fault, FAULT_LIMIT] = limit
    info[fault, FAULT_COLUMN] = column
    return code


@helper(nothing(i32[::1], i64, i64))
def fill_null(entries: I32, begin: int, end: int) -> None:
    """Make a range of entries null."""
    for at in range(begin, end):
        entries[at] = 0


@helper(nothing(i32[::1], i64, sealed(i32[::1]), i64, i64))
def copy_range(target: I32, at: int, source: I32, begin: int, end: int) -> None:
    """Copy source[begin:end] to target[at:]."""
    shift = at - begin
    for k in range(begin, end):
        target[k + shift] = source[k]


@helper(i64(i64[:, ::1], i32[::1], i64[::1], i64))
def check_rows(info: I64, state: I32, rows: I64, count: int) -> int:
    """Refuse a row that does not exist or comes twice among rows[:count]."""
    scratch = info.shape[0] - 1
    total = info[scratch, ROWS]
    mark = info[scratch, MARK] + 1
    if mark == 2**31 - 1:  # marks are int32: start over once in two thousand million calls
        mark = 1
        for row in range(total):
            state[row * STATE_FIELDS + SEEN] = 0
    info[scratch, MARK] = mark
    for i in range(count):
        row = rows[i]
        if row < 0 or row >= total:
            return refuse(info, BAD_ROW, 0, i, row, row, total, 0)
        if state[row * STATE_FIELDS + SEEN] == mark:
            return refuse(info, DUPLICATE_ROW, 0, i, row, row, 0, 0)
        state[row * STATE_FIELDS + SEEN] = mark
    return OK


@helper(nothing(i64[:, ::1], i32[::1], i32[:, ::1], i64, i64, i64, i64, i64))
def touch(info: I64, state: I32, dirty: I32, group: int, row: int, line: int, low: int, high: int) -> None:
    """Note that columns low..high of a row may differ from what was sent."""
    if state[line + LISTED] == 0:
        state[line + LISTED] = 1
        state[line + LOW] = low
        state[line + HIGH] = high
        touched = info[group, TOUCHED]
        dirty[group, touched] = row
        info[group, TOUCHED] = touched + 1
        return
    if state[line + LOW] > low:
        state[line + LOW] = low
    if state[line + HIGH] < high:
        state[line + HIGH] = high


@helper(nothing(*STATE_TYPES, i32[:, ::1], i64, i64, i64, i64))
def cut(info: I64, state: I32, entries: I32, dirty: I32, group: int, row: int, line: int, count: int) -> None:
    """Shorten a row to ``count`` entries; what lay behind is null."""
    live = state[line + COUNT]
    start = info[group, BASE] + row * info[group, WIDTH]
    fill_null(entries, start + count, start + live)
    touch(info, state, dirty, group, row, line, count, live)
    state[line + COUNT] = count
    if state[line + GONE] > count:
        state[line + GONE] = count


@helper(nothing(*STATE_TYPES, i32[:, ::1], i64, i64, i64, i64[::1], i64, i64))
def extend_row(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    group: int,
    row: int,
    line: int,
    ids: I64,
    begin: int,
    end: int,
) -> None:
    """Put ids[begin:end] behind a row's live entries."""
    live = state[line + COUNT]
    start = info[group, BASE] + row * info[group, WIDTH]
    touch(info, state, dirty, group, row, line, live, live + (end - begin))
    for at in range(begin, end):
        entries[start + live + at - begin] = ids[at]
    gone = state[line + GONE]
    while gone - live < end - begin and gone >= live and ids[begin + gone - live] == 0:
        gone += 1
    state[line + GONE] = gone
    state[line + COUNT] = live + (end - begin)


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64, i64, i64[::1], i64[::1], i64[::1], i64))
def write(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    first: int,
    groups: int,
    rows: I64,
    indptr: I64,
    ids: I64,
    replace: int,
) -> int:
    """Append ids to rows (or, with ``replace``, make them the rows) in ``groups`` groups from ``first`` on.

    ``indptr`` holds rows + 1 offsets into ``ids`` per group, one group after another: row i of the k-th group gets
    ids[indptr[k * (n + 1) + i] : indptr[k * (n + 1) + i + 1]], n rows being given.
    """
    n = rows.size
    code = check_rows(info, state, rows, n)
    if code != OK:
        return code
    total = info[info.shape[0] - 1, ROWS]
    if indptr.size != groups * (n + 1):
        return refuse(info, BAD_INDPTR, first, 0, -1, indptr.size, groups * (n + 1), 0)
    end = i64(0)
    for k in range(groups):
        group, at = first + k, k * (n + 1)
        if indptr[at] != end:
            return refuse(info, BAD_INDPTR, group, 0, -1, indptr[at], end, 0)
        width, kind, limit = info[group, WIDTH], info[group, KIND], info[group, IDS]
        for i in range(n):
            begin = end
            end = indptr[at + i + 1]
            if end < begin or end > ids.size:
                return refuse(info, BAD_INDPTR, group, i, rows[i], end, ids.size, 0)
            column = gone = 0
            if not replace:
                line = (group * total + rows[i]) * STATE_FIELDS
                column, gone = state[line + COUNT], state[line + GONE]
            if column + (end - begin) > width:
                return refuse(info, OVERFLOW, group, i, rows[i], column + (end - begin), width, column)
            for j in range(begin, end):
                block = ids[j]
                if block <= 0 or block >= limit:
                    if block != 0:
                        return refuse(info, BAD_ID, group, i, rows[i], block, limit, column)
                    # L3: null anywhere in a state group, at the head of a windowed one, nowhere else
                    if kind != STATE and (kind == FULL or kind == RING or column != gone):
                        return refuse(info, NULL_ID, group, i, rows[i], 0, limit, column)
                    if column == gone:
                        gone += 1
                column += 1
    if end != ids.size:
        return refuse(info, BAD_INDPTR, first, n, -1, end, ids.size, 0)
    end = i64(0)
    for k in range(groups):
        group, at = first + k, k * (n + 1)
        for i in range(n):
            begin = end
            end = indptr[at + i + 1]
            line = (group * total + rows[i]) * STATE_FIELDS
            if replace:
                cut(info, state, entries, dirty, group, rows[i], line, 0)
            if begin < end:
                extend_row(info, state, entries, dirty, group, rows[i], line, ids, begin, end)
    return OK


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64, i64[::1], i64[:, ::1]))
def truncate(info: I64, state: I32, entries: I32, dirty: I32, first: int, rows: I64, counts: I64) -> int:
    """Shorten rows to counts[k, i] entries in the groups first .. first + len(counts) - 1."""
    n = rows.size
    code = check_rows(info, state, rows, n)
    if code != OK:
        return code
    total = info[info.shape[0] - 1, ROWS]
    for k in range(counts.shape[0]):
        for i in range(n):
            live = state[((first + k) * total + rows[i]) * STATE_FIELDS + COUNT]
            if counts[k, i] < 0 or counts[k, i] > live:
                return refuse(info, BAD_COUNT, first + k, i, rows[i], counts[k, i], live, 0)
    for k in range(counts.shape[0]):
        for i in range(n):
            line = ((first + k) * total + rows[i]) * STATE_FIELDS
            if counts[k, i] < state[line + COUNT]:
                cut(info, state, entries, dirty, first + k, rows[i], line, counts[k, i])
    return OK


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64, i64[::1], i64[::1]))
def release(info: I64, state: I32, entries: I32, dirty: I32, group: int, rows: I64, counts: I64) -> int:
    """Make the first counts[i] entries of rows null; the live count stays."""
    code = check_rows(info, state, rows, rows.size)
    if code != OK:
        return code
    base = group * info[info.shape[0] - 1, ROWS]
    for i in range(rows.size):
        live = state[(base + rows[i]) * STATE_FIELDS + COUNT]
        if counts[i] < 0 or counts[i] > live:
            return refuse(info, BAD_COUNT, group, i, rows[i], counts[i], live, 0)
    for i in range(rows.size):
        line = (base + rows[i]) * STATE_FIELDS
        gone = state[line + GONE]
        if counts[i] > gone:
            start = info[group, BASE] + rows[i] * info[group, WIDTH]
            fill_null(entries, start + gone, start + counts[i])
            touch(info, state, dirty, group, rows[i], line, gone, counts[i])
            state[line + GONE] = counts[i]
    return OK


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64[::1], i64[::1], i64, i64[::1], i64[::1]))
def transfer(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    sources: I64,
    targets: I64,
    keep: int,
    held: I64,
    marks: I64,
) -> int:
    """Move rows in all groups (every source read first, then emptied), or with ``keep`` copy them, pair after pair.

    ``held`` has room for the entries of all sources of one group, ``marks`` two numbers per source.
    """
    n = sources.size
    total = info[info.shape[0] - 1, ROWS]
    if keep:
        for i in range(n):
            if sources[i] < 0 or sources[i] >= total:
                return refuse(info, BAD_ROW, 0, i, sources[i], sources[i], total, 0)
    else:
        code = check_rows(info, state, sources, n)
        if code != OK:
            return code
    code = check_rows(info, state, targets, n)
    if code != OK:
        return code
    step = 1 if keep else n  # so many sources are read before their targets are written
    for group in range(info.shape[0] - 1):
        width, base = info[group, WIDTH], info[group, BASE]
        for part in range(0, n, max(step, 1)):
            end = 0
            for i in range(part, part + step):
                line = (group * total + sources[i]) * STATE_FIELDS
                start = base + sources[i] * width
                for at in range(start, start + state[line + COUNT]):
                    held[end] = entries[at]
                    end += 1
                marks[2 * i] = end
                marks[2 * i + 1] = state[line + GONE]
                if not keep:
                    cut(info, state, entries, dirty, group, sources[i], line, 0)
            begin = 0
            for i in range(part, part + step):
                line = (group * total + targets[i]) * STATE_FIELDS
                cut(info, state, entries, dirty, group, targets[i], line, 0)
                extend_row(info, state, entries, dirty, group, targets[i], line, held, begin, marks[2 * i])
                state[line + GONE] = marks[2 * i + 1]
                begin = marks[2 * i]
    return OK


@helper(i64(i32[::1], i64, i64))
def null_end(entries: I32, begin: int, end: int) -> int:
    """Return where the stretch of nulls that begins at ``begin`` ends."""
    while begin < end and entries[begin] == 0:
        begin += 1
    return begin


@helper(i64(i32[::1], i64, i64))
def value_end(entries: I32, begin: int, end: int) -> int:
    """Return where a piece with values ends: at the next long stretch of nulls, or at the end."""
    last = begin  # past the last value seen
    at = begin
    while at < end:
        if entries[at] != 0:
            last = at + 1
        elif at + 1 - last > LONG_NULL:
            return last
        at += 1
    return end


@helper(nothing(i32[:, ::1], i64, i64, i64, i64, i64, i64, i64))
def write_span(spans: I32, n: int, group: int, row: int, start: int, count: int, offset: int, live: int) -> None:
    """Write span ``n`` of a delta, where there is room: while spans are only counted there may be none."""
    if n < spans.shape[0]:
        spans[n, 0] = group
        spans[n, 1] = row
        spans[n, 2] = start
        spans[n, 3] = count
        spans[n, 4] = offset
        spans[n, 5] = live


@compiled(i64(*STATE_TYPES, i32[::1], i32[:, ::1], i32[:, ::1], i32[::1], i64))
def difference(info: I64, state: I32, entries: I32, sent: I32, dirty: I32, spans: I32, values: I32, exact: int) -> int:
    """Write out what changed since the last commit as spans and values, and call it sent.

    A span is one run of changed entries, cut where a long stretch of nulls needs no values. Unless ``exact`` promises
    enough room, the room is first compared with the most there can be; where it might not do, the walk only counts,
    changes nothing and returns SHORT. Either way the counts are left in info[groups, SPANS] and VALUES.
    """
    total = info[info.shape[0] - 1, ROWS]
    n = m = 0
    if not exact:
        for group in range(info.shape[0] - 1):
            for k in range(info[group, TOUCHED]):
                line = (group * total + dirty[group, k]) * STATE_FIELDS
                m += state[line + HIGH] - state[line + LOW]
                n += 1
        n += m
    send = n <= spans.shape[0] and m <= values.size
    n = m = 0
    for group in range(info.shape[0] - 1):
        for k in range(info[group, TOUCHED]):
            row = dirty[group, k]
            line = (group * total + row) * STATE_FIELDS
            live = state[line + COUNT]
            start = info[group, BASE] + row * info[group, WIDTH]
            at, high, before = start + state[line + LOW], start + state[line + HIGH], n
            while at < high:
                if entries[at] == sent[at]:
                    at += 1
                    continue
                begin = piece = at
                while at < high and entries[at] != sent[at]:
                    at += 1
                while piece < at:
                    stop = null_end(entries, piece, at)
                    if stop - piece > LONG_NULL or stop - piece == at - begin:
                        write_span(spans, n, group, row, piece - start, stop - piece, -1, live)
                    else:
                        stop = value_end(entries, piece, at)
                        write_span(spans, n, group, row, piece - start, stop - piece, m, live)
                        if send:
                            copy_range(values, m, entries, piece, stop)
                        m += stop - piece
                    n += 1
                    piece = stop
                if send:
                    copy_range(sent, begin, entries, begin, at)
            if n == before and live != state[line + SENT]:  # the count alone changed
                write_span(spans, n, group, row, live, 0, -1, live)
                n += 1
            if send:
                state[line + SENT] = live
                state[line + LISTED] = 0
        if send:
            info[group, TOUCHED] = 0
    info[info.shape[0] - 1, SPANS] = n
    info[info.shape[0] - 1, VALUES] = m
    return OK if send else SHORT


@compiled(i64(*STATE_TYPES, i64, i64[::1], i32[:, ::1]))
def expand(info: I64, state: I32, entries: I32, group: int, rows: I64, out: I32) -> int:
    """Write rows as the kernel sees them: manager block m becomes r*m .. r*m + r - 1, the tail is 0."""
    total = info[info.shape[0] - 1, ROWS]
    for i in range(rows.size):
        if rows[i] < 0 or rows[i] >= total:
            return refuse(info, BAD_ROW, group, i, rows[i], rows[i], total, 0)
    ratio = info[group, RATIO]
    for i in range(rows.size):
        start = info[group, BASE] + rows[i] * info[group, WIDTH]
        live = state[(group * total + rows[i]) * STATE_FIELDS + COUNT]
        at = 0
        for column in range(live):
            for j in range(ratio):
                out[i, at] = entries[start + column] * ratio + j
                at += 1
        for tail in range(at, out.shape[1]):
            out[i, tail] = 0
    return OK


@helper(i64(i64, i64, i64, i64, i64))
def owned(first: int, offset: int, chunk: int, ranks: int, rank: int) -> int:
    """Return the slot of an offset in a block shared by ``ranks``, or -1 where another rank owns it (L13)."""
    turn = offset // chunk
    if turn % ranks != rank:
        return -1
    return first + turn // ranks * chunk + offset % chunk


@helper(i64(i64[::1], i64, i64, i64, i64, i64, i64, i64, i64, i64[::1], i64))
def fill_column(
    positions: I64,
    begin: int,
    end: int,
    low: int,
    span: int,
    first: int,
    chunk: int,
    ranks: int,
    rank: int,
    out: I64,
    at: int,
) -> int:
    """Map the tokens from ``begin`` on that lie in the column from position ``low``; return the first that does not.

    ``first`` is the column's first slot, not positive past the row's live blocks and for a null block. Token t goes to
    out[at + t]. One loop per case, with unsigned indices, which need no test for counting from the end.
    """
    t, stop, base, one = u64(begin), u64(end), u64(at), u64(1)
    shift = first - low
    if first <= 0:
        while t < stop and low <= positions[t] and positions[t] - low < span:
            out[base + t] = -1
            t += one
    elif ranks == 1:
        while t < stop and low <= positions[t] and positions[t] - low < span:
            out[base + t] = positions[t] + shift
            t += one
    else:
        while t < stop and low <= positions[t] and positions[t] - low < span:
            out[base + t] = owned(first, positions[t] - low, chunk, ranks, rank)
            t += one
    return int(t)


@compiled(i64(*STATE_TYPES, i64[::1], i64[::1], i64[::1], i64, i64[::1]))
def slots(info: I64, state: I32, entries: I32, rows: I64, starts: I64, positions: I64, rank: int, out: I64) -> int:
    """Write the slot of every token of a step, for every group; -1 where there is none.

    Column c covers the positions c * span .. c * span + span - 1, span = block size x ranks. Neighbouring tokens mostly
    share a column, and the next column follows: a division per jump, not per token. A ring group is one column that
    every position falls into. ``out`` holds one group after another.
    """
    groups = info.shape[0] - 1
    total, n, length = info[groups, ROWS], rows.size, out.size // groups
    tokens = starts[n]
    if starts[0] != 0 or tokens > positions.size or tokens > length:
        return refuse(info, BAD_QUERY, 0, n, -1, tokens, min(positions.size, length), starts[0])
    for i in range(n):
        if rows[i] < -1 or rows[i] >= total:
            return refuse(info, BAD_ROW, 0, i, rows[i], rows[i], total, 0)
        if starts[i + 1] < starts[i]:
            return refuse(info, BAD_QUERY, 0, i, rows[i], starts[i + 1], starts[i], 0)
    for group in range(groups):
        block, kind = info[group, BLOCK], info[group, KIND]
        ranks, chunk = info[group, CP], info[group, INTERLEAVE]
        span, at = block * ranks, group * length
        for i in range(n):
            row, t, end = rows[i], starts[i], starts[i + 1]
            live = i64(0)
            start = i64(0)
            if row >= 0 and kind != STATE:
                live = state[(group * total + row) * STATE_FIELDS + COUNT]
                start = info[group, BASE] + row * info[group, WIDTH]
            column = i64(0)
            low = i64(0)
            while t < end:
                position = positions[t]
                if position < 0:
                    out[at + t] = -1
                    t += 1
                    continue
                if position < low or position - low >= span:
                    column = position // span
                    low = column * span
                first = i64(-1)
                if kind == RING:
                    if live > 0:
                        first = entries[start] * block
                elif column < live:
                    first = entries[start + column] * block
                t = fill_column(positions, t, end, low, span, first, chunk, ranks, rank, out, at)
                if low < MOST_POSITION - 2 * span:  # the next column, mostly; else the one at `low` is looked up anew
                    column += 1
                    low += span
        for t in range(at + tokens, at + length):
            out[t] = -1
    return OK


@compiled(i64(*STATE_TYPES, i32[::1]))
def audit(info: I64, state: I32, entries: I32, sent: I32) -> int:
    """Look at every entry of every row; return the number of the first law found broken, or 0."""
    total = info[info.shape[0] - 1, ROWS]
    for group in range(info.shape[0] - 1):
        width, kind, limit = info[group, WIDTH], info[group, KIND], info[group, IDS]
        for row in range(total):
            line = (group * total + row) * STATE_FIELDS
            start = info[group, BASE] + row * width
            count, clean = state[line + COUNT], state[line + LISTED] == 0
            if count < 0 or count > width:
                return refuse(info, BROKEN_L2, group, 0, row, count, width, 0)
            if clean and count != state[line + SENT]:
                return refuse(info, BROKEN_L11, group, 0, row, count, state[line + SENT], count)
            gap = 0  # a null after this is in the middle of a row
            for column in range(width):
                entry = entries[start + column]
                if clean and entry != sent[start + column]:
                    return refuse(info, BROKEN_L11, group, 0, row, entry, sent[start + column], column)
                if column >= count:
                    if entry != 0:
                        return refuse(info, BROKEN_L4, group, 0, row, entry, 0, column)
                elif entry < 0 or entry >= limit:
                    return refuse(info, BROKEN_L3, group, 0, row, entry, limit, column)
                elif entry != 0:
                    gap = 1
                elif kind == FULL or kind == RING or (kind != STATE and gap):
                    return refuse(info, BROKEN_L3, group, 0, row, entry, limit, column)
    return OK
