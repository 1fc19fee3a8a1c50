"""Where the usual calls of a recorded cache wait, one behind the other: a journal of numbers, which its loops fill.

Each call is a line that says what it is, where its tokens are, and the checksum of what it returned, then its rows, starts,
tokens, and what it found cached (of a refused one: how it was refused). A commit is a line alone. The loops note extends and
commits themselves, which every step has: a call to do it would cost more than the noting.
"""

from typing import Any

import numpy as np

from blocktable._checksums import DELTA, Ints, behind, of_ids, of_spans, of_values
from blocktable._jit import helper, i32, i64, nothing, sealed, u64

# Kinds, see ``recording.format``
COMMIT, LOOKUP, ADMIT, EXTEND, FREE, REFUSED = 1, 2, 4, 5, 8, 128
# journal[...]: where the first call is, and where the next one goes; how many wait, how many may, and whether they are to be
# written now; where the last prompts' tokens are, how many, and how many of them are not known. From BEGIN on: those of calls
# that were written, then the calls.
FIRST, END, WAITING, MOST, DUE, LAST_AT, LAST, LAST_UNKNOWN, BEGIN = range(9)
# The line of a call: its kind, how many rows, starts, tokens and cached it has, where its tokens are, how many of them are not
# known, limit, headroom; numbers returned, their checksum; where the next line is
KIND, N_ROWS, N_STARTS, N_TOKENS, N_CACHED, TOKENS, UNKNOWN, LIMIT, HEADROOM, RETURNED, CHECK, NEXT = range(12)
LINE = 12
LOW32 = 2**32 - 1
NO_JOURNAL = np.zeros(0, np.int64)
"""Of a cache that is not recorded: nothing is noted."""


class JournalFull(Exception):  # noqa: N818 - no error: the call is made again
    """There is no room for a call, which has changed nothing: what waits is written, and it is made again."""

    def __init__(self, numbers: int) -> None:
        super().__init__(f"the call is {numbers} numbers of a journal")
        self.numbers = numbers


def is_usual(final: Any, salts: Any, partial: Any, headroom: Any) -> bool:
    """Say whether an extend is one that a journal has a place for."""
    return final is None and salts is None and partial is False and type(headroom) is int and headroom == 0


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


@helper(i64(i64, i64[:, ::1]))
def of_slots(total: int, slots: Ints) -> int:
    """Take slots into a checksum, each group's by themselves."""
    for group in range(slots.shape[0]):
        total = of_values(total, slots[group])
    return total


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
    begin, unknown = journal[END], i64(0)
    tokens = starts[rows.size] if each else i64(0)
    put_line(journal, begin, EXTEND, rows.size, starts.size, tokens, 0, slots.size, of_slots(0, slots))
    at = put_down(journal, put_down(journal, begin + LINE, rows), starts)
    journal[begin + TOKENS] = at
    for t in range(tokens):
        token = i64(words[t * each + each - 1])
        unknown -= token >> 63
        if each == 2:
            token = token << 32 | i64(words[2 * t]) & LOW32
        journal[at + t] = token
    journal[begin + UNKNOWN] = unknown
    count_call(journal, begin, at + tokens)
