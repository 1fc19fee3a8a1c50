"""Host tables: what they take, what they refuse, who may call them, and what a change costs."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import ArgumentError, BlockTables, ConcurrentUse, Contract, Group, LawBroken
from blocktable import _kernels as k


def plan(width: int, block: int = 16, **how: Any) -> blocktable.Geometry:
    return blocktable.plan(max_model_len=width * block, block_size=block, **how)


def small() -> BlockTables:
    """Two rows live of four, in a full group of width 4 and a window group of width 3."""
    tables = BlockTables([plan(4), Group(plan(3), kind="window", window=16)], max_rows=4, num_blocks=10)
    tables.append([0, 1], ([0, 3, 4], [0, 2, 3]), ([3, 7, 9, 5], [1, 2, 4]), group=None)
    return tables


def state(tables: BlockTables) -> list[list[list[int]]]:
    return [[*table.array.tolist(), table.num_blocks.tolist()] for table in tables.tables]


REFUSED: list[tuple[str, Callable[[BlockTables], Any], str, dict[str, Any]]] = [
    ("past the width", lambda t: t.append([0], [0, 2], [5, 6]), "L2", {"row": 0, "group": 0, "value": 5, "limit": 4}),
    ("past the width, later group", lambda t: t.append([0], ([0, 1], [0, 2]), ([5], [6, 8]), None), "L2", {"group": 1}),
    ("assign past the width", lambda t: t.assign([2], [0, 5], [1, 2, 3, 4, 5]), "L2", {"row": 2, "value": 5}),
    ("negative id", lambda t: t.append([0], [0, 1], [-7]), "L3", {"value": -7, "limit": 10}),
    ("id past the pool", lambda t: t.append([0], [0, 1], [10]), "L3", {"value": 10, "limit": 10}),
    ("id far past the pool", lambda t: t.append([0], [0, 1], [10**9]), "L3", {"value": 10**9}),
    ("null id", lambda t: t.append([0], [0, 1], [0]), "L3", {"row": 0}),
    ("null behind a live one", lambda t: t.append([0], [0, 1], [0], 1), "L3", {"row": 0, "group": 1}),
    ("null between live ones", lambda t: t.assign([0], [0, 3], [0, 5, 0], 1), "L3", {"group": 1}),
    ("row -1", lambda t: t.append([-1], [0, 1], [5]), "L2", {"row": -1}),
    ("row past the last", lambda t: t.clear([0, 4]), "L2", {"row": 4, "index": 1}),
    ("row twice", lambda t: t.append([2, 2], [0, 1, 2], [5, 6]), "L8", {"row": 2, "index": 1}),
    ("target twice", lambda t: t.move([0, 1], [2, 2]), "L8", {"row": 2}),
    ("source twice", lambda t: t.move([0, 0], [1, 2]), "L8", {"row": 0}),
    ("copy target twice", lambda t: t.copy([0, 1], [2, 2]), "L8", {"row": 2}),
    ("row in two swaps", lambda t: t.swap([0, 1], [1, 2]), "L8", {"row": 1}),
    ("indptr falls", lambda t: t.append([0, 1], [0, 2, 1], [5, 6]), "L2", {}),
    ("indptr starts late", lambda t: t.append([0], [1, 2], [5, 6]), "L2", {}),
    ("indptr ends early", lambda t: t.append([2], [0, 1], [5, 6]), "L2", {"value": 1}),
    ("indptr too short", lambda t: t.append([0, 1], [0, 1], [5]), "L2", {}),
    ("indptr empty", lambda t: t.append([], [], []), "L2", {}),
    ("count above the live one", lambda t: t.truncate([0], [4]), "L2", {"row": 0, "value": 4, "limit": 3}),
    ("negative count", lambda t: t.truncate([0], [-1]), "L2", {"value": -1}),
    (
        "count above, later group",
        lambda t: t.truncate([0], ([1], [3]), None),
        "L2",
        {"group": 1, "value": 3, "limit": 2},
    ),
    ("counts of one group", lambda t: t.truncate([0], ([1],), None), "", {}),
    ("release above the live count", lambda t: t.release([0], [3], 1), "L2", {"value": 3, "limit": 2}),
    ("release of a full group", lambda t: t.release([0], [1], 0), "L3", {"kind": "full"}),
    ("no such group", lambda t: t.append([0], [0, 1], [5], 2), "", {}),
    ("arrays of different length", lambda t: t.move([0, 1], [2]), "", {"rows": 2}),
    ("resize while live", lambda t: t.resize(t.groups), "L1", {}),
    ("resize to other kinds", lambda t: t.resize([t.groups[0]]), "", {}),
]


@pytest.mark.parametrize(("call", "law", "values"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_refused_call_names_law_values_and_remedy_and_changes_nothing(
    call: Callable[[BlockTables], Any], law: str, values: dict[str, Any]
) -> None:
    tables = small()
    tables.commit()
    tables.append([3], [0, 1], [6])  # something pending, which must stay so
    before = state(tables)
    with pytest.raises(ArgumentError) as caught:
        call(tables)
    assert caught.value.law == law or not law
    assert caught.value.remedy
    assert values.items() <= caught.value.values.items()
    assert state(tables) == before
    delta = tables.commit()
    assert (delta.spans.tolist(), delta.values.tolist()) == ([[0, 3, 0, 1, 0, 1]], [6])
    tables.check()


BAD_ARRAYS: list[Any] = [
    [0.0],
    np.array([0.0]),
    np.array([]),  # float64, though empty
    [True],
    np.array([False]),
    np.array([0], object),
    [None],
    "0",
    0,
    None,
    [[0]],
    np.zeros((1, 1), np.int64),
    [2**70],
    np.array([0], "complex128"),
    np.array([0], "timedelta64[s]"),
    {0: 1},
]


@pytest.mark.parametrize("bad", BAD_ARRAYS, ids=repr)
def test_only_one_dimensional_integers_are_taken(bad: Any) -> None:
    tables = small()
    before = state(tables)
    calls: list[Callable[[], Any]] = [
        lambda: tables.append(bad, [0, 1], [5]),
        lambda: tables.append([2], bad, [5]),
        lambda: tables.append([2], [0, 1], bad),
        lambda: tables.assign([2], ([0, 1], bad), ([5], [6]), None),
        lambda: tables.truncate(bad, [0]),
        lambda: tables.truncate([0], bad),
        lambda: tables.release([0], bad, 1),
        lambda: tables.clear(bad),
        lambda: tables.move(bad, [1]),
        lambda: tables.swap([1], bad),
        lambda: tables.copy([1], bad),
        lambda: tables.slot_mapping(bad, [0, 1], [0]),
        lambda: tables.slot_mapping([0], bad, [0]),
        lambda: tables.slot_mapping([0], [0, 1], bad),
        lambda: tables.tables[0].kernel_array(bad),
    ]
    for call in calls:
        with pytest.raises(ArgumentError):
            call()
    assert state(tables) == before


def test_values_that_fit_are_converted_and_others_named() -> None:
    tables = BlockTables([plan(8)], max_rows=2)
    tables.append(np.array([1], np.uint8), np.array([0, 1], np.uint16), np.array([2**31 - 1], np.uint64))
    assert tables.tables[0].array[1, 0] == 2**31 - 1
    for ids, law in (
        (np.array([2**31], np.int64), "L3"),  # no block id, though it fits int64
        (np.array([2**31], np.uint32), "L3"),
        ([-(2**40)], "L3"),
        (np.array([2**64 - 1], np.uint64), "L12"),
    ):
        with pytest.raises(ArgumentError, match=str(int(ids[0]))) as caught:
            tables.append([0], [0, 1], ids)
        assert caught.value.law == law
    with pytest.raises(ArgumentError, match="does not fit int64"):
        tables.clear(np.array([2**63], np.uint64))


def test_inputs_are_read_only_once_and_never_kept_or_written() -> None:
    tables = BlockTables([plan(4)], max_rows=2)
    rows, indptr, ids = np.array([0]), np.array([0, 2]), np.array([5, 6], np.int32)
    copies = rows.copy(), indptr.copy(), ids.copy()
    tables.append(rows, indptr, ids)
    ids[:] = 1
    assert tables.tables[0].array[0].tolist() == [5, 6, 0, 0]
    ids[:] = copies[2]
    for array in (rows, indptr, ids):
        array.flags.writeable = False
    tables.assign(rows, indptr, ids)
    tables.truncate(rows, np.array([1]))
    tables.move(rows, np.array([1]))
    for array, copy in zip((rows, indptr, ids), copies, strict=True):
        assert np.array_equal(array, copy)


def test_views_are_live_and_sealed() -> None:
    tables = small()
    view, counts = tables.tables[0].array, tables.tables[0].num_blocks
    tables.append([3], [0, 1], [8])
    assert view[3].tolist() == [8, 0, 0, 0]
    assert counts.tolist() == [3, 1, 0, 1]
    for array in (view, counts):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_nulls_come_only_before_the_first_live_entry_of_a_window() -> None:
    tables = BlockTables([Group(plan(5), kind="window", window=16)], max_rows=1)
    tables.append([0], [0, 3], [0, 0, 8])
    tables.release([0], [1], 0)  # a smaller total changes nothing
    with pytest.raises(ArgumentError, match="null block"):
        tables.append([0], [0, 1], [0])
    tables.truncate([0], [1])
    tables.append([0], [0, 2], [0, 9])  # all null again: more may follow
    with pytest.raises(ArgumentError, match="null block"):
        tables.append([0], [0, 1], [0])
    tables.truncate([0], [1])
    tables.append([0], [0, 1], [7])
    with pytest.raises(ArgumentError, match="null block"):
        tables.append([0], [0, 1], [0])
    assert tables.tables[0].array[0].tolist() == [0, 7, 0, 0, 0]
    tables.check()
    tables.assign([0], [0, 2], [0, 0])
    tables.release([0], [1], 0)
    tables.append([0], [0, 2], [0, 6])
    assert tables.tables[0].array[0].tolist() == [0, 0, 0, 6, 0]


def test_an_empty_batch_changes_nothing_and_is_no_error() -> None:
    tables = small()
    before = state(tables)
    tables.append([], [0], [])
    tables.assign([], ([0], [0]), ([], []), group=None)
    tables.truncate([], [])
    tables.release([], [], 1)
    tables.clear([])
    tables.move([], [])
    tables.swap([], [])
    tables.copy([], [])
    assert state(tables) == before
    assert tables.slot_mapping([], [0], []).shape == (2, 0)
    assert tables.slot_mapping([], [0], [], padded=2).tolist() == [[-1, -1]] * 2
    assert tables.tables[0].kernel_array([]).shape == (0, 4)


def test_move_reads_every_source_before_it_writes() -> None:
    """A cycle of rows is a rotation, and a row moved onto itself stays."""
    tables = BlockTables([plan(2)], max_rows=4)
    tables.append([0, 1, 2, 3], [0, 1, 2, 3, 5], [10, 11, 12, 13, 14])
    tables.move([0, 1, 2, 3], [1, 2, 0, 3])
    assert tables.tables[0].array.tolist() == [[12, 0], [10, 0], [11, 0], [13, 14]]
    tables.copy([3, 0], [0, 1])  # pair after pair: row 1 gets what row 0 has just become
    assert tables.tables[0].array.tolist() == [[13, 14], [13, 14], [11, 0], [13, 14]]


def test_a_call_that_finds_another_in_progress_raises_concurrent_use() -> None:
    """Every public call, while a thread is inside one: the first to come wins, the other is refused unharmed."""
    tables = BlockTables([plan(4)], max_rows=2)
    tables.append([0], [0, 1], [7])
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: tables.append([0], [0, 1], [8]),
        "truncate": lambda: tables.truncate([0], [0]),
        "move": lambda: tables.move([0], [1]),
        "slot_mapping": lambda: tables.slot_mapping([0], [0, 1], [0]),
        "kernel_array": lambda: tables.tables[0].kernel_array([0]),
        "commit": tables.commit,
        "snapshot": tables.snapshot,
        "check": tables.check,
        "resize": lambda: tables.resize(tables.groups),
    }
    with tables._busy:
        for verb, call in calls.items():
            with pytest.raises(ConcurrentUse, match=verb) as caught:
                call()
            assert caught.value.remedy
    assert tables.tables[0].array.tolist() == [[7, 0, 0, 0], [0, 0, 0, 0]]
    assert tables.commit().seq == 1


def test_two_threads_on_one_object_are_noticed() -> None:
    """The loops release the GIL, so a second thread really can come in the middle of one."""
    tables = BlockTables([plan(200)], max_rows=200)
    inside: list[ConcurrentUse] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                tables.check()
            except ConcurrentUse as error:
                inside.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    deadline = time.monotonic() + 60
    while not inside:
        try:
            tables.assign([0], [0, 2], [1, 2])
        except ConcurrentUse as error:
            inside.append(error)
        assert time.monotonic() < deadline, "no call met another"
    done.set()
    thread.join()
    tables.assign([0], [0, 2], [1, 2])
    tables.check()
    assert tables.tables[0].array[0, :3].tolist() == [1, 2, 0]


def test_never_committing_is_bounded_and_one_commit_catches_up() -> None:
    tables = BlockTables([plan(8)], max_rows=3)
    size = sum(array.nbytes for array in (tables._info, tables._state, tables._entries, tables._sent, tables._dirty))
    for step in range(500):
        tables.assign([step % 3], [0, 3], [1 + step, 2 + step, 3 + step])
        tables.truncate([step % 3], [1])
        tables.move([step % 3], [(step + 1) % 3])
    arrays = (tables._info, tables._state, tables._entries, tables._sent, tables._dirty)
    assert sum(array.nbytes for array in arrays) == size
    delta = tables.commit()
    assert len(delta.spans) <= 3
    assert len(delta.values) <= 24


@pytest.mark.parametrize("width", [64, 8192])
def test_a_commit_carries_what_changed_whatever_the_width(width: int) -> None:
    """64 rows of 1024 cross a block edge: 64 entries travel, not 1024 rows (the cost is counted, not timed)."""
    rows = np.arange(1024)
    tables = BlockTables([plan(width)], max_rows=1024)
    tables.append(rows, np.arange(1025) * 32, np.arange(1, 32 * 1024 + 1))
    assert tables.commit().values.size == 32 * 1024
    tables.append(rows[::16], np.arange(65), np.arange(1, 65))
    delta = tables.commit()
    assert (len(delta.spans), len(delta.values)) == (64, 64)
    assert len(delta.to_bytes()) == 40 + 64 * 28
    assert len(tables.commit().spans) == 0
    tables.clear(rows)
    delta = tables.commit()
    assert (len(delta.spans), len(delta.values)) == (1024, 0), "nulls travel as lengths"


def test_what_was_undone_before_the_commit_is_not_sent() -> None:
    tables = small()
    tables.commit()
    tables.append([0], [0, 1], [8])
    tables.truncate([0], [3])
    tables.move([1], [2])
    tables.move([2], [1])
    delta = tables.commit()
    assert delta.seq == 2
    assert len(delta.spans) == len(delta.values) == 0


def test_a_count_that_alone_changed_is_a_span_of_count_0() -> None:
    """A window row that ends in given-up entries: truncating it changes no entry, only how many are live."""
    tables = BlockTables([Group(plan(4), kind="window", window=16)], max_rows=1)
    tables.append([0], [0, 3], [0, 0, 0])
    assert tables.commit().spans.tolist() == [[0, 0, 3, 0, -1, 3]]
    tables.truncate([0], [1])
    delta = tables.commit()
    assert delta.spans[:, [0, 1, 3, 4, 5]].tolist() == [[0, 0, 0, -1, 1]]


def test_resize_changes_every_width_at_once() -> None:
    tables = BlockTables([plan(4), plan(2)], max_rows=2)
    first = tables.tables[0]
    tables.append([1], [0, 4], [1, 2, 3, 4])
    tables.clear([1])
    tables.resize([plan(2), plan(5)])
    assert first.array.shape == tables.tables[0].array.shape == (2, 2)
    assert tables.tables[1].kernel_array([0]).shape == (1, 5)
    assert [group.geometry.width for group in tables.groups] == [2, 5]
    with pytest.raises(ArgumentError, match="would hold 3 blocks, its width is 2"):
        tables.append([1], [0, 3], [1, 2, 3])
    assert len(tables.commit().spans) == 0
    tables.check()


def test_check_finds_what_was_written_from_outside_and_shows_the_row() -> None:
    def broken(change: Callable[[BlockTables], None]) -> LawBroken:
        tables = small()
        tables.commit()
        change(tables)
        with pytest.raises(LawBroken) as caught:
            tables.check()
        return caught.value

    def entry(at: int, value: int) -> Callable[[BlockTables], None]:
        return lambda t: t._entries.__setitem__(at, value)

    def count(row: int, value: int) -> Callable[[BlockTables], None]:
        return lambda t: t._state.__setitem__(row * k.STATE_FIELDS + k.COUNT, value)

    def pending(change: Callable[[BlockTables], None]) -> Callable[[BlockTables], None]:
        def both(tables: BlockTables) -> None:
            tables.append([0], [0, 1], [8])  # row 0 is listed, so that the laws before L11 speak
            change(tables)

        return both

    assert broken(entry(3, 5)).law == "L11"  # a clean row no longer equals what was sent
    tail = broken(pending(lambda t: t._state.__setitem__(k.COUNT, 2)))
    assert (tail.law, tail.values["column"], "[3 7 9 8]" in str(tail)) == ("L4", 2, True)
    assert broken(pending(entry(1, 10))).law == "L3"
    assert broken(pending(entry(1, 0))).law == "L3"
    assert broken(pending(entry(1, -1))).law == "L3"
    assert broken(count(0, 5)).law == "L2"
    assert broken(count(1, 0)).law == "L11"
    assert "row 1 of group 0" in str(broken(count(1, -1)))


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("max_rows", 0),
        ("max_rows", -1),
        ("max_rows", True),
        ("max_rows", 2.0),
        ("max_rows", "4"),
        ("max_rows", 2**40),
        ("num_blocks", 0),
        ("num_blocks", 2**31 + 1),
        ("groups", []),
        ("groups", plan(4)),
        ("groups", "full"),
        ("groups", 3),
        ("groups", [None]),
    ],
)
def test_the_constructor_refuses(how: str, value: Any) -> None:
    arguments = {"groups": [plan(4)], "max_rows": 2} | {how: value}
    with pytest.raises(ArgumentError) as caught:
        BlockTables(arguments.pop("groups"), **arguments)
    assert caught.value.remedy


def test_ids_must_fit_int32_once_split_into_kernel_blocks() -> None:
    split = plan(4, 64, contracts=[Contract("tiny", kernel_block_sizes=(16,))])
    with pytest.raises(ArgumentError, match="overflow int32") as caught:
        BlockTables([split], max_rows=1, num_blocks=2**29 + 1)
    assert caught.value.values["limit"] == 2**29
    BlockTables([split], max_rows=1, num_blocks=2**29).append([0], [0, 1], [2**29 - 1])


SLOT_ARGUMENTS: list[dict[str, Any]] = [
    {"padded": 1},
    {"padded": -1},
    {"padded": 2.0},
    {"padded": "2"},
    {"padded": True},
    {"padded": 2**62},
    {"cp_rank": 1},
    {"cp_rank": -1},
    {"cp_rank": "0"},
    {"cp_rank": 0.0},
    {"out": [0, 0]},
    {"out": np.empty((), np.int64)},
    {"out": np.empty(2, np.int64)},
    {"out": np.empty((2, 2), np.int32)},
    {"out": np.empty((2, 1), np.int64)},
    {"out": np.empty((2, 4), np.int64)[:, ::2]},
    {"out": np.empty((2, 3), np.int64), "padded": 2},
    {"query_start_loc": [0, 3]},
    {"query_start_loc": [0, -1]},
    {"query_start_loc": [1, 2]},
    {"query_start_loc": [0]},
    {"query_start_loc": []},
    {"rows": [-2]},
    {"rows": [4]},
]


@pytest.mark.parametrize("change", SLOT_ARGUMENTS, ids=repr)
def test_slot_mapping_refuses(change: dict[str, Any]) -> None:
    arguments = {"rows": [0], "query_start_loc": [0, 2], "positions": [0, 1]} | change
    with pytest.raises(ArgumentError) as caught:
        small().slot_mapping(**arguments)
    assert caught.value.remedy


def test_slot_mapping_into_a_buffer_fills_all_of_it() -> None:
    out = np.full((2, 5), 99, np.int64)
    assert small().slot_mapping([0, -1], [0, 2, 3], [0, 17, 4], out=out) is out
    assert out.tolist() == [[48, 113, -1, -1, -1], [16, 33, -1, -1, -1]]


def test_a_picture_of_the_tables_in_one_line() -> None:
    tables = small()
    assert repr(tables.tables[1]) == "<table 1, window: 4 rows of 3, 2 live>"
    assert repr(tables).startswith("BlockTables(seq=0, pending rows=4")
