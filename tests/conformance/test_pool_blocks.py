"""Our block pool beside vLLM's own, called as its managers and connectors call it; no engine."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from blocktable.errors import LawBroken

pytestmark = pytest.mark.conformance

SIZE = 4  # tokens of the blocks of group 0, and of what is hashed; those of group 1 have twice as many
BLOCKS = 24


@pytest.fixture
def vllm(real, ask):
    """Return what the tests need of vLLM, and our pool."""
    utils = real("vllm.v1.core.kv_cache_utils")
    return SimpleNamespace(
        stock=real("vllm.v1.core.block_pool").BlockPool,
        ours=real("blocktable.integrations.vllm_pool_blocks").Pool,
        ask=partial(ask, size=SIZE),
        key=utils.make_block_hash_with_group_id,
        told=utils.maybe_convert_block_hash,
    )


class Metrics:
    """What a pool tells its metrics collector."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *blocks: self.told.append((name, *(block.block_id for block in blocks)))


class Both:
    """One call after the other on both pools; blocks go in and come out as their ids."""

    def __init__(self, vllm, *, caching=True, events=False, metrics=False, blocks=BLOCKS):
        self.metrics = [Metrics() if metrics else None for _ in range(2)]
        self.reused = [[], []]
        self.pools = [
            kind(blocks, caching, SIZE, enable_kv_cache_events=events, metrics_collector=one)
            for kind, one in zip((vllm.stock, vllm.ours), self.metrics, strict=True)
        ]

    def call(self, name, *args, blocks=None, **named):
        results = []
        for side, pool in enumerate(self.pools):
            given = [pool.blocks[number] for number in blocks] if blocks is not None else None
            if name == "unpin_blocks":
                args = (lambda block, side=side: self.reused[side].append(block.block_id),)
            try:
                found = getattr(pool, name)(*([given] if given is not None else []), *args, **named)
            except ValueError as error:
                found = str(error)
            results.append(
                [one.block_id for one in found] if isinstance(found, list) and name != "take_events" else found
            )
        assert results[0] == results[1], name
        self.same()
        return results[0]

    def cache(self, request, blocks, first, last, size, group, mask=None):
        for pool in self.pools:
            row = [pool.blocks[number] for number in blocks]
            pool.cache_full_blocks(request, row, first, last, size, group, block_mask=mask)
        self.same()

    def same(self):
        states = [
            (
                [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
                [(block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
                {
                    key: list(value) if isinstance(value, dict) else [value.block_id]
                    for key, value in pool.cached_block_hash_to_block._cache.items()
                },
                pool.cached_block_hashes_by_block,
                pool.kv_event_queue,
                pool.get_usage(),
                pool.get_num_free_blocks(),
                metrics and metrics.told,
                reused,
            )
            for pool, metrics, reused in zip(self.pools, self.metrics, self.reused, strict=True)
        ]
        assert states[0] == states[1]
        self.pools[1].check()

    def free(self):
        return [block.block_id for block in self.pools[1].free_block_queue.get_all_free_blocks()]


@pytest.fixture
def both(vllm):
    return lambda **given: Both(vllm, **given)


class Users:
    """Requests that take, cache, share and give back blocks in any order."""

    def __init__(self, vllm, pools, seed):
        self.vllm, self.pools, self.draw = vllm, pools, random.Random(seed)  # noqa: S311 - test data
        self.rows = []  # a request, its group, its blocks, how many of them are cached

    def act(self):
        verbs = [self.ask] * 4 + [self.grow] * 6 + [self.leave] * 3 + [self.partial] * 2
        self.draw.choice([*verbs, self.evict, self.reset, self.move, self.unpin, self.events, self.shrink])()
        self.pools.pools[1].check([row for _, _, row, _ in self.blocks()])

    def blocks(self):
        ours = self.pools.pools[1].blocks
        return [(request, group, [ours[number] for number in row], cached) for request, group, row, cached in self.rows]

    def ask(self):
        tokens = [self.draw.randrange(2) for _ in range(SIZE * self.draw.randrange(1, 9))]
        adapter = {"adapter": ("adapter", 1, "nowhere")}
        seen = {"images": [(self.draw.choice("ab"), self.draw.randrange(8), 4)]}
        beside = self.draw.choice([{}, {}, {}, {"salt": "s"}, adapter, seen, seen | adapter])
        request, group = self.vllm.ask(tokens, **beside), self.draw.randrange(2)
        hits = []
        for i in range(group, len(request.block_hashes), group + 1):
            hit = self.pools.call("get_cached_block", request.block_hashes[i], [group])
            if hit is None:
                break
            hits += hit
        if group == 0:
            longest = self.pools.pools[1].longest_hit(request.block_hashes, len(request.block_hashes), 0)
            assert [block.block_id for block in longest] == hits
        self.pools.call("touch", blocks=hits)
        self.rows.append([request, group, hits, len(hits)])

    def grow(self):
        if not self.rows:
            return
        one = self.draw.choice(self.rows)
        request, group, row, cached = one
        want = len(request.block_hashes) // (group + 1) - len(row)
        got = self.pools.call("get_new_blocks", self.draw.randrange(want + 1) if want > 0 else 0)
        if isinstance(got, str):
            return
        row += got
        if self.pools.pools[0].enable_caching and cached < len(row):
            last = self.draw.randrange(cached, len(row)) + 1
            mask = [self.draw.random() < 0.7 for _ in range(last - cached)] if self.draw.random() < 0.3 else None
            self.pools.cache(request, row, cached, last, SIZE * (group + 1), group, mask)
            one[3] = last

    def leave(self):
        if self.rows:
            _, _, row, _ = self.rows.pop(self.draw.randrange(len(self.rows)))
            self.pools.call("free_blocks", blocks=row[::-1])

    def shrink(self):
        if self.rows:
            row = self.draw.choice(self.rows)[2]
            if row and row[0]:
                self.pools.call("free_blocks", blocks=[row[0]])
                row[0] = 0

    def partial(self):
        wide = [one for one in self.rows if one[1] == 1 and one[3] < len(one[2])]
        if wide and self.pools.pools[0].enable_caching:
            request, group, row, cached = self.draw.choice(wide)
            again = self.draw.random() < 0.2
            for pool in self.pools.pools:
                pool.cache_partial_block(
                    request,
                    pool.blocks[row[cached]],
                    (2 * cached + 1) * SIZE,
                    group,
                    2 * SIZE,
                    replace_existing_hashes=again,
                )
            self.pools.same()

    def evict(self):
        numbers = self.draw.sample(range(1, BLOCKS), 3)
        for pool in self.pools.pools:
            pool.evict_blocks(dict.fromkeys(numbers).keys())
        self.pools.same()

    def reset(self):
        self.pools.call("reset_prefix_cache")

    def move(self):
        held = [number for _, _, row, _ in self.rows for number in row]
        theirs = self.pools.pools[0]
        to = [one for one in held if one and theirs.blocks[one].block_hash is None]
        if to and len(held) > len(to):
            source = next((one for one in held if theirs.blocks[one].block_hash is not None), None)
            if source is not None:
                for pool in self.pools.pools:
                    pool.move_block_hashes(pool.blocks[source], pool.blocks[to[0]])
                self.pools.same()

    def unpin(self):
        if self.rows:
            _, _, row, _ = self.rows.pop()
            if 0 in row:
                self.pools.call("free_blocks", blocks=row[::-1])
            else:
                self.pools.call("unpin_blocks", blocks=row)

    def events(self):
        self.pools.call("take_events")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "given",
    [{}, {"caching": False}, {"events": True}, {"metrics": True}, {"events": True, "metrics": True, "blocks": 60}],
    ids=["plain", "no caching", "events", "metrics", "all"],
)
def test_any_order_of_calls_leaves_both_pools_alike(vllm, both, given, seed):
    users = Users(vllm, both(**given), seed)
    for _ in range(150):
        users.act()
    while users.rows:
        users.leave()
    assert len(users.pools.free()) == given.get("blocks", BLOCKS) - 1


def test_blocks_come_in_order_then_the_last_freed_first_and_cached_ones_last_the_tail_before_the_head(vllm, both):
    pools = both(blocks=11)
    request = vllm.ask([1] * SIZE * 3)
    row = pools.call("get_new_blocks", 3)
    other = pools.call("get_new_blocks", 2)
    assert (row, other) == ([1, 2, 3], [4, 5])
    pools.cache(request, row, 0, 3, SIZE, 0)
    pools.call("free_blocks", blocks=row[::-1])
    pools.call("free_blocks", blocks=other)
    assert pools.free() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]


def test_a_hit_takes_a_block_out_of_the_free_list_and_keeps_it_from_eviction(vllm, both):
    pools = both(blocks=5)
    request = vllm.ask([1] * SIZE * 2)
    pools.cache(request, pools.call("get_new_blocks", 2), 0, 2, SIZE, 0)
    pools.call("free_blocks", blocks=[2, 1])
    pools.call("touch", blocks=pools.call("get_cached_block", request.block_hashes[0], [0]))
    assert pools.call("get_new_blocks", 3) == [3, 4, 2]
    assert pools.call("get_cached_block", request.block_hashes[0], [0]) == [1]
    assert pools.call("get_cached_block", request.block_hashes[1], [0]) is None
    assert pools.call("get_new_blocks", 1) == "Cannot get 1 free blocks from the pool"


def test_of_blocks_with_one_hash_the_first_cached_answers_until_it_is_evicted(vllm, both):
    pools = both()
    one, two, three = (vllm.ask([1] * SIZE) for _ in range(3))
    for request, block in zip((one, two, three), pools.call("get_new_blocks", 3), strict=True):
        pools.cache(request, [block], 0, 1, SIZE, 0)
    assert pools.call("get_cached_block", one.block_hashes[0], [0]) == [1]
    pools.call("evict_blocks", {1})
    assert pools.call("get_cached_block", one.block_hashes[0], [0]) == [2]
    pools.call("evict_blocks", {3})
    pools.call("evict_blocks", {2})
    assert pools.call("get_cached_block", one.block_hashes[0], [0]) is None


def test_a_hit_needs_every_group_and_groups_do_not_answer_for_each_other(vllm, both):
    pools = both()
    request = vllm.ask([1] * SIZE)
    pools.cache(request, pools.call("get_new_blocks", 1), 0, 1, SIZE, 0)
    assert pools.call("get_cached_block", request.block_hashes[0], [0, 1]) is None
    pools.cache(request, pools.call("get_new_blocks", 1), 0, 1, SIZE, 1)
    assert pools.call("get_cached_block", request.block_hashes[0], [0, 1]) == [1, 2]


def test_an_adapter_has_a_cache_of_its_own_and_is_named_in_its_events(vllm, both):
    pools = both(events=True)
    adapted = vllm.ask([1] * SIZE, adapter=("adapter", 7, "nowhere"))
    pools.cache(adapted, pools.call("get_new_blocks", 1), 0, 1, SIZE, 0)
    assert pools.call("get_cached_block", vllm.ask([1] * SIZE).block_hashes[0], [0]) is None
    (stored,) = pools.call("take_events")
    assert (stored.lora_id, stored.lora_name) == (7, "adapter")


# What two requests have beside the same sixteen tokens, and how many of their four blocks are alike.
BESIDE = {
    "image": ({"images": [("a", 5, 5)]}, {"images": [("a", 5, 5)]}, 4),
    "another image": ({"images": [("a", 5, 5)]}, {"images": [("b", 5, 5)]}, 1),
    "elsewhere": ({"images": [("a", 5, 5)]}, {"images": [("a", 6, 5)]}, 1),
    "no image": ({"images": [("a", 9, 2)]}, {}, 2),
    "one more image": ({"images": [("a", 1, 2)]}, {"images": [("a", 1, 2), ("b", 12, 4)]}, 3),
    "another adapter": ({"adapter": ("x", 1, "path")}, {"adapter": ("y", 1, "path")}, 0),
    "the adapter's number": ({"adapter": ("x", 1, "path")}, {"adapter": ("x", 2, "path")}, 4),
    "no salt": ({"salt": "x"}, {}, 0),
    "another salt": ({"salt": "x"}, {"salt": "y"}, 0),
    "a salt like an adapter": ({"salt": "x"}, {"adapter": ("x", 1, "x")}, 0),
    "all": (*[{"salt": "x", "adapter": ("x", 1, "path"), "images": [("x", 0, 16)]}] * 2, 4),
}


@pytest.mark.parametrize(("stored", "asked", "alike"), BESIDE.values(), ids=BESIDE)
def test_what_else_makes_a_prefix_decides_its_hits_by_vllms_own_hashes(vllm, both, stored, asked, alike):
    pools = both()
    first, second = (vllm.ask([1] * SIZE * 4, **one) for one in (stored, asked))
    row = pools.call("get_new_blocks", 4)
    pools.cache(first, row, 0, 4, SIZE, 0)
    for pool in pools.pools:
        assert [pool.blocks[number].block_hash for number in row] == [vllm.key(one, 0) for one in first.block_hashes]
    found = [pools.call("get_cached_block", one, [0]) for one in second.block_hashes]
    assert found == [[number] for number in row[:alike]] + [None] * (4 - alike)
    assert [block.block_id for block in pools.pools[1].longest_hit(second.block_hashes, 4, 0)] == row[:alike]


def test_null_blocks_are_neither_cached_nor_freed(vllm, both):
    pools = both(blocks=6)
    request = vllm.ask([1] * SIZE * 3)
    (block,) = pools.call("get_new_blocks", 1)
    pools.cache(request, [0, 0, block], 0, 3, SIZE, 0)
    assert [pools.call("get_cached_block", one, [0]) for one in request.block_hashes] == [None, None, [block]]
    pools.call("free_blocks", blocks=[block, 0, 0])
    assert 0 not in pools.free()


def test_a_reset_is_refused_while_a_block_is_held_and_forgets_everything_after(vllm, both):
    pools = both(events=True)
    request = vllm.ask([1] * SIZE)
    pools.cache(request, pools.call("get_new_blocks", 1), 0, 1, SIZE, 0)
    assert pools.call("reset_prefix_cache") is False
    pools.call("free_blocks", blocks=[1])
    assert pools.call("reset_prefix_cache") is True
    assert pools.call("get_cached_block", request.block_hashes[0], [0]) is None
    assert [type(event).__name__ for event in pools.call("take_events")] == ["BlockStored", "AllBlocksCleared"]
    assert pools.call("take_events") == []


def test_a_stored_block_names_its_parent_and_an_evicted_one_is_told(vllm, both):
    pools = both(events=True, blocks=3)
    request = vllm.ask([1] * SIZE * 2)
    row = pools.call("get_new_blocks", 2)
    pools.cache(request, row, 0, 1, SIZE, 0)
    pools.cache(request, row, 1, 2, SIZE, 0)
    pools.call("free_blocks", blocks=row[::-1])
    pools.call("get_new_blocks", 1)
    first, second, removed = pools.call("take_events")
    assert (first.parent_block_hash, [second.parent_block_hash]) == (None, first.block_hashes)
    assert removed.block_hashes == second.block_hashes


def test_a_stored_block_names_its_parent_even_where_a_window_left_that_behind(vllm, both):
    pools = both(events=True)
    request = vllm.ask([1] * SIZE * 4)
    first, *last = pools.call("get_new_blocks", 3)
    pools.cache(request, [first, 0, *last], 2, 4, SIZE, 1)
    (stored,) = pools.call("take_events")
    assert stored.parent_block_hash == vllm.told(request.block_hashes[1])
    assert stored.block_hashes == [vllm.told(one) for one in request.block_hashes[2:]]
    assert stored.group_idx == 1


def test_a_block_that_was_partly_cached_becomes_full_in_its_place(vllm, both):
    pools = both()
    request = vllm.ask([1] * SIZE * 2)
    (block,) = pools.call("get_new_blocks", 1)
    for pool in pools.pools:
        pool.cache_partial_block(request, pool.blocks[block], SIZE, 1, 2 * SIZE)
    assert pools.call("get_cached_block", request.block_hashes[0], [1]) == [block]
    pools.cache(request, [block], 0, 1, 2 * SIZE, 1)
    assert pools.call("get_cached_block", request.block_hashes[0], [1]) is None
    assert pools.call("get_cached_block", request.block_hashes[1], [1]) == [block]


def test_unpinned_blocks_count_as_free_and_are_told_when_reused(vllm, both):
    pools = both(blocks=3)
    pools.call("unpin_blocks", blocks=pools.call("get_new_blocks", 2))
    assert pools.pools[1].get_num_free_blocks() == 2
    pools.call("get_new_blocks", 1)
    assert pools.reused == [[1], [1]]


def test_usage_leaves_out_the_null_block(both):
    pools = both(blocks=5)
    pools.call("get_new_blocks", 3)
    assert pools.pools[1].get_usage() == 0.75


def test_blocks_of_another_pool_go_back_there(vllm):
    for kind in (vllm.stock, vllm.ours):
        mine, theirs = kind(4, True, SIZE), vllm.stock(4, True, SIZE)
        mine.free_blocks(mine.get_new_blocks(2) + theirs.get_new_blocks(3))
        assert (mine.get_num_free_blocks(), theirs.get_num_free_blocks()) == (3, 3)


def test_a_block_given_back_twice_is_refused_and_changes_nothing(vllm):
    pool = vllm.ours(6, True, SIZE)
    held, gone = pool.get_new_blocks(2)
    pool.free_blocks([gone])
    with pytest.raises(LawBroken, match=r"block 2 was given back and has no owner \[L9\]"):
        pool.free_blocks([held, gone])
    assert (held.ref_cnt, gone.ref_cnt) == (1, 0)
    pool.check([[held]])


@pytest.mark.parametrize(
    "fault",
    [
        lambda pool: setattr(pool.blocks[1], "ref_cnt", 0),
        lambda pool: setattr(pool.blocks[4], "ref_cnt", 1),
        lambda pool: setattr(pool.free_block_queue, "num_free_blocks", 5),
        lambda pool: pool.free_block_queue.append(pool.blocks[1]),
        lambda pool: pool.free_block_queue.remove(pool.blocks[4]),
        lambda pool: pool.blocks[1].reset_hash(),
        lambda pool: pool.cached_block_hash_to_block._cache.clear(),
        lambda pool: pool.touch([pool.blocks[1]]),
    ],
)
def test_the_recount_sees_a_pool_that_does_not_add_up(vllm, fault):
    pool = vllm.ours(6, True, SIZE)
    row = pool.get_new_blocks(2)
    pool.cache_full_blocks(vllm.ask([1] * SIZE), row, 0, 1, SIZE, 0)
    pool.check([row])
    fault(pool)
    with pytest.raises(LawBroken):
        pool.check([row])
