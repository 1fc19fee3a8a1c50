"""The plugin's tables beside vLLM's own classes, called as its runners call them; no engine."""

import random

import numpy as np
import pytest

from blocktable.errors import ArgumentError

pytestmark = pytest.mark.conformance

ROWS, TOKENS, BLOCKS = 8, 64, 97
MODELS = [([16], [9]), ([32, 16], [5, 11]), ([16, 8, 64], [8, 16, 3])]


@pytest.fixture
def torch(real):
    return real("torch")


class Kernel:
    """vLLM's slot kernel, as its CPU worker puts it in Triton's place."""

    def __init__(self, torch):
        self.run = torch.ops._C.compute_slot_mapping_kernel_impl

    def register_warmup(self, **_):
        pass

    def __call__(self, _reqs, _tokens, _most, starts, positions, table, _stride, slots, block, *_ranks):
        self.run(starts, positions, table, slots, block)


@pytest.fixture
def v1(real, torch, monkeypatch):
    """Return a function that makes vLLM's first tables and ours, of the same arguments."""
    real("vllm.platforms").current_platform.import_kernels()
    stock = real("vllm.v1.worker.block_table")
    monkeypatch.setattr(stock, "_COMPUTE_SLOT_MAPPING_KERNEL", Kernel(torch))
    ours = real("blocktable.integrations.vllm_tables_v1").TablesV1

    def make(sizes, widths, *, alias, state=()):
        modes = [
            stock.SlotMappingMode.NONE if g in state else stock.SlotMappingMode.TOKEN_TO_KV_SLOT
            for g in range(len(sizes))
        ]
        given = {
            "max_num_reqs": ROWS,
            "max_num_batched_tokens": TOKENS,
            "pin_memory": False,
            "device": torch.device("cpu"),
            "block_sizes": sizes,
            "max_num_blocks": widths,
            "slot_mapping_modes": modes,
        }
        theirs = stock.MultiGroupBlockTable(**given)
        kind = type("Tables", (ours,), {"alias": alias})
        return kind(**given), theirs

    return make


