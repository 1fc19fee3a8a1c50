"""Recordings of any geometry, contracts and all, which are not recorded: lawful again, and shrunk to tests of the same shape.

A printed test makes what was recorded, fails as the run did, and passes once that is mended.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import blocktable
from blocktable import BlockTables, Geometry, Group, KVCache, LawBroken, plan, recording, sanitize
from blocktable.contracts import Contract, TokenMultiple

RANKS = st.shared(st.integers(1, 3), key="ranks")


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draw a geometry with everything that a plan can give it, with and without a contract."""
    kernel = draw(st.integers(1, 4))
    block = kernel * draw(st.integers(1, 3))
    rule = TokenMultiple(draw(st.integers(1, 4)) * kernel)
    contract = Contract("drawn", kernel_block_sizes=(kernel,), width_rule=rule)
    return plan(
        max_model_len=draw(st.integers(1, 60)),
        block_size=block,
        contracts=[contract] if draw(st.booleans()) else [],
        lookahead=draw(st.integers(0, 9)),
        extra_blocks=draw(st.integers(0, 2)),
        cp_size=draw(RANKS),
        cp_interleave=draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
    )


GROUPS = st.builds(Group, geometries()) | st.builds(Group, geometries(), st.just("window"), st.integers(1, 9))


def shapes(groups: Any) -> list[Any]:
    """Return everything of groups that is recorded."""
    names = [field.name for field in fields(Geometry) if field.name not in ("contracts", "engine", "reasons")]
    each = [(group.kind, group.window, group.state_blocks, group.geometry) for group in groups]
    return [[*kind, *(getattr(geometry, name) for name in names)] for *kind, geometry in each]


class Printed:
    """The test of a run that was recorded, and shrunk with a fault; ``made`` are the objects that it made when called last."""

    def __init__(self, run: Callable[[], Any], law: str, planted: AbstractContextManager[None]) -> None:
        with TemporaryDirectory() as folder:
            with recording.record(Path(folder) / "run"):
                run()
            with planted:
                found = recording.shrink(Path(folder) / "run")
        assert found.failure.law == law
        self.text = found.test
        self.verbs = [call.verb for call in found.calls]
        self._names: dict[str, Any] = {}
        exec(found.test, self._names)  # noqa: S102 - what a user would paste

    def __call__(self) -> None:
        self.made: list[Any] = []
        with pytest.MonkeyPatch.context() as patched:
            for home, name in ((blocktable, "BlockTables"), (blocktable, "KVCache"), (sanitize, "watch")):
                patched.setattr(home, name, self._noted(getattr(home, name)))
            self._names["test_it_keeps_the_laws"]()

    def _noted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **named: Any) -> Any:
            self.made.append(real(*args, **named))
            return self.made[-1]

        return make


