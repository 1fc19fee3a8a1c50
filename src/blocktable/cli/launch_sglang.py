"""Read the command line that starts an SGLang server: what decides about block tables, everything else stepped over.

>>> launch = read_sglang("--model-path M --attention-backend trtllm_mla --page-size=16 --context-length 9416".split())
>>> launch.model, launch.backend, launch.block_size, launch.max_model_len
('M', 'trtllm_mla', 16, 9416)
"""

import json
from argparse import ArgumentError as Refused
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, Final

from blocktable.cli.flags import insert_file, parse_count
from blocktable.cli.launch_facts import Launch
from blocktable.errors import ArgumentError

__all__ = ["read_sglang"]

_FLAGS: Final = (
    ("--model-path", "--model"),
    ("--context-length",),
    ("--page-size",),
    ("--attention-backend",),
    ("--decode-attention-backend",),
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--dcp-size", "--decode-context-parallel-size"),
    ("--speculative-num-draft-tokens",),
    ("--speculative-algorithm",),
    ("--speculative-eagle-topk",),
    ("--kv-cache-dtype",),
    ("--chunked-prefill-size",),
    ("--json-model-override-args",),
    ("--device",),
)


_DEVICES: Final = ("cpu", "xpu")  # of these the device is all the hardware that decides


def read_sglang(arguments: Sequence[str]) -> Launch:
    """Read what follows ``sglang serve`` or ``python -m sglang.launch_server``; the last of repeated flags counts.

    The backend is that of decode steps, which read the table. Raises `ArgumentError` where SGLang would not understand it.
    """
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    for names in _FLAGS:
        parser.add_argument(*names)
    try:
        given, _ = parser.parse_known_args(insert_file(list(arguments), "SGLang"))
    except Refused as error:
        raise ArgumentError(f"the launch line: {error}", remedy="give the flag a value") from None

    def size(value: str | None, flag: str) -> int | None:
        return None if value is None else parse_count(value, flag)

    return Launch(
        engine="sglang",
        model=given.model_path,
        backend=given.decode_attention_backend or given.attention_backend,
        max_model_len=size(given.context_length, "--context-length"),
        block_size=size(given.page_size, "--page-size"),
        tensor_parallel=size(given.tp_size, "--tp-size") or 1,
        decode_context_parallel=size(given.dcp_size, "--dcp-size") or 1,
        speculative_tokens=size(given.speculative_num_draft_tokens, "--speculative-num-draft-tokens") or 0,
        draft_method=(given.speculative_algorithm or "").lower(),
        draft_trees=given.speculative_algorithm is not None
        and size(given.speculative_eagle_topk, "--speculative-eagle-topk") != 1,
        kv_dtype=given.kv_cache_dtype or "auto",
        batched_tokens=_chunk(given.chunked_prefill_size),
        overrides=_overrides(given.json_model_override_args),
        device=given.device if given.device in _DEVICES else None,
    )


def _overrides(text: str | None) -> dict[str, Any]:
    """Return what replaces the model's config; raises ArgumentError for what is no JSON object."""
    name = "--json-model-override-args"
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name} is no JSON: {error}", values={name: text}) from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{name} must be a JSON object, got {text}", values={name: text})
    return value


def _chunk(text: str | None) -> int | None:
    """Return the tokens of a prefill's chunk, None where it is not given or not positive, which turns chunks off."""
    chunk = None if text is None else parse_count(text, "--chunked-prefill-size", least=-(2**31))
    return chunk if chunk and chunk > 0 else None
