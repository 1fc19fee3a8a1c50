"""The command line: `main` starts ``blocktable``; each command lives in a file of its own, imported when it is called.

Exit codes: 0 done or accepted · 1 refused, or a finding · 2 wrong usage or input · 3 not known · 130 interrupted ·
70 a defect of this program.
"""

import io
import os
import sys
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from blocktable.cli.output import INTERRUPTED
from blocktable.errors import BlockTableError

__all__ = ["main", "run"]

# Each command's module is named like it and offers `command`, which returns an exit code or None. That of `run` has another
# name: once imported, a module `run` would take the place of the function here.
COMMANDS = {
    "check": "say whether a server's launch would be refused for its block tables, and how to mend it",
    "backends": "list what each attention backend demands, or explain one",
    "run": "answer prompts with a real model, through checked block tables",
    "simulate": "drive block tables through an hour or a day of traffic, or a grid of settings through it",
    "view": "draw what a recorded run held: pool, rows, prefixes",
    "bench": "measure every claim of speed beside the engines installed here",
    "replay": "run a recorded run again, to the same digest or to the first broken law",
    "shrink": "cut a failing recording down to a minimal test",
}

MODULES = {name: name for name in COMMANDS} | {"run": "run_model"}

_DEFECT = 70  # EX_SOFTWARE
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it
_NO_TERMINAL = 10_000  # columns: help that is piped or stored is not wrapped


def main() -> None:
    """Run ``blocktable`` with the arguments of the process, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    >>> run(["check", "--backend", "FLASHINFER_MLA", "--max-model-len", "-5"])
    2
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "·" gets "?", not a traceback
        elif stream is None:  # closed by whoever started this
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in COMMANDS:
        return _guarded(partial(_start, name, rest), name)
    if name in ("-V", "--version", "--completion"):
        return _guarded(partial(_about, name, rest), name)
    if name in ("-h", "--help"):
        return _guarded(partial(print, _usage()), name)
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong name needs it

    near = get_close_matches(name, COMMANDS, n=1)
    wrong = f"blocktable: no command {name!r}" + (f"; did you mean {near[0]}?" if near else "") if name else ""
    print("\n".join(filter(None, (wrong, _usage()))), file=sys.stderr)  # noqa: T201 - a command's output
    return 2


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {says}" for name, says in COMMANDS.items()]
    return "\n".join(
        [
            "usage: blocktable COMMAND …   (blocktable COMMAND --help says more; --version; --completion bash|zsh|fish)",
            "",
            "commands:",
            *lines,
        ]
    )


def _about(name: str, arguments: Sequence[str]) -> int:
    from blocktable.cli.about import completion, versions  # noqa: PLC0415 - slow, and commands do without

    print(completion(arguments[0] if arguments else "", COMMANDS, MODULES) if name == "--completion" else versions())  # noqa: T201
    return 0


def _guarded(command: Callable[[], int | None], name: str) -> int:
    """Run a command; what it raises becomes an exit code, without a traceback for what a user can cause."""
    try:
        code = _ended(command)
        sys.stdout.flush()
    except BlockTableError as error:
        print(f"blocktable {name}: {error}", file=sys.stderr)  # noqa: T201 - a command's output
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        _flush_or_drop()
        if isinstance(error, BrokenPipeError):
            return _BROKEN_PIPE  # the reader left, and need not be told
        print(f"blocktable {name}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 2
    except Exception:  # noqa: BLE001 - a defect of ours must not exit like a verdict
        import traceback  # noqa: PLC0415 - only a defect needs it

        traceback.print_exc()
        return _DEFECT
    return code


def _flush_or_drop() -> None:
    """Write what can still be written; where nothing can, the interpreter does not try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ended(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0


def _start(name: str, arguments: list[str]) -> int | None:
    """Read the arguments and call the command.

    A command that must answer at once declares its options to argparse; the others are Typer's, which takes up to
    0.3 s to load and to read a number.
    """
    module = import_module(f"blocktable.cli.{MODULES[name]}")
    if not hasattr(module, "options"):
        return _start_typer(name, module, arguments)
    columns = _NO_TERMINAL
    if sys.stdout.isatty():
        from shutil import get_terminal_size  # noqa: PLC0415 - a pipe does without

        columns = get_terminal_size().columns
    parser = ArgumentParser(
        prog=f"blocktable {name}", allow_abbrev=False, formatter_class=partial(HelpFormatter, width=columns)
    )
    module.options(parser)
    code: int | None = module.command(**vars(parser.parse_args(arguments)))
    return code


def _start_typer(name: str, module: ModuleType, arguments: list[str]) -> int | None:
    import typer  # noqa: PLC0415 - slow, and most commands do without

    settings: dict[str, object] = {"help_option_names": ["-h", "--help"]}
    if not sys.stdout.isatty():
        settings |= {"terminal_width": _NO_TERMINAL, "max_content_width": _NO_TERMINAL}
    # Without markup Typer never loads rich, neither for help nor for errors.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, context_settings=settings)(module.command)
    stdout = sys.stdout
    try:
        code: int | None = app(arguments, prog_name=f"blocktable {name}")
    except SystemExit:
        if sys.stdout is stdout:
            raise
        # Typer saw that the reader left, and would exit with 1, which here is a finding.
        sys.stdout = stdout
        raise BrokenPipeError from None
    return code
