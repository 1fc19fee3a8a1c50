"""The kernels in Triton. See ``reference`` for what each does; one launch serves all groups.

A launch is a row of programs. Those of a gather are numbered (batch row, group, stretch of CHUNK columns), each with its
own mark; those of a slot mapping (group, request), where one request more stands for the padding; ``step`` runs both kinds
in one launch. Conditions on single numbers stay out of masks over vectors, which Triton's interpreter does not take.
"""

# ruff: noqa: ANN001, ANN202, N803, SIM102 - Triton compiles a dialect: no types, constants in capitals, no `and`
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

from typing import Any

import triton
import triton.language as tl

from blocktable import _kernels as k
from blocktable.device import layout
from blocktable.device.layout import Buffers

# Compiled kernels see no module variables but these.
INFO = tl.constexpr(k.INFO_FIELDS)
STATE = tl.constexpr(k.STATE_FIELDS)
COUNT = tl.constexpr(k.COUNT)
WIDTH, BASE, BLOCK, KIND = (tl.constexpr(field) for field in (k.WIDTH, k.BASE, k.BLOCK, k.KIND))
RATIO, CP, INTERLEAVE = (tl.constexpr(field) for field in (k.RATIO, k.CP, k.INTERLEAVE))
KERNEL_WIDTH, KERNEL_BASE = tl.constexpr(k.KERNEL_WIDTH), tl.constexpr(layout.KERNEL_BASE)
KERNEL_BLOCK = tl.constexpr(layout.KERNEL_BLOCK)
STATE_KIND, RING_KIND = tl.constexpr(k.STATE), tl.constexpr(k.RING)
CHUNK = tl.constexpr(layout.CHUNK)
VECTOR = tl.constexpr(1024)  # entries or tokens that a program handles at a time
SPAN_VECTOR = tl.constexpr(256)
SPAN_PROGRAMS = 32  # at most so many share one span


@triton.jit
def _apply_kernel(info, state, entries, spans, values, total_rows):
    span = spans + tl.program_id(0) * 6
    group = tl.load(span).to(tl.int64)
    row = tl.load(span + 1).to(tl.int64)
    start = tl.load(span + 2)
    count = tl.load(span + 3)
    offset = tl.load(span + 4)
    target = entries + tl.load(info + group * INFO + BASE) + row * tl.load(info + group * INFO + WIDTH) + start
    given = tl.where(offset < 0, 0, count)  # of a null span nothing is read
    source = values + tl.maximum(offset, 0)
    part = tl.program_id(1)
    for begin in range(part * SPAN_VECTOR, count, tl.num_programs(1) * SPAN_VECTOR):
        at = begin + tl.arange(0, SPAN_VECTOR)
        tl.store(target + at, tl.load(source + at, mask=at < given, other=0), mask=at < count)
    if part == 0:
        tl.store(state + (group * total_rows + row) * STATE + COUNT, tl.load(span + 5))


