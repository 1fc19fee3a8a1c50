"""run_parity: right tables pass every case; what is offered in a wrong shape, or with wrong values, passes none."""

from types import SimpleNamespace

import numpy as np
import pytest

from blocktable import ArgumentError, BlockTables
from blocktable.oracle import TablesModel
from blocktable.testing import CASES, Step, cases, run_parity
from blocktable.testing.parity import expected_batch

BRIEF = cases.cases(brief=True)
SHRINK = [case for case in BRIEF if case.name == "rows that shrink, move and come back"]
KINDS = [case for case in BRIEF if case.name == "every kind of group"]
OF_GROUPS = ("tables", "num_blocks", "kv_indptr", "kv_indices", "last_page_len")
WHERE = r"rows that shrink, move and come back \(K4-K5\), step 0: "


class Right:
    """Tables that do all there is as the model does it; ``spoil`` changes what they hand out."""

    def __init__(self, groups, max_rows, num_blocks, cp_rank):
        self.model, self.rank = TablesModel(groups, max_rows=max_rows, num_blocks=num_blocks), cp_rank

    def __getattr__(self, verb):
        return getattr(self.model, verb)

    def gather(self, rows, padded, lengths):
        step = Step(lambda _: None, rows.tolist(), padded, None if lengths is None else lengths.tolist())
        flat = expected_batch(self.model, step, self.rank)
        batch = {name: np.array(flat[name]) for name in ("rows", "seq_lens")}
        for field in OF_GROUPS:
            parts = [np.array(value) for name, value in flat.items() if name.startswith(f"{field} ")]
            batch |= {field: parts} if parts else {}
        return self.spoil(batch)

    def slot_mapping(self, rows, starts, positions, padded):
        arrays = rows.tolist(), starts.tolist(), positions.tolist()
        return self.spoil_slots(np.array(self.model.slot_mapping(*arrays, padded=padded, cp_rank=self.rank)))

    def spoil(self, batch):
        return batch

    def spoil_slots(self, slots):
        return slots


def spoilt(change=None, slots=None):
    """Return a maker of right tables but for what they hand out."""
    found = {"spoil": lambda _, batch: change(batch)} if change else {"spoil_slots": lambda _, array: slots(array)}
    return type("Spoilt", (Right,), found)


def replaced(field, part):
    """Return a maker of tables with another array in a field's every group, or in the field itself."""

    def change(batch):
        if field in batch:
            several = field in OF_GROUPS
            batch[field] = [part(array) for array in batch[field]] if several else part(batch[field])
        return batch

    return spoilt(change)


def test_right_tables_pass_every_case():
    names = [case.name for case in BRIEF]
    assert run_parity(Right, BRIEF) == names
    assert run_parity(spoilt(lambda batch: SimpleNamespace(**batch, more=3)), BRIEF) == names
    lists = spoilt(lambda batch: {name: [np.array(part).tolist() for part in value] for name, value in batch.items()})
    assert run_parity(lists, SHRINK + KINDS) == [SHRINK[0].name, KINDS[0].name]
    assert run_parity(lambda groups, max_rows, **_: BlockTables(groups, max_rows=max_rows), iter(BRIEF)) == names


def test_device_tables_pass_every_case():
    device = pytest.importorskip("blocktable.device")

    class Device:
        def __init__(self, groups, max_rows, num_blocks, cp_rank):
            self.host = BlockTables(groups, max_rows=max_rows, num_blocks=num_blocks)
            self.device = device.DeviceTables(self.host, "cpu", cp_rank=cp_rank)
            self.gather, self.slot_mapping = self.device.gather, self.device.slot_mapping

        def __getattr__(self, verb):
            return getattr(self.host, verb)

        def commit(self):
            self.device.apply(self.host.commit())

    assert run_parity(Device, BRIEF) == [case.name for case in BRIEF]


