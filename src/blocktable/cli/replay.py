"""`blocktable replay`: a recorded run again, to the same digest, to a step, or to the first finding."""

import json
from argparse import ArgumentParser
from typing import Any

__all__ = ["command", "options"]


def options(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Run a recording again and compare everything that it returned."
    parser.add_argument("file", metavar="FILE", help="a recording, plain or gzipped")
    parser.add_argument("--to", type=int, metavar="STEP", help="stop after so many commits")
    parser.add_argument(
        "--until-finding", action="store_true", help="check the laws at each call, stop at the first broken one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing: the exit status is the answer")


def command(file: str, *, to: int | None, until_finding: bool, json: bool, quiet: bool) -> int:
    """Replay; exit 1 where a law is broken or something else is returned than was recorded."""
    from blocktable.recording import replay  # noqa: PLC0415 - loads the compiled loops

    replayed = replay(file, to=to, until_finding=until_finding)
    bad = bool(replayed.finding or replayed.differs)
    if json:
        print(_as_json(replayed))  # noqa: T201 - a command's output
    if json or quiet:
        return int(bad)
    if replayed.finding:
        print(f"finding  {replayed.finding}")  # noqa: T201
    if replayed.differs:
        print(f"differs  {replayed.differs}")  # noqa: T201
    whole = "" if replayed.complete else ", the recording has no end: it was cut off"
    print(f"replayed {replayed.calls} calls, {replayed.steps} steps{whole}")  # noqa: T201
    print(f"digest   {replayed.digest}")  # noqa: T201
    return int(bad)


def _as_json(replayed: Any) -> str:
    found: dict[str, Any] = {
        "calls": replayed.calls,
        "steps": replayed.steps,
        "digest": replayed.digest,
        "complete": replayed.complete,
        "differs": replayed.differs or None,
        "finding": None,
    }
    if replayed.finding:
        values = replayed.finding.values
        places = {name: values.get(name, -1) for name in ("group", "row", "column", "block")}
        found["finding"] = {"law": replayed.finding.law, "text": str(replayed.finding)} | places
    return json.dumps(found)
