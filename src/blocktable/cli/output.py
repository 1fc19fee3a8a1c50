"""What all commands say alike: lines and tables, whole and plain where nobody watches, and the status of an interrupt."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blocktable.errors import ArgumentError

if TYPE_CHECKING:
    from blocktable.traces import BadLine

__all__ = [
    "INTERRUPTED",
    "SHOWN",
    "Row",
    "check_output",
    "kept_beside",
    "name_bad_lines",
    "print_columns",
    "print_rows",
]

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
SHOWN = 10  # line numbers in a message


class Row(NamedTuple):
    """A line with its label; ``style`` is a colour for the label on a terminal."""

    label: str
    text: str
    style: str = ""


def check_output(path: Path, *others: Path) -> None:
    """Raise `ArgumentError` where a file could not be written, before hours are spent on what goes into it.

    Nor may it be one of ``others``, which the same command reads or writes.
    """
    for other in others:
        if _is_same(path, other):
            raise ArgumentError(
                f"cannot write {path} over {other}, which this command reads or writes too",
                values={"path": str(path), "other": str(other)},
                remedy="name another file",
            )
    folder, why = path.absolute().parent, ""
    if not folder.is_dir():
        why = "its folder does not exist"
    elif path.is_dir():
        why = "it is a folder"
    elif path.is_symlink() and not path.exists():
        why = "it is a link to nothing"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "permission denied"
    if why:
        raise ArgumentError(
            f"cannot write {path}: {why}", values={"path": str(path)}, remedy="make it, or name a file elsewhere"
        )


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one is not there; they may still be names of the same
        return os.path.realpath(path) == os.path.realpath(other)
    except ValueError:  # a name that no system takes
        return False


def kept_beside(results: Path) -> Path:
    """Return where a study keeps its finished cells, so that the same line goes on."""
    return results.with_name(f"{results.name}.cells.jsonl")


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows with their texts below one another; a pipe gets every line whole.

    >>> print_rows([Row("refused", "295 columns"), Row("", "ways out: none")])
    refused  295 columns
             ways out: none
    """
    if not sys.stdout.isatty():
        width = max((len(row.label) for row in rows), default=0)
        for row in rows:
            print(f"{row.label:<{width}}  {row.text}")  # noqa: T201 - a command's output
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe does without
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(Text(row.label, style=f"bold {row.style}".strip()), Text(row.text))
    Console().print(table)


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print a table whose first line is its header.

    >>> print_columns([("BACKEND", "WIDTH"), ("TRITON_MLA", "AnyWidth")])
    BACKEND     WIDTH
    TRITON_MLA  AnyWidth
    """
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())  # noqa: T201
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe does without
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(lines[0]):
        table.add_column(name, overflow="fold", no_wrap=index == 0)  # the first names the row
    for line in lines[1:]:
        table.add_row(*line)
    Console(markup=False).print(table)


def name_bad_lines(path: str | None, bad_lines: "Sequence[BadLine]") -> None:
    """Say on stderr which lines of a trace are no requests."""
    for line in bad_lines[:SHOWN]:
        print(f"{path} line {line.number} is no request: {line.reason}", file=sys.stderr)  # noqa: T201
    if len(bad_lines) > SHOWN:
        print(f"{path}: {len(bad_lines) - SHOWN} more lines are no requests", file=sys.stderr)  # noqa: T201
