"""The kernels in plain torch operations, for devices without Triton. See ``reference`` for what each does.

They give the same arrays, but not at the same price: every table is written at its full width, intermediate tensors come
from torch's allocator, and one call is several launches. Nothing here waits for the device: the groups' constants stay on
it, as tensors of one number.
"""

from typing import Any

import torch

from blocktable import _kernels as k
from blocktable.device.layout import KERNEL_BLOCK, Buffers


def apply(info: Any, state: Any, entries: Any, spans: Any, values: Any, total: int, longest: int) -> None:  # noqa: ARG001
    """Write a delta's spans into the tables."""
    group, row, start, count, offset, live = spans.to(torch.int64).unbind(1)
    at = info[group, k.BASE] + row * info[group, k.WIDTH] + start
    span = torch.repeat_interleave(torch.arange(len(spans), device=spans.device), count, output_size=total)
    within = torch.arange(total, device=spans.device) - (torch.cumsum(count, 0) - count)[span]
    sent = torch.zeros(total, dtype=torch.int32, device=spans.device)
    if len(values):
        value = values[(offset[span] + within).clamp(0, len(values) - 1)]
        sent = torch.where(offset[span] < 0, sent, value)
    entries[at[span] + within] = sent
    state.view(-1, k.STATE_FIELDS)[group * info[-1, k.ROWS] + row, k.COUNT] = live.to(torch.int32)


def _pad(values: Any, size: int, fill: int) -> Any:
    return torch.nn.functional.pad(values.to(torch.int64), (0, size - len(values)), value=fill)


def _live(info: Any, state: Any, group: int, rows: Any) -> tuple[Any, Any]:
    """Return the live count of each row, 0 for a padding row, and where its entries begin."""
    total = info[-1, k.ROWS]
    real = (rows >= 0) & (rows < total)
    row = torch.where(real, rows, 0)
    count = state.view(-1, k.STATE_FIELDS)[group * total + row, k.COUNT].to(torch.int64)
    return torch.where(real, count, 0), info[group, k.BASE] + row * info[group, k.WIDTH]


def gather(
    info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Buffers, padded: int
) -> None:
    """Fill a batch."""
    wanted = _pad(rows, padded, -1)
    real = (wanted >= 0) & (wanted < info[-1, k.ROWS])
    length = torch.zeros_like(wanted) if lengths is None else torch.where(real, _pad(lengths, padded, 0), 0)
    batch.rows[:padded] = torch.where(real, wanted, -1)
    batch.seq_lens[:padded] = length
    capacity, base = len(batch.rows), 0
    for group, width in enumerate(batch.widths):
        live, start = _live(info, state, group, wanted)
        pages, ratio = live * info[group, k.RATIO], info[group, k.RATIO]
        column = torch.arange(width, device=wanted.device)
        inside = column < pages[:, None]
        at = torch.where(inside, start[:, None] + column // ratio, 0)
        ids = torch.where(inside, entries[at] * ratio + column % ratio, 0).to(torch.int32)
        batch.tables[base : base + padded * width] = ids.view(-1)
        batch.num_blocks[group, :padded] = pages
        if lengths is not None:
            _flatten(info[group], batch, group, base, ids, pages, length, rank)
        base += capacity * width


def _flatten(
    constants: Any, batch: Buffers, group: int, base: int, ids: Any, pages: Any, length: Any, rank: int
) -> None:
    """Write one group's table as CSR: each row's pages one behind the other."""
    padded, width = ids.shape
    ranks, chunk, page = constants[k.CP], constants[k.INTERLEAVE], constants[KERNEL_BLOCK]
    turn, before = ranks * chunk, torch.where(ranks == 1, 0, rank * chunk)
    local = length // turn * chunk + torch.minimum((length % turn - before).clamp_min(0), chunk)
    used = torch.minimum((local + page - 1) // page, pages)
    end = torch.cumsum(used, 0)
    batch.kv_indptr[group, :1] = 0
    batch.kv_indptr[group, 1 : padded + 1] = end
    batch.last_page_len[group, :padded] = torch.where(used > 0, torch.minimum(local - (used - 1) * page, page), 1)
    column = torch.arange(width, device=ids.device)
    spare = len(batch.kv_indices) - 1  # where everything goes that belongs nowhere
    at = torch.where(column < used[:, None], base + (end - used)[:, None] + column, spare)
    batch.kv_indices[at] = ids


def slots(
    info: Any, state: Any, entries: Any, rows: Any, query_start_loc: Any, positions: Any, rank: int, out: Any
) -> None:
    """Write the slot of every token."""
    out.fill_(-1)
    tokens = min(len(positions), out.shape[1])
    if len(rows) == 0 or tokens == 0:
        return
    token = torch.arange(tokens, device=out.device)
    request = torch.searchsorted(query_start_loc.to(torch.int64), token, right=True) - 1
    at = torch.where(token < query_start_loc[-1], positions[:tokens].to(torch.int64), -1)
    wanted = rows.to(torch.int64)[request.clamp(0, len(rows) - 1)]
    for group in range(out.shape[0]):
        live, start = _live(info, state, group, wanted)
        block, ranks, chunk = (info[group, field] for field in (k.BLOCK, k.CP, k.INTERLEAVE))
        column = at.clamp_min(0) // (block * ranks)
        offset = at.clamp_min(0) - column * (block * ranks)
        column = torch.where(info[group, k.KIND] == k.RING, 0, column)
        inside = (at >= 0) & (column < live) & (info[group, k.KIND] != k.STATE)
        block_id = torch.where(inside, entries[torch.where(inside, start + column, 0)], 0).to(torch.int64)
        mine = (offset // chunk % ranks == rank) | (ranks == 1)
        slot = block_id * block + offset // (chunk * ranks) * chunk + offset % chunk
        out[group, :tokens] = torch.where((block_id > 0) & mine, slot, -1)


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
    """``gather`` and ``slots``."""
    gather(info, state, entries, rows, lengths, rank, batch, padded)
    slots(info, state, entries, rows, query_start_loc, positions, rank, out)
