"""Numbers of prefixes, compiled: equal for equal tokens, and else not, but by chance.

A number is two remainders modulo the prime 2**31 - 1, side by side: polynomials of the tokens, at ONE and at OTHER. So the
tokens of many places are taken in at once, each times its power, where the next token by itself would wait for the last.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._jit import helper, i64, sealed, u64

Ints = NDArray[np.int64]
PRIME, ONE, OTHER = 2**31 - 1, 48271, 1583458089
PIECE = 128  # tokens that are taken in at once
ONES, OTHERS = (np.array([pow(base, n, PRIME) for n in range(PIECE, -1, -1)]) for base in (ONE, OTHER))
"""Their powers, the 0th last."""


@helper(i64(i64))
def modulo(n: int) -> Any:
    """Return what a number from 0 to 2**63 - 1 is modulo PRIME, without a division."""
    n = (n & PRIME) + (n >> 31)
    n = (n & PRIME) + (n >> 31)
    return n - PRIME * i64(n >= PRIME)


@helper(i64(i64, i64))
def next_number(number: int, token: int) -> Any:
    """Return the number of a prefix that is one token longer."""
    # The upper part counts twice in one of them: tokens that differ by PRIME would be alike in both. So would 0 and PRIME.
    upper, last = (token >> 31) + 3 * (token >> 62), modulo(token) + 1  # 2**31 and 1 are alike
    low = (number & PRIME) * OTHER + last + upper + OTHER * i64(token & PRIME == PRIME)
    return modulo((number >> 31) * ONE + last) << 31 | modulo(low)


@helper(i64(i64, sealed(i64[::1])))
def number_behind(number: int, tokens: Ints) -> int:
    """Return the number of a prefix that is longer by tokens: what ``next_number`` returns for one after the other."""
    done = i64(0)
    while done < tokens.size:
        n = min(PIECE, tokens.size - done)
        piece, ones, others = tokens[done : done + n], ONES[PIECE - n :], OTHERS[PIECE - n :]
        one, other, odd = i64(0), i64(0), i64(0)
        for t in range(u64(n)):  # unsigned: no index counts from the end
            last = (piece[t] & PRIME) + 1
            odd |= piece[t] | last
            here, there = last * ones[t + u64(1)], last * others[t + u64(1)]
            one += (here & PRIME) + (here >> 31)
            other += (there & PRIME) + (there >> 31)
        if odd >> 31:  # a token that is not known, or PRIME or more
            for t in range(n):
                number = next_number(number, piece[t])
        else:
            one += (number >> 31) * ones[0]
            other += (number & PRIME) * others[0]
            number = modulo(one) << 31 | modulo(other)
        done += n
    return number
