"""Every way of running a model says the same words as transformers, which runs each prompt alone."""

import itertools
import warnings

import pytest
import torch

from blocktable.engine import Engine

BLOCK_SIZES = (1, 16, 32, 48, 64, 128)
SWITCHES = ("batched", "chunked", "prefix", "preempted", "forked", "drafted", "ahead")
MODELS = ("llama", "qwen", "mistral", "deepseek-v2", "deepseek-v3", "hybrid")
COUNT = 7


def only_windows(model) -> bool:
    """Tell whether every layer forgets what is far behind."""
    return model.model.config.model_type == "mistral"


def build(model, block_size: int, on: dict[str, bool], **options) -> Engine:
    """Make an engine with switches on or off, and every check that there is."""
    longest = 80
    rows = -(-longest // block_size)
    groups = len(set(getattr(model.model.config, "layer_types", None) or ["full"]))
    spare = 20 if block_size < 16 and not only_windows(model) else 0
    return Engine(
        model.folder if options.get("workers") else model.model,
        block_size=block_size,
        max_model_len=longest,
        num_blocks=1 + groups * rows * (1 if on["preempted"] else 12) + spare,
        max_rows=16,
        token_budget=16 if on["chunked"] else 512,
        prefix_cache=on["prefix"],
        draft=3 if on["drafted"] else 0,
        ahead=on["ahead"],
        check=True,
        dtype=torch.float32,
        **options,
    )


def ask(engine: Engine, prompts: list[list[int]], on: dict[str, bool]) -> list[tuple[list[int], list[list[int]]]]:
    """Ask all prompts at once, or some one after the other, then the first again; return pairs of prompt and answers."""
    options = {"max_tokens": COUNT, "samples": 2 if on["forked"] else 1}
    waves = [prompts, prompts[:1]] if on["batched"] else [prompts[:1], prompts[1:2], prompts[:1]]
    found = [(wave, engine.generate(wave, **options)) for wave in waves]
    return [
        (prompt, [one.tokens for one in answer])
        for wave, answers in found
        for prompt, answer in zip(wave, answers, strict=True)
    ]


def agree(model, prompts, block_size: int, on: dict[str, bool], **options) -> Engine:
    """Hold one way of running to transformers' words."""
    with build(model, block_size, on, **options) as engine:
        for prompt, answers in ask(engine, prompts, on):
            assert answers == [model.answer(prompt, COUNT)] * (2 if on["forked"] else 1), (on, prompt)
        stats = engine.cache.stats()
        assert stats["held"] == stats["fenced"] == 0
        # A row of windows leaves its first blocks behind, and a pool for one row alone gives them to the next.
        evicted = on["preempted"] and only_windows(model) and stats["evictions"] > 0
        assert stats["hit_tokens"] > 0 or not on["prefix"] or block_size > 40 or evicted
        return engine


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_combination_of_switches_says_the_same_words(name: str, block_size: int, tiny, prompts) -> None:
    model, preemptions = tiny(name), 0
    every = list(itertools.product((False, True), repeat=len(SWITCHES)))
    # All block sizes together go through all combinations; in `make long` each does.
    place = BLOCK_SIZES.index(block_size)
    for values in every[place :: len(BLOCK_SIZES)]:
        on = dict(zip(SWITCHES, values, strict=True))
        preemptions += agree(model, prompts, block_size, on).scheduler.preemptions
    assert preemptions > 0 or block_size > 48


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_combination_at_every_block_size(name: str, block_size: int, tiny, prompts) -> None:
    model = tiny(name)
    for values in itertools.product((False, True), repeat=len(SWITCHES)):
        agree(model, prompts, block_size, dict(zip(SWITCHES, values, strict=True)))


@pytest.mark.parametrize("name", MODELS)
def test_two_worker_processes_say_the_same_words(name: str, tiny, prompts) -> None:
    model = tiny(name)
    for block_size, values in ((16, (True,) * 7), (1, (True, False, True, True, False, False, False))):
        agree(model, prompts, block_size, dict(zip(SWITCHES, values, strict=True)), workers=2)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_two_worker_processes_in_every_combination(name: str, tiny, prompts) -> None:
    model = tiny(name)
    for number, values in enumerate(itertools.product((False, True), repeat=len(SWITCHES))):
        block_size = BLOCK_SIZES[number % len(BLOCK_SIZES)]
        agree(model, prompts, block_size, dict(zip(SWITCHES, values, strict=True)), workers=2)


def test_seeded_samples_do_not_depend_on_how_they_are_run(tiny, prompts) -> None:
    model = tiny("llama")
    options = {"max_tokens": COUNT, "temperature": 0.7, "seed": 5}
    with build(model, 16, dict.fromkeys(SWITCHES, False)) as plain:
        alone = [[plain.generate([p], **options | {"seed": 5 + i})[0][0].tokens for i in range(3)] for p in prompts]
    with build(model, 16, dict.fromkeys(SWITCHES, True)) as engine:
        together = [[one.tokens for one in answer] for answer in engine.generate(prompts, samples=3, **options)]
    assert together == alone
    assert all(a != b for a, b, _ in alone)


def test_a_wrong_slot_is_noticed(tiny, prompts) -> None:
    model = tiny("llama")
    with build(model, 16, dict.fromkeys(SWITCHES, False)) as engine:
        tables = engine.executor.worker.tables
        honest = tables.prepare

        def off_by_one(*arguments):
            batch, slots = honest(*arguments)
            return batch, slots ^ 1

        tables.prepare = off_by_one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [engine.generate([prompt], max_tokens=COUNT)[0][0].tokens for prompt in prompts]
    assert found != [model.answer(prompt, COUNT) for prompt in prompts]
