"""The kernels for tables in host memory: compiled loops, as on the host. See ``reference`` for what each does."""

from typing import Any

import numpy as np

from blocktable import _kernels as k
from blocktable._apply import apply as apply_loop
from blocktable._jit import compiled, helper, i32, i64, nothing, u64
from blocktable._kernels import (
    BAD_QUERY,
    BAD_ROW,
    BASE,
    BLOCK,
    COUNT,
    CP,
    I32,
    I64,
    INTERLEAVE,
    KERNEL_WIDTH,
    KIND,
    OK,
    RATIO,
    RING,
    ROWS,
    STATE,
    STATE_FIELDS,
    STATE_TYPES,
    WIDTH,
    refuse,
)
from blocktable.device.layout import CHUNK, KERNEL_BASE, KERNEL_BLOCK, Buffers

LEFT = 26  # a kind of group that the host's loop maps

_NO_LENGTHS = np.zeros(0, np.int64)
_NO_INDPTR, _NO_INDICES = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)


@helper(i64(i64, i64, i64, i64))
def local_length(length: int, ranks: int, chunk: int, rank: int) -> int:
    """Return how many of a row's first ``length`` tokens one context-parallel rank holds (L13)."""
    if ranks == 1:
        return length
    turn = ranks * chunk
    return length // turn * chunk + min(max(length % turn - rank * chunk, 0), chunk)


@helper(nothing(i32[::1], i64, i32[::1], i64, i64))
def copy_run(target: I32, at: int, source: I32, begin: int, count: int) -> None:
    """Copy source[begin : begin + count] to target[at :]."""
    if (
        at < 0 or begin < 0
    ):  # never so: it lets the compiler drop Python's indices from the end, and the loop is a memcpy
        return
    for j in range(count):
        target[at + j] = source[begin + j]


@helper(nothing(i32[::1], i64, i64))
def null_run(target: I32, at: int, count: int) -> None:
    """Make ``count`` entries null."""
    if at < 0:  # as in copy_run
        return
    for j in range(count):
        target[at + j] = 0


@helper(nothing(i32[::1], i64, i32[::1], i64, i64, i64))
def expand_run(target: I32, at: int, entries: I32, begin: int, count: int, ratio: int) -> None:
    """Write manager blocks as kernel blocks: m becomes r*m .. r*m + r - 1."""
    if at < 0 or begin < 0 or ratio < 0:  # as in copy_run
        return
    if ratio == 1:
        copy_run(target, at, entries, begin, count)
    elif ratio == 2:  # the usual ratios are spelled out: with a known count the inner loop is a vector
        for block in range(count):
            first = entries[begin + block] * 2
            for j in range(2):
                target[at + block * 2 + j] = first + j
    elif ratio == 4:
        for block in range(count):
            first = entries[begin + block] * 4
            for j in range(4):
                target[at + block * 4 + j] = first + j
    else:
        for block in range(count):
            first = entries[begin + block] * ratio
            for j in range(ratio):
                target[at + block * ratio + j] = first + j


@helper(nothing(i32[:, :, ::1], i64, i64, i32[::1], i64, i64))
def null_tail(marks: I32, group: int, i: int, tables: I32, at: int, pages: int) -> None:
    """Null what a batch row held last time past its live entries, and remember what it holds now."""
    for z in range(marks.shape[2]):
        mine = min(max(pages - z * CHUNK, 0), CHUNK)
        null_run(tables, at + z * CHUNK + mine, marks[group, i, z] - mine)
        marks[group, i, z] = mine


