"""Paged attention against attention over plain keys and values, in every layout, with NaN in every cell it must not use."""

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import blocktable
from blocktable.attention import BlockMemory, Reading, Table, accept, latent_attention, paged_attention
from blocktable.device import DeviceTables

TILES = {"tail": "in-range", "width_rule": blocktable.TokenMultiple(64)}
CONTRACTS = {
    "none": None,
    "dense": blocktable.Contract("DENSE", kernel_block_sizes=(8,)),
    "tiles": blocktable.Contract("TILES", kernel_block_sizes=(8,), **TILES),
    "split": blocktable.Contract("SPLIT", kernel_block_sizes=(8,), layout="split"),
    "split-tiles": blocktable.Contract("SPLIT_TILES", kernel_block_sizes=(8,), layout="split", **TILES),
    "csr": blocktable.Contract("CSR", kernel_block_sizes=(8,), layout="csr"),
    "null": blocktable.Contract("NULL", kernel_block_sizes=(8,), tail="null"),
}
BLOCK, KERNEL, POOL = 16, 8, 40


def scene(contract, lengths: list[int], counts: list[int], heads: int, dim: int, planes: int, window: int, seed: int):
    """Return rows' plain keys and values, and a poisoned memory that holds them behind a shuffled table."""
    random.seed(seed)
    torch.manual_seed(seed)
    contracts = [] if contract is None else [contract]
    geometry = blocktable.plan(max_model_len=128, block_size=BLOCK, contracts=contracts)
    tables = blocktable.BlockTables([blocktable.Group(geometry)], max_rows=len(lengths), num_blocks=POOL)
    ids = random.sample(range(1, POOL), POOL - 1)
    memory = BlockMemory(num_blocks=POOL, block_size=BLOCK, heads=heads, head_dim=dim, planes=planes)
    memory.poison(torch.arange(POOL))
    rows = list(range(len(lengths)))
    for row, length in zip(rows, lengths, strict=True):
        blocks = -(-length // BLOCK)
        tables.append([row], [0, blocks], [ids.pop() for _ in range(blocks)])
    device = DeviceTables(tables, "cpu")
    device.apply(tables.commit())
    plain = [[torch.randn(length, heads, dim) for _ in range(planes)] for length in lengths]
    for row, length in zip(rows, lengths, strict=True):
        slots = device.slot_mapping([row], [0, length], list(range(length)), length)[0, :length].clone()
        first = max(0, length - counts[row] - window + 1) if window else 0
        places = memory.places(slots[first:], geometry.kernel_block_size)
        memory.write(places, *(part[first:] for part in plain[row]))
    batch = device.gather(rows, len(rows), lengths)
    table = Table.of(batch, 0, contract, geometry.kernel_block_size, 128, planes)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return plain, memory, Reading(table, lengths, starts, window)


def expected(query, keys, values, length: int, window: int, scale: float) -> torch.Tensor:
    count = query.shape[0]
    at = torch.arange(length - count, length)[:, None]
    key = torch.arange(length)[None]
    mask = (key <= at) & (key > at - window if window else torch.tensor(1, dtype=torch.bool))
    shared = query.shape[1] // keys.shape[1]
    parts = (query, keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1))
    return scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in parts), attn_mask=mask, scale=scale
    ).transpose(0, 1)


