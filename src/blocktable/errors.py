"""Every error of the library: what was broken (a law), by which values, and the way out.

The three travel as attributes too, so that an engine can act on them without parsing text:

>>> error = ArgumentError("row 9 is outside 0..7", law="L2", values={"row": 9, "max_rows": 8}, remedy="raise max_rows")
>>> str(error)
'row 9 is outside 0..7; raise max_rows [L2]'
>>> error.law, error.values["row"], error.remedy
('L2', 9, 'raise max_rows')
"""

from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "BlockTableError",
    "CatalogueError",
    "ConcurrentUse",
    "ContractError",
    "DeltaError",
    "GeometryError",
    "LawBroken",
    "NeverFits",
    "NotCopyable",
    "OutOfBlocks",
    "UnknownName",
]


class BlockTableError(Exception):
    """The base of every error raised here; whatever raised it has changed nothing.

    ``law`` is a law's number such as ``"L2"`` or empty, ``values`` the numbers that met, ``remedy`` the way out.
    """

    def __init__(
        self, message: str, *, law: str = "", values: Mapping[str, object] | None = None, remedy: str = ""
    ) -> None:
        self.message = message
        self.law = law
        self.values = dict(values or {})
        self.remedy = remedy
        super().__init__(message)

    def __getattr__(self, name: str) -> object:
        """Read one of ``values`` as an attribute: ``error.needed`` is ``error.values["needed"]``."""
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        law = f" [{self.law}]" if self.law else ""
        return f"{self.message}{remedy}{law}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields do not survive Exception's own pickling, and errors cross process boundaries.
        return (_rebuild, (type(self), self.message, self.law, self.values, self.remedy))


def _rebuild(
    kind: type[BlockTableError], message: str, law: str, values: dict[str, object], remedy: str
) -> BlockTableError:
    return kind(message, law=law, values=values, remedy=remedy)


class ArgumentError(BlockTableError, ValueError):
    """An argument is out of range, of the wrong shape or type, or contradicts another."""


class GeometryError(ArgumentError):
    """No geometry satisfies these limits and contracts (L1)."""


class ContractError(ArgumentError):
    """A kernel would refuse this table; the message is the text that the kernel itself would raise."""

    def __str__(self) -> str:
        # The bare text of the kernel: users search for it, and an engine's own tests compare it.
        return self.message


class UnknownName(ArgumentError, LookupError):  # noqa: N818 - the public names of this project carry no suffix
    """No contract, engine or version of that name is in the catalogue; the nearest known ones are named."""


class NotCopyable(ArgumentError, TypeError):  # noqa: N818
    """An object that owns live state was to be pickled or copied; the remedy says what to send or keep instead."""


class CatalogueError(BlockTableError):
    """A data file of contracts is wrong; the message names file, line and field."""


class ConcurrentUse(BlockTableError):  # noqa: N818
    """Another call on the same object is in progress: one thread owns an object at a time."""


class OutOfBlocks(BlockTableError):  # noqa: N818
    """The pool is short of blocks for now (L9): ``values`` has needed, available and rows."""


class NeverFits(ArgumentError):  # noqa: N818
    """The request could not be served by an empty pool either: ``values`` has needed, usable and largest (tokens)."""


class DeltaError(BlockTableError):
    """A delta or a snapshot is damaged, repeated, out of order, or of another geometry (L11)."""


class LawBroken(BlockTableError):  # noqa: N818
    """``check()`` found a state that a law forbids: a defect of the library or memory written from outside."""