@compiled(
    nothing(
        *STATE_TYPES,
        *(i64[::1], i64[::1], i64, i64, i64),
        *(i32[::1], i32[::1], i32[::1], i32[:, ::1], i32[:, :, ::1]),
        *(i32[:, ::1], i32[::1], i32[:, ::1]),
    )
)
def gather_loop(
    info: I64,
    state: I32,
    entries: I32,
    rows: I64,
    lengths: I64,
    csr: int,
    rank: int,
    padded: int,
    out_rows: I32,
    seq_lens: I32,
    tables: I32,
    num_blocks: I32,
    marks: I32,
    kv_indptr: I32,
    kv_indices: I32,
    last_page_len: I32,
) -> None:
    """Fill a batch; with ``csr`` also its flat form."""
    total, capacity = info[info.shape[0] - 1, ROWS], i64(out_rows.size)
    for i in range(padded):
        row = i64(-1)
        if i < rows.size and rows[i] >= 0 and rows[i] < total:
            row = rows[i]
        out_rows[i] = row
        seq_lens[i] = lengths[i] if csr and row >= 0 else 0
    for group in range(info.shape[0] - 1):
        width, ratio, page = info[group, KERNEL_WIDTH], info[group, RATIO], info[group, KERNEL_BLOCK]
        base = capacity * info[group, KERNEL_BASE]
        end = i64(0)  # of the flat form
        if csr:
            kv_indptr[group, 0] = 0
        for i in range(padded):
            row, at = i64(out_rows[i]), base + i * width
            live = start = i64(0)
            if row >= 0:
                live = i64(state[(group * total + row) * STATE_FIELDS + COUNT])
                start = info[group, BASE] + row * info[group, WIDTH]
            pages = live * ratio
            expand_run(tables, at, entries, start, live, ratio)
            null_tail(marks, group, i, tables, at, pages)
            num_blocks[group, i] = pages
            if csr:
                local = local_length(seq_lens[i], info[group, CP], info[group, INTERLEAVE], rank)
                used = min((local + page - 1) // page, pages)
                copy_run(kv_indices, base + end, tables, at, used)
                end += used
                kv_indptr[group, i + 1] = end
                last_page_len[group, i] = min(local - (used - 1) * page, page) if used > 0 else 1


@compiled(i64(*STATE_TYPES, i64[::1], i64[::1], i64[::1], i64[::1]))
def slots_loop(info: I64, state: I32, entries: I32, rows: I64, starts: I64, positions: I64, out: I64) -> int:
    """Map slots where every group is held whole by one rank and no group is a ring, as nearly always; else return LEFT.

    The same result and the same refusals as the host's loop, at a third of its time: with blocks of a power of two there is
    a shift in place of each division, and positions that follow each other are mapped a block at a time.
    """
    groups = info.shape[0] - 1
    total, n, length = info[groups, ROWS], rows.size, out.size // groups
    tokens = starts[n]
    for group in range(groups):
        if info[group, CP] != 1 or info[group, KIND] == RING:
            return LEFT
    if starts[0] != 0 or tokens > positions.size or tokens > length:
        return refuse(info, BAD_QUERY, 0, n, -1, tokens, min(positions.size, length), starts[0])
    for i in range(n):
        if rows[i] < -1 or rows[i] >= total:
            return refuse(info, BAD_ROW, 0, i, rows[i], rows[i], total, 0)
        if starts[i + 1] < starts[i]:
            return refuse(info, BAD_QUERY, 0, i, rows[i], starts[i + 1], starts[i], 0)
    one = u64(1)  # unsigned indices need no test for counting from the end
    for group in range(groups):
        block, line, shift = info[group, BLOCK], u64(group * length), i64(-1)
        for bits in range(31):
            if i64(1) << bits == block:
                shift = i64(bits)
        for i in range(n):
            row, t, end = rows[i], starts[i], starts[i + 1]
            live = i64(0)
            if row >= 0 and info[group, KIND] != STATE:
                live = i64(state[(group * total + row) * STATE_FIELDS + COUNT])
            start = info[group, BASE] + row * info[group, WIDTH]
            while t < end:
                position = positions[t]
                column = position >> shift if shift >= 0 else position // block
                block_id = i64(0)
                if position >= 0 and column < live:
                    block_id = i64(entries[start + column])
                if block_id <= 0:
                    out[line + u64(t)] = -1
                    t += 1
                    continue
                move = (block_id - column) * block
                at, stop = u64(t), u64(min(end, t + (column + 1) * block - position))
                while at < stop and positions[at] == position:
                    out[line + at] = position + move
                    position += 1
                    at += one
                t = i64(at)
        tail, stop = line + u64(tokens), line + u64(length)
        while tail < stop:
            out[tail] = -1
            tail += one
    return OK


def map_slots(
    info: Any, state: Any, entries: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int, out: Any
) -> int:
    """Write the slots into a flat ``out``; return OK, or the code of what was refused."""
    code: int = slots_loop(info, state, entries, rows, query_start_loc, positions, out)
    return k.slots(info, state, entries, rows, query_start_loc, positions, rank, out) if code == LEFT else code


def apply(info: Any, state: Any, entries: Any, spans: Any, values: Any, total: int, longest: int) -> None:  # noqa: ARG001
    """Write a delta's spans into the tables."""
    apply_loop(info, state, entries, spans, values)


def gather(
    info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Buffers, padded: int
) -> None:
    """Fill a batch."""
    given = _NO_LENGTHS if lengths is None else lengths
    csr = batch[6:] if lengths is not None else (_NO_INDPTR, _NO_INDICES, _NO_INDPTR)
    gather_loop(info, state, entries, rows, given, lengths is not None, rank, padded, *batch[1:6], *csr)


def slots(
    info: Any, state: Any, entries: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int, out: Any
) -> None:
    """Write the slot of every token."""
    map_slots(info, state, entries, rows, query_start_loc, positions, rank, out.reshape(-1))


def step(
    info: Any,
    state: Any,
    entries: Any,
    rows: Any,
    lengths: Any,
    rank: int,
    batch: Buffers,
    padded: int,
    query_start_loc: Any,
    positions: Any,
    out: Any,
) -> None:
    """``gather`` and ``slots``: a launch costs nothing here, so nothing is saved by having one loop for both."""
    gather(info, state, entries, rows, lengths, rank, batch, padded)
    slots(info, state, entries, rows, query_start_loc, positions, rank, out)
