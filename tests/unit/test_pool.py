"""The block pool: what it hands out, what it refuses, and that a refusal changes nothing."""

import numpy as np
import pytest

from blocktable.errors import ArgumentError, LawBroken, OutOfBlocks
from blocktable.pool import BlockPool


def state(pool: BlockPool) -> tuple[int, list[int], list[int]]:
    free = [int(pool._ring[(pool._head + i) % max(pool._ring.size, 1)]) for i in range(pool.num_free)]
    return pool.num_free, pool.references.tolist(), free


def test_case_24_a_block_freed_twice_in_one_batch_or_in_two_is_refused() -> None:
    pool = BlockPool(16)
    block = pool.allocate(1)
    assert pool.num_free == 14
    before = state(pool)
    with pytest.raises(ArgumentError) as caught:
        pool.free(np.concatenate([block, block]))
    assert (caught.value.law, caught.value.freed, caught.value.held) == ("L9", 2, 1)
    assert state(pool) == before
    pool.free(block)
    assert pool.num_free == 15
    with pytest.raises(ArgumentError, match="held 0 times"):
        pool.free(block)
    assert pool.num_free == 15
    pool.check()


def test_case_24_growth_takes_only_the_difference() -> None:
    pool = BlockPool(16)
    pool.allocate(7)  # 100 tokens in blocks of 16
    pool.allocate(13 - 7)  # 200 tokens
    assert pool.num_held == 13
    assert pool.num_free == 2


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("n", [4, 10**9])
def test_short_of_blocks_says_how_many_and_changes_nothing(n: int) -> None:
    pool = BlockPool(4)
    before = state(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(n)
    assert (caught.value.needed, caught.value.available, caught.value.law) == (n, 3, "L9")
    assert state(pool) == before


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 0], "null block"),
        ([1, 5], "no block of this pool"),
        ([1, -1], "no block of this pool"),
        ([1, 2], "held 0 times"),
        ([1, 2**40], "does not fit int32"),
        ([1.0], "integers"),
        ([True], "integers"),
        ([[1]], "dimensions"),
        ("1", "integers"),
        ([1, None], "integers"),
    ],
)
@pytest.mark.parametrize("verb", ["free", "share"])
def test_wrong_ids_are_refused_by_name_and_nothing_changes(verb: str, ids: object, text: str) -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    before = state(pool)
    with pytest.raises(ArgumentError, match=text if (verb, text) != ("share", "held 0 times") else "is free"):
        getattr(pool, verb)(ids)
    assert state(pool) == before


@pytest.mark.parametrize("n", [-1, 1.5, True, None, "3"])
def test_allocate_wants_a_count(n: object) -> None:
    pool = BlockPool(5)
    with pytest.raises(ArgumentError):
        pool.allocate(n)  # type: ignore[arg-type]
    assert pool.num_free == 4


@pytest.mark.parametrize("num_blocks", [0, -3, 2**31 + 1, 1.0, True, None])
def test_absurd_pools_are_refused(num_blocks: object) -> None:
    with pytest.raises(ArgumentError, match="num_blocks"):
        BlockPool(num_blocks)  # type: ignore[arg-type]


def test_a_pool_of_the_null_block_alone_hands_out_nothing() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0).size == 0
    pool.free([])
    pool.check()
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2).tolist()
    pool.share([a, a])
    pool.free([a, b, a])
    assert pool.num_free == 2
    pool.free([a])
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [3, b, a]


def test_every_integer_dtype_is_taken() -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64):
        pool = BlockPool(5)
        pool.allocate(4)
        pool.free(np.array([3, 1], dtype))
        assert pool.num_free == 2


def test_allocated_ids_are_the_callers_own() -> None:
    pool = BlockPool(8)
    ids = pool.allocate(7)
    ids[:] = 0
    pool.check()
    pool.free(range(1, 8))
    assert pool.allocate(7).tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("damage", ["null", "negative", "twice", "owned", "lost", "null in ring"])
def test_check_sees_each_kind_of_damage(damage: str) -> None:
    pool = BlockPool(6)
    pool.allocate(2)
    match damage:
        case "null":
            pool._references[0] = 1
        case "negative":
            pool._references[2] = -1
        case "twice":
            pool._ring[3] = pool._ring[2]
        case "owned":
            pool._references[pool._ring[2]] = 1
        case "lost":
            pool._references[1] = 0
        case "null in ring":
            pool._ring[4] = 0
    with pytest.raises(LawBroken) as caught:
        pool.check()
    assert caught.value.law == "L9"
