"""Where the usual calls of a recorded cache wait, one behind the other: a journal of numbers, which its loops fill.

Each call is a line that says what it is, where its tokens are, and the checksum of what it returned, then its rows, starts,
tokens, and what it found cached (of a refused one: how it was refused). A commit is a line alone. The loops note their calls
themselves: a call to do it would cost more than the noting. Requests that wait are asked for at every step, and looked up
before they are admitted: the last prompts' tokens are not put down again.
"""

from typing import Any

import numba
import numpy as np

from blocktable._checksums import DELTA, Ints, behind, of_ids, of_spans, of_values
from blocktable._jit import compiled, helper, i32, i64, nothing, sealed, u64

# Kinds, see ``recording.format``
COMMIT, LOOKUP, ADMIT, EXTEND, FREE, REFUSED = 1, 2, 4, 5, 8, 128
# journal[...]: where the first call is, and where the next one goes; how many wait, how many may, and whether they are to be
# written now; where the last prompts' tokens are, how many, and how many of them are not known; are prompts of which all are
# known to be kept too. From BEGIN on: those of calls that were written, then the calls.
FIRST, END, WAITING, MOST, DUE, LAST_AT, LAST, LAST_UNKNOWN, WHOLE, BEGIN = range(10)
# The line of a call: its kind, how many rows, starts, tokens and cached it has, where its tokens are, how many of them are not
# known, limit, headroom; numbers returned, their checksum; where the next line is
KIND, N_ROWS, N_STARTS, N_TOKENS, N_CACHED, TOKENS, UNKNOWN, LIMIT, HEADROOM, RETURNED, CHECK, NEXT = range(12)
LINE = 12
LOW32 = 2**32 - 1
PIECE = 1024  # tokens that are compared before it is seen whether they differ
OUT_OF_BLOCKS = np.frombuffer(b"OutOfBlocks L9", np.uint8).astype(np.int64)
"""How an admit is refused that has to wait."""
LONGS, WORDS = sealed(i64[::1]), sealed(i32[::1])
_PARTS: Any = numba.types.UniTuple(i64, 4)  # type: ignore[no-untyped-call]
NO_JOURNAL = np.zeros(0, np.int64)
"""Of a cache that is not recorded: nothing is noted."""


class JournalFull(Exception):  # noqa: N818 - no error: the call is made again
    """There is no room for a call, which has changed nothing: what waits is written, and it is made again."""

    def __init__(self, numbers: int) -> None:
        super().__init__(
            f"{numbers} numbers: a recorded cache's verbs are called by super(), not as KVCache.verb(self, ...)"
        )
        self.numbers = numbers


def is_usual(final: Any, salts: Any, partial: Any, headroom: Any) -> bool:
    """Say whether an extend is one that a journal has a place for."""
    return final is None and salts is None and partial is False and type(headroom) is int and headroom == 0


def is_usual_admit(salts: Any, limit: Any, final: Any) -> bool:
    """Say whether an admit is one that a journal has a place for."""
    return salts is None and final is None and (limit is None or type(limit) is int)


def is_full(journal: Ints) -> bool:
    """Say whether a journal has no place for a commit."""
    return 0 < journal.size < int(journal[END]) + LINE


@helper(i64(i64[::1], i64, sealed(i64[::1])))
def put_down(journal: Ints, at: int, values: Ints) -> int:
    """Put an array into the journal; return where the next one goes."""
    place = journal[at : at + values.size]
    for j in range(u64(values.size)):  # unsigned: no index counts from the end
        place[j] = values[j]
    return at + values.size


@helper(i64(i64, i64[:, ::1], i64))
def of_slots(total: int, slots: Ints, tokens: int) -> int:
    """Take the slots of so many tokens into a checksum, each group's by themselves."""
    for group in range(slots.shape[0]):
        total = of_values(total, slots[group, :tokens])
    return total


@helper(i64(i64[::1], i64, WORDS, i64, i64))
def put_tokens(journal: Ints, at: int, words: Ints, each: int, tokens: int) -> Any:
    """Put tokens down, each of so many words, the lower one first; return how many of them are not known."""
    place, unknown = journal[at : at + tokens], i64(0)
    if each == 1:
        for t in range(u64(tokens)):
            place[t] = words[t]
            unknown += i64(words[t] < 0)
    else:
        for t in range(u64(tokens)):
            upper = i64(words[t + t + u64(1)])
            place[t] = upper << 32 | i64(words[t + t]) & LOW32
            unknown += i64(upper < 0)
    return unknown


