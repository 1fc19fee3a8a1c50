"""How a case of `blocktable.testing` is run on device tables: by the delta's bytes, every other step into poisoned outputs.

Needs NumPy and torch alone, so that the script for a machine with a GPU runs the same list without pytest.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from blocktable import BlockTables, Delta
from blocktable.device import DeviceTables
from blocktable.oracle import TablesModel
from blocktable.testing import Case
from blocktable.testing.cases import Step, cases, geometry, random_steps
from blocktable.testing.parity import expected_batch, same

__all__ = ["BRIEF", "CASES", "INTERPRETED", "LONG", "Case", "Step", "drive", "geometry", "random_steps"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# An interpreted program takes tens of milliseconds: unless asked for the long run, that process does fewer of the same.
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
BRIEF = INTERPRETED and not LONG
POISON = -123457
CASES = cases(brief=BRIEF)


def actual_batch(batch: Any, groups: int, *, csr: bool) -> dict[str, Any]:
    found = {"rows": batch.rows, "seq_lens": batch.seq_lens}
    for g in range(groups):
        found[f"tables {g}"], found[f"num_blocks {g}"] = batch.tables[g], batch.num_blocks[g]
        if csr:
            end = int(batch.kv_indptr[g][-1])
            found[f"kv_indptr {g}"], found[f"last_page_len {g}"] = batch.kv_indptr[g], batch.last_page_len[g]
            found[f"kv_indices {g}"] = batch.kv_indices[g][:end]
    return found


def poisoned(device: DeviceTables, padded: int, *, csr: bool) -> Any:
    batch = device.new_batch(padded)
    if csr:
        batch._store.add_csr()
    for part in batch._store.tensors[1:]:
        if part is not None:
            part.fill_(POISON)
    return batch


def drive(case: Case, make: Callable[[BlockTables, int], DeviceTables]) -> None:
    """Run a case: the host and the model change, the device follows by the delta's bytes, all three must agree."""
    tables = BlockTables(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    model = TablesModel(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    device = make(tables, case.rank)
    for number, step in enumerate(case.steps()):
        step.change(tables)
        step.change(model)
        changes = model.commit()
        delta = Delta.from_bytes(tables.commit().to_bytes())
        before = device.stats()
        device.apply(delta)
        spent = {name: count - before[name] for name, count in device.stats().items()}
        assert spent["launches"] <= 1, "one launch for any number of groups"
        assert spent["delta_bytes"] <= changes.most_bytes(), "bytes in proportion to what changed"
        assert device.snapshot() == tables.snapshot()

        csr, mine = step.lengths is not None, number % 2 == 1
        starts = np.cumsum([0, *step.query], dtype=np.int64)
        tokens = int(starts[-1]) + step.unused
        out = poisoned(device, step.padded, csr=csr) if mine else None
        slots_out = None
        if mine:
            shape = (len(case.groups), tokens + 5)
            slots_out = torch.full(shape, POISON, dtype=torch.int64, device=device.device)
        rows, positions = np.array(step.rows, np.int32), np.array(step.positions, np.int64)
        lengths = None if step.lengths is None else np.array(step.lengths, np.int64)
        if number % 3 == 2:
            batch, slots = device.prepare(
                rows, step.padded, lengths, starts, positions, tokens, out=out, slots_out=slots_out
            )
        else:
            batch = device.gather(rows, step.padded, lengths, out=out)
            slots = device.slot_mapping(rows, starts, positions, tokens, out=slots_out)
        got, want = actual_batch(batch, len(case.groups), csr=csr), expected_batch(model, step, case.rank)
        assert got.keys() == want.keys()
        for name in want:
            same(f"step {number}: {name}", got[name], want[name])
        expected = model.slot_mapping(
            step.rows, starts.tolist(), step.positions, padded=slots.shape[1], cp_rank=case.rank
        )
        same(f"step {number}: slots", slots, expected)