@triton.jit
def _pages(info, group, length, live, rank):
    """Return how many tokens of a row lie on this rank, and in how many of its kernel blocks."""
    ranks = tl.load(info + group * INFO + CP).to(tl.int32)
    chunk = tl.load(info + group * INFO + INTERLEAVE).to(tl.int32)
    page = tl.load(info + group * INFO + KERNEL_BLOCK).to(tl.int32)
    ratio = tl.load(info + group * INFO + RATIO).to(tl.int32)
    before = tl.where(ranks == 1, 0, rank * chunk)
    rest = length % (ranks * chunk) - before
    local = length // (ranks * chunk) * chunk + tl.minimum(tl.maximum(rest, 0), chunk)
    return local, tl.minimum((local + page - 1) // page, live * ratio)


@triton.jit
def _pages_before(info, state, group, rows, lengths, i, given, total_rows, rank):
    """Return how many pages the batch rows before row i hold."""
    total = i * 0
    for begin in range(0, tl.minimum(i, given), VECTOR):
        j = begin + tl.arange(0, VECTOR)
        inside = j < tl.minimum(i, given)
        row = tl.load(rows + j, mask=inside, other=-1).to(tl.int64)
        real = (row >= 0) & (row < total_rows)
        live = tl.load(state + (group * total_rows + row) * STATE + COUNT, mask=real, other=0)
        length = tl.load(lengths + j, mask=real, other=0).to(tl.int32)
        _, used = _pages(info, group, length, live, rank)
        total += tl.sum(used, 0)
    return total


@triton.jit
def _gather_one(
    program,
    info,
    state,
    entries,
    rows,
    lengths,
    given,
    rank,
    capacity,
    chunks,
    groups,
    total_rows,
    out_rows,
    seq_lens,
    tables,
    num_blocks,
    marks,
    kv_indptr,
    kv_indices,
    last_page_len,
    CSR: tl.constexpr,
):
    chunk = program % chunks
    group = (program // chunks % groups).to(tl.int64)
    i = program // chunks // groups
    row = tl.load(rows + i, mask=i < given, other=-1).to(tl.int64)
    row = tl.where(row < total_rows, tl.maximum(row, -1), -1)  # outside the tables is padding
    first_of_row = tl.maximum(row, 0)
    live = tl.load(state + (group * total_rows + first_of_row) * STATE + COUNT, mask=row >= 0, other=0)
    ratio = tl.load(info + group * INFO + RATIO).to(tl.int32)
    source = entries + tl.load(info + group * INFO + BASE) + first_of_row * tl.load(info + group * INFO + WIDTH)
    base = tl.load(info + group * INFO + KERNEL_BASE) * capacity
    target = tables + base + i * tl.load(info + group * INFO + KERNEL_WIDTH)
    pages = live * ratio
    begin = chunk * CHUNK
    mine = tl.minimum(tl.maximum(pages - begin, 0), CHUNK)
    mark = marks + (group * capacity + i) * chunks + chunk
    upto = tl.maximum(mine, tl.load(mark))

    length = 0
    used = 0
    flat = kv_indices
    if CSR:
        length = tl.load(lengths + i, mask=i < given, other=0).to(tl.int32)
        length = tl.where(row >= 0, length, 0)
        local, used = _pages(info, group, length, live, rank)
        if (chunk == 0) | (begin < used):
            first = _pages_before(info, state, group, rows, lengths, i, given, total_rows, rank)
            flat += base + first
            if chunk == 0:
                page = tl.load(info + group * INFO + KERNEL_BLOCK).to(tl.int32)
                last = tl.where(used > 0, tl.minimum(local - (used - 1) * page, page), 1)
                tl.store(last_page_len + group * capacity + i, last)
                tl.store(kv_indptr + group * (capacity + 1) + i + 1, first + used)
                if i == 0:
                    tl.store(kv_indptr + group * (capacity + 1), 0)
    if chunk == 0:
        tl.store(num_blocks + group * capacity + i, pages)
        if group == 0:
            tl.store(out_rows + i, row.to(tl.int32))
            tl.store(seq_lens + i, length)

    for at in range(0, upto, VECTOR):
        inside = at + tl.arange(0, VECTOR)
        column = begin + inside
        block = tl.load(source + column // ratio, mask=inside < mine, other=0)
        page_id = tl.where(inside < mine, block * ratio + column % ratio, 0)
        tl.store(target + column, page_id, mask=inside < upto)
        if CSR:
            tl.store(flat + column, page_id, mask=(inside < mine) & (column < used))
    tl.store(mark, mine)


@triton.jit
def _slots_one(
    program, info, state, entries, rows, query_start_loc, positions, given, num_positions, rank, total_rows, out, size
):
    i = program % (given + 1)
    group = (program // (given + 1)).to(tl.int64)
    line = out + group * size
    begin = tl.maximum(tl.load(query_start_loc + i).to(tl.int64), 0)
    if i == given:
        for at in range(begin, size, VECTOR):
            token = at + tl.arange(0, VECTOR)
            tl.store(line + token, token * 0 - 1, mask=token < size)
    else:
        end = tl.load(query_start_loc + i + 1).to(tl.int64)
        end = tl.minimum(end, tl.minimum(size, num_positions))
        row = tl.load(rows + i).to(tl.int64)
        row = tl.where(row < total_rows, tl.maximum(row, -1), -1)
        first_of_row = tl.maximum(row, 0)
        kind = tl.load(info + group * INFO + KIND)
        block = tl.load(info + group * INFO + BLOCK)
        ranks = tl.load(info + group * INFO + CP)
        turn_length = tl.load(info + group * INFO + INTERLEAVE)
        me = tl.where(ranks == 1, 0, rank)
        live = tl.load(state + (group * total_rows + first_of_row) * STATE + COUNT, mask=row >= 0, other=0)
        live = tl.where(kind == STATE_KIND, 0, live)
        source = entries + tl.load(info + group * INFO + BASE) + first_of_row * tl.load(info + group * INFO + WIDTH)
        for at in range(begin, end, VECTOR):
            token = at + tl.arange(0, VECTOR)
            inside = token < end
            position = tl.load(positions + token, mask=inside, other=-1).to(tl.int64)
            real = position >= 0
            position = tl.maximum(position, 0)
            column = position // (block * ranks)
            offset = position - column * (block * ranks)
            column = tl.where(kind == RING_KIND, column * 0, column)
            block_id = tl.load(source + column, mask=real & (column < live), other=0).to(tl.int64)
            turn = offset // turn_length
            slot = block_id * block + turn // ranks * turn_length + offset % turn_length
            tl.store(line + token, tl.where((block_id > 0) & (turn % ranks == me), slot, -1), mask=inside)


@triton.jit(do_not_specialize=["given", "gathers", "num_positions"])
def _step_kernel(
    info,
    state,
    entries,
    total_rows,
    groups,
    rank,
    rows,
    given,
    lengths,
    gathers,
    capacity,
    chunks,
    out_rows,
    seq_lens,
    tables,
    num_blocks,
    marks,
    kv_indptr,
    kv_indices,
    last_page_len,
    query_start_loc,
    positions,
    num_positions,
    out,
    size,
    GATHER: tl.constexpr,
    CSR: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0)
    if GATHER:
        if program < gathers:
            # fmt: off
            _gather_one(
                program, info, state, entries, rows, lengths, given, rank, capacity, chunks, groups, total_rows,
                out_rows, seq_lens, tables, num_blocks, marks, kv_indptr, kv_indices, last_page_len, CSR,
            )
            # fmt: on
    if SLOTS:
        if program >= gathers:
            # fmt: off
            _slots_one(
                program - gathers, info, state, entries, rows, query_start_loc, positions, given, num_positions, rank,
                total_rows, out, size,
            )
            # fmt: on


def apply(info: Any, state: Any, entries: Any, spans: Any, values: Any, total: int, longest: int) -> None:  # noqa: ARG001
    """Write a delta's spans into the tables."""
    parts = min(max(-(-longest // SPAN_VECTOR.value), 1), SPAN_PROGRAMS)
    total_rows = _rows(info, state)
    _apply_kernel[(len(spans), parts)](info, state, entries, spans, values, total_rows, num_warps=1)


def gather(
    info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Buffers, padded: int
) -> None:
    """Fill a batch."""
    _launch(info, state, entries, rows, rank, (lengths, batch, padded), None)


def slots(
    info: Any, state: Any, entries: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int, out: Any
) -> None:
    """Write the slot of every token."""
    _launch(info, state, entries, rows, rank, None, (query_start_loc, positions, out))


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
    """``gather`` and ``slots`` in one launch."""
    _launch(info, state, entries, rows, rank, (lengths, batch, padded), (query_start_loc, positions, out))


def _rows(info: Any, state: Any) -> int:
    return len(state) // k.STATE_FIELDS // (len(info) - 1)


def _launch(info: Any, state: Any, entries: Any, rows: Any, rank: int, gathered: Any, mapped: Any) -> None:
    groups, given, gathers = len(info) - 1, len(rows), 0
    batch_arguments: tuple[Any, ...] = (None, 0, 0, 0, *[None] * 8)
    if gathered is not None:
        lengths, batch, padded = gathered
        chunks = batch.marks.shape[2]
        gathers = padded * groups * chunks
        batch_arguments = (lengths, gathers, len(batch.rows), chunks, *batch[1:])
    slot_arguments: tuple[Any, ...] = (None, None, 0, None, 0)
    if mapped is not None:
        query_start_loc, positions, out = mapped
        slot_arguments = (query_start_loc, positions, len(positions), out, out.shape[1])
    programs = gathers + (groups * (given + 1) if mapped is not None else 0)
    if programs:
        _step_kernel[(programs,)](
            *(info, state, entries, _rows(info, state), groups, rank, rows, given),
            *batch_arguments,
            *slot_arguments,
            GATHER=gathered is not None,
            CSR=gathered is not None and lengths is not None,
            SLOTS=mapped is not None,
        )
