"""KVCache by example: one test per sentence that an engine author relies on."""

import numpy as np
import pytest

import blocktable
from blocktable import ArgumentError, ConcurrentUse, Group, NeverFits, OutOfBlocks
from blocktable import _cache_layout as c
from blocktable.cache import KVCache
from blocktable.prefix import salt


def cache_of(num_blocks=64, max_rows=4, block=4, length=64, **how):
    return KVCache(
        [blocktable.plan(max_model_len=length, block_size=block)], num_blocks=num_blocks, max_rows=max_rows, **how
    )


def row(cache, r, group=0):
    return cache.tables.tables[group].array[r, : cache.tables.tables[group].num_blocks[r]].tolist()


def filled(cache, r, tokens, **how):
    cache.admit([r], [0, len(tokens)], tokens, **how)
    return row(cache, r)


def hit(cache, tokens, salts=None):
    return int(cache.lookup([0, len(tokens)], tokens, salts)[0])


def total(cache):
    stats = cache.stats()
    return sum(stats[name] for name in ("free", "cached", "held", "fenced"))


def test_the_last_token_of_a_cached_prompt_is_left_to_compute():
    cache = cache_of(block=16, length=128)
    text = list(range(100, 166))
    filled(cache, 0, text)
    assert [hit(cache, text[:n]) for n in (1, 15, 16, 17, 64, 65)] == [0, 0, 0, 16, 48, 64]


def test_a_hit_is_exact_in_tokens_history_and_salt():
    cache = cache_of()
    filled(cache, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9], salts=[b"a"])
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], [b"a"]) == 8
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], [b"b"]) == 0
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 0, 9], [b"a"]) == 4
    assert hit(cache, [5, 6, 7, 8, 9], [b"a"]) == 0


def test_salts_of_other_fields_differ():
    assert salt(adapter="X") != salt(content="X") != salt(tenant="X")
    assert salt(tenant="1") != salt(tenant=1)
    assert salt() == b""


def test_drafts_and_unknown_tokens_enter_only_when_confirmed():
    cache = cache_of()
    cache.extend([0], [0, 9], np.arange(9), final=[0])
    assert hit(cache, list(range(9))) == 0
    cache.extend([1], [0, 9])
    assert cache.final[:2].tolist() == [0, 0]
    cache.confirm([0, 1], [9, 9], [0, 9, 18], [*range(9), *range(10, 19)])
    assert hit(cache, list(range(9))) == hit(cache, list(range(10, 19))) == 8


def test_nothing_behind_an_unknown_token_is_final():
    cache = cache_of()
    cache.extend([0], [0, 1])
    cache.extend([0], [0, 8], list(range(1, 9)))
    assert cache.final[0] == 0
    cache.confirm([0], [1], [0, 1], [0])
    cache.extend([0], [0, 1], [9])
    assert cache.final[0] == 10
    assert hit(cache, list(range(10))) == 8


def test_a_pool_takes_less_than_200_bytes_per_block():
    cache = cache_of(num_blocks=10**6, max_rows=256, block=16, length=8192)
    assert sum(array.nbytes for array in cache._core) < 200 * 10**6


def test_confirm_replaces_rejected_drafts_and_keeps_what_is_minus_one():
    cache = cache_of()
    cache.extend([0], [0, 6], [1, 2, 3, 4, 5, 6], final=[2])
    cache.confirm([0], [5], [0, 3], [9, -1, 7])
    cache.truncate([0], [5])
    cache.extend([0], [0, 4], [8, 8, 8, 8])
    assert hit(cache, [1, 2, 9, 4, 7, 8, 8, 8, 0]) == 8
    assert hit(cache, [1, 2, 3, 4, 0]) == 0


def test_confirm_refuses_to_lower_to_pass_the_row_and_to_leave_a_gap():
    cache = cache_of()
    cache.extend([0], [0, 4], [1, 2, -1, 4])
    for lengths, tokens in (([1], None), ([5], None), ([3], None), ([4], [7]), ([3], [-1])):
        with pytest.raises(ArgumentError):
            cache.confirm([0], lengths, None if tokens is None else [0, len(tokens)], tokens)
    assert cache.final[0] == 2
    cache.confirm([0], [4], [0, 2], [3, -1])
    assert cache.final[0] == 4


