"""What calls are given, as fields of a record: integers as tables and caches take them.

Unreadable is what they refuse: it is left out, since a replay would make a lawful call of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable._arrays import as_int64, is_integer
from blocktable._cache_layout import NO_LIMIT
from blocktable.errors import ArgumentError
from blocktable.recording.format import NONE
from blocktable.recording.identity import Ints
from blocktable.sanitize.reading import Unreadable

# What an argument of a verb of tables is: so many arrays, one per group, or
ARRAY, INTEGER, NO_GROUP = -1, -2, -3


def fields_of(arguments: Sequence[Any]) -> list[Ints]:
    """Return the arguments of a verb of tables as fields: what each is, then the arrays and integers; else Unreadable."""
    what: list[int] = []
    fields: list[Ints] = []
    for argument in arguments:
        several = isinstance(argument, (tuple, list)) and not all(map(is_integer, argument))
        parts = argument if several else [argument]
        found = [
            np.array([whole(part)]) if is_integer(part) and not several else exact(part)
            for part in parts
            if part is not None
        ]
        if several:
            what.append(len(found))
        else:
            what.append(NO_GROUP if argument is None else INTEGER if is_integer(argument) else ARRAY)
        fields += found
    return [np.array(what, np.int64), *fields]


def exact(value: Any) -> Ints:
    """Return integers as tables and caches take them; Unreadable for what they refuse."""
    try:
        return as_int64(value, "")
    except ArgumentError:
        raise Unreadable from None


def whole(value: Any) -> int:
    """Return an integer as tables and caches take it; Unreadable for what they refuse."""
    if not is_integer(value) or not -(2**63) <= value < 2**63:
        raise Unreadable
    return int(value)


def cut(indptr: Any, tokens: Any, rows: Ints | None = None) -> tuple[Ints, Ints]:
    """Return indptr and tokens, none where not known; Unreadable where they do not belong together: only sizes are recorded."""
    starts, text = exact(indptr), NONE if tokens is None else exact(tokens)
    if not starts.size or starts[0] or (tokens is not None and starts[-1] != text.size):
        raise Unreadable
    if (starts[1:] < starts[:-1]).any() or (rows is not None and starts.size != rows.size + 1):
        raise Unreadable
    if text.size and text.min() < -1:  # written as -1, which is a token that is not known
        raise Unreadable
    return starts, text


def least(*values: Any) -> list[int]:
    """Return numbers, of which the larger ones all mean the same to a cache."""
    return [whole(min(value, NO_LIMIT) if is_integer(value) else value) for value in values]


def one_of(value: Any) -> Ints | None:
    """Return an integer as a field."""
    return None if value is None else np.array([whole(value)], np.int64)


def unknown_of(text: Ints) -> Ints | None:
    """Return where tokens are -1, None where they all are known."""
    if not text.size or text.min() >= 0:
        return None
    return np.flatnonzero(text < 0)
