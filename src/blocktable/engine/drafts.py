"""Guess the next tokens from the sequence itself: what followed the last time its end was seen (prompt lookup)."""

from collections.abc import Sequence

__all__ = ["look_up"]

LONGEST, SHORTEST = 3, 2  # tokens of the end that are looked for
REACH = 1024  # tokens that are looked through, the latest


def look_up(tokens: Sequence[int], most: int) -> list[int]:
    """Return up to ``most`` tokens that followed the latest earlier occurrence of the last tokens.

    >>> look_up([5, 6, 7, 8, 9, 5, 6, 7], 2)
    [8, 9]
    >>> look_up([1, 2, 3], 4)
    []
    """
    if most < 1:
        return []
    recent = list(tokens[-REACH:])
    for size in range(LONGEST, SHORTEST - 1, -1):
        end = recent[-size:]
        for begin in range(len(recent) - size - 1, -1, -1):
            if recent[begin : begin + size] == end:
                return recent[begin + size : begin + size + most]
    return []
