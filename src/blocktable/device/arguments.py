"""What a step is told: rows, lengths, token positions; checked where looking at them costs no wait.

Lists, NumPy arrays and tensors in host memory are looked at, all of them, before anything is written. Tensors on a device
are not: reading them would wait for the device. There the kernels take a row outside the tables for padding, and read and
write nothing outside their own rows and buffers.
"""

from typing import Any

import torch

from blocktable import _kernels as k
from blocktable._arrays import I64 as INT64
from blocktable._arrays import as_int64, is_integer
from blocktable._jit import compiled, i32, i64
from blocktable._kernels import BLOCK, COUNT, CP, I32, I64, KIND, OK, RING, ROWS, STATE, STATE_FIELDS, refuse
from blocktable.device.staging import Staging
from blocktable.errors import ArgumentError

BAD_LENGTH, BAD_CUT, BAD_PADDING = 23, 24, 25


@compiled(i64(i64[:, ::1], i32[::1], i64[::1], i64[::1], i64[::1], i64, i64))
def check_step(info: I64, state: I32, rows: I64, lengths: I64, starts: I64, positions: int, padded: int) -> int:
    """Refuse rows outside the tables, lengths that live blocks do not hold, and offsets that do not cut the positions.

    A length is held against the groups that keep every token and in which the row has a block. Arrays that are not at hand
    come empty.
    """
    total = info[info.shape[0] - 1, ROWS]
    for i in range(rows.size):
        if rows[i] < -1 or rows[i] >= total:
            return refuse(info, k.BAD_ROW, 0, i, rows[i], rows[i], total, 0)
    for i in range(lengths.size):
        if rows[i] < 0:
            continue
        if lengths[i] < 0 or lengths[i] >= 2**31:
            return refuse(info, BAD_LENGTH, 0, i, rows[i], lengths[i], 2**31 - 1, 0)
        for group in range(info.shape[0] - 1):
            if info[group, KIND] != STATE and info[group, KIND] != RING:
                live = i64(state[(group * total + rows[i]) * STATE_FIELDS + COUNT])
                room = live * info[group, BLOCK] * info[group, CP]
                if live > 0 and lengths[i] > room:
                    return refuse(info, BAD_LENGTH, group, i, rows[i], lengths[i], room, 0)
    if starts.size == 0:
        return OK
    tokens, falls = starts[starts.size - 1], 0
    for i in range(starts.size - 1):
        if starts[i + 1] < starts[i]:
            falls = 1
    if starts[0] != 0 or falls or tokens > positions:
        return refuse(info, BAD_CUT, 0, starts.size - 1, -1, tokens, positions, 0)
    if tokens > padded:
        return refuse(info, BAD_PADDING, 0, starts.size - 1, -1, tokens, padded, 0)
    return OK


def on_host(value: Any, name: str, device: torch.device) -> Any:
    """Return an argument as an int64 array where it lies in host memory, and None where it lies on ``device``."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"{name} must be a one-dimensional tensor of int32 or int64, got {value.dtype} {tuple(value.shape)}",
                values={"name": name, "dtype": str(value.dtype), "shape": tuple(value.shape)},
                remedy=f"pass {name} as integers, one per entry",
            )
        if not value.is_cpu:
            if value.device != device or not value.is_contiguous():
                raise ArgumentError(
                    f"{name} is on {value.device}, contiguous: {value.is_contiguous()}; the tables are on {device}",
                    values={"name": name, "device": str(value.device), "tables": str(device)},
                    remedy="pass contiguous tensors on the tables' device, or arrays in host memory",
                )
            return None
        value = value.numpy()
        if value.dtype is not INT64:  # int32, which fits
            return value.astype(INT64)
    return as_int64(value, name)


class Sender:
    """Brings a call's arguments to the device: what lies on the host in one copy, what is there already as it is."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device = device
        self._staging = Staging(device, torch.int64, depth)

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes went over so far."""
        return self._staging.bytes_sent

    def send(self, given: tuple[Any, ...], host: tuple[Any, ...]) -> list[Any]:
        """Return tensors on the device for what was given; ``host`` holds the array of each that lies on the host.

        None stays None. Waits where the device is ``depth`` calls behind.
        """
        if self._device.type == "cpu":
            return [None if array is None else torch.from_numpy(array) for array in host]
        found = list(given)
        if all(array is None for array in host):
            return found
        size = sum(array.size for array in host if array is not None)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "arguments in host memory cannot be captured: a replay would not read them again",
                values={"arguments": size},
                remedy="pass tensors on the device, and write each step's values into them",
            )
        buffer, end = self._staging.fill(size), 0
        for array in host:
            if array is not None:
                buffer[end : end + array.size] = array
                end += array.size
        sent, end = self._staging.send(size), 0
        for i, array in enumerate(host):
            if array is not None:
                found[i] = sent[end : end + array.size]
                end += array.size
        return found


def step_fault(code: int, verb: str, scratch: Any) -> ArgumentError:
    """Return the error of arguments that were refused, from the values that the loop left."""
    fields = (k.FAULT_GROUP, k.FAULT_INDEX, k.FAULT_ROW, k.FAULT_VALUE, k.FAULT_LIMIT)
    group, index, row, value, limit = (int(scratch[field]) for field in fields)
    values = {"group": group, "index": index, "row": row, "value": value, "limit": limit}
    if code == BAD_LENGTH:
        return ArgumentError(
            f"{verb}: lengths[{index}] is {value}, row {row} of group {group} holds {limit} tokens at most",
            law="L7",
            values=values,
            remedy="apply the delta that brought the row's blocks first, and pass lengths in tokens",
        )
    if code == BAD_CUT:
        return ArgumentError(
            f"{verb}: query_start_loc does not cut {limit} positions into {index} parts, it ends at {value}",
            law="L7",
            values={"rows": index, "positions": limit, "tokens": value},
            remedy="pass the running sum of the rows' token counts, with a leading 0",
        )
    if code == BAD_PADDING:
        return too_many(verb, value, limit)
    return ArgumentError(
        f"{verb}: rows[{index}] is {row}, the tables have rows 0..{limit - 1}",
        law="L2",
        values=values,
        remedy="pass rows within max_rows, or -1 for padding",
    )


def too_many(verb: str, tokens: int, padded: int) -> ArgumentError:
    """Return the error of more tokens than the step is padded to."""
    return ArgumentError(
        f"{verb}: {tokens} tokens do not fit padded={padded}",
        law="L6",
        values={"tokens": tokens, "padded": padded},
        remedy="pad to at least the number of tokens",
    )


def as_count(value: Any, name: str, least: int) -> int:
    """Return a size as an int of at least ``least``."""
    if not is_integer(value) or not least <= value < 2**31:
        raise ArgumentError(
            f"{name} must be an integer of at least {least}, got {value!r}",
            law="L6",
            values={name: value, "least": least},
            remedy=f"pass the size of the step with padding, at least {least}",
        )
    return int(value)