class Model:
    """Rows as lists, to draw lawful calls from."""

    def __init__(self, draw, sizes, widths):
        self.draw, self.sizes, self.widths = draw, sizes, widths
        self.rows = [[[] for _ in range(ROWS)] for _ in sizes]

    def ids(self, row, *, whole):
        made = []
        for g, width in enumerate(self.widths):
            room = width - (0 if whole else len(self.rows[g][row]))
            made.append([self.draw.randrange(1, BLOCKS) for _ in range(self.draw.randint(0, min(room, 4)))])
        return tuple(made)

    def call(self, *tables):
        verb = self.draw.choice(["append", "append", "append", "add", "add", "clear", "move", "swap"])
        row, other = self.draw.sample(range(ROWS), 2)
        if verb in ("append", "add"):
            ids = self.ids(row, whole=verb == "add")
            for one in tables:
                getattr(one, f"{verb}_row")(tuple(list(part) for part in ids), row)
            for g, part in enumerate(ids):
                self.rows[g][row] = (self.rows[g][row] if verb == "append" else []) + part
        elif verb == "clear":
            for one in tables:
                one.clear_row(row)
            for group in self.rows:
                group[row] = []
        else:
            for one in tables:
                getattr(one, f"{verb}_row")(row, other)
            for group in self.rows:
                group[row], group[other] = ([] if verb == "move" else group[other]), group[row]

    def step(self):
        """Return the positions of a step over all rows, and the running sum of their counts."""
        counts, positions = [], []
        for row in range(ROWS):
            held = min(len(group[row]) * size for group, size in zip(self.rows, self.sizes, strict=True))
            count = self.draw.randint(0, min(held, TOKENS // ROWS))
            start = self.draw.randint(0, held - count)
            positions += range(start, start + count)
            counts.append(count)
        return np.cumsum([0, *counts]), positions


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize(("sizes", "widths"), MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_leave_what_vllms_own_leave(v1, torch, sizes, widths, alias, seed):
    model = Model(random.Random(seed), sizes, widths)  # noqa: S311 - test data
    ours, theirs = v1(sizes, widths, alias=alias)
    for _ in range(60):
        for _ in range(model.draw.randint(0, 5)):
            model.call(ours, theirs)
        ours.commit_block_table(ROWS)
        theirs.commit_block_table(ROWS)
        starts, positions = model.step()
        step = torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
        ours.compute_slot_mapping(ROWS, *step)
        theirs.compute_slot_mapping(ROWS, *step)
        for g, rows in enumerate(model.rows):
            mine, stock = ours[g].get_device_tensor(ROWS), theirs[g].get_device_tensor(ROWS)
            assert mine.shape == stock.shape
            for row, ids in enumerate(rows):
                assert mine[row, : len(ids)].tolist() == ids == stock[row, : len(ids)].tolist()
                assert not mine[row, len(ids) :].any()  # L4, which stock tables do not keep
            assert ours[g].slot_mapping.gpu[: starts[-1]].tolist() == theirs[g].slot_mapping.gpu[: starts[-1]].tolist()
            assert (ours[g].slot_mapping.gpu[starts[-1] :] == -1).all()
    ours.host.check()


@pytest.mark.parametrize("alias", [True, False])
def test_addresses_stay_and_strides_are_the_width(v1, torch, alias):
    ours, theirs = v1([16, 32], [9, 5], alias=alias)
    before = [(one.get_device_tensor(ROWS).data_ptr(), one.slot_mapping.gpu.data_ptr()) for one in ours.block_tables]
    for row in range(ROWS):
        ours.add_row(([1, 2], [3]), row)
    ours.commit_block_table(ROWS)
    ours.compute_slot_mapping(1, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]))
    after = [(one.get_device_tensor(ROWS).data_ptr(), one.slot_mapping.gpu.data_ptr()) for one in ours.block_tables]
    assert before == after
    for mine, stock in zip(ours.block_tables, theirs.block_tables, strict=True):
        table = mine.get_device_tensor(3)
        assert table.dtype == torch.int32
        assert table.is_contiguous()
        assert table.stride(0) == mine.max_num_blocks_per_req == stock.max_num_blocks_per_req
        assert mine.slot_mapping.gpu.dtype == torch.int64


@pytest.mark.parametrize("alias", [True, False])
def test_the_runner_may_blank_padded_rows_and_slots(v1, alias):
    ours, _ = v1([16], [9], alias=alias)
    ours.add_row(([5, 6],), 0)
    ours.commit_block_table(1)
    ours[0].get_device_tensor(4)[1:4].fill_(0)
    ours[0].slot_mapping.gpu[:8].fill_(-1)
    ours.append_row(([7],), 0)
    ours.commit_block_table(1)
    assert ours[0].get_device_tensor(1)[0, :4].tolist() == [5, 6, 7, 0]


def test_rows_that_were_blanked_while_live_come_back_with_the_next_commit(v1):
    ours, _ = v1([16], [9], alias=False)
    for row in range(4):
        ours.add_row(([row + 1],), row)
    ours.commit_block_table(4)
    ours.commit_block_table(2)  # a dummy run of two requests, padded to four
    ours[0].get_device_tensor(4)[2:4].fill_(0)
    ours.commit_block_table(4)
    assert ours[0].get_device_tensor(4)[:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("alias", [True, False])
def test_what_a_warm_up_writes_by_hand_reaches_the_device_and_goes_again(v1, alias):
    ours, _ = v1([16], [9], alias=alias)
    saved = ours[0].block_table.np[:4, 0].copy()
    ours[0].block_table.np[:4, 0] = range(1, 5)
    ours.commit_block_table(4)
    assert ours[0].get_device_tensor(4)[:, 0].tolist() == [1, 2, 3, 4]
    ours[0].block_table.np[:4, 0] = saved
    ours.commit_block_table(4)
    assert not ours[0].get_device_tensor(4).any()
    ours.host.check()


WAITING = {
    "nothing": lambda _: None,
    "append": lambda one: one.append_row(([8],), 1),
    "clear": lambda one: one.clear_row(1),
    "move": lambda one: (one.clear_row(0), one.move_row(1, 0)),
    "swap": lambda one: one.swap_row(0, 1),
}


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("waiting", WAITING)
def test_serving_state_is_put_aside_and_back(v1, alias, waiting):
    """What GPUModelRunner.preserve_serving_state does around a warm-up of its own, whatever waits for the next commit."""
    ours, theirs = v1([16], [9], alias=alias)
    for one in (ours, theirs):
        one.add_row(([5, 6],), 0)
        one.add_row(([7],), 1)
        one.commit_block_table(2)
        WAITING[waiting](one)
        saved = [(part.block_table.gpu.clone(), part.block_table.cpu.clone()) for part in one.block_tables]
        one.clear()
        one.commit_block_table(4)
        assert not one[0].get_device_tensor(4).any()
        for part, (gpu, cpu) in zip(one.block_tables, saved, strict=True):
            part.block_table.gpu.copy_(gpu)
            part.block_table.cpu.copy_(cpu)
        one.append_row(([4],), 0)
        one.commit_block_table(2)
    assert ours[0].get_device_tensor(2).tolist() == theirs[0].get_device_tensor(2).tolist()
    assert ours[0].num_blocks_per_row.tolist() == theirs[0].num_blocks_per_row.tolist()
    ours.host.check()


def test_a_request_that_joins_a_padded_batch_sends_no_whole_rows(v1, torch, monkeypatch):
    ours, _ = v1([16], [9], alias=False)
    copied, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *a, **k: (copied.append(self.shape), copy(self, *a, **k))[1]
    )
    for row in range(5):
        ours.add_row(([row + 1],), row)
        ours.commit_block_table(row + 1)
        ours[0].get_device_tensor(8)[row + 1 :].fill_(0)
    assert ours[0].get_device_tensor(8)[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert copied == []


@pytest.mark.parametrize("alias", [True, False])
def test_state_groups_take_the_null_block_anywhere_and_have_no_slots(v1, torch, alias):
    ours, theirs = v1([16, 16], [8, 3], alias=alias, state={1})
    assert ours[1].max_num_blocks_per_req == theirs[1].max_num_blocks_per_req == 3  # not rounded
    ours.add_row(([1, 2], [0, 4, 0]), 0)
    ours.commit_block_table(1)
    ours.compute_slot_mapping(1, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 17]))
    assert ours[1].get_device_tensor(1)[0].tolist() == [0, 4, 0]
    assert ours[0].slot_mapping.gpu[:3].tolist() == [16, 33, -1]
    assert (ours[1].slot_mapping.gpu == -1).all()


