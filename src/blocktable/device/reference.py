"""What the kernels compute, in plain NumPy: the meaning that every other implementation is compared with.

The functions here, in ``compiled``, ``fallback`` and ``kernels`` have the same names, arguments and effects; the arrays
are those of ``blocktable.device.layout``. Arguments are taken as right: whoever calls has looked at them, or they lie on a
device where looking would mean waiting; there, a row outside the tables is a padding row, and nothing is read or written
outside its own row or buffer.
"""

from typing import Any

import numpy as np

from blocktable import _kernels as k
from blocktable.device.layout import CHUNK, KERNEL_BASE, KERNEL_BLOCK, Buffers


def apply(info: Any, state: Any, entries: Any, spans: Any, values: Any, total: int, longest: int) -> None:  # noqa: ARG001
    """Write a delta's spans into the tables; they hold ``total`` entries, and at most ``longest`` each."""
    rows = int(info[-1, k.ROWS])
    for group, row, start, count, offset, live in spans.tolist():
        at = int(info[group, k.BASE]) + row * int(info[group, k.WIDTH]) + start
        entries[at : at + count] = 0 if offset < 0 else values[offset : offset + count]
        state[(group * rows + row) * k.STATE_FIELDS + k.COUNT] = live


def local_length(length: int, ranks: int, chunk: int, rank: int) -> int:
    """Return how many of a row's first ``length`` tokens one context-parallel rank holds (L13)."""
    rounds, rest = divmod(length, ranks * chunk)
    return rounds * chunk + min(max(rest - rank * chunk, 0), chunk) if ranks > 1 else length


def live_blocks(info: Any, state: Any, entries: Any, group: int, row: int) -> Any:
    """Return a row's live manager blocks; none for a padding row."""
    total = int(info[-1, k.ROWS])
    if not 0 <= row < total:
        return entries[:0]
    start = int(info[group, k.BASE]) + row * int(info[group, k.WIDTH])
    return entries[start : start + int(state[(group * total + row) * k.STATE_FIELDS + k.COUNT])]


def gather(
    info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Buffers, padded: int
) -> None:
    """Fill a batch: its rows in batch order and in kernel blocks, with lengths also as CSR; rows past it are null."""
    capacity = batch.rows.shape[0]
    if lengths is not None:
        batch.kv_indptr[: len(info) - 1, 0] = 0  # also where the batch has no row
    for i in range(padded):
        row = int(rows[i]) if i < len(rows) and 0 <= rows[i] < info[-1, k.ROWS] else -1
        length = int(lengths[i]) if lengths is not None and row >= 0 else 0
        batch.rows[i], batch.seq_lens[i] = row, length
        for group in range(len(info) - 1):
            width, ratio = int(info[group, k.KERNEL_WIDTH]), int(info[group, k.RATIO])
            blocks = live_blocks(info, state, entries, group, row)
            ids = (blocks[:, None] * ratio + np.arange(ratio, dtype=np.int32)).reshape(-1)
            base = capacity * int(info[group, KERNEL_BASE])
            table = batch.tables[base + i * width : base + (i + 1) * width]
            for z, mark in enumerate(batch.marks[group, i].tolist()):
                part = ids[z * CHUNK : (z + 1) * CHUNK]
                table[z * CHUNK : z * CHUNK + mark] = 0
                table[z * CHUNK : z * CHUNK + len(part)] = part
                batch.marks[group, i, z] = len(part)
            batch.num_blocks[group, i] = len(ids)
            if lengths is not None:
                ranks, chunk, page = (int(info[group, field]) for field in (k.CP, k.INTERLEAVE, KERNEL_BLOCK))
                local = local_length(length, ranks, chunk, rank)
                pages = min(-(-local // page), len(ids))
                first = int(batch.kv_indptr[group, i])
                batch.kv_indptr[group, i + 1] = first + pages
                batch.kv_indices[base + first : base + first + pages] = ids[:pages]
                batch.last_page_len[group, i] = min(local - (pages - 1) * page, page) if pages else 1


def slots(
    info: Any, state: Any, entries: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int, out: Any
) -> None:
    """Write the slot of every token, int64 [groups, length]; -1 where there is none and from the last token on."""
    for group in range(len(info) - 1):
        fields = (k.BLOCK, k.KIND, k.CP, k.INTERLEAVE)
        block, kind, ranks, chunk = (int(info[group, field]) for field in fields)
        out[group] = -1
        for i, row in enumerate(rows.tolist()):
            begin = min(max(int(query_start_loc[i]), 0), out.shape[1])
            end = min(int(query_start_loc[i + 1]), out.shape[1], len(positions))
            at = positions[begin:end].astype(np.int64)
            column, offset = np.divmod(at, block * ranks)
            if kind == k.RING:
                column[:] = 0
            blocks = live_blocks(info, state, entries, group, row)
            inside = (at >= 0) & (column < len(blocks)) & (kind != k.STATE)
            block_id = np.zeros(len(at), np.int64)
            block_id[inside] = blocks[column[inside]]
            mine = (offset // chunk % ranks == rank) | (ranks == 1)
            slot = block_id * block + offset // (chunk * ranks) * chunk + offset % chunk
            out[group, begin : begin + len(at)] = np.where((block_id > 0) & mine, slot, -1)


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
    """``gather`` and ``slots`` in one."""
    gather(info, state, entries, rows, lengths, rank, batch, padded)
    slots(info, state, entries, rows, query_start_loc, positions, rank, out)
