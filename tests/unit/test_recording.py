"""The flight recorder: a run again to the same digest, cut off anywhere, as a ring, and shrunk to a test."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import blocktable
from blocktable import ArgumentError, BlockTables, Group, KVCache, plan, recording, sanitize
from blocktable.cli import run
from blocktable.recording.coding import NOT_GIVEN, room, write_call
from blocktable.recording.format import KINDS, Record, read
from blocktable.recording.record import permuted
from blocktable.recording.writer import Writer
from blocktable.simulate import Simulation
from blocktable.testing import CacheWorkload, TablesWorkload
from blocktable.traces import read_trace

GROUPS = {
    "full": [plan(max_model_len=48, block_size=4)],
    "windows": [
        Group(plan(max_model_len=48, block_size=4)),
        Group(plan(max_model_len=48, block_size=2), kind="window", window=7),
    ],
    "states": [
        Group(plan(max_model_len=48, block_size=4)),
        Group(plan(max_model_len=48, block_size=4, extra_blocks=2), kind="state", state_blocks=2),
    ],
}


def recorded(path, groups, seed=0, steps=60, **how):
    with recording.record(path, **how) as recorder:
        cache = KVCache(groups, num_blocks=60, max_rows=6)
        work = CacheWorkload(cache, seed)
        for _ in range(steps):
            work.step()
    return recorder, cache


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_again_returns_the_same(tmp_path, name, seed):
    recorder, cache = recorded(tmp_path / "run", GROUPS[name], seed)
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert (found.finding, found.differs) == (None, "")
    assert found.complete
    assert found.digest == recorder.digest
    assert found.steps == 60
    if name == "full":
        assert cache.stats()["hit_tokens"], "prefixes were shared"
    assert found.objects[0].stats()["evictions"] == cache.stats()["evictions"]


def test_tables_too(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        tables = BlockTables(GROUPS["windows"], max_rows=4, num_blocks=99)
        work = TablesWorkload(tables, 3)
        for _ in range(40):
            work.step()
        with pytest.raises(ArgumentError):
            tables.append([0], [0, 1], [99])
        tables.clear(range(4))
        tables.resize(GROUPS["full"])
        tables.commit()
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert found.digest == recorder.digest
    assert found.finding is None
    assert found.objects[0].groups[0].geometry.width == 12


def test_several_objects_and_one_made_before(tmp_path):
    before = KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
    with recording.record(tmp_path / "run", before) as recorder:
        other = KVCache(GROUPS["full"], num_blocks=40, max_rows=2, sanitize=True)
        for cache in (before, other):
            cache.admit([0], [0, 3], [1, 2, 3])
            cache.commit()
    found = recording.replay(tmp_path / "run")
    assert found.digest == recorder.digest
    assert len(found.objects) == 2
    with pytest.raises(ArgumentError, match="cannot be recorded"):
        recording.record(tmp_path / "other", other)


def test_the_file_says_nothing_of_the_text(tmp_path):
    for kept in (False, True):
        with recording.record(tmp_path / "run", tokens=kept):
            cache = KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
            cache.admit([0], [0, 12], np.array([123456789] * 12), salts=[b"a secret tenant"])
        data = (tmp_path / "run").read_bytes()
        assert b"secret" not in data
        assert np.array([123456789], "<i4").tobytes() not in data
        assert recording.replay(tmp_path / "run").differs == ""


def test_the_permutation_is_one():
    key = np.array([5, 77, 1234567, 2**30 + 1]) | 1
    some = np.array([-1, 0, 1, 2, 50_000, 2**31 - 1, 2**31, 2**40, 2**40 + 1])
    found = permuted(some, key)
    assert np.unique(found).size == some.size
    assert found[0] == -1
    assert ((found < 2**31) == (some < 2**31)).all()
    assert np.unique(permuted(np.arange(1 << 16), key)).size == 1 << 16


def test_cut_off_anywhere_it_reads_up_to_the_last_whole_record(tmp_path):
    path = tmp_path / "run"
    recorded(path, GROUPS["full"], steps=8)
    data = path.read_bytes()
    whole = list(map(repr, read(path)))
    for end in range(4, len(data), 7):
        path.write_bytes(data[:end])
        part = list(map(repr, read(path)))
        assert part == whole[: len(part)]
        assert len(part) >= len(whole) * end // len(data) // 3
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    path.write_bytes(flipped)
    part = list(map(repr, read(path)))
    assert part == whole[: len(part)]
    assert len(part) < len(whole)
    assert recording.replay(path).complete is False


def test_a_killed_process_leaves_what_it_did(tmp_path):
    program = f"""
