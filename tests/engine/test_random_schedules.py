"""Random schedules on a tiny model, with NaN in every cell that nobody owns: the same words, or they are gone."""

import os
import random
from dataclasses import replace

import pytest
import torch

from blocktable.engine import Engine, Request

BACKENDS = (None, "vllm:FLASHINFER_MLA@0.32.0", "vllm:CUTLASS_MLA@0.32.0", "vllm:FLASHINFER@0.32.0")
MODELS = ("llama", "mistral", "hybrid", "deepseek-v2")
SCHEDULES = int(os.environ.get("BLOCKTABLE_SCHEDULES", "40"))


def schedule(seed: int, tiny) -> tuple[int, int]:
    """Run one random schedule; return its preemptions and accepted drafts."""
    draw = random.Random(seed)  # noqa: S311 - a test
    model = tiny(draw.choice(MODELS))
    backend = draw.choice(BACKENDS)
    block_size = (
        draw.choice((1, 2, 4, 16, 32)) if backend is None else 128 if "CUTLASS" in backend else draw.choice((32, 64))
    )
    longest = draw.randrange(40, 100)
    # Few stems, so that prompts often begin alike, and their answers by transformers are worked out once.
    stems = [[(37 * stem + stem * place * place + 11 * place) % 160 for place in range(64)] for stem in range(1, 5)]
    prompts = [
        draw.choice(stems)[: draw.choice((1, 2, 15, 16, 17, 31, 32, 33, 36))] for _ in range(draw.randrange(1, 9))
    ]
    count = draw.randrange(1, min(7, longest - 36))
    row = -(-longest // block_size)
    groups = 2 if model is tiny("hybrid") else 1
    engine = Engine(
        model.model,
        backend=backend,
        block_size=block_size,
        max_model_len=longest,
        num_blocks=1 + groups * (row + 2) + draw.choice((0, 0, 1, row, 5 * row)),
        max_rows=draw.randrange(1, 9),
        token_budget=draw.choice((1, 7, 16, 64, 512)),
        prefix_cache=draw.random() < 0.8,
        draft=draw.choice((0, 0, 1, 4)),
        ahead=draw.random() < 0.5,
        poison=True,
        check=True,
    )
    with engine, torch.inference_mode():
        requests = [
            Request(prompt=tuple(prompt), max_tokens=count, samples=draw.choice((1, 1, 1, 3))) for prompt in prompts
        ]
        found: dict[tuple[int, int], list[int]] = {}
        for event in engine.stream(requests):
            found.setdefault((event.request, event.sample), []).append(event.token)
        for place, request in enumerate(requests):
            for sample in range(request.samples):
                assert found.pop((place, sample)) == model.answer(list(request.prompt), count), (seed, place, sample)
        assert not found
        stats = engine.cache.stats()
        assert stats["held"] == stats["fenced"] == 0
    return engine.scheduler.preemptions, engine.scheduler.accepted


def test_random_schedules_say_the_same_words(tiny) -> None:
    counts = [schedule(seed, tiny) for seed in range(SCHEDULES)]
    preemptions, accepted = (sum(column) for column in zip(*counts, strict=True))
    assert preemptions > 0
    assert accepted > 0 or SCHEDULES < 500


@pytest.mark.long
def test_two_thousand_schedules_say_the_same_words(tiny) -> None:
    for seed in range(10_000, 12_000):
        schedule(seed, tiny)


def test_poison_is_seen_where_a_row_reads_one_token_too_many(tiny) -> None:
    model, prompt = tiny("llama"), [5, 6, 7, 8, 9]
    with Engine(model.model, block_size=4, num_blocks=32, max_model_len=32, poison=True) as engine:
        worker = engine.executor.worker
        honest = worker.gather

        def one_more(step, positions):
            paged = honest(step, positions)
            for reading in paged.readings:
                for place, part in enumerate(reading.parts):
                    reading.parts[place] = replace(part, cells=part.cells + 1)
            return paged

        worker.gather = one_more
        logits = []
        forward = engine.executor.worker.model.forward
        worker.model.forward = lambda *arguments: logits.append(forward(*arguments)) or logits[-1]
        engine.generate([prompt], max_tokens=3)
    assert any(bool(line.isnan().any()) for line in logits)
