"""Numbers of prefixes, many tokens at once or one after the other, against polynomials of Python's integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable._prefix_numbers import ONE, OTHER, PIECE, PRIME
from blocktable.recording.identity import NO_SALT, prefix_number
from blocktable.sanitize.usual import numbers

EDGES = (0, 1, PRIME - 2, PRIME - 1, PRIME, PRIME + 1, 2 * PRIME, 2**32 - 1, 2**62, 2**63 - 1)
ODD = st.sampled_from((-1, *EDGES))
USUAL = st.integers(0, 200_000)


def model(number, tokens):
    one, other = number >> 31, number & PRIME
    for token in tokens:
        last = token % PRIME + 1
        one = (one * ONE + last) % PRIME
        other = (
            other * OTHER + last + (token >> 31) + 3 * (token >> 62) + (OTHER if token & PRIME == PRIME else 0)
        ) % PRIME
    return one << 31 | other


def one_after_the_other(number, tokens):
    found = np.zeros(len(tokens), np.int64)
    numbers(number, np.array(tokens, np.int64), found)
    return int(found[-1]) if tokens else number


@given(
    st.lists(USUAL, max_size=3 * PIECE) | st.lists(USUAL | ODD, max_size=2 * PIECE) | st.lists(ODD, max_size=9),
    st.just(NO_SALT) | st.tuples(st.integers(0, PRIME - 1), st.integers(0, PRIME - 1)).map(lambda n: n[0] << 31 | n[1]),
)
def test_many_tokens_at_once_give_the_same_number(tokens, start):
    found = prefix_number(start, np.array(tokens, np.int64))
    assert found == one_after_the_other(start, tokens)
    if -1 not in tokens:
        assert found == model(start, tokens)


@pytest.mark.parametrize("size", [1, 15, 16, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE])
def test_the_largest_tokens_fit(size):
    for token in EDGES:
        tokens = [token] * size
        assert prefix_number(PRIME << 31, np.array(tokens)) == model(PRIME << 31, tokens)


def test_a_number_goes_on_from_another():
    tokens = np.random.default_rng(0).integers(0, 2**31 - 2, 1000)
    for cut in (0, 1, 16, PIECE, 999, 1000):
        assert prefix_number(prefix_number(7, tokens[:cut]), tokens[cut:]) == prefix_number(7, tokens)
