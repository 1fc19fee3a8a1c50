"""Which prefixes are equal, without saying what they are.

A replay needs no tokens: caches ask only whether two prompts begin alike, unit by unit. So a recording numbers the units
in the order in which they were first seen, each behind its own history and salt, and a replay makes up tokens: unit n is
the token n throughout. Nothing of the text is left but which prefixes are shared.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._jit import compiled, i64, nothing, sealed
from blocktable.sanitize.usual import next_number

Ints = NDArray[Any]


@compiled(nothing(i64, sealed(i64[::1]), i64, i64[::1]))
def prefixes(number: int, tokens: Ints, unit: int, out: Ints) -> None:
    """Write the number of each prefix of whole units, begun with the salt's."""
    for n in range(out.size):
        for t in range(n * unit, n * unit + unit):
            number = next_number(number, tokens[t])
        out[n] = number


@compiled(
    i64(i64[::1], sealed(i64[:]), i64[::1], i64[::1], i64[:, ::1], i64, i64[::1], i64[::1]),
)
def completed(
    rows: Ints, final: Ints, done: Ints, number: Ints, tokens: Ints, unit: int, out_rows: Ints, out_numbers: Ints
) -> int:
    """Write the row and the number of each unit that has come to lie below its row's final mark; return how many.

    Stops when there is no more room; the caller calls again.
    """
    count = 0
    for i in range(rows.size):
        row = rows[i]
        at = number[row]
        while done[row] + unit <= final[row] and count < out_rows.size:
            for t in range(done[row], done[row] + unit):
                at = next_number(at, tokens[row, t])
            done[row] += unit
            number[row] = at
            out_rows[count], out_numbers[count] = row, at
            count += 1
    return count


@compiled(nothing(i64[::1], i64[::1], i64[::1], sealed(i64[::1]), i64[:, ::1]))
def keep(rows: Ints, begin: Ints, starts: Ints, text: Ints, tokens: Ints) -> None:
    """Write the tokens of a call behind those that rows have; -1 keeps what is there."""
    for i in range(rows.size):
        for t in range(starts[i + 1] - starts[i]):
            token = text[starts[i] + t] if text.size else -1
            tokens[rows[i], begin[i] + t] = token


class Identity:
    """The units of one cache's rows, numbered as they come to lie below the final marks."""

    def __init__(self, rows: int, unit: int) -> None:
        self.unit = unit
        self._seen: dict[int, int] = {}
        self._tokens = np.zeros((rows, 64), np.int64)
        self._done = np.zeros(rows, np.int64)
        self._number = np.zeros(rows, np.int64)
        self._salt = np.full(rows, 2, np.int64)
        self.used = np.zeros(rows, bool)
        self._rows, self._numbers = np.zeros(4096, np.int64), np.zeros(4096, np.int64)

    def open(self, row: int, salt: bytes | None, prefix: Ints) -> None:
        """Begin a row anew under a salt, with the whole units that were found cached."""
        self.used[row] = True
        self._salt[row] = salt_number(salt)
        found = np.empty(prefix.size // self.unit, np.int64)
        prefixes(int(self._salt[row]), np.ascontiguousarray(prefix), self.unit, found)
        self.room(prefix.size)
        self._tokens[row, : prefix.size] = prefix
        self._done[row], self._number[row] = prefix.size, found[-1] if found.size else self._salt[row]

    def room(self, tokens: int) -> None:
        """Have room for rows so long."""
        if tokens > self._tokens.shape[1]:
            wider = np.zeros((len(self._tokens), max(tokens, 2 * self._tokens.shape[1])), np.int64)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = wider

    def write(self, rows: Ints, begin: Ints, starts: Ints, text: Ints) -> None:
        """Keep the tokens of a call, empty ``text``: not known."""
        if rows.size:
            self.room(int((begin + np.diff(starts)).max()))
            keep(rows, begin, starts, text, self._tokens)

    def confirm(self, row: int, begin: int, tokens: Ints) -> None:
        """Put tokens in place of those that a row holds from a position on; -1 keeps one."""
        held = self._tokens[row, begin : begin + tokens.size]
        held[tokens >= 0] = tokens[tokens >= 0]

    def cut(self, row: int, length: int) -> None:
        """Shorten a row: units beyond may come again with other tokens."""
        if self._done[row] <= length:
            return
        whole = length // self.unit
        found = np.empty(whole, np.int64)
        prefixes(int(self._salt[row]), self._tokens[row, : whole * self.unit], self.unit, found)
        self._done[row] = whole * self.unit
        self._number[row] = found[-1] if whole else self._salt[row]

    def fork(self, row: int, into: int) -> None:
        """Let a row be what another is."""
        for array in (self._tokens, self._done, self._number, self._salt, self.used):
            array[into] = array[row]

    def symbols(self, tokens: Ints, salt: bytes | None) -> Ints:
        """Return the numbers of a prompt's whole units, new ones included."""
        found = np.empty(tokens.size // self.unit, np.int64)
        prefixes(salt_number(salt), np.ascontiguousarray(tokens, np.int64), self.unit, found)
        return self._numbered(found)

    def finished(self, rows: Ints, final: Any) -> tuple[Ints, Ints]:
        """Return rows and numbers of the units that have become final since the last call, in order."""
        count = completed(rows, final, self._done, self._number, self._tokens, self.unit, self._rows, self._numbers)
        if not count:
            return self._rows[:0], self._rows[:0]
        found, numbers = self._rows[:count].copy(), self._numbered(self._numbers[:count])
        if count == self._rows.size:
            more = self.finished(rows, final)
            return np.concatenate([found, more[0]]), np.concatenate([numbers, more[1]])
        return found, numbers

    def _numbered(self, numbers: Ints) -> Ints:
        seen = self._seen
        return np.array([seen.setdefault(number, len(seen)) for number in numbers.tolist()], np.int64)


def salt_number(salt: bytes | None) -> int:
    """Return the number that a prompt begins with under a salt."""
    return hash(salt) & (2**62 - 1) if salt else 2
