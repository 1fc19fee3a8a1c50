"""What changed since the last commit: the only thing that crosses a boundary, to a device, a process or a file."""

import struct
import zlib
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktable.errors import ArgumentError, DeltaError

_MAGIC = b"BTd1"
_HEADER = struct.Struct("<4sIQQIIII")  # magic, checksum of the rest, seq, origin, layout, spans, values, copies
_I32 = np.dtype("<i4")

NO_COPIES = np.zeros((0, 3), np.int32)
NO_COPIES.setflags(write=False)


class Delta(msgspec.Struct, frozen=True, eq=False):  # a dataclass as frozen takes microseconds to make, at every step
    """The changed entries between two commits, immutable and owning its arrays, so that any thread may read it.

    ``seq`` counts the commits of one object from 1, empty ones included. ``spans`` int32 [n, 6] holds (group, row, start,
    count, offset, live): the entries start .. start + count - 1 of the row are now values[offset : offset + count], or
    all null where offset is -1; live is the row's block count after the commit, and a span of count 0 changes nothing
    but that. ``values`` int32 are manager blocks. ``copies`` int32 [n, 3] holds (group, source block, target block), to
    be run before the step's writes. ``origin`` is the seq at which the tables were last empty and of this shape, and
    ``layout`` a digest of that shape: a replica of another shape refuses the delta (L11).

    >>> import blocktable
    >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
    >>> tables.append([1], [0, 2], [7, 9])
    >>> delta = tables.commit()
    >>> delta.spans.tolist(), delta.values.tolist()
    ([[0, 1, 0, 2, 0, 2]], [7, 9])
    >>> Delta.from_bytes(delta.to_bytes()) == delta
    True
    """

    seq: int
    spans: NDArray[np.int32]
    values: NDArray[np.int32]
    copies: NDArray[np.int32] = NO_COPIES
    origin: int = 0
    layout: int = 0

    def __post_init__(self) -> None:
        """Seal the arrays."""
        try:
            # By position: a keyword costs as much again, and so would a loop.
            self.spans.setflags(False)  # type: ignore[call-arg]
            self.values.setflags(False)  # type: ignore[call-arg]
            if self.copies is not NO_COPIES:
                self.copies.setflags(False)  # type: ignore[call-arg]
        except AttributeError:
            raise ArgumentError(
                "a delta is made of int32 arrays", remedy="take it from commit() or from_bytes"
            ) from None

    def __eq__(self, other: object) -> bool:
        """Compare by content, bit for bit."""
        return isinstance(other, Delta) and self.to_bytes() == other.to_bytes()

    def __ne__(self, other: object) -> bool:
        """Compare by content; a msgspec struct would say that of two objects none is the other."""
        return not self == other

    def __hash__(self) -> int:
        """Hash by content."""
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        """Say how much changed, not what."""
        return f"Delta(seq={self.seq}, spans={len(self.spans)}, values={len(self.values)}, copies={len(self.copies)})"

    def to_bytes(self) -> bytes:
        """Return 40 bytes, 24 per span, 4 per value and 12 per copy, little-endian; cost: one copy of the arrays."""
        sizes = (len(self.spans), len(self.values), len(self.copies))
        body = b"".join(array.astype(_I32, copy=False).tobytes() for array in (self.spans, self.values, self.copies))
        head = _HEADER.pack(_MAGIC, 0, self.seq, self.origin, self.layout, *sizes)
        return head[:4] + struct.pack("<I", zlib.crc32(body, zlib.crc32(head[8:]))) + head[8:] + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a delta back; bytes that are truncated, altered or out of range raise DeltaError.

        >>> Delta.from_bytes(b"BTd1")
        Traceback (most recent call last):
        blocktable.errors.DeltaError: 4 bytes are no delta: the header alone has 40; send it again [L11]
        """
        view = as_view(data)
        if len(view) < _HEADER.size:
            raise damaged(f"{len(view)} bytes are no delta: the header alone has {_HEADER.size}")
        magic, checksum, seq, origin, layout, spans, values, copies = _HEADER.unpack_from(view)
        if magic != _MAGIC:
            raise damaged(f"a delta begins with {_MAGIC!r}, these bytes with {magic!r}")
        size = _HEADER.size + 4 * (6 * spans + values + 3 * copies)
        if len(view) != size:
            raise damaged(f"the header speaks of {size} bytes, there are {len(view)}")
        if checksum != zlib.crc32(view[8:]):
            raise damaged("the checksum does not fit the bytes")
        numbers = np.frombuffer(view, _I32, offset=_HEADER.size).astype(np.int32)
        head, tail = 6 * spans, 6 * spans + values
        delta = cls(
            seq, numbers[:head].reshape(-1, 6), numbers[head:tail], numbers[tail:].reshape(-1, 3), origin, layout
        )
        delta._check()
        return delta

    def _check(self) -> None:
        """Refuse numbers that no commit writes; whether rows and widths fit is for the replica to judge."""
        spans = self.spans.astype(np.int64)
        offset, count = spans[:, 4], spans[:, 3]
        if self.seq < 1 or self.origin >= self.seq:
            raise damaged(f"seq {self.seq} does not follow origin {self.origin}")
        if (np.delete(spans, 4, axis=1) < 0).any() or (offset < -1).any():
            raise damaged("a span holds a negative number")
        if (offset + count > len(self.values))[offset >= 0].any():
            raise damaged("a span reaches past the values")
        if (self.values < 0).any() or (self.copies[:, 0] < 0).any() or (self.copies[:, 1:] < 1).any():
            raise damaged("a value or a copy is no block id")


def as_view(data: Any) -> memoryview:
    """Return bytes as a flat view; what is no bytes at all is an argument error."""
    try:
        return memoryview(data).cast("B")
    except TypeError:
        raise ArgumentError(
            f"expected bytes, got {type(data).__name__}", remedy="pass what to_bytes() or snapshot() returned"
        ) from None


def damaged(message: str) -> DeltaError:
    """Return the error of bytes that cannot be read."""
    return DeltaError(message, law="L11", remedy="send it again")
