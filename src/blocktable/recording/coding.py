"""How calls become bytes, compiled: fields of integers, each against the same field of the last such call, and checksums.

    record    length u32 of the body, body, the lower half of a CRC-32 over this and all bodies before it
    body      kind, number of the object, two bytes of the checksum of all that calls have returned, fields
    field     0: not given · 1: as in the last call of this kind on this object
              2, n, first value, then (difference, how often) up to the n-th value · 3, n, n values of 8 bytes

Counts are varints (7 bits to a byte, the lowest first), values and differences zigzag ones (0, -1, 1, -2, ...): what calls
repeat costs a byte, what rises evenly a few. The length is written last, so that a record is whole once it has one.
"""

import zlib
from typing import Any

import numba
import numpy as np

from blocktable._checksums import DELTA, of_delta, of_values, short
from blocktable._jit import compiled, helper, i64, nothing, sealed
from blocktable.recording.identity import Ints

u8: Any = numba.uint8
# meta[...]: bytes written of the window; checksums of what was written, and of what calls returned
AT, CHAIN, SUM = range(3)
ABSENT, SAME, RUNS, WIDE = range(4)
NARROW = 2**60  # values from here on, and their opposites, are written as they are
HEAD, TAIL = 4, 2  # bytes before and after a body
NOT_GIVEN = -1  # the size of a field that was not given
LOW32, LOW60 = 2**32 - 1, 2**60 - 1
CRC = np.array([zlib.crc32(bytes([n]), LOW32) ^ LOW32 for n in range(256)], np.int64)
MOST = 1 << 24  # values of one call: more are damage

WINDOW = (u8[::1], i64[::1])
FIELDS = (sealed(i64[::1]), sealed(i64[::1]))  # values of all fields, one after the other, and their sizes


@compiled(i64(i64, i64))
def room(values: int, fields: int) -> int:
    """Return how many bytes a call of so many values and fields takes at most."""
    return 64 + 21 * values + 12 * fields


# ---- checksums of what calls returned


@compiled(i64(i64[::1]))
def short_of(meta: Ints) -> int:
    """Return 16 bits of the checksum of what calls returned."""
    return short(meta[SUM])


@compiled(nothing(i64[::1], sealed(i64[:])))
def fold_values(meta: Ints, values: Ints) -> None:
    """Take what a call returned into the checksum."""
    meta[SUM] = of_values(meta[SUM], values)


@compiled(nothing(i64[::1], *DELTA))
def fold_delta(meta: Ints, spans: Ints, values: Ints, copies: Ints) -> None:
    """Take a delta into the checksum of what calls returned."""
    meta[SUM] = of_delta(meta[SUM], spans, values, copies)


# ---- writing


@helper(i64(u8[::1], i64, i64))
def put(out: Ints, at: int, n: int) -> int:
    """Write a count; return where the next byte goes."""
    while n >= 128:
        out[at] = (n & 127) | 128
        n >>= 7
        at += 1
    out[at] = n
    return at + 1


@helper(i64(u8[::1], i64, i64))
def put_signed(out: Ints, at: int, n: int) -> int:
    """Write a value or a difference."""
    return put(out, at, (n << 1) ^ (n >> 63))


@helper(i64(u8[::1], i64, FIELDS[0], i64, i64, FIELDS[0], i64, i64))
def put_field(
    out: Ints, at: int, values: Ints, begin: int, size: int, before: Ints, before_begin: int, before_size: int
) -> int:
    """Write one field."""
    if size < 0:
        out[at] = ABSENT
        return at + 1
    same = i64(size == before_size)
    narrow = i64(1)
    for j in range(begin, begin + size):
        if same and values[j] != before[before_begin + j - begin]:
            same = i64(0)
        if values[j] >= NARROW or values[j] <= -NARROW:
            narrow = i64(0)
    if same:
        out[at] = SAME
        return at + 1
    out[at] = RUNS if narrow else WIDE
    at = put(out, at + 1, size)
    if not narrow:
        for j in range(begin, begin + size):
            for byte in range(8):
                out[at] = (values[j] >> (8 * byte)) & 255
                at += 1
        return at
    if size:
        at = put_signed(out, at, values[begin])
    j, end = begin + 1, begin + size
    while j < end:
        step, n = values[j] - values[j - 1], 1
        while j + n < end and values[j + n] - values[j + n - 1] == step:
            n += 1
        at = put(out, put_signed(out, at, step), n)
        j += n
    return at


@helper(nothing(*WINDOW, i64, i64))
def seal(window: Ints, meta: Ints, begin: int, end: int) -> None:
    """Close a record whose body ends at ``end``: its checksum, and only then its length."""
    chain = meta[CHAIN] ^ LOW32
    for at in range(begin + HEAD, end):
        chain = CRC[(chain ^ window[at]) & 255] ^ (chain >> 8)
    meta[CHAIN] = chain ^ LOW32
    for byte in range(TAIL):
        window[end + byte] = (meta[CHAIN] >> (8 * byte)) & 255
    for byte in range(HEAD):
        window[begin + byte] = ((end - begin - HEAD) >> (8 * byte)) & 255
    meta[AT] = end + TAIL


