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


WRONG = [
    ({"slots": [80], "query_start_loc": None}, "slots come without"),
    ({"slots": [80]}, "3 tokens, there are 1 slots"),
    ({"positions": [16, 0]}, "3 tokens, there are 2 positions"),
    ({"query_start_loc": [0, 3, 1]}, "does not cut"),
    ({"query_start_loc": 3}, "query_start_loc must be of one dimension"),
    ({"query_start_loc": [0, 2**63 - 1, -(2**63)]}, "does not cut"),
    ({"query_start_loc": [0, 1, 3, 3], "rows": [0, 1]}, "does not cut"),
    ({"rows": [0, 3]}, "row 3, live blocks are given of 2 rows"),
    ({"rows": [0, -2]}, "row -2"),
    ({"counts": [1, 1, 1, 1]}, "4 counts of live blocks and 3 rows"),
    ({"counts": [2**70, 1]}, "num_blocks must hold integers"),
    ({"counts": [2.0, 1.0]}, "num_blocks must hold integers, got float64"),
    ({"counts": None}, "num_blocks must hold integers"),
    ({"table": TABLE.astype(float)}, "tables must hold integers, got float64"),
    ({"table": TABLE != 0}, "tables must hold integers, got bool"),
    ({"table": TABLE.astype(str)}, "tables must hold integers, got <U"),
    ({"table": [[3, None, 0, 0]]}, "tables must hold integers"),
    ({"table": [[3, 5, 0, 0], [6]]}, "tables cannot be read"),
    ({"table": np.full((3, 4), 2**64 - 1, np.uint64)}, "does not fit int64"),
    ({"table": [TABLE, TABLE]}, "2 arrays, there are 1 groups"),
    ({"table": TABLE[0]}, r"tables of group 0 must be \[rows, width\], its shape is \(4,\)"),
    ({"lengths": [17]}, "lengths has 1 entries, and the step 2 requests"),
    ({"lengths": [17, 2, 9]}, "lengths has 3 entries, and the step 2 requests"),
    ({"lengths": [[17, 2]]}, "lengths must be of one dimension"),
    ({"lengths": [17, -2]}, "request 1 has -2 tokens"),
    ({"requests": ["a", ["b"]]}, "unhashable"),
    ({"requests": ["a"]}, "requests has 1 entries, and the step 2 requests"),
    ({"requests": 7}, "requests cannot name"),
    ({"copies": TABLE[0]}, r"copies of group 0 must be \[rows, width\]"),
    ({"copies": TABLE.astype(float)}, "copies must hold integers"),
    ({"copies": []}, "copies of group 0"),
    ({"verb": None}, "verb must be text, got None"),
    ({"verb": "\ud800"}, "verb must be text"),
    ({"frame": 7}, "frame must be a frame"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG)
def test_arguments_that_do_not_belong_together_are_refused_and_leave_no_trace(wrong, why):
    watcher = watch([GEOMETRY], num_blocks=8, mode="count")
    args = {"table": TABLE, "counts": [2, 1], **STEP, "requests": ["a", "b"]} | wrong
    with pytest.raises(ArgumentError, match=f"watch: .*{why}"):
        watcher.step(args.pop("table"), args.pop("counts"), **args)
    shared = changed(_1_0=3)
    found = watcher.step(shared, [2, 1], query_start_loc=[0, 1], positions=[3], slots=[51])
    assert (found, watcher.steps) == ([], 1), "row 1 came to the block of row 0 in this step, the first"


def test_a_refused_call_makes_no_finding_at_the_next_step():
    watcher = watch([GEOMETRY], num_blocks=8)
    watcher.step([[3, 0, 0, 0], [0, 0, 0, 0]], [1, 0])
    shared = np.array([[3, 0, 0, 0], [3, 0, 0, 0]])
    step = {"query_start_loc": [0, 1, 2], "positions": np.array([5, -1]), "slots": np.array([53, -1])}
    with pytest.raises(ArgumentError, match="lengths has 1 entries"):
        watcher.step(shared, [1, 1], lengths=[6], **step)
    assert watcher.step(shared, [1, 1], lengths=[6, 6], **step) == []


@pytest.mark.parametrize(
    "wrong",
    [{"lengths": [17, 2]}, {"copies": [TABLE]}, {"slots": [[80, 96, 97]]}, {"requests": ["a", "b"], "lengths": None}],
)
def test_of_several_groups_each_has_its_arrays_and_requests_their_rows(wrong):
    watcher = watch([GEOMETRY, GEOMETRY], mode="count")
    step = {"query_start_loc": [0, 1], "positions": [16], "slots": [[80], [80]], "lengths": [17]} | wrong
    if "requests" in wrong:
        step = {"requests": wrong["requests"]}
    with pytest.raises(ArgumentError, match="watch: "):
        watcher.step([TABLE, TABLE], [[2, 1], [2, 1]], **step)
    assert watcher.steps == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"cp_rank": 7}, "cp_rank must be an integer in 0..1, got 7"),
        ({"cp_rank": -1}, "cp_rank"),
        ({"num_blocks": float("nan")}, "num_blocks must be an integer"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"ignore": {"l4", "L99"}}, "collection of laws, L1 to L13, got"),
        ({"ignore": "L4"}, "collection of laws, L1 to L13, got 'L4'"),
        ({"ignore": None}, "collection of laws"),
        ({"kernel_blocks": "no"}, "kernel_blocks must be True or False"),
    ],
)
def test_what_would_switch_checks_off_is_refused(wrong, why):
    with pytest.raises(ArgumentError, match=why):
        watch([plan(max_model_len=64, block_size=4, cp_size=2)], **wrong)


