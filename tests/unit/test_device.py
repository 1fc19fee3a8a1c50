"""Device tables from the outside: addresses, arguments, refusals, shapes for each consumer, what is sent, buffers in flight."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import (
    ArgumentError,
    AtMost,
    BlockTables,
    ConcurrentUse,
    Contract,
    ContractError,
    Delta,
    DeltaError,
    Group,
    Replica,
    TokenMultiple,
)

torch = pytest.importorskip("torch")
from blocktable.device import Batch, DeviceTables  # noqa: E402 - only with torch
from blocktable.device.staging import Staging  # noqa: E402

KERNELS = ["compiled", "reference", "fallback"]


def pair(*groups: Any, rows: int = 4, **more: Any) -> tuple[BlockTables, DeviceTables]:
    given = groups or (blocktable.plan(max_model_len=128, block_size=16),)
    tables = BlockTables(given, max_rows=rows, num_blocks=more.pop("num_blocks", 1000))
    return tables, DeviceTables(tables, "cpu", **more)


def filled(**more: Any) -> tuple[BlockTables, DeviceTables]:
    tables, device = pair(**more)
    tables.append([0, 2], [0, 3, 5], [3, 7, 9, 4, 5])
    device.apply(tables.commit())
    return tables, device


def test_the_core_does_not_import_torch() -> None:
    code = "import blocktable, sys, blocktable.tables, blocktable.replica; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- starting and following


def test_starts_where_the_host_last_committed() -> None:
    tables = BlockTables([blocktable.plan(max_model_len=128, block_size=16)], max_rows=2)
    tables.append([0], [0, 2], [3, 7])
    tables.commit()
    tables.append([0], [0, 1], [9])  # pending: comes with the next delta
    device = DeviceTables(tables, "cpu")
    assert device.tables[0][0, :4].tolist() == [3, 7, 0, 0]
    device.apply(tables.commit())
    assert device.tables[0][0, :4].tolist() == [3, 7, 9, 0]
    assert device.seq == 2
    assert device.snapshot() == tables.snapshot()


def test_starts_from_a_replica_and_from_a_snapshot() -> None:
    tables, device = filled()
    mirror = Replica.from_snapshot(tables.snapshot())
    others = [DeviceTables(mirror, "cpu"), DeviceTables.from_snapshot(device.snapshot(), "cpu")]
    tables.truncate([0], [1])
    delta = tables.commit()
    for one in (device, *others):
        one.apply(delta)
        assert one.snapshot() == tables.snapshot()
    assert others[1].gather([0], 1, [5]).dense().tolist() == device.gather([0], 1, [5]).dense().tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_gap_a_repeat_and_another_shape_change_nothing(kernels: str) -> None:
    tables, device = filled(kernels=kernels)
    tables.clear([0])
    first = tables.commit()
    second = tables.commit()
    for wrong in (second, Delta(first.seq, first.spans, first.values, layout=1), b"bytes"):
        before = device.snapshot()
        with pytest.raises((DeltaError, ArgumentError)):
            device.apply(wrong)  # type: ignore[arg-type]
        assert device.snapshot() == before
    device.apply(first)
    with pytest.raises(DeltaError, match="already applied"):
        device.apply(first)
    device.apply(second)
    assert device.snapshot() == tables.snapshot()


def test_refuses_deltas_after_resize_until_made_anew() -> None:
    tables, device = filled()
    tables.clear([0, 2])
    device.apply(tables.commit())
    tables.resize([blocktable.plan(max_model_len=256, block_size=16)])
    with pytest.raises(DeltaError, match="another shape"):
        device.apply(tables.commit())
    anew = DeviceTables(tables, "cpu")
    tables.append([1], [0, 1], [8])
    anew.apply(tables.commit())
    assert anew.gather([1], 1).tables[0].shape == (1, 16)


@pytest.mark.parametrize(
    ("spans", "values", "law"),
    [
        ([[1, 0, 0, 1, 0, 1]], [5], "L2"),  # there is no group 1
        ([[0, 4, 0, 1, 0, 1]], [5], "L2"),  # no row 4
        ([[0, 1, 7, 2, 0, 8]], [5, 6], "L2"),  # past the width
        ([[0, 1, 0, 1, 0, 9]], [5], "L2"),
        ([[0, 1, 0, 3, 0, 3]], [5, 6], "L2"),  # past the values
        ([[0, 1, 0, 1, 0, 1]], [-5], "L3"),
        ([[0, 1, 0, 2, 0, 1]], [5, 6], "L4"),  # an id behind the live count
        ([[0, 0, 0, 0, -1, 1]], [], "L4"),  # the row shrinks, its old ids stay
        ([[0, 1, 1, 1, 0, 2]], [5], "L3"),  # the row grows over a column that nobody sent
        ([[0, 1, 0, 2, 0, 2]], [5, 0], "L3"),
        ([[0, 0, 0, 2, -1, 3]], [], "L3"),  # live entries nulled in a group that reads all
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_no_host_sends_changes_nothing(kernels: str, spans: list[list[int]], values: list[int], law: str) -> None:
    tables, device = filled(kernels=kernels)
    mirror, before = Replica.from_snapshot(tables.snapshot()), tables.snapshot()
    good = tables.commit()
    arrays = (np.array(spans, np.int32), np.array(values, np.int32))
    wrong = Delta(good.seq, *arrays, origin=good.origin, layout=good.layout)
    for one in (device, mirror):
        with pytest.raises(DeltaError) as caught:
            one.apply(wrong)
        assert (caught.value.law, bool(caught.value.remedy)) == (law, True)
        assert one.snapshot() == before
        one.apply(good)


# ---- results


@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_moves_and_nothing_is_allocated_per_step(kernels: str) -> None:
    tables, device = filled(kernels=kernels, rows=8)

    def addresses(padded: int, tokens: int) -> list[int]:
        batch = device.gather([0, 2], padded, [40, 20])
        slots = device.slot_mapping([0, 2], [0, 1, 2], [39, 19], tokens)
        parts = [batch.rows, batch.seq_lens, batch.tables[0], batch.num_blocks[0], batch.kv_indptr[0]]
        return [part.data_ptr() for part in (*parts, batch.kv_indices[0], batch.last_page_len[0], slots)]

    sizes = [(8, 64), (2, 2), (20, 300), (3, 10)]
    first = [addresses(*size) for size in sizes]
    for _ in range(3):
        tables.append([0], [0, 1], [11])
        device.apply(tables.commit())
        assert [addresses(*size) for size in sizes] == first
    assert device.gather([0], 5) is device.gather([2], 5)
    assert len(device._stores) == 2
    assert [buffer.shape[1] for buffer, _ in device._slot_buffers] == [64, 300]


def test_slots_are_padded_to_the_buffers_end() -> None:
    _, device = filled()
    assert device.slot_mapping([0], [0, 20], list(range(20)), 32).shape == (1, 32)
    again = device.slot_mapping([0], [0, 1], [17], 2)
    assert again.tolist() == [[7 * 16 + 1, *[-1] * 31]]
    mine = torch.full((1, 9), 5)
    assert device.slot_mapping([0], [0, 1], [17], 4, out=mine) is mine
    assert mine.tolist() == [[113, *[-1] * 8]]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", [list, np.int32, np.int64, torch.int32, torch.int64, np.uint16], ids=str)
def test_arguments_in_any_form(kernels: str, form: Any) -> None:
    _, device = filled(kernels=kernels)

    def made(values: list[int]) -> Any:
        if form is list:
            return values
        return torch.tensor(values, dtype=form) if isinstance(form, torch.dtype) else np.array(values, form)

    batch = device.gather(made([2, 0]), 3, made([17, 33]))
    assert batch.rows.tolist() == [2, 0, -1]
    assert batch.rows.dtype == batch.seq_lens.dtype == batch.tables[0].dtype == batch.kv_indptr[0].dtype == torch.int32
    assert batch.kv_indptr[0].tolist() == [0, 2, 5, 5]
    assert batch.last_page_len[0].tolist() == [1, 1, 1]
    slots = device.slot_mapping(made([2, 0]), made([0, 1, 2]), made([16, 32]), 2)
    assert (slots.dtype, slots.tolist()) == (torch.int64, [[80, 144]])


def test_without_lengths_there_is_no_flat_form() -> None:
    _, device = filled()
    batch = device.gather([0], 2)
    assert batch.seq_lens.tolist() == [0, 0]
    for name in ("kv_indptr", "kv_indices", "last_page_len"):
        with pytest.raises(ArgumentError, match="lengths"):
            getattr(batch, name)
    assert device.gather([0], 2, [1]).last_page_len[0].tolist() == [1, 1]


REFUSED = {
    "row": lambda d: d.gather([4], 1),
    "negative row": lambda d: d.gather([-2], 1),
    "padded": lambda d: d.gather([0, 1], 1),
    "padded float": lambda d: d.gather([0], 1.0),
    "length": lambda d: d.gather([0], 1, [49]),
    "negative length": lambda d: d.gather([0], 1, [-1]),
    "lengths short": lambda d: d.gather([0, 2], 2, [1]),
    "float rows": lambda d: d.gather(torch.tensor([0.0]), 1),
    "two dimensions": lambda d: d.gather(torch.zeros((1, 1), dtype=torch.int32), 1),
    "out": lambda d: d.gather([0], 1, out=d.tables[0]),
    "out too small": lambda d: d.gather([0, 1], 2, out=d.new_batch(1)),
    "slots row": lambda d: d.slot_mapping([9], [0, 1], [0], 1),
    "offsets": lambda d: d.slot_mapping([0], [0], [0], 1),
    "offsets start": lambda d: d.slot_mapping([0], [1, 1], [0], 1),
    "offsets fall": lambda d: d.slot_mapping([0, 2], [0, 2, 1], [0, 1], 2),
    "offsets past": lambda d: d.slot_mapping([0], [0, 2], [0], 2),
    "tokens": lambda d: d.slot_mapping([0], [0, 2], [0, 1], 1),
    "slots out": lambda d: d.slot_mapping([0], [0, 1], [0], 4, out=torch.zeros((1, 3), dtype=torch.int64)),
    "slots out dtype": lambda d: d.slot_mapping([0], [0, 1], [0], 1, out=torch.zeros((1, 3), dtype=torch.int32)),
    "no rows": lambda d: d.gather(None, 1),
    "no offsets": lambda d: d.slot_mapping([0], None, [0], 1),
    "no positions": lambda d: d.prepare([0], 1, None, [0, 1], None, 1),
    "prepare": lambda d: d.prepare([0], 1, [99], [0, 1], [0], 1),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("call", REFUSED.values(), ids=list(REFUSED))
def test_wrong_arguments_are_refused_and_write_nothing(kernels: str, call: Any) -> None:
    _, device = filled(kernels=kernels)
    batch = device.gather([0, 2], 4, [40, 20])
    slots = device.slot_mapping([0], [0, 1], [0], 4)
    before = [part.clone() for part in (batch.rows, batch.tables[0], batch.kv_indptr[0], slots)]
    with pytest.raises(ArgumentError) as caught:
        call(device)
    assert caught.value.remedy
    for part, kept in zip((batch.rows, batch.tables[0], batch.kv_indptr[0], slots), before, strict=True):
        assert torch.equal(part, kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: DeviceTables(t, "nowhere"),
        lambda _: DeviceTables([1], "cpu"),
        lambda t: DeviceTables(t, "cpu", cp_rank=1),
        lambda t: DeviceTables(t, "cpu", cp_rank=True),
        lambda t: DeviceTables(t, "cpu", kernels="fast"),
        lambda t: DeviceTables(t, "meta", kernels="compiled"),
    ],
)
def test_a_device_that_cannot_be_is_refused_with_a_way_out(make: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(pair()[0])
    assert caught.value.remedy


# ---- shapes for each consumer


def test_a_table_is_checked_against_the_contract_it_was_planned_for() -> None:
    tight = Contract(
        "TIGHT", width_rule=TokenMultiple(128), strides="compact", error_text="want tiles, got {block_num}"
    )
    good = blocktable.plan(max_model_len=9416, block_size=32, contracts=[tight])
    _, device = pair(good)
    assert device.gather([0], 3).dense().stride() == (296, 1)
    assert device.gather([0], 3, [0]).csr()[0].tolist() == [0, 0, 0, 0]
    with pytest.raises(ContractError, match="row stride"):  # a view would be read with the wrong stride
        device.gather([0], 3).narrowed(1000)
    narrow = blocktable.plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"], engine="vllm==0.19.1")
    _, unjudged = pair(narrow)
    with pytest.raises(ContractError, match="Expected block_num"):
        unjudged.gather([0], 2).dense()


@pytest.mark.parametrize("longest", [1, 32, 33, 128, 129, 1000, 9416])
def test_a_narrowed_view_is_the_narrowest_that_is_accepted(longest: int) -> None:
    contract = Contract("TILES", width_rule=TokenMultiple(128))
    geometry = blocktable.plan(max_model_len=9416, block_size=32, contracts=[contract])
    _, device = pair(geometry)
    view = device.gather([0, 1], 4).narrowed(longest)
    blocks = -(-longest // 32)
    wanted = min(w for w in range(blocks, 400) if w * 32 % 128 == 0)
    assert (tuple(view.shape), view.stride()) == ((4, wanted), (296, 1))
    assert view.data_ptr() == device.gather([0, 1], 4).tables[0].data_ptr()


def test_a_narrowed_view_meets_an_upper_bound_in_tokens() -> None:
    contract = Contract("SEES_LENGTH", width_rule=AtMost())
    geometry = blocktable.plan(max_model_len=1024, block_size=32, contracts=[contract])
    _, device = pair(geometry)
    assert device.gather([0], 1).narrowed(100).shape == (1, 4)
    for wrong in (0, 1025):
        with pytest.raises(ArgumentError):
            device.gather([0], 1).narrowed(wrong)


def test_pages_of_k_and_v_apart() -> None:
    contract = Contract("PAIRS", kernel_block_sizes=(16,), layout="split")
    geometry = blocktable.plan(max_model_len=64, block_size=32, contracts=[contract])
    tables, device = pair(geometry, num_blocks=500)
    tables.append([1], [0, 1], [499])
    device.apply(tables.commit())
    batch = device.gather([1, -1], 3)
    split = batch.split()
    assert tuple(split.shape) == (3, 2, geometry.kernel_width)
    assert split[0].tolist() == [[1996, 1998, 0, 0], [1997, 1999, 0, 0]]
    assert not split[1:].any()
    tables.clear([1])
    device.apply(tables.commit())
    again = device.gather([1], 3).split()
    assert again.data_ptr() == split.data_ptr()
    assert not again.any()
    plain = blocktable.plan(max_model_len=64, block_size=32, contracts=[Contract("PLAIN")])
    with pytest.raises(ContractError):
        pair(plain)[1].gather([0], 1).split()
    with pytest.raises(ArgumentError, match="int32"):
        pair(geometry, num_blocks=None)[1].gather([0], 1).split()


@pytest.mark.parametrize("page", [1, 16])
def test_csr_counts_pages_and_the_last_ones_tokens(page: int) -> None:
    geometry = blocktable.plan(max_model_len=64, block_size=16, contracts=[Contract("C", kernel_block_sizes=(page,))])
    tables, device = pair(geometry)
    tables.append([0, 1], [0, 4, 8], range(1, 9))
    device.apply(tables.commit())
    for length in (0, 1, 15, 16, 17, 32, 33, 64):
        indptr, indices, last = device.gather([0, -1, 1], 4, [length, 7, 64 - length]).csr()
        for i, tokens in ((0, length), (2, 64 - length)):
            pages = int(indptr[i + 1] - indptr[i])
            assert pages == -(-tokens // page)
            assert (pages - 1) * page + int(last[i]) == tokens or tokens == 0
            row = device.gather([0, -1, 1], 4, [length, 7, 64 - length]).tables[0][i]
            assert indices[int(indptr[i]) : int(indptr[i + 1])].tolist() == row[:pages].tolist()
        assert (indptr[1] == indptr[2], indptr[3] == indptr[4], last[1], last[3]) == (True, True, 1, 1)


def test_each_rank_maps_its_own_slots_and_their_union_is_every_position_once() -> None:
    shape = blocktable.plan(max_model_len=192, block_size=8, cp_size=3, cp_interleave=2)
    tables = BlockTables([shape], max_rows=2)
    tables.append([1], [0, 8], range(5, 13))
    tables.commit()
    length = 190
    ranks = [DeviceTables(tables, "cpu", cp_rank=rank) for rank in range(3)]
    slots = np.stack([one.slot_mapping([1], [0, length], np.arange(length), length)[0].numpy() for one in ranks])
    assert ((slots >= 0).sum(axis=0) == 1).all(), "each position has exactly one owner"
    local = [one.gather([1], 1, [length]) for one in ranks]
    held = [int((batch.kv_indptr[0][1] - 1) * 8 + batch.last_page_len[0][0]) for batch in local]
    assert held == (slots >= 0).sum(axis=1).tolist(), "the lengths of the ranks are what they own"
    for line in slots:
        mine = line[line >= 0]
        assert len(set(mine.tolist())) == len(mine)


# ---- what is sent


@pytest.mark.compiled
@pytest.mark.parametrize("kernels", KERNELS)
def test_bytes_are_in_proportion_to_the_change(kernels: str) -> None:
    groups = [blocktable.plan(max_model_len=8192 * 16, block_size=16) for _ in range(3)]
    tables, device = pair(*groups, rows=64, num_blocks=None, kernels=kernels)
    everything = [np.arange(65) * 4096] * 3, [np.arange(1, 64 * 4096 + 1)] * 3
    tables.assign(range(64), *everything, group=None)
    device.apply(tables.commit())
    one_each = ([np.arange(65)] * 3, [np.arange(64) + 7] * 3)
    patterns = [
        (lambda: tables.append(range(64), *one_each, group=None), 3 * 64, 3 * 64),  # one entry in every row
        (lambda: tables.append([5], [0, 4000], np.arange(4000) + 1, group=1), 4000, 1),  # many entries of one row
        (lambda: tables.clear([5]), 0, 3),  # nulls travel as lengths
        (lambda: None, 0, 0),
    ]
    for change, entries, runs in patterns:
        before = device.stats()
        change()
        device.apply(tables.commit())
        spent = {name: count - before[name] for name, count in device.stats().items()}
        assert spent["delta_bytes"] <= 4 * entries + 24 * runs + 4096
        assert spent["launches"] == (1 if runs else 0)
        assert device.snapshot() == tables.snapshot()


# ---- two steps in flight


class Event:
    """A device's event: the device gets there when the host waits for it."""

    def __init__(self, waits: list[int], buffer: int) -> None:
        self.waits, self.buffer = waits, buffer

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waits.append(self.buffer)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_host_that_is_ahead_waits_for_the_oldest_buffer_and_loses_nothing(depth: int) -> None:
    tables, device = pair(rows=12, kernels="fallback", depth=depth)
    waits: list[int] = []
    made = iter(range(depth))
    device._delta_staging._new_event = lambda: Event(waits, next(made))
    for step in range(12):
        tables.append([step], [0, 1], [step + 1])
        device.apply(tables.commit())
        assert device.snapshot() == tables.snapshot()
    assert waits == [step % depth for step in range(12 - depth)]