def test_what_is_absent_or_none_is_not_offered():
    assert run_parity(spoilt(lambda batch: {"tables": batch["tables"]}), SHRINK)
    assert run_parity(spoilt(lambda batch: dict.fromkeys(batch) | {"tables": batch["tables"]}), SHRINK)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (replaced("tables", lambda _: np.zeros((0, 0), np.int64)), r"tables 0 has the shape \(0, 0\), wanted \(3, 6\)"),
        (replaced("tables", np.ravel), r"tables 0 has the shape \(18,\), wanted \(3, 6\)"),
        (replaced("tables", np.transpose), r"tables 0 has the shape \(6, 3\), wanted \(3, 6\)"),
        (replaced("tables", lambda table: table[:, :5]), r"tables 0 has the shape \(3, 5\), wanted \(3, 6\)"),
        (replaced("tables", lambda table: table[:2]), r"tables 0 has the shape \(2, 6\), wanted \(3, 6\)"),
        (replaced("tables", lambda table: table[None]), r"tables 0 has the shape \(1, 3, 6\), wanted \(3, 6\)"),
        (replaced("tables", lambda table: table[::-1]), r"tables 0 differs, first at \[\[0, 0\]"),
        (replaced("tables", lambda table: table.astype(float)), "tables 0 holds float64, wanted integers"),
        (replaced("tables", lambda _: None), "tables 0 holds object, wanted integers"),
        (replaced("tables", lambda _: [[1], [2, 3]]), "tables 0 cannot be read as an array"),
        (replaced("kv_indices", lambda _: []), r"kv_indices 0 has the shape \(0,\), wanted \(9,\)"),
        (replaced("kv_indices", lambda array: array[:, None]), r"kv_indices 0 has the shape \(9, 1\), wanted \(9,\)"),
        (replaced("kv_indptr", lambda _: []), r"kv_indptr 0 has the shape \(0,\), wanted \(4,\)"),
        (replaced("last_page_len", lambda array: array[:2]), r"last_page_len 0 has the shape \(2,\), wanted \(3,\)"),
        (replaced("num_blocks", lambda array: array + 1), "num_blocks 0 differs"),
        (replaced("seq_lens", lambda _: []), r"seq_lens has the shape \(0,\), wanted \(3,\)"),
        (replaced("rows", lambda array: array[:2]), r"rows has the shape \(2,\), wanted \(3,\)"),
        (spoilt(lambda batch: batch | {"tables": []}), "tables has 0 arrays, wanted one for each of 1 groups"),
        (spoilt(lambda batch: batch | {"tables": 7}), "tables is of type int, wanted an array for each of 1 groups"),
        (spoilt(lambda batch: batch | {"tables": None}), "what gather returned, a dict, has no tables"),
        (spoilt(lambda _: None), "what gather returned, a NoneType, has no tables"),
        (spoilt(slots=lambda _: None), r"slots holds object|slots have the shape \(\), wanted \(1, 5 or more\)"),
        (spoilt(slots=lambda array: array[0]), r"slots have the shape \(5,\), wanted \(1, 5 or more\)"),
        (spoilt(slots=lambda array: array[:, :4]), r"slots have the shape \(1, 4\), wanted \(1, 5 or more\)"),
        (spoilt(slots=lambda array: array[:0]), r"slots have the shape \(0, 5\), wanted \(1, 5 or more\)"),
        (spoilt(slots=lambda array: array + 1), r"slots differs, first at \[\[0, 0\]"),
        (spoilt(slots=lambda array: array.astype(str)), "slots holds <U"),
    ],
)
def test_what_is_offered_has_the_right_shape_and_values(make, why):
    with pytest.raises(AssertionError, match=WHERE + why):
        run_parity(make, SHRINK)


def test_each_of_several_groups_is_looked_at():
    short = spoilt(lambda batch: batch | {"tables": batch["tables"][:4]})
    with pytest.raises(AssertionError, match=r"every kind of group .*, step 0: tables has 4 arrays, .* 5 groups"):
        run_parity(short, KINDS)
    with pytest.raises(AssertionError, match=r"step 0: slots have the shape \(4, 8\), wanted \(5, 8 or more\)"):
        run_parity(spoilt(slots=lambda array: array[1:]), KINDS)


def test_an_exception_of_the_tables_comes_through_with_case_and_step():
    class Batch(SimpleNamespace):
        @property
        def seq_lens(self):
            raise ValueError("not made yet")

    with pytest.raises(ValueError, match="not made yet") as caught:
        run_parity(spoilt(lambda batch: Batch(tables=batch["tables"])), SHRINK)
    assert caught.value.__notes__ == [f"{SHRINK[0].name} (K4-K5), step 0: seq_lens"]

    def breaks(_):
        raise RuntimeError("no memory")

    for make, call in ((spoilt(breaks), "step 0: gather"), (spoilt(slots=breaks), "step 0: slot_mapping")):
        with pytest.raises(RuntimeError) as broken:
            run_parity(make, SHRINK)
        assert broken.value.__notes__ == [f"{SHRINK[0].name} (K4-K5), {call}"]
    with pytest.raises(RuntimeError) as broken:
        run_parity(lambda _, **__: breaks(0), SHRINK)
    assert broken.value.__notes__ == [f"{SHRINK[0].name}: make"]


@pytest.mark.parametrize("wrong", ["pages handed over", ["pages handed over"], CASES[0], 3, None])
def test_cases_that_are_none_are_refused(wrong):
    with pytest.raises(ArgumentError, match="cases must be a list of cases, got"):
        run_parity(Right, wrong)
