"""What callers may hand over: lists and integer arrays of any width whose values fit, and nothing else."""

import numpy as np
import pytest

from blocktable import ArgumentError
from blocktable._arrays import as_int32, as_int64

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4", ">i8"]


@pytest.mark.parametrize("convert", [as_int32, as_int64])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_arrays_are_converted_when_every_value_fits(convert, dtype):
    got = convert(np.array([0, 1, 100], dtype), "rows")
    assert got.tolist() == [0, 1, 100]
    assert got.flags.carray


@pytest.mark.parametrize("convert", [as_int32, as_int64])
@pytest.mark.parametrize(
    "value", [[], (), [3, 4], (3, 4), range(3), np.zeros(0, np.int16), [5, np.int64(6)], [np.int64(6), 5], [-(2**31)]]
)
def test_lists_are_converted(convert, value):
    got = convert(value, "rows")
    assert got.tolist() == list(value)
    assert got.flags.carray


def test_an_id_that_int32_cannot_hold_is_no_block_id():
    for value, law in (([2**31], "L3"), (np.array([-(2**40)]), "L3"), (np.array([2**63], np.uint64), "L12")):
        with pytest.raises(ArgumentError) as caught:
            as_int32(value, "ids")
        assert caught.value.law == law


@pytest.mark.parametrize(
    "value", [np.arange(6)[::2], np.arange(6).reshape(2, 3)[:, 1], np.broadcast_to(np.int64(7), 3)]
)
def test_strided_arrays_are_copied(value):
    got = as_int64(value, "rows")
    assert got.tolist() == value.tolist()
    assert got.flags.carray


def test_an_array_that_fits_passes_as_it_is():
    rows = np.arange(3)
    assert as_int64(rows, "rows") is rows
    sealed = np.arange(3)
    sealed.flags.writeable = False
    assert as_int64(sealed, "rows").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (as_int32, [2**31]),
        (as_int32, [-(2**31) - 1]),
        (as_int32, np.array([2**32 + 1], np.uint64)),
        (as_int64, np.array([2**63], np.uint64)),
        (as_int64, [2**63]),
        (as_int64, [2**70]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_not_wrapped(convert, value):
    with pytest.raises(ArgumentError, match="rows"):
        convert(value, "rows")


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        [True],
        np.array([True]),
        np.array([1.5]),
        ["1"],
        [None],
        [1, 2.0],  # an integer first: the short way for lists must not round what follows
        [1, "2"],
        [1, None],
        [1, [2]],
        [[1, 2]],
        [[1], [2, 3]],
        7,
        "12",
        None,
        {1: 2},
        [1j],
    ],
    ids=repr,
)
@pytest.mark.parametrize("convert", [as_int32, as_int64])
def test_anything_else_is_refused(convert, value):
    with pytest.raises(ArgumentError, match="rows") as caught:
        convert(value, "rows")
    assert caught.value.remedy
