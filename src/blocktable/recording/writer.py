"""The file of a flight recorder as it is written, see ``format``: mapped into memory, and locked against other recorders.

A record is the system's as soon as it is written: whatever kills the process, a reader finds all whole records.
"""

import os
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from io import FileIO
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from blocktable.errors import ArgumentError
from blocktable.recording import coding
from blocktable.recording.format import MAGIC, SAID, is_there, older_half

PIECE = 1 << 20  # bytes that the file grows by
_encode = msgspec.msgpack.Encoder().encode


class Writer:
    """Appends records to a file.

    With ``bound``, the file is put aside as ``path`` + ".old" when it has half of it, and a new one begun: together they
    hold no more than ``bound`` bytes, what each begins with, and one record.
    """

    def __init__(self, path: str | Path, bound: int | None = None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentError(
                f"a recording needs the path of a file, got {path!r}",
                values={"path": path},
                remedy="pass a str or a pathlib.Path",
            )
        self.path, self._older = Path(path), older_half(path)
        self._bound = bound
        if bound is not None:
            refuse_in_use(self._older)
        self._piece = PIECE if bound is None else min(PIECE, bound // 2)
        self.meta = np.zeros(3, np.int64)
        self._open()

    def _open(self) -> None:
        self._begin = 0  # of the window, in the file
        self.meta[: coding.SUM] = 0
        self.window = np.zeros(0, np.uint8)
        try:
            self._file = begun_anew(self.path)
            try:
                self.room(len(MAGIC))
            except BaseException:
                self.close()
                raise
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise  # of a signal handler, such as a TimeoutError
            raise ArgumentError(
                f"{self.path} cannot be written: {getattr(error, 'strerror', None) or error}",
                values={"path": str(self.path)},
                remedy="name a file in a folder that is there and may be written",
            ) from None
        self.window[: len(MAGIC)] = np.frombuffer(MAGIC, np.uint8)
        self.meta[coding.AT] = len(MAGIC)

    @property
    def size(self) -> int:
        """The bytes written so far."""
        return self._begin + int(self.meta[coding.AT])

    def room(self, size: int) -> None:
        """Have room for a record of so many bytes: the window moves on, and the file grows by zeros."""
        if self.meta[coding.AT] + size <= self.window.size:
            return
        begin, size = self.size, max(size, self._piece)
        done = 0
        while done < size:  # now, so that a full disk is an error here and not a signal later
            done += os.pwrite(self._file.fileno(), bytes(size - done), begin + done)
        before = begin % ALLOCATIONGRANULARITY  # a mapping begins with a page
        self.window = np.frombuffer(mmap(self._file.fileno(), before + size, offset=begin - before), np.uint8)[before:]
        self._begin, self.meta[coding.AT] = begin, 0

    def say(self, record: list[Any]) -> None:
        """Append a record that is no call."""
        body = np.frombuffer(bytes([SAID]) + _encode(record), np.uint8)
        self.room(coding.HEAD + body.size + coding.TAIL)
        coding.write_bytes(self.window, self.meta, body)

    def full(self) -> bool:
        """Say whether the file is to be put aside."""
        return self._bound is not None and self.size >= self._bound // 2

    def turn(self) -> None:
        """Put the file aside, in place of the one before, and begin a new one."""
        self.close()
        self.path.replace(self._older)
        self._open()

    def close(self) -> None:
        """Close the file, as long as what is in it; again, it does nothing."""
        if self._file.closed:
            return
        try:
            self._file.truncate(self.size)
            flock(self._file, LOCK_UN)  # a forked process may hold the file open
        finally:
            self.leave()

    def leave(self) -> None:
        """Let go of the file as it is."""
        self._file.close()
        self.window = np.zeros(0, np.uint8)


def begun_anew(path: Path) -> FileIO:
    """Open a file and empty it, unless another recorder, of any process, has it mapped: a write would be a bus error.

    Returns the file itself, since its number may be another one's as soon as it is closed.
    """
    while True:
        file = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644))
        try:
            lock(file, path)
            with suppress(FileNotFoundError):  # a ring put it aside before it was locked
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # noqa: PTH116 - as that of the file
                    file.truncate(0)
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def lock(file: FileIO, path: Path) -> None:
    """Lock a file, unless another recorder has it locked."""
    with suppress(OSError):  # file systems without locks
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(
                f"another recording writes to {path}",
                values={"path": str(path)},
                remedy="close that one first, or name another file",
            ) from None


def refuse_in_use(path: Path) -> None:
    """Refuse a file that another recorder writes to."""
    if is_there(path):
        with suppress(OSError), FileIO(path) as file:
            lock(file, path)
