"""`blocktable shrink`: the fewest calls of a failing recording that still fail, as a test."""

import json
from argparse import ArgumentParser
from pathlib import Path

__all__ = ["command", "options"]


def options(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Cut a failing recording down to a minimal one, and print it as a test."
    parser.add_argument("file", metavar="FILE", help="a recording in which `replay --until-finding` finds something")
    parser.add_argument("--out", metavar="TEST", help="write the test to this file instead")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object, the test in it")
    parser.add_argument("--quiet", "-q", action="store_true", help="do not say what was done")


def command(file: str, *, out: str | None, as_json: bool, quiet: bool) -> int:
    """Shrink; the test goes to stdout, what was done to stderr."""
    import sys  # noqa: PLC0415 - as late as the rest

    from blocktable.cli.output import check_output  # noqa: PLC0415
    from blocktable.recording.format import older_half  # noqa: PLC0415
    from blocktable.recording.shrink import shrink  # noqa: PLC0415 - loads the compiled loops

    if out is not None:
        check_output(Path(out), Path(file), older_half(file))
    shrunk = shrink(file)
    kind, law, left = shrunk.failure.kind, shrunk.failure.law, len(shrunk.calls)
    if out is not None:
        Path(out).write_text(shrunk.test, encoding="utf-8")
    if as_json:
        told = {"kind": kind, "law": law or None, "calls": left, "before": shrunk.before, "test": shrunk.test}
        print(json.dumps(told, ensure_ascii=False))  # noqa: T201 - a command's output
    elif out is None:
        print(shrunk.test, end="")  # noqa: T201
    if not quiet:
        print(f"{f'{kind} {law}'.strip()}: {left} of {shrunk.before} calls are left", file=sys.stderr)  # noqa: T201
    return 0
