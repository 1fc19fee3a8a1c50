"""What a recording is begun with, and where it is written: refused before anything changes, whatever is wrong."""

import os
import subprocess
import sys

import numpy as np
import pytest

from blocktable import ArgumentError, BlockTables, KVCache, OutOfBlocks, plan, recording


def cache_of(kind=KVCache, **how):
    return kind([plan(max_model_len=256, block_size=4)], num_blocks=200, max_rows=4, **how)


def tables_of():
    return BlockTables([plan(max_model_len=64, block_size=4)] * 2, max_rows=2, num_blocks=20)


def admitted_and_freed(cache):
    cache.admit([0], [0, 9], range(9))
    cache.free([0])


USED_CACHES = {
    "a prefix is kept": admitted_and_freed,
    "a row without tokens": lambda cache: cache.extend([0], [0, 0], []),
    "a fence was retired": lambda cache: cache.retire(3),
    "committed": lambda cache: cache.commit(),
}
USED_TABLES = {
    "a row was cleared": lambda tables: (tables.append([0], [0, 1], [5]), tables.clear([0])),
    "of the second group": lambda tables: tables.append([0], [0, 1], [5], group=1),
    "committed": lambda tables: tables.commit(),
}


@pytest.mark.parametrize(
    ("make", "use"),
    [(cache_of, use) for use in USED_CACHES.values()] + [(tables_of, use) for use in USED_TABLES.values()],
    ids=[*USED_CACHES, *(f"tables: {name}" for name in USED_TABLES)],
)
def test_what_has_been_used_is_refused_and_no_file_begun(tmp_path, make, use):
    one = make()
    use(one)
    (tmp_path / "run").write_bytes(b"precious")
    with pytest.raises(ArgumentError, match="cannot be recorded"):
        recording.record(tmp_path / "run", cache_of(), one)
    assert (tmp_path / "run").read_bytes() == b"precious"


def test_what_changed_nothing_is_no_use(tmp_path):
    cache = cache_of()
    cache.lookup([0, 9], range(9))
    cache.reset_prefix()
    with pytest.raises(ArgumentError):
        cache.extend([9], [0, 1], [5])
    with recording.record(tmp_path / "run", cache) as recorder:
        admitted_and_freed(cache)
        cache.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


def test_an_object_is_recorded_once_at_a_time(tmp_path):
    with recording.record(tmp_path / "one"):
        cache = cache_of()
        with pytest.raises(ArgumentError, match="is being recorded to"):
            recording.record(tmp_path / "two", cache)
        assert not (tmp_path / "two").exists()
    with recording.record(tmp_path / "two", cache) as recorder:
        admitted_and_freed(cache)
    found = recording.replay(tmp_path / "two")
    assert (found.calls, found.differs, found.digest) == (2, "", recorder.digest)
    empty = recording.replay(tmp_path / "one")
    assert (empty.calls, len(empty.objects), empty.complete) == (0, 1, True)


def test_a_closed_recording_takes_nothing_and_writes_into_no_other_file(tmp_path):
    recorder = recording.record(tmp_path / "run")
    recorder.close()
    with (tmp_path / "precious").open("w+b", buffering=0) as other:  # by the number that the recording's file had
        other.write(b"precious")
        with pytest.raises(ArgumentError, match="is closed"):
            recorder.add(cache_of())
        recorder.flush()
        recorder.close()
        assert os.fstat(other.fileno()).st_size == 8


def test_a_file_that_is_being_recorded_to_is_not_begun_anew(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        cache = cache_of()
        cache.commit()
        with pytest.raises(ArgumentError, match="another recording writes to"):
            recording.record(tmp_path / "run")
        program = f"from blocktable import recording; recording.record({str(tmp_path / 'run')!r})"
        other = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
        assert "another recording writes to" in other.stderr
        cache.extend([0], [0, 1], [5])
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.digest, found.complete) == (2, recorder.digest, True)
    recording.record(tmp_path / "run").close()  # once it is closed it is


def test_a_file_may_be_begun_anew_while_a_forked_process_lives(tmp_path):
    recorder = recording.record(tmp_path / "run")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    recorder.close()
    recording.record(tmp_path / "run").close()
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)


def test_what_cannot_be_mapped_is_refused_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere" / "run"):
        with pytest.raises(ArgumentError, match="cannot be written"):
            recording.record(path)


