"""Host tables, deltas and replicas against the plain-Python model, in random sequences of calls, right and wrong ones."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import blocktable
from blocktable import ArgumentError, BlockTables, Contract, Delta, DeltaError, Group, Replica, TokenMultiple
from blocktable import _kernels as k
from blocktable.oracle import Refused, TablesModel

MAX_ROWS = 4
KINDS = ("full", "window", "chunked", "state", "ring")


@st.composite
def groups(draw: st.DrawFn, kinds: tuple[str, ...] | None = None) -> list[Group]:
    """One to three groups of any kinds, a few columns wide, split into kernel blocks, sharded over ranks."""
    wanted = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)) if kinds is None else list(kinds)
    found = []
    for kind in wanted:
        kernel, ratio = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        block = kernel * ratio
        ranks = draw(st.integers(1, 3)) if kind != "state" else 1
        rule = TokenMultiple(draw(st.integers(1, 5)) * kernel)  # pads rows, also to no whole number of manager blocks
        geometry = blocktable.plan(
            max_model_len=draw(st.integers(1, 6)) * block * ranks,
            block_size=block,
            contracts=[Contract("tiny", kernel_block_sizes=(kernel,), width_rule=rule)],
            cp_size=ranks,
            cp_interleave=draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
        )
        window = draw(st.integers(1, 9)) if kind in ("window", "chunked") else 0
        found.append(Group(geometry, kind=kind, window=window, state_blocks=1))
    return found


def sealed(values: list[int]) -> np.ndarray:
    array = np.array(values, np.int64)
    array.flags.writeable = False
    return array


def strided(values: list[int]) -> np.ndarray:
    return np.repeat(np.array(values, np.int32), 2)[::2]


FORMS: tuple[Callable[[list[int]], Any], ...] = (
    list,
    tuple,
    sealed,
    strided,
    lambda values: np.array(values, np.int32),
    lambda values: np.array(values, np.int64),
    lambda values: np.array(values, ">i8"),
    lambda values: np.array(values, np.uint64) if min(values, default=0) >= 0 else values,
    lambda values: np.array(values, np.int16) if max(map(abs, values), default=0) < 2**15 else values,
)


def digest(tables: BlockTables) -> str:
    """Everything a refused call must leave alone: entries, what was sent, each row's numbers, which rows are pending."""
    fields = tables._state.reshape(-1, k.STATE_FIELDS)[:, : k.SEEN]
    touched = tables._info[:-1, k.TOUCHED]
    pending = [tables._dirty[g, : int(touched[g])].tobytes() for g in range(touched.size)]
    parts = [tables._entries.tobytes(), tables._sent.tobytes(), fields.tobytes(), touched.tobytes(), *pending]
    return hashlib.sha256(b"|".join(parts)).hexdigest()


