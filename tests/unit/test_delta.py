"""A delta: what it holds, that it cannot change, and that damaged bytes are refused."""

import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import BlockTables, Delta, DeltaError


def sample() -> Delta:
    tables = BlockTables([blocktable.plan(max_model_len=1024, block_size=16)] * 2, max_rows=4)
    tables.append([0, 2], ([0, 3, 4], [0, 1, 3]), ([5, 6, 7, 8], [9, 1, 2]), group=None)
    tables.commit()
    tables.append([2], [0, 2], [3, 4])
    tables.clear([0])
    return tables.commit()


def resealed(delta: Delta, spans: Any = None, values: Any = None, copies: Any = None, **head: int) -> bytes:
    """Bytes with a right checksum over wrong contents: only the checks behind it can refuse them."""
    spans = delta.spans if spans is None else np.array(spans, np.int32).reshape(-1, 6)
    values = delta.values if values is None else np.array(values, np.int32)
    copies = delta.copies if copies is None else np.array(copies, np.int32).reshape(-1, 3)
    seq, origin = head.get("seq", delta.seq), head.get("origin", delta.origin)
    rest = struct.pack("<QQIIII", seq, origin, delta.layout, len(spans), len(values), len(copies))
    rest += spans.tobytes() + values.tobytes() + copies.tobytes()
    return b"BTd1" + struct.pack("<I", zlib.crc32(rest)) + rest


def test_the_fields_are_what_the_documentation_says() -> None:
    delta = sample()
    assert delta.seq == 2
    assert delta.spans.tolist() == [[0, 2, 1, 2, 0, 3], [0, 0, 0, 3, -1, 0], [1, 0, 0, 1, -1, 0]]
    assert delta.values.tolist() == [3, 4]
    assert delta.copies.shape == (0, 3)
    assert (delta.spans.dtype, delta.values.dtype, delta.copies.dtype) == (np.int32, np.int32, np.int32)
    assert repr(delta) == "Delta(seq=2, spans=3, values=2, copies=0)"


def test_empty_commits_count() -> None:
    tables = BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=1)
    assert [tables.commit().seq for _ in range(3)] == [1, 2, 3]
    assert len(tables.commit().to_bytes()) == 40


def test_it_is_immutable_and_owns_its_data() -> None:
    tables = BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=1)
    tables.append([0], [0, 2], [3, 4])
    delta = tables.commit()
    tables.assign([0], [0, 2], [7, 8])
    tables.commit()
    assert delta.values.tolist() == [3, 4]
    for array in (delta.spans, delta.values, delta.copies):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        delta.seq = 5  # type: ignore[misc]
    raw = bytearray(delta.to_bytes())
    received = Delta.from_bytes(raw)
    raw[:] = bytes(len(raw))
    assert received == delta
    assert hash(received) == hash(delta)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_bytes_come_in_any_buffer(form: Any) -> None:
    delta = sample()
    assert Delta.from_bytes(form(delta.to_bytes())) == delta


def test_copies_survive_the_bytes() -> None:
    plain = sample()
    delta = Delta(plain.seq, plain.spans, plain.values, np.array([[0, 5, 9], [1, 2, 3]], np.int32))
    assert Delta.from_bytes(delta.to_bytes()).copies.tolist() == [[0, 5, 9], [1, 2, 3]]
    assert delta != plain


def test_it_can_be_pickled() -> None:
    delta = sample()
    assert pickle.loads(pickle.dumps(delta)) == delta  # noqa: S301 - our own bytes


def test_every_truncation_and_every_extension_is_refused() -> None:
    raw = sample().to_bytes()
    for size in range(len(raw)):
        with pytest.raises(DeltaError) as caught:
            Delta.from_bytes(raw[:size])
        assert (caught.value.law, bool(caught.value.remedy)) == ("L11", True)
    with pytest.raises(DeltaError):
        Delta.from_bytes(raw + b"\0")


def test_every_flipped_bit_is_refused() -> None:
    raw = bytearray(sample().to_bytes())
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DeltaError):
            Delta.from_bytes(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8
    assert Delta.from_bytes(bytes(raw)) == sample()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq": 0},
        {"seq": 2, "origin": 2},
        {"spans": [[0, 0, 0, 3, 0, 3]]},  # reaches past the two values
        {"spans": [[0, 0, 0, 1, 2, 3]]},
        {"spans": [[0, 0, 0, 1, -2, 3]]},
        {"spans": [[0, 0, 0, 2**31 - 1, 2**31 - 1, 3]]},  # the sum overflows int32
        {"spans": [[-1, 0, 0, 1, 0, 3]]},
        {"spans": [[0, -1, 0, 1, 0, 3]]},
        {"spans": [[0, 0, -1, 1, 0, 3]]},
        {"spans": [[0, 0, 0, -1, 0, 3]]},
        {"spans": [[0, 0, 0, 1, 0, -3]]},
        {"values": [3, -4]},
        {"copies": [[0, 0, 1]]},
        {"copies": [[0, 1, 0]]},
        {"copies": [[-1, 1, 2]]},
    ],
    ids=repr,
)
def test_contents_that_no_commit_writes_are_refused_though_the_checksum_fits(wrong: dict[str, Any]) -> None:
    delta = sample()
    assert Delta.from_bytes(resealed(delta)) == delta
    with pytest.raises(DeltaError):
        Delta.from_bytes(resealed(delta, **wrong))


@pytest.mark.parametrize("bad", [None, "BTd1", 3, [], b"", b"BTs1" + bytes(60)], ids=repr)
def test_what_is_no_delta_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(blocktable.BlockTableError):
        Delta.from_bytes(bad)


def test_equal_deltas_are_not_unequal():
    first, second = (Delta(1, np.array([[0, 1, 0, 1, 0, 1]], np.int32), np.array([n], np.int32)) for n in (5, 6))
    again = Delta.from_bytes(first.to_bytes())
    assert (again == first, again != first) == (True, False)
    assert (second == first, second != first) == (False, True)
