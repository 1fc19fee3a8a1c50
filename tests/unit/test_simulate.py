"""The simulation on cases worked out by hand, with faults planted, and on the public traces."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktable._cache_layout import FREE
from blocktable._prompts import Prompts
from blocktable.errors import ArgumentError, BlockTableError, ContractError, LawBroken, NeverFits
from blocktable.geometry import Geometry, plan
from blocktable.simulate import Simulation, Summary
from blocktable.traces import Trace, read_trace, synthetic


def trace_of(*requests: tuple[float, int, int], ids: list[list[int]] | None = None) -> Trace:
    """Return a trace of (seconds, prompt, output), with the hash ids of each."""
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    ids = ids or [[]] * len(requests)
    indptr, hashes = np.cumsum([0, *map(len, ids)]), np.array([i for one in ids for i in one], np.int64)
    return Trace(arrival.astype(float), prompt, output, np.arange(1, len(requests) + 1), indptr, hashes)


def simulation(trace: Trace, *, longest: int = 16, block: int = 4, **limits: Any) -> Simulation:
    geometry = plan(max_model_len=longest, block_size=block)
    return Simulation(trace, geometry, **{"num_blocks": 9, "max_rows": 4, "token_budget": 8, "check": True} | limits)


def test_one_request_step_by_step() -> None:
    """10 prompt tokens in chunks of 8 and 2 sample the first token in step 2; three decodes make the four outputs."""
    run = simulation(trace_of((0.0, 10, 4)))
    blocks = []
    while not run.done:
        run.step()
        blocks.append(run._cache.stats()["held"])
    assert blocks == [2, 3, 3, 3, 0]  # the last step computes position 12 in a fourth block, and ends the request
    summary = run.summary()
    assert (summary.steps, summary.computed_tokens, summary.output_tokens) == (5, 13, 4)
    assert summary.peak_blocks == 4
    assert summary.mean_blocks == (2 + 3 + 3 + 3 + 4) / 5
    assert summary.mean_wasted_tokens == (0 + 2 + 1 + 0 + 3) / 5
    # Four entries are set one after another; the row is cleared after the last commit.
    assert summary.changed_entries == 4
    assert summary.full_copy_entries == 5 * 4


def test_idle_time_jumps_to_the_next_arrival() -> None:
    summary = simulation(trace_of((0.0, 1, 1), (100.0, 1, 2)), step_ms=30).run()
    assert (summary.steps, summary.simulated_seconds) == (3, 100.06)


def test_a_request_that_arrives_within_a_step_waits_for_the_next() -> None:
    run = simulation(trace_of((0.0, 1, 3), (0.031, 1, 1), (0.06, 1, 1)), step_ms=30)
    run.run()
    assert run.finish_step.tolist() == [3, 3, 3]


def test_decodes_come_before_prefills_and_prefills_before_waiting() -> None:
    run = simulation(trace_of((0.0, 2, 6), (0.0, 9, 1), (0.0, 1, 1)), token_budget=4)
    run.run()
    # Step 1: both prompt tokens of the first, 2 of the second. Then 1 decode and 3 of the second each: 2, 5, 8, and in
    # step 4 its last one, which leaves tokens for the third.
    assert run.finish_step.tolist() == [6, 4, 4]


def test_a_budget_of_one_token_serves_in_order_of_arrival() -> None:
    run = simulation(trace_of((0.0, 2, 2), (0.0, 1, 2), (0.0, 1, 1)), token_budget=1)
    run.run()
    assert run.finish_step.tolist() == [3, 5, 6]


def test_the_youngest_is_preempted_and_computes_its_prompt_and_output_again() -> None:
    # 3 usable blocks of 4. Both prompts take a block; the first decode of both opens another: the first gets it, the
    # second, the youngest, gives up its block after 1 output of 3, and needs 2 blocks for 5 tokens when it comes back.
    run = simulation(trace_of((0.0, 4, 3), (0.0, 4, 3)), longest=12, num_blocks=4)
    run.step()
    run.step()
    assert run.summary().preemptions == 1
    assert run._cache.tables.tables[0].num_blocks.tolist() == [2, 0, 0, 0]
    summary = run.run()
    assert summary.preemptions == 1
    assert summary.recomputed_tokens == 4
    assert summary.computed_tokens == 2 * 6 + 4
    assert summary.output_tokens == 6
    # The first runs in steps 1, 2, 3; the second again from step 4 with 5 tokens, which sample its second output.
    assert run.finish_step.tolist() == [3, 5]


def test_blocks_that_a_prefill_takes_are_not_there_for_who_waits() -> None:
    # Two blocks: step 2 computes the fifth prompt token in the second one, and leaves 3 tokens but no block.
    run = simulation(trace_of((0.0, 5, 1), (0.0, 3, 1)), longest=8, num_blocks=3, token_budget=4)
    run.run()
    assert run.finish_step.tolist() == [2, 3]


def test_a_request_of_no_output_ends_with_its_prompt() -> None:
    summary = simulation(trace_of((0.0, 5, 0), (0.0, 1, 1))).run()
    assert (summary.finished, summary.steps, summary.output_tokens, summary.computed_tokens) == (2, 1, 1, 6)


def test_longer_requests_are_refused_counted_and_named_and_the_limit_itself_is_served() -> None:
    run = simulation(trace_of((0.0, 16, 1), (0.0, 15, 1), (1.0, 1, 15), (2.0, 1, 16), (3.0, 17, 0)))
    summary = run.run()
    assert (summary.requests, summary.finished, summary.refused) == (5, 2, 3)
    assert summary.refused_lines == (1, 4, 5)
    assert summary.computed_tokens == 15 + 15


def test_first_tokens_are_timed_from_the_arrival_and_none_is_that_of_a_request_without_output() -> None:
    # The third waits for a row that the first leaves after three tokens; the fourth generates nothing.
    run = simulation(trace_of((0.0, 4, 3), (0.0, 4, 9), (0.03, 4, 1), (0.6, 4, 0)), max_rows=2)
    summary = run.run()
    assert run.first_token[:3].round(6).tolist() == [0.03, 0.03, 0.12]
    assert np.isnan(run.first_token[3])
    assert summary.mean_first_token_steps == pytest.approx((1 + 1 + 3) / 3, abs=1e-3)
    assert summary.delta_bytes > 0


def test_nothing_to_serve_is_done_at_once() -> None:
    summary = simulation(trace_of((0.0, 99, 1))).run()
    assert (summary.steps, summary.refused, summary.us_per_step) == (0, 1, 0)


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_way_out() -> None:
    with pytest.raises(NeverFits) as caught:
        simulation(trace_of((0.0, 1, 1)), num_blocks=4)
    assert (caught.value.needed, caught.value.usable, caught.value.largest) == (4, 3, 12)
    simulation(trace_of((0.0, 1, 1)), num_blocks=5)
    simulation(trace_of((0.0, 1, 1)), num_blocks=4, longest=12)


@pytest.mark.parametrize("value", [0, -1, True, "8", None])
@pytest.mark.parametrize("name", ["num_blocks", "max_rows", "token_budget", "step_ms"])
def test_limits_are_positive_numbers(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=name):
        simulation(trace_of((0.0, 1, 1)), **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_takes_a_finite_time(value: float) -> None:
    with pytest.raises(ArgumentError, match="step_ms"):
        simulation(trace_of((0.0, 1, 1)), step_ms=value)


@pytest.mark.parametrize("name", ["num_blocks", "max_rows", "token_budget"])
def test_all_but_the_time_of_a_step_are_integers(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        simulation(trace_of((0.0, 1, 1)), **{name: 9.5})
    simulation(trace_of((0.0, 1, 1)), **{name: np.int32(9)}, step_ms=np.float32(2.5)).run()


def test_a_sharded_geometry_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cp_size"):
        Simulation(trace_of((0.0, 1, 1)), plan(max_model_len=64, block_size=4, cp_size=2), num_blocks=99)


def counts(summary: Summary) -> dict[str, object]:
    return {name: getattr(summary, name) for name in Summary.__slots__ if name != "us_per_step"}


@pytest.mark.compiled
def test_the_same_seed_gives_the_same_counts() -> None:
    geometry = plan(max_model_len=2048, block_size=32, contracts=["FLASHINFER_MLA"])
    first, again, other = (
        Simulation(synthetic(seed, max_model_len=2048).first(25), geometry, num_blocks=100).run() for seed in (1, 1, 2)
    )
    assert counts(first) == counts(again) != counts(other)
    assert first.finished == 25
    assert first.kernel_checks == first.steps


def test_a_step_extends_all_decodes_at_once() -> None:
    run = simulation(trace_of(*[(0.0, 1, 16)] * 4), longest=17, num_blocks=99)
    calls = []
    extend = run._cache.extend
    run._cache.extend = lambda *arguments: (calls.append(len(arguments[0])), extend(*arguments))[1]  # type: ignore[func-returns-value, method-assign]
    run.run()
    assert calls == [4] * 15


SHARED = [[7], [7], [8], [7]]


def test_a_prompt_that_begins_like_another_computes_only_the_rest() -> None:
    """Two whole blocks of the first prompt's nine tokens serve the second; the third begins otherwise."""
    trace = trace_of((0.0, 9, 1), (1.0, 11, 1), (2.0, 9, 1), (3.0, 8, 1), ids=SHARED)
    summary = simulation(trace, num_blocks=99, token_budget=64).run()
    assert (summary.prefix_hit_tokens, summary.prefix_query_tokens) == (8 + 4, 9 + 11 + 9 + 8)
    assert summary.computed_tokens == summary.prefix_query_tokens - summary.prefix_hit_tokens
    assert summary.evictions == 0
    off = simulation(trace, num_blocks=99, token_budget=64, prefix_cache=False).run()
    assert (off.computed_tokens, off.prefix_hit_tokens, off.prefix_query_tokens) == (37, 0, 0)


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    run = simulation(trace_of((0.0, 9, 2), (0.0, 9, 2), ids=[[7], [7]]), token_budget=64)
    run.step()
    assert run.summary().prefix_hit_tokens == 8
    table = run._cache.tables.tables[0].array
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert run.run().mean_wasted_tokens == (3 + 3 + 2 + 2) / 2  # a block held twice is counted once