def test_out_of_blocks_names_what_is_needed_and_changes_nothing():
    cache = cache_of(num_blocks=18, length=64)
    filled(cache, 0, list(range(60)))
    before = cache.stats()
    with pytest.raises(OutOfBlocks) as caught:
        cache.admit([1], [0, 12], np.arange(100, 112))
    assert (caught.value.needed, caught.value.available, caught.value.rows) == (3, 2, [1])
    with pytest.raises(OutOfBlocks):
        cache.extend([0, 1], [0, 4, 10], np.arange(10))
    assert cache.stats() == before
    slots, served = cache.extend([0, 1], [0, 4, 10], np.arange(10), partial=True)
    assert (slots.shape, served) == ((1, 4), 1)
    with pytest.raises(OutOfBlocks):
        cache.extend([1], [0, 1], [5], headroom=1)


def test_what_the_same_call_adopts_is_not_available():
    cache = cache_of(num_blocks=17, length=64)
    filled(cache, 0, list(range(40)))
    cache.free([0])
    with pytest.raises(OutOfBlocks) as caught:
        cache.admit([1, 2], [0, 41, 65], [*range(41), *range(200, 224)])
    assert caught.value.needed > caught.value.available
    assert cache.lengths.tolist() == [0, 0, 0, 0]
    assert hit(cache, list(range(41))) == 40
    cache.check()


