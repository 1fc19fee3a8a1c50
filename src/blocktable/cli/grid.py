"""Many cells of `blocktable simulate`: bars for each and for all, a comparison, and files of the results."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from blocktable.cli.output import INTERRUPTED, kept_beside, name_bad_lines, print_columns
from blocktable.results import COMPARED, differing, label, shown, write_results
from blocktable.study import ASSUMED_MODEL_LEN, Cell, Record, Source, Study, mark_front

__all__ = ["run_grid"]

Tell = Callable[[int], object]


def run_grid(
    cells: Sequence[Cell],
    source: Source,
    *,
    engine: str | None,
    jobs: int | None,
    ray: str | None,
    results: Path | None,
    report: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run the cells, write and print what they say, and return the exit code."""
    for cell in dict.fromkeys(cells):
        cell.verdict(engine)  # an unknown name is wrong usage, before anything runs
    if source.path is not None:
        name_bad_lines(source.path, source.load(ASSUMED_MODEL_LEN).bad_lines)
    kept = None if results is None else kept_beside(results)
    interrupted = False
    with TemporaryDirectory(prefix="blocktable-") as folder:
        watched = sys.stderr.isatty() and not quiet
        progress = Path(folder) if watched else None
        study = Study(cells, source, engine=engine, jobs=jobs, kept=kept, progress=progress, ray=ray)
        before = len(study.done())
        if before and not quiet:
            typer.echo(f"{before} of {len(cells)} cells are done already, in {kept}", err=True)
        try:
            with _bars(study, progress) as tell:
                study.run(tell)
        except KeyboardInterrupt:
            interrupted = True
    records = study.done()
    mark_front(records)
    try:
        _write(records, source, results, report)
    finally:  # what was counted is told, whatever becomes of the files
        if as_json:
            plain = [{name: value for name, value in record.items() if name != "curves"} for record in records]
            typer.echo(json.dumps({"cells": plain, "missing": len(cells) - len(records), "interrupted": interrupted}))
        else:
            _print(records, len(cells))
    if interrupted:
        again = "run the same line again to go on" if kept else "nothing is kept without --results"
        typer.echo(f"interrupted after {len(records)} of {len(cells)} cells; {again}", err=True)
        return INTERRUPTED
    return _code(records)


def _code(records: Sequence[Record]) -> int:
    if any(record.get("finding") for record in records):
        return 1
    return 2 if all(record["unfit"] for record in records) else 0


def _write(records: Sequence[Record], source: Source, results: Path | None, report: Path | None) -> None:
    if not records:
        return
    if results is not None:
        write_results(results, records)
    if report is not None:
        from blocktable.report import page  # noqa: PLC0415 - plotly, only here

        report.write_text(page(records, source.title), encoding="utf-8")


def _print(records: Sequence[Record], total: int) -> None:
    """Print the comparison, best cells marked, and why others did not run or would be refused."""
    if not records:
        return
    names = differing(records)
    head = ("", "cell", "check", *(heading for heading, _ in COMPARED.values()))
    lines = [
        ("*" if r["front"] else "", label(r, names), r["verdict"] or "-", *(shown(r, name) for name in COMPARED))
        for r in records
    ]
    print_columns([head, *lines])
    typer.echo("")
    typer.echo(
        f"* on the Pareto front of {len(records)} cells"
        + (f" ({total - len(records)} did not run)" if total > len(records) else "")
        + ": no other has as little pool, as few preemptions, as many hits and as early first tokens (in steps)"
    )
    stopped = [(label(r, names), r["unfit"] or r.get("finding")) for r in records]
    for cell, reason in dict.fromkeys(stopped):
        if reason:
            typer.echo(f"{cell}: {reason}")
    ran = [record for record in records if not record["unfit"]]
    for engine, reason in dict.fromkeys(
        (r["verdict_engine"], r["verdict_reason"]) for r in ran if r["verdict"] == "refused"
    ):
        typer.echo(f"refused for {engine}: {reason}")


@contextmanager
def _bars(study: Study, progress: Path | None) -> Iterator[Tell]:
    """Show a bar for all cells and one for each that runs; the workers say in files how far they are."""
    if progress is None:
        yield lambda _i: None
        return
    from rich import progress as bars  # noqa: PLC0415 - nobody watches a pipe
    from rich.console import Console  # noqa: PLC0415

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[rate]}"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("left"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown_bars:
        overall = shown_bars.add_task("cells", total=len(study.cells), completed=len(study.done()), rate="")
        tasks: dict[str, Any] = {}
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.3):
                _refresh(shown_bars, tasks, study, progress)

        def tell(i: int) -> None:
            shown_bars.update(overall, completed=len(study.done()))
            (progress / str(i)).unlink(missing_ok=True)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield tell
        finally:
            stop.set()
            watcher.join()


def _refresh(shown_bars: Any, tasks: dict[str, Any], study: Study, progress: Path) -> None:
    running = {path.name: path for path in progress.iterdir()}
    for name in set(tasks) - set(running):
        shown_bars.remove_task(tasks.pop(name))
    for name, path in running.items():
        try:
            finished, total, steps = map(int, path.read_text().split())
        except (OSError, ValueError):
            continue  # being written, or done
        if name not in tasks:
            tasks[name] = shown_bars.add_task(_name(study.cells[int(name)]), total=total, rate="")
        shown_bars.update(tasks[name], completed=finished, rate=f"{steps:,} steps")


def _name(cell: Cell) -> str:
    pool = (
        f"{cell.num_blocks:,} blocks" if cell.num_blocks else f"{cell.pool_tokens:,} tokens" if cell.pool_tokens else ""
    )
    prefix = {None: "", True: "lru", False: "off"}[cell.prefix_cache]
    return " ".join(filter(None, (f"block {cell.block_size}", pool, "+".join(cell.backends), prefix)))
