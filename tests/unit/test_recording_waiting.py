"""Calls that wait to be written: whatever their arrays are, whoever flushes, and however alike their prompts."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from blocktable import ArgumentError, ConcurrentUse, Group, KVCache, OutOfBlocks, plan, recording
from blocktable.recording.format import Record, read


def read_only(values):
    array = np.array(values, np.int64)
    array.setflags(write=False)
    return array


FORMS = {
    "list": list,
    "tuple": tuple,
    "int16": lambda values: np.array(values, np.int16),
    "int32": lambda values: np.array(values, np.int32),
    "big-endian": lambda values: np.array(values, ">i8"),
    "every second": lambda values: np.repeat(np.array(values, np.int64), 2)[::2],
    "backwards": lambda values: np.array(values[::-1], np.int64)[::-1],
    "read-only": read_only,
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_recorded_whatever_their_arrays_are(tmp_path, form):
    digests = {}
    for name, made in ((form, FORMS[form]), ("int64", lambda values: np.array(values, np.int64))):
        with recording.record(tmp_path / name) as recorder:
            cache = KVCache([plan(max_model_len=256, block_size=4)], num_blocks=200, max_rows=4)
            for turn in range(20):  # so many that some wait
                text = [turn % 3, *range(1, 12)]
                cache.lookup(made([0, 12]), made(text))
                cache.admit(made([0]), made([0, 12]), made(text))
                for step in range(5):
                    cache.extend(made([0, 2]), made([0, 1, 3]), made([step, -1 if step == 3 else 7, 8]))
                    cache.commit()
                cache.extend(made([0, 2]), made([0, 1, 2]))
                cache.free(made([2, 0]))
        digests[name] = recorder.digest
        found = recording.replay(tmp_path / name, until_finding=True)
        assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)
    assert digests[form] == digests["int64"]
    shown = [[told(one) for one in read(tmp_path / name) if isinstance(one, Record)] for name in digests]
    assert shown[0] == shown[1]


def told(call):
    """Return what a record says of a call's own arguments: with which extend a unit is told depends on when it was written."""
    return call.verb, [None if one is None else one.tolist() for one in call.fields[:3]], call.check


def units_of(prompt, unit, known):
    """Return the number of each prefix of whole units, in the order in which they were first seen."""
    ends = range(unit, len(prompt) + 1, unit)
    return [known.setdefault(tuple(prompt[:end]), len(known)) for end in ends]


@pytest.mark.parametrize("size", [5, 64, *(pytest.param(n, marks=pytest.mark.compiled) for n in (1030, 2050))])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_like_the_last_ones_are_told_from_them(tmp_path, size, seed):
    """Of each prompt of each call the units are what a dictionary of all prefixes says."""
    rng, unit, known, expected = np.random.default_rng(seed), 4, {}, []
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=2 * size, block_size=unit)], num_blocks=4 + 2 * size // unit, max_rows=2)
        prompts = [rng.integers(0, 2, size)]
        for turn in range(120):
            change = rng.integers(8)
            if change == 1:  # one token, wherever it is
                prompts = [one.copy() for one in prompts]
                prompts[-1][rng.choice([0, -1, rng.integers(prompts[-1].size)])] ^= 1
            elif change == 2:  # the same tokens, cut elsewhere
                whole = np.concatenate(prompts)
                prompts = np.split(whole, np.sort(rng.integers(1, whole.size, len(prompts) - 1)))
                prompts = [one for one in prompts if one.size]
            elif change == 3:
                prompts = [rng.integers(0, 2, rng.integers(1, size + 1)) for _ in range(rng.integers(1, 3))]
            elif change == 4:
                recorder.flush()
            elif change == 5:
                prompts = [prompts[0][: max(1, prompts[0].size - 1)]]
            elif change == 6:  # another in between, by a call that does not wait
                other, seen = rng.integers(0, 2, prompts[0].size), len(known)
                cache.lookup([0, other.size], other, salts=[None])
                expected.append([n - seen for n in units_of(other.tolist(), unit, known)])
            starts, text, seen = np.cumsum([0, *map(len, prompts)]), np.concatenate(prompts), len(known)
            expected.append([n - seen for one in prompts for n in units_of(one.tolist(), unit, known)])
            if turn % 3:
                cache.lookup(starts, text)
                continue
            rows = np.arange(len(prompts))
            try:
                cache.admit(rows, starts, text, headroom=cache.stats()["free"] if turn % 2 else 0)
                cache.commit()
                cache.free(rows)
            except OutOfBlocks:
                pass
    told = [one.fields[1 + (one.verb == "admit")] for one in read(tmp_path / "run") if isinstance(one, Record)
            and one.verb in ("lookup", "admit")]  # fmt: skip
    assert [one.tolist() for one in told] == expected
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


