"""Refused calls: a replay makes those again that it can make as they were, and is never led to make a lawful one instead."""

from decimal import Decimal
from enum import IntEnum

import numpy as np
import pytest

from blocktable import ArgumentError, BlockTableError, BlockTables, KVCache, OutOfBlocks, plan, recording
from blocktable._journal import OUT_OF_BLOCKS
from blocktable.recording.format import refusal_of

TEXT = np.arange(6)
LARGE = 2**70
CACHE = {
    "a token below -1, looked up": lambda c: c.lookup([0, 2], [5, -2]),
    "a token below -1, admitted": lambda c: c.admit([1], [0, 2], [5, -2]),
    "a token below -1, appended": lambda c: c.extend([0], [0, 2], [5, -2]),
    "no tokens to look up": lambda c: c.lookup([0, 2], None),
    "no tokens to admit": lambda c: c.admit([1], [0, 2], None),
    "no tokens to match": lambda c: c.match([1], [0, 2], None),
    "headroom of no integer": lambda c: c.admit([1], [0, 6], TEXT, headroom=Decimal(0)),
    "headroom of an array": lambda c: c.extend([0], [0, 1], [5], headroom=np.array([0])),
    "a salt of text": lambda c: c.admit([1], [0, 6], TEXT, salts=["x"]),
    "too many salts": lambda c: c.extend([0], [0, 1], [5], salts=[b"tenant", None]),
    "salts in one": lambda c: c.lookup([0, 6], TEXT, salts=b"t"),
    "an empty salt in place of another": lambda c: c.extend([0], [0, 1], [5], salts=[b""]),
    "fork into text": lambda c: c.fork(0, "1"),
    "fork into True": lambda c: c.fork(0, True),
    "fork of none": lambda c: c.fork(None, 1),
    "fork of a large row": lambda c: c.fork(LARGE, 1),
    "retire nothing": lambda c: c.retire(None),
    "retire one and a half": lambda c: c.retire(1.5),
    "retire a large fence": lambda c: c.retire(LARGE),
    "a fence of True": lambda c: c.free([0], fence=True),
    "a fence of one and a half": lambda c: c.free([0], fence=1.5),
    "a large fence": lambda c: c.free([0], fence=LARGE),
    "a fence just too large": lambda c: c.free([0], fence=2**63),
    "a fence of False": lambda c: c.truncate([0], [3], False),
    "a large fence to truncate": lambda c: c.truncate([0], [3], LARGE),
    "headroom of True": lambda c: c.admit([1], [0, 6], TEXT, headroom="2"),
    "headroom of two and nothing": lambda c: c.admit([1], [0, 6], TEXT, headroom=2.0),
    "headroom of none": lambda c: c.admit([1], [0, 6], TEXT, headroom=None),
    "headroom far below": lambda c: c.admit([1], [0, 6], TEXT, headroom=-LARGE),
    "headroom of text": lambda c: c.extend([0], [0, 1], [5], headroom="2"),
    "headroom of no extend": lambda c: c.extend([0], [0, 1], [5], headroom=None),
    "partial of none": lambda c: c.extend([0], [0, 1], [5], partial=None),
    "partial of text": lambda c: c.extend([0], [0, 1], [5], partial="yes"),
    "a limit of True": lambda c: c.admit([1], [0, 6], TEXT, limit=True),
    "a limit of three and nothing": lambda c: c.admit([1], [0, 6], TEXT, limit=3.0),
    "a limit of NumPy's": lambda c: c.admit([1], [0, 6], TEXT, limit=np.float64(2)),
    "a limit far below": lambda c: c.admit([1], [0, 6], TEXT, limit=-LARGE),
    "a limit below": lambda c: c.admit([1], [0, 6], TEXT, limit=-2),
    "lengths without tokens": lambda c: c.confirm([0], [6], [0, 1]),
    "lengths of a half": lambda c: c.confirm([0], [6.5]),
    "rows of True": lambda c: c.free([True]),
    "rows of a half": lambda c: c.extend([0.5], [0, 1], [5]),
    "a row that is not there": lambda c: c.extend([99], [0, 1], [5]),
    "a row twice": lambda c: c.extend([0, 0], [0, 1, 2], [5, 6]),
}
TABLES = {
    "ids of a half": lambda t: t.append([0], [0, 1], [2.0]),
    "an id too large": lambda t: t.append([0], [0, 1], [LARGE]),
    "rows of True": lambda t: t.clear([True]),
    "a group of False": lambda t: t.append([0], [0, 1], [5], group=False),
    "a large group": lambda t: t.append([0], [0, 1], [5], group=LARGE),
    "a large row": lambda t: t.move(LARGE, 0),
    "a number for rows": lambda t: t.move(1, 0),
    "one array for two groups": lambda t: t.append([0], ([0, 1],), ([5],), group=None),
    "one number beside an array": lambda t: t.truncate([0], [[1], 0], None),
    "one number beside arrays": lambda t: t.assign([0], [[0, 0], 0], ([], []), None),
    "an id of another group": lambda t: t.append([0], [0, 1], [99]),
}