def test_a_row_that_never_fits_is_refused_with_the_longest_that_would():
    cache = cache_of(num_blocks=64, length=64)
    with pytest.raises(NeverFits) as caught:
        cache.admit([0], [0, 65], np.arange(65))
    assert (caught.value.needed, caught.value.usable, caught.value.largest) == (17, 16, 64)
    with pytest.raises(NeverFits) as caught:
        KVCache([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=16, max_rows=1)
    assert (caught.value.needed, caught.value.usable, caught.value.largest) == (16, 15, 60)


def test_evictions_take_the_longest_idle_and_its_leaves_first():
    cache = cache_of(num_blocks=17, length=64)
    for r, first in ((0, 0), (1, 100)):
        filled(cache, r, list(range(first, first + 32)))
    cache.free([0])
    cache.free([1])
    filled(cache, 2, list(range(200, 209)))
    assert hit(cache, list(range(33))) == 20
    assert hit(cache, list(range(100, 133))) == 32
    assert cache.stats()["evictions"] == 3


def test_a_block_that_had_to_wait_for_a_step_is_evicted_on_its_own_turn():
    """Fenced later or not at all, a root given back behind its leaves stays behind them."""
    for fences in ((1, 2, None), (2, 2, None), (1, 2, 3), (None, 2, None), (1, 1, 1)):
        cache = cache_of(num_blocks=8, block=1, length=7)
        filled(cache, 0, [5, 6, 7])
        cache.fork(0, 1)
        cache.free([1], fences[0])
        cache.truncate([0], [1], fences[1])
        cache.free([0], fences[2])
        cache.retire(3)
        filled(cache, 2, [9] * 5)
        assert cache.stats()["evictions"] == 1
        assert hit(cache, [5, 6, 7, 8]) == 2
        cache.check()


def test_the_order_of_idle_blocks_outlives_the_clock_that_keeps_it():
    cache = cache_of(num_blocks=25)
    for r, first in enumerate((100, 200, 300)):
        filled(cache, r, list(range(first, first + 17)))
    cache._meta[c.CLOCK] = 2**31 - 9
    cache.free([0])
    cache.free([1], 1)
    cache.check()
    cache.free([2])
    assert cache._meta[c.CLOCK] < 100
    cache.check()
    cache.retire(1)
    cache.check()
    filled(cache, 0, list(range(400, 400 + 60)))  # 15 blocks: 12 free ones and 3 evicted
    assert [hit(cache, list(range(first, first + 17))) for first in (100, 200, 300)] == [4, 16, 16]


def test_a_hit_takes_idle_blocks_back_into_use():
    cache = cache_of()
    before = filled(cache, 0, list(range(9)))
    cache.free([0])
    assert cache.match([1], [0, 9], np.arange(9)).tolist() == [8]
    assert row(cache, 1) == before[:2]
    assert cache.stats()["cached"] == 0


def test_several_blocks_may_back_a_prefix_and_it_answers_while_one_lives():
    cache = cache_of()
    for r in (0, 1):
        cache.extend([r], [0, 9], np.arange(9))
    assert row(cache, 0) != row(cache, 1)
    cache.truncate([0], [0])
    assert hit(cache, list(range(9))) == 8
    cache.check()


def test_of_several_blocks_that_hold_the_same_the_oldest_is_adopted():
    cache = cache_of()
    for r in (1, 0):
        cache.extend([r], [0, 9], np.arange(9))
    assert filled(cache, 2, list(range(9)))[:2] == row(cache, 1)[:2]
    cache.free([1, 2])
    assert filled(cache, 2, list(range(9)))[:2] != row(cache, 0)[:2]


def test_truncate_into_a_cached_block_forgets_it():
    cache = cache_of()
    filled(cache, 0, list(range(8)))
    cache.truncate([0], [6])
    assert hit(cache, list(range(9))) == 4
    cache.extend([0], [0, 2], [6, 7])
    assert hit(cache, list(range(9))) == 8


def test_a_block_that_only_a_cut_row_holds_is_forgotten_whoever_cached_it():
    cache = KVCache(
        [Group(blocktable.plan(max_model_len=9, block_size=3), kind="window", window=2)], num_blocks=7, max_rows=2
    )
    filled(cache, 0, [1, 2, 3, 4, 5, 6], final=[0])
    cache.fork(0, 1)
    cache.confirm([0], [6])  # row 0 caches both blocks, and leaves the first to row 1
    assert hit(cache, [1, 2, 3, 9]) == 3
    cache.truncate([1], [1])
    assert hit(cache, [1, 2, 3, 9]) == 0
    cache.check()


def test_fenced_blocks_answer_and_may_be_adopted_but_are_not_reissued():
    cache = cache_of(num_blocks=17, length=64)
    filled(cache, 0, list(range(64)))
    cache.free([0], fence=7)
    assert cache.stats()["fenced"] == 16
    assert hit(cache, list(range(64))) == 60
    with pytest.raises(OutOfBlocks):
        cache.extend([1], [0, 1], [1])
    assert cache.match([2], [0, 9], np.arange(9)).tolist() == [8]
    cache.free([2])
    assert cache.stats()["fenced"] == 16
    cache.retire(6)
    assert cache.stats()["fenced"] == 16
    cache.retire(7)
    assert (cache.stats()["fenced"], cache.stats()["cached"]) == (0, 16)
    for fence in (6, 7):
        with pytest.raises(ArgumentError):
            cache.truncate([1], [0], fence=fence) if 1 in cache.acquire_rows(0) else cache.free([1], fence=fence)


def test_each_fence_is_retired_by_itself_and_with_those_before():
    cache = cache_of()
    for r in range(4):
        filled(cache, r, [r] * 8)
        cache.free([r], fence=10 * r)
    for n, fenced in ((-1, 8), (0, 6), (9, 6), (25, 2), (24, 2), (30, 0)):
        cache.retire(n)
        assert cache.stats()["fenced"] == fenced
        cache.check()


def test_fences_are_numbered_anew_before_their_numbers_run_out(monkeypatch):
    monkeypatch.setattr("blocktable.cache._MOST_EPOCHS", 3)
    cache = cache_of(num_blocks=17)
    for step in range(20):
        filled(cache, 0, list(range(9)))
        cache.free([0], fence=10 * step)
        assert cache.stats()["fenced"] == 3
        cache.retire(10 * step)
        assert cache.stats()["fenced"] == 0
        cache.check()


def test_no_rows_are_a_call_too():
    cache = cache_of()
    assert cache.extend([], [0]).shape == (1, 0)
    assert cache.extend([], [0], [], partial=True)[1] == 0
    cached, slots = cache.admit([], [0], [])
    assert (cached.shape, slots.shape) == ((0,), (1, 0))
    assert cache.lookup([0], []).size == 0
    cache.confirm([], [])
    cache.truncate([], [])
    cache.free([])
    assert cache.commit().seq == 1


def test_a_fork_shares_every_block_and_the_first_write_copies():
    cache = cache_of()
    before = filled(cache, 0, list(range(6)))
    cache.commit()
    free = cache.stats()["free"]
    cache.fork(0, 1)
    assert row(cache, 1) == before
    assert cache.stats()["free"] == free
    cache.extend([0, 1], [0, 1, 2], [6, 7])
    copies = cache.commit().copies.tolist()
    assert copies == [[0, before[1], row(cache, 0)[1]]]
    assert row(cache, 1) == before
    assert cache.commit().copies.size == 0


def test_the_source_of_a_copy_is_not_reissued_before_the_commit():
    cache = cache_of(num_blocks=17, length=64)
    filled(cache, 0, list(range(6)))
    cache.fork(0, 1)
    cache.extend([0], [0, 1], [6])
    cache.free([1])
    assert cache.stats()["fenced"] == 1
    cache.commit()
    assert cache.stats()["fenced"] == 0
    assert total(cache) == 16


def test_copies_count_in_what_extend_needs():
    cache = cache_of(num_blocks=17, length=64)
    filled(cache, 0, list(range(62)))
    cache.fork(0, 1)
    with pytest.raises(OutOfBlocks) as caught:
        cache.extend([1], [0, 1], [1])
    assert (caught.value.needed, caught.value.available) == (1, 0)


def test_windows_give_blocks_back_with_the_final_mark_in_the_same_commit():
    geometry = blocktable.plan(max_model_len=64, block_size=4)
    cache = KVCache([Group(geometry, kind="window", window=8)], num_blocks=20, max_rows=2)
    filled(cache, 0, list(range(20)))
    assert 0 not in row(cache, 0)
    cache.extend([0], [0, 1], final=[20])
    assert row(cache, 0)[:3] == [0, 0, 0]
    assert cache.stats()["cached"] == 3
    with pytest.raises(ArgumentError) as caught:
        cache.truncate([0], [18])
    assert caught.value.least == 19
    replica = blocktable.Replica([Group(geometry, kind="window", window=8)], max_rows=2)
    replica.apply(cache.commit())
    assert replica.tables[0].array[0].tolist() == cache.tables.tables[0].array[0].tolist()


def test_a_window_needs_only_the_blocks_of_its_last_window():
    geometry = blocktable.plan(max_model_len=64, block_size=4)
    cache = KVCache([Group(geometry, kind="window", window=8)], num_blocks=17, max_rows=2)
    filled(cache, 0, list(range(40)))
    cache.extend([0], [0, 1], [40])
    cache.extend([1], [0, 24], np.arange(100, 124))  # takes what the window gave back
    assert cache.stats()["evictions"] > 0
    assert hit(cache, list(range(41))) == 40
    cache.check()


def test_prefixes_that_a_window_left_without_a_block_are_capped_and_the_oldest_forgotten_first():
    group = Group(blocktable.plan(max_model_len=64, block_size=1), kind="window", window=3)
    cache = KVCache([group], num_blocks=12, max_rows=2)
    for token in range(40):
        cache.extend([0], [0, 1], [token])
        assert cache._meta[c.BLOCKLESS] == min(max(token + 1 - 11, 0), 12)  # 11 prefixes have a block, held or idle
        cache.check()
        kept = token + 1 - 11 <= 12  # else the beginning is gone, and nothing behind it is found
        assert hit(cache, [*range(token + 1), 0]) == (token + 1 if kept else 0)


def test_hybrid_hits_are_the_longest_that_every_group_can_serve():
    full, half = (blocktable.plan(max_model_len=64, block_size=n) for n in (8, 4))
    cache = KVCache([full, Group(half, kind="window", window=5)], num_blocks=40, max_rows=2)
    cache.admit([0], [0, 30], np.arange(30))
    assert hit(cache, list(range(30))) == 24
    assert cache.match([1], [0, 30], np.arange(30)).tolist() == [24]
    assert row(cache, 1, 0) == row(cache, 0, 0)[:3]
    assert row(cache, 1, 1) == [0] * 5 + row(cache, 0, 1)[5:6]


def test_state_groups_hold_a_fixed_number_of_blocks_and_never_hit():
    geometry = blocktable.plan(max_model_len=64, block_size=4)
    state = Group(blocktable.plan(max_model_len=64, block_size=64, extra_blocks=2), kind="state", state_blocks=3)
    cache = KVCache([geometry, state], num_blocks=40, max_rows=2)
    _, slots = cache.admit([0], [0, 9], np.arange(9))
    assert slots[1].tolist() == [-1] * 9
    assert len(row(cache, 0, 1)) == 3
    assert hit(cache, list(range(9))) == 0
    cache.fork(0, 1)
    cache.extend([0], [0, 1], [9])
    assert len(cache.commit().copies) == 4
    with pytest.raises(ArgumentError) as caught:
        cache.truncate([0], [9])
    assert caught.value.least == 10


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.5, "8", 2**31, 2**40, 2**70])
def test_absurd_pools_are_refused(num_blocks):
    with pytest.raises(ArgumentError) as caught:
        cache_of(num_blocks=num_blocks)
    assert "num_blocks" in str(caught.value)


