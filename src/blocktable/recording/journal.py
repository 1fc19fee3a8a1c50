"""Where the usual calls of a cache wait, one behind the other: a journal of numbers.

Each call is a line that says what it is, where its tokens are, and the checksum of what it returned, then its rows, starts,
tokens, and what it found cached (of a refused one: how it was refused). A commit is a line alone. Requests that wait are asked
for at every step, and looked up before they are admitted: the last prompt's tokens are not put down again.
"""

from typing import Any

import numba

from blocktable._jit import compiled, helper, i64, nothing, sealed
from blocktable.recording.coding import DELTA, of_delta, of_values
from blocktable.recording.identity import Ints

# Kinds, see ``format``
COMMIT, LOOKUP, ADMIT, EXTEND, FREE, REFUSED = 1, 2, 4, 5, 8, 128
# journal[...]: where the first call is, and where the next one goes; how many wait, and how many may; where the last prompts'
# tokens are, how many, and how many of them are not known. From BEGIN on: those of calls that were written, then the calls.
FIRST, END, WAITING, MOST, LAST_AT, LAST, LAST_UNKNOWN, BEGIN = range(8)
# The line of a call: its kind, how many rows, starts, tokens and cached it has, where its tokens are, how many of them are not
# known, limit, headroom; numbers returned, their checksum; where the next line is
KIND, N_ROWS, N_STARTS, N_TOKENS, N_CACHED, TOKENS, UNKNOWN, LIMIT, HEADROOM, RETURNED, CHECK, NEXT = range(12)
LINE = 12
LONGS = sealed(i64[::1])
ROOM = 1 << 17  # numbers that wait at most; a call that is longer does not
_PARTS: Any = numba.types.UniTuple(i64, 4)  # type: ignore[no-untyped-call]
GO_ON, WRITE = 0, -1
PIECE = 1024  # tokens that are compared before it is seen whether they differ


@helper(i64(sealed(i64[:])))
def count_unknown(tokens: Ints) -> Any:
    """Return how many tokens are not known."""
    unknown = i64(0)
    for t in range(tokens.size):
        unknown -= tokens[t] >> 63
    return unknown


@helper(i64(i64[::1], sealed(i64[:])))
def are_last(journal: Ints, tokens: Ints) -> Any:
    """Say whether tokens are those of the last prompts."""
    if tokens.size != journal[LAST]:
        return 0
    at, done = journal[LAST_AT], i64(0)
    while done < tokens.size:
        other, end = i64(0), min(done + PIECE, tokens.size)
        for t in range(done, end):
            other |= tokens[t] ^ journal[at + t]
        if other:
            return 0
        done = end
    return 1


@helper(i64(i64[::1], i64, sealed(i64[:])))
def put_down(journal: Ints, at: int, values: Ints) -> int:
    """Put an array into the journal; return where the next one goes."""
    for j in range(values.size):
        journal[at + j] = values[j]
    return at + values.size


@helper(i64(i64, i64[:, ::1]))
def of_slots(total: int, slots: Ints) -> int:
    """Take slots into a checksum, each group's by themselves."""
    for group in range(slots.shape[0]):
        total = of_values(total, slots[group])
    return total


@helper(i64(i64[::1], i64, i64))
def count_call(journal: Ints, begin: int, end: int) -> Any:
    """Have one call more, from there to there; say whether all are to be written now."""
    journal[begin + NEXT] = journal[END] = end
    journal[WAITING] += 1
    return WRITE if journal[WAITING] >= journal[MOST] else GO_ON


@helper(nothing(i64[::1], i64, *[i64] * 7))
def put_line(
    journal: Ints, at: int, kind: int, rows: int, starts: int, tokens: int, cached: int, returned: int, check: int
) -> None:
    """Put down what a call is; what else is to be said of it is nothing so far."""
    journal[at + KIND], journal[at + RETURNED], journal[at + CHECK] = kind, returned, check
    journal[at + N_ROWS], journal[at + N_STARTS] = rows, starts
    journal[at + N_TOKENS], journal[at + N_CACHED] = tokens, cached
    journal[at + UNKNOWN] = journal[at + HEADROOM] = 0
    journal[at + LIMIT] = -1


