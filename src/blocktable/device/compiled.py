"""The kernels for tables in host memory: compiled loops, as on the host. See ``reference`` for what each does."""

from typing import Any

import numpy as np

from blocktable import _kernels as k
from blocktable._apply import apply as apply_loop
from blocktable._jit import compiled, helper, i32, i64, nothing
from blocktable._kernels import (
    BASE,
    COUNT,
    CP,
    I32,
    I64,
    INTERLEAVE,
    KERNEL_WIDTH,
    RATIO,
    ROWS,
    STATE_FIELDS,
    STATE_TYPES,
    WIDTH,
    fill_null,
)
from blocktable._runs import copy_range
from blocktable.device.layout import CHUNK, KERNEL_BASE, KERNEL_BLOCK, Buffers

_NO_LENGTHS = np.zeros(0, np.int64)
_NO_INDPTR, _NO_INDICES = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)


@helper(i64(i64, i64, i64, i64))
def local_length(length: int, ranks: int, chunk: int, rank: int) -> int:
    """Return how many of a row's first ``length`` tokens one context-parallel rank holds (L13)."""
    if ranks == 1:
        return length
    turn = ranks * chunk
    return length // turn * chunk + min(max(length % turn - rank * chunk, 0), chunk)


@helper(nothing(i32[::1], i64, i32[::1], i64, i64, i64))
def expand_run(target: I32, at: int, entries: I32, begin: int, count: int, ratio: int) -> None:
    """Write manager blocks as kernel blocks: m becomes r*m .. r*m + r - 1."""
    if at < 0 or begin < 0 or ratio < 0:  # never so: it spares Python's indices from the end
        return
    if ratio == 1:
        copy_range(target, at, entries, begin, begin + count)
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
        begin = at + z * CHUNK
        fill_null(tables, begin + mine, begin + marks[group, i, z])
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
                copy_range(kv_indices, base + end, tables, at, at + used)
                end += used
                kv_indptr[group, i + 1] = end
                last_page_len[group, i] = min(local - (used - 1) * page, page) if used > 0 else 1


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
    k.slots(info, state, entries, rows, query_start_loc, positions, rank, out.reshape(-1))


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
