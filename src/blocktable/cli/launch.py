"""Read the command line that starts a server, as vLLM itself reads it.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeAlias

from blocktable.errors import ArgumentError

__all__ = ["Launch", "Length", "parse_count", "parse_length", "read_launch"]

Length: TypeAlias = int | Literal["auto"] | None

_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_WRAPPERS: Final = frozenset({"env", "exec", "nohup", "sudo", "time"})
_CONTROL: Final = re.compile(r"[;&|<>]+")

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
    "--speculative-config": "speculative_config",
    "-sc": "speculative_config",
    "--spec-tokens": "spec_tokens",
}
# vLLM looks for this one before it completes shortened flags.
_NEVER_SHORTENED: Final = frozenset({"--model"})
# Without a list of every flag of every release, these tell a switch from a flag whose value follows it. Only the name
# of the model hangs on it.
_SWITCH: Final = re.compile(
    r"--(?:enable|disable|no|use|skip|calculate|aggregate)-|"
    r"--(?:enforce-eager|trust-remote-code|headless|async-scheduling|language-model-only|fully-sharded-loras|grpc|"
    r"return-tokens-as-token-ids|interleave-mm-strings|mm-encoder-only|numa-bind)$"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launch line says about block tables; None where it says nothing.

    ``max_model_len`` is in tokens, or ``"auto"`` where the server sizes it by the memory it finds. ``backend`` is what
    flags and files name, ``env_backend`` what the environment names, which only old releases read.
    """

    model: str | None = None
    backend: str | None = None
    env_backend: str | None = None
    backend_per_kind: bool = False
    max_model_len: Length = None
    block_size: int | None = None
    tensor_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    interleave: int = 1
    speculative_tokens: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def read_launch(words: Sequence[str]) -> Launch:
    """Read a launch line, given as words or as one string.

    Raises `ArgumentError` where vLLM would not understand it either, or where it starts something else.

    >>> read_launch(["VLLM_LOGGING_LEVEL=DEBUG vllm serve M -tp 8 -dcp 2 --max-model-len auto"]).max_model_len
    'auto'
    """
    environment, command = _split_environment(_split_words(words))
    flags = _read_flags(_insert_file(_server_arguments(command)))
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
    drafts = speculative.get("num_speculative_tokens") or 0
    interleave = _size(flags, "dcp_kv_cache_interleave_size", 1)  # the older name wins where it says more than 1
    return Launch(
        model=flags.get("model"),
        backend=backend or configured,
        env_backend=_backend(environment.get("VLLM_ATTENTION_BACKEND")),
        backend_per_kind=bool(attention.get("backend_per_kind")),
        max_model_len=parse_length(flags["max_model_len"]) if "max_model_len" in flags else None,
        block_size=_size(flags, "block_size", None),
        tensor_parallel=_size(flags, "tensor_parallel_size", 1),
        decode_context_parallel=_size(flags, "decode_context_parallel_size", 1),
        prefill_context_parallel=_size(flags, "prefill_context_parallel_size", 1),
        interleave=interleave if interleave > 1 else _size(flags, "cp_kv_cache_interleave_size", 1),
        speculative_tokens=_size(flags, "spec_tokens", drafts),
        environment=environment,
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


def _split_words(words: Sequence[str]) -> list[str]:
    """One string is split as a shell would, up to the end of its first command; words are taken as they are."""
    if len(words) == 1:
        lexer = shlex.shlex(re.sub(r"\\\r?\n", "", words[0]), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            words = list(lexer)
        except ValueError as error:
            raise ArgumentError(
                f"the launch line cannot be split into words: {error}", remedy="close the quotes"
            ) from None
        end = next((i for i, word in enumerate(words) if _CONTROL.fullmatch(word)), len(words))
        words = words[:end]
    # A backslash that continued a line may arrive as a word of its own.
    return [word for word in words if word.strip("\\\r\n\t ")]


def _split_environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    environment: dict[str, str] = {}
    for index, word in enumerate(words):
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            environment[match[1]] = match[2]
        elif word not in _WRAPPERS:
            return environment, list(words[index:])
    return environment, []


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
        remedy="give `vllm serve MODEL …` or `python -m vllm.entrypoints.openai.api_server --model MODEL …`",
    )


def _flag_model(arguments: list[str]) -> list[str]:
    return ["--model", *arguments] if arguments and not _is_flag(arguments[0]) else arguments


def _insert_file(arguments: list[str]) -> list[str]:
    """Put the flags of ``--config FILE`` before those of the line, which win by coming last."""
    for word in arguments:
        if word.startswith("--config="):
            raise ArgumentError(
                f"vLLM does not read {word}: it looks for --config and the file as two words",
                values={"word": word},
                remedy=f"write --config {word.removeprefix('--config=')}",
            )
    if "--config" not in arguments:
        return arguments
    index = arguments.index("--config")
    path, after = arguments[index + 1 : index + 2], arguments[index + 2 :]
    if not path or "--config" in after:
        raise ArgumentError("--config names one file, and only once", remedy="give one YAML file")
    return [*_file_arguments(path[0]), *arguments[:index], *after]


def _file_arguments(path: str) -> Iterator[str]:
    import yaml  # noqa: PLC0415 - only a launch line with a file pays for the parser

    if not path.endswith((".yaml", ".yml")):
        raise ArgumentError(f"--config {path}: vLLM reads .yaml and .yml files", values={"path": path})
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArgumentError(f"--config {path} cannot be read: {error}", values={"path": path}) from None
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


def _read_flags(arguments: list[str]) -> dict[str, str]:
    """Return the value of each flag that matters; a bare word that belongs to no flag is the model."""
    flags: dict[str, str] = {}
    dotted: dict[str, dict[str, Any]] = {}
    free = False  # whether a bare word here belongs to no flag
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not _is_flag(word):
            if free:
                flags.setdefault("model", word)
            continue
        name, equals, value = word.partition("=")
        key, *path = name.split(".")
        full = _spelling(key)
        flag = _FLAGS.get(full)
        if not flag and not path:
            free = bool(equals) or bool(_SWITCH.match(full))
            continue
        if not equals:
            if position == len(arguments) or (flag and not path and _is_flag(arguments[position])):
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


def _is_flag(word: str) -> bool:
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
    full = [flag for flag in _FLAGS if flag.startswith(key) and flag not in _NEVER_SHORTENED]
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
            remedy=f"""quote it whole, as in {name} '{{"backend": "TRITON_MLA"}}'""",
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