def test_rings_are_refused_by_name():
    geometry = blocktable.plan(max_model_len=64, block_size=4)
    with pytest.raises(ArgumentError, match="ring"):
        KVCache([Group(geometry, kind="ring")], num_blocks=40, max_rows=1)


def test_reset_prefix_forgets_also_what_rows_in_use_go_on_to_compute():
    cache = cache_of()
    filled(cache, 0, list(range(9)))
    filled(cache, 1, list(range(50, 59)))
    cache.free([1])
    cache.reset_prefix()
    assert cache.stats()["cached"] == 0
    cache.extend([0], [0, 4], [9, 10, 11, 12])
    assert hit(cache, list(range(13))) == 0
    assert hit(cache, list(range(8, 13))) == 0, "what stands behind the forgotten is no prompt of its own"
    filled(cache, 1, list(range(9)))
    assert hit(cache, list(range(13))) == 8
    cache.check()


def test_a_later_row_of_one_admit_hits_what_an_earlier_one_registered():
    cache = cache_of()
    cached, slots = cache.admit([0, 1], [0, 9, 18], [*range(9), *range(9)])
    assert cached.tolist() == [0, 8]
    assert slots.shape == (1, 10)


def test_limit_and_final_of_admit():
    cache = cache_of()
    cached, slots = cache.admit([0], [0, 20], np.arange(20), limit=6)
    assert (cached.tolist(), slots.shape, cache.lengths[0]) == ([0], (1, 6), 6)
    cache.admit([1], [0, 20], np.arange(20), limit=[3], final=[2])
    assert (cache.lengths[1], cache.final[1]) == (7, 4)


