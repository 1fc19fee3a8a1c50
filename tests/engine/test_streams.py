"""An engine that lives on: requests refused, streams left or mixed, steps that raise, models that are used elsewhere."""

import random

import pytest
import torch
import transformers

from blocktable.engine import Engine, WorkerDied
from blocktable.errors import ArgumentError, BlockTableError


@pytest.fixture
def engine(tiny):
    with Engine(tiny("llama").model, block_size=8, max_model_len=64, max_rows=4, check=True) as made:
        yield made


def idle(engine: Engine) -> bool:
    stats = engine.cache.stats()
    return not (engine.scheduler.in_flight or engine.scheduler.running or stats["held"] or stats["fenced"])


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        (list(range(90)), {}, "a row holds 64"),
        ([], {}, "no tokens"),
        ([1, -1, 5], {}, "token 1 of the prompt is -1"),
        ([1, 2, 10_000], {}, "token 2 of the prompt is 10000"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"samples": 0}, "samples is 0"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": -0.5}, "temperature is -0.5"),
    ],
)
def test_one_bad_request_refuses_the_batch_and_leaves_the_engine_as_it_was(
    engine, tiny, prompt, options, named
) -> None:
    good = [5, 6, 7]
    with pytest.raises(ArgumentError, match=named):
        list(engine.stream([engine.request(good, max_tokens=3), engine.request(prompt, **options)]))
    assert idle(engine)
    assert engine.generate([good], max_tokens=4, stop=frozenset())[0][0].tokens == tiny("llama").answer(good, 4)


@pytest.mark.parametrize("options", [{"token_budget": 0}, {"draft": -1}, {"workers": -1}, {"max_rows": 0}])
def test_an_engine_that_could_do_nothing_is_refused(tiny, options) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        Engine(tiny("llama").model, block_size=8, max_model_len=64, **options)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_streams_left_early_give_everything_back(tiny, ahead, samples) -> None:
    model, draw = tiny("llama"), random.Random(samples)  # noqa: S311 - a test
    options = {"ahead": ahead, "num_blocks": 20, "max_rows": 4, "draft": 2}
    with Engine(model.model, block_size=8, max_model_len=64, check=True, **options) as engine:
        for _ in range(12):
            prompts = [[draw.randrange(90) for _ in range(draw.randrange(1, 20))] for _ in range(5)]
            stream = engine.stream([engine.request(one, max_tokens=9, samples=samples) for one in prompts])
            for _ in range(draw.randrange(12)):
                next(stream)
            stream.close()
            assert idle(engine)
            assert not engine.scheduler.waiting
        prompt = [5, 6, 7]
        assert engine.generate([prompt], max_tokens=4, stop=frozenset())[0][0].tokens == model.answer(prompt, 4)


def test_streams_may_be_read_by_turns_and_one_left(engine, tiny) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    streams = [engine.stream([engine.request(one, max_tokens=6, stop=frozenset())]) for one in prompts]
    first = [next(stream).token for stream in streams]
    streams.pop().close()
    answers = {place: [event.token for event in stream] for place, stream in enumerate(streams)}
    for place, prompt in enumerate(prompts[:2]):
        assert tiny("llama").answer(prompt, 6) == [first[place], *answers[place]]
    assert idle(engine)


def test_a_step_that_raises_stops_the_engine_for_good_with_its_reason(engine) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    engine.executor.worker.model.forward = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([[1, 2, 3]])
    with pytest.raises(BlockTableError, match="has stopped: out of memory; make a new one"):
        engine.generate([[1, 2, 3]])


def test_a_closed_engine_says_so(engine) -> None:
    engine.close()
    with pytest.raises(BlockTableError, match="has stopped: it was closed"):
        engine.generate([[1, 2, 3]])


def test_a_worker_that_dies_of_every_step_is_not_started_again_for_ever(tiny) -> None:
    class Dying:
        starts = 0

        def submit(self, *_: object, **__: object) -> None: ...

        def result(self) -> None:
            raise WorkerDied("IndexError: index out of range")

        def restart(self, _: bytes) -> None:
            self.starts += 1

        def close(self) -> None: ...

    with Engine(tiny("llama").model, block_size=8, max_model_len=64, restart=True) as engine:
        engine.executor.close()
        engine.executor = Dying()
        with pytest.raises(WorkerDied, match="index out of range"):
            engine.generate([[1, 2, 3]])
        assert engine.executor.starts == 2


def test_a_model_used_by_itself_after_an_engine_says_what_to_do(engine) -> None:
    model = engine.executor.worker.model.model
    with pytest.raises(ArgumentError, match="set_attn_implementation"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_rotary_embedding_that_a_long_neighbour_changes_is_refused_past_its_length() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
    config = transformers.Phi3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope | {"original_max_position_embeddings": 32},
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    prompt = [5, 6, 7, 8]
    with torch.inference_mode():
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 4:].tolist()
    with pytest.raises(ArgumentError, match="max_model_len of at most 32"):
        Engine(model, block_size=8)
    with Engine(model, block_size=8, max_model_len=32) as engine:
        assert engine.generate([prompt], max_tokens=6)[0][0].tokens == alone
