"""Exceptions of signal handlers (Ctrl-C, a timeout) fall into a call wherever Python looks for signals.

It does as a function begins and as a builtin returns; a profiler that raises at the n-th of these stands for it, for every n.
"""

import gc
import sys
from itertools import count

import numpy as np
import pytest

from blocktable import BlockTables, DeltaError, Group, KVCache, Replica, plan, recording
from blocktable._journal import MOST
from blocktable._sanitized import RECORDERS

pytestmark = pytest.mark.compiled  # as plain Python the loops themselves can be interrupted


class Off(BaseException):
    """What a signal handler raises."""


def interrupted(call, n):
    """Make a call that is interrupted at the n-th place; say whether there was one."""
    left = n

    def profile(_frame, event, arg):
        nonlocal left
        if event not in ("call", "c_return") or arg is sys.setprofile:
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise Off

    gc.disable()  # what others do as it collects is no place of the call, and an exception there goes to nobody
    sys.setprofile(profile)
    try:
        call()
    except Off:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return left < 0


TEXT = np.arange(21)
CALLS = {
    "lookup": lambda cache: cache.lookup([0, 21], TEXT),
    "match": lambda cache: cache.match([3], [0, 21], TEXT),
    "admit": lambda cache: cache.admit([3], [0, 21], TEXT),
    "admit several": lambda cache: cache.admit([3, 4], [0, 21, 42], [*TEXT, *TEXT], headroom=1),
    "extend": lambda cache: cache.extend(np.array([0]), np.array([0, 9]), np.arange(9)),
    "extend by wide tokens": lambda cache: cache.extend([0], [0, 2], [2**40, 1]),
    "extend with headroom": lambda cache: cache.extend([0, 3], [0, 1, 2], [5, 6], headroom=1),
    "extend a shared block": lambda cache: cache.extend([2], [0, 1], [5]),
    "confirm": lambda cache: cache.confirm([1], [cache.lengths[1]], [0, 2], [7, 8]),
    "truncate": lambda cache: cache.truncate([0], [9]),
    "free": lambda cache: cache.free([0]),
    "free under a fence": lambda cache: cache.free([0], fence=3),
    "retire": lambda cache: cache.retire(1),
    "fork": lambda cache: cache.fork(0, 3),
    "reset_prefix": lambda cache: cache.reset_prefix(),
    "commit": lambda cache: cache.commit(),
    "snapshot": lambda cache: cache.snapshot(),
    "stats": lambda cache: cache.stats(),
    "check": lambda cache: cache.check(),
}


def prepared():
    geometry = plan(max_model_len=64, block_size=4)
    cache = KVCache(
        [Group(geometry), Group(geometry, kind="window", window=9)], num_blocks=120, max_rows=6, sanitize=False
    )
    cache.admit([0, 1, 5], [0, 21, 36, 40], [*TEXT, *range(5, 20), 9, 9, 9, 9])
    cache.extend([1], [0, 2])
    cache.free([5], fence=1)
    cache.fork(0, 2)
    cache.fork(0, 5)
    cache.extend([5], [0, 1], [5])  # into a copy
    return cache


@pytest.mark.parametrize("verb", CALLS)
def test_a_cache_is_whole_wherever_a_call_is_interrupted(verb):
    for n in count():
        cache = prepared()
        replica = Replica.from_snapshot(cache.snapshot())
        if verb != "commit":
            replica.apply(cache.commit())
        if not interrupted(lambda: CALLS[verb](cache), n):  # noqa: B023 - called at once
            break
        cache.check()
        cache.extend([0 if cache.lengths[0] else 1], [0, 1], [3])
        try:
            replica.apply(cache.commit())
        except DeltaError:  # it says that one is missing
            replica = Replica.from_snapshot(cache.snapshot())
        for mine, theirs in zip(cache.tables.tables, replica.tables, strict=True):
            assert mine.array.tolist() == theirs.array.tolist()
        cache.free(np.flatnonzero(cache.lengths))
        cache.retire(9)
        cache.check()
    assert n > 3, "there were places to interrupt it at"


