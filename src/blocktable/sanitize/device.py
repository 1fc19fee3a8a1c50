"""Sanitized device tables: deltas applied once more, and every batch and slot compared with what the copy gives.

What lies on a device is copied back for each comparison, which waits for it: this is for finding faults, not for speed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from blocktable import _kernels as k
from blocktable.sanitize.findings import caller
from blocktable.sanitize.laws import Broken, Ints, Unit, as_numbers
from blocktable.sanitize.reading import kernel_rows_broken
from blocktable.sanitize.replica import ReplicaSanitizer, SanitizedFollower


class _View:
    """One group's table as it is on the device: an array, and live counts."""

    def __init__(self, array: Any, num_blocks: Any) -> None:
        self.array, self.num_blocks = array, num_blocks


class DeviceSanitizer(ReplicaSanitizer):
    """The shadow of one ``DeviceTables``."""

    def _show(self) -> None:
        device = self._of
        groups, rows = len(device.shapes), device.max_rows
        counts = as_numbers(device._tensors[1]).reshape(groups, rows, k.STATE_FIELDS)[:, :, k.COUNT]  # noqa: SLF001
        self.shadow.show([_View(as_numbers(table), counts[g]) for g, table in enumerate(device.tables)])

    def gathered(self, batch: Any, rows: Any, padded: int, lengths: Any) -> None:
        """Report what is wrong with a batch: padding (L6), tails (L4), units (L12), counts and lengths (L2, L7)."""
        named = np.full(padded, -1)
        given = as_numbers(rows).astype(np.int64)
        named[: given.size] = np.where((given >= 0) & (given < self.shadow.max_rows), given, -1)
        long = np.zeros(padded, np.int64)
        if lengths is not None:
            long[: given.size] = as_numbers(lengths)
        long[named < 0] = 0
        for broken in self._batch_broken(batch, named, long, csr=lengths is not None):
            self.shadow.find(broken)

    def _batch_broken(self, batch: Any, rows: Ints, lengths: Ints, *, csr: bool) -> Iterator[Broken]:
        for name, right in (("rows", rows), ("seq_lens", lengths)):
            found = as_numbers(getattr(batch, name))
            wrong = np.flatnonzero(found != right)
            if wrong.size:
                i = int(wrong[0])
                law = "L6" if rows[i] < 0 else "L7"
                yield Broken(law, f"{name}[{i}] of the batch is {found[i]}, not {right[i]}", row=int(rows[i]))
        for g, unit in enumerate(self.shadow.units):
            tables = np.zeros((rows.size, unit.kernel_width), np.int64)
            live = np.zeros(rows.size, np.int64)
            here = np.flatnonzero(rows >= 0)
            tables[here] = self.shadow.kernel_rows(g, rows[here])
            live[here] = self.shadow.counts[g, rows[here]] * unit.ratio
            yield from kernel_rows_broken(g, as_numbers(batch.tables[g]), tables, rows, live)
            counts = as_numbers(batch.num_blocks[g])
            wrong = np.flatnonzero(counts != live)
            if wrong.size:
                i = int(wrong[0])
                yield Broken("L2", f"the batch counts {counts[i]} live kernel blocks, not {live[i]}", g, int(rows[i]))
            if csr:
                yield from self._csr_broken(batch, unit, rows, lengths, tables, live)

    def _csr_broken(
        self, batch: Any, unit: Unit, rows: Ints, lengths: Ints, tables: Ints, live: Ints
    ) -> Iterator[Broken]:
        g, page = unit.group, unit.block // unit.ratio
        rank = self._of.cp_rank if unit.ranks > 1 else 0
        whole, rest = np.divmod(lengths, unit.ranks * unit.interleave)
        local = whole * unit.interleave + np.clip(rest - rank * unit.interleave, 0, unit.interleave)
        pages = np.minimum(-(-local // page), live)
        indptr = np.concatenate([[0], np.cumsum(pages)])
        last = np.where(pages > 0, np.minimum(local - (pages - 1) * page, page), 1)
        for name, right in (("kv_indptr", indptr), ("last_page_len", last)):
            found = as_numbers(getattr(batch, name)[g])
            wrong = np.flatnonzero(found != right)
            if wrong.size:
                i = int(wrong[0])
                row = int(rows[min(i, rows.size - 1)])
                yield Broken("L7", f"{name}[{i}] is {found[i]}, the lengths give {right[i]}", g, row)
                return
        indices = np.concatenate([tables[i, :count] for i, count in enumerate(pages)]) if rows.size else pages
        found = as_numbers(batch.kv_indices[g])[: indices.size]
        wrong = np.flatnonzero(found != indices)
        if wrong.size:
            i = int(wrong[0])
            row = int(rows[int(np.searchsorted(indptr, i, side="right")) - 1])
            yield Broken("L12", f"kv_indices[{i}] is {found[i]}, not {indices[i]}", g, row, -1, int(found[i]))


class SanitizedDevice(SanitizedFollower):
    """Comes before ``DeviceTables`` in the class of sanitized ones."""

    _shadow_of = DeviceSanitizer

    def gather(self, rows: Any, padded: int, lengths: Any = None, **named: Any) -> Any:
        """Do what the tables do, and look at the batch."""
        shadow = self.sanitizer.shadow
        batch = super().gather(rows, padded, lengths, **named)  # type: ignore[misc]
        shadow.begin("gather", caller(1))
        self.sanitizer.gathered(batch, rows, padded, lengths)
        return batch

    def slot_mapping(self, rows: Any, query_start_loc: Any, positions: Any, padded: int, **named: Any) -> Any:
        """Do what the tables do, and look at the slots."""
        shadow = self.sanitizer.shadow
        slots = super().slot_mapping(rows, query_start_loc, positions, padded, **named)  # type: ignore[misc]
        shadow.begin("slot_mapping", caller(1))
        self._look(slots, rows, query_start_loc, positions)
        return slots

    def prepare(
        self,
        rows: Any,
        padded: int,
        lengths: Any,
        query_start_loc: Any,
        positions: Any,
        padded_tokens: int,
        **named: Any,
    ) -> Any:
        """Do what the tables do, and look at batch and slots."""
        shadow = self.sanitizer.shadow
        step = (rows, padded, lengths, query_start_loc, positions, padded_tokens)
        batch, slots = super().prepare(*step, **named)  # type: ignore[misc]
        shadow.begin("prepare", caller(1))
        self.sanitizer.gathered(batch, rows, padded, lengths)
        self._look(slots, rows, query_start_loc, positions)
        return batch, slots

    def _look(self, slots: Any, rows: Any, starts: Any, positions: Any) -> None:
        named, offsets, where = (as_numbers(value).astype(np.int64) for value in (rows, starts, positions))
        named = np.where((named >= 0) & (named < self.sanitizer.shadow.max_rows), named, -1)
        self.sanitizer.mapped(as_numbers(slots), named, offsets, where, self.sanitizer._of.cp_rank)  # noqa: SLF001
