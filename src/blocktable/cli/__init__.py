"""The command line: `main` starts ``blocktable``; each command lives in a file of its own, imported when it is called.

Exit codes: 0 done or accepted · 1 refused, or a finding · 2 wrong usage or input · 3 not known · 130 interrupted ·
70 a defect of this program.
"""

import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import blocktable
from blocktable.errors import BlockTableError

if TYPE_CHECKING:
    import typer

__all__ = ["application", "main", "run"]

# A command's module, named like it, offers `command`; its docstring is the help, and SETTINGS go to its parser.
COMMANDS = {
    "check": "say whether a server's launch would be refused for its block tables, and how to mend it",
    "backends": "list what each attention backend demands, or explain one",
    "simulate": "drive block tables through an hour or a day of traffic",
}

_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it
_DEFECT = 70  # EX_SOFTWARE
_INTERRUPTED = 130  # 128 + SIGINT
_NO_TERMINAL = 10_000  # columns: help that is piped or stored is not wrapped


def main() -> None:
    """Run ``blocktable`` with the arguments of the process, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    >>> run(["--version"])
    blocktable 0.1.0
    0
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "·" gets "?", not a traceback
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in COMMANDS:
        try:
            application(name)(rest, prog_name=f"blocktable {name}")
        except SystemExit as done:
            return done.code if isinstance(done.code, int) else 0
        except Exception:  # noqa: BLE001 - a defect of ours must not exit like a verdict
            traceback.print_exc()
            return _DEFECT
    elif name in ("-V", "--version"):
        print(f"blocktable {blocktable.__version__}")  # noqa: T201 - a command's output
    elif name in ("-h", "--help"):
        print(_usage())  # noqa: T201 - a command's output
    else:
        near = get_close_matches(name, COMMANDS, n=1)
        wrong = f"blocktable: no command {name!r}" + (f"; did you mean {near[0]}?" if near else "") if name else ""
        print("\n".join(filter(None, (wrong, _usage()))), file=sys.stderr)  # noqa: T201 - a command's output
        return 2
    return 0


def application(name: str) -> "typer.Typer":
    """Return the application of one command; nothing else of the command line is imported."""
    import typer  # noqa: PLC0415 - `blocktable --version` and the other commands do without

    module = import_module(f"blocktable.cli.{name}")
    settings = {"help_option_names": ["-h", "--help"]} | getattr(module, "SETTINGS", {})
    if not sys.stdout.isatty():
        settings |= {"terminal_width": _NO_TERMINAL, "max_content_width": _NO_TERMINAL}
    # Without markup Typer never loads rich, neither for help nor for errors.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, context_settings=settings)(_guarded(module.command))
    return app


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {says}" for name, says in COMMANDS.items()]
    return "\n".join(
        ["usage: blocktable COMMAND …   (blocktable COMMAND --help says more; --version)", "", "commands:", *lines]
    )


def _guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn what a command returns or raises into an exit code, without a traceback for what a user can cause."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        import typer  # noqa: PLC0415 - loaded by the caller already

        try:
            try:
                code = command(*args, **kwargs) or 0
            except typer.Exit as done:
                code = done.exit_code
            sys.stdout.flush()
        except BlockTableError as error:
            print(f"{command.__module__.replace('.cli.', ' ')}: {error}", file=sys.stderr)  # noqa: T201
            code = 2
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except BrokenPipeError:
            # The reader left: quiet, and nothing more is written when the interpreter closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = _BROKEN_PIPE
        raise typer.Exit(code)

    return guarded
