"""How the plugin reads a running vLLM's groups, and how calls for single rows become batches."""

import random
from types import SimpleNamespace

import pytest

import blocktable
from blocktable.errors import ArgumentError
from blocktable.integrations import vllm_groups as groups
from blocktable.integrations._pending import Pending


def spec(name, **fields):
    """Return an object of a class of that name."""
    return type(name, (), fields)()


def config(*specs, blocks=64):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs], num_blocks=blocks)


def test_kinds_and_windows_are_read():
    found = groups.read_groups(
        config(
            spec("FullAttentionSpec"),
            spec("SlidingWindowSpec", sliding_window=128),
            spec("ChunkedLocalAttentionSpec", attention_chunk_size=256),
            spec("MambaSpec"),
            spec("UniformTypeKVCacheSpecs", first_spec=spec("MLAAttentionSpec")),
        )
    )
    assert found == groups.Known((("full", 0), ("window", 128), ("chunked", 256), ("state", 0), ("full", 0)), 64)


@pytest.mark.parametrize("name", ["RSWASpec", "HiSparseHotSpec", "SomebodysOwnSpec"])
def test_a_cache_of_unknown_kind_is_named(name):
    assert groups.read_groups(config(spec("FullAttentionSpec"), spec(name))) == name


def test_what_is_known_holds_while_tables_are_made():
    known = groups.Known((("full", 0),), 9)
    with groups.knowing(known):
        assert groups.known() is known
        assert groups.pick(groups.known(), [False], encoder=True) == [("full", 0)]
    assert groups.known() is None
    with groups.knowing("RSWASpec"):
        assert groups.known() is None
        assert groups.is_strange()
    assert not groups.is_strange()
    assert groups.pick(None, [False, True], encoder=True) == [None, ("state", 0)]


def test_layers_of_an_encoder_have_a_table_in_one_runner_alone():
    known = groups.Known((("full", 0), ("encoder", 0)), 9)
    assert groups.pick(known, [False], encoder=False) == [("full", 0)]
    assert groups.pick(known, [False, False], encoder=True) == [("full", 0), ("encoder", 0)]
    assert groups.make_group(("encoder", 0), 4, 16, 1, 1).kind == "full"


@pytest.mark.parametrize("width", [1, 7, 296, 589])
@pytest.mark.parametrize("block", [1, 16, 48, 544])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [None, ("full", 0), ("window", 64), ("chunked", 64), ("state", 0)])
def test_a_row_is_as_wide_as_asked_for(width, block, ranks, kind):
    made = groups.make_group(kind, width, block, ranks, 1)
    assert made.geometry.width == made.geometry.kernel_width == width
    assert made.geometry.block_size == block
    assert made.geometry.cp_size == (1 if kind == ("state", 0) else ranks)


def test_a_group_of_which_nothing_is_known_takes_null_blocks_at_the_head_of_a_row():
    tables = blocktable.BlockTables([groups.make_group(None, 4, 16, 1, 1)], max_rows=1)
    tables.assign([0], [0, 3], [0, 0, 5])
    with pytest.raises(ArgumentError):
        tables.append([0], [0, 1], [0])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_waiting_calls_do_what_calls_at_once_do(count, seed):
    draw = random.Random(seed)  # noqa: S311 - test data
    geometries = [blocktable.plan(max_model_len=16 * (9 + g), block_size=16) for g in range(count)]
    waited, direct = (blocktable.BlockTables(geometries, max_rows=5) for _ in range(2))
    pending = Pending(waited)
    for _ in range(400):
        row, verb = draw.randrange(5), draw.choice(["append", "append", "append", "assign", "clear"])
        room = min(9 + g - (0 if verb == "assign" else int(direct[g].num_blocks[row])) for g in range(count))
        ids = [[draw.randrange(1, 99) for _ in range(draw.randint(0, min(room, 3)))] for _ in range(count)]
        pending.add(verb, row, ids)
        if verb == "clear":
            direct.clear([row])
        else:
            getattr(direct, verb)([row], tuple([0, len(one)] for one in ids), tuple(ids), group=None)
        if draw.random() < 0.1:
            pending.flush()
            for g in range(count):
                assert waited[g].array.tolist() == direct[g].array.tolist()
    pending.flush()
    assert waited.commit().values.tolist() == direct.commit().values.tolist()


def test_what_was_refused_is_not_tried_again():
    tables = blocktable.BlockTables([blocktable.plan(max_model_len=16, block_size=16)], max_rows=2)
    pending = Pending(tables)
    pending.add("append", 0, [[1, 2]])
    with pytest.raises(ArgumentError):
        pending.flush()
    pending.add("append", 1, [[3]])
    pending.flush()
    assert tables[0].array.tolist() == [[0], [3]]
