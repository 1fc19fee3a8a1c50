"""The same random operations through vLLM's real V1 tables, through `BlockTables`, and through plain lists.

All three must hold the same live entries and give the same slots. vLLM's slot kernel for CPUs knows no context
parallelism, so under it the source of its GPU kernel runs on NumPy instead.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from blocktable import BlockTables, plan

pytestmark = pytest.mark.conformance

ROWS = 6
NUM_BLOCKS = 4096
# Block sizes of the groups, context-parallel size, interleave.
MODELS = [
    ((16,), 1, 1),
    ((16, 48), 1, 1),
    ((1, 544), 1, 1),
    ((16,), 2, 1),
    ((16, 32), 2, 16),
    ((8,), 4, 2),
]


class Value(np.ndarray):
    """What a kernel computes with: an array that can be cast as Triton's can."""

    def to(self, dtype):
        return self.astype(dtype).view(Value)


def value(array):
    return np.asarray(array).view(Value)


class Pointer:
    """The start of a flat array plus offsets."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset

    def __add__(self, offset):
        return Pointer(self.array, self.offset + offset)


def masked(pointer, mask):
    return np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(True if mask is None else mask))


def load(pointer, mask=None, other=0):
    at, live = masked(pointer, mask)
    return value(np.where(live, pointer.array[np.where(live, at, 0)], other))


def store(pointer, values, mask=None):
    at, live = masked(pointer, mask)
    pointer.array[at[live]] = np.broadcast_to(values, at.shape)[live]


class Launcher:
    """What stands between the tables and their slot mapping kernel: launch it for a CPU, in one of two ways."""

    def __init__(self, real):
        self.tables, self.cpu = real("vllm.v1.worker.block_table"), real("vllm.utils.cpu_triton_utils")
        kernel = self.tables.ComputeSlotMappingKernel.kernel
        self.source = getattr(kernel, "fn", kernel)

    def register_warmup(self, **_sizes):
        """Compile nothing."""

    def compiled(self, *arguments):
        """Call what vLLM's CPU workers put in the kernel's place."""
        self.cpu._compute_slot_mapping_kernel_impl(*arguments)

    def interpreted(self, starts, positions, table, out, *, requests, stride, sizes, constants):
        """Run the kernel's source on NumPy arrays, one program after the other."""
        language = self.tables.tl = SimpleNamespace(
            load=load, store=store, num_programs=lambda _axis: requests + 1, int64=np.int64,
            arange=lambda a, b: value(np.arange(a, b)), where=lambda c, a, b: value(np.where(c, a, b)),
        )  # fmt: skip
        starts, positions, table, out = (Pointer(one.numpy().reshape(-1)) for one in (starts, positions, table, out))
        for program in range(requests + 1):
            language.program_id = lambda _axis, program=program: program
            self.source(*sizes, starts, positions, table, stride, out, *constants, 16)

    def __call__(self, requests, tokens, room, starts, positions, table, stride, out, *sharding):
        constants = (*sharding, self.tables.PAD_SLOT_ID)
        if sharding[1] == 1:
            self.compiled(tokens, room, starts, positions, table, stride, out, *constants)
        else:
            self.interpreted(
                starts,
                positions,
                table,
                out,
                requests=requests,
                stride=stride,
                sizes=(tokens, room),
                constants=constants,
            )


