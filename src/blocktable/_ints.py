"""Exact integer rounding: the only place that rounds (law L12).

Floats never enter: a width computed through ``n / b`` is how 128 / 96 became 1.3333 and every table was refused.
"""

from math import lcm

__all__ = ["align_up", "ceil_div", "lcm"]


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer that is no less than a / b.

    >>> ceil_div(9416, 32)
    295
    """
    return -(-a // b)


def align_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is no less than a.

    >>> align_up(295, 4)
    296
    """
    return -(-a // multiple) * multiple