import os, signal
from blocktable import KVCache, plan, recording
recording.record({str(tmp_path / "run")!r})
cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
cache.admit([0], [0, 6], [5, 6, 7, 8, 9, 10])
cache.commit()
cache.extend([0], [0, 1], [11])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == -signal.SIGKILL
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.steps, found.complete) == (3, 1, False)
    assert found.objects[0].lengths[0] == 7


@pytest.mark.compiled
def test_of_slow_steps_nothing_waits(tmp_path):
    with recording.record(tmp_path / "run"):
        cache = KVCache([plan(max_model_len=2048, block_size=4)], num_blocks=600, max_rows=2)
        for _ in range(200):
            cache.extend([0], [0, 1], [5])
            cache.commit()
        assert sum(isinstance(one, Record) for one in read(tmp_path / "run")) < 400
        for step in range(201, 210):
            time.sleep(0.011)
            cache.extend([0], [0, 1], [5])
            cache.commit()
            assert sum(isinstance(one, Record) for one in read(tmp_path / "run")) == 2 * step


def test_what_waits_to_be_written_is_bounded_and_reads_back(tmp_path):
    path, rows = tmp_path / "run", np.arange(64)
    with recording.record(path) as recorder:
        cache = KVCache([plan(max_model_len=2048, block_size=4)], num_blocks=64 * 512 + 1, max_rows=64)
        other = KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
        other.extend([0], [0, 1], [5])
        done = 1
        for step in range(600):
            tokens = None if step % 7 == 3 else rows % 5 + step
            cache.extend(rows, np.arange(65), tokens)
            if step % 7 == 3:  # known one step later
                cache.confirm(rows, cache.lengths, np.arange(65), rows)
            cache.commit()
            done += 2 + (step % 7 == 3)
            if step % 50 == 0:
                other.extend([0], [0, 1], [step])
                done += 1
                written = sum(isinstance(one, Record) for one in read(path))
                assert done - min(256, done // 16 + 1) <= written <= done
    written = [one for one in read(path) if isinstance(one, Record)]
    assert len(written) == done
    found = recording.replay(path, until_finding=True)
    assert (found.differs, found.finding, found.digest) == ("", None, recorder.digest)
    assert path.stat().st_size / 64 / 600 < 4, "bytes per token of a decode, before compression"


@pytest.mark.compiled
@pytest.mark.parametrize("shared", [False, True], ids=["no prefixes", "prefixes"])
def test_a_simulated_run_again_with_prompts_that_wait_and_are_refused(tmp_path, shared):
    rng = np.random.default_rng(3)
    with (tmp_path / "trace").open("w") as lines:
        for n in range(250):
            size = int(rng.integers(1, 1800))
            asked = {"timestamp": 9 * n, "input_length": size, "output_length": int(rng.integers(1, 200))}
            asked["hash_ids"] = [1, 2 + n % 3, 10 + n, 1000 + n][: -(-size // 512)] if shared else []
            lines.write(json.dumps(asked) + "\n")
    with recording.record(tmp_path / "run") as recorder:
        run = Simulation(read_trace(tmp_path / "trace"), plan(max_model_len=2048, block_size=16), num_blocks=700)
        done = run.run()
    assert done.preemptions > 5
    assert (done.prefix_hit_tokens > 0) == shared
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)
    calls = Counter(call.verb + call.refused for call in recording.calls(tmp_path / "run")[1])
    assert min(calls[verb] for verb in ("lookup", "admit", "admitOutOfBlocks L9", "extend", "commit", "free")) > 100


@pytest.mark.parametrize("seed", range(8))
def test_rows_forked_and_cut_within_a_unit_are_found_again_by_what_they_went_on_with(tmp_path, seed):
    rng, texts, hits = np.random.default_rng(seed), {}, 0
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=200, max_rows=4)
        for _ in range(150):
            row, other = (int(n) for n in rng.choice(4, 2, replace=False))
            what = rng.integers(6)
            if row not in texts:
                texts[row] = rng.integers(0, 2, rng.integers(1, 9)).tolist()
                cache.admit([row], [0, len(texts[row])], texts[row])
            elif what == 0 and other not in texts:
                cache.fork(row, other)
                texts[other] = list(texts[row])
            elif what == 1:
                texts[row] = texts[row][: rng.integers(1, len(texts[row]) + 1)]
                cache.truncate([row], [len(texts[row])])
            elif what == 2:
                cache.free([row])
                del texts[row]
            elif what < 5 and len(texts[row]) < 60:
                more = rng.integers(0, 2, rng.integers(1, 4)).tolist()
                cache.extend([row], [0, len(more)], more)
                texts[row] += more
            for text in texts.values():
                hits += int(cache.lookup([0, len(text) + 1], [*text, 5])[0])
            cache.commit()
    assert hits > 500
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert (found.differs, found.finding, found.digest) == ("", None, recorder.digest)


@pytest.mark.parametrize("prefixes", [True, False])
def test_what_rows_had_computed_is_found_by_the_prompts_of_later_turns(tmp_path, prefixes):
    rng = np.random.default_rng(5)
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=200, max_rows=4, prefix_cache=prefixes)
        hits = 0
        for turn in range(120):
            text = rng.integers(0, 9, 24)
            cache.admit([turn % 3], [0, 4], text[:4])
            for token in range(4, 24):
                cache.extend([turn % 3], [0, 1], text[token : token + 1])
                cache.commit()
            cache.free([turn % 3])
            cached, _ = cache.admit([turn % 3], [0, 30], [*text, *[-1] * 6])
            hits += int(cached[0])
            if turn < 119:
                cache.free([turn % 3])
    assert hits == (120 * 24 if prefixes else 0)
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest) == ("", recorder.digest)
    assert cache.final.max() == 24, "up to the first token that is not known"
    assert found.objects[0].final.tolist() == cache.final.tolist()


