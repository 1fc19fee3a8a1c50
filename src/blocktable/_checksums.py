"""Checksums of what calls of a cache return, compiled: two sums over numbers, so that sequences can be put together."""

import numpy as np
from numpy.typing import NDArray

from blocktable._jit import helper, i32, i64, sealed

Ints = NDArray[np.int64]
DELTA = (sealed(i32[:, ::1]), sealed(i32[::1]), sealed(i32[:, ::1]))  # spans, values, copies
LOW31 = 2**31 - 1


@helper(i64(i64))
def remainder(n: int) -> int:
    """Return 31 bits that stand for a positive number modulo 2**31 - 1: equal for equal numbers, without a division."""
    n = (n & LOW31) + (n >> 31)
    n = (n & LOW31) + (n >> 31)
    return n & LOW31


# Two sums, of the numbers and of those sums, so that it depends on each number and its place. They start below 2**31, and
# a number adds less than that: PIECE of them fit 63 bits before the sums are brought back below.
PIECE = 1 << 15


@helper(i64(i64))
def mixed(value: int) -> int:
    """Return 31 bits of a number, one to one and not linear, so that blocks in each other's place never cancel out."""
    x = (value + (value >> 31)) & LOW31
    return x * (2 * x + 1) & LOW31


@helper(i64(i64, i64))
def total_of(low: int, high: int) -> int:
    """Return two sums as one checksum of 62 bits."""
    return remainder(high) << 31 | remainder(low)


@helper(i64(i64))
def short(total: int) -> int:
    """Return 16 bits of a checksum."""
    return (total ^ (total >> 15) ^ (total >> 31) ^ (total >> 46)) & 0xFFFF


@helper(i64(i64, sealed(i64[:])))
def of_values(total: int, values: Ints) -> int:
    """Take numbers into a checksum."""
    low, high = total & LOW31, total >> 31
    for j in range(values.size):
        low += mixed(values[j])
        high += low
        if j % PIECE == PIECE - 1:
            low, high = remainder(low), remainder(high)
    return total_of(low, high)


@helper(i64(i64, sealed(i32[:])))
def of_ids(total: int, values: Ints) -> int:
    """Take numbers of 32 bits into a checksum."""
    low, high = total & LOW31, total >> 31
    for j in range(values.size):
        low += mixed(i64(values[j]))
        high += low
        if j % PIECE == PIECE - 1:
            low, high = remainder(low), remainder(high)
    return total_of(low, high)


@helper(i64(i64, i64, i64))
def behind(total: int, more: int, n: int) -> int:
    """Return the checksum of two sequences, one behind the other, from each one's; the second is of n numbers."""
    low = total & LOW31
    return total_of(low + (more & LOW31), (total >> 31) + n * low + (more >> 31))


@helper(i64(i64, DELTA[0]))
def of_spans(total: int, spans: Ints) -> int:
    """Take spans, or copies, into a checksum."""
    for i in range(spans.shape[0]):
        total = of_ids(total, spans[i])
    return total


@helper(i64(i64, *DELTA))
def of_delta(total: int, spans: Ints, values: Ints, copies: Ints) -> int:
    """Take a delta into a checksum."""
    return of_spans(of_ids(of_spans(total, spans), values), copies)