@pytest.mark.compiled
def test_prompts_longer_than_what_may_wait(tmp_path):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, size) for size in (20_000, 90_000, 90_000, 30_000, 7)]
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=100_000, block_size=16)], num_blocks=7000, max_rows=2)
        for turn in range(60):
            text = prompts[turn * turn % 7 % 5]
            cache.lookup([0, text.size], text)
            cache.admit([0], [0, text.size], text)
            for _ in range(30):
                cache.extend([0], [0, 1], [5])
                cache.commit()
            cache.free([0])
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)
    assert found.calls == 60 * 63


@pytest.mark.compiled
def test_a_long_call_is_written_at_once_and_what_waits_stays_bounded(tmp_path):
    text = np.arange(300_000)
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=400_000, block_size=16)], num_blocks=25_001, max_rows=1)
        for done in range(1, 4):
            cache.lookup([0, text.size], text + done)
            assert sum(isinstance(one, Record) for one in read(tmp_path / "run")) == done
        for turn in range(4000):  # then as many calls may wait as before
            cache.lookup([0, 3000], text[turn : turn + 3000])
        written = sum(isinstance(one, Record) for one in read(tmp_path / "run"))
        assert 4003 - written <= (1 << 20) // 24_000
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


@pytest.mark.compiled
@pytest.mark.parametrize(("verb", "ends"), [("extend", False), ("lookup", False), ("admit", True)])
def test_what_cannot_be_noted_is_not_done(tmp_path, monkeypatch, verb, ends):
    """It ends the recording only where a call is done in several goes, of which some may have been."""
    text = np.arange(300_000)
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=400_000, block_size=16)], num_blocks=25_001, max_rows=2)
        cache.extend([0], [0, 1], [5])
        with monkeypatch.context() as short:
            short.setattr("blocktable.recording.pending.np.zeros", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                getattr(cache, verb)(*[[1]] * (verb != "lookup"), [0, text.size], text)
        assert recorder.closed == ends
        cache.extend([0], [0, 1], [6])
    assert cache.lengths.tolist() == [2, 0]
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.complete) == (2 - ends, "", not ends)


BAD = {
    "headroom is a word": lambda cache: cache.admit([0], [0, 3], [1, 2, 3], headroom="x"),
    "headroom is a list": lambda cache: cache.admit([0], [0, 3], [1, 2, 3], headroom=[1]),
    "no starts": lambda cache: cache.lookup([], []),
    "too many tokens": lambda cache: cache.lookup([0, 3], [1, 2, 3, 4]),
    "it begins behind": lambda cache: cache.lookup([1, 3], [1, 2, 3]),
    "no starts of nobody": lambda cache: cache.admit([], [], []),
    "no starts to extend": lambda cache: cache.extend([], []),
    "too many to extend": lambda cache: cache.extend([0], [0, 1], [1, 2]),
    "too few rows": lambda cache: cache.extend([0], [0, 1, 2], [1, 2]),
    "backwards": lambda cache: cache.lookup([0, 3, 2], [1, 2]),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_refused_is_refused_alike_and_replays(tmp_path, bad):
    def refusal(cache):
        with pytest.raises(ArgumentError) as caught:
            BAD[bad](cache)
        return str(caught.value)

    geometry = plan(max_model_len=64, block_size=4)
    plain = refusal(KVCache([geometry], num_blocks=40, max_rows=2))
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([geometry], num_blocks=40, max_rows=2)
        for _ in range(30):
            assert refusal(cache) == plain
            cache.extend([1], [0, 1], [7])
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


@pytest.mark.compiled
def test_who_closes_meanwhile_breaks_no_call(tmp_path):
    for turn in range(20):
        recorder = recording.record(tmp_path / str(turn))
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=40, max_rows=2)
        closer = threading.Timer(0.002, recorder.close)
        closer.start()
        while not recorder.closed:
            cache.lookup([0, 3], [1, 2, 3])
            cache.admit([0], [0, 3], [1, 2, 3])
            cache.free([0])
        closer.join()


