"""The flags of a launch line, by vLLM's rules: spellings, shortened names, dotted JSON, YAML files, readable numbers."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from blocktable.errors import ArgumentError

__all__ = ["CACHE_DTYPES", "insert_file", "is_flag", "parse_bytes", "parse_count", "parse_length", "read_flags"]

# The flags that matter, by every spelling. Each takes one value.
_FLAGS: Final[Mapping[str, str]] = {
    "--model": "model",
    "--max-model-len": "max_model_len",
    "--block-size": "block_size",
    "--attention-backend": "attention_backend",
    "--attention-config": "attention_config",
    "-ac": "attention_config",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--decode-context-parallel-size": "decode_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "--prefill-context-parallel-size": "prefill_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "--cp-kv-cache-interleave-size": "cp_kv_cache_interleave_size",
    "--dcp-kv-cache-interleave-size": "dcp_kv_cache_interleave_size",
    "--max-num-seqs": "max_num_seqs",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
    "--prefix-match-unit": "prefix_match_unit",
    "--speculative-config": "speculative_config",
    "-sc": "speculative_config",
    "--spec-tokens": "spec_tokens",
    "--kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--dtype": "dtype",
    "--mamba-cache-dtype": "mamba_cache_dtype",
    "--mamba-ssm-cache-dtype": "mamba_ssm_cache_dtype",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "-pp": "pipeline_parallel_size",
    "--kv-transfer-config": "kv_transfer_config",
    "--hash-block-size": "prefix_match_unit",
    "--hf-overrides": "hf_overrides",
}
# Switches that matter, each with its opposite.
_SWITCHES: Final[Mapping[str, tuple[str, bool]]] = {
    f"--{no}{name}": (name.replace("-", "_"), not no)
    for name in (
        "enable-prefix-caching",
        "enable-chunked-prefill",
        "async-scheduling",
        "disable-hybrid-kv-cache-manager",
    )
    for no in ("", "no-")
}
# vLLM looks for this one before it completes shortened flags.
_NEVER_SHORTENED: Final = frozenset({"--model"})
# What --kv-cache-dtype takes in vLLM, each since some release.
CACHE_DTYPES: Final = (
    *("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"),
    *(
        "int8",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        "nvfp4_ds_mla",
    ),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit"),
)
# Without a list of every flag of every release, these tell a switch from a flag whose value follows it. Only the name
# of the model hangs on it.
_SWITCH: Final = re.compile(
    r"--(?:enable|disable|no|use|skip|calculate|aggregate)-|"
    r"--(?:enforce-eager|trust-remote-code|headless|async-scheduling|language-model-only|fully-sharded-loras|grpc|"
    r"return-tokens-as-token-ids|interleave-mm-strings|mm-encoder-only|numa-bind)$"
)


def parse_length(text: str, name: str = "--max-model-len") -> int | Literal["auto"]:
    """Read a length in tokens as vLLM does: small letters count thousands, capitals count 1024; ``auto`` and -1 are auto.

    >>> parse_length("9416"), parse_length("9k"), parse_length("1.5k"), parse_length("9K"), parse_length("-1")
    (9416, 9000, 1500, 9216, 'auto')
    """
    text = text.strip()
    if text == "-1" or text.lower() == "auto":
        return "auto"
    match = re.fullmatch(r"(\d+)(\.\d+)?([kmgtKMGT])", text)
    if not match:
        return parse_count(text, name)
    whole, fraction, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    if unit.islower():
        # In floats, as vLLM does.
        return parse_count(str(int(float(whole + (fraction or "")) * 1000**power)), name)
    if fraction:
        raise ArgumentError(
            f"{name} {text}: {unit} counts in 1024 and takes no fraction",
            values={name: text},
            remedy=f"write {whole}{fraction}{unit.lower()}, or a whole number of {unit}",
        )
    return parse_count(str(int(whole) * 1024**power), name)


def parse_bytes(text: str, name: str) -> int:
    """Read a size in bytes: as vLLM does (25G counts in 1024, 25g in 1000), and with units such as GiB, then with fractions.

    >>> parse_bytes("9.7MiB", "--gpu-memory"), parse_bytes("1G", "--gpu-memory"), parse_bytes("80 GB", "--gpu-memory")
    (10171187, 1073741824, 80000000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgtKMGT])(i?)B\s*", text)
    if match:
        base = 1024 if match[3] else 1000
        return parse_count(str(int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1))), name)
    length = parse_length(text, name)
    return parse_count(text, name) if length == "auto" else length


