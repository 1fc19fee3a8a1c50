"""Which prefixes are equal, without saying what they are.

A replay needs no tokens: caches ask only whether two prompts begin alike, unit by unit. So a recording numbers the units
in the order in which they were first seen, each behind its own history and salt, and a replay makes up tokens: unit n is
the token n throughout. Nothing of the text is left but which prefixes are shared. Records count units back from those seen
before the call, so that new ones are 0, 1, 2, ... there.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._jit import compiled, helper, i64, nothing, sealed
from blocktable._prefix_numbers import number_behind

Ints = NDArray[Any]

# lines[row, ...]: tokens whose units are numbered, the number of that prefix, and of the salt; is the row in use; tokens
# held, and how many of them are final
DONE, NUMBER, SALT, USED, LENGTH, FINAL = range(6)
LINE = 8  # numbers: rows as long as a power of two would all fall on the same lines of a processor's cache
NO_SALT = 2  # the number that a prompt without a salt begins with
# counts[...]: tokens of a unit, units seen; of the last prompt the number that it began with, how much of it is kept, and where
# its tokens are, for whoever has them
UNIT, SEEN, BEGUN, KEPT, PLACE = range(5)
NOWHERE = -1
# kept[...]: the last prompt's tokens; of each of its units the number of the prefix, and the unit
TEXT, PREFIX, FOUND = range(3)
_TABLE = (i64[:, ::1], i64[::1])
OWN = (i64[:, ::1], i64[:, ::1], *_TABLE)  # tokens [rows, most], lines, table, counts


@helper(i64(*_TABLE, i64))
def unit_of(table: Ints, counts: Ints, number: int) -> Any:
    """Return which unit a prefix ends with, as it was numbered when first seen."""
    mask = table.shape[0] - 1
    at = (number ^ (number >> 31)) & mask
    while table[at, 1] and table[at, 0] != number:
        at = (at + 1) & mask
    if table[at, 1] == 0:
        counts[SEEN] += 1
        table[at, 0], table[at, 1] = number, counts[SEEN]
    return table[at, 1] - 1


@helper(i64(i64, sealed(i64[::1]), i64, i64[:, ::1], *_TABLE, i64[::1], i64))
def number_units(
    number: int, tokens: Ints, again: int, kept: Ints, table: Ints, counts: Ints, out: Ints, at: int
) -> Any:
    """Write the unit that each prefix of whole units ends with, from the salt's number; return how many they are.

    As far as the prompt begins like the last one, it was numbered then: requests that wait are asked for at every step.
    ``again``: it is known to do so, as far as both go.
    """
    unit = counts[UNIT]
    units, same = tokens.size // unit, i64(0)
    if number == counts[BEGUN]:
        most = min(units * unit, counts[KEPT])
        if again:
            same = most
        while same < most and tokens[same] == kept[TEXT, same]:
            same += 1
    counts[BEGUN], counts[KEPT], counts[PLACE] = number, units * unit, NOWHERE
    first = same // unit
    if first:
        number = kept[PREFIX, first - 1]
    for n in range(first, units):
        number = number_behind(number, tokens[n * unit : n * unit + unit])
        kept[PREFIX, n] = number
    for t in range(first * unit, units * unit):
        kept[TEXT, t] = tokens[t]
    for n in range(first, units):  # by themselves, so that the processor fetches many at once
        kept[FOUND, n] = unit_of(table, counts, kept[PREFIX, n])
    for n in range(units):
        out[at + n] = kept[FOUND, n]
    return units


@compiled(i64(i64, sealed(i64[::1]), i64[:, ::1], *_TABLE, i64[::1]))
def number_prompt(number: int, tokens: Ints, kept: Ints, table: Ints, counts: Ints, out: Ints) -> Any:
    """Write the units of one prompt; return how many they are."""
    return number_units(number, tokens, 0, kept, table, counts, out, 0)


@compiled(i64(i64, sealed(i64[::1])))
def prefix_number(number: int, tokens: Ints) -> int:
    """Return the number of a prefix, begun with the salt's."""
    return number_behind(number, tokens)


