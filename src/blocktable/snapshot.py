"""The whole state of the last commit in bytes: what a replica starts from."""

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable import _kernels as k
from blocktable.delta import as_view, damaged

if TYPE_CHECKING:
    from blocktable.state import TableState

_MAGIC = b"BTs1"
_HEADER = struct.Struct("<4sIQQIIQ")  # magic, checksum of the rest, seq, origin, groups, rows, live entries
_SHAPE_FIELDS = 7
_I32 = np.dtype("<i4")


class Snapshot(NamedTuple):
    """What the bytes hold: shapes int32 [groups, 7], counts int32 [groups, rows], and the live entries in that order."""

    seq: int
    origin: int
    shapes: NDArray[np.int32]
    counts: NDArray[np.int32]
    live: NDArray[np.int32]


def pack(tables: "TableState", seq: int, origin: int) -> bytes:
    """Return the committed state of tables as bytes: the header, shapes, counts, then each row's live entries."""
    groups, rows = len(tables.shapes), tables.max_rows
    counts = tables._state.reshape(groups, rows, k.STATE_FIELDS)[:, :, k.SENT]
    parts = []
    for g, shape in enumerate(tables.shapes):
        base = int(tables._info[g, k.BASE])
        table = tables._sent[base : base + rows * shape.width].reshape(rows, shape.width)
        parts += [table[row, : counts[g, row]] for row in np.flatnonzero(counts[g])]
    live = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    shapes = np.array(tables.shapes, np.int64)
    body = b"".join(np.ascontiguousarray(part, _I32).tobytes() for part in (shapes, counts, live))
    head = _HEADER.pack(_MAGIC, 0, seq, origin, groups, rows, live.size)
    return head[:4] + struct.pack("<I", zlib.crc32(body, zlib.crc32(head[8:]))) + head[8:] + body


def unpack(data: bytes) -> Snapshot:
    """Read a snapshot; bytes that are truncated, altered or out of range raise DeltaError."""
    view = as_view(data)
    if len(view) < _HEADER.size:
        raise damaged(f"{len(view)} bytes are no snapshot: the header alone has {_HEADER.size}")
    magic, checksum, seq, origin, groups, rows, live = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise damaged(f"a snapshot begins with {_MAGIC!r}, these bytes with {magic!r}")
    size = _HEADER.size + 4 * (groups * (_SHAPE_FIELDS + rows) + live)
    if len(view) != size:
        raise damaged(f"the header speaks of {size} bytes, there are {len(view)}")
    if checksum != zlib.crc32(view[8:]):
        raise damaged("the checksum does not fit the bytes")
    numbers = np.frombuffer(view, _I32, offset=_HEADER.size).astype(np.int32)
    shapes = numbers[: groups * _SHAPE_FIELDS].reshape(groups, _SHAPE_FIELDS)
    counts = numbers[groups * _SHAPE_FIELDS : groups * (_SHAPE_FIELDS + rows)].reshape(groups, rows)
    snapshot = Snapshot(seq, origin, shapes, counts, numbers[groups * (_SHAPE_FIELDS + rows) :])
    _check(snapshot)
    return snapshot


def _check(snapshot: Snapshot) -> None:
    shapes, counts = snapshot.shapes.astype(np.int64), snapshot.counts.astype(np.int64)
    if counts.size == 0 or snapshot.origin > snapshot.seq:
        raise damaged("a snapshot needs groups, rows, and an origin no later than its seq")
    kind, width, kernel_width, block, kernel_block, ranks, interleave = shapes.T
    if (kind < 0).any() or (kind > k.RING).any() or (shapes[:, 1:] < 1).any():
        raise damaged("a group's shape holds a number that is not positive")
    if (block % kernel_block).any() or (width != kernel_width // (block // kernel_block)).any():
        raise damaged("a group's widths contradict its block sizes")
    if (block % interleave).any() or (ranks < 1).any():
        raise damaged("a group's interleave does not divide its block size")
    if (counts < 0).any() or (counts > width[:, None]).any() or counts.sum() != snapshot.live.size:
        raise damaged("the rows' counts do not fit widths and entries")
    limits = np.repeat(2**31 // (block // kernel_block), counts.sum(axis=1))
    if (snapshot.live < 0).any() or (snapshot.live >= limits).any():
        raise damaged("a live entry is no block id")