def made(name, calls, tables, caches):
    if name in TABLES and calls is TABLES:
        one = tables()
        one.append([0], [[0, 2], [0, 1]], [[7, 8], [9]], group=None)  # lists do as well as tuples
    else:
        one = caches()
        one.extend([0], [0, 5], [1, 2, 3, 4, 5], salts=[b"tenant"])
    return one


@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
@pytest.mark.parametrize(("calls", "name"), [(CACHE, name) for name in CACHE] + [(TABLES, name) for name in TABLES])
def test_what_is_refused_is_refused_the_same_recorded_or_not_and_replayed(tmp_path, calls, name, sanitize):
    def cache():
        return KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4, sanitize=sanitize)

    def tables():
        return BlockTables([plan(max_model_len=64, block_size=4)] * 2, max_rows=2, num_blocks=20, sanitize=sanitize)

    said = []
    with pytest.raises(BlockTableError) as refused:
        calls[name](made(name, calls, tables, cache))
    said.append(str(refused.value))
    assert isinstance(refused.value, ArgumentError)
    with recording.record(tmp_path / "run") as recorder:
        one = made(name, calls, tables, cache)
        with pytest.raises(BlockTableError) as refused:
            calls[name](one)
        said.append(str(refused.value))
        one.commit()
    assert said[0] == said[1]
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert (found.differs, found.finding, found.digest, found.complete) == ("", None, recorder.digest, True)


MISTYPED = {
    "no rows": lambda c: c.free(),
    "no tokens": lambda c: c.admit([0], [0, 3]),
    "another name": lambda c: c.free([0], fences=3),
    "another name of a lookup": lambda c: c.lookup([0, 3], [1, 2, 3], salt=None),
    "another name of an extend": lambda c: c.extend([0], [0, 1], [5], foo=1),
    "too many": lambda c: c.retire(1, 2),
    "tables: no rows": lambda c: c.clear(),
    "tables: no ids": lambda c: c.append([0]),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_a_call_that_nobody_can_make_ends_no_recording(tmp_path, name):
    with recording.record(tmp_path / "run") as recorder:
        geometry = plan(max_model_len=64, block_size=4)
        one = (
            BlockTables([geometry], max_rows=2) if "tables" in name else KVCache([geometry], num_blocks=17, max_rows=2)
        )
        with pytest.raises(TypeError):
            MISTYPED[name](one)
        one.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.digest, found.complete) == (1, "", recorder.digest, True)


def test_numpys_numbers_do_for_pythons(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
        cache.admit([0], [0, 6], TEXT, limit=np.int32(4), headroom=np.uint64(1))
        cache.fork(np.int32(0), np.uint64(1))
        cache.free([0], fence=np.int16(3))
        cache.retire(np.uint8(3))
        cache.commit()
    found = recording.replay(tmp_path / "run")
    assert (found.calls, found.differs, found.digest, found.complete) == (5, "", recorder.digest, True)


def test_a_loop_tells_a_refusal_as_the_error_does():
    """The loop of admit notes that it is short of blocks, in words that are written nowhere else."""
    cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=4)
    cache.admit([0], [0, 40], np.arange(40))
    with pytest.raises(OutOfBlocks) as refused:
        cache.admit([1], [0, 40], np.arange(40, 80))
    assert refusal_of(refused.value).tolist() == OUT_OF_BLOCKS.tolist()


class Which(IntEnum):
    FULL = 0


def test_a_call_left_out_numbers_no_units(tmp_path):
    with recording.record(tmp_path / "run") as recorder:
        cache = KVCache([plan(max_model_len=64, block_size=4)], num_blocks=33, max_rows=4)
        cache.admit([0], [0, 8], [1, 1, 1, 1, 2, 2, 2, 2])
        cache.free([0])
        for named in ({"headroom": -1.5}, {"limit": 2.5}, {"final": [1.5]}, {"final": [9]}, {"salts": ["x"]}):
            with pytest.raises(ArgumentError):
                cache.admit([1], [0, 8], [3, 3, 3, 3, 4, 4, 4, 4], **named)
        assert cache.lookup([0, 5, 10], [5, 5, 5, 5, 6, 1, 1, 1, 1, 6]).tolist() == [0, 4]
    found = recording.replay(tmp_path / "run")
    assert (found.differs, found.digest, found.complete) == ("", recorder.digest, True)


@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
def test_an_argument_that_shows_what_changes_is_what_it_was(tmp_path, sanitize):
    geometry = plan(max_model_len=64, block_size=4)
    with recording.record(tmp_path / "run") as recorder:
        tables = BlockTables([geometry], max_rows=4, num_blocks=32, sanitize=sanitize)
        tables.append([0], [0, 3], [3, 7, 9])
        tables.commit()
        tables.assign([0], [0, 2], tables[0].array[0, 1:3])
        tables.append([0], [0, 1], [3], Which.FULL)
        tables.commit()
        cache = KVCache([geometry], num_blocks=33, max_rows=4, sanitize=sanitize)
        cache.admit([0, 1, 2, 3], [0, 6, 12, 18, 24], np.arange(24))
        cache.extend([0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4], final=cache.lengths)
        assert cache.final.tolist() == [6] * 4
        cache.confirm([0, 1, 2, 3], cache.lengths)
        cache.truncate([0, 1, 2, 3], cache.lengths)
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert (found.differs, found.finding, found.digest) == ("", None, recorder.digest)