def test_a_call_that_finds_another_waiting_for_the_device_is_refused_and_changes_nothing() -> None:
    tables, device = filled(kernels="fallback", depth=1)
    tables.append([0], [0, 1], [11])
    first = tables.commit()
    inside: list[Any] = []

    class Busy(Event):
        def synchronize(self) -> None:  # another thread comes while this one waits
            with pytest.raises(ConcurrentUse) as caught:
                device.apply(first)
            inside.append(caught.value)

    device._delta_staging._read[0] = Busy([], 0)
    device.apply(first)
    assert inside
    assert inside[0].remedy
    assert device.snapshot() == tables.snapshot()


@pytest.mark.parametrize("depth", [0, -1, True, 1.5])
def test_a_depth_that_is_none_is_refused(depth: Any) -> None:
    with pytest.raises(ArgumentError, match="depth"):
        pair(depth=depth)


def test_staging_takes_turns_and_grows() -> None:
    staging = Staging(torch.device("cpu"), torch.int32, 2)
    first = staging.fill(3)
    first[:] = (1, 2, 3)
    sent = staging.send(3)
    second = staging.fill(10000)
    second[:] = 7
    large = staging.send(10000)
    assert (sent.tolist(), len(large), staging.bytes_sent) == ([1, 2, 3], 10000, 40012)
    third = staging.fill(3)
    assert third.ctypes.data == first.ctypes.data, "the third step has the first one's buffer again"


def test_two_batches_may_be_valid_at_once() -> None:
    tables, device = filled()
    mine = device.new_batch(2)
    assert isinstance(mine, Batch)
    mine.tables[0].fill_(-9)
    assert device.gather([0], 2, out=mine) is mine
    theirs = device.gather([2], 2)
    assert mine.tables[0].tolist() == [[3, 7, 9, 0, 0, 0, 0, 0], [0] * 8]
    assert theirs.tables[0].tolist() == [[4, 5, 0, 0, 0, 0, 0, 0], [0] * 8]
    del tables


def test_a_window_groups_released_blocks_are_null_on_the_device_in_the_same_step() -> None:
    group = Group(blocktable.plan(max_model_len=32, block_size=4), kind="window", window=8)
    tables, device = pair(group)
    tables.append([0], [0, 5], [5, 6, 7, 8, 9])
    tables.release([0], [3], 0)
    device.apply(tables.commit())
    assert device.gather([0], 1, [20]).kv_indices[0][:5].tolist() == [0, 0, 0, 8, 9]
    assert device.slot_mapping([0], [0, 2], [11, 12], 2).tolist() == [[-1, 32]]