@compiled(nothing(i64[::1], i64[::1], i64[::1], sealed(i64[::1]), i64[:, ::1]))
def keep(rows: Ints, begin: Ints, starts: Ints, text: Ints, tokens: Ints) -> None:
    """Write the tokens of a call behind those that rows have; -1 keeps what is there."""
    for i in range(rows.size):
        for t in range(starts[i + 1] - starts[i]):
            token = text[starts[i] + t] if text.size else -1
            tokens[rows[i], begin[i] + t] = token


@helper(i64(sealed(i64[::1]), i64[:, ::1], i64[::1]))
def count_finished(rows: Ints, lines: Ints, counts: Ints) -> Any:
    """Return how many units of rows have come to lie below the final marks."""
    total = i64(0)
    for i in range(rows.size):
        row = rows[i]
        if lines[row, USED] and lines[row, FINAL] > lines[row, DONE]:
            total += (lines[row, FINAL] - lines[row, DONE]) // counts[UNIT]
    return total


@helper(nothing(sealed(i64[::1]), *OWN, i64[::1], i64, i64))
def number_finished(
    rows: Ints, tokens: Ints, lines: Ints, table: Ints, counts: Ints, out: Ints, at_rows: int, at_units: int
) -> None:
    """Write the row and the unit, counted back, of each that has come to lie below its row's final mark."""
    seen, unit, k = counts[SEEN], counts[UNIT], i64(0)
    for i in range(rows.size):
        row = rows[i]
        if not lines[row, USED]:
            continue
        number, done = lines[row, NUMBER], lines[row, DONE]
        while done + unit <= lines[row, FINAL]:
            number = number_behind(number, tokens[row, done : done + unit])
            done += unit
            out[at_rows + k], out[at_units + k] = row, number
            k += 1
        lines[row, NUMBER], lines[row, DONE] = number, done
    for j in range(at_units, at_units + k):  # by themselves, as above
        out[j] = unit_of(table, counts, out[j]) - seen


@compiled(i64(i64[::1], *OWN, i64[::1]))
def finished(rows: Ints, tokens: Ints, lines: Ints, table: Ints, counts: Ints, out: Ints) -> Any:
    """Write rows and units that have become final, one half of ``out`` each; return how many, ~n where n do not fit."""
    total = count_finished(rows, lines, counts)
    if 2 * total > out.size or 2 * (counts[SEEN] + total) > table.shape[0]:
        return ~total
    number_finished(rows, tokens, lines, table, counts, out, 0, total)
    return total