def test_the_longest_idle_prefix_is_evicted() -> None:
    """Four usable blocks: the first prompt leaves two cached, the second takes the two free ones and evicts one of those."""
    trace = trace_of((0.0, 8, 1), (1.0, 12, 1), (2.0, 8, 1), ids=[[7], [8], [7]])
    summary = simulation(trace, num_blocks=5, token_budget=64).run()
    assert (summary.prefix_hit_tokens, summary.evictions) == (4, 2)


def test_who_was_preempted_finds_what_it_had_computed() -> None:
    """As without a cache, but the block of the preempted request is still there when it comes back."""
    trace = trace_of((0.0, 4, 3), (0.0, 4, 3))
    summary = simulation(trace, longest=12, num_blocks=5, prefix_cache=True).run()
    assert summary.preemptions == 0
    summary = simulation(trace, longest=12, num_blocks=4, prefix_cache=True).run()
    assert (summary.preemptions, summary.recomputed_tokens, summary.prefix_hit_tokens) == (1, 0, 4)
    assert summary.computed_tokens == 2 * 6


def test_nothing_is_shared_that_the_trace_does_not_say() -> None:
    trace = trace_of((0.0, 9, 3), (1.0, 9, 3))
    assert not simulation(trace).prefix_cache
    summary = simulation(trace, num_blocks=99, prefix_cache=True).run()
    assert (summary.prefix_hit_tokens, summary.prefix_query_tokens) == (0, 18)


