"""`blocktable shrink`: the fewest calls of a failing recording that still fail, as a test."""

from argparse import ArgumentParser
from pathlib import Path

__all__ = ["command", "options"]


def options(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Cut a failing recording down to a minimal one, and print it as a test."
    parser.add_argument("file", metavar="FILE", help="a recording in which `replay --until-finding` finds something")
    parser.add_argument("--out", metavar="TEST", help="write the test to this file instead")


def command(file: str, *, out: str | None) -> int:
    """Shrink; the test goes to stdout, what was done to stderr."""
    import sys  # noqa: PLC0415 - as late as the rest

    from blocktable.recording.shrink import shrink  # noqa: PLC0415 - loads the compiled loops

    shrunk = shrink(file)
    if out is None:
        print(shrunk.test, end="")  # noqa: T201 - a command's output
    else:
        Path(out).write_text(shrunk.test, encoding="utf-8")
    what = f"{shrunk.failure.kind} {shrunk.failure.law}".strip()
    print(f"{what}: {len(shrunk.calls)} of {shrunk.before} calls are left", file=sys.stderr)  # noqa: T201
    return 0
