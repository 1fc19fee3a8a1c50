"""The usual step, compiled: most calls lengthen rows by a token, find nothing, and must cost little.

These loops judge nothing: they say that everything is as it should be, and note it, or return False having changed nothing
that counts; then the NumPy code beside them works out what is the matter, which may also be nothing.
"""

from blocktable._jit import compiled, i32, i64, nothing, sealed
from blocktable._prefix_numbers import next_number
from blocktable.sanitize.laws import Ints

FULL, WINDOW, CHUNKED = range(3)
# numbers[...] of one group
KIND, REACH, WIDTH, BLOCK, RANKS, INTERLEAVE, RANK, BASE = range(8)
# pool[...]: the last fence retired, the call in progress, blocks held; entries and counts that differ from those sent
RETIRED, CALL, HELD, BEHIND, MISCOUNTED = range(5)

NOTHING, ANYTHING = 0, 1  # contents: of no use to anybody; not known, after a finding

_SEEN32, _SEEN64 = sealed(i32[::1]), sealed(i64[::1])
_STRIDED, _STRIDED64 = sealed(i32[:]), sealed(i64[:])
_ROWS = (i64[::1], i64[::1], i64[::1], i64[::1])  # rows, starts, length, final
_POOL = (i64[::1], i64[::1], i64[::1], i64[::1], i64[::1])  # pool, owners, pins, fence, stamp