def test_a_hash_id_is_512_tokens_and_what_none_covers_is_the_requests_own() -> None:
    ids = [[5, 2**63 - 1], [5, 5], [2**63 - 1], [5, 9, 9, 9]]
    prompts = Prompts(trace_of((0.0, 1000, 9), (0.0, 1500, 9), (0.0, 3, 9), (0.0, 514, 9), ids=ids))
    first, second, third, fourth = (prompts.tokens(i, n) for i, n in enumerate([1002, 1501, 5, 514]))
    assert len(set(first[:1000].tolist())) == 1000
    assert first[:512].tolist() == second[:512].tolist() == second[512:1024].tolist() == fourth[:512].tolist()
    assert first[512:515].tolist() == third[:3].tolist()
    assert (first[1000:] == prompts.own(0)).all()
    assert (second[1024:] == prompts.own(1)).all()
    assert third[3:].tolist() == [prompts.own(2)] * 2
    assert len({int(first[512]), int(fourth[512]), *map(prompts.own, range(4))}) == 6
    assert first.size == 1002
    assert prompts.tokens(0, 600).tolist() == first[:600].tolist()


def test_progress_is_told_after_every_step() -> None:
    run = simulation(trace_of((0.0, 1, 5)))
    seen: list[tuple[int, int]] = []
    run.run(lambda: seen.append((run.steps, run.finished)))
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)]


