"""The simulation against a plain, slow, per-request reference at tiny pools, where preemption and eviction are common."""

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from blocktable.geometry import Geometry, plan
from blocktable.oracle.cache import CacheModel, Short
from blocktable.simulate import Simulation, Summary
from blocktable.traces import Trace


@dataclass(eq=False)
class Job:
    number: int
    arrival: float
    prompt: int
    output: int
    generated: int = 0
    computed: int = 0
    target: int = 0


@dataclass
class Counts:
    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    peak_blocks: int = 0
    held_sum: int = 0
    wasted_sum: int = 0
    full_copy_entries: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    finish_step: dict[int, int] = field(default_factory=dict)


class Blocks:
    """Rows as counts of blocks, without a prefix cache."""

    def __init__(self, block: int, usable: int) -> None:
        self.block, self.usable = block, usable
        self.rows: dict[Job, int] = {}

    def held(self) -> int:
        return sum(self.rows.values())

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.block - 1) // self.block

    def cached(self, _job: Job) -> int:
        return 0

    def start(self, job: Job, tokens: int) -> bool:
        """Give a job the blocks of its first tokens, if those of its whole prompt are there."""
        if self.blocks_for(job.target) > self.usable - self.held():
            return False
        self.rows[job] = self.blocks_for(tokens)
        return True

    def grow(self, jobs: dict[Job, int]) -> bool:
        """Give jobs the blocks of so many tokens more each, or none of them any."""
        rows = self.rows | {job: self.blocks_for(job.computed + tokens) for job, tokens in jobs.items()}
        if sum(rows.values()) > self.usable:
            return False
        self.rows = rows
        return True

    def drop(self, job: Job) -> None:
        del self.rows[job]


