"""The host's tables on a device: kept equal by deltas, gathered into batch order, read for slots (L4, L6, L7, L11).

    device = DeviceTables(tables, "cuda")
    device.apply(tables.commit())                              # each step: what changed, and nothing else
    batch = device.gather(rows, padded, lengths)               # the step's tables, at fixed addresses
    slots = device.slot_mapping(rows, query_start_loc, positions, padded_tokens)

Three implementations do the same, bit for bit: compiled loops where the device is the host, Triton kernels on CUDA, and
torch operations elsewhere. The plain NumPy meaning of each is in ``blocktable.device.reference``.
"""

# ruff: noqa: SLF001 - the mirror is this object's own host half

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch

from blocktable import _kernels as k
from blocktable._apply import SPAN_COUNT, stage
from blocktable._arrays import is_integer
from blocktable._copying import Uncopied
from blocktable._sanitized import Sanitizable
from blocktable.delta import Delta
from blocktable.device.arguments import Sender, as_count, check_step, on_host, step_fault, too_many
from blocktable.device.batch import Batch, Store
from blocktable.device.layout import KERNEL_BASE, KERNEL_BLOCK
from blocktable.device.staging import Staging
from blocktable.errors import ArgumentError
from blocktable.geometry import Geometry
from blocktable.replica import Replica

_NONE = np.zeros(0, np.int64)
_NAMES = ("rows", "lengths", "query_start_loc", "positions")
KERNELS = ("compiled", "reference", "fallback", "kernels")