def parse_count(text: str, name: str, *, least: int = 1) -> int:
    """Read a whole number of at least ``least``.

    >>> parse_count("32", "--block-size")
    32
    """
    try:
        number = int(text)
    except ValueError:
        raise ArgumentError(f"{name} must be a whole number, got {text!r}", values={name: text}) from None
    if number < least:
        bound = "positive" if least == 1 else f"at least {least}"
        raise ArgumentError(f"{name} must be {bound}, got {number}", values={name: number})
    return number


def insert_file(arguments: list[str], engine: str = "vLLM") -> list[str]:
    """Put the flags of ``--config FILE`` before those of the line, which win by coming last; both engines read it alike."""
    for word in arguments:
        if word.startswith("--config="):
            raise ArgumentError(
                f"{engine} does not read {word}: it looks for --config and the file as two words",
                values={"word": word},
                remedy=f"write --config {word.removeprefix('--config=')}",
            )
    if "--config" not in arguments:
        return arguments
    index = arguments.index("--config")
    path, after = arguments[index + 1 : index + 2], arguments[index + 2 :]
    if not path or "--config" in after:
        raise ArgumentError("--config names one file, and only once", remedy="give one YAML file")
    return [*_file_arguments(path[0], engine), *arguments[:index], *after]


def _file_arguments(path: str, engine: str) -> Iterator[str]:
    import yaml  # noqa: PLC0415 - only a launch line with a file pays for the parser

    if not path.endswith((".yaml", ".yml")):
        raise ArgumentError(f"--config {path}: {engine} reads .yaml and .yml files", values={"path": path})
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ArgumentError(f"--config {path} cannot be read: {why}", values={"path": path}) from None
    if not isinstance(options, dict):
        raise ArgumentError(f"--config {path} holds no mapping of flags to values", values={"path": path})
    for key, value in options.items():
        if isinstance(value, dict):
            yield from (f"--{key}", json.dumps(value))
        elif isinstance(value, list):
            yield from (f"--{key}", *map(str, value)) if value else ()
        elif not isinstance(value, bool):
            yield from (f"--{key}", str(value))
        elif value:
            yield f"--{key}"


def read_flags(arguments: list[str]) -> dict[str, str]:
    """Return the value of each flag that matters; a bare word that belongs to no flag is the model."""
    flags: dict[str, str] = {}
    dotted: dict[str, dict[str, Any]] = {}
    free = False  # whether a bare word here belongs to no flag
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not is_flag(word):
            if free:
                flags.setdefault("model", word)
            continue
        name, equals, value = word.partition("=")
        key, *path = name.split(".")
        full = _spelling(key)
        flag = _FLAGS.get(full)
        if full in _SWITCHES and not path and not equals:
            switch, on = _SWITCHES[full]
            flags[switch] = "true" if on else "false"
            free = True
            continue
        if not flag and not path:
            free = bool(equals) or bool(_SWITCH.match(full))
            continue
        if not equals:
            if position == len(arguments) or (flag and not path and is_flag(arguments[position])):
                raise ArgumentError(f"{name} is given without its value", values={"flag": name})
            value = arguments[position]
            position += 1
        if flag and path:
            _merge(dotted.setdefault(key.replace("_", "-"), {}), path, value)
        elif flag:
            flags[flag] = value
        free = True
    # Merged per spelling, as vLLM does: -ac.x and --attention-config.y do not meet, and the later one replaces the other.
    return flags | {_FLAGS[_spelling(key)]: json.dumps(value) for key, value in dotted.items()}


def is_flag(word: str) -> bool:
    """Tell a flag from a value: negative numbers, and words with a blank before any ``=``, are values."""
    return (
        len(word) > 1
        and word.startswith("-")
        and not re.fullmatch(r"-\d+|-\d*\.\d+", word)
        and " " not in word.partition("=")[0]
    )


def _spelling(key: str) -> str:
    """Write a flag's name with dashes for underscores, in full where it was shortened."""
    if not key.startswith("--"):
        return key
    key = key.replace("_", "-")
    if key in _FLAGS or len(key) < 4:
        return key
    full = [flag for flag in (*_FLAGS, *_SWITCHES) if flag.startswith(key) and flag not in _NEVER_SHORTENED]
    if len(full) > 1:
        raise ArgumentError(
            f"{key} could mean {' or '.join(full)}", values={"flag": key}, remedy="write the flag in full"
        )
    return full[0] if full else key


def _merge(target: dict[str, Any], path: list[str], text: str) -> None:
    *parents, last = path
    for parent in parents:
        if not isinstance(target.get(parent), dict):
            target[parent] = {}
        target = target[parent]
    try:
        target[last] = json.loads(text)
    except json.JSONDecodeError:
        target[last] = text
