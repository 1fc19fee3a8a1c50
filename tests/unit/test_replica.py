"""Replicas: equal to the host after every delta, unchanged after every refusal, and started from snapshots."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import BlockTableError, BlockTables, Delta, DeltaError, Group, Replica


def groups() -> list[Group]:
    full = blocktable.plan(max_model_len=64, block_size=16)
    return [Group(full), Group(blocktable.plan(max_model_len=24, block_size=8), kind="window", window=8)]


def host() -> BlockTables:
    tables = BlockTables(groups(), max_rows=3)
    tables.append([0, 2], ([0, 3, 4], [0, 1, 3]), ([5, 6, 7, 8], [9, 1, 2]), group=None)
    return tables


def contents(tables: Any) -> list[list[list[int]]]:
    return [[*table.array.tolist(), table.num_blocks.tolist()] for table in tables.tables]


def test_it_reads_like_the_host() -> None:
    tables, mirror = host(), Replica(groups(), max_rows=3)
    mirror.apply(tables.commit())
    assert (mirror.seq, contents(mirror)) == (1, contents(tables))
    tokens = ([0, 2], [0, 40, 48], [*range(40), *range(8)])
    assert mirror.slot_mapping(*tokens).tolist() == tables.slot_mapping(*tokens).tolist()
    assert mirror.tables[0].kernel_array([2]).tolist() == tables.tables[0].kernel_array([2]).tolist()
    assert mirror.snapshot() == tables.snapshot()
    mirror.check()


def test_it_has_no_verbs_of_its_own() -> None:
    for verb in ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy", "resize", "commit"):
        assert not hasattr(Replica, verb)


def test_it_refuses_a_delta_that_repeats_skips_or_comes_late() -> None:
    tables = host()
    first = tables.commit()
    tables.clear([0])
    second = tables.commit()
    third = tables.commit()
    mirror = Replica(groups(), max_rows=3)
    with pytest.raises(DeltaError, match="needs delta 1 first"):
        mirror.apply(second)
    mirror.apply(first)
    before = mirror.snapshot()
    for delta, text in ((first, "already applied"), (third, "does not follow")):
        with pytest.raises(DeltaError, match=text) as caught:
            mirror.apply(delta)
        assert (caught.value.law, caught.value.values["at"]) == ("L11", 1)
        assert "snapshot" in caught.value.remedy
        assert mirror.snapshot() == before
    mirror.apply(second)
    mirror.apply(third)
    assert contents(mirror) == contents(tables)


def test_it_refuses_tables_of_another_shape() -> None:
    delta = host().commit()
    with pytest.raises(DeltaError, match="another shape"):
        Replica(groups(), max_rows=4).apply(delta)
    with pytest.raises(DeltaError, match="another shape"):
        Replica(groups()[:1], max_rows=3).apply(delta)


def test_a_snapshot_is_the_last_commit_even_while_changes_are_pending() -> None:
    tables = host()
    assert contents(Replica.from_snapshot(tables.snapshot())) == contents(BlockTables(groups(), max_rows=3))
    tables.commit()
    committed = contents(tables)
    tables.clear([0])
    tables.append([1], [0, 1], [3])
    mirror = Replica.from_snapshot(tables.snapshot())
    assert (mirror.seq, contents(mirror)) == (1, committed)
    mirror.apply(tables.commit())
    assert contents(mirror) == contents(tables)


def test_a_replicas_snapshot_starts_another() -> None:
    tables, mirror = host(), Replica(groups(), max_rows=3)
    mirror.apply(tables.commit())
    second = Replica.from_snapshot(mirror.snapshot())
    tables.move([2], [1])
    delta = tables.commit()
    for replica in (mirror, second):
        replica.apply(delta)
        assert contents(replica) == contents(tables)


def test_after_resize_a_replica_refuses_until_made_anew_or_started_from_a_snapshot() -> None:
    """Also where the new shape is the old one: what the replica holds then is not what the host holds."""
    tables, mirror = host(), Replica(groups(), max_rows=3)
    mirror.apply(tables.commit())
    tables.clear([0, 2])
    tables.resize(groups())
    late, anew = Replica.from_snapshot(tables.snapshot()), Replica(groups(), max_rows=3)
    tables.append([1], [0, 1], [4])
    delta = tables.commit()
    with pytest.raises(DeltaError):
        mirror.apply(delta)
    for replica in (late, anew):
        replica.apply(delta)
        assert contents(replica) == contents(tables)
    with pytest.raises(DeltaError):
        Replica(groups(), max_rows=3).apply(tables.commit())  # made anew too late


SPANS: list[list[int]] = [
    [2, 0, 0, 1, 0, 1],  # a group too many
    [0, 3, 0, 1, 0, 1],  # a row too many
    [0, 0, 3, 2, 0, 4],  # past the width
    [0, 0, 0, 1, 0, 5],  # more live blocks than columns
    [0, 0, 2**31 - 1, 2**31 - 1, -1, 1],  # the sum overflows int32
    [0, 0, 0, 3, 0, 3],  # past the values
    [-1, 0, 0, 1, 0, 1],
    [0, 0, 0, 1, -2, 1],
]


@pytest.mark.parametrize("span", SPANS, ids=repr)
def test_a_delta_that_does_not_fit_changes_nothing(span: list[int]) -> None:
    tables, mirror = host(), Replica(groups(), max_rows=3)
    mirror.apply(tables.commit())
    before = mirror.snapshot(), contents(mirror)
    good = [0, 1, 0, 1, 0, 1]  # a good span before the bad one must not be written either
    delta = Delta(2, np.array([good, span], np.int32), np.array([4, 4], np.int32), layout=mirror.layout)
    with pytest.raises(BlockTableError) as caught:
        mirror.apply(delta)
    assert caught.value.remedy
    assert (mirror.snapshot(), contents(mirror)) == before
    mirror.apply(tables.commit())


@pytest.mark.parametrize("bad", [None, b"", 3, "delta"], ids=repr)
def test_what_is_no_delta_is_refused_by_name(bad: Any) -> None:
    mirror = Replica(groups(), max_rows=3)
    with pytest.raises(BlockTableError):
        mirror.apply(bad)
    with pytest.raises(BlockTableError):
        Replica.from_snapshot(bad)


def test_a_damaged_snapshot_is_refused() -> None:
    tables = host()
    tables.commit()
    raw = bytearray(tables.snapshot())
    for size in range(len(raw)):
        with pytest.raises(DeltaError):
            Replica.from_snapshot(bytes(raw[:size]))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DeltaError):
            Replica.from_snapshot(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8
    assert contents(Replica.from_snapshot(raw)) == contents(tables)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (0, 9),  # a kind that does not exist
        (1, 0),  # no columns
        (1, 5),  # width and kernel width contradict
        (3, 24),  # a block that is no multiple of its kernel block
        (5, 0),  # no ranks
        (6, 5),  # an interleave that does not divide the block
        (14, 5),  # more live blocks than columns
        (15, -1),
        (20, -1),  # a live entry that is no id
        (20, 2**31 - 1 - 2**31),
    ],
)
def test_a_snapshot_that_no_host_writes_is_refused_though_the_checksum_fits(number: int, value: int) -> None:
    tables = host()
    tables.commit()
    raw = tables.snapshot()
    head, numbers = raw[8:40], np.frombuffer(raw, "<i4", offset=40).copy()
    numbers[number] = value
    rest = head + numbers.tobytes()
    with pytest.raises(DeltaError):
        Replica.from_snapshot(raw[:4] + struct.pack("<I", zlib.crc32(rest)) + rest)