@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("shared", [1, 3, 6])
@pytest.mark.parametrize("window", [0, 1, 11])
def test_paged_attention_is_attention(name: str, shared: int, window: int) -> None:
    lengths, counts = [1, 40, 17, 16, 128, 33, 50], [1, 1, 17, 1, 5, 1, 5]
    heads = 6 // shared
    plain, memory, reading = scene(CONTRACTS[name], lengths, counts, heads, 8, 2, window, seed=shared + window)
    query = torch.randn(sum(counts), 6, 8)
    found = paged_attention(query, memory, reading, scale=0.3)
    parts = zip(query.split(counts), plain, lengths, strict=True)
    right = torch.cat([expected(q, *kv, length, window, 0.3) for q, kv, length in parts])
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONTRACTS)
def test_latents_are_read_without_expanding_them(name: str) -> None:
    lengths, counts = [30, 5, 64], [1, 5, 3]
    plain, memory, reading = scene(CONTRACTS[name], lengths, counts, 1, 576, 1, 0, seed=1)
    to_key, to_value = torch.randn(4, 24, 512) / 20, torch.randn(4, 20, 512) / 20
    query = torch.randn(sum(counts), 4, 24 + 64)
    found = latent_attention(query, memory, reading, to_key=to_key, to_value=to_value, scale=0.1)
    for q, (latents,), length, got in zip(query.split(counts), plain, lengths, found.split(counts), strict=True):
        keys = torch.cat(
            (torch.einsum("tl,hnl->thn", latents[:, 0, :512], to_key), latents[:, :, 512:].expand(-1, 4, -1)), -1
        )
        values = torch.einsum("tl,hvl->thv", latents[:, 0, :512], to_value)
        torch.testing.assert_close(got, expected(q, keys, values, length, 0, 0.1), atol=1e-4, rtol=1e-4)


def test_layers_of_other_head_counts_share_a_reading() -> None:
    lengths, counts = [40, 17], [5, 5]
    plain, memory, reading = scene(None, lengths, counts, 2, 8, 2, 0, seed=0)
    for heads in (2, 6, 2):
        query = torch.randn(sum(counts), heads, 8)
        found = paged_attention(query, memory, reading, scale=0.3)
        parts = zip(query.split(counts), plain, lengths, strict=True)
        right = torch.cat([expected(q, *kv, length, 0, 0.3) for q, kv, length in parts])
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_one_cell_too_many_is_seen() -> None:
    _, memory, reading = scene(None, [20], [1], 2, 8, 2, 0, seed=0)
    query = torch.randn(1, 2, 8)
    assert paged_attention(query, memory, reading, scale=1.0).isfinite().all()
    longer = Reading(reading.table, [21], [0, 1])
    assert not paged_attention(query, memory, longer, scale=1.0).isfinite().all()


def test_the_kernel_is_asked_at_every_call() -> None:
    _, memory, reading = scene(CONTRACTS["tiles"], [20], [1], 2, 8, 2, 0, seed=0)
    whole = reading.table
    narrow = Table(whole.contract, 8, 128, 2, whole.dense[:, :7], whole.num_blocks, whole.handed[:, :7])
    with pytest.raises(blocktable.ContractError, match="TILES needs a multiple of 8"):
        paged_attention(torch.randn(1, 2, 8), memory, Reading(narrow, [20], [0, 1]), scale=1.0)


def test_strides_dtypes_and_tails_are_refused_as_the_kernel_does() -> None:
    compact = blocktable.Contract("COMPACT", strides="compact")
    table = torch.zeros(4, 16, dtype=torch.int32)
    accept(compact, table, 16)
    with pytest.raises(blocktable.ContractError, match="takes the width 8 as the row stride"):
        accept(compact, table[:, :8], 16)
    with pytest.raises(blocktable.ContractError, match="int32 table, got int64"):
        accept(None, table.long(), 16)
    table[1, 3] = 7
    accept(CONTRACTS["null"], table, 8, num_blocks=torch.tensor([0, 4, 0, 0]))
    with pytest.raises(blocktable.ContractError, match="past the live ones") as refused:
        accept(CONTRACTS["null"], table, 8, num_blocks=torch.tensor([0, 3, 0, 0]))
    assert refused.value.law == "L4"


def test_the_error_is_the_kernels_own() -> None:
    contract = blocktable.get_contract("vllm:FLASHINFER_MLA@0.19.1")
    with pytest.raises(blocktable.ContractError) as refused:
        accept(contract, torch.zeros(8, 295, dtype=torch.int32), 32, max_seq_len=9416)
    assert str(refused.value) == ("Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32")
    assert refused.value.values["raised"] == "ValueError"


def test_a_kernel_block_that_does_not_cut_the_managers_is_refused() -> None:
    memory = BlockMemory(num_blocks=3, block_size=12, heads=1, head_dim=2, planes=2)
    with pytest.raises(blocktable.ArgumentError, match="do not cut"):
        memory.cells(8)
    with pytest.raises(blocktable.ArgumentError, match="do not cut"):
        memory.places(torch.tensor([0]), 8)
