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


class _Unseen:
    """A class made of a user's is none of his: his ``__init_subclass__`` is not told of it."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def joined(cls: Any, base: Any, mixin: Any, **more: Any) -> Any:
    """Return the class that does what ``cls`` does, with the mixin's verbs in front of those of ``base``, which it has.

    Those of a user's subclass stay in front: what they call, and in which order, is seen as it is done.
    """
    made = type(base.__name__, (mixin, base), {"__module__": base.__module__, "_made_of": base, **more})
    if cls is base:
        return made
    bases = (cls, made) if issubclass(cls, _Unseen) else (_Unseen, cls, made)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "_made_of": cls})


def plain(cls: Any) -> Any:
    """Return the class that one which is recorded or sanitized was made of."""
    while "_made_of" in vars(cls):
        cls = cls._made_of
    return cls


def chosen(cls: type[T], sanitize: Any) -> type[T]:
    """Return the class to make: recorded while a recording is in progress, sanitized where ``sanitize`` asks for it.

    ``sanitize`` None leaves it to BLOCKTABLE_SANITIZE.
    """
    if RECORDERS:
        from blocktable.recording.recorded import recorded  # noqa: PLC0415 - loaded by whoever began the recording

        made: Any = recorded
        cls = made(cls)
    if sanitize is None:
        sanitize = os.environ.get("BLOCKTABLE_SANITIZE", "")
    if sanitize is False or (not isinstance(sanitize, bool) and sanitize in ("", "0")):
        return cls
    from blocktable.sanitize.attach import sanitized  # noqa: PLC0415 - loaded only where asked for

    return sanitized(cls)
