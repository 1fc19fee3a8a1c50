"""The file of a flight recorder: append-only records, each with its length and a checksum.

    file      magic "BTr2", then records, then zeros up to the end
    record    length u32, body, the lower half of a CRC-32 over this and all bodies before it
    body      a zero and a MessagePack array (begin, object, snapshot, end; of a ring also commits), or a call: see ``coding``

A reader stops before the first record that is short or whose checksum does not fit; damage that half a checksum misses, the
next record's finds, since each covers all before it.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from functools import cache as cached_by
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from blocktable.errors import ArgumentError, BlockTableError
from blocktable.recording import coding
from blocktable.recording.identity import Ints

MAGIC = b"BTr2"
NONE = np.zeros(0, np.int64)
SAID = 0  # the kind of a record that is no call
REFUSED = 128  # added to the kind of a call that was refused
VERBS = (
    *(
        "",
        "commit",
        "lookup",
        "match",
        "admit",
        "extend",
        "confirm",
        "truncate",
        "free",
        "retire",
        "fork",
        "reset_prefix",
    ),
    *("append", "assign", "release", "clear", "move", "swap", "copy", "resize", "step"),
)
KINDS = {verb: kind for kind, verb in enumerate(VERBS)}


class Record(NamedTuple):
    """One call as it was written: fields are int64, None where not given; ``check`` is of all that calls returned."""

    verb: str
    number: int
    fields: list[Any]
    check: int
    refused: bool


def older_half(path: str | Path) -> Path:
    """Return where a ring has its older half."""
    return Path(f"{path}.old")


def read(path: str | Path) -> Iterator[list[Any] | Record]:
    """Yield the whole records of a recording, of a ring the older half first; gzip is read as it is.

    Raises ArgumentError for a file that is no recording; a damaged or cut end is no error.
    """
    newer, older = Path(path), older_half(path)
    before = _bytes(older) if is_there(older) and os.access(older, os.R_OK) and older.is_file() else b""
    data = _bytes(newer) if not before or is_there(newer) else b""
    half = _half(before)
    # Else killed as it was to begin this half
    begun = bool(data.strip(b"\0")) and (data[: len(MAGIC)] != MAGIC or next(_records(data, newer), None) is not None)
    if half and (not begun or _half(data) == (half[0], half[1] + 1)):
        yield from _records(before, older)
    if begun or not half:
        yield from _records(data, newer)


def _half(data: bytes) -> tuple[Any, Any] | None:
    """Return which ring a file is a half of, and its how many-th; None for what is none."""
    if data[: len(MAGIC)] != MAGIC:
        return None
    match next(_records(data, Path()), None):
        case ["begin", _, 1, ring, int(number)]:
            return ring, number
    return None


def is_there(path: Path) -> bool:
    """Say whether there is such a file; a name that the system does not take is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


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


def _records(data: bytes, path: Path) -> Iterator[list[Any] | Record]:
    if data[:4] != MAGIC:
        other = f"a recording of another format, {data[:4]!r}" if data[:3] == MAGIC[:3] else f"begins with {data[:4]!r}"
        raise ArgumentError(
            f"{path} is no recording that can be read: it {'is ' * (data[:3] == MAGIC[:3])}{other}, not {MAGIC!r}",
            values={"path": str(path), "magic": data[:4]},
            remedy="name a file that blocktable.recording.record of this release made",
        )
    at, chain, calls = len(MAGIC), 0, CallReader()
    while at + coding.HEAD <= len(data):
        size = int.from_bytes(data[at : at + coding.HEAD], "little")
        end = at + coding.HEAD + size
        body = data[at + coding.HEAD : end]
        chain = zlib.crc32(body, chain)
        if not size or data[end : end + coding.TAIL] != (chain & 0xFFFF).to_bytes(coding.TAIL, "little"):
            return
        found = said(body) if body[0] == SAID else calls.read(body)
        if found is None:
            return
        yield found
        at = end + coding.TAIL


def said(body: bytes) -> list[Any] | None:
    """Return a record that is no call, None for what no recorder says."""
    try:
        record = msgspec.msgpack.decode(body[1:])
    except msgspec.DecodeError:
        return None
    return record if isinstance(record, list) and record and isinstance(record[0], str) else None


class CallReader:
    """Reads calls one after another: each against the last of its kind."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._values, self._sizes = np.zeros(4096, np.int64), np.zeros(64, np.int64)
        self._meta = np.zeros(3, np.int64)

    def read(self, body: bytes) -> Record | None:
        """Return the call of a body, None for one that no recorder writes."""
        number, at = _count(body, 1)
        verb = body[0] & ~REFUSED
        if at + 2 > len(body) or verb >= len(VERBS):
            return None
        before = self._before.get((body[0], number), (NONE, NONE))
        view = np.frombuffer(body, np.uint8)
        while True:
            self._meta[coding.AT] = at + 2
            n = coding.read_fields(view, self._meta, *before, self._values, self._sizes)
            if n >= -1:
                break
            self._values = np.zeros(2 * (-2 - n), np.int64)
        if n < 0:
            return None
        sizes = self._sizes[:n].copy()
        ends = np.cumsum(np.maximum(sizes, 0)).tolist()
        values = self._values[: ends[-1] if n else 0].copy()
        self._before[body[0], number] = values, sizes
        fields = [
            None if size < 0 else values[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)
        ]
        check = int.from_bytes(body[at : at + 2], "little")
        return Record(VERBS[verb], number, fields, check, bool(body[0] & REFUSED))


def _count(body: bytes, at: int) -> tuple[int, int]:
    """Return a count and where it ends."""
    n = shift = 0
    while at < len(body) and shift < 63:
        n |= (body[at] & 127) << shift
        at += 1
        if body[at - 1] < 128:
            break
        shift += 7
    return n, at


def of_text(text: str | bytes) -> Ints:
    """Return a text as a field."""
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.int64)


def as_bytes(field: Any) -> bytes:
    """Return the bytes of a field that holds a text; ArgumentError where it holds none."""
    if field is None or (field.size and not (field.min() >= 0 and field.max() < 256)):
        raise ArgumentError("a record holds a text that cannot be read", remedy="record the run again")
    return bytes(field.astype(np.uint8))


def refusal_of(error: BlockTableError) -> Ints:
    """Return a refusal, as a field: its type and law."""
    return _refusal(type(error).__name__, error.law)


@cached_by
def _refusal(name: str, law: str) -> Ints:
    return of_text(f"{name} {law}")
