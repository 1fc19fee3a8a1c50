"""Whether an object is made to check the laws at each call: the only thing that the classes themselves know of it."""

import os
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Sanitizable:
    """What can be made with ``sanitize=True``, or with BLOCKTABLE_SANITIZE=1 in the environment."""

    def __new__(cls, *_: Any, sanitize: Any = None, **__: Any) -> Self:
        """Make the object, or one of the class that also checks the laws."""
        return object.__new__(chosen(cls, sanitize))


def chosen(cls: type[T], sanitize: Any) -> type[T]:
    """Return the class to make: the sanitized one where ``sanitize``, or else BLOCKTABLE_SANITIZE, asks for it.

    What is not asked for costs this question at construction, and nothing afterwards.
    """
    if sanitize is None:
        sanitize = os.environ.get("BLOCKTABLE_SANITIZE", "")
    if not isinstance(sanitize, bool) and sanitize in ("", "0"):
        return cls
    if sanitize is False:
        return cls
    from blocktable.sanitize.attach import sanitized  # noqa: PLC0415 - loaded only where asked for

    return sanitized(cls)
