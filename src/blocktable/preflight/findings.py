"""One comparison of the catalogue with an engine."""

from typing import NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """What was compared: ``differs`` is empty where both say the same, ``skipped`` says why nothing could be compared."""

    engine: str
    subject: str
    differs: str = ""
    skipped: str = ""