@pytest.mark.compiled
def test_a_file_that_can_grow_no_more_ends_the_recording_with_the_systems_error(tmp_path):
    path = tmp_path / "run"
    program = f"""
import resource, signal
import numpy as np
from blocktable import KVCache, plan, recording
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, -1))  # within the second megabyte
rng, recorder = np.random.default_rng(0), recording.record({str(path)!r})
cache = KVCache([plan(max_model_len=4096, block_size=4)], num_blocks=9000, max_rows=8)
try:
    for n in range(10**6):
        cache.extend(rng.permutation(8), np.arange(9), rng.integers(0, 9, 8))
        if n % 60 == 0:
            cache.free(np.arange(8))
except OSError as error:
    print(error.strerror, recorder.closed)
cache.extend([0], [0, 1], [1])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["File", "too", "large", "True"]
    found = recording.replay(path)
    assert found.calls > 10_000
    assert (found.differs, found.complete) == ("", False)


class InTwoGoes(KVCache):
    """A user's cache that serves its rows in two goes."""

    def extend(self, rows, indptr, tokens=None, **named):
        half = len(rows) // 2
        one = super().extend(rows[:half], indptr[: half + 1], tokens[:half], **named)
        other = super().extend(rows[half:], indptr[half:] - indptr[half], tokens[half:], **named)
        return np.concatenate([one, other], axis=1)


@pytest.mark.parametrize("room", [60, 100, 1 << 17])
def test_a_users_own_extend_is_done_once(tmp_path, monkeypatch, room):
    monkeypatch.setattr("blocktable.recording.pending.ROOM", room)
    monkeypatch.setattr("blocktable.recording.pending.WAIT", 60)
    with recording.record(tmp_path / "run") as recorder:
        cache = cache_of(InTwoGoes)
        assert cache._pending is not None, "its usual calls wait too"
        for step in range(190):
            cache.extend(np.arange(4), np.arange(5), np.full(4, step))
            assert cache.lengths.tolist() == [step + 1] * 4
            cache.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.digest) == (570, "", recorder.digest)
    assert cache._pending is None


LARGE = {
    "limit": lambda cache: cache.admit([1], [0, 9], range(9), limit=sys.maxsize),
    "limit of each": lambda cache: cache.admit([1], [0, 9], range(9), limit=np.array([2**63 - 1])),
    "limit beyond 64 bits": lambda cache: cache.admit([1], [0, 9], range(9), limit=2**70),
    "limit with a salt": lambda cache: cache.admit([1], [0, 9], range(9), [None], 2**70),
    "headroom": lambda cache: cache.admit([1], [0, 9], range(9), headroom=2**63 - 1),
    "headroom beyond 64 bits": lambda cache: cache.admit([1], [0, 9], range(9), headroom=2**70),
    "headroom with a salt": lambda cache: cache.admit([1], [0, 9], range(9), [None], headroom=2**70),
    "headroom of an extend": lambda cache: cache.extend([0], [0, 9], range(9), headroom=2**70),
}


@pytest.mark.parametrize("call", LARGE)
def test_numbers_as_large_as_they_come_mean_what_they_say(tmp_path, call):
    with recording.record(tmp_path / "run") as recorder:
        cache = cache_of()
        cache.admit([0], [0, 9], range(9))
        cache.commit()
        if "limit" in call:
            LARGE[call](cache)
            assert cache.lengths.tolist() == [9, 9, 0, 0]
        else:
            with pytest.raises(OutOfBlocks):
                LARGE[call](cache)
            assert cache.lengths.tolist() == [9, 0, 0, 0]
        cache.check()
        for token in range(12):
            cache.extend([1], [0, 1], [20 + token])
        cache.free([1])
        text = [*range(9)[: 9 * ("limit" in call)], *range(20, 32), 1]
        assert cache.lookup([0, len(text)], text).tolist() == [len(text) // 4 * 4 - 4 * (len(text) % 4 == 0)]
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


PRIME = 2**31 - 1
ALIKE = [
    (5, 5 + PRIME),
    (0, PRIME),
    (0, 2**31),
    (1, 2**31),
    (7, 7 + 2 * PRIME),
    (2**31, 2**32),
    (PRIME, 2 * PRIME),
    (2**31, 2**62),
]


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("pair", ALIKE)
def test_tokens_that_differ_are_told_apart_whatever_their_width(tmp_path, pair, sanitize):
    """They differ by what prefixes are numbered modulo: a recorder would count them for one, a sanitizer miss a wrong hit."""
    with recording.record(tmp_path / "run") as recorder:
        cache = cache_of(sanitize=sanitize)
        for first in pair:
            cache.admit([0], [0, 5], [first, 6, 7, 8, 1])
            cache.free([0])
        for other in (*pair, 9):
            hit = cache.lookup([0, 5], np.array([other, 6, 7, 8, 1]))
            assert hit.tolist() == [4 * (other in pair)]
        cache.reset_prefix()
        cache.extend([0], [0, 5], [pair[0], 6, 7, 8, 1])
        assert cache.lookup([0, 5], np.array([pair[1], 6, 7, 8, 1])).tolist() == [0]
        cache.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)
