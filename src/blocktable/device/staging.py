"""Host memory from which a device copies: buffers in turn, so that the host fills one while the device reads another.

    call            1         2         3
    of two buffers  first     second    first again, once the device has read call 1

Where the device copies behind the host's back (CUDA), the buffers are pinned and an event behind each copy tells when its
buffer may be filled again; a host that is as many calls ahead as there are buffers waits for the oldest. Elsewhere a copy
is done when the call returns.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST = 4096  # numbers a buffer holds at first


class Staging:
    """``depth`` buffers of one dtype, each on the host and on the device; they grow by doubling to what is sent at most."""

    def __init__(self, device: torch.device, dtype: torch.dtype, depth: int) -> None:
        self._device = device
        self._dtype = dtype
        # Marks the end of a copy on the device's stream; None where a copy is done when its call returns.
        self._new_event: Callable[[], Any] | None = torch.cuda.Event if device.type == "cuda" else None
        self._read: list[Any] = [None] * depth
        self._host: list[Any] = [None] * depth
        self._there: list[Any] = [None] * depth
        for turn in range(depth):
            self._make(turn, _LEAST)
        self._turn = 0
        self.bytes_sent = 0
        self.copies = 0

    def _make(self, turn: int, size: int) -> None:
        self._host[turn] = torch.empty(size, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        on_host = self._device.type == "cpu"
        self._there[turn] = self._host[turn] if on_host else torch.empty(size, dtype=self._dtype, device=self._device)

    def fill(self, size: int) -> Any:
        """Return the next buffer's first ``size`` numbers, a NumPy array to be filled before ``send``.

        Waits while the device has yet to read what that buffer held.
        """
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        if len(self._host[self._turn]) < size:
            self._make(self._turn, 1 << (size - 1).bit_length())
        return self._host[self._turn].numpy()[:size]

    def send(self, size: int) -> Any:
        """Start the copy of the filled buffer and return its tensor on the device, valid for ``depth - 1`` further calls."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._host)
        self.bytes_sent += size * self._dtype.itemsize
        self.copies += 1
        target = self._there[turn][:size]
        if target.device.type != "cpu":
            target.copy_(self._host[turn][:size], non_blocking=self._device.type == "cuda")
        if self._new_event is not None:
            self._read[turn] = self._read[turn] or self._new_event()
            self._read[turn].record()
        return target