@pytest.mark.compiled
def test_whoever_flushes_each_call_is_written_once(tmp_path):
    """Each cache has a thread of its own; one more flushes all of them as often as it can."""
    failed, done = [], threading.Event()
    with recording.record(tmp_path / "run") as recorder:
        geometry = plan(max_model_len=4096, block_size=4)
        caches = [KVCache([geometry], num_blocks=1100, max_rows=1) for _ in range(2)]

        def work(cache):
            try:
                for _ in range(3000):
                    cache.extend(np.array([0]), np.array([0, 1]), np.array([5]))
                    cache.commit()
            except Exception as error:  # noqa: BLE001 - told below
                failed.append(error)

        def flush():
            while not done.is_set():
                recorder.flush()

        workers = [threading.Thread(target=work, args=(cache,)) for cache in caches]
        flusher = threading.Thread(target=flush)
        for thread in (flusher, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        flusher.join()
    assert not failed
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.complete) == (12_000, "", True)
    assert found.digest == recorder.digest


@pytest.mark.parametrize("room", [60, 100, 333])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_fills_what_may_wait_each_call_is_written_once(tmp_path, monkeypatch, room, seed):
    """So little room that now a commit, now an extend, and now a prompt finds none, or is longer than all of it."""
    monkeypatch.setattr("blocktable.recording.pending.ROOM", room)
    monkeypatch.setattr("blocktable.recording.pending.WAIT", 60)
    rng, made = np.random.default_rng(seed), []
    groups = [
        Group(plan(max_model_len=128, block_size=4)),
        Group(plan(max_model_len=128, block_size=8), kind="window", window=12),
    ]
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache(groups, num_blocks=200, max_rows=4)
        cache.extend([0], [0, 6], np.arange(6))
        cache.commit()
        made += ["extend", "commit"]
        for _ in range(400):
            row, length = int(rng.integers(4)), int(rng.choice([1, 1, 1, 5, 40]))
            verb = rng.choice(["extend", "extend", "extend", "commit", "fork", "free", "admit", "truncate", "lookup"])
            used = bool(cache.lengths[row])
            text = rng.integers(0, 3, length)
            if verb == "extend" and cache.lengths[row] + length <= 128:
                usual = rng.integers(3)
                text = text.astype(rng.choice([np.int32, np.int64]))
                how = (
                    {} if usual else {"headroom": int(rng.integers(2)), "partial": False, "final": None, "salts": None}
                )
                cache.extend(np.array([row]), np.array([0, length]), None if usual == 2 else text, **how)
            elif verb == "commit":
                cache.commit()
            elif verb == "fork" and used and not cache.lengths[(row + 1) % 4]:
                cache.fork(row, (row + 1) % 4)
            elif verb == "free" and used:
                cache.free([row])
            elif verb == "admit" and not used:
                cache.admit([row], [0, length], text)
            elif verb == "truncate" and used and cache.final[row] == cache.lengths[row]:
                cache.truncate([row], cache.lengths[row : row + 1])
            elif verb == "lookup":
                cache.lookup([0, length], text)
            else:
                continue
            made.append(str(verb))
    told = [one.verb for one in read(tmp_path / "run") if isinstance(one, Record)]
    assert told == made
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


