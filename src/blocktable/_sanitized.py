"""Whether an object is made to be watched: sanitized, recorded, or neither, which costs nothing after construction."""

import os
from typing import Any, Self, TypeVar

T = TypeVar("T")
RECORDERS: list[Any] = []
"""The recordings in progress; the last one takes what is constructed."""


class Sanitizable:
    """What can be made with ``sanitize=True``, or while a recording is in progress."""

    def __new__(cls, *_: Any, sanitize: Any = None, **__: Any) -> Self:
        """Make the object, or one of a class that also checks the laws or records the calls."""
        return object.__new__(chosen(cls, sanitize))


def chosen(cls: type[T], sanitize: Any) -> type[T]:
    """Return the class to make: recorded while a recording is in progress, sanitized where ``sanitize`` asks for it.

    ``sanitize`` None leaves it to BLOCKTABLE_SANITIZE.
    """
    if RECORDERS:
        from blocktable.recording.record import recorded  # noqa: PLC0415 - loaded by whoever began the recording

        made: Any = recorded
        cls = made(cls)
    if sanitize is None:
        sanitize = os.environ.get("BLOCKTABLE_SANITIZE", "")
    if sanitize is False or (not isinstance(sanitize, bool) and sanitize in ("", "0")):
        return cls
    from blocktable.sanitize.attach import sanitized  # noqa: PLC0415 - loaded only where asked for

    return sanitized(cls)