def test_a_full_disk_is_an_error_of_the_call_and_ends_the_recording(tmp_path, monkeypatch):
    recorder = recording.record(tmp_path / "run")
    cache = KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
    cache.extend([0], [0, 1], [5])
    cache.commit()
    recorder.writer.window = recorder.writer.window[:0]  # what is written next needs a longer file
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        cache.extend([0], [0, 1], [6])
    assert cache.lengths[0] == 2, "the call itself is done"
    cache.extend([0], [0, 1], [7])
    recorder.close()
    assert recorder.closed
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.complete) == (2, "", False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_writes_nothing_into_the_recording(tmp_path):
    program = f"""
import os
from blocktable import KVCache, plan, recording
with recording.record({str(tmp_path / "run")!r}) as recorder:
    cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
    cache.extend([0], [0, 1], [5])
    child = os.fork()
    other = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4) if child == 0 else cache
    for token in range(40):
        cache.extend([0], [0, 1], [token])
        other.commit()
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    found = recording.replay(tmp_path / "run")
    assert (found.calls, len(found.objects), found.differs, found.complete) == (81, 1, "", True)


def test_it_goes_on_where_it_began_though_the_program_does_not(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with recording.record("run"):
        tables = BlockTables([plan(max_model_len=4096, block_size=4)], max_rows=64, num_blocks=5000)
        monkeypatch.chdir(tmp_path / "elsewhere")
        for seed in range(20):  # more than the file grows by at once
            ids = np.random.default_rng(seed).integers(1, 5000, 64 * 900)
            tables.assign(np.arange(64), np.arange(65) * 900, ids)
    assert (tmp_path / "run").stat().st_size > 2**20
    assert recording.replay(tmp_path / "run").differs == ""


def test_a_ring_keeps_its_size_and_the_last_steps(tmp_path):
    path = tmp_path / "run"
    _, cache = recorded(path, GROUPS["full"], steps=300, ring=16384)
    assert path.stat().st_size + Path(f"{path}.old").stat().st_size <= 16384 + 4096
    row = int(np.argmax(cache.tables.tables[0].num_blocks))
    last = recording.history(path, row)[-1]
    assert list(last.blocks) == cache.tables.tables[0].array[row, : len(last.blocks)].tolist()
    assert len(last.blocks) == cache.tables.tables[0].num_blocks[row]
    with pytest.raises(ArgumentError, match="ring"):
        recording.replay(path)
    with pytest.raises(ArgumentError, match="ring"):
        recording.record(path, ring=100)


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_a_ring_holds_its_bound_and_what_begins_and_ends_each_half(tmp_path, rows):
    """Of 256 rows a snapshot is several times the ring."""
    path, older = tmp_path / "run", tmp_path / "run.old"
    snapshot = record = 0
    with recording.record(path, ring=4096) as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=16 * rows + 1, max_rows=rows)
        cache.admit(np.arange(rows), np.arange(rows + 1), np.arange(rows))
        for _ in range(63):
            record = max(record, len(cache.commit().to_bytes()))
            cache.extend(np.arange(rows), np.arange(rows + 1), np.arange(rows))
            snapshot = max(snapshot, len(cache.snapshot()))
            held = recorder.writer.size + (older.stat().st_size if older.exists() else 0)
            assert held <= 4096 + 2 * (snapshot + record) + 1000  # of both, what the cache was made with
    assert (snapshot > 4096) == (rows == 256)
    assert older.exists()


def test_the_history_of_a_row(tmp_path):
    with recording.record(tmp_path / "run"):
        tables = BlockTables(GROUPS["full"], max_rows=2)
        tables.append([1], [0, 2], [7, 9])
        tables.commit()
        tables.commit()
        tables.move([1], [0])
        tables.append([1], [0, 1], [3])
        tables.commit()
    found = recording.history(tmp_path / "run", 1)
    assert [(one.step, one.blocks) for one in found] == [(1, (7, 9)), (3, (3,))]
    assert found[1].verbs == ("move", "append", "commit")


@pytest.mark.parametrize("ring", [None, 4096])
def test_the_history_of_a_row_that_is_not_there_is_refused(tmp_path, ring):
    recorded(tmp_path / "run", GROUPS["windows"], steps=40, ring=ring)
    assert recording.history(tmp_path / "run", np.int64(5), group=1)
    for row, how, says in (
        (6, {}, r"no row 6 of group 0: object 0 has 2 groups of 6 rows"),
        (0, {"group": 2}, r"no row 0 of group 2: object 0 has 2 groups of 6 rows"),
        (0, {"number": 1}, r"no object 1: the recording holds 1"),
        (-1, {}, "row must be an integer in 0"),
        (1.0, {}, "row must be an integer in 0"),
        (0, {"group": -1}, "group must be an integer in 0"),
        (0, {"group": True}, "group must be an integer in 0"),
        (0, {"number": -1}, "number must be an integer in 0"),
    ):
        with pytest.raises(ArgumentError, match=says):
            recording.history(tmp_path / "run", row, **how)


def test_the_history_of_an_object_that_did_nothing_is_empty(tmp_path):
    with recording.record(tmp_path / "run"):
        KVCache(GROUPS["full"], num_blocks=13, max_rows=2)
        BlockTables(GROUPS["full"], max_rows=2)
        sanitize.watch(GROUPS["full"])
    assert [recording.history(tmp_path / "run", 1, number=n) for n in range(2)] == [[], []]
    for number, rows in enumerate((2, 2, 0)):
        with pytest.raises(ArgumentError, match=f"object {number} has 1 groups of {rows} rows"):
            recording.history(tmp_path / "run", 2, number=number)


@pytest.mark.parametrize("ring", [None, 4096])
def test_the_history_goes_on_where_tables_took_other_groups(tmp_path, ring):
    """A group that there was only before, or only afterwards, held nothing in between."""
    with recording.record(tmp_path / "run", ring=ring):
        tables = BlockTables(GROUPS["full"], max_rows=2)
        tables.append([0], [0, 2], [7, 9])
        tables.commit()
        tables.clear([0])
        tables.commit()
        tables.resize([plan(max_model_len=64, block_size=16)] * 2)
        tables.append([0], [0, 1], [3], group=1)
        tables.commit()
    of_each = [recording.history(tmp_path / "run", 0, group=g) for g in (0, 1)]
    assert [[(one.step, one.blocks) for one in found] for found in of_each] == [
        [(1, (7, 9)), (2, ())],
        [(1, ()), (3, (3,))],
    ]
    with pytest.raises(ArgumentError, match="object 0 has 2 groups"):
        recording.history(tmp_path / "run", 0, group=2)


def test_up_to_a_step_and_not_past_the_end(tmp_path):
    recorded(tmp_path / "run", GROUPS["full"])
    found = recording.replay(tmp_path / "run", to=17)
    assert found.steps == 17
    assert found.objects[0].tables.seq == 17
    with pytest.raises(ArgumentError, match="ends at step 60"):
        recording.replay(tmp_path / "run", to=61)
    assert recording.replay(tmp_path / "run", to=np.int64(17)).digest == found.digest


def test_step_0_is_before_the_first_call(tmp_path):
    recorded(tmp_path / "run", GROUPS["full"])
    found = recording.replay(tmp_path / "run", to=0)
    assert (found.calls, found.steps, found.digest) == (0, 0, "0" * 16)
    assert found.objects[0].stats()["held"] == 0


@pytest.mark.parametrize("to", [-1, float("nan"), 2.0, True, "3", 2**70])
def test_what_is_no_step_is_refused(tmp_path, to):
    recorded(tmp_path / "run", GROUPS["full"], steps=3)
    with pytest.raises(ArgumentError, match=f"to must be an integer in 0.*, got {to!r}"):
        recording.replay(tmp_path / "run", to=to)


FIELDS = [[], [3], [5, 6, 7, 8], [4, 4, 4], [-1, 127], [300, -300], [2**40, 0], [2**62, -(2**63), 1], [1, 3, 5], None]


@pytest.mark.parametrize("values", FIELDS)
def test_fields_are_written_small_and_come_back(tmp_path, values):
    writer = Writer(tmp_path / "run")
    size = np.array([NOT_GIVEN if values is None else len(values)])
    given, nothing = np.array(values or [], np.int64), np.zeros(0, np.int64)
    writer.room(2 * room(given.size, 1))
    before = nothing, nothing
    for _ in range(2):  # the second time they are what they were
        write_call(writer.window, writer.meta, KINDS["retire"], 300, given, size, *before)
        before = given, size
    writer.close()
    found = list(read(tmp_path / "run"))
    assert [(one.verb, one.number, one.refused) for one in found] == [("retire", 300, False)] * 2
    for one in found:
        (field,) = one.fields
        assert (None if field is None else field.tolist()) == values
    assert (tmp_path / "run").stat().st_size <= 4 + 2 * 12 + 1 + 10 * len(values or [])


@pytest.mark.compiled
def test_thousands_of_calls_repeat_what_they_were(tmp_path):
    rng = np.random.default_rng(0)
    with recording.record(tmp_path / "run"):
        tables = BlockTables([plan(max_model_len=4096, block_size=4)], max_rows=64, num_blocks=5000)
        rows = np.arange(64)
        for _ in range(100):
            tables.assign(rows, np.arange(65) * 900, np.sort(rng.integers(1, 5000, 64 * 900)))
    assigned = [one for one in read(tmp_path / "run") if isinstance(one, Record)]
    assert len(assigned) == 100
    assert {one.fields[3].size for one in assigned} == {64 * 900}
    assert recording.replay(tmp_path / "run").differs == ""


def test_another_format_is_refused_by_name(tmp_path):
    recorded(tmp_path / "run", GROUPS["full"], steps=3)
    data = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(b"BTr1" + data[4:])
    with pytest.raises(ArgumentError, match="another format"):
        recording.replay(tmp_path / "run")
    with recording.record(tmp_path / "run") as recorder:
        recorder.writer.meta[0], recorder.writer.meta[1] = 4, 0
        recorder.writer.say(["begin", 7, 0])
    with pytest.raises(ArgumentError, match="version"):
        recording.replay(tmp_path / "run")


def leaves_the_source(self, src, dst):
    BlockTables.copy(self, src, dst)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A recording of tables whose move leaves the source, made while nobody looked."""
    monkeypatch.setattr(BlockTables, "move", leaves_the_source)
    with recording.record(tmp_path / "run"):
        tables = BlockTables(GROUPS["full"], max_rows=4, num_blocks=99)
        for row in range(4):
            tables.append([row], [0, 2], [2 * row + 1, 2 * row + 2])
            tables.commit()
        tables.truncate([0, 1], [1, 1])
        tables.move([3], [2])
        tables.clear([0])
        tables.commit()
    return tmp_path / "run"


def test_it_stops_at_the_call_that_broke_a_law(failing):
    found = recording.replay(failing, until_finding=True)
    assert found.finding.law == "L5"
    assert (found.calls, found.finding.row) == (10, 3)
    assert "move at step 4" in str(found.finding)


def test_it_is_shrunk_to_a_test_that_fails_until_the_fault_is_mended(failing, monkeypatch):
    shrunk = recording.shrink(failing)
    assert [call.verb for call in shrunk.calls] == ["append", "move"]
    names: dict = {}
    exec(shrunk.test, names)  # noqa: S102 - what a user would paste
    with pytest.raises(blocktable.LawBroken):
        names["test_it_keeps_the_laws"]()
    monkeypatch.undo()
    names["test_it_keeps_the_laws"]()
    with pytest.raises(ArgumentError, match="does not fail"):
        recording.shrink(failing)


def test_the_commands(failing, capsys, tmp_path):
    assert run(["replay", str(failing)]) == 0
    assert "replayed 12 calls, 5 steps" in capsys.readouterr().out
    assert run(["replay", str(failing), "--until-finding", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["finding"]["law"], found["finding"]["row"], found["complete"]) == ("L5", 3, True)
    assert run(["replay", str(failing), "--to", "99"]) == 2
    assert run(["replay", str(tmp_path / "none")]) == 2
    assert run(["replay", "n" * 253]) == 2, "with .old behind it no system takes the name"
    capsys.readouterr()
    assert run(["replay", str(failing), "--until-finding", "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")
    assert run(["shrink", str(failing), "--json", "-q"]) == 0
    told, err = capsys.readouterr()
    assert (err, json.loads(told)["before"], "def test_" in json.loads(told)["test"]) == ("", 12, True)
    assert run(["shrink", str(failing), "--out", str(tmp_path / "test_it.py")]) == 0
    assert "2 of 12 calls are left" in capsys.readouterr().err
    assert "sanitize=True" in (tmp_path / "test_it.py").read_text()
    packed = tmp_path / "run.gz"
    packed.write_bytes(gzip.compress(failing.read_bytes()))
    assert run(["replay", str(packed)]) == 0
    packed.write_bytes(gzip.compress(failing.read_bytes())[:-20])
    assert run(["replay", str(packed)]) == 2


def one(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("verb", "number", "fields"),
    [
        ("extend", 0, []),
        ("extend", 7, [one(), one(), None, None, None, None, None, None, None]),
        ("extend", 0, [one(0), one(1), None, None, None, one(1), None, None, None]),
        ("extend", 0, [one(0), one(1), None, None, None, None, one(2), one(3, 4), None]),
        ("free", 0, [None, None]),
        ("append", 0, [one(-1), one(0)]),
        ("append", 1, [one(-1)]),
        ("append", 1, [one(3), one(1)]),
        ("append", 1, []),
        ("copy", 1, [one(-1, -1, -1, -1), one(0), one(1), one(2), one(3)]),
        ("resize", 1, [one(7, 1)]),
        ("resize", 1, [one(300)]),
        ("step", 0, []),
        ("commit", 9, []),
    ],
)
def test_records_that_no_recorder_writes_are_refused(tmp_path, verb, number, fields):
    with recording.record(tmp_path / "run") as recorder:
        KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
        BlockTables(GROUPS["full"], max_rows=2)
        recorder.write(verb, number, fields)
    with pytest.raises(ArgumentError):
        recording.replay(tmp_path / "run")


@pytest.mark.parametrize(
    "record",
    [
        ["nothing", 0],
        ["object", 0],
        ["object", 0, {"groups": [], "max_rows": 1, "num_blocks": 5}],
        ["object", 0, {"groups": [["full", 0, 1] + [0] * 11], "max_rows": 1, "num_blocks": 5}],
        ["end"],
    ],
)
def test_things_that_no_recorder_says_are_refused(tmp_path, record):
    with recording.record(tmp_path / "run") as recorder:
        KVCache(GROUPS["full"], num_blocks=40, max_rows=2)
        recorder.writer.say(record)
    with pytest.raises(ArgumentError):
        recording.replay(tmp_path / "run")


@pytest.mark.parametrize("at", range(11))
@pytest.mark.parametrize("number", [-1, 0, 2**63, 1.5, "1", None, True])
def test_shapes_that_nobody_plans_are_refused(tmp_path, at, number):
    if number == 0 and at in (1, 2, 8):  # lookahead, extra blocks and padding
        return
    shape = [64, 0, 0, 16, 16, 4, 4, 4, 0, 1, 1]
    how = {"watch": 1, "num_blocks": 9, "cp_rank": 0, "ignore": [], "kernel_blocks": False}
    for described in (how, {"num_blocks": 9, "max_rows": 1}):
        for given, taken in ((shape, True), ([*shape[:at], number, *shape[at + 1 :]], False)):
            with recording.record(tmp_path / "run") as recorder:
                recorder.writer.say(["object", 0, described | {"groups": [["full", 0, 1, *given]]}])
            if taken:
                recording.replay(tmp_path / "run")
            else:
                with pytest.raises(ArgumentError, match=r"describes no tables|no recorder writes"):
                    recording.replay(tmp_path / "run")


def test_prompts_of_groups_whose_blocks_hold_nothing_are_refused(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        shape = ["full", 0, 1] + [0] * 11
        recorder.writer.say(["object", 0, {"groups": [shape], "max_rows": 1, "num_blocks": 5, "prefix_cache": True}])
        recorder.write("lookup", 0, [one(4), one(0), None, None, None])
    with pytest.raises(ArgumentError, match="no recorder writes"):
        recording.calls(tmp_path / "run")


def foreign(steps, fault=None):
    """Tables of an engine of its own, watched: rows grow by a block now and then, and finish."""
    rng = np.random.default_rng(1)
    groups = [plan(max_model_len=64, block_size=4), plan(max_model_len=64, block_size=8)]
    watcher = sanitize.watch(groups, num_blocks=200, mode="count")
    tables = [np.zeros((5, 16), np.int32), np.zeros((5, 8), np.int32)]
    counts = np.zeros((2, 5), np.int64)
    used = iter(range(1, 200))
    for step in range(steps):
        for g, table in enumerate(tables):
            row = int(rng.integers(5))
            if counts[g, row] < table.shape[1]:
                table[row, counts[g, row]] = next(used)
                counts[g, row] += 1
        if step == fault:
            tables[1][3, 7] = 150
        watcher.step(tables, counts, copies=[table.copy() for table in tables], requests=[])
    return watcher, tables, counts


def test_foreign_tables_are_recorded_by_their_entries(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        watcher, tables, counts = foreign(40, fault=20)
    assert watcher.report.counts["L4"] == 20
    found = recording.replay(tmp_path / "run")
    assert (found.steps, found.differs, found.digest) == (40, "", recorder.digest)
    assert found.objects[0].report.counts == watcher.report.counts
    assert (tmp_path / "run").stat().st_size < 40 * 80, "only what changed is kept"
    stopped = recording.replay(tmp_path / "run", until_finding=True)
    assert (stopped.steps, stopped.finding.law, stopped.finding.row) == (21, "L4", 3)
    assert run(["view", str(tmp_path / "run")]) == 2, "a watcher has no pool to draw"
    last = recording.history(tmp_path / "run", 3, group=1)[-1]
    assert list(last.blocks) == tables[1][3, : counts[1, 3]].tolist()
    for row, group in ((5, 1), (0, 2)):
        with pytest.raises(ArgumentError, match=f"no row {row} of group {group}: object 0 has 2 groups of 5 rows"):
            recording.history(tmp_path / "run", row, group=group)
    with recording.record(tmp_path / "run", ring=4096):
        foreign(12)
    with pytest.raises(ArgumentError, match=r"object 0 is a watcher, .* ring"):
        recording.history(tmp_path / "run", 3)


@pytest.mark.parametrize("wrong", [{"verb": None}, {"copies": np.full((1, 16), 0.5)}, {"requests": ["a"]}])
def test_a_step_that_is_refused_is_in_no_recording(tmp_path, wrong):
    with recording.record(tmp_path / "run") as recorder:
        watcher = sanitize.watch([plan(max_model_len=64, block_size=4)], mode="count")
        table = np.zeros((1, 16), np.int32)
        with pytest.raises(ArgumentError, match="watch: "):
            watcher.step(table, [0], **wrong)
        watcher.step(table, [0], requests=np.array([7]), rows=(0,), lengths=[0], verb="next")
    found = recording.replay(tmp_path / "run")
    assert (found.steps, found.differs, found.digest) == (watcher.steps, "", recorder.digest)
    assert watcher.steps == 1


def test_a_table_that_no_replay_takes_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("blocktable.recording.watched.MOST", 100)
    with recording.record(tmp_path / "run"):
        watcher = sanitize.watch([plan(max_model_len=64, block_size=4)], mode="count")
        small, large = np.zeros((6, 16), np.int32), np.zeros((7, 16), np.int32)
        for tables, how in ((large, {}), (small, {"copies": large})):
            with pytest.raises(ArgumentError, match=r"of group 0 have 112 entries, a recording holds up to 100"):
                watcher.step(tables, [0], **how)
        assert watcher.step(small, [0], copies=small) == []
    assert recording.replay(tmp_path / "run").steps == watcher.steps == 1


def test_a_watched_fault_is_shrunk_to_a_test(tmp_path):
    with recording.record(tmp_path / "run"):
        foreign(12, fault=6)
    shrunk = recording.shrink(tmp_path / "run")
    assert len(shrunk.calls) == 1
    names: dict = {}
    exec(shrunk.test, names)  # noqa: S102 - what a user would paste
    with pytest.raises(blocktable.LawBroken, match="block 150"):
        names["test_it_keeps_the_laws"]()
