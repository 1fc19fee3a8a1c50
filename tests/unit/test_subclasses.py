"""Caches and tables of a user's own, sanitized and recorded: what their verbs call is seen as it is done, whatever the order."""

from typing import ClassVar

import numpy as np
import pytest

from blocktable import BlockTables, KVCache, plan, recording
from blocktable.errors import LawBroken

GEOMETRY = plan(max_model_len=64, block_size=4)


class Engine(KVCache):
    """It commits by itself, has a row for padding from the start, and serves rows one by one."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.admit([3], [0, 1], [7])

    def free(self, rows, fence=None):
        super().free(rows, fence)
        self.commit()

    def admit(self, rows, indptr, tokens, *args, **named):
        found = self.lookup(indptr, tokens)
        cached, slots = super().admit(rows, indptr, tokens, *args, **named)
        assert (found <= cached).all(), "a prompt may also begin like one before it"
        self.commit()
        return cached, slots

    def extend(self, rows, indptr, tokens=None):
        starts = np.asarray(indptr)
        parts = [
            super(Engine, self).extend([row], [0, int(starts[i + 1] - starts[i])], tokens[starts[i] : starts[i + 1]])
            for i, row in enumerate(rows)
        ]
        return np.concatenate(parts, axis=1)


class Tables(BlockTables):
    """They commit as rows go."""

    def clear(self, rows):
        super().clear(rows)
        self.commit()


class Counted:
    """A part of a user's class that is no cache."""

    frees = 0

    def free(self, rows, fence=None):
        self.frees += len(rows)
        super().free(rows, fence)


class CountedEngine(Counted, Engine):
    pass


class Late(Counted, KVCache):
    pass


def use(cls, sanitize):
    cache = cls([GEOMETRY], num_blocks=17, max_rows=4, sanitize=sanitize)
    for n in range(12):
        cache.admit([0, 1], [0, 6, 15], [*range(6), *range(n, n + 9)])
        cache.extend([0, 1], [0, 2, 3], [1, 2, 3])
        cache.commit()
        cache.free([1, 0])
    return cache


@pytest.mark.parametrize("record", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
@pytest.mark.parametrize("cls", [Engine, CountedEngine])
def test_a_cache_whose_verbs_call_others(tmp_path, cls, sanitize, record):
    plain = use(cls, sanitize=False)
    if not record:
        cache = use(cls, sanitize)
    else:
        with recording.record(tmp_path / "run") as recorder:
            cache = use(cls, sanitize)
        found = recording.replay(tmp_path / "run", until_finding=True)
        assert (found.differs, found.finding, found.digest, found.complete) == ("", None, recorder.digest, True)
    assert isinstance(cache, cls)
    assert type(cache).__name__ == cls.__name__
    assert cache.stats() == plain.stats()
    assert getattr(cache, "frees", 24) == 24


@pytest.mark.parametrize("record", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
def test_tables_whose_verbs_call_others(tmp_path, sanitize, record):
    def run():
        tables = Tables([GEOMETRY], max_rows=2, num_blocks=20, sanitize=sanitize)
        for _ in range(3):
            tables.append([0, 1], [0, 2, 3], [1, 2, 3])
            tables.clear([0, 1])
        return tables

    if not record:
        assert run().seq == 3
        return
    with recording.record(tmp_path / "run") as recorder:
        assert run().seq == 3
    found = recording.replay(tmp_path / "run", until_finding=True)
    assert (found.calls, found.differs, found.finding, found.digest) == (9, "", None, recorder.digest)


def test_a_fault_in_what_a_verb_calls_is_found():
    cache = Engine([GEOMETRY], num_blocks=17, max_rows=4, sanitize=True)
    cache.admit([0], [0, 6], range(6))
    cache.tables._entries[0] = 9
    with pytest.raises(LawBroken):
        cache.free([0])


def test_one_made_before_is_recorded_with_the_class_it_has(tmp_path):
    for sanitize in (False, True):
        cache = Late([GEOMETRY], num_blocks=17, max_rows=4, sanitize=sanitize)
        with recording.record(tmp_path / "run", cache) as recorder:
            cache.admit([0], [0, 6], range(6))
            cache.free([0])
        with pytest.raises(ValueError, match="cannot be recorded"):
            recording.record(tmp_path / "run", cache)
        assert recording.replay(tmp_path / "run").digest == recorder.digest
        assert isinstance(cache, Late)
        assert hasattr(cache, "sanitizer") == sanitize


class Keyed(KVCache):
    """It asks something of each subclass, and keeps them."""

    kept: ClassVar = []

    def __init_subclass__(cls, *, key, **named):
        super().__init_subclass__(**named)
        Keyed.kept.append(key)


class OfAKey(Keyed, key="one"):
    """It has names that recorders and watchers know."""

    kernel_blocks = 7

    def stats(self):
        return "few"


@pytest.mark.parametrize("record", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("sanitize", [False, True], ids=["", "sanitized"])
def test_a_class_is_made_of_a_users_without_his_knowing(tmp_path, sanitize, record):
    if not record:
        use(OfAKey, sanitize)
    else:
        with recording.record(tmp_path / "run") as recorder:
            use(OfAKey, sanitize)
        found = recording.replay(tmp_path / "run", until_finding=True)
        assert (found.differs, found.finding, found.digest) == ("", None, recorder.digest)
    assert Keyed.kept == ["one"]


class Silent(KVCache):
    """It does not hand on that it is sanitized."""

    def __init__(self, groups, sanitize=None):  # noqa: ARG002
        super().__init__(groups, num_blocks=17, max_rows=4)


def test_what_is_not_handed_on_is_sanitized_all_the_same(tmp_path):
    cache = Silent([GEOMETRY], sanitize=True)
    assert cache.sanitizer.report.mode == "raise"
    again = type(cache)([GEOMETRY])
    assert again.sanitizer.report.mode == "raise"
    tables = type(BlockTables([GEOMETRY], max_rows=2, sanitize=True))
    with recording.record(tmp_path / "run") as recorder:
        one = tables([GEOMETRY], max_rows=2, num_blocks=20, sanitize=True)
        one.append([0], [0, 2], [1, 2])
        one.commit()
    assert recording.replay(tmp_path / "run").digest == recorder.digest
