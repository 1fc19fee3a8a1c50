"""Launch lines read by vLLM's own parser, with every engine flag that it has, and by `read_launch`."""

import contextlib
import io
import json
import warnings
from random import Random

import pytest

from blocktable.cli.launch import read_launch
from blocktable.errors import ArgumentError

pytestmark = pytest.mark.conformance

LENGTHS = [
    "9416",
    "9k",
    "9K",
    "1.5k",
    "1.5K",
    "auto",
    "-1",
    "AUTO",
    "128",
    "2m",
    "1M",
    "9_416",
    " 77 ",
    "0",
    "-7",
    "1e4",
    "1g",
]
STRANGERS = [
    ["--enforce-eager"],
    ["--trust-remote-code"],
    ["--gpu-memory-utilization", "0.9"],
    ["--max-num-seqs", "256"],
    ["--served-model-name", "a", "b"],
    ["--mamba-block-size", "8"],
    ["--hf-overrides", '{"max_model_len": 1.5}'],
    ["--quantization", "fp8"],
    ["-O3"],
    ["-cc.mode", "3"],
]


@pytest.fixture(scope="module")
def vllm_reads(real):
    """Return a function that reads words as `vllm serve` does, or returns None where vLLM exits."""
    parser = real("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    serve.add_argument("--config")
    arguments = real("vllm.engine.arg_utils").AsyncEngineArgs
    with warnings.catch_warnings():  # it imports more of the engine
        warnings.simplefilter("ignore")
        arguments.add_cli_args(serve)

    def read(words):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                found = parser.parse_args(["serve", *words])
        except (SystemExit, ValueError, AssertionError, KeyError):
            return None
        return found

    return read


def spelled(random, flag, value):
    if flag.startswith("--"):
        flag = "--" + flag[2:].replace("-", random.choice("-_"))
        if "." not in flag and random.random() < 0.1:
            flag = flag[: len(flag) - random.randrange(1, 4)]
    return [f"{flag}={value}"] if random.random() < 0.4 else [flag, value]


SWITCHES = ["enable-prefix-caching", "enable-chunked-prefill", "async-scheduling", "disable-hybrid-kv-cache-manager"]


def a_switch(random):
    flag = "--" + random.choice(["", "no-"]) + random.choice(SWITCHES)
    flag = "--" + flag[2:].replace("-", random.choice("-_"))
    return [flag[: len(flag) - random.randrange(4)] if random.random() < 0.1 else flag]


def a_flag(random):
    if random.random() < 0.15:
        return a_switch(random)
    backend = random.choice(["FLASHINFER_MLA", "TRITON_MLA", "FLASH_ATTN"])
    flag, value = random.choice(
        [
            ("--max-model-len", random.choice(LENGTHS)),
            ("--max-model-len", random.choice(LENGTHS)),
            ("--block-size", random.choice(["16", "32", "64", "128"])),
            ("-tp", "8"),
            ("-dcp", random.choice("124")),
            ("-pcp", random.choice("12")),
            ("--cp-kv-cache-interleave-size", "4"),
            ("--attention-backend", backend),
            ("--attention-config", json.dumps({"backend": backend})),
            ("-ac", json.dumps({"flash_attn_version": 3})),
            ("--attention-config.backend", backend),
            ("-ac.backend", backend),
            ("-ac.flash_attn_version", "3"),
            ("-sc", '{"num_speculative_tokens": 3}'),
            ("--kv-cache-memory-bytes", random.choice(["25G", "1.5g", "4613734"])),
            ("--kv-cache-dtype", random.choice(["auto", "fp8", "bfloat16"])),
            ("--dtype", random.choice(["auto", "bfloat16", "float32"])),
            ("--max-num-batched-tokens", random.choice(["512", "8k", "2K"])),
            ("--num-gpu-blocks-override", "129"),
            ("-pp", "2"),
        ]
    )
    return spelled(random, flag, value)


def test_both_read_the_same(vllm_reads, tmp_path):
    random = Random(0)  # noqa: S311 - examples, no secrets
    compared = refused = 0
    for turn in range(1200):
        parts = [
            a_flag(random) if random.random() < 0.6 else random.choice(STRANGERS) for _ in range(random.randrange(8))
        ]
        if turn % 4 == 0:
            file = tmp_path / f"{turn}.yaml"
            file.write_text(
                "max-model-len: 8192\nblock_size: 64\nattention-config: {backend: FLASH_ATTN}\nenforce-eager: true\n"
            )
            parts.insert(random.randrange(len(parts) + 1), ["--config", str(file)])
        words = [word for part in parts for word in part]
        words = ["M", *words] if turn % 3 else [*words, "--model", "M"]
        theirs = vllm_reads(words)
        try:
            ours = read_launch(["vllm", "serve", *words])
        except ArgumentError:
            ours = None
        if theirs is None:
            refused += 1
            continue  # what vLLM refuses for other reasons is none of ours to know
        wanted = backend_of(theirs)
        length = {-1: "auto"}.get(theirs.max_model_len, theirs.max_model_len)
        if wanted == "twice" or (isinstance(length, int) and length < 1):
            assert ours is None, words
            continue
        assert ours is not None, words
        compared += 1
        assert (ours.model, ours.max_model_len, ours.backend) == (theirs.model_tag or theirs.model, length, wanted), (
            words
        )
        assert ours.block_size == theirs.block_size, words
        assert ours.tensor_parallel == theirs.tensor_parallel_size, words
        assert ours.decode_context_parallel == theirs.decode_context_parallel_size, words
        assert ours.prefill_context_parallel == theirs.prefill_context_parallel_size, words
        assert ours.interleave == (theirs.cp_kv_cache_interleave_size or 1), words
        assert ours.speculative_tokens == (theirs.speculative_config or {}).get("num_speculative_tokens", 0), words
        for our, their in SAME.items():
            assert getattr(ours, our) == getattr(theirs, their), (our, words)
    assert compared > 500
    assert refused < 600


SAME = {
    "memory": "kv_cache_memory_bytes",
    "kv_dtype": "kv_cache_dtype",
    "dtype": "dtype",
    "batched_tokens": "max_num_batched_tokens",
    "num_blocks": "num_gpu_blocks_override",
    "pipeline_parallel": "pipeline_parallel_size",
    "prefix_caching": "enable_prefix_caching",
    "chunked_prefill": "enable_chunked_prefill",
    "async_scheduling": "async_scheduling",
}


def backend_of(found):
    configured = getattr(found.attention_config, "backend", None)
    names = [None if one is None else str(getattr(one, "name", one)) for one in (found.attention_backend, configured)]
    if all(names):
        return "twice"
    return names[0] or names[1]
