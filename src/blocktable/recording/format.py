"""The file of a flight recorder: append-only records, each with its length and a checksum.

    file      magic "BTr1", then records
    record    length u32, checksum u32 (CRC-32 of the body, begun with the checksum of the record before), body
    body      a MessagePack array: what happened, and its numbers

Whatever kills the writer, what was written whole can be read: a reader stops before the first record that is short or
whose checksum does not fit. Arrays of integers are packed as small as they are: a run of consecutive numbers as its first
and its length, everything else as the smallest integers that hold it.
"""

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktable.errors import ArgumentError

MAGIC = b"BTr1"
MOST = 2**30  # bytes of one record: a longer length is damage
_HEAD = struct.Struct("<II")
_SIZES = tuple(np.dtype(kind) for kind in ("<i1", "<i2", "<i4", "<i8"))
_encode = msgspec.msgpack.Encoder().encode


class Writer:
    """Appends records to a file, each handed to the system as soon as it is made, so that a killed process loses none.

    With ``bound``, the file is put aside as ``path`` + ".old" when it has half of it, and a new one begun: together they
    never hold more than ``bound`` bytes and one record.
    """

    def __init__(self, path: str | Path, bound: int | None = None) -> None:
        self.path = Path(path)
        self._bound = bound
        self._open()

    def _open(self) -> None:
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise ArgumentError(
                f"{self.path} cannot be written: {error.strerror}",
                values={"path": str(self.path)},
                remedy="name a file in a folder that is there and may be written",
            ) from None
        os.write(self._file, MAGIC)
        self.size, self._last = len(MAGIC), 0

    def write(self, record: list[Any]) -> None:
        """Append one record."""
        body = _encode(record)
        self._last = zlib.crc32(body, self._last)
        os.write(self._file, _HEAD.pack(len(body), self._last) + body)
        self.size += _HEAD.size + len(body)

    def full(self) -> bool:
        """Say whether the file is to be put aside."""
        return self._bound is not None and self.size >= self._bound // 2

    def turn(self) -> None:
        """Put the file aside, in place of the one before, and begin a new one."""
        os.close(self._file)
        self.path.replace(f"{self.path}.old")
        self._open()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: str | Path) -> Iterator[list[Any]]:
    """Yield the whole records of a recording, of a ring the older part first; gzip is read as it is.

    Raises ArgumentError for a file that is no recording; a damaged or cut end is no error.
    """
    older = Path(f"{path}.old")
    for part in (older, Path(path)) if older.exists() else (Path(path),):
        yield from _records(_bytes(part), part)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ArgumentError(
            f"{path} cannot be read: {why}", values={"path": str(path)}, remedy="name a recording"
        ) from None
    if data[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ArgumentError(
                f"{path} is damaged: {error}", values={"path": str(path)}, remedy="copy it again"
            ) from None
    return data


def _records(data: bytes, path: Path) -> Iterator[list[Any]]:
    if data[:4] != MAGIC:
        raise ArgumentError(
            f"{path} is no recording: it begins with {data[:4]!r}, not {MAGIC!r}",
            values={"path": str(path)},
            remedy="name a file that blocktable.recording.record made",
        )
    at, last = len(MAGIC), 0
    while at + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        last = zlib.crc32(body, last)
        if size > MOST or len(body) != size or last != checksum:
            return
        try:
            record = msgspec.msgpack.decode(body)
        except msgspec.DecodeError:
            return
        if not isinstance(record, list) or not record or not isinstance(record[0], str):
            return
        yield record
        at += _HEAD.size + size


def pack(array: Any) -> Any:
    """Return an array of integers as small as it is: bytes behind a code, or [first, count] of consecutive numbers."""
    flat = np.asarray(array)
    if flat.size == 0:
        return b""
    first, last = int(flat[0]), int(flat[-1])
    if flat.size > 1 and last - first == flat.size - 1 and (flat[1:] - flat[:-1] == 1).all():
        return [first, flat.size]
    low, high = int(flat.min()), int(flat.max())
    for code, kind in enumerate(_SIZES):
        bounds = np.iinfo(kind)
        if bounds.min <= low and high <= bounds.max:
            if low == high:
                return [low, flat.size, 0]
            return bytes([code]) + flat.astype(kind).tobytes()
    raise ArgumentError("an array of a recording does not fit 64 bits", remedy="record integers")


def unpack(packed: Any) -> NDArray[np.int64]:
    """Return what ``pack`` packed, as int64; numbers that it never writes raise ArgumentError."""
    try:
        if isinstance(packed, list):
            first, count, *same = packed
            if not all(isinstance(n, int) and not isinstance(n, bool) for n in packed) or not 0 <= count <= MOST:
                raise _damaged()
            return np.full(count, first, np.int64) if same else np.arange(first, first + count, dtype=np.int64)
        if not packed:
            return np.zeros(0, np.int64)
        return np.frombuffer(packed, _SIZES[packed[0]], offset=1).astype(np.int64)
    except (TypeError, ValueError, IndexError, OverflowError, MemoryError):
        raise _damaged() from None


def _damaged() -> ArgumentError:
    return ArgumentError("a record holds an array that cannot be read", remedy="record the run again")