TABLE_CALLS = {
    "append": lambda tables: tables.append([0], [0, 2], [7, 8]),
    "append to all": lambda tables: tables.append([0], ([0, 2], [0, 1]), ([7, 8], [9]), group=None),
    "assign": lambda tables: tables.assign([0], [0, 2], [7, 8]),
    "truncate": lambda tables: tables.truncate([0], [1]),
    "clear": lambda tables: tables.clear([0]),
    "move": lambda tables: tables.move([0], [2]),
    "swap": lambda tables: tables.swap([0], [1]),
    "commit": lambda tables: tables.commit(),
}


def two_rows():
    tables = BlockTables([plan(max_model_len=64, block_size=4)] * 2, max_rows=3, num_blocks=20, sanitize=False)
    tables.append([0, 1], ([0, 3, 5], [0, 3, 4]), ([1, 2, 3, 4, 5], [6, 7, 8, 9]), group=None)
    return tables


def held(tables):
    return [table.array.tolist() for table in tables.tables]


@pytest.mark.parametrize("verb", TABLE_CALLS)
def test_tables_are_whole_wherever_a_call_is_interrupted(verb):
    for n in count():
        tables, whole = two_rows(), two_rows()
        before = held(tables)
        TABLE_CALLS[verb](whole)
        if not interrupted(lambda: TABLE_CALLS[verb](tables), n):  # noqa: B023
            break
        tables.check()
        assert held(tables) in (before, held(whole)), "all or nothing"
        tables.append([1], [0, 1], [9])
        delta = tables.commit()
        replica = Replica.from_snapshot(tables.snapshot())
        assert replica.tables[0].array.tolist() == tables[0].array.tolist()
        assert delta.seq == replica.seq
    assert n > 3


TOLD_IN_THE_LOOP = (
    "lookup",
    "free",
    "extend",
    "extend by wide tokens",
    "extend a shared block",
    "commit without copies",
)


@pytest.mark.parametrize("verb", [*CALLS, "commit without copies"])
def test_a_recording_tells_what_was_done_or_ends(tmp_path, verb):
    whole = 0
    for n in count():
        with recording.record(tmp_path / "run") as recorder:
            cache = prepared()
            if verb in TOLD_IN_THE_LOOP:
                cache._pending.journal[MOST] = 256  # so that calls wait
                cache._pending.until = float("inf")
            if verb == "commit without copies":
                cache.commit()
                cache.extend([1], [0, 1], [7])
            reached = interrupted(lambda: CALLS[verb.removesuffix(" without copies")](cache), n)  # noqa: B023
            whole += not recorder.closed
            cache.check()
            cache.extend([1], [0, 1], [3])
            cache.commit()
            cache.free([1])
        found = recording.replay(tmp_path / "run")
        assert found.differs == ""
        if not reached:
            break
    assert found.complete
    assert whole, "an exception before anything was done ends nothing"
    if verb in TOLD_IN_THE_LOOP:
        assert whole == n + 1, "whether it was done is told in the loop that does it"


def test_wherever_closing_is_interrupted_it_can_be_done_again(tmp_path):
    for n in count():
        recorder = recording.record(tmp_path / "run")
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
        cache.admit([0], [0, 6], range(6))
        reached = interrupted(recorder.close, n)
        recorder.close()
        assert cache._pending is None
        recording.record(tmp_path / "run").close()  # it is not locked
        cache.extend([0], [0, 1], [3])
        if not reached:
            break
    assert n > 10


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_wherever_its_begin_is_interrupted_nothing_is_left(tmp_path):
    for n in count():
        cache, begun = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4), []
        reached = interrupted(lambda: begun.append(recording.record(tmp_path / "run", cache)), n)  # noqa: B023
        for recorder in [*begun, *RECORDERS]:
            recorder.close()
        with recording.record(tmp_path / "run", cache) as recorder:
            cache.admit([0], [0, 6], range(6))
        found = recording.replay(tmp_path / "run")
        assert (found.calls, found.differs, found.digest, found.complete) == (1, "", recorder.digest, True)
        if not reached:
            break
    assert n > 10