@compiled(i64(i64[::1], *_ROWS, i64[::1], i32[::1], _SEEN32, _STRIDED, i64[::1], *_POOL, _SEEN64))
def as_it_should(
    numbers: Ints,
    rows: Ints,
    starts: Ints,
    length: Ints,
    final: Ints,
    counts: Ints,
    flat: Ints,
    actual: Ints,
    actual_counts: Ints,
    gone: Ints,
    pool: Ints,
    owners: Ints,
    pins: Ints,
    fence: Ints,
    stamp: Ints,
    slots: Ints,
) -> int:
    """Say whether one group's rows were lengthened as they should: no window moves, no block is shared, all slots right."""
    kind, reach, width, block = numbers[KIND], numbers[REACH], numbers[WIDTH], numbers[BLOCK]
    ranks, interleave, rank = numbers[RANKS], numbers[INTERLEAVE], numbers[RANK]
    span = block * ranks
    for i in range(rows.size):
        row, size = rows[i], starts[i + 1] - starts[i]
        begin = length[row]
        end = begin + size
        mark = min(final[row], begin)
        if kind == WINDOW and max(mark - reach + 1, 0) // span > gone[row]:
            return False
        if kind == CHUNKED and mark // reach * reach // span > gone[row]:
            return False
        line, before, after = row * width, counts[row], (end + span - 1) // span
        if size == 0:
            after = before
        if after > width or after < before or actual_counts[row] != after:
            return False
        if size and begin % span:
            old = flat[numbers[BASE] + line + begin // span]
            if old <= 0 or old >= owners.size or owners[old] != 1 or actual[line + begin // span] != old:
                return False
        for column in range(before, after):
            new = actual[line + column]
            if new < 1 or new >= owners.size or stamp[new] == pool[CALL]:
                return False
            stamp[new] = pool[CALL]
            if owners[new] or pins[new] or fence[new] > pool[RETIRED]:
                return False
        for t in range(size):
            offset = (begin + t) % span
            slot = i64(-1)
            if ranks == 1:
                slot = actual[line + (begin + t) // span] * block + offset
            elif offset // interleave % ranks == rank:
                inside = offset // (interleave * ranks) * interleave + offset % interleave
                slot = actual[line + (begin + t) // span] * block + inside
            if slots[starts[i] + t] != slot:
                return False
    return True


@compiled(
    nothing(i64[::1], *_ROWS[:3], i64[::1], i64[::1], i32[::1], i32[::1], i32[::1], _SEEN32, *_POOL[:2], i64[::1])
)
def note_blocks(
    numbers: Ints,
    rows: Ints,
    starts: Ints,
    length: Ints,
    counts: Ints,
    sent_counts: Ints,
    flat: Ints,
    sent: Ints,
    touched: Ints,
    actual: Ints,
    pool: Ints,
    owners: Ints,
    block_touched: Ints,
) -> None:
    """Note what ``as_it_should`` has found right: the new entries, counts and owners."""
    width, span = numbers[WIDTH], numbers[BLOCK] * numbers[RANKS]
    for i in range(rows.size):
        row, size = rows[i], starts[i + 1] - starts[i]
        before, after = counts[row], (length[row] + size + span - 1) // span
        if size == 0 or after == before:
            continue
        for column in range(before, after):
            at = numbers[BASE] + row * width + column
            new = actual[row * width + column]
            pool[BEHIND] += i64(sent[at] != new) - i64(sent[at] != flat[at])
            flat[at] = new
            touched[at] = pool[CALL]
            owners[new] = 1
            block_touched[new] = pool[CALL]
            pool[HELD] += 1
        pool[MISCOUNTED] += i64(sent_counts[row] != after) - i64(sent_counts[row] != before)
        counts[row] = after


@compiled(i64(sealed(i32[:, ::1]), _SEEN32, i64[::1], i64[::1], i64, *(i32[::1],) * 2, *(i64[:, ::1],) * 2, i64[::1]))
def follow_delta(
    spans: Ints,
    values: Ints,
    base: Ints,
    widths: Ints,
    max_rows: int,
    sent: Ints,
    flat: Ints,
    sent_counts: Ints,
    counts: Ints,
    pool: Ints,
) -> int:
    """Write a delta into the copy of what was sent; return -1, or the span that reaches outside the tables."""
    for i in range(spans.shape[0]):
        group, row, start, count, offset, live = spans[i]
        if group < 0 or group >= widths.size or row < 0 or row >= max_rows or start < 0 or count < 0 or offset < -1:
            return i
        if start + count > widths[group] or live < 0 or live > widths[group]:
            return i
        if offset >= 0 and offset + count > values.size:
            return i
    for i in range(spans.shape[0]):
        group, row, start, count, offset, live = spans[i]
        at = base[group] + row * widths[group] + start
        for j in range(count):
            value = values[offset + j] if offset >= 0 else 0
            pool[BEHIND] += i64(value != flat[at + j]) - i64(sent[at + j] != flat[at + j])
            sent[at + j] = value
        pool[MISCOUNTED] += i64(live != counts[group, row]) - i64(sent_counts[group, row] != counts[group, row])
        sent_counts[group, row] = live
    return -1


@compiled(nothing(i64, _SEEN64, i64[::1]))
def numbers(start: int, tokens: Ints, out: Ints) -> None:
    """Write the number of each prefix of a prompt; ``start`` stands for its salt."""
    number = start
    for t in range(tokens.size):
        number = next_number(number, tokens[t])
        out[t] = number


@compiled(nothing(i64[::1], i64[::1], i64[::1], i64[::1], i64[:, ::1], i64[:, ::1], i32[::1], i64[::1], i64[::1]))
def note_contents(
    rows: Ints,
    final: Ints,
    entered: Ints,
    number: Ints,
    tokens: Ints,
    groups: Ints,
    flat: Ints,
    content: Ints,
    indexed: Ints,
) -> None:
    """Note what the blocks wholly below the final marks of rows contain."""
    for i in range(rows.size):
        row = rows[i]
        at = number[row]
        for t in range(entered[row], final[row]):
            at = next_number(at, tokens[row, t])
            for g in range(groups.shape[0]):
                span = groups[g, BLOCK] * groups[g, RANKS]
                if (t + 1) % span == 0 and indexed[row]:
                    block = flat[groups[g, BASE] + row * groups[g, WIDTH] + t // span]
                    if block > 0 and block < content.size:
                        content[block] = at ^ g
        if final[row] > entered[row]:
            entered[row], number[row] = final[row], at


@compiled(i64(*_ROWS, i64[::1], _SEEN64, i64[::1], i64, _STRIDED64, _STRIDED64))
def plain(
    rows: Ints,
    starts: Ints,
    length: Ints,
    final: Ints,
    known: Ints,
    text: Ints,
    is_open: Ints,
    largest: int,
    actual_length: Ints,
    actual_final: Ints,
) -> int:
    """Return 0, or the most tokens of a row, all in use and lengthened by known tokens behind known ones.

    Empty ``text``: by tokens that are not known.
    """
    most = 1
    for i in range(rows.size):
        row, size = rows[i], starts[i + 1] - starts[i]
        if not is_open[row] or length[row] + size > largest or actual_length[row] != length[row] + size:
            return 0
        mark = known[row]
        if text.size:
            if known[row] != length[row]:
                return 0
            mark += size
        if actual_final[row] != max(final[row], mark):
            return 0
        most = max(most, length[row] + size)
    for t in range(text.size):
        if text[t] < 0:
            return 0
    return most


@compiled(nothing(*_ROWS, i64[::1], _SEEN64, i64[:, ::1], i64[:, ::1], i32[::1], i64[::1]))
def note_tokens(
    rows: Ints,
    starts: Ints,
    length: Ints,
    final: Ints,
    known: Ints,
    text: Ints,
    tokens: Ints,
    groups: Ints,
    flat: Ints,
    content: Ints,
) -> None:
    """Note the tokens of a plain call, lengths and marks; a block that is written into contains nothing for now."""
    for i in range(rows.size):
        row, size = rows[i], starts[i + 1] - starts[i]
        begin = length[row]
        for g in range(groups.shape[0]):
            span = groups[g, BLOCK] * groups[g, RANKS]
            if size and begin % span:
                content[flat[groups[g, BASE] + row * groups[g, WIDTH] + begin // span]] = NOTHING
        for t in range(size):
            tokens[row, begin + t] = text[starts[i] + t] if text.size else -1
        length[row] = begin + size
        if text.size:
            known[row] = begin + size
        final[row] = max(final[row], known[row])


@compiled(i64(_SEEN32, i32[::1], i64, i64, i64))
def first_difference(actual: Ints, flat: Ints, base: int, begin: int, end: int) -> int:
    """Return the first entry of a stretch that differs from the copy, or -1."""
    if base < 0 or begin < 0:  # never so: see ``copy_range``
        return -1
    off = 0
    for j in range(end - begin):  # without a way out, so that many are compared at once
        off += actual[begin + j] != flat[base + begin + j]
    if off == 0:
        return -1
    for at in range(begin, end):
        if actual[at] != flat[base + at]:
            return at
    return -1


@compiled(i64(_STRIDED, i64[::1]))
def first_miscounted(actual: Ints, counts: Ints) -> int:
    """Return the first row whose live count differs from the copy, or -1."""
    for row in range(counts.size):
        if actual[row] != counts[row]:
            return row
    return -1
