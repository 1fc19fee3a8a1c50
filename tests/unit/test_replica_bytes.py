"""Bytes from elsewhere: truncated, altered, or well-formed and hostile; refused by name, and nothing changes (L11)."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import blocktable
from blocktable import BlockTables, Contract, Delta, DeltaError, Group, Replica

GROUPS: list[Any] = [
    blocktable.plan(max_model_len=64, block_size=8, contracts=[Contract("c", kernel_block_sizes=(4,))]),
    Group(blocktable.plan(max_model_len=40, block_size=4), kind="window", window=8),
]
ROWS = 3


def started() -> tuple[BlockTables, Replica]:
    tables = BlockTables(GROUPS, max_rows=ROWS)
    tables.assign([0, 1], [0, 3, 5], [3, 7, 9, 4, 5], group=0)
    tables.assign([2], [0, 4], [6, 7, 8, 9], group=1)
    mirror = Replica(GROUPS, max_rows=ROWS)
    mirror.apply(tables.commit())
    return tables, mirror


HOST, MIRROR = started()
STATE = MIRROR.snapshot()
HOST.append([2], [0, 2], [11, 12], group=0)
HOST.truncate([0], [1], group=0)
HOST.release([2], [2], 1)
NEXT = HOST.commit()
GOOD = NEXT.to_bytes()


def refused_or_equal(data: bytes) -> None:
    """Bytes are refused by name and change nothing, or they are a delta that leaves a lawful state."""
    mirror = Replica.from_snapshot(STATE)
    try:
        mirror.apply(Delta.from_bytes(data))
    except DeltaError as refusal:
        error = refusal
    else:
        mirror.check()
        return
    assert error.law
    assert error.remedy
    assert mirror.snapshot() == STATE


def sealed(magic: bytes, rest: bytes) -> bytes:
    """Bytes with the right checksum, as an attacker would write them."""
    return magic + struct.pack("<I", zlib.crc32(rest)) + rest


@pytest.mark.parametrize("length", [*range(45), len(GOOD) - 1])
def test_truncated_deltas_are_refused(length: int) -> None:
    with pytest.raises(DeltaError):
        Delta.from_bytes(GOOD[:length])


@given(at=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7))
def test_one_wrong_bit_is_refused(at: int, bit: int) -> None:
    wrong = bytearray(GOOD)
    wrong[at] ^= 1 << bit
    with pytest.raises(DeltaError):
        Delta.from_bytes(bytes(wrong))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for tail in (data, b"BTd1" + data, sealed(b"BTd1", data)):
        refused_or_equal(tail)


numbers = st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), 2**30, 2**16]))


@given(
    spans=st.lists(st.tuples(*[numbers] * 6), max_size=4),
    values=st.lists(numbers, max_size=6),
    counts=st.tuples(*[st.one_of(st.none(), numbers)] * 3),
    seq=st.sampled_from([NEXT.seq, NEXT.seq, NEXT.seq, 0, 1, 2**63]),
)
def test_well_formed_hostile_deltas_leave_a_lawful_state_or_nothing(
    spans: list[Any], values: list[int], counts: tuple[Any, ...], seq: int
) -> None:
    body = np.array([number for span in spans for number in span] + values, "<i4").tobytes()
    sizes = [len(spans), len(values), 0]
    sizes = [size if count is None else count % 2**32 for size, count in zip(sizes, counts, strict=True)]
    refused_or_equal(sealed(b"BTd1", struct.pack("<QQIIII", seq, NEXT.origin, NEXT.layout, *sizes) + body))


@given(
    group=st.integers(0, 1),
    row=st.integers(0, ROWS - 1),
    live=st.integers(0, 10),
    pieces=st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), max_size=4), st.booleans()), max_size=3),
)
def test_plausible_deltas_leave_a_lawful_state_or_nothing(group: int, row: int, live: int, pieces: list[Any]) -> None:
    spans, values = [], []
    for start, ids, null in sorted(pieces):
        spans.append((group, row, start, len(ids), -1 if null else len(values), live))
        values += [] if null else ids
    arrays = (np.array(spans, np.int32).reshape(-1, 6), np.array(values, np.int32))
    refused_or_equal(Delta(NEXT.seq, *arrays, origin=NEXT.origin, layout=NEXT.layout).to_bytes())


@given(at=st.integers(0, len(STATE) - 1), bit=st.integers(0, 7), cut=st.integers(0, len(STATE)))
def test_damaged_snapshots_are_refused(at: int, bit: int, cut: int) -> None:
    wrong = bytearray(STATE)
    wrong[at] ^= 1 << bit
    for data in (bytes(wrong), STATE[:cut] if cut < len(STATE) else STATE + b"x"):
        with pytest.raises(DeltaError) as caught:
            Replica.from_snapshot(data)
        assert caught.value.remedy


@given(field=st.integers(0, len(STATE) // 4 - 3), value=numbers)
def test_hostile_snapshots_are_refused_or_lawful(field: int, value: int) -> None:
    wrong = bytearray(STATE[8:])
    wrong[4 * field : 4 * field + 4] = struct.pack("<i", value)
    try:
        replica = Replica.from_snapshot(sealed(STATE[:4], bytes(wrong)))
    except blocktable.BlockTableError as refusal:
        error = refusal
    else:
        replica.check()
        return
    assert error.remedy


def test_the_next_delta_still_applies() -> None:
    mirror = Replica.from_snapshot(STATE)
    mirror.apply(Delta.from_bytes(GOOD))
    assert mirror.snapshot() == HOST.snapshot()


TWICE = {
    "two live counts": [(0, 2, 0, 1, 0, 1), (0, 2, 1, 1, 1, 2)],
    "a count alone beside": [(0, 2, 0, 2, 0, 2), (0, 2, 2, 0, -1, 0)],
    "apart": [(0, 0, 0, 1, 0, 3), (0, 1, 0, 1, 1, 2), (0, 0, 2, 1, 1, 3)],
}


@pytest.mark.parametrize("name", TWICE)
def test_a_row_is_named_once_with_one_live_count(name: str) -> None:
    mirror = Replica.from_snapshot(STATE)
    arrays = (np.array(TWICE[name], np.int32), np.array([5, 6], np.int32))
    with pytest.raises(DeltaError, match="apart or name several live counts") as caught:
        mirror.apply(Delta(NEXT.seq, *arrays, origin=NEXT.origin, layout=NEXT.layout))
    assert caught.value.law == "L11"
    assert mirror.snapshot() == STATE
    mirror.apply(NEXT)  # nothing of the refused delta is left
    mirror.check()
    assert mirror.snapshot() == HOST.snapshot()
