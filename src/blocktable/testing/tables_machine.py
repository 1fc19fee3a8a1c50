"""The state machine of host tables: random calls, right and wrong ones, on tables and on the plain-Python model.

    class Machine(TablesMachine):
        make = staticmethod(MyTables)           # called as MyTables(groups, max_rows=..., num_blocks=...)

    TestMyTables = Machine.TestCase             # pytest and unittest run it

``MyTables`` has the verbs of ``BlockTables``: each call must do what the model does, or refuse what the model refuses and
change nothing; every delta must say what changed and nothing else, and replicas that follow the deltas must be equal.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blocktable.contracts import Contract, TokenMultiple
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, DeltaError
from blocktable.geometry import plan
from blocktable.groups import Group
from blocktable.oracle import Refused, TablesModel
from blocktable.replica import Replica
from blocktable.tables import BlockTables

MAX_ROWS = 4
KINDS = ("full", "window", "chunked", "state", "ring")


Rng = random.Random


class refused:  # noqa: N801 - read as what it says: with refused(ArgumentError) as caught
    """A call in this block must raise ``kind``; what it raised is ``error``."""

    error: Any = None

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        assert error is not None, f"accepted, {self._kind.__name__} was due"
        self.error = error
        return isinstance(error, self._kind)


# One number per call stands for all its arguments: drawing each of them from Hypothesis costs a hundred times the call.
seeds = st.integers(0, 2**32 - 1).map(Rng)


def groups(rng: Rng, kinds: list[Any]) -> list[Group]:
    """Groups a few columns wide, split into kernel blocks, sharded over ranks."""
    found = []
    for kind in kinds:
        kernel, ratio = rng.randint(1, 4), rng.randint(1, 4)
        block = kernel * ratio
        ranks = rng.randint(1, 3) if kind != "state" else 1
        rule = TokenMultiple(rng.randint(1, 5) * kernel)  # pads rows, also to no whole number of manager blocks
        geometry = plan(
            max_model_len=rng.randint(1, 6) * block * ranks,
            block_size=block,
            contracts=[Contract("tiny", kernel_block_sizes=(kernel,), width_rule=rule)],
            cp_size=ranks,
            cp_interleave=rng.choice([n for n in range(1, block + 1) if block % n == 0]),
        )
        window = rng.randint(1, 9) if kind in ("window", "chunked") else 0
        found.append(Group(geometry, kind=kind, window=window))
    return found


def sealed(values: list[int]) -> np.ndarray:
    array = np.array(values, np.int64)
    array.flags.writeable = False
    return array


FORMS: tuple[Callable[[list[int]], Any], ...] = (
    list,
    tuple,
    sealed,
    lambda values: np.repeat(np.array(values, np.int64), 2)[::2],  # not contiguous
    lambda values: np.array(values, ">i8"),  # not of this machine's byte order
    *(
        lambda values, dtype=dtype: np.array(values, np.int64).astype(dtype)
        for dtype in (np.int16, np.int32, np.int64, np.uint32, np.uint64)
    ),
)


def in_some_form(rng: Rng, values: Any) -> Any:
    """Hand lists over in one of the forms that callers use, if they fit it."""
    if isinstance(values, tuple):
        return tuple(in_some_form(rng, part) for part in values)
    if not isinstance(values, list):
        return values
    given = rng.choice(FORMS)(values)
    return given if list(given) == values else values


def digest(tables: Any) -> str:
    """Everything that can be seen of tables, which a refused call must leave alone."""
    parts = [part.tobytes() for table in tables.tables for part in (table.array, table.num_blocks)]
    return hashlib.sha256(b"|".join([*parts, tables.snapshot()])).hexdigest()


class TablesMachine(RuleBasedStateMachine):
    """Tables and the model do the same, and replicas follow."""

    make: ClassVar[Callable[..., Any]] = staticmethod(BlockTables)

    @initialize(rng=seeds, kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    def start(self, rng: Rng, kinds: list[str]) -> None:
        found, num_blocks = groups(rng, kinds), rng.choice([None, 2, 9])
        self.tables = type(self).make(found, max_rows=MAX_ROWS, num_blocks=num_blocks)
        self.model = TablesModel(found, max_rows=MAX_ROWS, num_blocks=num_blocks)
        self.replicas = [Replica(found, max_rows=MAX_ROWS)]
        self.chained = TablesModel(found, max_rows=MAX_ROWS)

    # ---- arguments, mostly right

    def rarely(self, rng: Rng) -> bool:
        return rng.random() < 0.08

    def rows(self, rng: Rng) -> list[int]:
        if self.rarely(rng):
            return [rng.randint(-2, MAX_ROWS) for _ in range(rng.randint(0, 4))]
        rows = rng.sample(range(MAX_ROWS), rng.randint(0, MAX_ROWS))
        if len(rows) > 1 and self.rarely(rng):
            rows[-1] = rows[0]
        return rows

    def some_group(self, rng: Rng) -> int:
        return rng.randrange(len(self.model.groups))

    def live(self, group: int, row: int) -> list[int]:
        return self.model.rows[group][row] if 0 <= row < MAX_ROWS else []

    def part(self, rng: Rng, group: int, old: list[int]) -> list[int]:
        """Ids to put behind ``old``, as lawful as the kind of group asks, except now and then."""
        kind, largest = self.model.groups[group].kind, (self.model.num_blocks or 9) - 1
        room = self.model.groups[group].geometry.width - len(old) + self.rarely(rng)
        ids = [rng.randint(1, largest) for _ in range(rng.randint(0, max(room, 0)))]
        if kind == "state" and rng.random() < 0.5:
            ids = [rng.choice([0, block]) for block in ids]
        elif kind in ("window", "chunked") and not any(old) and rng.random() < 0.5:
            lead = rng.choice([rng.randint(0, len(ids)), len(ids)])
            ids = [0] * lead + ids[lead:]
        if ids and self.rarely(rng):
            ids[rng.randrange(len(ids))] = rng.choice([0, 0, 0, -1, largest + 1, 2**31 - 1])
        return ids

    def ragged(self, rng: Rng, group: int, rows: list[int], *, fresh: bool) -> tuple[list[int], list[int]]:
        indptr, ids = [0], []
        for row in rows:
            ids += self.part(rng, group, [] if fresh else self.live(group, row))
            indptr.append(len(ids))
        if self.rarely(rng):
            indptr = [rng.randint(-1, len(ids) + 1) for _ in range(rng.randint(0, len(rows) + 2))]
        return indptr, ids

    def totals(self, rng: Rng, group: int, rows: list[int]) -> list[int]:
        counts = [rng.randint(0, len(self.live(group, row))) for row in rows]
        if counts and self.rarely(rng):
            counts[rng.randrange(len(counts))] = rng.choice([-1, 7, 2**31])
        return counts[: len(counts) - self.rarely(rng)]

    def do(self, rng: Rng, verb: str, *arguments: Any) -> bool:
        """Call both; they agree, or both refuse and nothing has changed. Return whether they did it."""
        note(f"{verb}{arguments}")
        before, pending = digest(self.tables), self.model.changes()
        given = [in_some_form(rng, argument) for argument in arguments]
        try:
            getattr(self.model, verb)(*arguments)
        except Refused:
            with refused(ArgumentError) as caught:
                getattr(self.tables, verb)(*given)
            assert caught.error.remedy
            assert caught.error.values
            assert str(caught.error).startswith(verb)
            assert digest(self.tables) == before, "a refused call left a trace"
            assert self.model.changes() == pending
            return False
        assert getattr(self.tables, verb)(*given) is None
        return True

    # ---- verbs

    def write_one_group(self, rng: Rng) -> None:
        verb, group, rows = rng.choice(["append", "assign"]), self.some_group(rng), self.rows(rng)
        self.do(rng, verb, rows, *self.ragged(rng, group, rows, fresh=verb == "assign"), group)

    def write_all_groups(self, rng: Rng) -> None:
        verb, rows, count = rng.choice(["append", "assign"]), self.rows(rng), len(self.model.groups) - self.rarely(rng)
        parts = [self.ragged(rng, group, rows, fresh=verb == "assign") for group in range(count)]
        self.do(rng, verb, rows, tuple(part[0] for part in parts), tuple(part[1] for part in parts), None)

    def truncate(self, rng: Rng) -> None:
        group, rows = self.some_group(rng), self.rows(rng)
        if rng.random() < 0.5:
            self.do(rng, "truncate", rows, self.totals(rng, group, rows), group)
        else:
            counts = tuple(self.totals(rng, group, rows) for group in range(len(self.model.groups)))
            self.do(rng, "truncate", rows, counts, None)

    def release(self, rng: Rng) -> None:
        windowed = [g for g, group in enumerate(self.model.groups) if group.kind in ("window", "chunked", "state")]
        group = rng.choice(windowed) if windowed and not self.rarely(rng) else self.some_group(rng)
        rows = self.rows(rng)
        self.do(rng, "release", rows, self.totals(rng, group, rows), group)

    def clear(self, rng: Rng) -> None:
        self.do(rng, "clear", self.rows(rng)[:2])

    def move_or_copy(self, rng: Rng) -> None:
        src, dst = self.rows(rng), self.rows(rng)
        size = min(len(src), len(dst)) if not self.rarely(rng) else MAX_ROWS
        self.do(rng, rng.choice(["move", "move", "copy"]), src[:size], dst[:size])

    def swap(self, rng: Rng) -> None:
        rows = self.rows(rng)
        half = len(rows) // 2
        self.do(rng, "swap", rows[:half], rows[half : 2 * half + self.rarely(rng)])

    def resize(self, rng: Rng) -> None:
        if rng.random() < 0.2:
            self.do(rng, "clear", list(range(MAX_ROWS)))
        new = groups(rng, [group.kind for group in self.model.groups])
        if not self.do(rng, "resize", tuple(new)):
            return
        old, self.replicas = self.replicas, [Replica(new, max_rows=MAX_ROWS)]
        self.chained = TablesModel(new, max_rows=MAX_ROWS)
        delta = self.committed()
        for replica in old:
            before = replica.snapshot()
            with refused(DeltaError):
                replica.apply(delta)
            assert replica.snapshot() == before

    # ---- commits and replicas

    def committed(self, _: Rng | None = None) -> Delta:
        delta: Delta = self.tables.commit()
        changes = self.model.commit()
        assert delta.seq == self.model.seq
        assert {part.dtype for part in (delta.spans, delta.values, delta.copies)} == {np.dtype(np.int32)}
        assert not any(array.flags.writeable for array in (delta.spans, delta.values, delta.copies))
        assert changes.differ_from(delta) == ""
        received = Delta.from_bytes(delta.to_bytes())
        assert received == delta
        for replica in self.replicas:
            replica.apply(received)
            replica.check()
        self.chained.apply(received)
        return delta

    def replica_from_snapshot(self, _: Rng) -> None:
        replica = Replica.from_snapshot(self.tables.snapshot())
        assert replica.seq == self.model.seq
        assert replica.snapshot() == self.tables.snapshot()
        self.replicas = [*self.replicas[-2:], replica]

    def replica_refuses_a_repeated_or_skipped_delta(self, rng: Rng) -> None:
        first = self.committed()
        replica = rng.choice(self.replicas)
        before = replica.snapshot()
        skipped = Delta(first.seq + 2, first.spans, first.values, first.copies, first.origin, first.layout)
        for delta in (first, skipped):
            with refused(DeltaError):
                replica.apply(delta)
        assert replica.snapshot() == before

    # ---- reading

    def slot_mapping(self, rng: Rng) -> None:
        rows = [rng.randint(-1, MAX_ROWS - 1 + self.rarely(rng)) for _ in range(rng.randint(0, 3))]
        geometries = [group.geometry for group in self.model.groups]
        far = max(g.width * g.block_size * g.cp_size for g in geometries)
        indptr, positions = [0], []
        for _ in rows:
            start, run = rng.randint(-2, far + 2), rng.choice([1, 1, 1, 0, -1, 5, far])
            positions += [start + run * t for t in range(rng.randint(0, 12))]
            indptr.append(len(positions))
        padded = rng.choice([None, max(0, len(positions) - self.rarely(rng)), len(positions) + rng.randint(0, 4)])
        rank = rng.randrange(max(g.cp_size for g in geometries) + self.rarely(rng))
        if self.rarely(rng):
            indptr = [rng.randint(-1, len(positions) + 1) for _ in range(rng.randint(0, 5))]
        given = [in_some_form(rng, argument) for argument in (rows, indptr, positions)]
        cut = indptr[-1] if indptr and 0 <= indptr[-1] <= len(positions) else len(positions)
        try:
            want = self.model.slot_mapping(rows, indptr, positions[:cut], padded=padded, cp_rank=rank)
        except Refused:
            with refused(ArgumentError):
                self.tables.slot_mapping(*given, padded=padded, cp_rank=rank)
            return
        found = self.tables.slot_mapping(*given, padded=padded, cp_rank=rank)
        assert found.dtype == np.int64
        assert found.tolist() == want
        out = np.full_like(found, 7)
        assert self.tables.slot_mapping(*given, padded=padded, cp_rank=rank, out=out) is out
        assert out.tolist() == want

    def kernel_array(self, rng: Rng) -> None:
        group = self.some_group(rng)
        rows = [rng.randrange(MAX_ROWS) for _ in range(rng.randint(0, 5))]  # a batch may repeat a row
        found = self.tables.tables[group].kernel_array(in_some_form(rng, rows))
        assert found.dtype == np.int32
        assert found.tolist() == [self.model.kernel_row(group, row) for row in rows]
        with refused(ArgumentError):
            self.tables.tables[group].kernel_array([*rows, rng.choice([-1, MAX_ROWS])])

    WEIGHTS: ClassVar[dict[Any, float]] = {
        write_one_group: 4,
        write_all_groups: 6,
        truncate: 2,
        release: 4,
        clear: 1,
        move_or_copy: 4,
        swap: 2,
        resize: 1,
        committed: 4,
        replica_from_snapshot: 1,
        replica_refuses_a_repeated_or_skipped_delta: 1,
        slot_mapping: 3,
        kernel_array: 2,
    }

    @rule(rng=seeds)
    def step(self, rng: Rng) -> None:
        """Do one call, chosen by weight: tables that are mostly empty would test little."""
        rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0](self, rng)

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