class Lists:
    """The oracle: a list of ids per group and row, and the slot of a position straight from the definition."""

    def __init__(self, block_sizes, cp_size, interleave):
        self.block_sizes, self.cp_size, self.interleave = block_sizes, cp_size, interleave
        self.rows = [[[] for _ in range(ROWS)] for _ in block_sizes]

    def tokens(self, row):
        """Return how many tokens every group of a row has blocks for."""
        pairs = zip(self.rows, self.block_sizes, strict=True)
        return min(len(group[row]) * size * self.cp_size for group, size in pairs)

    def slot(self, group, row, position, rank):
        """Deal the tokens of a block out to the ranks by interleaves, and count this rank's."""
        size = self.block_sizes[group]
        column, offset = divmod(position, size * self.cp_size)
        owned = [o for o in range(size * self.cp_size) if o // self.interleave % self.cp_size == rank]
        return self.rows[group][row][column] * size + owned.index(offset) if offset in owned else -1


@pytest.fixture
def stock(real, monkeypatch):
    """Return a maker of vLLM's V1 tables, launching their kernel on this CPU."""
    torch, module = real("torch"), real("vllm.v1.worker.block_table")
    real("vllm.platforms").current_platform.import_kernels()
    monkeypatch.setattr(module, "tl", module.tl)
    monkeypatch.setattr(module, "_COMPUTE_SLOT_MAPPING_KERNEL", Launcher(real))

    def make(block_sizes, widths, cp_size, interleave, tokens):
        tables = module.MultiGroupBlockTable(
            max_num_reqs=ROWS,
            max_num_batched_tokens=tokens,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=list(block_sizes),
            max_num_blocks=widths,
            cp_kv_cache_interleave_size=interleave,
        )
        for group in tables.block_tables:
            group.dcp_world_size = cp_size
        return tables

    return make


def operate(draw, ours, theirs, lists, widths):
    """Do one random operation in all three; a row never passes its width, which stock tables do not check."""
    groups = range(len(widths))
    row, other = draw.sample(range(ROWS), 2)
    verb = draw.choice(("append", "append", "append", "assign", "clear", "move", "swap"))
    if verb in ("append", "assign"):
        held = [0 if verb == "assign" else len(lists.rows[g][row]) for g in groups]
        new = [
            [draw.randrange(1, NUM_BLOCKS) for _ in range(draw.randint(0, min(3, widths[g] - held[g])))] for g in groups
        ]
        indptr = tuple([0, len(ids)] for ids in new)
        getattr(ours, verb)([row], indptr, tuple(np.array(ids, np.int32) for ids in new), group=None)
        getattr(theirs, "add_row" if verb == "assign" else "append_row")(tuple(new), row)
        for g in groups:
            lists.rows[g][row] = (lists.rows[g][row] if verb == "append" else []) + new[g]
    elif verb == "clear":
        ours.clear([row])
        theirs.clear_row(row)
        for g in groups:
            lists.rows[g][row] = []
    elif verb == "move":
        ours.move([row], [other])
        theirs.move_row(row, other)
        for g in groups:
            lists.rows[g][other], lists.rows[g][row] = lists.rows[g][row], []
    else:
        ours.swap([row], [other])
        theirs.swap_row(row, other)
        for g in groups:
            lists.rows[g][other], lists.rows[g][row] = lists.rows[g][row], lists.rows[g][other]


def same_entries(ours, theirs, lists):
    theirs.commit_block_table(ROWS)
    for g, rows in enumerate(lists.rows):
        for row, ids in enumerate(rows):
            assert ours.tables[g].array[row, : len(ids)].tolist() == ids
            assert ours.tables[g].num_blocks[row] == len(ids)
            assert not ours.tables[g].array[row, len(ids) :].any()
            assert theirs[g].get_device_tensor(ROWS)[row, : len(ids)].tolist() == ids


def same_slots(draw, torch, ours, theirs, lists, tokens):
    counts, positions = [], []
    for row in range(ROWS):  # stock tables number a step's requests by table row
        room = min(lists.tokens(row), tokens // ROWS)
        start = draw.randint(0, max(lists.tokens(row) - room, 0))
        counts.append(draw.randint(0, room))
        positions += range(start, start + counts[-1])
    starts = np.concatenate([[0], np.cumsum(counts)])
    step = torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
    row_of = np.repeat(np.arange(ROWS), counts)
    for rank in range(lists.cp_size):
        for group in theirs.block_tables:
            group.dcp_rank = rank
        theirs.compute_slot_mapping(ROWS, *step)
        mine = ours.slot_mapping(np.arange(ROWS), starts, np.array(positions, np.int64), padded=tokens, cp_rank=rank)
        for g in range(len(lists.rows)):
            expected = [lists.slot(g, row, position, rank) for row, position in zip(row_of, positions, strict=True)]
            assert mine[g].tolist() == expected + [-1] * (tokens - len(expected))
            assert theirs[g].slot_mapping.gpu[: len(expected)].tolist() == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("block_sizes", "cp_size", "interleave"), MODELS)
def test_random_operations(stock, real, block_sizes, cp_size, interleave, seed):
    torch, draw, tokens = real("torch"), random.Random(seed), 96  # noqa: S311 - test data
    widths = [9, 8][: len(block_sizes)]
    geometries = [
        plan(max_model_len=w * size * cp_size, block_size=size, cp_size=cp_size, cp_interleave=interleave)
        for w, size in zip(widths, block_sizes, strict=True)
    ]
    ours = BlockTables(geometries, max_rows=ROWS, num_blocks=NUM_BLOCKS)
    theirs = stock(block_sizes, widths, cp_size, interleave, tokens)
    lists = Lists(block_sizes, cp_size, interleave)
    for step in range(120):
        operate(draw, ours, theirs, lists, widths)
        if step % 6 == 5:
            same_entries(ours, theirs, lists)
            same_slots(draw, torch, ours, theirs, lists, tokens)
    ours.check()
