"""Launch lines are read as vLLM's own parser reads them."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable.cli.flags import parse_length
from blocktable.cli.launch import Launch, read_launch
from blocktable.errors import ArgumentError


def read(line: str) -> Launch:
    return read_launch(shlex.split(line))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("9416", 9416),
        ("9k", 9000),
        ("9K", 9216),
        ("1.5k", 1500),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("1M", 1_048_576),
        ("1g", 10**9),
        ("1G", 2**30),
        ("1t", 10**12),
        ("1T", 2**40),
        ("9_416", 9416),
        (" 77 ", 77),
        ("auto", "auto"),
        ("AUTO", "auto"),
        ("-1", "auto"),
    ],
)
def test_lengths_as_people_write_them(text: str, tokens: object) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["0", "-5", "1.5K", "1e4", "1.5", "", "9kk", "k", "9 k", "0.0001k", "9x"])
def test_lengths_that_vllm_refuses(text: str) -> None:
    with pytest.raises(ArgumentError, match="--max-model-len"):
        parse_length(text)


def test_the_line_of_the_issue() -> None:
    launch = read("vllm serve MODEL --max-model-len 9416 --block-size 32 --attention-backend FLASHINFER_MLA --port 80")
    assert (launch.model, launch.max_model_len, launch.block_size) == ("MODEL", 9416, 32)
    assert launch.backend == "FLASHINFER_MLA"


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "vllm serve M --max_model_len=9416 --block_size=32 --attention_backend=x -dcp=2",
        "vllm serve --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2 --model M",
        "vllm serve --model=M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "vllm serve --enforce-eager M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "vllm serve --port 80 --block-size 32 M --max-model-len 9416 --attention-backend X -dcp 2",
        "A=1 B='x y' vllm serve M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "env A=1 vllm serve M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "A=1 nohup /opt/x/bin/vllm serve M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        (
            "python -m vllm.entrypoints.openai.api_server --model M --max-model-len 9416 --block-size 32 "
            "--attention-backend X -dcp 2"
        ),
        (
            "/usr/bin/python3.11 -u -m vllm.entrypoints.openai.api_server --max-model-len 9416 --block-size 32 "
            "--attention-backend X -dcp 2 --model M"
        ),
        (
            "python /site/vllm/entrypoints/openai/api_server.py --model M --max-model-len 9416 --block-size 32 "
            "--attention-backend X -dcp 2"
        ),
        "python -m vllm.entrypoints.cli.main serve M --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        "vllm serve M --max-model-len 9416 --block-size 32 --attention-config.backend X -dcp 2",
        "vllm serve M --max-model-len 9416 --block-size 32 --attention_config.backend=X -dcp 2",
        "vllm serve M --max-model-len 9416 --block-size 32 -ac.backend=X -dcp 2",
        'vllm serve M --max-model-len 9416 --block-size 32 -ac \'{"backend": "X"}\' -dcp 2',
        'vllm serve M --max-model-len 9416 --block-size 32 --attention-config=\'{"backend": "X"}\' -dcp 2',
        "vllm serve M --max-model-len 9416 --block-size 32 --attention-backend X --decode-context-parallel-size 2",
        (
            "vllm serve M --max-model-len 1 --block-size 1 --max-model-len 9416 --block-size 32 --attention-backend Y "
            "--attention-backend X -dcp 2"
        ),
        "vllm serve M --max-model-le 9416 --block 32 --attention-b X --decode-context 2",
        # Unknown flags with and without a value, some with a value that looks like one of ours.
        (
            "vllm serve M --foo --max-model-len 9416 --bar 7 --block-size 32 --baz=--block-size --attention-backend X -O3 "
            "-dcp 2 --qux -1 --served-model-name a b"
        ),
        "vllm serve M -tp 8 -pp 2 -q fp8 -cc.mode 3 --max-model-len 9416 --block-size 32 --attention-backend X -dcp 2",
        # What does not concern tables but holds a dot, a number or JSON.
        (
            "vllm serve M --gpu-memory-utilization 0.9 --hf-overrides '{\"max_model_len\": 1}' --max-model-len 9416 "
            "--block-size 32 --attention-backend X -dcp 2 --rope.scaling 2"
        ),
    ],
)
def test_every_spelling_says_the_same(line: str) -> None:
    for launch in (read(line), read_launch([line])):
        assert (launch.model, launch.backend) == ("M", "X")
        assert (launch.max_model_len, launch.block_size) == (9416, 32)
        assert launch.decode_context_parallel == 2


def test_a_pasted_line_keeps_its_backslashes() -> None:
    line = "VLLM_LOGGING_LEVEL=INFO \\\n  vllm serve M \\\n  --max-model-len 9416 \\\r\n  --block-size 32 > log 2>&1 &"
    launch = read_launch([line])
    assert (launch.model, launch.max_model_len, launch.block_size) == ("M", 9416, 32)
    assert launch.environment == {"VLLM_LOGGING_LEVEL": "INFO"}
    words = ["vllm", "serve", "M", "\\\n", "--max-model-len", "9416", "\\", "--block-size", "32"]
    assert read_launch(words).block_size == 32


def test_a_quoted_line_ends_where_its_command_ends() -> None:
    launch = read_launch(["vllm serve M --max-model-len 9416; vllm serve N --max-model-len 1 | tee log"])
    assert (launch.model, launch.max_model_len) == ("M", 9416)
    assert read_launch(['vllm serve M --attention-config \'{"backend": "A;B"}\'']).backend == "A;B"


def test_what_a_line_does_not_say() -> None:
    launch = read("vllm serve M")
    assert launch.max_model_len is None
    assert launch.block_size is None
    assert launch.backend is None
    assert launch.decode_context_parallel == 1
    assert read("vllm serve M --max-model-len auto").max_model_len == "auto"
    assert read("vllm serve M --max-model-len -1").max_model_len == "auto"


@pytest.mark.parametrize("value", ["auto", "AUTO"])
def test_an_automatic_backend_is_no_backend(value: str) -> None:
    assert read(f"vllm serve M --attention-backend {value}").backend is None
    assert read(f"vllm serve M -ac.backend {value}").backend is None
    assert read("vllm serve M -ac '{\"backend\": null}'").backend is None


def test_the_backend_of_the_environment_is_kept_apart() -> None:
    launch = read("VLLM_ATTENTION_BACKEND=FLASHINFER_MLA vllm serve M")
    assert launch.backend is None
    assert launch.env_backend == "FLASHINFER_MLA"


def test_dotted_flags_replace_json_given_whole() -> None:
    # vLLM merges the dotted ones and appends them last, so the whole object is lost, its backend too.
    launch = read('vllm serve M --attention-config.use_cudnn_prefill true --attention-config \'{"backend": "X"}\'')
    assert launch.backend is None
    launch = read("vllm serve M -ac.backend X -ac.flash_attn_version 3")
    assert launch.backend == "X"
    assert read("vllm serve M -ac.backend X --attention-config.flash_attn_version 3").backend is None


def test_speculation_and_sharding() -> None:
    launch = read(
        "vllm serve M -tp 8 -dcp 4 -pcp 2 --dcp-kv-cache-interleave-size 16 -sc '{\"num_speculative_tokens\": 3}'"
    )
    assert (launch.tensor_parallel, launch.decode_context_parallel, launch.prefill_context_parallel) == (8, 4, 2)
    assert launch.interleave == 16
    assert read("vllm serve M --cp-kv-cache-interleave-size 64 --dcp-kv-cache-interleave-size 16").interleave == 16
    assert read("vllm serve M --cp-kv-cache-interleave-size 64 --dcp-kv-cache-interleave-size 1").interleave == 64
    assert launch.speculative_tokens == 3
    assert read("vllm serve M -sc.num_speculative_tokens 5").speculative_tokens == 5
    assert read("vllm serve M --spec-tokens 2").speculative_tokens == 2
    assert read("vllm serve M --attention-config.backend_per_kind.mla_attention X").backend_per_kind


def test_a_file_comes_before_the_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: FROM_FILE\nmax-model-len: 9k\nblock_size: 64\nenforce-eager: true\ntrust-remote-code: false\n"
        "served-model-name: [a, b]\nattention-config:\n  backend: FLASHINFER_MLA\n"
    )
    launch = read(f"vllm serve --config {file} --block-size 32")
    assert (launch.model, launch.max_model_len, launch.block_size) == ("FROM_FILE", 9000, 32)
    assert launch.backend == "FLASHINFER_MLA"
    assert read(f"vllm serve M --block-size 32 --config {file}").model == "M"
    assert read(f"vllm serve M --block-size 32 --config {file}").block_size == 32
    assert read(f"python -m vllm.entrypoints.openai.api_server --config {file}").block_size == 64
    launch = read(f'vllm serve M --config {file} --attention-config \'{{"backend": "TRITON_MLA"}}\'')
    assert launch.backend == "TRITON_MLA"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "no mapping"),
        ("a: [1\n", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "serve.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentError, match=says):
        read(f"vllm serve M --config {file}")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("vllm bench latency --model M", "does not start a server"),
        ("vllm", "does not start a server"),
        ("python serve.py --max-model-len 9416", "does not start a server"),
        ("python -m lmdeploy.serve --model M", "does not start a server"),
        ("docker run ubuntu --model M", "does not start a server"),
        ("docker run vllm/vllm-openai bash", "does not start a server"),
        ("echo vllm serve M", "does not start a server"),
        ("uv run pytest", "does not start a server"),
        ("bash -c", "does not start a server"),
        (
            "vllm serve M -sc {method:ngram}",
            """as in --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""",
        ),
        ("A=1", "does not start a server"),
        ("vllm serve M --max-model-len", "without its value"),
        ("vllm serve M --max-model-len --block-size 32", "without its value"),
        ("vllm serve M --block-size 0", "positive"),
        ("vllm serve M --block-size -16", "positive"),
        ("vllm serve M --block-size 1k", "whole number"),
        ("vllm serve M -dcp 0", "positive"),
        ("vllm serve M --attention X", "could mean"),
        ("vllm serve M -ac '{backend: X}'", "no JSON"),
        ("vllm serve M -ac '[1]'", "JSON object"),
        ("vllm serve M --attention-backend A -ac.backend B", "twice"),
        ("vllm serve M --config", "one file"),
        ("vllm serve M --config a.yaml --config b.yaml", "one file"),
        ("vllm serve M --config a.json", "yaml"),
        ("vllm serve M --config=a.yaml", "two words"),
    ],
)
def test_what_cannot_start_is_said(line: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        read(line)


WRAPPED = {  # what is wrapped, the release that an image names, a variable that is set
    "docker run --gpus all -v ~/vllm:/root -p 80:80 vllm/vllm-openai:v0.21.0 --model M -tp 8": ("vllm==0.21.0", None),
    "docker run --rm -e HF_TOKEN -e A=1 docker.io/vllm/vllm-openai:v0.26.0-cu130 M -tp 8": ("vllm==0.26.0", "1"),
    "docker run --name vllm --env=A=1 vllm/vllm-openai:latest --model M -tp 8": ("vllm", "1"),
    "podman run --entrypoint vllm ghcr.io/x/vllm-cpu serve M -tp 8": ("vllm", None),
    "docker run --entrypoint bash rocm/vllm:rocm7.0 -lc 'A=1 exec vllm serve M -tp 8 && true'": ("vllm", "1"),
    "docker run rocm/vllm vllm serve M -tp 8": ("vllm", None),
    "docker run --gpus all lmsysorg/sglang:v0.5.23 python3 -m sglang.launch_server --model-path M --tp 8": (
        "sglang==0.5.23",
        None,
    ),
    "A=1 uv run --with x vllm serve M -tp 8": ("", "1"),
    "numactl -C 0-7 python3 -m vllm.entrypoints.openai.api_server --model M -tp 8": ("", None),
    "bash -c 'A=1 vllm serve M -tp 8'": ("", "1"),
    "nohup vllm serve M -tp 8 > log 2>&1 &": ("", None),
}


@pytest.mark.parametrize("line", WRAPPED)
def test_what_stands_around_a_launch_is_taken_off(line: str) -> None:
    release, variable = WRAPPED[line]
    launch = read_launch([line])
    assert (launch.model, launch.tensor_parallel, launch.release) == ("M", 8, release)
    assert launch.environment.get("A") == variable


def test_an_open_quote_is_said() -> None:
    with pytest.raises(ArgumentError, match="quotes"):
        read_launch(["vllm serve 'M --max-model-len 9416"])


UNRELATED = st.sampled_from(
    [
        ["--enforce-eager"],
        ["--no-enable-prefix-caching"],
        ["--port", "8000"],
        ["--host=0.0.0.0"],
        ["--gpu-memory-utilization", "0.95"],
        ["--max-num-seqs", "256"],
        ["--max-num-batched-tokens=8k"],
        ["--served-model-name", "a", "b"],
        ["--kv-cache-dtype", "fp8"],
        ["--compilation-config", '{"mode": 3, "block_size": 7}'],
        ["-cc.mode", "3"],
        ["-O3"],
        ["-pp", "2"],
        ["--mamba-block-size", "8"],
        ["--max-num-partial-prefills", "-1"],
        ["--chat-template", "{{ messages }} --block-size 7"],
        ["--config-format", "mistral"],
        ["--new-flag-of-tomorrow"],
        ["--new_flag_of_tomorrow", "9416"],
    ]
)


@st.composite
def spelled(draw: st.DrawFn, flag: str, value: str) -> list[str]:
    """One of the ways to write a flag and its value."""
    if flag.startswith("--") and draw(st.booleans()):
        flag = "--" + flag[2:].replace("-", "_")
    return [f"{flag}={value}"] if draw(st.booleans()) else [flag, value]


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[str], tuple[object, ...]]:
    """A line in random order and spelling, with unrelated flags between, and what it says."""
    length = draw(st.integers(1, 200_000))
    block = draw(st.integers(1, 1024))
    ranks = draw(st.integers(1, 16))
    backend = draw(st.sampled_from(["FLASHINFER_MLA", "TRITON_MLA", "B12X"]))
    chosen = draw(
        st.sampled_from(
            [
                ("--attention-backend", backend.lower()),
                ("--attention-config.backend", backend),
                ("-ac.backend", json.dumps(backend)),
                ("--attention-config", json.dumps({"backend": backend, "flash_attn_version": 3})),
            ]
        )
    )
    own = [
        draw(spelled("--max-model-len", str(length))),
        draw(spelled("--block-size", str(block))),
        draw(spelled(draw(st.sampled_from(["-dcp", "--decode-context-parallel-size"])), str(ranks))),
        draw(spelled(*chosen)),
    ]
    parts = draw(st.permutations([*own, *draw(st.lists(UNRELATED, max_size=6))]))
    words = [word for part in parts for word in part]
    command = draw(
        st.sampled_from(
            [
                ["vllm", "serve", "M", *words],
                ["vllm", "serve", *words, "--model", "M"],
                ["python3", "-m", "vllm.entrypoints.openai.api_server", *words, "--model=M"],
                ["env", "CUDA_VISIBLE_DEVICES=0,1", "vllm", "serve", "M", *words],
            ]
        )
    )
    return command, ("M", length, block, ranks, backend)


@given(line=lines(), quoted=st.booleans())
def test_order_spelling_and_strangers_change_nothing(
    line: tuple[list[str], tuple[object, ...]], *, quoted: bool
) -> None:
    command, says = line
    launch = read_launch([shlex.join(command)] if quoted else command)
    assert (
        launch.model,
        launch.max_model_len,
        launch.block_size,
        launch.decode_context_parallel,
        launch.backend,
    ) == says