class Tables(RuleBasedStateMachine):
    """BlockTables and the model do the same, and replicas follow."""

    @initialize(groups=groups(), num_blocks=st.sampled_from([None, 2, 9]))
    def start(self, groups: list[Group], num_blocks: int | None) -> None:
        self.tables = BlockTables(groups, max_rows=MAX_ROWS, num_blocks=num_blocks)
        self.model = TablesModel(groups, max_rows=MAX_ROWS, num_blocks=num_blocks)
        self.replicas = [Replica(groups, max_rows=MAX_ROWS)]
        self.chained = TablesModel(groups, max_rows=MAX_ROWS)

    # ---- arguments, mostly right

    def rows(self, data: st.DataObject, *, wrong: bool = True) -> list[int]:
        rows = data.draw(st.lists(st.integers(0, MAX_ROWS - 1), max_size=MAX_ROWS, unique=True))
        return data.draw(st.lists(st.integers(-2, MAX_ROWS), max_size=4)) if wrong and self.rarely(data) else rows

    def rarely(self, data: st.DataObject) -> bool:
        return data.draw(st.integers(0, 9)) == 9

    def block(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 1, 4, 6, -1, 9, 2**29 - 1, 2**31 - 1]))

    def ragged(self, data: st.DataObject, group: int, rows: list[int], *, fresh: bool) -> tuple[list[int], list[int]]:
        """Ids for each row; within the width, except now and then."""
        indptr, ids = [0], []
        for row in rows:
            known = 0 <= row < MAX_ROWS
            width = self.model.groups[group].geometry.width
            room = width - (0 if fresh or not known else len(self.model.rows[group][row]))
            part = [self.block(data) for _ in range(data.draw(st.integers(0, room)))]
            if not self.rarely(data):  # make it lawful: ids in range, nulls where the kind has them
                part = [max(1, block % (self.model.num_blocks or 9)) if block else 0 for block in part]
                kind = self.model.groups[group].kind
                if kind in ("window", "chunked"):
                    part.sort(key=bool)
                    if known and not fresh and any(self.model.rows[group][row]):
                        part = [max(block, 1) for block in part]
                elif kind != "state":
                    part = [max(block, 1) for block in part]
            if self.rarely(data):
                part = [*part, *[1] * (room - len(part) + 1)]
            ids += part
            indptr.append(len(ids))
        if self.rarely(data):
            indptr = data.draw(st.lists(st.integers(-1, len(ids) + 1), max_size=len(rows) + 2))
        return indptr, ids

    def form(self, data: st.DataObject, values: Any) -> Any:
        """Hand a list over in one of the forms that callers use."""
        if isinstance(values, tuple):
            return tuple(self.form(data, part) for part in values)
        if not isinstance(values, list):
            return values
        return data.draw(st.sampled_from(FORMS))(values)

    def do(self, data: st.DataObject, verb: str, *arguments: Any) -> None:
        """Call both; they agree, or both refuse and nothing has changed."""
        note(f"{verb}{arguments}")
        before, pending = digest(self.tables), self.model.changes()
        given = [self.form(data, argument) for argument in arguments]
        try:
            getattr(self.model, verb)(*arguments)
        except Refused:
            with pytest.raises(ArgumentError) as caught:
                getattr(self.tables, verb)(*given)
            assert caught.value.remedy
            assert caught.value.values
            assert str(caught.value).startswith(verb)
            assert digest(self.tables) == before, "a refused call left a trace"
            assert self.model.changes() == pending
        else:
            assert getattr(self.tables, verb)(*given) is None

    # ---- verbs

    @rule(data=st.data(), verb=st.sampled_from(["append", "append", "append", "assign"]))
    def write_one_group(self, data: st.DataObject, verb: str) -> None:
        group = data.draw(st.integers(0, len(self.model.groups) - 1))
        rows = self.rows(data)
        self.do(data, verb, rows, *self.ragged(data, group, rows, fresh=verb == "assign"), group)

    @rule(data=st.data(), verb=st.sampled_from(["append", "assign"]))
    def write_all_groups(self, data: st.DataObject, verb: str) -> None:
        rows = self.rows(data)
        parts = [
            self.ragged(data, group, rows, fresh=verb == "assign")
            for group in range(len(self.model.groups) - self.rarely(data))
        ]
        self.do(data, verb, rows, tuple(part[0] for part in parts), tuple(part[1] for part in parts), None)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        rows = self.rows(data)
        group = data.draw(st.integers(0, len(self.model.groups) - 1))
        self.do(data, "truncate", rows, self.totals(data, group, rows), group)

    @rule(data=st.data())
    def truncate_all_groups(self, data: st.DataObject) -> None:
        rows = self.rows(data)
        counts = tuple(self.totals(data, group, rows) for group in range(len(self.model.groups)))
        self.do(data, "truncate", rows, counts, None)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rows = self.rows(data)
        group = data.draw(st.integers(0, len(self.model.groups) - 1))
        self.do(data, "release", rows, self.totals(data, group, rows), group)

    def totals(self, data: st.DataObject, group: int, rows: list[int]) -> list[int]:
        counts = []
        for row in rows:
            live = len(self.model.rows[group][row]) if 0 <= row < MAX_ROWS else 0
            counts.append(data.draw(st.integers(-1, live + 1) if self.rarely(data) else st.integers(0, live)))
        return counts[: len(counts) - self.rarely(data)]

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.do(data, "clear", self.rows(data))

    @rule(data=st.data(), verb=st.sampled_from(["move", "move", "copy"]))
    def move_or_copy(self, data: st.DataObject, verb: str) -> None:
        src, dst = self.rows(data), self.rows(data)
        if not self.rarely(data):
            size = min(len(src), len(dst))
            src, dst = src[:size], dst[:size]
        self.do(data, verb, src, dst)

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        rows = self.rows(data)
        self.do(data, "swap", rows[: len(rows) // 2], rows[len(rows) // 2 :][: (len(rows) + self.rarely(data)) // 2])

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        assume(data.draw(st.integers(0, 3)) == 0)
        if data.draw(st.booleans()):
            self.do(data, "clear", list(range(MAX_ROWS)))
        new = data.draw(groups(tuple(group.kind for group in self.model.groups)))
        live = any(row for table in self.model.rows for row in table)
        self.do(data, "resize", tuple(new))
        if live:
            return
        old, self.replicas = self.replicas, [Replica(new, max_rows=MAX_ROWS)]
        self.chained = TablesModel(new, max_rows=MAX_ROWS)
        delta = self.committed()
        for replica in old:
            before = replica.snapshot()
            with pytest.raises(DeltaError):
                replica.apply(delta)
            assert replica.snapshot() == before

    # ---- commits and replicas

    @rule()
    def commit(self) -> None:
        self.committed()

    def committed(self) -> Delta:
        delta, changes = self.tables.commit(), self.model.commit()
        assert delta.seq == self.model.seq
        assert (delta.spans.dtype, delta.values.dtype, delta.copies.dtype) == (np.int32,) * 3
        assert not any(array.flags.writeable for array in (delta.spans, delta.values, delta.copies))
        assert changes.differ_from(delta) == ""
        received = Delta.from_bytes(delta.to_bytes())
        assert received == delta
        for replica in self.replicas:
            replica.apply(received)
            replica.check()
        self.chained.apply(received)
        return delta

    @rule()
    def replica_from_snapshot(self) -> None:
        replica = Replica.from_snapshot(self.tables.snapshot())
        assert replica.seq == self.model.seq
        assert replica.snapshot() == self.tables.snapshot()
        self.replicas = [*self.replicas[-2:], replica]

    @rule(data=st.data())
    def replica_refuses_a_repeated_or_skipped_delta(self, data: st.DataObject) -> None:
        first = self.committed()
        replica = data.draw(st.sampled_from(self.replicas))
        before = replica.snapshot()
        skipped = Delta(first.seq + 2, first.spans, first.values, first.copies, first.origin, first.layout)
        for delta in (first, skipped):
            with pytest.raises(DeltaError):
                replica.apply(delta)
        assert replica.snapshot() == before

    # ---- reading

    @rule(data=st.data())
    def slot_mapping(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(-1, MAX_ROWS - 1 + self.rarely(data)), max_size=3))
        far = max(g.geometry.width * g.geometry.block_size * g.geometry.cp_size for g in self.model.groups)
        indptr, positions = [0], []
        for _ in rows:
            start, count = data.draw(st.integers(-2, far + 2)), data.draw(st.integers(0, 12))
            run = data.draw(st.sampled_from([1, 1, 1, 0, -1, 5, far]))
            positions += [start + run * t for t in range(count)]
            indptr.append(len(positions))
        padded = data.draw(st.none() | st.integers(max(0, len(positions) - self.rarely(data)), len(positions) + 4))
        rank = data.draw(st.integers(0, max(g.geometry.cp_size for g in self.model.groups) - 1 + self.rarely(data)))
        if self.rarely(data):
            indptr = data.draw(st.lists(st.integers(-1, len(positions) + 1), max_size=5))
        given = [self.form(data, argument) for argument in (rows, indptr, positions)]
        cut = indptr[-1] if indptr and 0 <= indptr[-1] <= len(positions) else len(positions)
        try:
            want = self.model.slot_mapping(rows, indptr, positions[:cut], padded=padded, cp_rank=rank)
        except Refused:
            with pytest.raises(ArgumentError):
                self.tables.slot_mapping(*given, padded=padded, cp_rank=rank)
            return
        found = self.tables.slot_mapping(*given, padded=padded, cp_rank=rank)
        assert found.dtype == np.int64
        assert found.tolist() == want
        out = np.full_like(found, 7)
        assert self.tables.slot_mapping(*given, padded=padded, cp_rank=rank, out=out) is out
        assert out.tolist() == want

    @rule(data=st.data())
    def kernel_array(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.model.groups) - 1))
        rows = data.draw(st.lists(st.integers(0, MAX_ROWS - 1), max_size=5))  # a batch may repeat a row
        found = self.tables.tables[group].kernel_array(self.form(data, rows))
        assert found.dtype == np.int32
        assert found.tolist() == [self.model.kernel_row(group, row) for row in rows]
        with pytest.raises(ArgumentError):
            self.tables.tables[group].kernel_array([*rows, data.draw(st.sampled_from([-1, MAX_ROWS]))])

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "tables"):
            return
        self.tables.check()
        for g, table in enumerate(self.tables.tables):
            width = self.model.groups[g].geometry.width
            assert table.array.shape == (MAX_ROWS, width)
            assert table.array.tolist() == [self.model.full_row(g, row) for row in range(MAX_ROWS)]
            assert table.num_blocks.tolist() == [len(row) for row in self.model.rows[g]]
            assert not table.array.flags.writeable
            sent = [row + [0] * (width - len(row)) for row in self.model.sent[g]]
            for replica in self.replicas:
                assert replica.tables[g].array.tolist() == sent
                assert replica.tables[g].num_blocks.tolist() == [len(row) for row in self.model.sent[g]]
        assert self.chained.rows == self.model.sent


TestTables = Tables.TestCase