def test_salts_are_fixed_by_opening():
    cache = cache_of()
    cache.extend([0], [0, 1], [1], salts=[b"a"])
    cache.extend([0], [0, 1], [2], salts=[None])
    cache.extend([0], [0, 1], [2], salts=[b"a"])
    for other in (b"b", b""):
        with pytest.raises(ArgumentError):
            cache.extend([0], [0, 1], [2], salts=[other])
    for wrong in (b"a", ["a"], [b"a", b"b"]):
        with pytest.raises(ArgumentError):
            cache.extend([0], [0, 1], [2], salts=wrong)


def test_thousands_of_salts_leave_nothing_behind():
    cache = cache_of(num_blocks=17)
    for n in range(400):
        cache.extend([0], [0, 9], np.arange(9), salts=[str(n).encode()])
        cache.free([0])
    assert len(cache._roots) < 150
    cache.check()


def test_a_freed_row_is_not_freed_again():
    cache = cache_of()
    filled(cache, 0, [1, 2])
    before = cache.stats()
    for rows in ([0, 0], [1], [-1], [4], [0, 1]):
        with pytest.raises(ArgumentError):
            cache.free(rows)
    assert cache.stats() == before
    cache.free([0])
    with pytest.raises(ArgumentError):
        cache.free([0])
    assert total(cache) == 63


def test_tokens_of_more_than_31_bits_are_told_apart():
    cache = cache_of()
    text = np.arange(9) + 2**40
    filled(cache, 0, np.arange(9, dtype=np.int32))
    filled(cache, 1, text)
    assert hit(cache, list(range(9))) == 8
    assert hit(cache, text.tolist()) == 8
    assert hit(cache, (text + 2**32).tolist()) == 0
    with pytest.raises(ArgumentError):
        cache.extend([2], [0, 1], [-2])
    cache.check()


