"""What vLLM takes on a TPU, whose kernel holds the whole table in the chip's scalar memory: rows and pages by themselves.

>>> own_page(131072, 256), own_page(4096, 256), own_page(1024, None)
(256, 256, 64)
"""

from typing import Final

from blocktable._ints import ceil_div

__all__ = ["DEFAULT_ROWS", "own_page"]

DEFAULT_ROWS: Final = 256  # requests at once where the launch does not say
_MOST_ENTRIES: Final = 2**17  # half of 1 MiB, in entries of 4 bytes
_LONG: Final = 8192  # tokens; longer requests start from the smallest page


def own_page(length: int, rows: int | None) -> int:
    """Return the page taken when none is asked for: a sixteenth of the longest request, until half the memory suffices."""
    page = 16 if length > _LONG else min(max(_power(length) // 16, 16), 256)
    return max(page, _power(ceil_div(length, max(_MOST_ENTRIES // (rows or DEFAULT_ROWS), 1))))


def _power(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()