def test_whatever_holds_integers_is_looked_at():
    torch = pytest.importorskip("torch")
    for make in (np.int32, np.int64, np.uint8, np.uint64):
        how = {name: np.array(value).astype(make) for name, value in STEP.items() if name != "slots"}
        assert look(table=TABLE.astype(make), counts=np.array([2, 1], make), copies=[TABLE.astype(make)], **how) == []
    how = {name: torch.tensor(value) for name, value in STEP.items()} | {"requests": torch.tensor([7, 8])}
    assert look(table=torch.from_numpy(TABLE), counts=torch.tensor([2, 1]), **how) == []
    assert look(table=TABLE.tolist(), counts=[np.int32(2), np.int32(1)], requests=(7, 8), rows=[0, 1]) == []


def test_names_in_a_tensor_are_known_again():
    torch = pytest.importorskip("torch")
    watcher, shared = watch([GEOMETRY], num_blocks=8, mode="count"), changed(_1_0=3)
    for step in ({"lengths": [17, 2]}, {"query_start_loc": [0, 1, 1], "positions": [3], "slots": [51]}):
        found = watcher.step(shared, [2, 1], requests=torch.tensor([7, 8]), **step)
    assert {one.law for one in found} == {"L8"}


def test_faults_of_tables_are_found_beside_whatever_else_the_step_says():
    past = {"positions": [64, 0, 1], "slots": [-1, 96, 97, -1], "lengths": [17, 2]}
    assert {one.law for one in look(counts=[5, 1], **past)} == {"L2", "L3"}, "a position past the width has no slot"
    assert {one.law for one in look(table=TABLE[:, :1], counts=[2, 1])} == {"L1", "L2", "L7"}
    found = watch([GEOMETRY], mode="count", kernel_blocks=True).step(TABLE[:, :3], [2, 1])
    assert {one.law for one in found} == {"L1"}
    idle = {"rows": [-1, -1], "query_start_loc": [0, 1, 1], "positions": [0], "slots": [-1], "lengths": [1, 0]}
    assert look(table=np.zeros((3, 4), np.int32), counts=[], **idle) == [], "a step of padding alone"


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
