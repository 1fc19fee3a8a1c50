"""The simulation against a plain, slow, per-request reference at tiny pools, where preemption is common."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from blocktable.geometry import plan
from blocktable.simulate import Simulation
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
    blocks: int = 0


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
    finish_step: dict[int, int] = field(default_factory=dict)


def reference(trace: Trace, *, block: int, width: int, usable: int, max_rows: int, budget: int, step: float) -> Counts:
    """Serve the trace request by request, every rule spelled out and none combined.

    Rules that the simulation leaves out because others imply them stand here: decodes take from the budget one by one,
    and a step that preempted admits nobody.
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
    clock = 0.0

    def free() -> int:
        return usable - sum(job.blocks for job in running)

    def preempt_youngest() -> Job:
        victim = max(running, key=lambda job: job.number)
        running.remove(victim)
        waiting.appendleft(victim)
        counts.preemptions += 1
        counts.recomputed_tokens += victim.computed
        victim.computed = victim.blocks = 0
        return victim

    def blocks_for(tokens: int) -> int:
        return (tokens + block - 1) // block

    while coming or waiting or running:
        if not waiting and not running:
            clock = max(clock, coming[0].arrival)
        while coming and coming[0].arrival <= clock:
            waiting.append(coming.popleft())
        left = budget
        served: dict[Job, int] = {}
        preempted = counts.preemptions

        def serve(job: Job, tokens: int, served: dict[Job, int] = served) -> bool:
            """Get the blocks for a running request, preempting the youngest, itself if it is that one."""
            while blocks_for(job.computed + tokens) - job.blocks > free():
                victim = preempt_youngest()
                assert victim not in served, "a request already in this step is never the youngest"
                if victim is job:
                    return False
            job.blocks = max(job.blocks, blocks_for(job.computed + tokens))
            served[job] = tokens
            return True

        in_order = sorted(running, key=lambda job: job.number)
        for job in in_order:  # decodes
            if job in running and job.computed >= job.target and left and serve(job, 1):
                left -= 1
        for job in in_order:  # running prefills
            if job in running and job.computed < job.target and left:
                tokens = min(job.target - job.computed, left)
                if serve(job, tokens):
                    left -= tokens
        while waiting and left and len(running) < max_rows and counts.preemptions == preempted:
            job = waiting[0]
            job.target = job.prompt + job.generated
            tokens = min(job.target, left)
            if blocks_for(job.target) > free():
                break
            running.append(waiting.popleft())
            job.blocks = blocks_for(tokens)
            served[job] = tokens
            left -= tokens

        assert served, "a step computes at least one token"
        counts.steps += 1
        counts.full_copy_entries += len(running) * width
        held = usable - free()
        counts.peak_blocks = max(counts.peak_blocks, held)
        counts.held_sum += held
        for job, tokens in served.items():
            job.computed += tokens
            counts.computed_tokens += tokens
        counts.wasted_sum += held * block - sum(job.computed for job in running)
        for job in served:
            if job.computed >= job.target:
                if job.generated < job.output:
                    job.generated += 1
                    counts.output_tokens += 1
                if job.generated == job.output:
                    counts.finish_step[job.number] = counts.steps
                    running.remove(job)
        clock += step
    return counts


def make_trace(requests: list[tuple[float, int, int]]) -> Trace:
    arrival, prompt, output = (np.array(column) for column in zip(*sorted(requests, key=lambda r: r[0]), strict=True))
    nothing = np.zeros(len(requests) + 1, np.int64)
    line = np.arange(1, len(requests) + 1)
    return Trace(arrival - arrival.min(), prompt, output, line, nothing, np.zeros(0, np.int64))


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
    limits = {
        "num_blocks": 1 + width + draw(st.integers(0, width + 2)),
        "max_rows": draw(st.sampled_from([1, 2, 4, 8])),
        "token_budget": draw(st.sampled_from([1, 2, 3, 5, 8, 64])),
    }
    return make_trace(requests), limits | {"block": block, "longest": longest}, width


@settings(max_examples=120, deadline=None)
@given(loads())
def test_the_simulation_equals_the_reference(load: tuple[Trace, dict[str, int], int]) -> None:
    trace, limits, width = load
    geometry = plan(max_model_len=limits["longest"], block_size=limits["block"])
    simulation = Simulation(
        trace,
        geometry,
        num_blocks=limits["num_blocks"],
        max_rows=limits["max_rows"],
        token_budget=limits["token_budget"],
        step_ms=30,
        check=True,
    )
    expected = reference(
        trace,
        block=limits["block"],
        width=width,
        usable=limits["num_blocks"] - 1,
        max_rows=limits["max_rows"],
        budget=limits["token_budget"],
        step=0.03,
    )
    while not simulation.done:
        assert simulation.steps < expected.steps, "a simulation that goes on where the reference has ended"
        simulation.step()
    summary = simulation.summary()
    for name in (
        "steps",
        "preemptions",
        "recomputed_tokens",
        "computed_tokens",
        "output_tokens",
        "peak_blocks",
        "full_copy_entries",
    ):
        assert getattr(summary, name) == getattr(expected, name), name
    assert dict(enumerate(simulation.finish_step.tolist())) == expected.finish_step
    assert round(summary.mean_blocks * summary.steps) == expected.held_sum
    assert round(summary.mean_wasted_tokens * summary.steps) == expected.wasted_sum
    event(f"preemptions: {min(expected.preemptions, 5)}")

    # Everything is served to its last token, and every block comes back.
    assert (summary.finished, summary.refused) == (len(trace), 0)
    assert summary.output_tokens == int(trace.output_length.sum())
    needed = int((trace.input_length + np.maximum(trace.output_length - 1, 0)).sum())
    assert summary.computed_tokens == needed + summary.recomputed_tokens
    assert simulation._rows.pool.num_free == limits["num_blocks"] - 1
    assert not simulation._rows.tables.tables[0].num_blocks.any()
    assert summary.kernel_checks == summary.law_checks == summary.steps