def test_one_block_too_many_is_refused_and_nothing_changes(v1):
    ours, _ = v1([16], [8], alias=True)
    ours.add_row((list(range(1, 9)),), 0)
    ours.commit_block_table(1)
    ours.append_row(([9],), 0)
    with pytest.raises(ArgumentError, match=r"\[L2\]"):
        ours.commit_block_table(1)
    assert ours[0].num_blocks_per_row[0] == 8
    ours.host.check()


@pytest.mark.parametrize("ids", [[BLOCKS], [-1], [2**31]])
def test_ids_outside_the_pool_are_refused(v1, real, ids):
    groups = real("blocktable.integrations.vllm_groups")
    with groups.knowing(groups.Known((("full", 0),), BLOCKS)):
        ours, _ = v1([16], [8], alias=True)
    ours.add_row((ids,), 0)
    with pytest.raises(ArgumentError, match=r"\[L3\]"):
        ours.commit_block_table(1)


def test_a_request_may_lengthen_its_own_list_after_it_was_handed_over(v1):
    ours, _ = v1([16], [8], alias=True)
    ids = [1, 2]
    ours.add_row((ids,), 0)
    ids.append(3)
    ours.append_row(([3],), 0)
    ours.commit_block_table(1)
    assert ours[0].get_device_tensor(1)[0, :4].tolist() == [1, 2, 3, 0]


# ---- the second runner's


@pytest.fixture
def v2(real, torch):
    ours = real("blocktable.integrations.vllm_tables_v2").TablesV2

    def make(sizes=(16,), widths=(8,), **named):
        return ours(
            block_sizes=list(sizes),
            max_num_reqs=ROWS,
            max_num_batched_tokens=TOKENS,
            max_num_blocks_per_group=list(widths),
            device=torch.device("cpu"),
            **named,
        )

    return make


