"""What other threads, processes and caches do beside a call of a recorded cache: nothing is lost, and nothing is refused for it."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from blocktable import ConcurrentUse, KVCache, plan, recording
from blocktable._journal import WAITING
from blocktable.recording.format import Record, read

LONG = 30  # seconds that nobody waits unless something hangs


def recorded_cache():
    return KVCache([plan(max_model_len=4096, block_size=4)], num_blocks=2200, max_rows=2)


def same(path, recorder, calls):
    found = recording.replay(path)
    return (found.calls, found.differs, found.digest, found.complete) == (calls, "", recorder.digest, True)


def usual(cache, row=0):
    cache.extend(np.array([row]), np.array([0, 1]), np.array([5]))


@contextmanager
def slowly_written(monkeypatch, of=None):
    """Have whoever writes what waits stop before it does; the flusher has begun, and goes on when told or left."""
    pending_type = type(of._pending)
    began, go_on, write = threading.Event(), threading.Event(), pending_type.write

    def slowly(self):
        if self is of._pending and threading.current_thread() is flusher:
            began.set()
            assert go_on.wait(LONG)
        write(self)

    monkeypatch.setattr(pending_type, "write", slowly)
    flusher = threading.Thread(target=of._pending.flush)
    flusher.start()
    assert began.wait(LONG)
    try:
        yield go_on
    finally:
        go_on.set()
        flusher.join()
        monkeypatch.setattr(pending_type, "write", write)


class Meanwhile(list):
    """Rows; while a cache reads them something else is done."""

    def __init__(self, rows, do):
        super().__init__(rows)
        self.do = do

    def __array__(self, dtype=None, copy=None):
        self.do()
        return np.array(list(self), dtype)


@pytest.mark.parametrize("named", [{}, {"headroom": 1}, {"partial": True}, {"salts": [None]}], ids=str)
def test_a_call_that_is_refused_beside_the_owners_loses_none_of_his(tmp_path, named):
    def intrude():
        with pytest.raises(ConcurrentUse):
            cache.extend([1], [0, 1], [5], **named)

    with recording.record(tmp_path / "run") as recorder:
        cache = recorded_cache()
        cache._pending._written = 10_000
        for _ in range(5):
            usual(cache)
            cache.extend(Meanwhile([0], intrude), [0, 1], [6])
            usual(cache)
            cache.commit()
        assert cache.lengths.tolist() == [15, 0]
    assert same(tmp_path / "run", recorder, 20)


def test_a_prompt_asked_again_with_more_rows_finds_its_room(tmp_path, monkeypatch):
    """The last prompt's tokens take no room while it is there; what is written to make room takes it away."""
    for room in range(50, 90):
        monkeypatch.setattr("blocktable.recording.pending.ROOM", room)
        with recording.record(tmp_path / "run") as recorder:
            cache = recorded_cache()
            cache._pending._written = 10_000
            text = np.arange(24)
            cache.lookup([0, 24], text)
            cache.lookup([0, 6, 12, 18, 24], text)
            cache.lookup([0, *range(1, 25)], text)
            usual(cache)
        assert same(tmp_path / "run", recorder, 4)


