"""Units that begin alike and go on apart, as after a fork or a cut within one: which tokens a replay makes up for them.

A replay writes the number of a unit for each of its tokens. A row that was forked within a unit holds the beginning of another
one's, so what it completes is told from its number alone no more; a pass over all calls finds what it holds then.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class Texts:
    """What the rows of recorded caches hold, followed call by call, to learn what units consist of."""

    def __init__(self) -> None:
        self.units: dict[
            tuple[int, int], list[int]
        ] = {}  # by object and number, of which each token is not the number itself
        self._held: dict[tuple[int, int], list[int]] = {}  # by object and row

    def follow(self, number: int, verb: str, args: Sequence[Any], lengths: Mapping[int, int]) -> None:
        """Follow a call that was done; ``lengths`` are those of rows after it."""
        if verb == "fork":
            row, into = args
            self._held[number, into] = list(self._held.get((number, row), ()))
        if verb not in ("admit", "match", "extend", "confirm", "truncate", "free"):
            return
        for i, row in enumerate(args[0].tolist()):
            held = self._held.setdefault((number, row), [])
            if verb in ("truncate", "free"):
                del held[lengths.get(row, 0) :]
                continue
            starts, text = args[-2:]
            known = text is not None and len(args) > 2
            part = text[starts[i] : starts[i + 1]].tolist() if known else []
            if verb in ("admit", "match"):
                held[:] = part[: lengths[row]]
            elif verb == "extend":
                size = lengths.get(row, 0) - len(held)
                held += part[:size] if known else [-1] * size
            elif known:
                mark = int(args[1][i])
                begin = mark - len(part)
                held[begin:mark] = [new if new >= 0 else old for new, old in zip(part, held[begin:mark], strict=True)]

    def finished(self, number: int, row: int, begin: int, size: int, name: int) -> None:
        """Note a unit that has become final: it lies in a row from a position on."""
        held = self._held.get((number, row), [])[begin : begin + size]
        if len(held) == size and min(held) >= 0 and held != [name] * size:
            self.units.setdefault((number, name), held)
