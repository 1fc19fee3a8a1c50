"""What else waits in a journal: calls that ask for prompts, and what is done once all are written.

Requests that wait are asked for at every step, and looked up before they are admitted: the last prompt's tokens are not put
down again.
"""

from typing import Any

import numba

from blocktable._checksums import Ints, of_values
from blocktable._jit import compiled, helper, i64, nothing, sealed, u64
from blocktable._journal import (
    BEGIN,
    DUE,
    END,
    FIRST,
    FREE,
    HEADROOM,
    LAST,
    LAST_AT,
    LAST_UNKNOWN,
    LIMIT,
    LINE,
    N_CACHED,
    N_ROWS,
    NEXT,
    TOKENS,
    UNKNOWN,
    WAITING,
    count_call,
    has_room,
    of_slots,
    put_down,
    put_line,
)

LONGS = sealed(i64[::1])
_PARTS: Any = numba.types.UniTuple(i64, 4)  # type: ignore[no-untyped-call]
PIECE = 1024  # tokens that are compared before it is seen whether they differ


@helper(i64(LONGS))
def count_unknown(tokens: Ints) -> Any:
    """Return how many tokens are not known."""
    unknown = i64(0)
    for t in range(u64(tokens.size)):  # unsigned: no index counts from the end
        unknown += i64(tokens[t] < 0)
    return unknown


@helper(i64(i64[::1], LONGS))
def are_last(journal: Ints, tokens: Ints) -> Any:
    """Say whether tokens are those of the last prompts."""
    if tokens.size != journal[LAST]:
        return 0
    last, done = journal[journal[LAST_AT] : journal[LAST_AT] + tokens.size], i64(0)
    while done < tokens.size:
        other, end = i64(0), min(done + PIECE, tokens.size)
        for t in range(u64(done), u64(end)):
            other |= tokens[t] ^ last[t]
        if other:
            return 0
        done = end
    return 1


@compiled(i64(i64[::1], i64, i64, *[LONGS] * 3, i64[::1], i64[:, ::1], i64, i64))
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
    """Put a call into the journal; return 0, or how many numbers it is where they have no place: then it is as it was.

    It is more of them once the last prompt, which it may be like, is not there. Tokens that all are known are left out unless
    the ``whole`` call is to be kept.
    """
    begin, again = journal[END], i64(0)
    if kind != FREE:
        again = are_last(journal, tokens)
    unknown = journal[LAST_UNKNOWN] if again else count_unknown(tokens)
    given = tokens.size if whole or unknown else i64(0)
    own = i64(0) if again else given
    numbers = LINE + rows.size + starts.size + own + cached.size
    if not has_room(journal, numbers):
        return numbers
    check = of_slots(of_values(0, cached), slots)
    put_line(journal, begin, kind, rows.size, starts.size, given, cached.size, cached.size + slots.size, check)
    journal[begin + UNKNOWN], journal[begin + LIMIT], journal[begin + HEADROOM] = unknown, limit, headroom
    at = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    put_down(journal, put_down(journal, at, tokens[:own]), cached)
    if kind != FREE and not again:
        journal[LAST_AT], journal[LAST], journal[LAST_UNKNOWN] = at, given, unknown
    journal[begin + TOKENS] = journal[LAST_AT]
    count_call(journal, begin, begin + numbers)
    return 0


@compiled(nothing(i64[::1]))
def clear(journal: Ints) -> None:
    """Begin a journal anew: the last prompts' tokens are kept, if they leave room, since they may be asked for again."""
    at, size = journal[LAST_AT], journal[LAST]
    if 2 * size > journal.size:
        size = journal[LAST_UNKNOWN] = 0
    if at != BEGIN:
        put_down(journal, BEGIN, journal[at : at + size])
    journal[LAST_AT], journal[LAST], journal[WAITING], journal[DUE] = BEGIN, size, 0, 0
    journal[FIRST] = journal[END] = BEGIN + size


@helper(_PARTS(LONGS, i64))
def parts(journal: Ints, at: int) -> Any:
    """Return where the rows, starts, tokens and cached of a call begin."""
    rows = at + LINE
    return rows, rows + journal[at + N_ROWS], journal[at + TOKENS], journal[at + NEXT] - journal[at + N_CACHED]
