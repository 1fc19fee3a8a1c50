"""What the plugin makes of a worker: whose tables it gets, what it knows of them, and who watches. Real classes, no engine."""

import logging
from types import SimpleNamespace

import pytest

from blocktable.integrations import _patches, vllm_groups

pytestmark = pytest.mark.conformance

OURS = "blocktable.integrations.vllm_tables_v1.TablesV1"
STOCK = "vllm.v1.worker.block_table.MultiGroupBlockTable"


@pytest.fixture
def tables(real):
    """Return the module that replaces tables, with vLLM's classes replaced."""
    module = real("blocktable.integrations.vllm_tables")
    real("vllm.v1.worker.gpu_input_batch")
    module.install()
    yield module
    _patches.undo()


def spec(name, **fields):
    return type(name, (), fields)()


def config(*specs, blocks=97):
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])


def worker(runner=None, steps=2):
    """Return a worker's wrapper, as far as the plugin looks at it."""
    inner = SimpleNamespace() if runner is None else SimpleNamespace(model_runner=runner)
    return SimpleNamespace(global_rank=0, worker=inner, vllm_config=SimpleNamespace(max_concurrent_batches=steps))


def first_tables(real, sizes=(16,)):
    """Return the tables that the first runner's constructor makes, before the groups are known."""
    torch = real("torch")
    return real("vllm.v1.worker.gpu_input_batch").MultiGroupBlockTable(
        max_num_reqs=8,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=list(sizes),
        max_num_blocks=[8 for _ in sizes],
    )


def launch(tables, real, kind, **more):
    runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=first_tables(real)))
    tables._initialize(lambda *_: None, worker(runner, **more), [config(spec(kind))])
    return runner


def test_an_engine_of_unknown_groups_leaves_nothing_to_the_next_one(tables, real):
    found = [
        tables.in_use(launch(tables, real, kind))
        for kind in ("FullAttentionSpec", "RSWASpec", *["MLAAttentionSpec"] * 2)
    ]
    assert found == [OURS, STOCK, OURS, OURS]


def test_tables_are_made_again_where_another_pool_comes(tables, real):
    runner = launch(tables, real, "FullAttentionSpec")
    before = runner.input_batch.block_table
    assert before.known == vllm_groups.Known((("full", 0),), 97)
    tables._initialize(lambda *_: None, worker(runner), [config(spec("FullAttentionSpec"))])
    assert runner.input_batch.block_table is before
    tables._initialize(lambda *_: None, worker(runner), [config(spec("FullAttentionSpec"), blocks=33)])
    assert runner.input_batch.block_table.known.num_blocks == 33


@pytest.mark.parametrize(("steps", "depth"), [(1, 2), (2, 2), (5, 5)])
def test_a_table_has_a_buffer_for_each_step_in_flight(tables, real, monkeypatch, steps, depth):
    monkeypatch.setattr(real("blocktable.integrations.vllm_tables_v1").TablesV1, "alias", False)
    first = launch(tables, real, "FullAttentionSpec", steps=steps).input_batch.block_table
    assert len(first.mirror._delta_staging._host) == depth
    made = []

    def original(*_):
        made.append(second_tables(real))

    tables._initialize(original, worker(steps=steps), [config(spec("FullAttentionSpec"))])
    assert len(made[0].mirror._delta_staging._host) == depth


def second_tables(real, groups=1, **named):
    torch = real("torch")
    return real("blocktable.integrations.vllm_tables_v2").TablesV2(
        block_sizes=[16] * groups,
        max_num_reqs=4,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=[8] * groups,
        device=torch.device("cpu"),
        **named,
    )


def without_tables(real):
    """Return workers that have none: no runner, an encoder's or attention-free one of each kind."""
    empty = SimpleNamespace(input_batch=SimpleNamespace(block_table=first_tables(real, ())))
    second = SimpleNamespace(block_tables=SimpleNamespace(block_sizes=[], block_tables=[]))
    return [
        worker(),
        worker(SimpleNamespace()),
        worker(SimpleNamespace(block_tables=None)),
        worker(empty),
        worker(second),
    ]


def test_a_worker_without_tables_is_served_and_said_so(tables, real, caplog):
    observe = real("blocktable.integrations.vllm_observe")
    watched = len(observe.reports())
    caplog.set_level(logging.INFO)
    for one in without_tables(real):
        caplog.clear()
        with caplog.at_level(logging.INFO, "vllm.blocktable"):
            observe._initialize(lambda *_: None, one, [config()])
            tables._initialize(lambda *_: None, one, [config()])
    assert len(observe.reports()) == watched


def test_a_group_that_ranks_hold_whole_is_watched_as_such(real):
    torch, observe = real("torch"), real("blocktable.integrations.vllm_observe")
    known = vllm_groups.Known((("full", 0), ("full", 0)), 97)
    with vllm_groups.knowing(known):
        ours = second_tables(
            real, 2, cp_size=2, cp_rank=0, slot_mapping_enabled=[True, True], dcp_sharded=[True, False]
        )
    observer = observe._ObserverV2(ours, known)
    ours.append_block_ids(0, ([3], [4, 5]), overwrite=True)
    ours.apply_staged_writes()
    rows = torch.tensor([0], dtype=torch.int32)
    ours.gather_block_tables(rows, 1)
    ours.compute_slot_mappings(rows, torch.tensor([0, 32], dtype=torch.int32), torch.arange(32), 32)
    assert observer.watch.steps == 1
    assert observer.watch.report.counts == {}


def test_the_plugins_switches_reach_rays_actors(real, monkeypatch):
    from blocktable.integrations import vllm

    monkeypatch.setenv(vllm.RAY_COPIES, "")
    monkeypatch.setenv("BLOCKTABLE_VLLM", "off")
    monkeypatch.setattr(vllm, "_registered", False)
    vllm.register()
    assert "BLOCKTABLE_VLLM" in real("vllm.ray.ray_env").get_env_vars_to_copy()