def test_ragged_input_that_does_not_fit_is_refused():
    cache = cache_of()
    for rows, indptr, tokens in (
        ([0], [0, 2], [1]),
        ([0], [0, 1], [1, 2]),
        ([0], [1, 2], [1, 2]),
        ([0], [0], [1]),
        ([0], [], []),
        ([0, 1], [0, 2, 1], [1, 2]),
        ([0, 0], [0, 1, 2], [1, 2]),
        ([9], [0, 1], [1]),
        ([0], [0, 1], [1.5]),
    ):
        for verb in (cache.extend, cache.admit, cache.match):
            with pytest.raises(ArgumentError):
                verb(rows, indptr, tokens)
    with pytest.raises((ArgumentError, NeverFits)):
        cache.extend([0], [0, 2**62])
    for indptr in ([0, 1, 300, 2], [0, 1, 300, 299]):  # row 1 does not fit, and what comes behind is wrong all the same
        with pytest.raises(ArgumentError):
            cache.extend([0, 1, 2], indptr, np.zeros(indptr[-1], int), partial=True, headroom=62)
    assert cache.stats()["free"] == 63


def test_the_tables_are_read_only_from_outside():
    cache = cache_of()
    for verb in ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy", "resize", "commit"):
        with pytest.raises(ArgumentError, match="KVCache"):
            getattr(cache.tables, verb)()
    for view in (cache.lengths, cache.final, cache.tables.tables[0].array):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


def test_one_thread_owns_the_cache():
    cache = cache_of()
    with cache.tables._sole("a test"):
        for call in (
            lambda: cache.extend([0], [0, 1]),
            lambda: cache.admit([0], [0, 1], [1]),
            lambda: cache.lookup([0, 1], [1]),
            lambda: cache.confirm([0], [0]),
            lambda: cache.truncate([0], [0]),
            lambda: cache.free([0]),
            lambda: cache.fork(0, 1),
            lambda: cache.retire(1),
            lambda: cache.acquire_rows(1),
            cache.commit,
            cache.stats,
            cache.reset_prefix,
            cache.snapshot,
        ):
            with pytest.raises(ConcurrentUse):
                call()


def test_acquire_rows_proposes_the_lowest_unused():
    cache = cache_of()
    cache.match([1], [0, 1], [5])
    assert cache.acquire_rows(2).tolist() == [0, 2]
    with pytest.raises(ArgumentError):
        cache.acquire_rows(4)


def test_growing_the_index_keeps_it():
    cache = KVCache([blocktable.plan(max_model_len=400, block_size=1)], num_blocks=420, max_rows=9)
    core = list(cache._core)
    core[6], core[8], core[10] = core[6][: 9 * 8].copy(), core[8][:8].copy(), core[10][:3].copy()
    cache._core = tuple(core)  # room for eight nodes and one copy
    cache.extend([0], [0, 100], np.arange(100), final=[0])
    for into in range(1, 9):
        cache.fork(0, into)
    cache.confirm(list(range(9)), [100] * 9)
    assert hit(cache, list(range(100))) == 99
    cache.free([8])
    cached, _ = cache.admit([8], [0, 150], [*range(70), *range(200, 280)])
    assert cached[0] == 70
    cache.truncate([8], [30])
    cache.check()


def test_copies_find_room():
    cache = cache_of(max_rows=4, num_blocks=64)
    core = list(cache._core)
    core[10] = core[10][:3].copy()
    cache._core = tuple(core)
    filled(cache, 0, list(range(6)))
    for into in (1, 2, 3):
        cache.fork(0, into)
    cache.extend([0, 1, 2, 3], [0, 1, 2, 3, 4], [6, 7, 8, 9])
    assert len(cache.commit().copies) == 3
    cache.check()


def test_chosen_collisions_find_the_candidate_and_are_refused(monkeypatch):
    cache = cache_of(num_blocks=200, length=64)
    cache._core[7][:] = 0
    small = np.zeros(1, np.int32)
    core = list(cache._core)
    core[7] = small  # one bucket: every prefix collides with every other
    cache._core = tuple(core)
    texts = [[n, n + 1, n + 2, n + 3, 0] for n in range(40)]
    for text in texts:
        filled(cache, 0, text)
        cache.free([0])
    assert [hit(cache, text) for text in texts] == [4] * 40
    assert hit(cache, [0, 1, 2, 4, 0]) == 0
    cache.check()