def slot_off_by_one(run: Simulation) -> None:
    right = run._cache.admit

    def wrong(*arguments: Any, **named: Any) -> Any:
        cached, slots = right(*arguments, **named)
        slots[0, 0] += 1
        return cached, slots

    run._cache.admit = wrong  # type: ignore[method-assign]


def slot_in_the_padding(run: Simulation) -> None:
    assert run._laws is not None
    replica = run._laws._replica
    right = replica.slot_mapping

    def wrong(*arguments: Any, **named: Any) -> Any:
        slots = right(*arguments, **named)
        slots[0, -1] = 0
        return slots

    replica.slot_mapping = wrong  # type: ignore[method-assign]


def block_of_two_rows(run: Simulation) -> None:
    """Let the second row begin in the first one's block, on the host and on the way to the replica."""
    right, width = run._cache.commit, run.geometry.width

    def wrong() -> Any:
        run._cache.tables._entries[width] = run._cache.tables._entries[0]
        return right()

    run._cache.commit = wrong  # type: ignore[method-assign]


def leaked_block(run: Simulation) -> None:
    run._cache._meta[FREE] -= 1


def stale_replica(run: Simulation) -> None:
    assert run._laws is not None
    run._laws._replica.apply = lambda _delta: None  # type: ignore[method-assign]


def stale_tail(run: Simulation) -> None:
    run._cache.tables._entries[-1] = run._cache.tables._sent[-1] = 7


FAULTS = [
    (slot_off_by_one, "L7", "L7"),
    (slot_in_the_padding, "L6", "L6"),
    (block_of_two_rows, "L3", "L8"),
    (leaked_block, "L9", "L9"),
    (stale_replica, "L11", "L11"),
    (stale_tail, "L4", "L4"),
]


@pytest.mark.parametrize("audited", [True, False])
@pytest.mark.parametrize(("plant", "audit", "law"), FAULTS)
def test_a_planted_fault_breaks_its_law_at_the_step_it_shows(
    plant: Callable[[Simulation], None], audit: str, law: str, *, audited: bool
) -> None:
    """Also at the steps at which the cache does not recount itself."""
    run = simulation(trace_of((0.0, 3, 9), (0.0, 3, 9)))
    assert run._laws is not None
    if not audited:
        run._laws.checks, run._laws._every = 1, 1000
    plant(run)
    with pytest.raises(LawBroken) as caught:
        run.run()
    assert caught.value.law == (audit if audited else law)
    assert run.steps <= 1


def test_a_small_pool_is_recounted_at_every_step_and_a_large_one_now_and_then() -> None:
    for num_blocks, expected in (9, 6), (64, 6), (65, 4), (999, 2):  # of 5 steps, and once at the end
        run, audits = simulation(trace_of((0.0, 3, 5)), num_blocks=num_blocks), []
        check = run._cache.check
        run._cache.check = lambda check=check, audits=audits: audits.append(check())  # type: ignore[misc, method-assign, func-returns-value]
        run.run()
        assert len(audits) == expected