@helper(i64(*WINDOW, i64, i64))
def open_call(window: Ints, meta: Ints, kind: int, number: int) -> int:
    """Begin a record of a call; return where its fields go."""
    at = meta[AT] + HEAD
    window[at] = kind
    at = put(window, at + 1, number)
    window[at], window[at + 1] = short(meta[SUM]) & 255, short(meta[SUM]) >> 8
    return at + 2


@helper(nothing(*WINDOW, i64, i64, *FIELDS, *FIELDS))
def put_call(
    window: Ints, meta: Ints, kind: int, number: int, values: Ints, sizes: Ints, before: Ints, before_sizes: Ints
) -> None:
    """Write the record of a call."""
    begin = meta[AT]
    at = open_call(window, meta, kind, number)
    here = there = i64(0)
    for f in range(sizes.size):
        size = sizes[f]
        before_size = before_sizes[f] if f < before_sizes.size else i64(-2)
        at = put_field(window, at, values, here, size, before, there, before_size)
        here += max(size, 0)
        there += max(before_size, 0)
    seal(window, meta, begin, at)


@compiled(nothing(*WINDOW, i64, i64, *FIELDS, *FIELDS))
def write_call(
    window: Ints, meta: Ints, kind: int, number: int, values: Ints, sizes: Ints, before: Ints, before_sizes: Ints
) -> None:
    """Write the record of a call, against the last one of its kind."""
    put_call(window, meta, kind, number, values, sizes, before, before_sizes)


@compiled(nothing(*WINDOW, sealed(u8[::1])))
def write_bytes(window: Ints, meta: Ints, body: Ints) -> None:
    """Write a record whose body is ready."""
    begin = meta[AT]
    for j in range(body.size):
        window[begin + HEAD + j] = body[j]
    seal(window, meta, begin, begin + HEAD + body.size)


# ---- reading


@helper(i64(sealed(u8[::1]), i64[::1]))
def get(body: Ints, meta: Ints) -> Any:
    """Read a count at meta[AT], -1 where there is none."""
    n = shift = i64(0)
    while meta[AT] < body.size and shift < 63:
        byte = i64(body[meta[AT]])
        meta[AT] += 1
        n |= (byte & 127) << shift
        if byte < 128:
            return n
        shift += 7
    return -1


@helper(i64(i64))
def signed(n: int) -> int:
    """Return the value that a zigzag number stands for."""
    return (n >> 1) ^ -(n & 1)


@helper(i64(sealed(u8[::1]), i64[::1], i64, i64, i64[::1], i64))
def get_field(body: Ints, meta: Ints, tag: int, size: int, values: Ints, here: int) -> int:
    """Read the values of a field that is written out; return 0 where they cannot be."""
    if tag == WIDE:
        if meta[AT] + 8 * size > body.size:
            return 0
        for j in range(size):
            value = i64(0)
            for byte in range(8):
                value |= i64(body[meta[AT] + 8 * j + byte]) << (8 * byte)
            values[here + j] = value
        meta[AT] += 8 * size
        return 1
    first = get(body, meta)
    if first < 0:
        return 0
    values[here] = signed(first)
    j = i64(1)
    while j < size:
        step, n = get(body, meta), get(body, meta)
        if step < 0 or n < 1 or n > size - j or step >= 2 * LOW60:
            return 0
        for _ in range(n):
            value = values[here + j - 1] + signed(step)
            if value >= NARROW or value <= -NARROW:
                return 0
            values[here + j] = value
            j += 1
    return 1


@compiled(i64(sealed(u8[::1]), i64[::1], *FIELDS, i64[::1], i64[::1]))
def read_fields(body: Ints, meta: Ints, before: Ints, before_sizes: Ints, values: Ints, sizes: Ints) -> Any:
    """Read the fields of a body from meta[AT] on; return how many, -1 for damage, -2 - n where there are n values."""
    here = there = f = i64(0)
    while meta[AT] < body.size:
        tag = body[meta[AT]]
        meta[AT] += 1
        before_size = before_sizes[f] if f < before_sizes.size else i64(-2)
        if f == sizes.size or tag > WIDE or (tag == SAME and before_size < 0):
            return -1
        size = before_size if tag == SAME else i64(NOT_GIVEN)
        if tag >= RUNS:
            size = get(body, meta)
            if size < 0 or here + size > MOST:
                return -1
        if here + max(size, 0) > values.size:
            return -2 - here - size
        if tag == SAME:
            for j in range(size):
                values[here + j] = before[there + j]
        elif size > 0 and not get_field(body, meta, tag, size, values, here):
            return -1
        sizes[f] = size
        here += max(size, 0)
        there += max(before_size, 0)
        f += 1
    return f
