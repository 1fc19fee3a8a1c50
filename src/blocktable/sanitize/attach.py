"""Which class takes the place of one that is constructed with ``sanitize``."""

from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

from blocktable._sanitized import joined

T = TypeVar("T")

# By name, so that only what is used is loaded; None: a part of an object that is sanitized as a whole.
_PLACES: dict[tuple[str, str], tuple[str, str] | None] = {
    ("blocktable.cache", "CacheTables"): None,
    ("blocktable.cache", "KVCache"): ("blocktable.sanitize.cache", "SanitizedCache"),
    ("blocktable.device.tables", "DeviceTables"): ("blocktable.sanitize.device", "SanitizedDevice"),
    ("blocktable.replica", "Replica"): ("blocktable.sanitize.replica", "SanitizedReplica"),
    ("blocktable.tables", "BlockTables"): ("blocktable.sanitize.tables", "SanitizedTables"),
}


def sanitized(cls: type[T]) -> type[T]:
    """Return the class that does what ``cls`` does and checks the laws; subclasses of users included.

    >>> from blocktable import BlockTables
    >>> issubclass(sanitized(BlockTables), BlockTables)
    True
    """
    found: Any = _sanitized(cast("Any", cls))
    made: type[T] = found
    return made


@cache
def _sanitized(cls: Any) -> Any:
    for base in cls.__mro__:
        name = base.__module__, base.__qualname__
        if name in _PLACES:
            place = _PLACES[name]
            if place is None:
                return cls
            mixin: Any = getattr(import_module(place[0]), place[1])
            return cls if issubclass(cls, mixin) else joined(cls, base, mixin)
    return cls
