"""Read the command line that starts a server, as vLLM itself reads it; SGLang's goes to a reader of its own.

Only what decides about block tables is kept; everything else is stepped over. The rules are vLLM's: underscores in a
flag's name stand for dashes, the last of repeated flags counts, a YAML file comes before the command line, and dotted
flags (``--attention-config.backend X``) are merged into one JSON argument that replaces one given whole.

>>> launch = read_launch("vllm serve M --max_model_len 9k --block-size=32 --attention-backend flashinfer_mla".split())
>>> launch.model, launch.max_model_len, launch.block_size, launch.backend
('M', 9000, 32, 'FLASHINFER_MLA')
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from blocktable.cli.flags import insert_file, is_flag, parse_bytes, parse_count, parse_length, read_flags
from blocktable.cli.launch_facts import Launch, Length
from blocktable.cli.launch_sglang import read_sglang
from blocktable.cli.launch_wrappers import split_words, unwrap
from blocktable.errors import ArgumentError

__all__ = ["Launch", "Length", "read_launch"]

# What the JSON of a flag looks like.
_EXAMPLES: Final[Mapping[str, str]] = {
    "--attention-config": '{"backend": "TRITON_MLA"}',
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 4}',
    "--kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    "--hf-overrides": '{"max_position_embeddings": 65536}',
}
# What stands for "--" in text that was copied from a page: the server would take it for a word, not for a flag.
_OTHER_DASHES: Final = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*(?=\w)")
_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


def read_launch(words: Sequence[str]) -> Launch:
    """Read a launch line, given as words or as one string.

    Raises `ArgumentError` where vLLM would not understand it either, or where it starts something else.

    >>> read_launch(["VLLM_LOGGING_LEVEL=DEBUG vllm serve M -tp 8 -dcp 2 --max-model-len auto"]).max_model_len
    'auto'
    """
    command, environment, release = unwrap(_split_words(words))
    if dashed := next((word for word in command if _OTHER_DASHES.match(word)), None):
        meant = "--" + _OTHER_DASHES.sub("", dashed)
        raise ArgumentError(
            f"{dashed} begins with a dash that is no hyphen, as text processors make of two",
            values={"word": dashed},
            remedy=f"write {meant}",
        )
    if (arguments := _sglang_arguments(command)) is not None:
        return read_sglang(arguments)._replace(environment=environment, release=release)
    flags = read_flags(insert_file(_server_arguments(command)))
    attention = _read_json(flags, "attention_config", "--attention-config")
    speculative = _read_json(flags, "speculative_config", "--speculative-config")
    backend = _backend(flags.get("attention_backend"))
    configured = _backend(attention.get("backend"))
    if backend and configured:
        raise ArgumentError(
            f"the launch names a backend twice, {backend} and {configured}, and vLLM takes one",
            values={"--attention-backend": backend, "--attention-config": configured},
            remedy="keep --attention-backend or the backend in --attention-config",
        )
    drafts = _field(speculative, "num_speculative_tokens", int) or 0
    interleave = _size(flags, "dcp_kv_cache_interleave_size", 1)  # the older name wins where it says more than 1
    return Launch(
        model=flags.get("model"),
        backend=backend or configured,
        env_backend=_backend(environment.get("VLLM_ATTENTION_BACKEND")),
        backend_per_kind=bool(attention.get("backend_per_kind")),
        attention=attention,
        max_model_len=parse_length(flags["max_model_len"]) if "max_model_len" in flags else None,
        block_size=_size(flags, "block_size", None),
        tensor_parallel=_size(flags, "tensor_parallel_size", 1),
        tensor_parallel_given="tensor_parallel_size" in flags,
        decode_context_parallel=_size(flags, "decode_context_parallel_size", 1),
        prefill_context_parallel=_size(flags, "prefill_context_parallel_size", 1),
        interleave=interleave if interleave > 1 else _size(flags, "cp_kv_cache_interleave_size", 1),
        max_num_seqs=_size(flags, "max_num_seqs", None),
        num_blocks=_size(flags, "num_gpu_blocks_override", None),
        prefix_match_unit=_size(flags, "prefix_match_unit", None),
        speculative_tokens=_size(flags, "spec_tokens", drafts),
        memory=_memory(flags, environment),
        kv_dtype=flags.get("kv_cache_dtype", "auto").lower(),
        dtype=flags.get("dtype", "auto").lower(),
        conv_dtype=flags.get("mamba_cache_dtype", "auto"),
        state_dtype=flags.get("mamba_ssm_cache_dtype", "auto"),
        batched_tokens=parse_bytes(flags["max_num_batched_tokens"], "--max-num-batched-tokens")
        if "max_num_batched_tokens" in flags
        else None,
        pipeline_parallel=_size(flags, "pipeline_parallel_size", 1),
        async_scheduling=_switch(flags, "async_scheduling"),
        prefix_caching=_switch(flags, "enable_prefix_caching"),
        chunked_prefill=_switch(flags, "enable_chunked_prefill"),
        one_group=bool(_switch(flags, "disable_hybrid_kv_cache_manager")),
        draft_method=_method(speculative),
        draft_model=_field(speculative, "model", str),
        draft_backend=_backend(_field(speculative, "attention_backend", str)),
        draft_kv_dtype=_field(speculative, "kv_cache_dtype", str),
        draft_ranks=_field(speculative, "draft_tensor_parallel_size", int),
        connector=_read_json(flags, "kv_transfer_config", "--kv-transfer-config") or None,
        overrides=_read_json(flags, "hf_overrides", "--hf-overrides"),
        environment=environment,
        release=release,
    )


def _field(speculative: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of --speculative-config, which is a text or a count."""
    value = speculative.get(name)
    if value is None or (kind is str and isinstance(value, str)) or (kind is int and type(value) is int and value > 0):
        return value
    wanted = "a text" if kind is str else "a positive whole number"
    raise ArgumentError(
        f"--speculative-config: {name} must be {wanted}, got {value!r}",
        values={"--speculative-config": dict(speculative)},
    )


