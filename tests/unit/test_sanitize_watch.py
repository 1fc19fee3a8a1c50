"""`sanitize.watch`: tables of an engine of its own, each law broken once by hand, and healthy steps in silence."""

import logging

import numpy as np
import pytest

from blocktable import ArgumentError, Contract, Group, LawBroken, TokenMultiple, plan
from blocktable.oracle import TablesModel
from blocktable.sanitize import watch

GEOMETRY = plan(max_model_len=64, block_size=16)
TABLE = np.array([[3, 5, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]], np.int32)
STEP = {"query_start_loc": [0, 1, 3], "positions": [16, 0, 1], "slots": [80, 96, 97, -1], "lengths": [17, 2]}


def look(groups=(GEOMETRY,), table=TABLE, counts=(2, 1), num_blocks=8, cp_rank=0, **step):
    watcher = watch(groups, num_blocks=num_blocks, mode="count", cp_rank=cp_rank)
    return watcher.step(table, counts, **(STEP | step))


def changed(**cells):
    table = TABLE.copy()
    for name, value in cells.items():
        table[tuple(map(int, name.strip("_").split("_")))] = value
    return table


def test_a_healthy_step_finds_nothing():
    assert look() == []


@pytest.mark.parametrize(
    ("law", "place", "how"),
    [
        ("L1", (-1, -1), {"table": TABLE[:, :3]}),
        ("L2", (0, -1), {"counts": [5, 1]}),
        ("L3", (0, 1), {"table": changed(_0_1=8), "slots": [128, 96, 97, -1]}),
        ("L3", (0, 1), {"table": changed(_0_1=-3), "slots": [-48, 96, 97, -1]}),
        ("L3", (0, 0), {"table": changed(_0_0=0)}),
        ("L4", (1, 2), {"table": changed(_1_2=7)}),
        ("L5", (1, 0), {"counts": [2, 0], "lengths": [17, 0], "slots": [80, -1, -1, -1]}),
        ("L6", (2, 3), {"table": changed(_2_3=7)}),
        ("L6", (-1, -1), {"slots": [80, 96, 97, 0]}),
        ("L6", (0, 1), {"slots": [0, 96, 97, -1]}),
        ("L6", (-1, 0), {"rows": [0, -1]}),
        ("L7", (0, 1), {"slots": [81, 96, 97, -1]}),
        ("L7", (1, -1), {"slots": [80, 96, 96, -1], "positions": [16, 0, 0], "lengths": None}),
        ("L7", (0, 2), {"lengths": [33, 2]}),
        ("L8", (1, -1), {"table": changed(_1_0=5), "slots": [80, 80, 81, -1], "positions": [16, 0, 1]}),
        ("L11", (0, 1), {"copies": changed(_0_1=4)}),
    ],
)
def test_each_law_is_found_where_it_is_broken(law, place, how):
    found = look(**how)
    assert (law, *place) in [(one.law, one.row, one.column) for one in found], found


def test_a_width_that_the_contract_refuses():
    aligned = Contract("aligned", width_rule=TokenMultiple(128))
    refused = plan(max_model_len=64, block_size=16, engine=None)
    narrow = plan(max_model_len=64, block_size=16, contracts=[aligned])
    assert (refused.width, narrow.width) == (4, 8)
    found = look(groups=[narrow])
    assert {one.law for one in found} == {"L1"}
    assert any(
        "contract refuses" in one.message
        for one in watch([narrow], mode="count", kernel_blocks=True).step(TABLE, [2, 1])
    )


def test_ranks_own_their_tokens_alone():
    geometry = plan(max_model_len=64, block_size=4, cp_size=2)
    model = TablesModel([geometry], max_rows=1)
    model.assign([0], [0, 2], [5, 8])
    how = {"table": [model.full_row(0, 0)], "counts": [2], "num_blocks": 9, "groups": [geometry]}
    how |= {"query_start_loc": [0, 16], "positions": range(16), "lengths": [16]}
    mine, theirs = (model.slot_mapping([0], [0, 16], list(range(16)), cp_rank=rank) for rank in range(2))
    assert look(**how, slots=mine) == look(**how, slots=theirs, cp_rank=1) == []
    assert {one.law for one in look(**how, slots=theirs)} == {"L13"}