class Prefixes:
    """Rows of the plain-Python model of the cache, numbered by job."""

    def __init__(self, geometry: Geometry, num_blocks: int, trace: Trace) -> None:
        self.model = CacheModel([geometry], num_blocks=num_blocks, max_rows=len(trace))
        self.block, self.texts = geometry.block_size, [text(trace, i) for i in range(len(trace))]

    def held(self) -> int:
        return self.model.blocks.count()["held"]

    def cached(self, job: Job) -> int:
        return self.model.lookup([0, job.target], self.texts[job.number][: job.target])[0]

    def start(self, job: Job, tokens: int) -> bool:
        have = self.cached(job) + tokens
        rest = -(-job.target // self.block) - -(-have // self.block)
        whole = self.texts[job.number][: job.target]
        try:
            self.model.admit([job.number], [0, job.target], whole, limit=tokens, headroom=rest)
        except Short:
            return False
        return True

    def grow(self, jobs: dict[Job, int]) -> bool:
        parts = [self.texts[job.number][job.computed : job.computed + tokens] for job, tokens in jobs.items()]
        indptr = [0, *accumulate(map(len, parts))]
        try:
            self.model.extend([job.number for job in jobs], indptr, [token for part in parts for token in part])
        except Short:
            return False
        return True

    def drop(self, job: Job) -> None:
        self.model.free([job.number])


def text(trace: Trace, i: int) -> list[int]:
    """Return all tokens of a request: 512 of each hash id as far as the prompt goes, then its own."""
    ids = trace.hash_ids[trace.hash_indptr[i] : trace.hash_indptr[i + 1]].tolist()
    hashed = [one * 512 + k for one in ids for k in range(512)][: trace.input_length[i]]
    return hashed + [10**9 + i] * int(trace.input_length[i] + trace.output_length[i] - len(hashed))


def reference(trace: Trace, cache: Blocks | Prefixes, *, width: int, max_rows: int, budget: int, step: float) -> Counts:
    """Serve the trace request by request, every rule spelled out and none combined.

    What the simulation takes for granted because its rules imply it is asserted here.
    """
    counts = Counts()
    coming = deque(
        Job(i, a, p, o)
        for i, (a, p, o) in enumerate(
            zip(trace.arrival.tolist(), trace.input_length.tolist(), trace.output_length.tolist(), strict=True)
        )
    )
    waiting: deque[Job] = deque()
    running: list[Job] = []
    lost: dict[Job, int] = {}
    clock = 0.0

    def preempt_youngest() -> Job:
        victim = max(running, key=lambda job: job.number)
        running.remove(victim)
        waiting.appendleft(victim)
        counts.preemptions += 1
        counts.recomputed_tokens += victim.computed
        lost[victim] = victim.computed
        cache.drop(victim)
        victim.computed = 0
        return victim

    while coming or waiting or running:
        if not waiting and not running:
            clock = max(clock, coming[0].arrival)
        while coming and coming[0].arrival <= clock:
            waiting.append(coming.popleft())
        left = budget
        served: dict[Job, int] = {}
        preempted = counts.preemptions

        def decoding() -> dict[Job, int]:
            return {job: 1 for job in sorted(running, key=lambda job: job.number) if job.computed >= job.target}

        while not cache.grow(decoding()):
            preempt_youngest()
        served |= decoding()
        left -= len(served)
        assert left >= 0, "decodes fit the budget"
        for job in [job for job in running if job.computed < job.target]:
            tokens = min(job.target - job.computed, left)
            if tokens and cache.grow({job: tokens}):
                served[job] = tokens
                left -= tokens
            elif tokens:
                assert preempt_youngest() is job, "who is in its prompt is the youngest"
        while waiting and left and len(running) < max_rows and counts.preemptions == preempted:
            job = waiting[0]
            job.target = job.prompt + job.generated
            cached = cache.cached(job)
            tokens = min(job.target - cached, left)
            if not cache.start(job, tokens):
                break
            running.append(waiting.popleft())
            job.computed = cached
            counts.prefix_hit_tokens += cached
            counts.prefix_query_tokens += job.target
            counts.recomputed_tokens -= min(cached, lost.get(job, 0))
            served[job] = tokens
            left -= tokens

        assert served, "a step computes at least one token"
        counts.steps += 1
        counts.full_copy_entries += len(running) * width
        held = cache.held()
        counts.peak_blocks = max(counts.peak_blocks, held)
        counts.held_sum += held
        for job, tokens in served.items():
            job.computed += tokens
            counts.computed_tokens += tokens
        counts.wasted_sum += sum(-job.computed % cache.block for job in running)
        for job in served:
            if job.computed >= job.target:
                if job.generated < job.output:
                    job.generated += 1
                    counts.output_tokens += 1
                if job.generated == job.output:
                    counts.finish_step[job.number] = counts.steps
                    running.remove(job)
                    cache.drop(job)
        clock += step
    return counts


def make_trace(requests: list[tuple[float, int, int]], ids: list[list[int]]) -> Trace:
    arrival, prompt, output = (np.array(column) for column in zip(*sorted(requests, key=lambda r: r[0]), strict=True))
    indptr = np.cumsum([0, *map(len, ids)])
    line = np.arange(1, len(requests) + 1)
    return Trace(
        arrival - arrival.min(), prompt, output, line, indptr, np.array([i for one in ids for i in one], np.int64)
    )


@st.composite
def loads(draw: st.DrawFn) -> tuple[Trace, dict[str, int], int]:
    block = draw(st.integers(1, 4))
    width = draw(st.sampled_from([1, 2, 3, 6]))
    longest = block * width
    lengths = st.integers(1, longest).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, longest - p)))
    # Short prompts grow into the blocks of others while they decode: that is what preempts.
    growing = st.integers(1, block).map(lambda p: (p, longest - p))
    times = st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.03, 0.1, 0.5])
    request = st.builds(lambda t, pair: (t, *pair), times, st.one_of(lengths, growing))
    requests = draw(st.lists(request, min_size=draw(st.sampled_from([1, 4, 8])), max_size=16))
    ids = [draw(st.sampled_from([[], [7], [7], [2**62]])) for _ in requests]
    limits = {
        "num_blocks": 1 + width + draw(st.integers(0, width + 2)),
        "max_rows": draw(st.sampled_from([1, 2, 4, 8])),
        "token_budget": draw(st.sampled_from([1, 2, 3, 5, 8, 64])),
    }
    return make_trace(requests, ids), limits | {"block": block, "longest": longest}, width


