"""What stands around the command that starts a server: `env`, `uv run`, `numactl`, a shell's `-c`, a container.

>>> unwrap("docker run --gpus all -e A=1 vllm/vllm-openai:v0.19.1 --model M -tp 8".split())
Wrapped(command=['vllm', 'serve', '--model', 'M', '-tp', '8'], environment={'A': '1'}, release='vllm==0.19.1')
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from blocktable.errors import ArgumentError

__all__ = ["Wrapped", "split_words", "unwrap"]

_PREFIXES: Final = frozenset({"env", "exec", "nohup", "sudo", "time"})
# They start what comes after their own options, which differ too much to be listed here.
_STARTERS: Final = frozenset(
    {"uv", "uvx", "poetry", "pipenv", "conda", "pixi", "numactl", "taskset", "nice", "ionice", "timeout", "setsid"}
    | {"stdbuf", "srun", "mpirun", "nsys", "kubectl", "docker", "podman", "apptainer", "singularity", "ray", "screen"}
)
_SHELLS: Final = frozenset({"bash", "sh", "zsh"})
_IMAGE: Final = re.compile(r"(?:[\w.-]+(?::\d+)?/)+(vllm|sglang)[\w.-]*(?::(?P<tag>[\w.-]+))?(?:@sha256:\w+)?")
_RELEASE: Final = re.compile(r"v?(\d+\.\d+\.\d+(?:\.post\d+)?)(?=$|-)")
_CONTROL: Final = re.compile(r"[;&|<>]+")


class Wrapped(NamedTuple):
    """The command inside, the variables set for it, and the release that an image names: "" where there is no image.

    An image whose tag is no release (``latest``) is the engine's name alone.
    """

    command: list[str]
    environment: Mapping[str, str]
    release: str = ""


def split_words(text: str) -> list[str]:
    """Split a line as a shell would, up to the end of its first command; raises ArgumentError for an open quote."""
    lexer = shlex.shlex(re.sub(r"\\\r?\n", "", text), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ArgumentError(f"the launch line cannot be split into words: {error}", remedy="close the quotes") from None
    end = next((i for i, word in enumerate(words) if _CONTROL.fullmatch(word)), len(words))
    return words[:end]


def unwrap(words: Sequence[str]) -> Wrapped:
    """Return the command that really starts, however it is wrapped; words that nothing wraps come back as they are."""
    environment: dict[str, str] = {}
    words = _strip(words, environment)
    program = PurePosixPath(words[0]).name if words else ""
    if program in ("docker", "podman") and (found := _in_container(words, environment)):
        inner = unwrap(found.command)
        return inner._replace(environment={**environment, **inner.environment}, release=found.release)
    if flag := _shell_flag(words):
        inner = unwrap(split_words(words[flag + 1])) if flag + 1 < len(words) else Wrapped([], {})
        return inner._replace(environment={**environment, **inner.environment})
    if program in _STARTERS:
        start = next((i for i in range(1, len(words)) if _starts_server(words[i:]) or _shell_flag(words[i:])), 0)
        inner = unwrap(words[start:]) if start else Wrapped(words, {})
        return inner._replace(environment={**environment, **inner.environment})
    return Wrapped(words, environment)


def _strip(words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Return what follows the variables that are set before a command, and note those."""
    for index, word in enumerate(words):
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
            environment[match[1]] = match[2]
        elif word not in _PREFIXES:
            return list(words[index:])
    return []


def _shell_flag(words: Sequence[str]) -> int:
    """Return where a shell is told that a line follows; 0 for another program, or for a shell that reads a file."""
    if not words or PurePosixPath(words[0]).name not in _SHELLS:
        return 0
    return next((i for i, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)), 0)


def _starts_server(words: Sequence[str]) -> bool:
    program, *rest = PurePosixPath(words[0]).name, *words[1:3]
    module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
    return (program in ("vllm", "sglang") and rest[:1] == ["serve"]) or (
        program.startswith("python") and module.startswith(("vllm.entrypoints", "sglang.launch_server"))
    )


def _in_container(words: list[str], environment: dict[str, str]) -> Wrapped | None:
    """Return the command of ``docker run … IMAGE …``, noting its variables; None where no image of an engine is named."""
    image = next((i for i, word in enumerate(words) if _IMAGE.fullmatch(word)), 0)
    if not image:
        return None
    entry: list[str] = []
    for flag, value in pairwise(words[: image + 1]):
        name, equals, inline = flag.partition("=")
        given = inline if equals else value
        if name in ("-e", "--env"):
            key, _, text = given.partition("=")
            environment[key] = text
        elif name == "--entrypoint":
            entry = [given]
    match = _IMAGE.fullmatch(words[image])
    engine, tag = (match[1], match["tag"] or "") if match else ("", "")
    version = _RELEASE.match(tag)
    rest = words[image + 1 :]
    if not entry and engine == "vllm" and (not rest or rest[0].startswith("-") or not _names_program(rest[0])):
        entry = ["vllm", "serve"]  # the image's own
    return Wrapped([*entry, *rest], environment, f"{engine}=={version[1]}" if version else engine)


def _names_program(word: str) -> bool:
    name = PurePosixPath(word).name
    return name in _SHELLS | _STARTERS | _PREFIXES | {"vllm", "sglang"} or name.startswith("python")
