"""The compiled loop of a replica: write a delta into tables like the host's."""

from blocktable._jit import compiled, i32, i64, sealed
from blocktable._kernels import (
    BAD_ID,
    BAD_SPAN,
    BASE,
    COUNT,
    I32,
    I64,
    IDS,
    OK,
    ROWS,
    SENT,
    STATE_FIELDS,
    STATE_TYPES,
    WIDTH,
    copy_range,
    fill_null,
    refuse,
)


@compiled(i64(*STATE_TYPES, i32[::1], sealed(i32[:, ::1]), sealed(i32[::1])))
def apply(info: I64, state: I32, entries: I32, sent: I32, spans: I32, values: I32) -> int:
    """Write a delta into a replica, after looking at all of it; ``sent`` keeps pace, so that a snapshot is possible."""
    total = info[info.shape[0] - 1, ROWS]
    for i in range(spans.shape[0]):
        group, row, offset = spans[i, 0], spans[i, 1], i64(spans[i, 4])
        start, count, live = i64(spans[i, 2]), i64(spans[i, 3]), spans[i, 5]
        if group < 0 or group >= info.shape[0] - 1 or row < 0 or row >= total:
            return refuse(info, BAD_SPAN, group, i, row, row, total, start)
        width = info[group, WIDTH]
        if start < 0 or count < 0 or start + count > width or live < 0 or live > width:
            return refuse(info, BAD_SPAN, group, i, row, start + count, width, start)
        if offset < -1 or (offset >= 0 and offset + count > values.size):
            return refuse(info, BAD_SPAN, group, i, row, offset + count, values.size, start)
        if offset >= 0:
            for j in range(offset, offset + count):
                if values[j] < 0 or values[j] >= info[group, IDS]:
                    return refuse(info, BAD_ID, group, i, row, values[j], info[group, IDS], start)
    for i in range(spans.shape[0]):
        group, row, offset, count = spans[i, 0], spans[i, 1], spans[i, 4], spans[i, 3]
        at = info[group, BASE] + row * info[group, WIDTH] + spans[i, 2]
        if offset < 0:
            fill_null(entries, at, at + count)
        else:
            copy_range(entries, at, values, offset, offset + count)
        copy_range(sent, at, entries, at, at + count)
        line = (group * total + row) * STATE_FIELDS
        state[line + COUNT] = spans[i, 5]
        state[line + SENT] = spans[i, 5]
    return OK
