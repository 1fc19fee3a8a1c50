"""Slot mapping against brute force, token by token: laws L6, L7 and L13, and the largest numbers that the types allow."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import blocktable
from blocktable import BlockTables, Contract, Group, Replica
from blocktable.oracle import TablesModel
from blocktable.slots import positions as running_positions


def plan(width: int, block: int, **how: Any) -> blocktable.Geometry:
    return blocktable.plan(max_model_len=width * block * how.get("cp_size", 1), block_size=block, **how)


@st.composite
def sharded(draw: st.DrawFn) -> blocktable.Geometry:
    kernel, ratio, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    block = kernel * ratio
    interleave = draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
    contract = Contract("tiny", kernel_block_sizes=(kernel,))
    return plan(draw(st.integers(1, 5)), block, contracts=[contract], cp_size=ranks, cp_interleave=interleave)


@given(geometry=sharded(), data=st.data())
def test_every_position_has_one_owner_and_every_slot_one_position(geometry: Any, data: st.DataObject) -> None:
    """L13 and L7: over all ranks each position is mapped once, and each rank's slots fill its blocks exactly."""
    tables = BlockTables([geometry], max_rows=1)
    live = data.draw(st.integers(1, geometry.width))
    ids = data.draw(st.permutations(range(1, live + 4)))[:live]
    tables.append([0], [0, live], ids)
    reach = live * geometry.block_size * geometry.cp_size
    ranks = [
        tables.slot_mapping([0], [0, reach + 3], range_list(reach + 3), cp_rank=rank)[0]
        for rank in range(geometry.cp_size)
    ]
    owners = (np.stack(ranks) >= 0).sum(axis=0)
    assert owners.tolist() == [1] * reach + [0] * 3
    whole = sorted(block * geometry.block_size + o for block in ids for o in range(geometry.block_size))
    for slots in ranks:
        assert sorted(slots[slots >= 0].tolist()) == whole


def range_list(n: int) -> list[int]:
    return list(range(n))