def test_kinds_of_groups_allow_what_they_allow():
    wide = plan(max_model_len=64, block_size=16)
    window, state = Group(wide, kind="window", window=20), Group(wide, kind="state")
    table = np.array([[0, 5, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]])
    assert look(groups=[window], table=table) == []
    assert {one.law for one in look(table=table)} == {"L3"}
    holed = np.array([[3, 0, 5, 0], [6, 0, 0, 0], [0, 0, 0, 0]])
    nowhere = {"slots": [-1, 96, 97, -1], "lengths": None}
    assert {one.law for one in look(groups=[window], table=holed, counts=[3, 1], **nowhere)} == {"L3"}
    assert look(groups=[state], table=holed, counts=[3, 1], slots=[-1, -1, -1, -1]) == []


def test_a_block_that_another_row_has_held_is_not_to_be_written():
    shared = changed(_1_0=3)
    for first, laws in ((TABLE, set()), (shared, {"L8"})):  # come to in this step, or held since the one before
        watcher = watch([GEOMETRY], num_blocks=8, mode="count")
        watcher.step(first, [2, 1])
        found = watcher.step(shared, [2, 1], query_start_loc=[0, 1], positions=[3], slots=[51])
        assert {one.law for one in found} == laws
    watcher.step(shared, [2, 1], requests=["a", "b"], lengths=[17, 2])
    found = watcher.step(shared, [2, 1], query_start_loc=[0, 1, 1], positions=[3], slots=[51], requests=["a", "c"])
    assert found == [], "another request has the row, and came to the block in this step"


def test_findings_name_the_operation_and_the_one_that_touched_the_entry():
    watcher = watch([GEOMETRY], num_blocks=8)
    watcher.step(TABLE, [2, 1], verb="add_row")
    with pytest.raises(
        LawBroken, match=r"\[L4\].*move_row at step 1 .test_sanitize_watch.py:\d+.*add_row at step 0"
    ) as caught:
        watcher.step(TABLE, [1, 1], verb="move_row")
    finding = caught.value.finding
    assert (finding.group, finding.row, finding.column, finding.block) == (0, 0, 1, 5)
    assert finding.operation.line == finding.touched.line + 4
    assert caught.value.law == "L4"


def test_modes(caplog):
    with caplog.at_level(logging.ERROR, "blocktable.sanitize"):
        watcher = watch([GEOMETRY], mode="log", ignore={"L6"})
        watcher.step(changed(_1_2=7, _2_2=7), [2, 1])
    assert [record.name for record in caplog.records] == ["blocktable.sanitize"]
    assert watcher.report.counts == {"L4": 1}
    assert len(watcher.report.findings) == len(watcher.report) == 1
    with pytest.raises(ArgumentError, match="mode"):
        watch([GEOMETRY], mode="silent")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [80], "query_start_loc": None},
        {"slots": [80]},
        {"query_start_loc": [0, 3, 1]},
        {"rows": [0, 3]},
        {"counts": [1, 1, 1, 1]},
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(wrong):
    with pytest.raises(ArgumentError, match="watch: "):
        look(**wrong)


def test_tensors_and_several_groups():
    torch = pytest.importorskip("torch")
    table, slots = torch.from_numpy(TABLE), torch.tensor([[80, 96, 97, -1], [80, 96, 97, -1]])
    watcher = watch([GEOMETRY, GEOMETRY], num_blocks=8)
    starts, positions = torch.tensor([0, 1, 3]), torch.tensor([16, 0, 1])
    counts = np.array([[2, 1], [2, 1]])
    assert (
        watcher.step(
            [table, table], counts, query_start_loc=starts, positions=positions, slots=slots, copies=[table, table]
        )
        == []
    )
    slots[1, 0] = 7
    with pytest.raises(LawBroken, match="group 1"):
        watcher.step([table, table], counts, query_start_loc=starts, positions=positions, slots=slots)


def test_long_runs_keep_no_more_than_they_must():
    watcher = watch([GEOMETRY], num_blocks=8, mode="count")
    watcher._log.ROOM = 4
    watcher._log._calls = [None] * 4
    for _ in range(9):
        watcher.step(TABLE, [2, 1])
    (found,) = watcher.step(TABLE, [1, 1])
    assert found.touched is None, "nine steps ago is forgotten"
    assert found.operation.step == 9