def rows_of(torch, *rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_requests_are_gathered_in_batch_order_with_null_padding(v2, torch):
    ours = v2([16, 32], [8, 4])
    ours.append_block_ids(5, ([1, 2], [3]), overwrite=True)
    ours.append_block_ids(2, ([4], [5, 6]), overwrite=True)
    ours.append_block_ids(5, ([7], []), overwrite=False)
    ours.apply_staged_writes()
    first, second = ours.gather_block_tables(rows_of(torch, 2, 5), 4)
    assert first.tolist() == [[4] + [0] * 7, [1, 2, 7] + [0] * 5, [0] * 8, [0] * 8]
    assert second.tolist() == [[5, 6, 0, 0], [3, 0, 0, 0], [0] * 4, [0] * 4]
    assert first.data_ptr() == ours.input_block_tables[0].data_ptr()


def test_a_request_number_that_is_used_again_shows_nothing_of_the_one_before(v2, torch):
    ours = v2()
    ours.append_block_ids(0, ([1, 2, 3, 4],), overwrite=True)
    ours.apply_staged_writes()
    ours.gather_block_tables(rows_of(torch, 0), 1)
    ours.append_block_ids(0, ([9],), overwrite=True)
    ours.apply_staged_writes()
    assert ours.gather_block_tables(rows_of(torch, 0), 1)[0][0].tolist() == [9] + [0] * 7


def test_slots_of_padding_requests_and_padding_tokens_are_minus_one(v2, torch):
    ours = v2([16, 16], [8, 8], slot_mapping_enabled=[True, False])
    ours.append_block_ids(3, ([2, 6], [1]), overwrite=True)
    ours.apply_staged_writes()
    starts = torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32)
    positions = torch.tensor([0, 15, 16, 5, 7, 7, 7, 7])
    slots = ours.compute_slot_mappings(rows_of(torch, 3, -1), starts, positions, 8)
    assert slots.tolist() == [[32, 47, 96, -1, -1, -1, -1, -1], [-1] * 8]
    assert slots.data_ptr() == ours.slot_mappings.data_ptr()
    assert (ours.slot_mappings == -1).sum() == 2 * TOKENS - 3


def test_what_a_dummy_run_writes_is_gone_with_the_next_step(v2, torch):
    ours = v2()
    (table,) = ours.get_dummy_block_tables(4)
    table[:, 0].copy_(torch.arange(1, 5))
    assert (ours.get_dummy_slot_mappings(5) == -1).all()
    ours.append_block_ids(0, ([9],), overwrite=True)
    ours.apply_staged_writes()
    assert ours.gather_block_tables(rows_of(torch, 0), 4)[0].tolist() == [[9] + [0] * 7, [0] * 8, [0] * 8, [0] * 8]


def test_foreign_memory_is_filled_likewise(v2, torch):
    ours = v2()
    ours.append_block_ids(1, ([3, 4],), overwrite=True)
    ours.apply_staged_writes()
    mine = torch.full((ROWS, 8), 77, dtype=torch.int32)
    found = ours.gather_block_tables(rows_of(torch, 1, -1), 3, out=(mine,), out_ptrs=None)
    assert found[0].tolist() == [[3, 4] + [0] * 6, [0] * 8, [0] * 8]
    assert (mine[3:] == 77).all()
    assert not ours.input_block_tables[0].any()
    slots = torch.empty((1, TOKENS), dtype=torch.int64)
    ours.compute_slot_mappings(
        rows_of(torch, 1), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([17]), 4, out=slots
    )
    assert slots[0, :3].tolist() == [65, -1, -1]


def test_a_row_past_its_width_is_refused_in_all_groups(v2):
    ours = v2([16, 16], [8, 2])
    ours.append_block_ids(0, ([1, 2], [3, 4]), overwrite=True)
    ours.apply_staged_writes()
    ours.append_block_ids(0, ([5], [6]), overwrite=False)
    with pytest.raises(ArgumentError, match=r"\[L2\]"):
        ours.apply_staged_writes()
    assert [int(counts[0]) for counts in ours.num_blocks.np] == [2, 2]
    ours.host.check()


def test_while_writes_are_redirected_rows_read_and_write_nothing(v2, torch):
    ours = v2()
    ours.redirect_writes_to_null_block = True
    ours.append_block_ids(0, ([1, 2],), overwrite=True)
    ours.append_block_ids(0, ([3],), overwrite=False)
    ours.apply_staged_writes()
    assert not ours.gather_block_tables(rows_of(torch, 0), 1)[0].any()
    slots = ours.compute_slot_mappings(
        rows_of(torch, 0), torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1]), 2
    )
    assert (slots == -1).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_ranks_share_the_positions_of_sharded_groups(v2, torch, rank):
    ours = v2([4, 4], [8, 8], cp_size=2, cp_rank=rank, cp_interleave=1, dcp_sharded=[True, False])
    ours.append_block_ids(0, ([5, 8], [1, 2, 3, 4]), overwrite=True)
    ours.apply_staged_writes()
    positions = torch.arange(16)
    slots = ours.compute_slot_mappings(rows_of(torch, 0), torch.tensor([0, 16], dtype=torch.int32), positions, 16)
    mine = [20, 21, 22, 23, 32, 33, 34, 35]
    assert slots[0].tolist()[rank::2] == mine
    assert slots[0].tolist()[1 - rank :: 2] == [-1] * 8
    assert slots[1].tolist() == list(range(4, 20))
