"""`blocktable view`: a recorded run, drawn as it stood after a step: pool, rows, prefixes."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktable.errors import ArgumentError

if TYPE_CHECKING:
    from blocktable.view.picture import Picture

__all__ = ["command", "options"]


def options(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    parser.description = (
        "Draw what a recorded run held: the pool with its owners, every row in its parts, the tree of cached prefixes. "
        "Of a live cache draw with blocktable.view from Python. Exit status: 0 drawn, 2 wrong usage or input."
    )
    add("file", metavar="FILE", help="a recording, plain or gzipped")
    add(
        "--to",
        "--step",
        dest="to",
        type=int,
        metavar="STEP",
        help="as it stood after so many commits (default: the end)",
    )
    add(
        "--object",
        dest="number",
        type=int,
        default=0,
        metavar="N",
        help="of several recorded caches, which (default: 0)",
    )
    add("--row", type=int, metavar="ROW", help="only this row")
    add("--html", metavar="OUT", help="write a page to this file instead")
    add("--json", dest="as_json", action="store_true", help="print one JSON object")
    add("--quiet", "-q", action="store_true", help="the picture alone, without the line above it")


def command(
    *, file: str, to: int | None, number: int, row: int | None, html: str | None, as_json: bool, quiet: bool
) -> int:
    """Replay the recording so far, and draw it."""
    from blocktable import view  # noqa: PLC0415 - loads the compiled loops
    from blocktable.cli.output import check_output  # noqa: PLC0415 - as late as the rest
    from blocktable.recording import replay  # noqa: PLC0415
    from blocktable.recording.format import older_half  # noqa: PLC0415
    from blocktable.sanitize.watch import Watch  # noqa: PLC0415
    from blocktable.view.picture import Picture  # noqa: PLC0415
    from blocktable.view.text import draw_row  # noqa: PLC0415

    if html is not None:
        if row is not None or as_json:
            raise ArgumentError(
                f"--html draws everything on a page, without {'--json' if row is None else '--row'}",
                values={"html": html, "row": row, "json": as_json},
                remedy="leave one of them out",
            )
        check_output(Path(html), Path(file), older_half(file))
    replayed = replay(file, to=to)
    if not 0 <= number < len(replayed.objects):
        raise ArgumentError(
            f"--object {number}: {file} holds {len(replayed.objects)} caches or tables", remedy="they count from 0"
        )
    found = replayed.objects[number]
    if isinstance(found, Watch):
        raise ArgumentError(
            f"object {number} of {file} is a watcher, which has no pool to draw",
            remedy="ask recording.history for what a row held",
        )
    if html is not None:
        Path(html).write_text(view.html(found, f"{Path(file).name} after {replayed.steps} steps"), encoding="utf-8")
        return 0
    picture = Picture(found)
    if as_json:
        print(json.dumps(_facts(picture, replayed.steps, row)))  # noqa: T201 - a command's output
    elif row is not None:
        print("\n\n".join(draw_row(picture, picture.row(row, g)) for g in range(len(picture.groups))))  # noqa: T201
    else:
        if not quiet:
            print(f"after step {replayed.steps}; a recording renames tokens: the same prefixes stay equal")  # noqa: T201
        print(view.text(found))  # noqa: T201
    return 0


def _facts(picture: "Picture", steps: int, row: int | None) -> dict[str, Any]:
    rows = picture.used if row is None else [row]
    drawn = [picture.row(r, g) for r in rows for g in range(len(picture.groups))]
    return {
        "step": steps,
        "blocks": picture.counts,
        "rows": [
            {
                "row": one.row,
                "group": one.group,
                "kind": one.kind,
                "length": one.length,
                "final": one.final,
                "parts": [
                    {"name": part.name, "start": part.start, "count": part.size, "ids": part.ids} for part in one.parts
                ],
            }
            for one in drawn
        ],
    }
