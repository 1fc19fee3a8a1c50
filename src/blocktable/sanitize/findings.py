"""What a sanitizer says: a finding names the law, the place in the tables, and the two operations that met there."""

import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, get_args

from blocktable._sanitized import RECORDERS
from blocktable.errors import ArgumentError, LawBroken

__all__ = ["MODES", "Finding", "Log", "Mode", "Operation", "Report"]

Mode = Literal["raise", "log", "count"]
MODES: tuple[str, ...] = get_args(Mode)
caller = sys._getframe  # noqa: SLF001 - nothing else names the line that called
KEPT = 1000  # findings; beyond, they are only counted
LOGGER = logging.getLogger("blocktable.sanitize")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: the step it belongs to (commits so far), the verb, and the line that called it."""

    step: int
    verb: str
    file: str
    line: int

    def __str__(self) -> str:
        """Say it as one would look it up: ``extend at step 7 (engine.py:120)``."""
        return f"{self.verb} at step {self.step} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True, slots=True)
class Finding:
    """A law that does not hold. ``group``, ``row``, ``column`` and ``block`` are -1 where they say nothing.

    ``operation`` is the call after which the law was broken, ``touched`` the one that last wrote the entry (or block)
    before, None where nobody had or it is too long ago to be remembered.
    """

    law: str
    message: str
    operation: Operation | None
    group: int = -1
    row: int = -1
    column: int = -1
    block: int = -1
    touched: Operation | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        names = ("group", "row", "column", "block")
        place = ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) >= 0)
        after = f", found after {self.operation}" if self.operation else ""
        before = f"; last touched by {self.touched}" if self.touched else ""
        return f"[{self.law}] {self.message}{f' ({place})' if place else ''}{after}{before}"


class Report:
    """Where findings go. ``raise`` raises LawBroken at the first, ``log`` logs an error for each, ``count`` stays silent.

    In every mode ``findings`` keeps the first thousand and ``counts`` counts them by law.

    >>> report = Report("count")
    >>> report.add(Finding("L4", "a stale tail", Operation(0, "append", "engine.py", 7), group=0, row=2, column=5))
    >>> report.counts, str(report.findings[0])
    (Counter({'L4': 1}), '[L4] a stale tail (group 0, row 2, column 5), found after append at step 0 (engine.py:7)')
    """

    def __init__(self, mode: str = "raise") -> None:
        if mode not in MODES:
            raise ArgumentError(
                f"there is no sanitizer mode {mode!r}", values={"mode": mode}, remedy=f"use one of {', '.join(MODES)}"
            )
        self.mode = mode
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()

    @classmethod
    def of(cls, sanitize: Any) -> "Report":
        """Return the report that ``sanitize`` asks for: True, a mode, a Report, or None for BLOCKTABLE_SANITIZE's mode."""
        if isinstance(sanitize, Report):
            return sanitize
        asked = os.environ.get("BLOCKTABLE_SANITIZE", "") if sanitize is None else sanitize
        return cls("raise" if asked in (True, "1", "") else asked)  # "": the class itself asks for it

    def __len__(self) -> int:
        """Return how many findings there were."""
        return self.counts.total()

    def add(self, finding: Finding) -> None:
        """Take a finding: raise, log or count it."""
        for recorder in RECORDERS:  # what led to it is to be in the file, whatever happens next
            recorder.flush()
        self.counts[finding.law] += 1
        if len(self.findings) < KEPT:
            self.findings.append(finding)
        if self.mode == "log":
            LOGGER.error("%s", finding)
        if self.mode == "raise":
            fields = ("group", "row", "column", "block")
            raise LawBroken(
                f"sanitizer: {finding}",
                law=finding.law,
                values={"finding": finding} | {name: getattr(finding, name) for name in fields},
                remedy="the operation named first broke the law; docs/sanitizer.md tells how to read this",
            )

    def __repr__(self) -> str:
        """Say how many of what."""
        found = ", ".join(f"{law} {count}" for law, count in sorted(self.counts.items())) or "nothing"
        return f"<sanitizer report, mode {self.mode}: {found}>"


class Log:
    """The last calls, by number; those longer ago than it can hold are forgotten, so that it never grows."""

    ROOM = 1 << 16

    def __init__(self) -> None:
        self.last = -1
        self._calls: list[tuple[int, str, CodeType, int] | None] = [None] * self.ROOM

    def add(self, step: int, verb: str, frame: FrameType) -> int:
        """Note a call and return its number; it is put into words only when a finding names it."""
        self.last += 1
        self._calls[self.last % self.ROOM] = step, verb, frame.f_code, frame.f_lineno
        return self.last

    def operation(self, number: int) -> Operation | None:
        """Return a call in words, None where it was never made or is forgotten."""
        call = self._calls[number % self.ROOM] if self.last - self.ROOM < number <= self.last else None
        if number < 0 or call is None:
            return None
        step, verb, code, line = call
        return Operation(step, verb, code.co_filename, line)
