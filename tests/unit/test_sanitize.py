"""Sanitized tables, caches, replicas and device tables: planted damage is named, healthy runs are silent, off costs nothing."""

import os
import subprocess
import sys

import numpy as np
import pytest

import blocktable
from blocktable import ArgumentError, BlockTables, Group, KVCache, LawBroken, OutOfBlocks, Replica, plan
from blocktable.sanitize import Report
from blocktable.testing import CacheWorkload, TablesWorkload
from blocktable.testing.cases import cases

FULL = [plan(max_model_len=48, block_size=4)]
MIXED = [Group(FULL[0]), Group(plan(max_model_len=48, block_size=2), kind="window", window=7)]
RANKS = [plan(max_model_len=48, block_size=4, cp_size=2, cp_interleave=2)]
STATE = [Group(FULL[0]), Group(plan(max_model_len=48, block_size=4, extra_blocks=2), kind="state", state_blocks=2)]
CHUNKED = [Group(FULL[0], kind="chunked", window=12)]


@pytest.mark.parametrize("groups", [FULL, MIXED, RANKS, STATE], ids=["full", "mixed", "ranks", "state"])
def test_no_false_alarm_in_a_cache_that_works(groups):
    cache = KVCache(groups, num_blocks=40, max_rows=12, sanitize=True)
    work = CacheWorkload(cache, 3)
    for _ in range(60):
        work.step()
    work.close()
    cache.sanitizer.close()
    assert len(cache.sanitizer.report) == 0


def test_no_false_alarm_in_tables_and_replicas_that_work():
    groups = [*MIXED, Group(plan(max_model_len=16, block_size=4), kind="ring")]
    tables, replica = (
        BlockTables(groups, max_rows=5, num_blocks=200, sanitize=True),
        Replica(groups, max_rows=5, sanitize=True),
    )
    work = TablesWorkload(tables, 5)
    for _ in range(60):
        replica.apply(work.step())
    tables.snapshot()
    tables.clear(range(5))
    tables.sanitizer.close()


def test_no_false_alarm_where_windows_give_up_what_forks_share_in_the_same_call():
    cache = KVCache(CHUNKED, num_blocks=40, max_rows=4, sanitize=True)
    cache.extend([0], [0, 12], range(12))
    cache.fork(0, 1)
    cache.truncate([1], [3])
    cache.fork(0, 2)
    # Row by row: row 0 gives its first chunk up, row 1 still shares its block with row 2, which gives it up only then.
    slots = cache.extend([0, 1, 2], [0, 1, 2, 3], [12, 3, 12])
    assert slots[0, 1] == 4 * cache.tables[0].array[1, 0] + 3
    assert len(cache.commit().copies) == 1
    assert len(cache.sanitizer.report) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000))
def test_no_false_alarm_in_a_million_steps(seed):
    groups = (FULL, MIXED, RANKS, STATE, CHUNKED)[seed % 5]
    cache = KVCache(
        groups,
        num_blocks=40 + seed % 50,
        max_rows=4 + seed % 20,
        sanitize=True,
        cp_rank=seed % 2 if groups is RANKS else 0,
    )
    work, tables = (
        CacheWorkload(cache, seed),
        TablesWorkload(BlockTables(groups, max_rows=5, num_blocks=200, sanitize=True), seed),
    )
    for _ in range(500):
        work.step()
        tables.step()
    work.close()
    cache.sanitizer.close()


def tables(**how):
    made = BlockTables(FULL, max_rows=3, num_blocks=20, **({"sanitize": True} | how))
    made.append([0, 1], [0, 3, 4], [3, 4, 5, 6])
    made.commit()
    return made


