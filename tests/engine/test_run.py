"""`blocktable run`: what it prints, what it refuses, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from blocktable.cli import run

WORDS = [f"w{number}" for number in range(160)]


@pytest.fixture(scope="session")
def folder(tiny, tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of its own: words w0 to w159."""
    target = tmp_path_factory.mktemp("spoken") / "model"
    shutil.copytree(tiny("llama").folder, target)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))  # noqa: S106 - a word
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(target)  # noqa: S106
    return target


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = run(["run", *map(str, arguments)])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return code, shown.err


def test_answers_come_in_order_and_then_a_summary(folder, tiny, tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3"}\n"w4 w5"\n{"prompt": "w6", "max_tokens": 2}\n')
    assert run(["run", "--model", str(folder), "--prompts", str(prompts), "--max-tokens", "5", "--check"]) == 0
    out = capsys.readouterr().out
    model = tiny("llama")
    for prompt, count in (([1, 2, 3], 5), ([4, 5], 5), ([6], 2)):
        asked = " ".join(WORDS[token] for token in prompt)
        assert f"> {asked}\n" + " ".join(WORDS[token] for token in model.answer(prompt, count)) in out
    for label in ("answered", "tokens", "prefixes", "preemptions", "blocks", "entries", "kernel", "laws"):
        assert re.search(rf"^{label} ", out, re.MULTILINE)
    assert "12 generated" in out
    assert "3 of 3" in out


def test_one_object_or_the_answers_alone(folder, tiny, capsys) -> None:
    asked = ["run", "--model", str(folder), "--prompt", "w1 w2 w3", "--prompt", "w4", "--max-tokens", "5"]
    texts = [" ".join(WORDS[token] for token in tiny("llama").answer(prompt, 5)) for prompt in ([1, 2, 3], [4])]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in found["answers"]] == texts
    assert [(one["tokens"], one["done"]) for one in found["answers"]] == [(5, True), (5, True)]
    assert (found["asked"], found["interrupted"]) == (2, False)
    assert found["stats"]["query_tokens"] == 4
    assert run([*asked, "--quiet"]) == 0
    assert capsys.readouterr().out == f"> w1 w2 w3\n{texts[0]}\n\n> w4\n{texts[1]}\n\n"


def test_a_prompt_on_stdin(folder, tiny) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blocktable.cli", "run", "--model", str(folder), "--max-tokens", "4"],
        input="w1 w2 w3",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(" ".join(WORDS[token] for token in tiny("llama").answer([1, 2, 3], 4)))


LAUNCH = ("--prompt", "w1", "--backend", "FLASHINFER_MLA", "--max-model-len", "9416", "--block-size", "32")


def test_the_width_of_a_release_stops_with_that_servers_error(folder, capsys) -> None:
    code, error = refused(capsys, "--model", folder, *LAUNCH, "--engine-width", "vllm==0.19.1")
    assert code == 1
    assert error == ("ValueError: Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32\n")


def test_without_it_the_model_talks(folder, capsys) -> None:
    code, notes = refused(capsys, "--model", folder, *LAUNCH, "--max-tokens", "3")
    assert code == 0
    assert "9416 is past the model's 256 positions" in notes
    assert "FLASHINFER_MLA runs no heads of 12 elements" in notes


def test_a_missing_model(tmp_path, capsys) -> None:
    code, error = refused(capsys, "--model", tmp_path / "nowhere", "--prompt", "w1")
    assert code == 2
    assert "there is no such folder; pass a local folder" in error


def test_a_folder_without_a_model(tmp_path, capsys) -> None:
    code, error = refused(capsys, "--model", tmp_path, "--prompt", "w1")
    assert (code, "config.json" in error) == (2, True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_corrupt_file(name: str, folder, tmp_path, capsys) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(b"\0{nothing")
    code, error = refused(capsys, "--model", tmp_path / "model", "--prompt", "w1")
    assert code == 2
    assert "cannot be read" in error
    assert "; fetch its files again" in error


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "t5"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"model_type": "no_such_model"}, "no_such_model"),
    ],
)
def test_an_architecture_that_is_not_served(change, why, folder, tmp_path, capsys) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, error = refused(capsys, "--model", tmp_path / "model", "--prompt", "w1")
    assert code == 2
    assert why in error


def test_a_prompt_that_is_too_long_is_refused_and_the_others_are_answered(folder, capsys) -> None:
    long = " ".join(["w1"] * 80)
    arguments = ["run", "--model", str(folder), "--max-model-len", "64", "--prompt", long, "--prompt", "w5"]
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert "the prompt has 80 tokens, and a row holds 64 with the answer; shorten it to 63 tokens" in shown.err
    assert "1 of 2" in shown.out


def test_a_pool_too_small_for_one_request(folder, capsys) -> None:
    arguments = ("--prompt", "w1", "--max-model-len", "128", "--num-blocks", "4", "--block-size", "16")
    code, error = refused(capsys, "--model", folder, *arguments)
    assert code == 2
    assert "blocks" in error
    assert "; " in error


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1 is no JSON"),
        ('{"max_tokens": 3}', "no prompt"),
        ('{"prompt": 3}', "prompt is 3"),
        ("", "no prompt"),
    ],
)
def test_bad_lines_of_prompts(text: str, why: str, folder, tmp_path, capsys) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    code, error = refused(capsys, "--model", folder, "--prompts", path)
    assert code == 2
    assert why in error


def test_an_unreadable_file_of_prompts(folder, tmp_path, capsys) -> None:
    code, error = refused(capsys, "--model", folder, "--prompts", tmp_path / "none.jsonl")
    assert (code, "cannot read" in error) == (2, True)


def test_ctrl_c_ends_with_the_summary(folder) -> None:
    command = [sys.executable, "-m", "blocktable.cli", "run", "--model", str(folder), "--prompt", "w1 w2"]
    with subprocess.Popen(
        [*command, "--max-tokens", "250", "--token-budget", "1", "--workers", "1", "--check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(3)  # it talks
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        out, error = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in out
    assert "Traceback" not in error


def test_a_worker_that_dies_ends_the_run_with_its_reason_or_is_started_again(tiny) -> None:
    from blocktable.engine import Engine, WorkerDied

    model, prompt = tiny("llama"), [1, 2, 3]
    for restart in (False, True):
        with Engine(model.folder, block_size=16, workers=2, restart=restart, check=True) as engine:
            stream = engine.stream([engine.request(prompt, max_tokens=20)])
            tokens = [next(stream).token for _ in range(4)]
            os.kill(engine.executor.peers[1].process.pid, signal.SIGKILL)
            if not restart:
                with pytest.raises(WorkerDied, match=r"ended by SIGKILL; --restart"):
                    list(stream)
                continue
            tokens += [event.token for event in stream]
            assert tokens == model.answer(prompt, 20)