class DeviceTables(Sanitizable, Uncopied):
    """The tables of all groups on one device, which start as ``tables`` were at their last commit.

    ``tables`` are BlockTables, a Replica or a KVCache's tables; ``device`` is what torch takes; ``cp_rank`` is this
    process's rank in its context-parallel group. ``kernels`` names the implementation: "compiled" (the default on the CPU),
    "kernels" (Triton, the default on CUDA), "fallback" (torch operations) or "reference" (NumPy, for tests). ``depth`` is how
    many steps the host may be ahead of the device.

    Arguments of a call are lists, NumPy arrays or tensors of int32 or int64. What lies in host memory is checked and copied
    over; what lies on the device is used as it is, without a look (see ``blocktable.device.arguments``). After the first
    step of a size nothing is allocated: results keep their addresses, and each stays valid until the next call of the same
    verb into the same buffer. All calls belong on one stream, in order. No call waits for the device, except that one
    which sends something waits until the device has read what was sent ``depth`` calls before.

    >>> import blocktable
    >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=4)
    >>> device = DeviceTables(tables, "cpu")
    >>> tables.append([2], [0, 3], [3, 7, 9])
    >>> device.apply(tables.commit())
    >>> batch = device.gather([2], 2, [40])
    >>> batch.tables[0].tolist(), batch.seq_lens.tolist()
    ([[3, 7, 9, 0], [0, 0, 0, 0]], [40, 0])
    >>> device.slot_mapping([2], [0, 3], [0, 17, 39], 4).tolist()
    [[48, 113, 151, -1]]
    """

    copy_instead = "make one there: DeviceTables.from_snapshot(bytes, device), with the bytes of snapshot()"

    def __init__(
        self,
        tables: Any,
        device: Any,
        *,
        cp_rank: int = 0,
        kernels: str | None = None,
        depth: int = 2,
        sanitize: Any = None,  # noqa: ARG002 - read by __new__
    ) -> None:
        if not callable(getattr(tables, "snapshot", None)) or not hasattr(tables, "layout"):
            raise ArgumentError(
                f"DeviceTables mirrors host tables, got {type(tables).__name__}",
                values={"got": type(tables).__name__},
                remedy="pass BlockTables, a Replica, or a KVCache's tables",
            )
        geometries = tuple(group.geometry for group in getattr(tables, "groups", ()))
        self._start(tables.snapshot(), device, cp_rank, kernels, depth, geometries, tables.num_blocks)

    @classmethod
    def from_snapshot(
        cls,
        data: bytes,
        device: Any,
        *,
        cp_rank: int = 0,
        kernels: str | None = None,
        depth: int = 2,
        num_blocks: int | None = None,
    ) -> Self:
        """Start from the bytes of a host's snapshot; the batches then know no contracts to be checked against.

        ``num_blocks`` is the pool's, which the bytes do not tell: without it there is no split table.
        """
        made = cls.__new__(cls)
        made._start(data, device, cp_rank, kernels, depth, (), num_blocks)
        return made

    def _start(
        self,
        snapshot: bytes,
        device: Any,
        cp_rank: int,
        kernels: str | None,
        depth: int,
        geometries: tuple[Geometry, ...],
        num_blocks: int | None,
    ) -> None:
        self.device = _as_device(device)
        # The mirror knows shapes, seq and live counts; its entries are the device's where the device is the host.
        self._mirror = Replica.from_snapshot(snapshot)
        self.shapes, self.max_rows = self._mirror.shapes, self._mirror.max_rows
        self._geometries = geometries or (None,) * len(self.shapes)
        self._num_blocks = num_blocks
        ranks = max(shape.cp_size for shape in self.shapes)
        rank: Any = cp_rank
        ahead: Any = depth
        if not is_integer(rank) or not 0 <= rank < ranks:
            raise ArgumentError(
                f"cp_rank {cp_rank!r} is outside 0..{ranks - 1}",
                law="L13",
                values={"cp_rank": cp_rank, "cp_size": ranks},
                remedy="pass this process's rank in its context-parallel group",
            )
        self.cp_rank = int(cp_rank)
        self.kernels = kernels or _best_kernels(self.device)
        if self.kernels not in KERNELS or (self.kernels in KERNELS[:2] and self.device.type != "cpu"):
            raise ArgumentError(
                f"there are no {kernels!r} kernels for {self.device}",
                values={"kernels": kernels, "device": str(self.device)},
                remedy=f"leave kernels out, or use one of {', '.join(KERNELS)}",
            )
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
            raise ArgumentError(
                f"depth must be an integer of at least 1, got {depth!r}",
                values={"depth": depth},
                remedy="pass how many steps the host may be ahead of the device",
            )
        self._do: Any = import_module(f"blocktable.device.{self.kernels}")
        self._on_arrays = self.kernels in KERNELS[:2]
        base = 0
        for g, shape in enumerate(self.shapes):
            self._mirror._info[g, KERNEL_BASE], self._mirror._info[g, KERNEL_BLOCK] = base, shape.kernel_block_size
            base += shape.kernel_width
        self._place()
        self._delta_staging = Staging(self.device, torch.int32, depth)
        self._sender = Sender(self.device, depth)
        self._stores: list[Store] = []
        self._slot_buffers: list[tuple[Any, Any]] = []
        self._counts = {"deltas": 0, "launches": 0, "entries": 0, "delta_bytes": 0}

    def _place(self) -> None:
        """Put the tables on the device; off the host, the mirror then keeps counts alone."""
        mirror = self._mirror
        host = (mirror._info, mirror._state, mirror._entries)
        tensors = tuple(torch.from_numpy(array).to(self.device) for array in host)
        self._tensors = tensors
        self._tables: tuple[Any, ...] = host if self._on_arrays else tensors
        if self.device.type != "cpu":
            mirror._entries = mirror._sent = np.zeros(0, np.int32)
            mirror._arrays = []
        widths = [shape.width for shape in self.shapes]
        entries: Any = tensors[2]
        parts = entries.split([self.max_rows * width for width in widths])
        self.tables = tuple(part.view(self.max_rows, width) for part, width in zip(parts, widths, strict=True))

    @property
    def seq(self) -> int:
        """The seq of the delta applied last."""
        return self._mirror.seq

    def apply(self, delta: Delta) -> None:
        """Write what a commit changed: one copy of 24 bytes per span and 4 per value, and one launch for all groups.

        Raises DeltaError, changing nothing, for a repeat, a gap, tables of another shape, and what no host sends; start
        anew from the host then. Batches and slots show the change from the next gather on. Waits until the device has read
        the delta ``depth`` before this one, and for nothing else.
        """
        mirror = self._mirror
        if self.kernels == "compiled":
            mirror.apply(delta)
        else:
            with mirror._sole("apply"):
                mirror._follow(delta)
                self._send(delta)
        counts = self._counts
        counts["deltas"] += 1
        counts["launches"] += delta.spans.size > 0
        counts["entries"] += delta.values.size
        counts["delta_bytes"] += 4 * (delta.spans.size + delta.values.size)

    def _send(self, delta: Delta) -> None:
        """Stage a delta, start its copy, and launch."""
        spans, values = delta.spans, delta.values
        size = spans.size + values.size
        buffer = self._delta_staging.fill(size) if size else np.zeros(0, np.int32)
        self._mirror._take(delta, stage, spans, values, buffer)
        if size == 0:
            return
        sent = self._delta_staging.send(size)
        if self._on_arrays:
            sent = buffer
        count = spans[:, SPAN_COUNT]
        parts = (sent[: spans.size].reshape(-1, 6), sent[spans.size :])
        self._do.apply(*self._tables, *parts, int(count.sum()), int(count.max()))

    def gather(self, rows: Any, padded: int, lengths: Any = None, *, out: Batch | None = None) -> Batch:
        """Fill a batch: entry i holds row rows[i] of every group in kernel blocks, -1 and whatever is past them nothing.

        ``padded`` is the batch's size with padding. With ``lengths`` (tokens per row) the batch has ``seq_lens`` and the
        flat form as well; under context parallelism that counts this rank's tokens. The result is the persistent batch of
        this size, valid until the next gather; ``out`` is a batch of ``new_batch`` to be filled instead, whatever it
        holds. Raises ArgumentError for arguments in host memory that name a row outside the tables or a length past a
        row's live blocks. Cost: one launch, one pass over what is live and what the same batch rows held before.
        """
        batch: Batch = self._step("gather", rows, (padded, lengths, out), None)[0]
        return batch

    def slot_mapping(self, rows: Any, query_start_loc: Any, positions: Any, padded: int, *, out: Any = None) -> Any:
        """Return the slot of every token of a step, int64 [groups, buffer length] with a buffer of at least ``padded``.

        ``rows`` [n] names a row per request (-1: padding), ``query_start_loc`` [n + 1] cuts the tokens into requests,
        ``positions`` holds each token's position in its row. -1 as on the host, and from the first unused token to the
        buffer's end. The result is a persistent buffer, the same for the same ``padded`` and valid until the next slot
        mapping; ``out`` (int64, contiguous, [groups, at least padded]) is filled and returned instead. Cost: one launch,
        one pass over the buffer per group.
        """
        if self.kernels == "compiled":
            return self._map_here(rows, query_start_loc, positions, as_count(padded, "padded", 0), out)
        return self._step("slot_mapping", rows, None, (query_start_loc, positions, padded, out))[1]

    def _map_here(self, rows: Any, query_start_loc: Any, positions: Any, padded: int, out: Any) -> Any:
        """Map slots by the host's loop, which looks at all its arguments itself."""
        wanted = on_host(rows, "rows", self.device)
        starts = on_host(query_start_loc, "query_start_loc", self.device)
        where = on_host(positions, "positions", self.device)
        if starts.size != wanted.size + 1:
            _one_each("slot_mapping", "query_start_loc", starts, wanted.size + 1)
        if starts[-1] > padded:
            raise too_many("slot_mapping", int(starts[-1]), padded)
        slots, flat = self._slots("slot_mapping", padded, out)
        self._mirror._run("slot_mapping", k.slots, wanted, starts, where, self.cp_rank, flat.reshape(-1))
        self._counts["launches"] += 1
        return slots

    def prepare(
        self,
        rows: Any,
        padded: int,
        lengths: Any,
        query_start_loc: Any,
        positions: Any,
        padded_tokens: int,
        *,
        out: Batch | None = None,
        slots_out: Any = None,
    ) -> tuple[Batch, Any]:
        """``gather`` and ``slot_mapping`` of the same rows in one launch; arguments, results and errors are theirs."""
        gathered, mapped = (padded, lengths, out), (query_start_loc, positions, padded_tokens, slots_out)
        return self._step("prepare", rows, gathered, mapped)

    def _step(self, verb: str, rows: Any, gathered: Any, mapped: Any) -> tuple[Any, Any]:
        """Look at all arguments, then fill a batch, or map slots, or both."""
        padded, lengths, out = gathered or (0, None, None)
        starts, positions, tokens, slots_out = mapped or (None, None, 0, None)
        given: tuple[Any, ...] = (rows, lengths, starts, positions)
        needed = (True, lengths is not None, mapped is not None, mapped is not None)
        asked = zip(given, _NAMES, needed, strict=True)
        host = tuple(on_host(value, name, self.device) if used else None for value, name, used in asked)
        n = len(rows)
        _one_each(verb, "lengths", lengths, n)
        _one_each(verb, "query_start_loc", starts, n + 1)
        if gathered is not None:
            padded = as_count(padded, "padded", n)
        if mapped is not None:
            tokens = as_count(tokens, "padded", 0)
        mirror = self._mirror
        with mirror._sole(verb):
            if host[0] is not None:
                at_hand, long, cuts = (_NONE if array is None else array for array in host[:3])
                there = 0 if positions is None else len(positions)
                code = check_step(mirror._info, mirror._state, at_hand, long, cuts, there, tokens)
                if code != k.OK:
                    raise step_fault(code, verb, mirror._info[-1])
            batch = None if gathered is None else self._batch(verb, padded, lengths is not None, out)
            slots, target = (None, None) if mapped is None else self._slots(verb, tokens, slots_out)
            self._launch(given, host, batch, target)
        return batch, slots

    def _launch(self, given: Any, host: Any, batch: Batch | None, target: Any) -> None:
        rows, lengths, starts, positions = host if self._on_arrays else self._sender.send(given, host)
        buffers = None
        if batch is not None:
            batch.has_lengths = lengths is not None
            buffers = batch._store.arrays if self._on_arrays else batch._store.tensors
        if batch is None:
            self._do.slots(*self._tables, rows, starts, positions, self.cp_rank, target)
        elif target is None:
            self._do.gather(*self._tables, rows, lengths, self.cp_rank, buffers, batch.padded)
        else:
            common = (*self._tables, rows, lengths, self.cp_rank, buffers, batch.padded)
            self._do.step(*common, starts, positions, target)
        self._counts["launches"] += 1

    def _batch(self, verb: str, padded: int, csr: bool, out: Any) -> Batch:
        """Return the batch to fill: the caller's, or the persistent one of this size."""
        if out is not None:
            store: Store | None = out._store if isinstance(out, Batch) else None
            if store is None or store.shapes != self.shapes or store.capacity < padded or store.device != self.device:
                raise ArgumentError(
                    f"{verb}: out must be a batch of these tables with room for {padded} rows, got {out!r}",
                    law="L6",
                    values={"padded": padded},
                    remedy="make it with new_batch(padded)",
                )
            store.forget()
        else:
            store = next((made for made in self._stores if made.capacity >= padded), None)
            if store is None:
                store = self._new_store(max(padded, self.max_rows))
                self._stores.append(store)  # each is larger than those before, which keep their addresses
        if csr:
            store.add_csr()
        return store.batch(padded)

    def _slots(self, verb: str, padded: int, out: Any) -> tuple[Any, Any]:
        """Return the buffer to fill, as a tensor and as the kernels take it: the caller's, or the smallest long enough."""
        groups = len(self.shapes)
        if out is None:
            for buffer in self._slot_buffers:
                if buffer[0].shape[1] >= padded:
                    return buffer
            made = torch.empty((groups, padded), dtype=torch.int64, device=self.device)
            self._slot_buffers.append((made, made.numpy() if self._on_arrays else made))
            return self._slot_buffers[-1]
        right = isinstance(out, torch.Tensor) and out.dtype == torch.int64 and out.device == self.device
        if not right or out.dim() != 2 or out.shape[0] != groups or out.shape[1] < padded or not out.is_contiguous():
            shape = tuple(getattr(out, "shape", ()))
            raise ArgumentError(
                f"{verb}: out must be a contiguous int64 tensor [{groups}, at least {padded}] on {self.device}, "
                f"got {getattr(out, 'dtype', type(out).__name__)} {shape}",
                law="L6",
                values={"groups": groups, "padded": padded, "shape": shape},
                remedy="leave out away, or make it with torch.empty(shape, dtype=torch.int64, device=device)",
            )
        return out, out.numpy() if self._on_arrays else out

    def _new_store(self, capacity: int) -> Store:
        return Store(self.shapes, self._geometries, self._num_blocks, capacity, self.device)

    def new_batch(self, padded: int) -> Batch:
        """Return a batch of its own memory, for ``out``: where two batches must be valid at once."""
        size = as_count(padded, "padded", 0)
        return self._new_store(size).batch(size)

    def snapshot(self) -> bytes:
        """Return the state and its seq, equal to the host's snapshot at that seq; waits for the device."""
        mirror = self._mirror
        if self.device.type == "cpu":
            return mirror.snapshot()
        mirror._sent = self._tensors[2].cpu().numpy()
        try:
            return mirror.snapshot()
        finally:
            mirror._sent = mirror._entries

    def stats(self) -> dict[str, int]:
        """Return counts since the start: deltas, launches, values sent, bytes of deltas, bytes of other arguments.

        A launch is one call into the kernels; the torch fallback makes several of each.
        """
        return self._counts | {"argument_bytes": self._sender.bytes_sent}

    def __repr__(self) -> str:
        """Say what and where."""
        return f"DeviceTables(seq={self.seq}, {len(self.shapes)} groups, {self.max_rows} rows, {self.device}, {self.kernels})"


def _as_device(device: Any) -> torch.device:
    """Return a device that is there, with its index: cuda is cuda:0, or whichever is current."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(
            f"device {device!r} is not at hand: {str(error).splitlines()[0]}",
            values={"device": str(device)},
            remedy='pass a device of this machine, such as "cpu" or "cuda:0"',
        ) from None


def _best_kernels(device: torch.device) -> str:
    if device.type == "cpu":
        return "compiled"
    return "kernels" if device.type == "cuda" and find_spec("triton") is not None else "fallback"


def _one_each(verb: str, name: str, value: Any, size: int) -> None:
    if value is not None and len(value) != size:
        raise ArgumentError(
            f"{verb}: {name} has {len(value)} entries where {size} belong",
            law="L7",
            values={name: len(value), "want": size},
            remedy="pass one length per row, and one offset more than rows in query_start_loc",
        )