def test_a_call_for_which_there_is_room_by_a_hair_and_one_for_which_there_is_none(tmp_path, monkeypatch):
    for room in range(40, 100):
        monkeypatch.setattr("blocktable.recording.pending.ROOM", room)
        with recording.record(tmp_path / "run") as recorder:
            cache = KVCache([plan(max_model_len=256, block_size=4)], num_blocks=200, max_rows=1)
            cache._pending._written = 10_000  # so that as many may wait as ever
            cache.lookup([0, 9], np.arange(9))
            for size in (7, 1, 20, 2):
                cache.extend([0], [0, size], np.arange(size))
                cache.commit()
            cache.lookup([0, 30], np.arange(30))
            cache.extend([0], [0, 25], np.arange(25))
            cache.commit()
        assert cache._pending is None
        found = recording.replay(tmp_path / "run")
        assert (found.calls, found.differs, found.digest, found.complete) == (12, "", recorder.digest, True)


@pytest.mark.parametrize("wide", [False, True], ids=["narrow store", "wide store"])
def test_tokens_of_an_extend_are_told_alike_whatever_their_width(tmp_path, wide):
    """What was written by an extend answers prompts, and which of them are alike is all that a recording says of tokens."""
    large, units = 2**40 + 5, {}
    texts = [[5, 6, 7, 8], [5, 6, 7, 2**31 - 1], [9, 9, 9, 9]]
    if wide:
        texts += [[large, 6, 7, 8], [large + 2**32, 6, 7, 8], [2**31, 6, 7, 2**62 - 1]]
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=100, max_rows=1)
        for text in [*texts, *reversed(texts)]:
            fits = max(text) < 2**31
            for kind in (np.int64, *([np.int32] if fits else [])):
                cache.extend(np.array([0]), np.array([0, 5]), np.array([*text, -1], kind))
                cache.free([0])
                assert cache.lookup([0, 5], np.array([*text, 1])).tolist() == [4]
                units.setdefault(tuple(text), len(units))
    calls = [one for one in read(tmp_path / "run") if isinstance(one, Record)]
    assert [one.fields[2].tolist() for one in calls if one.verb == "extend"] == [[4]] * (len(calls) // 3)
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


def test_a_call_waits_for_who_writes_what_waits_and_refuses_another_call(tmp_path, monkeypatch):
    class Slow(list):
        """Rows that are read while another thread makes a call."""

        def __array__(self, dtype=None, copy=None):
            with pytest.raises(ConcurrentUse, match="extend"):
                cache.extend([1], [0, 1], [5])
            return np.array([0], dtype)

    began, go_on = threading.Event(), threading.Event()
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=40, max_rows=2)
        for _ in range(64):
            cache.lookup([0, 3], [1, 2, 3])  # so that some may wait
        cache.extend(Slow([0]), [0, 1], [5])
        pending = cache._pending
        write = type(pending).write

        def slowly(self):
            began.set()
            assert go_on.wait(60)
            write(self)

        monkeypatch.setattr(type(pending), "write", slowly)
        flusher = threading.Thread(target=recorder.flush)
        flusher.start()
        assert began.wait(60)
        threading.Timer(0.05, go_on.set).start()
        cache.extend([1], [0, 1], [6])
        assert go_on.is_set()
        assert cache.stats()["held"] == 2
        flusher.join()
        monkeypatch.undo()
        monkeypatch.setattr("blocktable.recording.pending.PATIENCE", 0.01)
        with cache.tables._sole("view"), pytest.raises(ConcurrentUse, match="flush"):
            cache._pending.flush()
        cache.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.complete) == (67, "", True)


def test_what_a_closed_recording_leaves_is_a_cache_that_notes_nothing(tmp_path):
    with recording.record(tmp_path / "one"):
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=40, max_rows=2)
        cache.extend([0], [0, 1], [5])
        assert cache._journal.size
    assert not cache._journal.size
    cache.extend([0], [0, 1], [5], headroom=1)
    cache.extend([0], [0, 1], [5])
    cache.commit()
    assert not cache._journal.size