@helper(i64(i64[::1], WORDS, i64, i64))
def are_last(journal: Ints, words: Ints, each: int, tokens: int) -> Any:
    """Say whether tokens are those of the last prompts."""
    if tokens != journal[LAST]:
        return 0
    last, done = journal[journal[LAST_AT] : journal[LAST_AT] + tokens], i64(0)
    while done < tokens:
        other, end = i64(0), min(done + PIECE, tokens)
        if each == 1:
            for t in range(u64(done), u64(end)):
                other |= i64(words[t]) ^ last[t]
        else:
            for t in range(u64(done), u64(end)):
                other |= (i64(words[t + t]) ^ last[t]) & LOW32
                other |= i64(words[t + t + u64(1)]) ^ last[t] >> 32
        if other:
            return 0
        done = end
    return 1


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


@helper(nothing(i64[::1], i64, i64))
def count_call(journal: Ints, begin: int, end: int) -> None:
    """Have one call more, from there to there."""
    journal[begin + NEXT] = journal[END] = end
    journal[WAITING] += 1
    if journal[WAITING] >= journal[MOST]:
        journal[DUE] = 1


@helper(i64(i64[::1], i64))
def has_room(journal: Ints, numbers: int) -> Any:
    """Say whether so many numbers have a place; without a journal none is needed."""
    return i64(journal.size == 0 or journal[END] + numbers <= journal.size)


@helper(nothing(i64[::1], *DELTA[:2]))
def note_commit(journal: Ints, spans: Ints, values: Ints) -> None:
    """Note a commit, for which there is room."""
    begin = journal[END]
    check = of_ids(of_spans(0, spans), values)
    put_line(journal, begin, COMMIT, 0, 0, 0, 0, spans.size + values.size, check)
    count_call(journal, begin, begin + LINE)


@helper(nothing(i64[::1], sealed(i32[:])))
def note_copies(journal: Ints, copies: Ints) -> None:
    """Note that the commit of the last line also returned copies."""
    line = journal[END] - LINE
    journal[line + CHECK] = behind(journal[line + CHECK], of_ids(0, copies), copies.size)
    journal[line + RETURNED] += copies.size


@helper(nothing(i64[::1], i64[::1], i64[::1], sealed(i32[::1]), i64, i64[:, ::1]))
def note_extend(journal: Ints, rows: Ints, starts: Ints, words: Ints, each: int, slots: Ints) -> None:
    """Note an extend, for which there is room; each token is so many words, the lower one first, none: not known."""
    begin = journal[END]
    tokens = starts[rows.size] if each else i64(0)
    put_line(journal, begin, EXTEND, rows.size, starts.size, tokens, 0, slots.size, of_slots(0, slots, slots.shape[1]))
    at = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    journal[begin + TOKENS] = at
    if tokens:
        journal[begin + UNKNOWN] = put_tokens(journal, at, words, each, tokens)
    count_call(journal, begin, at + tokens)


@helper(i64(i64[::1], i64[::1]))
def room_of_prompts(rows: Ints, starts: Ints) -> Any:
    """Return how many numbers a call that asks for prompts is, at most."""
    return LINE + rows.size + starts.size + starts[starts.size - 1] + max(starts.size - 1, OUT_OF_BLOCKS.size)


@helper(nothing(i64[::1], i64, i64[::1], i64[::1], WORDS, i64, LONGS, i64[:, ::1], i64, i64, i64))
def note_prompts(
    journal: Ints,
    kind: int,
    rows: Ints,
    starts: Ints,
    words: Ints,
    each: int,
    cached: Ints,
    slots: Ints,
    computed: int,
    limit: int,
    headroom: int,
) -> None:
    """Note a lookup, an admit, or an admit that was refused (``cached``: how), for which there is room."""
    begin, tokens = journal[END], starts[starts.size - 1]
    at = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    given, unknown = journal[LAST], journal[LAST_UNKNOWN]
    if not are_last(journal, words, each, tokens):
        unknown = put_tokens(journal, at, words, each, tokens)
        given = tokens if journal[WHOLE] or unknown else i64(0)
        journal[LAST_AT], journal[LAST], journal[LAST_UNKNOWN] = at, given, unknown
        at += given
    check = of_slots(of_values(0, cached), slots, computed)
    returned = cached.size + slots.shape[0] * computed
    put_line(journal, begin, kind, rows.size, starts.size, given, cached.size, returned, check)
    journal[begin + TOKENS], journal[begin + UNKNOWN] = journal[LAST_AT], unknown
    journal[begin + LIMIT], journal[begin + HEADROOM] = limit, headroom
    count_call(journal, begin, put_down(journal, at, cached))


@helper(nothing(i64[::1], i64[::1]))
def note_free(journal: Ints, rows: Ints) -> None:
    """Note a free, for which there is room."""
    begin = journal[END]
    put_line(journal, begin, FREE, rows.size, 0, 0, 0, 0, 0)
    journal[begin + TOKENS] = journal[LAST_AT]
    count_call(journal, begin, put_down(journal, begin + LINE, rows))


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
