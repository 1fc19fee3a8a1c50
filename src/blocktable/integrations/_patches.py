"""Names of an engine that a plugin replaces, each remembered so that it can be put back."""

from collections.abc import Callable
from typing import Any

__all__ = ["replace", "undo", "wrap"]

_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> Any:
    """Put ``new`` in the place of ``owner.name`` and return what was there."""
    old = getattr(owner, name)
    _replaced.append((owner, name, old))
    setattr(owner, name, new)
    return old


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Make ``owner.name(...)`` call ``around(original, ...)``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped.__name__, wrapped.__doc__ = name, original.__doc__
    replace(owner, name, wrapped)


def undo() -> None:
    """Put everything back, the last replacement first.

    >>> from types import SimpleNamespace
    >>> engine = SimpleNamespace(add=lambda a, b: a + b)
    >>> wrap(engine, "add", lambda original, a, b: -original(a, b))
    >>> engine.add(1, 2), undo(), engine.add(1, 2)
    (-3, None, 3)
    """
    while _replaced:
        owner, name, old = _replaced.pop()
        setattr(owner, name, old)