def _method(speculative: Mapping[str, Any]) -> str:
    """Return how tokens are drafted, by vLLM's rule where the method is left out."""
    if not speculative:
        return ""
    method, model = _field(speculative, "method", str), speculative.get("model")
    return str(method or ("ngram" if model in ("ngram", "[ngram]") else "draft_model"))


def _memory(flags: Mapping[str, str], environment: Mapping[str, str]) -> int | None:
    """Return the bytes of the KV cache; the older variable for CPUs counts in GiB and wins."""
    space = environment.get("VLLM_CPU_KVCACHE_SPACE")
    if space:
        return parse_count(space, "VLLM_CPU_KVCACHE_SPACE") * 2**30
    name = "kv_cache_memory_bytes"
    return parse_bytes(flags[name], "--kv-cache-memory-bytes") if name in flags else None


def _switch(flags: Mapping[str, str], flag: str) -> bool | None:
    return flags[flag] == "true" if flag in flags else None


def _split_words(words: Sequence[str]) -> list[str]:
    """One string is split as a shell would; words are taken as they are."""
    found = split_words(words[0]) if len(words) == 1 else words
    # A backslash that continued a line may arrive as a word of its own.
    return [word for word in found if word.strip("\\\r\n\t ")]


def _sglang_arguments(command: list[str]) -> list[str] | None:
    """Return what follows ``sglang serve`` or SGLang's module; None for another program."""
    program = PurePosixPath(command[0]).name if command else ""
    if program == "sglang" and command[1:2] == ["serve"]:
        return command[2:]
    if re.fullmatch(r"python[\d.]*", program) and "sglang.launch_server" in command:
        return command[command.index("sglang.launch_server") + 1 :]
    return None


def _server_arguments(command: list[str]) -> list[str]:
    """Return what follows ``vllm serve`` or the server's module, the model always behind a flag."""
    program = PurePosixPath(command[0]).name if command else ""
    rest = command[1:]
    if program == "vllm" and rest[:1] == ["serve"]:
        return _flag_model(rest[1:])
    if re.fullmatch(r"python[\d.]*", program):
        if "-m" in rest:
            module, *after = rest[rest.index("-m") + 1 :] or [""]
            if module in _MODULES:
                return after
            if module == "vllm.entrypoints.cli.main" and after[:1] == ["serve"]:
                return _flag_model(after[1:])
        for index, word in enumerate(rest):
            if word.endswith(tuple(f"{module.replace('.', '/')}.py" for module in _MODULES)):
                return rest[index + 1 :]
    if " " in program and rest:
        raise ArgumentError(
            f"words follow a launch line given as one string: {shlex.join(rest)}",
            remedy="put the options of this command before the line",
        )
    shown = shlex.join(command[:3]) or "an empty line"
    raise ArgumentError(
        f"{shown} does not start a server that this command knows",
        values={"program": program},
        remedy="give `vllm serve MODEL …`, `python -m vllm.entrypoints.openai.api_server --model MODEL …`, "
        "`docker run … vllm/vllm-openai --model MODEL …`, or `python -m sglang.launch_server --model-path MODEL …`",
    )


def _flag_model(arguments: list[str]) -> list[str]:
    return ["--model", *arguments] if arguments and not is_flag(arguments[0]) else arguments


def _read_json(flags: Mapping[str, str], flag: str, name: str) -> dict[str, Any]:
    if flag not in flags:
        return {}
    # Quoted strings are kept; a bare 80m outside of them is a number to vLLM, and no number matters here.
    text = re.sub(r'("(?:[^"\\]|\\.)*")|\b\d+(?:\.\d+)?[kmgtKMGT]\b', lambda match: match[1] or "0", flags[flag])
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            f"{name} is no JSON: {error}",
            values={name: flags[flag]},
            remedy=f"quote it whole, as in {name} '{_EXAMPLES[name]}'",
        ) from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{name} must be a JSON object, got {flags[flag]}", values={name: flags[flag]})
    return {key.replace("-", "_"): item for key, item in value.items()}


def _backend(name: object) -> str | None:
    if not name or str(name).lower() in ("auto", "none"):
        return None
    return str(name).upper()


def _size(flags: Mapping[str, str], flag: str, default: Any) -> Any:
    return parse_count(flags[flag], "--" + flag.replace("_", "-")) if flag in flags else default
