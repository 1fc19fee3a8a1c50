"""What lies on the device, and what every implementation of the kernels is given.

The persistent tables are the host's arrays, in the host's layout (``blocktable._kernels`` draws them): ``info`` int64,
the constants of the groups; ``state`` int32, the numbers of each row, of which only the live count is used here;
``entries`` int32, all tables one after another, in manager blocks. A batch is one more set of arrays, in batch order and
in kernel blocks, with room for ``capacity`` rows:

    tables, kv_indices   group 0: [capacity, kernel_width 0] | group 1: [capacity, kernel_width 1] | ...
                                                             ^ capacity x info[1, KERNEL_BASE]
    marks                [groups, capacity, chunks]

A gather writes what is live, and nulls only up to what the row held last time: ``marks`` remembers that, one number per
stretch of CHUNK columns, so that the programs of one launch share no number.

    columns   0 ............ live ............ mark ................... kernel_width
              | written      | nulled          | null already           |
"""

from typing import Any, NamedTuple

CHUNK = 4096

# Two numbers more in info[g], past those of the host: columns of all earlier groups' kernel tables, kernel block size.
KERNEL_BASE, KERNEL_BLOCK = 14, 15


class Buffers(NamedTuple):
    """The arrays of one batch, NumPy's or torch's; the last three are None until a gather is given lengths."""

    widths: tuple[int, ...]  # columns of each group's kernel table
    rows: Any  # int32 [capacity], -1 in padding
    seq_lens: Any  # int32 [capacity], 0 in padding
    tables: Any  # int32, flat
    num_blocks: Any  # int32 [groups, capacity], kernel blocks
    marks: Any  # int32 [groups, capacity, chunks]
    kv_indptr: Any = None  # int32 [groups, capacity + 1]
    kv_indices: Any = None  # int32, flat, one entry more than tables
    last_page_len: Any = None  # int32 [groups, capacity]