def compare(load: tuple[Trace, dict[str, int], int], *, prefix_cache: bool) -> tuple[Summary, Counts]:
    """Serve a load both ways, the laws verified at every step, and hold every count to the reference's."""
    trace, limits, width = load
    geometry = plan(max_model_len=limits["longest"], block_size=limits["block"])
    simulation = Simulation(
        trace,
        geometry,
        num_blocks=limits["num_blocks"],
        max_rows=limits["max_rows"],
        token_budget=limits["token_budget"],
        step_ms=30,
        prefix_cache=prefix_cache,
        check=True,
    )
    expected = reference(
        trace,
        Prefixes(geometry, limits["num_blocks"], trace)
        if prefix_cache
        else Blocks(limits["block"], limits["num_blocks"] - 1),
        width=width,
        max_rows=limits["max_rows"],
        budget=limits["token_budget"],
        step=0.03,
    )
    assert simulation._laws is not None
    table, changed = simulation._laws._replica.tables[0].array, 0
    while not simulation.done:
        assert simulation.steps < expected.steps, "a simulation that goes on where the reference has ended"
        before = table.copy()
        simulation.step()
        changed += int(np.count_nonzero(before != table))
    summary = simulation.summary()
    for name in (
        "steps",
        "preemptions",
        "recomputed_tokens",
        "computed_tokens",
        "output_tokens",
        "peak_blocks",
        "full_copy_entries",
        *(["prefix_hit_tokens", "prefix_query_tokens"] if prefix_cache else []),
    ):
        assert getattr(summary, name) == getattr(expected, name), name
    assert dict(enumerate(simulation.finish_step.tolist())) == expected.finish_step
    assert round(summary.mean_blocks * summary.steps) == expected.held_sum
    assert round(summary.mean_wasted_tokens * summary.steps) == expected.wasted_sum
    assert summary.changed_entries == changed

    # Everything is served to its last token, and every block comes back.
    assert (summary.finished, summary.refused) == (len(trace), 0)
    assert summary.output_tokens == int(trace.output_length.sum())
    stats = simulation._cache.stats()
    assert stats["free"] + stats["cached"] == limits["num_blocks"] - 1
    assert not simulation._cache.tables.tables[0].num_blocks.any()
    assert summary.kernel_checks == summary.law_checks == summary.steps
    return summary, expected


def needed(trace: Trace) -> int:
    return int((trace.input_length + np.maximum(trace.output_length - 1, 0)).sum())


@settings(max_examples=min(2 * settings.default.max_examples, 1000), deadline=None)
@given(loads())
def test_the_simulation_equals_the_reference(load: tuple[Trace, dict[str, int], int]) -> None:
    summary, expected = compare(load, prefix_cache=False)
    event(f"preemptions: {min(expected.preemptions, 5)}")
    assert summary.computed_tokens == needed(load[0]) + summary.recomputed_tokens
    assert (summary.prefix_hit_tokens, summary.prefix_query_tokens, summary.evictions) == (0, 0, 0)


@settings(max_examples=min(settings.default.max_examples // 2, 250), deadline=None)
@given(loads())
def test_with_a_prefix_cache_it_equals_the_reference_over_the_model(load: tuple[Trace, dict[str, int], int]) -> None:
    summary, _ = compare(load, prefix_cache=True)
    least, most = needed(load[0]) - summary.prefix_hit_tokens, needed(load[0]) + summary.recomputed_tokens
    assert least <= summary.computed_tokens <= most
    event(f"hits: {summary.prefix_hit_tokens > 0}, evictions: {summary.evictions > 0}")


TWINS: list[list[int]] = [[2**62], [7], [2**62], [7], [7], [7], [7], [7], []]  # several compute one prefix at once


@pytest.mark.parametrize(
    "requests",
    [
        [(0, 4, 20), (0, 4, 20), (0, 1, 8), (1, 24, 0), (1, 24, 0), (1, 18, 6), (3, 8, 0), (3, 16, 3), (10, 16, 0)],
        [(0, 24, 0), (0, 4, 20), (0, 4, 20), (0, 1, 8), (1, 24, 0), (1, 18, 6), (3, 8, 1), (3, 16, 3), (10, 16, 3)],
    ],
)
def test_which_of_several_equal_blocks_is_adopted_decides_what_fits(requests: list[tuple[int, int, int]]) -> None:
    """The oldest: with another one these loads take a step more, or finish a request a step later."""
    trace = make_trace([(arrival / 100, prompt, output) for arrival, prompt, output in requests], TWINS)
    limits = {"num_blocks": 15, "max_rows": 4, "token_budget": 8, "block": 4, "longest": 24}
    compare((trace, limits, 6), prefix_cache=True)