@contextmanager
def fault(kind: type, verb: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Plant a fault."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, verb, wrong)
        yield


def leaves_the_source(self: BlockTables, src: Any, dst: Any) -> None:
    BlockTables.copy(self, src, dst)


def frees_nothing(*_: Any, **__: Any) -> None:
    pass


@given(groups=st.lists(GROUPS, min_size=1, max_size=2))
def test_of_tables(groups: list[Group]) -> None:
    def run() -> None:
        tables = BlockTables(groups, max_rows=3)
        tables.append([1], [0, 1], [6])
        tables.append([0], [0, 1], [5], group=len(groups) - 1)
        tables.commit()
        tables.move([0], [2])

    test = Printed(run, "L5", fault(BlockTables, "move", leaves_the_source))
    with fault(BlockTables, "move", leaves_the_source), pytest.raises(LawBroken, match="L5"):
        test()
    test()
    assert test.verbs == ["append", "move"]
    assert [shapes(tables.groups) for tables in test.made] == [shapes(groups)]


@given(before=GROUPS, groups=st.lists(GROUPS, min_size=2, max_size=2))
def test_of_tables_that_took_other_groups(before: Group, groups: list[Group]) -> None:
    def run() -> None:
        tables = BlockTables([before], max_rows=2)
        tables.resize(groups)
        tables.append([0], [0, 1], [5], group=1)
        tables.move([0], [1])

    test = Printed(run, "L5", fault(BlockTables, "move", leaves_the_source))
    with fault(BlockTables, "move", leaves_the_source), pytest.raises(LawBroken, match="L5"):
        test()
    test()
    assert test.verbs == ["resize", "append", "move"]
    assert [shapes(tables.groups) for tables in test.made] == [shapes(groups)]


@given(groups=st.lists(GROUPS, min_size=1, max_size=2))
def test_of_a_cache(groups: list[Group]) -> None:
    def run() -> None:
        cache = KVCache(groups, num_blocks=200, max_rows=3)
        for row in range(2):
            cache.admit([row], [0, 1], [row])
            cache.commit()
        cache.free([0])

    test = Printed(run, "L5", fault(KVCache, "free", frees_nothing))
    with fault(KVCache, "free", frees_nothing), pytest.raises(LawBroken, match="L5"):
        test()
    test()
    assert test.verbs == ["admit", "free"]
    assert [shapes(cache.groups) for cache in test.made] == [shapes(groups)]


@pytest.mark.parametrize("kernel_blocks", [False, True])
@given(groups=st.lists(GROUPS, min_size=1, max_size=2))
def test_of_a_watcher(kernel_blocks: bool, groups: list[Group]) -> None:
    """What it is shown is at fault, which the test has in it; what is wrong is told by the same law, and nothing before."""

    def run() -> None:
        watcher = sanitize.watch(groups, num_blocks=9, mode="count", kernel_blocks=kernel_blocks)
        geometries = [group.geometry for group in groups]
        tables = [np.zeros((2, g.kernel_width if kernel_blocks else g.width), np.int64) for g in geometries]
        slots = [np.array([g.block_size]) for g in geometries]
        for table, g in zip(tables, geometries, strict=True):
            table[0, 0] = g.ratio if kernel_blocks else 1
        for wrong in (0, 0, 7):
            slots[-1] += wrong
            watcher.step(tables, [[1, 0]] * len(groups), query_start_loc=[0, 1], positions=[0], slots=slots)

    test = Printed(run, "L7", nullcontext())
    with pytest.raises(LawBroken, match="L7"):
        test()
    assert [shapes(watcher.groups) for watcher in test.made] == [shapes(groups)]


@given(groups=st.lists(GROUPS, min_size=1, max_size=2))
def test_a_lawful_run_is_lawful_again(groups: list[Group]) -> None:
    with TemporaryDirectory() as folder:
        with recording.record(Path(folder) / "run"):
            KVCache(groups, num_blocks=200, max_rows=3).admit([0], [0, 1], [5])
            BlockTables(groups, max_rows=3).append([0], [0, 1], [5])
        found = recording.replay(Path(folder) / "run", until_finding=True)
    assert (found.calls, found.finding) == (2, None)
    assert [shapes(one.groups) for one in found.objects] == [shapes(groups)] * 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {},
            "blocktable.plan(max_model_len=1000, block_size=64, lookahead=0, extra_blocks=0, cp_size=1, cp_interleave=1)",
        ),
        ({"block_size": 128, "contracts": ["vllm:FLASHMLA"]}, "kernel_block_sizes=(64,), min_width=16)])"),
        ({"contracts": ["FLASHINFER_MLA"], "max_model_len": 1088}, "kernel_block_sizes=(64,), min_width=18)])"),
        ({"contracts": ["FLASHINFER_MLA"], "engine": "vllm==0.32.0"}, "blocktable.plan("),
    ],
)
def test_a_geometry_is_printed_as_its_plan(how: dict[str, Any], said: str) -> None:
    geometry = plan(**{"max_model_len": 1000, "block_size": 64} | how)

    def run() -> None:
        tables = BlockTables([geometry], max_rows=2)
        tables.append([0], [0, 1], [5])
        tables.move([0], [1])

    assert said in Printed(run, "L5", fault(BlockTables, "move", leaves_the_source)).text


def test_a_geometry_that_nobody_planned_is_printed_as_it_is() -> None:
    """It breaks L1 by itself."""
    geometry = replace(plan(max_model_len=64, block_size=16), width=5, kernel_width=6, padding=2)
    test = Printed(lambda: BlockTables([geometry], max_rows=2), "L1", nullcontext())
    with pytest.raises(LawBroken, match="L1"):
        test()
    assert "blocktable.Geometry(max_model_len=64, " in test.text