@pytest.mark.parametrize(
    ("law", "at", "value"), [("L4", 4, 7), ("L3", 1, 0), ("L3", 1, 99), ("L3", 1, 8), ("L5", 24, 7)]
)
def test_memory_written_from_outside_is_found_at_the_next_call(law, at, value):
    made = tables()
    made._entries[at] = value
    with pytest.raises(LawBroken) as caught:
        made.append([1], [0, 1], [9])
    found = caught.value.finding
    assert (found.law, found.row, found.column) == (law, at // 12, at % 12)
    assert found.operation.verb == "append"
    assert found.operation.file == __file__
    if law != "L5":
        assert (found.touched is None) == (at == 4)


def test_after_a_finding_that_is_only_counted_it_goes_on_from_what_is_there(caplog):
    for mode in ("count", "log"):
        made = tables(sanitize=mode)
        made._entries[4] = 7
        made.truncate([1], [1])
        made.append([1], [0, 1], [9])
        made.commit()
        # Nothing sends what nothing wrote: the commit finds that replicas differ. Afterwards all is as it is.
        assert made.sanitizer.report.counts == {"L4": 1, "L11": 1}
        made.append([1], [0, 1], [10])
        made.commit()
        assert len(made.sanitizer.report) == 2
    assert len(caplog.records) == 2


def test_several_objects_may_share_a_report():
    report = Report("count")
    one, other = tables(sanitize=report), tables(sanitize=report)
    for made in (one, other):
        made._entries[4] = 7
        made.clear([2])
    assert report.counts == {"L4": 2}


def test_what_was_never_given_back_is_a_leak():
    made = tables()
    with pytest.raises(LawBroken, match=r"\[L9\] 2 rows still hold blocks"):
        made.sanitizer.close()
    cache = KVCache(FULL, num_blocks=20, max_rows=2, sanitize=True)
    cache.admit([0], [0, 5], range(5))
    with pytest.raises(LawBroken, match="still in use"):
        cache.sanitizer.close()
    cache.free([0], fence=1)
    with pytest.raises(LawBroken, match="wait for their fence"):
        cache.sanitizer.close()
    cache.retire(1)
    cache.sanitizer.close()


def test_a_replica_that_drifts():
    host, mirror = BlockTables(FULL, max_rows=3), Replica(FULL, max_rows=3, sanitize=True)
    host.append([0, 1], [0, 3, 4], [3, 4, 5, 6])
    mirror.apply(host.commit())
    mirror._entries[1] = 9
    host.append([1], [0, 1], [7])
    with pytest.raises(LawBroken, match="block 9"):
        mirror.apply(host.commit())


def test_refusals_stay_what_they_are():
    made = tables()
    with pytest.raises(ArgumentError, match="its width is 12"):
        made.append([0], [0, 10], range(1, 11))
    with pytest.raises(ArgumentError):
        made.append([0.5], [0, 1], [3])
    cache = KVCache(FULL, num_blocks=14, max_rows=4, sanitize=True)
    cache.admit([0], [0, 40], range(40))
    with pytest.raises(OutOfBlocks):
        cache.admit([1], [0, 20], range(50, 70))
    assert len(cache.sanitizer.report) == 0


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_numbers_of_any_numpy_type_raise_no_false_alarm(kind):
    cache = KVCache(FULL, num_blocks=40, max_rows=4, sanitize=True)
    cache.admit([0], [0, 6], [1, 2, 3, 4, 5, 6], limit=kind(6), headroom=kind(2))
    cache.fork(kind(0), kind(1))
    cache.extend([1], [0, 1], [9], headroom=kind(2))
    cache.free(np.array([1], kind), kind(3))
    cache.retire(kind(2))
    cache.truncate(np.array([0], kind), np.array([4], kind), kind(4))
    cache.retire(kind(4))
    cache.commit()
    with pytest.raises(OutOfBlocks):
        cache.extend([0], [0, 2], [7, 7], headroom=kind(120))
    cache.free([0])
    cache.sanitizer.close()


@pytest.mark.parametrize("fence", [2**63 - 2, 1 - 2**63, np.uint64(2**63 - 2), 2**62 + 1, -5])
def test_fences_as_large_as_they_come_are_followed(fence):
    cache = KVCache(FULL, num_blocks=40, max_rows=4, sanitize=True)
    cache.admit([0, 1], [0, 6, 12], np.arange(12))
    cache.free([0], fence)
    cache.free([1], int(fence) + 1)
    for n in (max(int(fence) - 1, 1 - 2**63), fence, int(fence) + 1):
        assert cache.stats()["fenced"]
        cache.retire(n)
    cache.sanitizer.close()


def test_a_call_by_keywords_may_be_refused_too():
    cache = KVCache(FULL, num_blocks=40, max_rows=4, sanitize=True)
    for verb in ("admit", "extend"):
        with pytest.raises(OutOfBlocks):
            getattr(cache, verb)(rows=[0], indptr=[0, 6], tokens=[1, 2, 3, 4, 5, 6], headroom=38)


def test_sanitized_objects_are_what_they_were():
    for made in (
        tables(),
        KVCache(FULL, num_blocks=20, max_rows=2, sanitize=True),
        Replica(FULL, max_rows=2, sanitize=True),
    ):
        assert type(made).__name__ in ("BlockTables", "KVCache", "Replica")
        assert type(made) is not getattr(blocktable, type(made).__name__)
    assert type(tables(sanitize=False)) is BlockTables
    with pytest.raises(ArgumentError, match="mode"):
        tables(sanitize="loudly")


def test_the_environment_asks_for_it_too():
    program = "import blocktable as b; t = b.BlockTables([b.plan(max_model_len=9, block_size=1)], max_rows=1); print(t.sanitizer.report)"
    for value, said in (("1", "mode raise"), ("count", "mode count")):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"BLOCKTABLE_SANITIZE": value},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert said in out