def test_two_tokens_of_one_slot_break_l7(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only blocks written by two rows could do it, which L8 sees first; so that check is taken away here."""
    monkeypatch.setattr("blocktable._simulate_laws._check_writers", lambda *_: None)
    monkeypatch.setattr("blocktable._simulate_laws._check_conservation", lambda *_: None)
    run = simulation(trace_of((0.0, 3, 9), (0.0, 3, 9)))
    assert run._laws is not None
    run._laws.checks, run._laws._every = 1, 1000
    block_of_two_rows(run)
    with pytest.raises(LawBroken, match="share slot") as caught:
        run.run()
    assert caught.value.law == "L7"


def test_a_table_that_the_kernel_refuses_stops_the_run() -> None:
    geometry = plan(max_model_len=9416, block_size=32, contracts=["FLASHINFER_MLA"])
    run = Simulation(trace_of((0.0, 5, 5)), geometry, num_blocks=400)
    run._kernel_width = 295
    with pytest.raises(ContractError, match="block_num=295"):
        run.run()
    assert run.summary().steps == 0


def test_every_finding_is_an_error_of_the_library() -> None:
    assert issubclass(LawBroken, BlockTableError)
    assert issubclass(ContractError, BlockTableError)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("block_size", "longest", "backend", "columns"),
    [(544, 9416, "FLASHINFER_MLA", 308), (32, 9416, "FLASHINFER_MLA", 296), (128, 640, "FLASHINFER_MLA", 10)],
)
def test_the_kernel_sees_its_own_columns(block_size: int, longest: int, backend: str, columns: int) -> None:
    """A manager block of 544 is 17 kernel blocks of 32, and 18 of them are not yet a multiple of 128 tokens."""
    geometry: Geometry = plan(max_model_len=longest, block_size=block_size, contracts=[backend])
    run = Simulation(synthetic(0, max_model_len=longest).first(20), geometry, num_blocks=999, check=True, max_rows=8)
    assert run._kernel_width == columns
    assert run.run().finished == 20


def public_trace(name: str) -> Trace:
    folder = os.environ.get("BLOCKTABLE_DATA")
    if folder is None or not (path := Path(folder) / "traces" / name).exists():
        pytest.skip(f"{name} is not under BLOCKTABLE_DATA/traces")
    return read_trace(path)


def run_whole(trace: Trace, *, longest: int, **limits: Any) -> Summary:
    geometry = plan(max_model_len=longest, block_size=32)
    run = Simulation(trace, geometry, **limits)
    summary = run.run()
    assert (summary.finished, summary.refused) == (len(trace), 0)
    assert summary.output_tokens == int(trace.output_length.sum())
    cells = int((trace.input_length + trace.output_length - 1).sum())
    if run.prefix_cache:
        assert cells - summary.prefix_hit_tokens <= summary.computed_tokens < cells
    else:
        assert summary.computed_tokens == cells + summary.recomputed_tokens
    stats = run._cache.stats()
    assert stats["free"] + stats["cached"] == limits["num_blocks"] - 1
    assert summary.peak_blocks <= limits["num_blocks"] - 1
    assert summary.kernel_checks == summary.steps
    assert summary.changed_entries < summary.full_copy_entries / 100
    return summary


@pytest.mark.compiled
def test_the_start_of_the_mooncake_trace() -> None:
    trace = public_trace("mooncake-conversation.jsonl").first(300)
    off, lru, roomy = (
        run_whole(trace, longest=131072, num_blocks=num_blocks, prefix_cache=on)
        for num_blocks, on in ((8192, False), (8192, True), (300_000, True))
    )
    assert off.preemptions > 0
    assert off.prefix_hit_tokens == 0 < lru.prefix_hit_tokens < roomy.prefix_hit_tokens
    assert roomy.evictions == 0 < lru.evictions


@pytest.mark.compiled
def test_the_start_of_the_azure_trace() -> None:
    run_whole(public_trace("azure-conv-2023.csv").first(300), longest=16384, num_blocks=8192)


@pytest.mark.long
@pytest.mark.parametrize(("prefix_cache", "check"), [(False, False), (True, False), (True, True)])
def test_the_whole_mooncake_trace(prefix_cache: bool, check: bool) -> None:
    summary = run_whole(
        public_trace("mooncake-conversation.jsonl"),
        longest=131072,
        num_blocks=16385,
        max_rows=128,
        prefix_cache=prefix_cache,
        check=check,
    )
    assert summary.finished == 12031


@pytest.mark.long
def test_the_whole_azure_trace() -> None:
    assert run_whole(public_trace("azure-conv-2023.csv"), longest=16384, num_blocks=16385).finished == 19366
