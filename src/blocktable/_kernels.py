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
than slices and tuples of indices, and every process without a warm cache waits for it. Conditional expressions, and more
than three assignments at once, take it longest.
"""

from typing import Any

from numpy.typing import NDArray

from blocktable._jit import compiled, helper, i32, i64, nothing, u64
from blocktable._journal import LINE, has_room, note_commit

# Inside a loop an element is a number of the machine, not a NumPy scalar: Any keeps the type checker out of that.
I32 = NDArray[Any]
I64 = NDArray[Any]

# info[g]: constants of a group, how many of its rows are dirty, and how many calls wrote to it
WIDTH, BASE, BLOCK, KIND, RATIO, CP, INTERLEAVE, IDS, TOUCHED, KERNEL_WIDTH, WRITTEN = range(11)
INFO_FIELDS = 16
# info[groups]: what a refused call tells, the mark that finds duplicates, and rows
FAULT_GROUP, FAULT_INDEX, FAULT_ROW, FAULT_VALUE, FAULT_LIMIT, FAULT_COLUMN, MARK, ROWS = range(8)
# state[g, row]: live entries; leading entries given up; live entries as sent; dirty columns LOW..HIGH; is it listed
COUNT, GONE, SENT, LOW, HIGH, LISTED, SEEN = range(7)
STATE_FIELDS = 8
# kinds of group
FULL, WINDOW, CHUNKED, STATE, RING = range(5)
# what a call was refused for
OK, BAD_ROW, DUPLICATE_ROW, BAD_INDPTR, OVERFLOW, BAD_ID, NULL_ID, BAD_COUNT, BAD_QUERY, BAD_SPAN = range(10)
# what a verb is asked to do: a call over several groups checks them all before it writes the first
CHECK, WRITE = 1, 2
BOTH = CHECK | WRITE
# A stretch of nulls longer than two span headers (2 x 6 numbers) is cheaper as a span of its own.
LONG_NULL = 12
JOURNAL_FULL = -1  # what a commit returns: what waits in the journal is to be written first

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


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64, i64[::1], i64[::1], i32[::1], i64, i64))
def write(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    group: int,
    rows: I64,
    indptr: I64,
    ids: I32,
    replace: int,
    phase: int,
) -> int:
    """Append ids[indptr[i] : indptr[i + 1]] to row rows[i] of a group, or with ``replace`` make them the row."""
    n, width = rows.size, info[group, WIDTH]
    kind, base = info[group, KIND], group * info[info.shape[0] - 1, ROWS]
    if phase & CHECK:
        limit = info[group, IDS]
        code = check_rows(info, state, rows, n)
        if code:
            return code
        if indptr.size != n + 1:
            return refuse(info, BAD_INDPTR, group, 0, -1, indptr.size, n + 1, 0)
        if indptr[0] != 0 or indptr[n] != ids.size:
            return refuse(info, BAD_INDPTR, group, n, -1, indptr[n], ids.size, 0)
        end = i64(0)
        for i in range(n):
            begin = end
            end = indptr[i + 1]
            if end < begin or end > ids.size:
                return refuse(info, BAD_INDPTR, group, i, rows[i], end, ids.size, 0)
            column = gone = i64(0)
            if not replace:
                line = (base + rows[i]) * STATE_FIELDS
                column, gone = i64(state[line + COUNT]), i64(state[line + GONE])
            if column + (end - begin) > width:
                return refuse(info, OVERFLOW, group, i, rows[i], column + (end - begin), width, column)
            for j in range(begin, end):
                block = i64(ids[j])
                if block <= 0 or block >= limit:
                    if block:
                        return refuse(info, BAD_ID, group, i, rows[i], block, limit, column)
                    # L3: null anywhere in a state group, at the head of a windowed one, nowhere else
                    if kind != STATE and (kind == FULL or kind == RING or column != gone):
                        return refuse(info, NULL_ID, group, i, rows[i], 0, limit, column)
                    if column == gone:
                        gone += 1
                column += 1
    if phase & WRITE:
        info[group, WRITTEN] += 1
        end = i64(0)
        for i in range(n):
            begin = end
            end = indptr[i + 1]
            line = (base + rows[i]) * STATE_FIELDS
            if replace:
                cut(info, state, entries, dirty, group, rows[i], line, 0)
            if begin < end:
                live = i64(state[line + COUNT])
                touch(info, state, dirty, group, rows[i], line, live, live + (end - begin))
                start = info[group, BASE] + rows[i] * width + live - begin
                for j in range(begin, end):
                    entries[start + j] = ids[j]
                live += end - begin
                state[line + COUNT] = live
                if kind != FULL:
                    gone, start = i64(state[line + GONE]), info[group, BASE] + rows[i] * width
                    while gone < live and entries[start + gone] == 0:
                        gone += 1
                    state[line + GONE] = gone
    return OK


@compiled(i64(*STATE_TYPES, i32[:, ::1], i64, i64[::1], i64[::1], i64, i64))
def shorten(
    info: I64,
    state: I32,
    entries: I32,
    dirty: I32,
    group: int,
    rows: I64,
    counts: I64,
    lead: int,
    phase: int,
) -> int:
    """Cut row rows[i] to counts[i] entries, or with ``lead`` make its first counts[i] null: the live count stays."""
    base = group * info[info.shape[0] - 1, ROWS]
    if phase & CHECK:
        code = check_rows(info, state, rows, rows.size)
        if code:
            return code
        for i in range(rows.size):
            live = i64(state[(base + rows[i]) * STATE_FIELDS + COUNT])
            if counts[i] < 0 or counts[i] > live:
                return refuse(info, BAD_COUNT, group, i, rows[i], counts[i], live, 0)
    if phase & WRITE:
        info[group, WRITTEN] += 1
        for i in range(rows.size):
            line = (base + rows[i]) * STATE_FIELDS
            gone, count = i64(state[line + GONE]), counts[i]
            if not lead:
                if count < state[line + COUNT]:
                    cut(info, state, entries, dirty, group, rows[i], line, count)
            elif count > gone:
                start = info[group, BASE] + rows[i] * info[group, WIDTH]
                fill_null(entries, start + gone, start + count)
                touch(info, state, dirty, group, rows[i], line, gone, count)
                state[line + GONE] = count
    return OK


@helper(i64(i32[::1], i64, i64))
def piece_end(entries: I32, begin: int, end: int) -> int:
    """Return where the first piece of a run of changed entries ends, negative where that piece is null throughout.

    Pieces alternate: nulls that are more than LONG_NULL, or all there is, and values with what nulls lie between.
    """
    last = begin  # past the last value seen
    for at in range(begin, end):
        if entries[at] != 0:
            if last == begin and at - begin > LONG_NULL:
                return -at
            last = at + 1
        elif last > begin and at + 1 - last > LONG_NULL:
            return last
    return end if last > begin else -end


@compiled(i64(*STATE_TYPES, i32[::1], i32[:, ::1], i32[:, ::1], i32[::1], i64[::1]))
def difference(
    info: I64, state: I32, entries: I32, sent: I32, dirty: I32, spans: I32, values: I32, journal: I64
) -> Any:
    """Write out what changed since the last commit as n spans and m values, call it sent, and return n << 32 | m.

    A span is one run of changed entries, cut where a long stretch of nulls needs no values. Where there might not be room
    for all, nothing is changed and the most room it can take is returned, as its complement (~), or JOURNAL_FULL.
    """
    total = info[info.shape[0] - 1, ROWS]
    room = i64(0)
    for group in range(info.shape[0] - 1):
        for k in range(info[group, TOUCHED]):
            line = (group * total + dirty[group, k]) * STATE_FIELDS
            room += 1 + state[line + HIGH] - state[line + LOW]
    if room > values.size:
        return ~room
    if not has_room(journal, LINE):
        return i64(JOURNAL_FULL)
    n = m = i64(0)
    for group in range(info.shape[0] - 1):
        for k in range(info[group, TOUCHED]):
            row = i64(dirty[group, k])
            line, start = (group * total + row) * STATE_FIELDS, info[group, BASE] + row * info[group, WIDTH]
            live, before = i64(state[line + COUNT]), n
            at, high, seen = start + state[line + LOW], start + state[line + HIGH], start + state[line + SENT]
            # Where the count alone changed: one piece without entries, at the end.
            while at < high or (n == before and start + live != seen):
                piece = at
                while at < high:
                    was = i64(0)
                    if at < seen:  # null from there on, and not fetched from memory
                        was = i64(sent[at])
                    if entries[at] == was:
                        break
                    sent[at] = entries[at]
                    at += 1
                if piece == at < high:
                    at += 1
                    continue
                while True:
                    end, offset = piece_end(entries, piece, at), m
                    if end < 0:
                        end, offset = -end, i64(-1)
                    spans[n, 0] = group
                    spans[n, 1] = row
                    spans[n, 2] = piece - start
                    spans[n, 3] = end - piece
                    spans[n, 4] = offset
                    spans[n, 5] = live
                    n += 1
                    if offset >= 0:
                        for j in range(piece, end):
                            values[m] = entries[j]
                            m += 1
                    piece = end
                    if piece == at:
                        break
            state[line + SENT] = live
            state[line + LISTED] = 0
        info[group, TOUCHED] = 0
    if journal.size:
        note_commit(journal, spans[:n], values[:m])
    return n << 32 | m


@compiled(i64(*STATE_TYPES, i64[::1], i64[::1], i64[::1], i64, i64[::1]))
def slots(info: I64, state: I32, entries: I32, rows: I64, starts: I64, positions: I64, rank: int, out: I64) -> int:
    """Write the slot of every token of a step, for every group; -1 where there is none.

    Positions are mapped a piece at a time: ``chunk`` tokens whose slots follow each other, a block or, of a block that
    ranks share, what one of them owns at a stretch. Piece p belongs to rank p mod ranks and is its piece p // ranks, of
    which ``share`` make a block. A ring group has one block, in column 0. ``out`` holds one group after another.
    """
    groups = info.shape[0] - 1
    total, n, length = info[groups, ROWS], rows.size, out.size // groups
    tokens = starts[n]
    if starts[0] or tokens > positions.size or tokens > length:
        return refuse(info, BAD_QUERY, 0, n, -1, tokens, length, starts[0])
    for i in range(n):
        row = rows[i]
        if row < -1 or row >= total:
            return refuse(info, BAD_ROW, 0, i, row, row, total, 0)
        if starts[i + 1] < starts[i]:
            return refuse(info, BAD_QUERY, 0, i, row, starts[i + 1], starts[i], 0)
    one = u64(1)  # unsigned indices need no test for counting from the end, and divide faster
    for group in range(groups):
        kind, block = info[group, KIND], info[group, BLOCK]
        ranks, line = u64(info[group, CP]), u64(group * length)
        chunk, share, mine = u64(block), one, u64(0)
        if ranks > one:
            chunk, mine = u64(info[group, INTERLEAVE]), u64(rank)
            share = u64(block) // chunk
        for i in range(n):
            row, t, stop = rows[i], u64(starts[i]), u64(starts[i + 1])
            live, start = u64(0), u64(0)
            if row >= 0 and kind != STATE:
                live = u64(state[(group * total + row) * STATE_FIELDS + COUNT])
                start = u64(info[group, BASE] + row * info[group, WIDTH])
            while t < stop:
                position = positions[t]
                piece = u64(position) // chunk  # of a negative position: past every row's end
                own = column = piece
                if ranks > one:
                    own = piece // ranks
                    column = own // share
                at, block_id = column, i64(0)
                if kind == RING:
                    at = u64(0)
                if position >= 0 and at < live and piece - own * ranks == mine:
                    block_id = i64(entries[start + at])
                if not block_id:
                    out[line + t] = -1
                    t += one
                    continue
                shift = (block_id - i64(column)) * block + (i64(own) - i64(piece)) * i64(chunk)
                end = t + (piece + one) * chunk - u64(position)
                if end > stop:
                    end = stop
                while t < end and positions[t] == position:
                    out[line + t] = position + shift
                    position += 1
                    t += one
        t, stop = line + u64(tokens), line + u64(length)
        while t < stop:
            out[t] = -1
            t += one
    return OK
