"""Values travel, by pickle and by copy; objects that own live state refuse, and say what to do instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import blocktable
from blocktable import ArgumentError, BlockTables, Delta, Group, KVCache, Replica, get_contract, plan
from blocktable.contracts import resolve_engine
from blocktable.preflight import Launch, judge

GEOMETRY = plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"])
LAUNCH = Launch(resolve_engine("vllm==0.19.1"), "FLASHINFER_MLA", max_model_len=9416, block_size=32)
WAYS: list[Callable[[Any], Any]] = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]  # noqa: S301


def tables() -> BlockTables:
    made = BlockTables([GEOMETRY], max_rows=4)
    made.append([0], [0, 2], [1, 2])
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "value",
    [
        GEOMETRY,
        Group(GEOMETRY, kind="window", window=64),
        get_contract("FLASHINFER_MLA"),
        blocktable.TokenMultiple(128),
        blocktable.MultipleOf(16),
        LAUNCH,
        judge(LAUNCH),
        blocktable.salt(tenant="a"),
        blocktable.OutOfBlocks("short", law="L9", values={"needed": 3}, remedy="wait"),
    ],
)
def test_values_come_out_as_they_went_in(value: Any, way: Callable[[Any], Any]) -> None:
    again = way(value)
    assert type(again) is type(value)
    if isinstance(value, Exception):
        assert (str(again), vars(again)) == (str(value), vars(value))
    else:
        assert again == value


@pytest.mark.parametrize("way", WAYS)
def test_a_delta_travels_and_still_applies(way: Callable[[Any], Any]) -> None:
    host = tables()
    mirror = Replica([GEOMETRY], max_rows=4)
    delta = way(host.commit())
    assert isinstance(delta, Delta)
    mirror.apply(delta)
    assert mirror.tables[0].array[0, :3].tolist() == [1, 2, 0]
    assert not delta.values.flags.writeable


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        tables,
        lambda: KVCache([GEOMETRY], num_blocks=400, max_rows=4),
        lambda: KVCache([GEOMETRY], num_blocks=400, max_rows=4).tables,
        lambda: KVCache([GEOMETRY], num_blocks=400, max_rows=4, sanitize=True),
        lambda: Replica([GEOMETRY], max_rows=4),
    ],
)
def test_what_owns_live_state_refuses_by_name_and_tells_the_way(
    make: Callable[[], Any], way: Callable[[Any], Any]
) -> None:
    with pytest.raises(ArgumentError, match="neither copied nor pickled; ") as caught:
        way(make())
    assert isinstance(caught.value, TypeError)  # what pickle's own callers expect
    assert caught.value.remedy


@pytest.mark.parametrize("way", WAYS)
def test_device_tables_refuse_too(way: Callable[[Any], Any]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: extra `torch`")
    from blocktable.device import DeviceTables

    with pytest.raises(ArgumentError, match="from_snapshot"):
        way(DeviceTables(tables(), "cpu"))


@pytest.mark.parametrize(
    "value",
    [
        GEOMETRY,
        Group(GEOMETRY),
        get_contract("FLASHINFER_MLA"),
        tables(),
        tables()[0],
        tables().commit(),
        KVCache([GEOMETRY], num_blocks=400, max_rows=4),
        Replica([GEOMETRY], max_rows=4),
    ],
)
def test_a_repr_is_one_short_line_that_names_the_kind(value: object) -> None:
    said = repr(value)
    assert len(said) <= 200
    assert "\n" not in said
    assert " object at 0x" not in said
    assert type(value).__name__ in said or "table" in said