@pytest.mark.parametrize("size", [1, 60, 90])
def test_a_call_made_again_for_want_of_room_is_written_if_it_is_due(tmp_path, monkeypatch, size):
    """Beside the prompt that is kept there is room for one token, without it for 60, and never for 90."""
    monkeypatch.setattr("blocktable.recording.pending.ROOM", 100)
    with recording.record(tmp_path / "run") as recorder:
        cache = recorded_cache()
        cache.lookup([0, 24], np.arange(24))
        cache.extend([0], [0, size], np.arange(size))  # of the first calls each is due at once
        assert sum(isinstance(one, Record) for one in read(tmp_path / "run")) == 2
    assert same(tmp_path / "run", recorder, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_forked_while_another_thread_writes_can_use_its_cache(tmp_path, monkeypatch):
    with recording.record(tmp_path / "run") as recorder:
        cache = recorded_cache()
        cache._pending._written = 10_000
        for _ in range(20):
            usual(cache)
        with slowly_written(monkeypatch, cache) as go_on:
            threading.Timer(0.05, go_on.set).start()
            child = os.fork()
            if child == 0:
                status = 1
                signal.alarm(LONG)
                try:
                    usual(cache)
                    cache.commit()
                    cache.extend([1], [0, 1], [5], headroom=1)
                    recorder.close()
                    status = int(cache.lengths.tolist() != [21, 1])
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
        usual(cache)
    assert same(tmp_path / "run", recorder, 21)


def test_a_call_of_another_cache_delays_no_commit(tmp_path):
    """Whoever commits writes what waits of its own cache, whatever the others are doing."""

    def commit():
        thread = threading.Thread(target=commits)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive()

    def commits():
        for _ in range(40):
            usual(other)
            other.commit()

    with recording.record(tmp_path / "run") as recorder:
        cache, other = recorded_cache(), recorded_cache()
        cache._pending._written = 10_000
        for _ in range(3):
            usual(cache)
        assert cache._pending.journal[WAITING]
        cache.extend(Meanwhile([0], commit), [0, 1], [6])
    assert same(tmp_path / "run", recorder, 84)


@pytest.mark.compiled
def test_who_closes_beside_extends_and_commits_breaks_none(tmp_path):
    for turn in range(20):
        path = tmp_path / str(turn)
        recorder = recording.record(path)
        cache = recorded_cache()
        closer = threading.Timer(0.002, recorder.close)
        closer.start()
        done = 0
        while not recorder.closed or done % 50:
            cache.extend(np.array([0]), np.array([0, 1]), np.array([5]))
            cache.commit()
            done += 1
            if cache.lengths[0] == 4096:
                cache.free([0])
        closer.join()
        found = recording.replay(path)
        assert (found.differs, found.complete, found.digest) == ("", True, recorder.digest)
        assert cache._pending is None
        usual(cache, row=1)
        cache.commit()


def test_who_cannot_close_for_a_call_in_progress_is_told_and_may_try_again(tmp_path, monkeypatch):
    def close():
        with pytest.raises(ConcurrentUse, match=r"flush: another call .* in progress for 0\.01 s"):
            recorder.close()

    recorder = recording.record(tmp_path / "run")
    cache = recorded_cache()
    cache._pending._written = 10_000
    for _ in range(2):  # the first one is written at once
        usual(cache)
    monkeypatch.setattr("blocktable.recording.pending.PATIENCE", 0.01)
    cache.extend(Meanwhile([0], close), [0, 1], [6])
    assert not recorder.closed
    recorder.close()
    assert same(tmp_path / "run", recorder, 3)


def test_a_flush_goes_on_to_the_other_caches_where_one_is_in_a_call(tmp_path, monkeypatch):
    def flush():
        with pytest.raises(ConcurrentUse):
            recorder.flush()
        written.append([one.number for one in read(tmp_path / "run") if isinstance(one, Record)])

    written = []
    monkeypatch.setattr("blocktable.recording.pending.PATIENCE", 0.01)
    with recording.record(tmp_path / "run") as recorder:
        caches = [recorded_cache() for _ in range(3)]
        for cache in caches:
            cache._pending._written = 10_000
            for _ in range(2):
                usual(cache)
        caches[1].extend(Meanwhile([0], flush), [0, 1], [6])
    assert written == [[0, 1, 2, 0, 2]]
    assert same(tmp_path / "run", recorder, 7)


@pytest.mark.compiled
def test_a_call_waits_for_a_reader_however_often_it_comes(tmp_path):
    """A reader that takes the lock again and again is never taken for another call."""
    failed, over = [], threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with recording.record(tmp_path / "run") as recorder:
            cache = recorded_cache()

            def flush():
                try:
                    while not over.is_set():
                        cache._pending.flush()
                except ConcurrentUse as error:
                    failed.append(error)

            readers = [threading.Thread(target=flush) for _ in range(3)]
            for reader in readers:
                reader.start()
            for _ in range(3000):
                usual(cache)
                cache.commit()
            over.set()
            for reader in readers:
                reader.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
    assert same(tmp_path / "run", recorder, 6000)


def test_a_commit_refused_beside_a_call_ends_nothing(tmp_path):
    def intrude():
        with pytest.raises(ConcurrentUse):
            cache.commit()

    with recording.record(tmp_path / "run") as recorder:
        cache = recorded_cache()
        cache.admit([0], [0, 6], range(6))
        cache.fork(0, 1)
        cache.extend([1], [0, 1], [9])  # into a copy, which the next commit tells of
        cache.extend(Meanwhile([0], intrude), [0, 1], [7])
        assert cache.commit().copies.size
    assert same(tmp_path / "run", recorder, 5)


def test_an_exception_of_a_handler_is_the_one_that_is_raised(tmp_path):
    """At once, whatever other caches of the recording are doing."""

    class Off(BaseException):
        pass

    def fails(*_, **__):
        raise Off

    def interrupt():
        cache._plain_admit = fails
        began = time.monotonic()
        with pytest.raises(Off) as raised:
            cache.admit([1], [0, 2], [1, 2])
        assert time.monotonic() - began < LONG
        assert "ends here" in raised.value.__notes__[0]

    with recording.record(tmp_path / "run") as recorder:
        cache, other = recorded_cache(), recorded_cache()
        other._pending._written = cache._pending._written = 10_000
        for _ in range(2):
            usual(cache)
            usual(other)
        other.extend(Meanwhile([0], interrupt), [0, 1], [7])
        assert recorder.closed
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.complete) == ("", False)
    assert [one.number for one in read(tmp_path / "run") if isinstance(one, Record)] == [0, 1, 0], (
        "what waited of its own"
    )


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm")
def test_a_call_of_a_signal_handler_never_waits_for_what_it_interrupted(tmp_path, monkeypatch):
    """A metrics handler asks for stats while its thread writes what waits."""
    refused = []

    def handler(*_):
        with pytest.raises(ConcurrentUse) as error:
            cache.stats()
        refused.append(str(error.value))

    with recording.record(tmp_path / "run") as recorder:
        cache = recorded_cache()
        cache._pending._written = 10_000
        usual(cache)
        usual(cache)
        write = type(cache._pending).write

        def slowly(self):
            if not refused:
                os.kill(os.getpid(), signal.SIGUSR1)
            write(self)

        monkeypatch.setattr(type(cache._pending), "write", slowly)
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            recorder.flush()
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert same(tmp_path / "run", recorder, 2)
