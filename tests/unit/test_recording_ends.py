"""How recordings end, at any place and for any reason: nothing stays locked or open, and nobody else's file is touched."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from blocktable import ArgumentError, KVCache, plan, recording
from blocktable.recording.format import Record, read


def cache_of(**how):
    return KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4, **how)


def same(path, recorder, calls):
    found = recording.replay(path)
    return (found.calls, found.differs, found.digest, found.complete) == (calls, "", recorder.digest, True)


def open_files():
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])


linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")


def test_what_is_constructed_as_another_thread_closes_writes_nowhere(tmp_path):
    recorder = recording.record(tmp_path / "run")
    made = []
    recorder.lock.acquire()  # as close does
    maker = threading.Thread(target=lambda: made.append(cache_of()))
    maker.start()
    recorder.end()
    with (tmp_path / "precious").open("w+b", buffering=0) as other:  # by the number that the recording's file had
        other.write(b"precious")
        recorder.lock.release()
        maker.join(30)
        assert (tmp_path / "precious").read_bytes() == b"precious"
    made[0].admit([0], [0, 3], [1, 2, 3])
    made[0].commit()


@linux
@pytest.mark.parametrize("size", [0, 1000])
def test_a_recording_that_cannot_begin_leaves_no_file_open(tmp_path, size):
    before, soft = open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, soft[1]))
    try:
        for _ in range(5):
            with pytest.raises(ArgumentError, match="cannot be written: File too large"):
                recording.record(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        signal.signal(signal.SIGXFSZ, handler)
    assert open_files() == before
    recording.record(tmp_path / "run").close()


BAD = {
    "an object twice": lambda path, cache: recording.record(path, cache, cache),
    "its tables": lambda path, cache: recording.record(path, cache.tables),
    "half a ring": lambda path, _: recording.record(path, ring=5000.5),
    "a ring of text": lambda path, _: recording.record(path, ring="5000"),
    "a ring of no number": lambda path, _: recording.record(path, ring=float("nan")),
    "a ring of True": lambda path, _: recording.record(path, ring=True),
    "a ring too small": lambda path, _: recording.record(path, ring=4095),
    "no path": lambda *_: recording.record(None),
    "a number": lambda *_: recording.record(7),
    "bytes": lambda path, _: recording.record(os.fsencode(path)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_leaves_the_file_and_the_objects_as_they_were(tmp_path, name):
    (tmp_path / "run").write_bytes(b"precious")
    cache = cache_of()
    with pytest.raises(ArgumentError):
        BAD[name](tmp_path / "run", cache)
    assert (tmp_path / "run").read_bytes() == b"precious"
    with recording.record(tmp_path / "run", cache) as recorder:
        cache.commit()
    assert same(tmp_path / "run", recorder, 1)


def test_a_file_put_aside_before_it_is_locked_is_not_taken(tmp_path, monkeypatch):
    """A ring that turns between another's opening of its file and the lock leaves its older half to nobody."""
    ring = recording.record(tmp_path / "run", ring=4096)
    cache = cache_of()
    module = recording.record.__globals__["Writer"].__init__.__globals__
    real, taken = module["lock"], []

    def late(file, path):
        if not taken:
            taken.append(path)
            ring.writer.turn()
        real(file, path)

    monkeypatch.setitem(module, "lock", late)
    with pytest.raises(ArgumentError, match="another recording writes to"):
        recording.record(tmp_path / "run")
    assert taken
    cache.commit()
    ring.close()
    assert Path(f"{tmp_path / 'run'}.old").stat().st_size > 8, "it was not emptied"


def test_an_error_while_a_ring_turns_is_the_systems_own(tmp_path):
    Path(f"{tmp_path / 'run'}.old").mkdir()
    recorder = recording.record(tmp_path / "run", ring=4096)
    cache = cache_of()
    with pytest.raises(IsADirectoryError):
        many_commits(cache)
    assert recorder.closed
    recorder.close()
    cache.commit()


def many_commits(cache):
    for _ in range(400):
        cache.admit([0], [0, 6], range(6))
        cache.commit()
        cache.free([0])


def ring_of(path, first, steps=400):
    with recording.record(path, ring=8192):
        cache = cache_of()
        for _ in range(steps):
            cache.admit([0], [0, 6], range(first, first + 6))
            cache.commit()
            cache.free([0])
            cache.commit()
        cache.admit([1], [0, 6], range(6))
        cache.commit()
    return cache


def test_an_older_half_is_of_its_own_ring_alone(tmp_path):
    path, old = tmp_path / "run", Path(f"{tmp_path / 'run'}.old")
    ring_of(path, 0)
    assert old.exists()
    left = old.read_bytes()
    with recording.record(path) as recorder:  # today's is no ring
        cache_of().commit()
    assert same(path, recorder, 1)
    assert old.read_bytes() == left
    cache = ring_of(path, 50, steps=3)  # a new ring, of which there is no older half yet
    assert old.read_bytes() == left
    assert recording.history(path, 1)[-1].blocks == tuple(cache.tables[0].array[1, :2].tolist())
    with recording.record(old) as recorder:  # another recording has that name
        cache = cache_of()
        cache.commit()
        with pytest.raises(ArgumentError, match="another recording writes to"):
            recording.record(path, ring=4096)
        cache.extend([0], [0, 1], [1])
    assert same(old, recorder, 2)
    assert recording.history(path, 1), "which is no half of it"


def test_a_ring_killed_between_its_halves_has_the_older_one(tmp_path):
    path, old = tmp_path / "run", Path(f"{tmp_path / 'run'}.old")
    cache = ring_of(path, 0)
    path.replace(old)
    blocks = tuple(cache.tables[0].array[1, :2].tolist())
    for newer in (None, b"", b"BTr2", b"BTr2" + bytes(4096)):
        if newer is not None:
            path.write_bytes(newer)
        assert recording.history(path, 1)[-1].blocks == blocks


@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
def test_a_sanitized_ring_turns_in_silence(tmp_path, sanitize):
    with recording.record(tmp_path / "run", ring=4096):
        cache = cache_of(sanitize=sanitize)
        for n in range(200):
            cache.admit([0], [0, 6], range(n, n + 6))
            cache.commit()
            cache.free([0])
            cache.commit()
    assert any(isinstance(one, Record) for one in read(tmp_path / "run"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_program_that_forks_and_ends_leaves_the_recording_whole(tmp_path):
    program = f"""
import os
from blocktable import KVCache, plan, recording
recorder = recording.record({str(tmp_path / "run")!r})
cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
cache.commit()
if os.fork() == 0:
    cache.commit()
    recorder.close()
    recorder.close()
    raise SystemExit
os.wait()
cache.commit()
recorder.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.complete) == (2, "", True)