@compiled(i64(i64[::1], *DELTA))
def take_commit(journal: Ints, spans: Ints, values: Ints, copies: Ints) -> Any:
    """Put a commit into the journal; return GO_ON, WRITE, or how long the journal has to be, which then is as it was."""
    begin, end = journal[END], journal[END] + LINE
    if end > journal.size:
        return end
    size, check = spans.size + values.size + copies.size, of_delta(0, spans, values, copies)
    put_line(journal, begin, COMMIT, 0, 0, 0, 0, size, check)
    return count_call(journal, begin, end)


@compiled(i64(i64[::1], *[sealed(i64[:])] * 3, i64[:, ::1]))
def take_extend(journal: Ints, rows: Ints, starts: Ints, tokens: Ints, slots: Ints) -> Any:
    """Put an extend into the journal; return what ``take_commit`` does."""
    begin = journal[END]
    end = begin + LINE + rows.size + starts.size + tokens.size
    if end > journal.size:
        return end
    put_line(journal, begin, EXTEND, rows.size, starts.size, tokens.size, 0, slots.size, of_slots(0, slots))
    journal[begin + TOKENS] = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    journal[begin + UNKNOWN] = count_unknown(tokens)
    put_down(journal, journal[begin + TOKENS], tokens)
    return count_call(journal, begin, end)


@compiled(i64(i64[::1], i64, i64, *[sealed(i64[:])] * 3, i64[::1], i64[:, ::1], i64, i64))
def take(
    journal: Ints,
    kind: int,
    whole: int,
    rows: Ints,
    starts: Ints,
    tokens: Ints,
    cached: Ints,
    slots: Ints,
    limit: int,
    headroom: int,
) -> Any:
    """Put another call into the journal; return what ``take_commit`` does.

    Tokens that all are known are left out unless the ``whole`` call is to be kept.
    """
    begin, again = journal[END], i64(0)
    if kind != FREE:
        again = are_last(journal, tokens)
    unknown = journal[LAST_UNKNOWN] if again else count_unknown(tokens)
    given = tokens.size if whole or unknown else i64(0)
    own = i64(0) if again else given
    end = begin + LINE + rows.size + starts.size + own + cached.size
    if end > journal.size:
        return end
    check = of_slots(of_values(0, cached), slots)
    put_line(journal, begin, kind, rows.size, starts.size, given, cached.size, cached.size + slots.size, check)
    journal[begin + UNKNOWN], journal[begin + LIMIT], journal[begin + HEADROOM] = unknown, limit, headroom
    at = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    put_down(journal, put_down(journal, at, tokens[:own]), cached)
    if kind != FREE and not again:
        journal[LAST_AT], journal[LAST], journal[LAST_UNKNOWN] = at, given, unknown
    journal[begin + TOKENS] = journal[LAST_AT]
    return count_call(journal, begin, end)


@compiled(nothing(i64[::1]))
def clear(journal: Ints) -> None:
    """Begin a journal anew: the last prompts' tokens are kept, if they leave room, since they may be asked for again."""
    at, size = journal[LAST_AT], journal[LAST]
    if 2 * size > journal.size:
        size = journal[LAST_UNKNOWN] = 0
    for t in range(size if at != BEGIN else 0):
        journal[BEGIN + t] = journal[at + t]
    journal[LAST_AT], journal[LAST], journal[WAITING] = BEGIN, size, 0
    journal[FIRST] = journal[END] = BEGIN + size


@helper(_PARTS(LONGS, i64))
def parts(journal: Ints, at: int) -> Any:
    """Return where the rows, starts, tokens and cached of a call begin."""
    rows = at + LINE
    return rows, rows + journal[at + N_ROWS], journal[at + TOKENS], journal[at + NEXT] - journal[at + N_CACHED]