def test_many_rows_go_the_usual_way_and_are_judged_all_the_same():
    for fault in (False, True):
        cache = KVCache(FULL, num_blocks=400, max_rows=16, sanitize=True)
        rows = np.arange(16)
        cache.admit(rows, np.arange(17) * 9, np.arange(144))
        cache.commit()
        for step in range(4):
            cache.extend(rows, np.arange(17), np.full(16, step))
            cache.commit()
        if fault:
            cache.sanitizer.blocks.owners[int(cache.tables[0].array[7, 3])] += 1
            with pytest.raises(LawBroken, match=r"row 7") as caught:
                cache.extend(rows, np.arange(17), np.full(16, 5))
            assert caught.value.law == "L8"


def test_device_tables():
    torch = pytest.importorskip("torch")
    from blocktable.device import DeviceTables

    groups = [plan(max_model_len=48, block_size=8, contracts=[blocktable.Contract("two", kernel_block_sizes=(4,))])]
    host = BlockTables(groups, max_rows=3)
    device = DeviceTables(host, "cpu", sanitize=True, kernels="reference")
    host.append([0, 2], [0, 2, 3], [3, 4, 5])
    device.apply(host.commit())
    batch = device.gather([2, 0], 3, [5, 13])
    device.prepare([2, 0], 3, [5, 13], [0, 1, 3], [4, 0, 12], 5)
    device.slot_mapping(torch.tensor([2]), [0, 1], [4], 3)
    assert len(device.sanitizer.report) == 0
    device.tables[0][0, 1] = 7
    host.append([2], [0, 1], [6])
    with pytest.raises(LawBroken, match="given block 4"):
        device.apply(host.commit())
    assert batch.padded == 3


def test_the_cases_of_parity_are_silent():
    pytest.importorskip("torch")
    from blocktable.device import DeviceTables

    for case in cases(brief=True)[:8]:
        report = Report("count")
        host = BlockTables(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
        device = DeviceTables(host, "cpu", cp_rank=case.rank, sanitize=report)
        for step in case.steps():
            step.change(host)
            device.apply(host.commit())
            starts = np.cumsum([0, *step.query])
            device.gather(step.rows, step.padded, step.lengths)
            device.slot_mapping(step.rows, starts, step.positions, int(starts[-1]) + step.unused)
        assert {law for law in report.counts if law not in ("L7", "L8")} == set(), (
            "some cases write a slot twice on purpose"
        )
