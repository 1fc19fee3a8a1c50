"""The scheduler by itself, under a model that is a formula: each token follows from all before it."""

import random

import numpy as np
import pytest

import blocktable
from blocktable.engine.requests import Request
from blocktable.engine.scheduler import Scheduler
from blocktable.engine.step import Step

VOCABULARY = 12  # few, so that drafts are often right


def following(history: list[int]) -> int:
    """The formula: the answer goes round in circles of a length that the prompt decides."""
    return (history[-1] * 3 + len(history) // 7 + history[0]) % VOCABULARY


class Formula:
    """A worker that keeps every row's tokens by slot, through the tables alone, as a model keeps keys and values."""

    def __init__(self, cache: blocktable.KVCache) -> None:
        self.replica = blocktable.Replica.from_snapshot(cache.snapshot())
        self.block = cache.groups[0].geometry.block_size
        self.memory = np.full(cache.num_blocks * self.block, -9)
        self.last = np.full(cache.max_rows, -9)

    def run(self, step: Step) -> list[int]:
        delta = step.read_delta()
        self.replica.apply(delta)
        lines = self.memory.reshape(-1, self.block)
        for _, source, target in delta.copies:
            lines[target] = lines[source]
        lines[step.poison] = -9
        tokens, positions = step.tokens.copy(), step.positions()
        owners = np.repeat(step.rows, np.diff(step.starts))
        tokens[tokens < 0] = self.last[owners[tokens < 0]]
        slots = self.replica.slot_mapping(step.rows, step.starts, positions)[0]
        self.memory[slots] = tokens
        drawn = []
        for at, into in zip(step.at, step.into, strict=True):
            row = self.replica.tables[0].array[owners[at]]
            history = self.memory[(row[:, None] * self.block + np.arange(self.block)).reshape(-1)[: positions[at] + 1]]
            assert (history >= 0).all(), "a cell that nobody wrote"
            drawn.append(following(history.tolist()))
            if into >= 0:
                self.last[into] = drawn[-1]
        return drawn


def serve(scheduler: Scheduler, worker: Formula, depth: int) -> dict[tuple[int, int], list[int]]:
    """Run to the end with up to ``depth`` steps in flight, each run only when its result is asked for."""
    found: dict[tuple[int, int], list[int]] = {}
    flying: list[Step] = []
    while True:
        step = scheduler.schedule() if len(flying) < depth else None
        if step is not None:
            flying.append(Step.from_bytes(step.to_bytes()))
        if not flying:
            return found
        if step is None or len(flying) == depth:
            for event in scheduler.complete(worker.run(flying.pop(0))):
                found.setdefault((event.request, event.sample), []).append(event.token)
        scheduler.cache.check()


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_gives_what_the_formula_gives(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a test
    longest, block = draw.randrange(12, 60), draw.choice((1, 2, 3, 8, 16))
    row = -(-longest // block)
    cache = blocktable.KVCache(
        [blocktable.plan(max_model_len=longest, block_size=block)],
        num_blocks=1 + row + draw.choice((0, 1, row, 4 * row)),
        max_rows=draw.randrange(1, 7),
        prefix_cache=draw.random() < 0.8,
    )
    scheduler = Scheduler(cache, token_budget=draw.choice((1, 3, 16, 99)), draft=draw.choice((0, 0, 1, 4)), poison=True)
    depth = draw.choice((1, 2, 2, 3))
    requests = []
    for _ in range(draw.randrange(1, 14)):
        size = draw.randrange(1, longest - 1)
        prompt = [draw.choice((1, 2))] + [7] * (size - 1)
        stop = frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 0, 1))))
        samples = draw.choice((1, 1, 2, 5))
        request = Request(prompt=tuple(prompt), max_tokens=draw.randrange(1, 30), samples=samples, stop=stop)
        scheduler.add(request)
        requests.append(request)
    found = serve(scheduler, Formula(cache), depth)
    for number, request in enumerate(requests):
        history, answer = list(request.prompt), []
        while len(answer) < min(request.max_tokens, longest - len(request.prompt)):
            answer.append(following(history))
            history.append(answer[-1])
            if answer[-1] in request.stop:
                break
        for sample in range(request.samples):
            assert found.pop((number, sample)) == answer
    assert not found
    stats = cache.stats()
    assert stats["held"] == stats["fenced"] == 0


def test_the_mix_of_schedules_preempts_forks_and_accepts_drafts() -> None:
    cache = blocktable.KVCache([blocktable.plan(max_model_len=40, block_size=4)], num_blocks=14, max_rows=6)
    scheduler = Scheduler(cache, token_budget=64, draft=3)
    for first in range(4):
        scheduler.add(Request(prompt=(first, 7, 7, 7), max_tokens=30, samples=2))
    serve(scheduler, Formula(cache), 2)
    assert scheduler.preemptions > 0
    assert 0 < scheduler.accepted < scheduler.guessed
    assert scheduler.peak_blocks <= 13


@pytest.mark.parametrize(("prompt", "why"), [((), "no tokens"), ((1,) * 40, "a row holds 40 with the answer")])
def test_prompts_that_no_row_holds_are_refused(prompt: tuple[int, ...], why: str) -> None:
    cache = blocktable.KVCache([blocktable.plan(max_model_len=40, block_size=4)], num_blocks=14, max_rows=6)
    scheduler = Scheduler(cache, token_budget=64)
    with pytest.raises(blocktable.ArgumentError, match=why):
        scheduler.add(Request(prompt=prompt))
    assert scheduler.schedule() is None


def test_a_step_survives_its_bytes() -> None:
    cache = blocktable.KVCache([blocktable.plan(max_model_len=40, block_size=4)], num_blocks=14, max_rows=6)
    scheduler = Scheduler(cache, token_budget=64)
    scheduler.add(Request(prompt=(1, 2, 3), temperature=0.5, seed=3))
    step = scheduler.schedule()
    assert step is not None
    again = Step.from_bytes(step.to_bytes())
    assert again.to_bytes() == step.to_bytes()
    assert again.positions().tolist() == [0, 1, 2]
    assert (again.seeds.tolist(), again.temperatures.tolist()) == ([3], [0.5])