class Identity:
    """The units of one cache's rows, numbered as they come to lie below the final marks; 32 bytes for each seen.

    With unit 0 nothing is numbered: the cache answers for no prefix.
    """

    def __init__(self, rows: int, unit: int) -> None:
        self.unit = unit
        self.tokens = np.zeros((rows, 64 + LINE), np.int64)
        self.lines = np.zeros((rows, 8), np.int64)
        self.lines[:, SALT] = NO_SALT
        self.table = np.zeros((1 << 12, 2), np.int64)
        self.counts = np.array([unit, 0, 0, 0, NOWHERE], np.int64)
        self.kept = np.zeros((3, 1 << 12), np.int64)
        self.rows = np.arange(rows)
        self._out = np.zeros(4096, np.int64)

    def follow(self, lengths: Any, final: Any) -> None:
        """Note what all rows hold, and how much of it is final."""
        self.lines[:, LENGTH], self.lines[:, FINAL] = lengths, final

    def open(self, row: int, salt: bytes | None, prefix: Ints) -> None:
        """Begin a row anew under a salt, with the whole units that were found cached."""
        number = salt_number(salt)
        self.room(prefix.size)
        self.tokens[row, : prefix.size] = prefix
        found = prefix_number(number, np.ascontiguousarray(prefix))
        self.lines[row, :LENGTH] = prefix.size, found, number, 1

    def close(self, rows: Ints) -> None:
        """Rows are not in use any more."""
        self.lines[rows, USED] = 0

    def room(self, tokens: int) -> None:
        """Have room for rows so long."""
        if tokens > self.tokens.shape[1]:
            columns = -(-max(tokens, 2 * self.tokens.shape[1]) // 64) * 64 + LINE
            self.tokens = _wider(self.tokens, columns)

    def room_for_prompt(self, tokens: int) -> None:
        """Have room to keep a prompt so long."""
        if tokens > self.kept.shape[1]:
            self.kept = _wider(self.kept, 2 * tokens)

    def room_for_units(self, more: int) -> None:
        """Have room to number so many more."""
        if 2 * (int(self.counts[SEEN]) + more) <= len(self.table):
            return
        old = self.table[self.table[:, 1] > 0]
        old = old[np.argsort(old[:, 1])]
        self.table = np.zeros((1 << (4 * (len(old) + more)).bit_length(), 2), np.int64)
        self.counts[SEEN] = 0
        renumber(np.ascontiguousarray(old[:, 0]), self.table, self.counts)

    def write(self, rows: Ints, begin: Ints, starts: Ints, text: Ints) -> None:
        """Keep the tokens of a call, empty ``text``: not known."""
        if rows.size:
            self.room(int((begin + np.diff(starts)).max()))
            keep(rows, begin, starts, text, self.tokens)

    def confirm(self, row: int, begin: int, tokens: Ints) -> None:
        """Put tokens in place of those that a row holds from a position on; -1 keeps one."""
        held = self.tokens[row, begin : begin + tokens.size]
        held[tokens >= 0] = tokens[tokens >= 0]

    def cut(self, row: int, length: int) -> None:
        """Shorten a row: units beyond may come again with other tokens."""
        if self.lines[row, DONE] <= length:
            return
        whole = length // self.unit * self.unit
        self.lines[row, DONE] = whole
        self.lines[row, NUMBER] = prefix_number(int(self.lines[row, SALT]), self.tokens[row, :whole])

    def fork(self, row: int, into: int) -> None:
        """Let a row be what another is."""
        self.tokens[into], self.lines[into] = self.tokens[row], self.lines[row]

    def units(self, tokens: Ints, salt: bytes | None) -> Ints:
        """Return the numbers of a prompt's whole units, new ones included."""
        found = np.empty(tokens.size // self.unit, np.int64)
        self.room_for_units(found.size)
        self.room_for_prompt(tokens.size)
        number_prompt(
            salt_number(salt), np.ascontiguousarray(tokens, np.int64), self.kept, self.table, self.counts, found
        )
        return found

    def finished(self, rows: Ints) -> tuple[Ints, Ints] | None:
        """Return rows and units, counted back, that have become final since the last call, None where there are none."""
        while (n := finished(rows, self.tokens, self.lines, self.table, self.counts, self._out)) < 0:
            self.room_for_units(~n)
            self._out = np.zeros(max(2 * ~n, self._out.size), np.int64)
        return (self._out[:n].copy(), self._out[n : 2 * n].copy()) if n else None


@compiled(nothing(i64[::1], *_TABLE))
def renumber(numbers: Ints, table: Ints, counts: Ints) -> None:
    """Put prefixes into a larger table, in the order in which they were first seen."""
    for j in range(numbers.size):
        unit_of(table, counts, numbers[j])


def _wider(array: Ints, columns: int) -> Ints:
    wider = np.zeros((len(array), columns), np.int64)
    wider[:, : array.shape[1]] = array
    return wider


def salt_number(salt: bytes | None) -> int:
    """Return the number that a prompt begins with under a salt."""
    return hash(salt) & (2**62 - 1) if salt else NO_SALT
