"""Public failures of this layer, each with its right values; the name of a test begins with the kind it belongs to.

K1 width-disagreement · K2 row-overflow · K3 read-past-row · K4 stale-tail · K5 stale-row · K6 padding-sentinel ·
K7 kernel-split-units · K8 block-size-selection · K9 cp-sharding · K10 length-row-coherence · K11 double-free ·
K12 pool-leak · K13 capacity-accounting · K14 prefix-identity · K15 integer-width · K16 perf-copy · K17 perf-host
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blocktable import (
    ArgumentError,
    BlockTables,
    Contract,
    GeometryError,
    Group,
    KVCache,
    LawBroken,
    MultipleOf,
    NeverFits,
    OutOfBlocks,
    Replica,
    TokenMultiple,
    plan,
    salt,
)
from blocktable._cache_layout import FREE

ALIGNED = Contract("aligned", width_rule=TokenMultiple(128))


def split(block: int, kernel: int, tokens: int) -> Any:
    return plan(max_model_len=tokens, block_size=block, contracts=[Contract("split", kernel_block_sizes=(kernel,))])


def row(tables: BlockTables, index: int, group: int = 0) -> list[int]:
    return tables.tables[group].array[index].tolist()


def count(tables: BlockTables, index: int, group: int = 0) -> int:
    return int(tables.tables[group].num_blocks[index])


def slots(tables: BlockTables, positions: Any, **how: Any) -> list[int]:
    return tables.slot_mapping([0], [0, len(positions)], positions, **how)[0].tolist()


@pytest.mark.parametrize(
    ("length", "block", "native", "aligned"), [(9416, 32, 295, 296), (1025, 32, 33, 36), (1024, 32, 32, 32)]
)
def test_k1_case_1_one_function_gives_the_native_and_the_aligned_width(
    length: int, block: int, native: int, aligned: int
) -> None:
    for contracts, width in ((), native), ((ALIGNED,), aligned):
        geometry = plan(max_model_len=length, block_size=block, contracts=contracts)
        tables = BlockTables([geometry], max_rows=2)
        tables.append([1], [0, native], np.arange(1, native + 1))
        mirror = Replica([geometry], max_rows=2)
        mirror.apply(tables.commit())
        shapes = {one.tables[0].array.shape for one in (tables, mirror)}
        shapes |= {one.tables[0].kernel_array([0, 1]).shape for one in (tables, mirror)}
        assert shapes == {(2, width)}
        geometry.check((2, width))


def test_k1_case_5_lowering_the_limit_changes_every_view() -> None:
    tables = BlockTables([plan(max_model_len=202_752, block_size=64)], max_rows=51)
    view = tables.tables[0]
    assert view.array.shape == view.kernel_array(range(51)).shape == (51, 3168)
    lower = plan(max_model_len=157_696, block_size=64)
    tables.append([50], [0, 1], [9])
    with pytest.raises(ArgumentError, match="rows are live"):
        tables.resize([lower])
    assert view.array.shape == (51, 3168)
    tables.clear([50])
    tables.resize([lower])
    assert view.array.shape == tables.tables[0].array.shape == view.kernel_array(range(51)).shape == (51, 2464)
    with pytest.raises(ArgumentError, match="2465 blocks, its width is 2464"):
        tables.append([0], [0, 2465], np.arange(1, 2466))
    assert count(tables, 0) == 0
    tables.append([0], [0, 2464], np.arange(1, 2465))
    mirror = Replica.from_snapshot(tables.snapshot())
    mirror.apply(tables.commit())
    assert mirror.tables[0].array.shape == (51, 2464)


def test_k2_case_6_an_append_past_the_width_changes_nothing() -> None:
    tables = BlockTables([plan(max_model_len=64, block_size=16)], max_rows=1)
    tables.append([0], [0, 3], [3, 7, 9])
    with pytest.raises(ArgumentError) as caught:
        tables.append([0], [0, 2], [5, 6])
    assert (caught.value.law, row(tables, 0), count(tables, 0)) == ("L2", [3, 7, 9, 0], 3)
    tables.append([0], [0, 1], [5])
    assert (row(tables, 0), count(tables, 0)) == ([3, 7, 9, 5], 4)
    with pytest.raises(ArgumentError):
        tables.append([0], [0, 1], [8])
    assert (row(tables, 0), count(tables, 0)) == ([3, 7, 9, 5], 4)


@pytest.mark.parametrize(
    ("limits", "blocks"),
    [
        ({"max_model_len": 4096, "block_size": 512, "extra_blocks": 3}, 11),
        ({"max_model_len": 4096, "block_size": 512}, 8),
        ({"max_model_len": 48 + 10, "lookahead": 4 - 1, "block_size": 16}, 4),
    ],
)
def test_k2_case_8_the_width_holds_draft_and_recurrent_blocks(limits: dict[str, int], blocks: int) -> None:
    geometry = plan(**limits)
    assert geometry.width == geometry.min_blocks == blocks
    tables = BlockTables([geometry], max_rows=1)
    tables.append([0], [0, blocks], np.arange(1, blocks + 1))
    with pytest.raises(ArgumentError, match=f"would hold {blocks + 1} blocks"):
        tables.append([0], [0, 1], [9])


def test_k2_k10_case_9_a_length_takes_the_ceiling_of_its_blocks() -> None:
    geometry = plan(max_model_len=80_000, block_size=128)
    assert geometry.width == 625
    tables = BlockTables([geometry], max_rows=1)
    need = {length: -(-length // 128) for length in (80_000, 80_001)}
    tables.append([0], [0, need[80_000]], np.arange(1, 626))
    assert slots(tables, [79_999, 80_000]) == [625 * 128 + 127, -1]
    with pytest.raises(ArgumentError, match="would hold 626 blocks, its width is 625"):
        tables.assign([0], [0, need[80_001]], np.arange(1, 627))
    pages = {1: (1, 1), 15: (1, 15), 16: (1, 16), 17: (2, 1), 32: (2, 16), 33: (3, 1)}
    paged = BlockTables([plan(max_model_len=48, block_size=16)], max_rows=1)
    for length, (n, last) in pages.items():
        assert plan(max_model_len=length, block_size=16).min_blocks == n
        assert (n - 1) * 16 + last == length
        paged.assign([0], [0, n], np.arange(1, n + 1))
        assert slots(paged, [length - 1]) == [n * 16 + last - 1]


def test_k3_case_10_a_position_past_the_row_has_no_slot() -> None:
    tables = BlockTables([plan(max_model_len=128, block_size=4)], max_rows=1)
    tables.append([0], [0, 32], np.arange(7, 39))
    assert slots(tables, [0, 3, 127, 128, 130]) == [28, 31, 155, -1, -1]


def test_k4_k5_case_12_a_finished_row_replaced_by_a_shorter_one_leaves_nothing() -> None:
    tables = BlockTables([plan(max_model_len=24, block_size=4)], max_rows=2)
    mirror = Replica(tables.groups, max_rows=2)
    tables.append([0, 1], [0, 6, 10], np.arange(1, 11))
    mirror.apply(tables.commit())
    tables.clear([0])
    tables.move([1], [0])
    mirror.apply(tables.commit())
    for one in (tables, mirror):
        assert one.tables[0].array.tolist() == [[7, 8, 9, 10, 0, 0], [0] * 6]
        assert one.tables[0].kernel_array([0, 1]).tolist() == [[7, 8, 9, 10, 0, 0], [0] * 6]
        assert one.tables[0].num_blocks.tolist() == [4, 0]


def test_k6_case_14_padding_positions_have_no_slot_though_the_last_block_has_room() -> None:
    tables = BlockTables([plan(max_model_len=1024, block_size=64)], max_rows=1)
    tables.append([0], [0, 5], [11, 12, 13, 14, 15])
    assert row(tables, 0) == [11, 12, 13, 14, 15, *[0] * 11]
    found = tables.slot_mapping([0], [0, 300], np.arange(1024), padded=1024)[0]
    assert (found[0], found[299]) == (704, 1003)
    assert found[300:].tolist() == [-1] * 724


def test_k5_case_15_a_window_gives_blocks_up_on_host_and_replica_in_one_step() -> None:
    group = Group(plan(max_model_len=32, block_size=4), kind="window", window=8)
    dead_tokens = max(0, 20 - 8 + 1)
    dead = dead_tokens // 4
    assert (dead_tokens, dead) == (13, 3)
    tables, mirror = BlockTables([group], max_rows=1), Replica([group], max_rows=1)
    tables.append([0], [0, 5], [5, 6, 7, 8, 9])
    mirror.apply(tables.commit())
    tables.release([0], [dead], 0)
    cache, follower = KVCache([group], num_blocks=10, max_rows=2, prefix_cache=False), Replica([group], max_rows=2)
    prompt(cache, 1, [1] * 16)
    cache.extend([0], [0, 20])
    assert cache.tables.tables[0].array[0, :5].tolist() == [5, 6, 7, 8, 9]
    before = cache.stats()["free"]
    cache.confirm([0], [20], [0, 20], [1] * 20)
    assert cache.stats()["free"] == before + 3
    cache.check()
    mirror.apply(tables.commit())
    follower.apply(cache.commit())
    for one in (tables, mirror, cache.tables, follower):
        assert one.tables[0].array[0, :5].tolist() == [0, 0, 0, 8, 9]
        assert int(one.tables[0].num_blocks[0]) == 5
        one.check()
    assert slots(tables, [0, 11, 12, 19]) == [-1, -1, 32, 39]
    tables.release([0], [2], 0)  # a total, not an increment
    assert row(tables, 0)[:5] == [0, 0, 0, 8, 9]


def test_k5_case_17_resuming_replaces_growing_appends() -> None:
    tables = BlockTables([plan(max_model_len=64, block_size=16)], max_rows=1)
    tables.append([0], [0, 3], [3, 4, 5])
    tables.clear([0])
    tables.append([0], [0, 2], [9, 10])
    assert (row(tables, 0), count(tables, 0)) == ([9, 10, 0, 0], 2)
    tables.clear([0])
    tables.append([0], [0, 0], [])
    assert (row(tables, 0), count(tables, 0)) == ([0, 0, 0, 0], 0)
    tables.append([0], [0, 3], [3, 4, 5])
    tables.assign([0], [0, 2], [9, 10])  # the same without the clear between
    assert (row(tables, 0), count(tables, 0)) == ([9, 10, 0, 0], 2)


def test_k6_case_18_a_pad_slot_is_no_address() -> None:
    tables = BlockTables([plan(max_model_len=16, block_size=16)], max_rows=1, num_blocks=5)
    tables.append([0], [0, 1], [2])
    found = tables.slot_mapping([0], [0, 3], [0, 1, 2], padded=8)[0]
    assert found.tolist() == [32, 33, 34, -1, -1, -1, -1, -1]
    cells = np.zeros(80, np.int32)
    cells[found[found >= 0]] = 1
    assert cells.nonzero()[0].tolist() == [32, 33, 34]
    assert cells[79] == 0


def test_k7_case_20_manager_blocks_become_kernel_blocks_in_order() -> None:
    geometry = split(640, 128, 640 * 3)
    assert geometry.kernel_ids([2, 0, 3]).tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 15, 16, 17, 18, 19]
    tables = BlockTables([Group(geometry, kind="state", state_blocks=3)], max_rows=1)
    tables.append([0], [0, 3], [2, 0, 3])
    assert tables.tables[0].kernel_array([0]).tolist() == [geometry.kernel_ids([2, 0, 3]).tolist()]
    wide = split(640, 128, 262_144)
    assert wide.kernel_width == 2050
    assert BlockTables([wide], max_rows=1).tables[0].kernel_array([0]).shape == (1, 2050)
    assert split(128, 64, 1024).kernel_ids([4, 9], num_tokens=160).tolist() == [8, 9, 18]


SIZES = (16, 32, 64)


@pytest.mark.parametrize(
    ("manager", "accepted", "chosen"),
    [(256, [(16, 32)], 32), (4192, [SIZES], 32), (2112, [SIZES], 64), (672, [SIZES, (MultipleOf(16),)], 32)],
)
def test_k8_case_21_the_largest_accepted_size_that_divides(
    manager: int, accepted: list[tuple[Any, ...]], chosen: int
) -> None:
    contracts = [Contract(f"c{i}", kernel_block_sizes=sizes) for i, sizes in enumerate(accepted)]
    geometry = plan(max_model_len=manager * 3, block_size=manager, contracts=contracts)
    assert geometry.kernel_block_size == chosen
    tables = BlockTables([geometry], max_rows=1)
    tables.append([0], [0, 3], [1, 2, 3])
    ratio = manager // chosen
    assert tables.tables[0].kernel_array([0])[0].tolist() == list(range(ratio, 4 * ratio))


def test_k8_case_21_no_accepted_size_names_both_sets() -> None:
    with pytest.raises(GeometryError) as caught:
        plan(max_model_len=64, block_size=16, contracts=[Contract("only64", kernel_block_sizes=(64,))])
    assert "16" in str(caught.value)
    assert "64" in str(caught.value)


def test_k9_case_22_each_position_has_one_owner_and_the_slot_is_local() -> None:
    tables = BlockTables([plan(max_model_len=16, block_size=4, cp_size=2, cp_interleave=1)], max_rows=1)
    assert tables.tables[0].array.shape == (1, 2)
    tables.append([0], [0, 2], [5, 8])
    pairs = [20, 21, 22, 23, 32, 33, 34, 35]
    assert slots(tables, range(16), cp_rank=0) == [s for slot in pairs for s in (slot, -1)]
    assert slots(tables, range(16), cp_rank=1) == [s for slot in pairs for s in (-1, slot)]


def test_k9_a_replicated_group_is_not_divided() -> None:
    """The divisor enters once per sharded group and never for a replicated one."""
    sharded, whole = plan(max_model_len=64, block_size=4, cp_size=2), plan(max_model_len=64, block_size=4)
    tables = BlockTables([sharded, whole], max_rows=1)
    assert [table.array.shape[1] for table in tables.tables] == [8, 16]
    tables.append([0], ([0, 1], [0, 2]), ([5], [6, 7]), group=None)
    found = tables.slot_mapping([0], [0, 8], range(8), cp_rank=1)
    assert found.tolist() == [[-1, 20, -1, 21, -1, 22, -1, 23], [24, 25, 26, 27, 28, 29, 30, 31]]


def test_k11_k12_case_24_nothing_is_freed_twice_and_growth_takes_the_difference() -> None:
    cache = KVCache([plan(max_model_len=240, block_size=16)], num_blocks=16, max_rows=4)

    def free() -> int:
        return cache.stats()["free"]

    cache.extend([3], [0, 1])
    assert free() == 14
    with pytest.raises(ArgumentError):
        cache.free([3, 3])
    assert free() == 14
    cache.free([3])
    assert free() == 15
    with pytest.raises(ArgumentError):
        cache.free([3])
    assert free() == 15
    for tokens, live in (100, 7), (200, 13):
        cache.extend([0], [0, tokens - int(cache.lengths[0])])
        assert (int(cache.tables.tables[0].num_blocks[0]), free()) == (live, 15 - live)
    with pytest.raises(OutOfBlocks) as caught:
        cache.extend([1], [0, 33])
    assert (caught.value.needed, caught.value.available, free()) == (3, 2, 2)
    cache.check()


def test_k15_ids_and_slots_are_exact_past_32_bits() -> None:
    tables = BlockTables([plan(max_model_len=32, block_size=16)], max_rows=1)
    tables.append([0], [0, 2], [134_217_728, 65_536])
    assert slots(tables, [0, 16]) == [2_147_483_648, 65_536 * 16]
    assert row(tables, 0) == [134_217_728, 65_536]
    geometry = plan(max_model_len=4096, block_size=16)
    geometry.check_pool(7767, 276_480)
    with pytest.raises(GeometryError, match="2147696640"):
        geometry.check_pool(7768, 276_480)


def test_k16_a_step_sends_the_changed_cells_not_the_table() -> None:
    """256 rows of 8192 columns are 8 MiB; one token each at block 32 changes 8 cells on average, 32 bytes of ids."""
    rows = np.arange(256)
    tables = BlockTables([plan(max_model_len=262_144, block_size=32)], max_rows=256)
    assert tables.tables[0].array.nbytes == 8_388_608
    tables.append(rows, np.arange(257) * 8, np.arange(1, 2049))
    tables.commit()
    lengths = 225 + rows % 32  # rows at every offset of their last block
    crossing = rows[lengths % 32 == 0]
    tables.append(crossing, np.arange(crossing.size + 1), 3000 + np.arange(crossing.size))
    delta = tables.commit()
    assert crossing.size == 8
    assert (delta.values.nbytes, delta.spans.shape) == (32, (8, 6))


def test_k17_no_python_object_per_block_on_the_way() -> None:
    """Appending 100,000 blocks makes a handful of Python objects, not one per block."""
    import tracemalloc

    tables = BlockTables([plan(max_model_len=100_000, block_size=1)], max_rows=1)
    rows, indptr, ids = np.array([0]), np.array([0, 100_000]), np.arange(1, 100_001, dtype=np.int32)
    tables.append(rows, indptr, ids)
    tables.clear(rows)
    tracemalloc.start()
    try:
        tables.append(rows, indptr, ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000, "ids in 64 bits take 800,000 bytes; a Python object per block would take four times that"


# ---- prefix cache and capacity


def prompt(cache: KVCache, index: int, tokens: list[int], **how: Any) -> int:
    return int(cache.admit([index], [0, len(tokens)], tokens, **how)[0][0])


def hit(cache: KVCache, tokens: list[int], salts: Any = None) -> int:
    return int(cache.lookup([0, len(tokens)], tokens, salts)[0])


def test_k13_a_fully_cached_prompt_leaves_its_last_token_to_compute() -> None:
    cache = KVCache([plan(max_model_len=128, block_size=16)], num_blocks=40, max_rows=1)
    text = list(range(128))
    prompt(cache, 0, text)
    cache.free([0])
    assert {n: hit(cache, text[:n]) for n in (1, 15, 16, 17, 64, 65)} == {1: 0, 15: 0, 16: 0, 17: 16, 64: 48, 65: 64}


def test_k14_an_adapter_is_not_a_salt_of_the_same_name() -> None:
    """The same bytes in another field are another history; so are two fields whose bytes run together alike."""
    keys = [salt(adapter="X"), salt(content="X"), salt(tenant="X"), salt(tenant="X", adapter="Y"), salt(tenant="XY")]
    assert len({*keys, b""}) == len(keys) + 1
    cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=40, max_rows=8)
    text = [5, 6, 7, 8, 9]
    for i, key in enumerate(keys):
        assert prompt(cache, i, text, salts=[key]) == 0
    assert prompt(cache, 7, text) == 0
    assert [hit(cache, text, [key]) for key in keys] == [4] * len(keys)
    assert hit(cache, text, [salt(adapter="Z")]) == 0


def test_k14_a_reissued_block_answers_for_neither_text_before_it_is_confirmed() -> None:
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=5, max_rows=2)
    old, new = [1] * 16, [2] * 16
    prompt(cache, 0, old)
    cache.free([0])
    assert hit(cache, old) == 12
    prompt(cache, 0, new, final=[0])  # all four blocks are reissued
    assert (hit(cache, old), hit(cache, new)) == (0, 0)
    cache.confirm([0], [8])
    assert (hit(cache, old), hit(cache, new)) == (0, 8)
    cache.free([0])
    assert (hit(cache, old), hit(cache, new)) == (0, 8)


def test_k14_a_block_that_is_written_anew_answers_no_more() -> None:
    """Cut into a shared block, which stays indexed for the other row; once that one is gone, writing ends it."""
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=9, max_rows=2)
    text = [1, 2, 3, 4, 5]
    prompt(cache, 0, text)
    assert prompt(cache, 1, text) == 4
    cache.truncate([1], [2])
    assert hit(cache, text) == 4
    cache.free([0])
    cache.extend([1], [0, 2], [8, 9])
    assert (hit(cache, text), hit(cache, [1, 2, 8, 9, 5])) == (0, 4)
    cache.check()


def test_k14_a_window_hit_needs_every_block_of_its_last_window() -> None:
    cache = KVCache([Group(plan(max_model_len=32, block_size=4), kind="window", window=8)], num_blocks=7, max_rows=2)
    text = list(range(16))
    prompt(cache, 0, text[:12])
    cache.extend([0], [0, 4], text[12:])  # block 0 is given back, and idle for the longest
    cache.extend([0], [0, 1], [16])
    cache.free([0])
    prompt(cache, 1, [90] * 12)  # takes the two free blocks, then block 0
    found = {length: hit(cache, [*text, 16][:length]) for length in (5, 9, 13, 17)}
    assert found == {5: 0, 9: 0, 13: 12, 17: 16}
    cache.check()


def test_k12_at_idle_free_and_cached_are_the_pool_exactly() -> None:
    cache = KVCache([plan(max_model_len=64, block_size=4)] * 2, num_blocks=61, max_rows=4)
    for step in range(30):
        length = 1 + 7 * step % 50
        prompt(cache, step % 3, [step % 4] * length)
        with pytest.raises((OutOfBlocks, ArgumentError)):
            cache.extend([step % 3], [0, 65])  # longer than the row: refused, and nothing leaks
        cache.free([step % 3])
        stats = cache.stats()
        assert (stats["free"] + stats["cached"], stats["held"], stats["fenced"]) == (60, 0, 0)
    cache.check()


@pytest.mark.parametrize("off", [160, -59])
def test_k12_blocks_too_many_or_too_few_are_said_with_their_sign(off: int) -> None:
    """As counts of 96 + 470016 are against a pool of 469952, and 644 + 269628 against one of 270331."""
    cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=101, max_rows=1)
    prompt(cache, 0, [1] * 64)
    cache._meta[FREE] += off
    with pytest.raises(LawBroken, match=re.escape(f"{off:+} against the pool's 100")) as caught:
        cache.check()
    assert caught.value.law == "L9"


def test_k11_a_row_is_freed_once() -> None:
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=9, max_rows=2)
    prompt(cache, 0, [1] * 9)
    for rows in ([0, 0], [1], [0, 1], [2], [-1]):
        with pytest.raises(ArgumentError):
            cache.free(rows)
        assert cache.stats()["held"] == 3
    cache.free([0])
    with pytest.raises(ArgumentError):
        cache.free([0])
    assert (cache.stats()["free"] + cache.stats()["cached"], cache.stats()["held"]) == (8, 0)


def test_k11_the_source_of_a_copy_waits_for_the_commit_after_its_fence_too() -> None:
    cache = KVCache([plan(max_model_len=8, block_size=4)], num_blocks=5, max_rows=3)
    prompt(cache, 0, [1, 2])
    cache.fork(0, 1)
    cache.extend([0], [0, 1], [3])  # row 0 gets a copy of the block that row 1 still holds
    cache.free([1], fence=1)
    assert (cache.stats()["held"], cache.stats()["fenced"], cache.stats()["free"]) == (1, 1, 2)
    cache.retire(1)
    assert (cache.stats()["fenced"], cache.stats()["free"]) == (1, 2), "the copy still reads it"
    with pytest.raises(OutOfBlocks):
        cache.admit([1, 2], [0, 5, 10], [7, 7, 7, 7, 7, 8, 8, 8, 8, 8])
    assert cache.commit().copies.shape == (1, 3)
    assert (cache.stats()["fenced"], cache.stats()["free"]) == (0, 3)
    cache.check()


def test_k13_what_can_never_fit_is_refused_at_once_with_the_largest_that_would() -> None:
    cache = KVCache([plan(max_model_len=48, block_size=16)], num_blocks=4, max_rows=2)
    with pytest.raises(NeverFits) as caught:
        prompt(cache, 0, [1] * 49)
    assert (caught.value.needed, caught.value.usable, caught.value.largest) == (4, 3, 48)
    prompt(cache, 0, [1] * 48)
    with pytest.raises(NeverFits):
        cache.extend([0], [0, 1])
    with pytest.raises(OutOfBlocks) as short:
        prompt(cache, 1, [2] * 17)
    assert (short.value.needed, short.value.available) == (2, 0)
    with pytest.raises(NeverFits) as pool:
        KVCache([plan(max_model_len=64, block_size=16)], num_blocks=4, max_rows=2)
    assert (pool.value.needed, pool.value.usable, pool.value.largest) == (4, 3, 48)


def test_k13_hits_on_idle_blocks_count_in_what_is_needed_and_in_what_is_there() -> None:
    """Three blocks are idle and hit, one is free: a prompt of five needs two more, and one is available."""
    cache = KVCache([plan(max_model_len=20, block_size=4)], num_blocks=6, max_rows=3)
    prompt(cache, 0, [1] * 12)
    cache.free([0])
    prompt(cache, 1, [9] * 3)
    with pytest.raises(OutOfBlocks) as caught:
        prompt(cache, 0, [1] * 20)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert prompt(cache, 0, [1] * 16) == 12
    assert cache.stats()["free"] == 0


def test_k13_headroom_stays_free_in_admit_and_extend() -> None:
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=7, max_rows=2)
    prompt(cache, 0, [1] * 8)
    for keep, fits in ((4, False), (3, True)):
        if not fits:
            with pytest.raises(OutOfBlocks) as caught:
                cache.extend([0], [0, 1], [1], headroom=keep)
            assert (caught.value.needed, caught.value.available) == (1, 4)
        else:
            cache.extend([0], [0, 1], [1], headroom=keep)
    with pytest.raises(OutOfBlocks):
        prompt(cache, 1, [2] * 5, headroom=2)
    assert prompt(cache, 1, [2] * 5, headroom=1) == 0
    assert cache.stats()["free"] == 1


def test_k5_windows_move_with_the_final_mark_not_with_the_length() -> None:
    """What steps in flight still read behind the mark stays; a confirmed mark gives it back at once."""
    cache = KVCache([Group(plan(max_model_len=12, block_size=2), kind="window", window=3)], num_blocks=12, max_rows=1)
    row = cache.tables.tables[0].array[0]
    prompt(cache, 0, [1] * 8, final=[1])
    cache.extend([0], [0, 1], final=[5])
    assert np.count_nonzero(row) == 5
    cache.extend([0], [0, 1], final=[5])
    assert (cache.lengths[0], cache.final[0], row[:2].tolist()[0], np.count_nonzero(row)) == (10, 5, 0, 4)
    cache.confirm([0], [8])
    assert (row[:3].tolist(), np.count_nonzero(row)) == ([0, 0, 0], 2)
    cache.check()


def test_k5_k12_a_window_of_the_cache_gives_each_block_back_once() -> None:
    cache = KVCache([Group(plan(max_model_len=32, block_size=4), kind="window", window=8)], num_blocks=12, max_rows=1)
    prompt(cache, 0, [3] * 20)
    mirror = Replica(cache.groups, max_rows=1)
    mirror.apply(cache.commit())
    cache.extend([0], [0, 1], [3])
    mirror.apply(cache.commit())
    for one in (cache.tables, mirror):
        live = one.tables[0].array[0].tolist()
        assert live[:3] == [0, 0, 0]
        assert all(live[3:6])
        assert live[6:] == [0, 0]
    stats = cache.stats()
    assert (stats["free"] + stats["cached"], stats["held"]) == (8, 3)


# ---- what was seen to go wrong in other systems, tried here


@pytest.fixture
def four() -> Iterator[BlockTables]:
    """Two rows of four columns, checked at the end."""
    tables = BlockTables([plan(max_model_len=64, block_size=16)] * 2, max_rows=2, num_blocks=100)
    yield tables
    tables.check()


def test_k4_five_ids_then_one_leaves_no_old_ids_behind(four: BlockTables) -> None:
    four.assign([0], [0, 4], [1, 2, 3, 4])
    four.assign([0], [0, 1], [9])
    assert (row(four, 0), count(four, 0)) == ([9, 0, 0, 0], 1)


def test_k4_a_short_row_moved_onto_a_long_one_leaves_no_old_ids_behind(four: BlockTables) -> None:
    four.append([0, 1], [0, 4, 5], [1, 2, 3, 4, 9])
    four.move([1], [0])
    assert four.tables[0].array.tolist() == [[9, 0, 0, 0], [0, 0, 0, 0]]


def test_k2_a_count_is_not_raised_by_an_append_that_fails(four: BlockTables) -> None:
    four.append([0], [0, 3], [1, 2, 3])
    with pytest.raises(ArgumentError, match="width"):
        four.append([0], [0, 2], [4, 5])
    assert count(four, 0) == 3


def test_k2_a_later_group_that_does_not_fit_leaves_the_first_untouched(four: BlockTables) -> None:
    with pytest.raises(ArgumentError, match="group 1"):
        four.append([0], ([0, 1], [0, 5]), ([1], [2, 3, 4, 5, 6]), group=None)
    assert (count(four, 0, 0), count(four, 0, 1), len(four.commit().spans)) == (0, 0, 0)


@pytest.mark.parametrize("bad", [-7, 10**9, 0, 100])
def test_k3_k6_an_id_outside_the_pool_is_refused(four: BlockTables, bad: int) -> None:
    with pytest.raises(ArgumentError):
        four.append([0], [0, 2], [1, bad])
    assert count(four, 0) == 0


def test_k11_a_forked_row_shares_its_blocks_and_each_owner_frees_once() -> None:
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=9, max_rows=3, prefix_cache=False)
    prompt(cache, 0, list(range(9)))
    cache.fork(0, 1)
    table = cache.tables.tables[0].array
    assert table[0].tolist() == table[1].tolist() == [1, 2, 3, 0]
    cache.free([0])
    assert cache.stats()["held"] == 3
    cache.free([1])
    assert cache.stats()["free"] == 8
    with pytest.raises(ArgumentError):
        cache.free([1])
    prompt(cache, 0, [1] * 16)
    prompt(cache, 1, [2] * 16)
    assert len({*table[0].tolist(), *table[1].tolist()}) == 8, "no block was free twice"


def test_k11_a_parent_and_its_fork_never_write_one_block() -> None:
    cache = KVCache([plan(max_model_len=16, block_size=4)], num_blocks=9, max_rows=2)
    prompt(cache, 0, [1, 2, 3, 4, 5, 6])
    cache.fork(0, 1)
    table = cache.tables.tables[0].array
    assert table[0].tolist() == table[1].tolist()
    written = cache.extend([0, 1], [0, 1, 2], [7, 8])[0].tolist()
    first, shared = table[0].tolist(), table[1].tolist()
    assert first[0] == shared[0], "whole blocks stay shared"
    assert first[1] != shared[1], "the block that both would write is copied"
    assert written == [first[1] * 4 + 2, shared[1] * 4 + 2]
    assert cache.commit().copies.tolist() == [[0, shared[1], first[1]]]
    assert len(cache.commit().copies) == 0