@given(geometry=sharded(), data=st.data())
def test_a_slot_lies_in_its_own_rows_block_and_no_two_tokens_share_one(geometry: Any, data: st.DataObject) -> None:
    rows = 4
    tables, model = BlockTables([geometry], max_rows=rows), TablesModel([geometry], max_rows=rows)
    counts = [data.draw(st.integers(0, geometry.width)) for _ in range(rows)]
    free = iter(data.draw(st.permutations(range(1, sum(counts) + 3))))
    for row, count in enumerate(counts):
        ids = [next(free) for _ in range(count)]
        tables.append([row], [0, count], ids)
        model.append([row], [0, count], ids)
    order = data.draw(st.permutations([-1, *range(rows)]))
    reach = (geometry.width + 1) * geometry.block_size * geometry.cp_size
    starts = [data.draw(st.integers(0, reach)) for _ in order]
    lengths = [data.draw(st.integers(0, reach)) for _ in order]
    query = np.cumsum([0, *lengths])
    where = running_positions(starts, query)
    assert where.tolist() == [start + t for start, n in zip(starts, lengths, strict=True) for t in range(n)]
    for rank in range(geometry.cp_size):
        slots = tables.slot_mapping(order, query, where, padded=int(query[-1]) + 5, cp_rank=rank)
        assert slots.tolist() == model.slot_mapping(
            order, query.tolist(), where.tolist(), padded=int(query[-1]) + 5, cp_rank=rank
        )
        used = slots[slots >= 0]
        assert np.unique(used).size == used.size
        assert slots[0, query[-1] :].tolist() == [-1] * 5
        for i, row in enumerate(order):
            mine = slots[0, query[i] : query[i + 1]]
            blocks = set((mine[mine >= 0] // geometry.block_size).tolist())
            assert blocks <= set(model.rows[0][row] if row >= 0 else [])


@given(block=st.integers(1, 9), last=st.integers(-30, 60), stride=st.integers(-7, 7), count=st.integers(0, 20))
def test_positions_in_any_order_and_step(block: int, last: int, stride: int, count: int) -> None:
    """The loop keeps the column of the token before; whichever way positions run, that must not show."""
    geometry = plan(4, block)
    tables, model = BlockTables([geometry], max_rows=1), TablesModel([geometry], max_rows=1)
    for one in (tables, model):
        one.append([0], [0, 3], [9, 4, 6])
    where = [last + stride * t for t in range(count)]
    assert tables.slot_mapping([0], [0, count], where).tolist() == model.slot_mapping([0], [0, count], where)


@pytest.mark.parametrize(("block", "ratio"), [(1, 1), (16, 1), (64, 4), (128, 1), (4096, 8), (2112, 33)])
def test_the_largest_ids_give_exact_slots(block: int, ratio: int) -> None:
    """Ids near 2^31 times a block size need 64 bits: a product in 32 would be a slot of another request (L12)."""
    geometry = plan(3, block, contracts=[Contract("tiny", kernel_block_sizes=(block // ratio,))])
    largest = 2**31 // ratio - 1
    tables = BlockTables([geometry], max_rows=1)
    tables.append([0], [0, 2], [largest, largest - 1])
    slots = tables.slot_mapping([0], [0, 3], [0, block - 1, 2 * block - 1])
    assert slots.tolist() == [[largest * block, largest * block + block - 1, largest * block - 1]]
    assert tables.tables[0].kernel_array([0])[0, :ratio].tolist() == [largest * ratio + k for k in range(ratio)]
    mirror = Replica([geometry], max_rows=1)
    mirror.apply(tables.commit())
    assert mirror.slot_mapping([0], [0, 3], [0, block - 1, 2 * block - 1]).tolist() == slots.tolist()
    with pytest.raises(blocktable.ArgumentError, match=r"outside|does not fit"):
        tables.append([0], [0, 1], [largest + 1])


def test_positions_at_both_ends_of_int64_have_no_slot() -> None:
    tables = BlockTables([plan(4, 16)], max_rows=1)
    tables.append([0], [0, 4], [1, 2, 3, 4])
    far = [2**63 - 1, -(2**63), 0, 2**63 - 16, 63, 64, 2**31, 2**32, -1]
    assert tables.slot_mapping([0], [0, 9], far).tolist() == [[-1, -1, 16, -1, 79, -1, -1, -1, -1]]


def test_one_row_of_131072_entries() -> None:
    geometry = plan(131_072, 16)
    tables = BlockTables([geometry], max_rows=1)
    ids = np.random.default_rng(7).permutation(np.arange(1, 131_073, dtype=np.int32))
    tables.append([0], [0, ids.size], ids)
    where = np.array([0, 15, 16, 131_072 * 8, 131_072 * 16 - 1, 131_072 * 16])
    slots = tables.slot_mapping([0], [0, where.size], where)[0]
    assert slots.tolist() == [int(ids[p // 16]) * 16 + p % 16 for p in where[:-1].tolist()] + [-1]
    delta = tables.commit()
    assert delta.values.tolist() == ids.tolist()
    mirror = Replica([geometry], max_rows=1)
    mirror.apply(delta)
    assert np.array_equal(mirror.tables[0].array, tables.tables[0].array)


def test_4096_rows_of_one_entry() -> None:
    geometry = plan(1, 16)
    tables = BlockTables([geometry], max_rows=4096)
    rows = np.arange(4096)
    tables.append(rows, np.arange(4097), rows + 1)
    slots = tables.slot_mapping(rows, np.arange(4097), rows % 16)[0]
    assert slots.tolist() == [(row + 1) * 16 + row % 16 for row in range(4096)]
    tables.move(rows[:-1], rows[1:])
    assert tables.tables[0].array[:, 0].tolist() == [0, *range(1, 4096)]
    tables.check()


def test_state_groups_have_no_slots_and_rings_wrap() -> None:
    groups = [Group(plan(1, 4), kind="ring"), Group(plan(2, 4), kind="state", state_blocks=2), Group(plan(3, 4))]
    tables = BlockTables(groups, max_rows=1)
    tables.append([0], ([0, 1], [0, 2], [0, 2]), ([5], [6, 7], [8, 9]), group=None)
    slots = tables.slot_mapping([0], [0, 9], list(range(9)), padded=10)
    assert slots[0].tolist() == [20, 21, 22, 23, 20, 21, 22, 23, 20, -1]
    assert slots[1].tolist() == [-1] * 10
    assert slots[2].tolist() == [32, 33, 34, 35, 36, 37, 38, 39, -1, -1]
