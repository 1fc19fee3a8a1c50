"""`blocktable simulate`: replay an hour of traffic through a KV cache, or through a grid of them, and say what was seen."""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from blocktable.cli.flags import parse_length
from blocktable.cli.output import INTERRUPTED, SHOWN, Row, check_output, kept_beside, name_bad_lines, print_rows
from blocktable.contracts import resolve_engine
from blocktable.errors import ArgumentError, BlockTableError

if TYPE_CHECKING:
    from blocktable.curves import Curves
    from blocktable.geometry import Geometry
    from blocktable.simulate import Simulation
    from blocktable.study import Cell, Record, Source

__all__ = ["command"]


def command(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Mooncake JSON lines or Azure CSV; without it, a synthetic hour.", show_default=False),
    ] = None,
    *,
    block_size: Annotated[str, typer.Option(metavar="N[,N…]", help="Tokens per block.")] = "32",
    num_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Blocks of the pool, the null block included; 20k is 20,000.",
            show_default="524288 tokens, or one request of --max-model-len",
        ),
    ] = None,
    pool_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="The pool in tokens, in place of --num-blocks: block sizes compare fairly at equal memory.",
            show_default=False,
        ),
    ] = None,
    max_rows: Annotated[str, typer.Option(metavar="N[,N…]", help="Requests that run at once.")] = "256",
    max_model_len: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Tokens of the longest request, prompt and output; longer ones are refused.",
            show_default="131072, or what the pool holds",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="A kernel that checks the tables at every step, such as FLASHINFER_MLA. Names after commas take turns; "
            "where the option is repeated, all have to accept.",
        ),
    ] = None,
    token_budget: Annotated[str, typer.Option(metavar="N[,N…]", help="Tokens that a step computes at most.")] = "8192",  # noqa: S107 - tokens, not a secret
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            metavar="off|lru[,…]",
            help="Keep what was computed for prompts that begin alike; the longest idle block goes first.",
            show_default="lru where the trace has hash ids, else off",
        ),
    ] = None,
    step_ms: Annotated[float, typer.Option(help="Simulated milliseconds per step.")] = 30.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic hour.")] = 0,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="vllm==VERSION",
            help="The release that `check` judges each cell for.",
            show_default="the vLLM installed here, else the newest known",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cells that run at once, each in a process.", show_default="the cores of this machine"
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Run the cells on this Ray cluster (`local` starts one).", show_default=False
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a row per cell, as Parquet or CSV by the file's ending. Finished cells are kept beside it: run "
            "the same line again to go on.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write pictures and tables into one file.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Verify the laws at every step.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Drive a trace of requests through a KV cache by continuous batching, without a model.

    Every step ends as an engine's does: the slots are there, the changed entries are committed, and the kernel is asked
    whether it accepts the table. Lists such as --block-size 16,32,64 make a grid: every combination is a cell, simulated by
    itself, and the cells are compared. Exit status: 0 done, 1 a law broken or a table refused, 2 wrong usage or input, 130
    interrupted, with the counts so far.
    """
    try:
        _usable(trace, results, report, engine)
        cells = _cells(
            block_size=_counts(block_size, "--block-size"),
            num_blocks=_counts(num_blocks, "--num-blocks", least=2),
            pool_tokens=_counts(pool_tokens, "--pool-tokens"),
            backends=_backends(backend or []),
            prefix_cache=_prefix_caches(prefix_cache),
            max_model_len=_counts(max_model_len, "--max-model-len"),
            max_rows=_counts(max_rows, "--max-rows"),
            token_budget=_counts(token_budget, "--token-budget"),
            step_ms=[step_ms],
            check=[check],
        )
        source = _source(trace, seed, limit)
        if len(cells) > 1 or results is not None or ray is not None:
            from blocktable.cli.grid import run_grid  # noqa: PLC0415 - many cells, another output

            code = run_grid(
                cells,
                source,
                engine=engine,
                jobs=jobs,
                ray=ray,
                results=results,
                report=report,
                quiet=quiet,
                as_json=as_json,
            )
            raise typer.Exit(code)
        simulation = _begin(cells[0], source)
    except (BlockTableError, OSError, MemoryError) as error:
        _wrong(error)
    except KeyboardInterrupt:
        typer.echo("interrupted before the first step", err=True)
        raise typer.Exit(INTERRUPTED) from None

    from blocktable.curves import Curves  # noqa: PLC0415 - as _cells
    from blocktable.study import facts as count  # noqa: PLC0415

    finding, interrupted, curves = "", False, Curves()
    try:
        _drive(simulation, curves if report else None, quiet=quiet)
    except BlockTableError as error:
        finding = str(error)
    except KeyboardInterrupt:
        interrupted = True
    facts = count(simulation, finding=finding, interrupted=interrupted)
    try:
        if report is not None:
            _report(report, source, cells[0], engine, facts, curves)
    finally:  # what was counted is told, whatever becomes of the file
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            print_rows(_lines(facts, simulation.geometry))
    if finding:
        typer.echo(f"finding at step {facts['steps'] + 1}: {finding}", err=True)
    if finding or interrupted:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _wrong(error: BaseException) -> NoReturn:
    text = str(error) or "out of memory"
    if isinstance(error, OSError):
        if error.filename is None:  # a stream, not a file that was named
            raise error
        text = f"cannot read {error.filename}: {error.strerror}"
    typer.echo(f"blocktable simulate: {text}", err=True)
    raise typer.Exit(2)


def _usable(trace: Path | None, results: Path | None, report: Path | None, engine: str | None) -> None:
    """Refuse at once what could otherwise only be refused after hours."""
    if engine is not None:
        resolve_engine(engine)
    if results is not None and results.suffix not in (".csv", ".parquet"):
        raise ArgumentError(f"--results {results} is neither .csv nor .parquet", remedy="end the name in one of them")
    for path, package in (
        (report, "plotly"),
        (results if results and results.suffix == ".parquet" else None, "pyarrow"),
    ):
        if path is not None and find_spec(package) is None:
            raise ArgumentError(
                f"{path} needs {package}, which is not installed", remedy="pip install 'blocktable[report]'"
            )
    named = [] if trace is None else [trace]
    for path in (results, None if results is None else kept_beside(results), report):
        if path is not None:
            check_output(path, *named)
            named.append(path)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str | None, name: str, least: int = 1) -> list[int | None]:
    """Read a list of numbers, as `check` reads its lengths: 20k is 20,000, 20K is 20,480."""
    if text is None:
        return [None]
    found: list[int | None] = []
    for word in _split(text) or [""]:
        number = parse_length(word, name)
        if number == "auto" or number < least:
            raise ArgumentError(
                f"{name} must be at least {least}, got {word!r}",
                values={name: word},
                remedy="give numbers such as 16,32",
            )
        found.append(number)
    return found


def _backends(given: list[str]) -> "list[tuple[str, ...]]":
    return list(itertools.product(*map(_split, given)))


def _prefix_caches(text: str | None) -> list[bool | None]:
    if text is None:
        return [None]
    known = {"off": False, "lru": True}
    for word in _split(text):
        if word not in known:
            raise ArgumentError(
                f"--prefix-cache {word} is not known", values={"got": word}, remedy="use off, lru or both"
            )
    return [known[word] for word in _split(text)]


def _cells(**axes: "Sequence[Any]") -> "list[Cell]":
    from blocktable.study import grid  # noqa: PLC0415 - help and wrong usage need neither NumPy nor compiled loops

    if axes["num_blocks"] != [None] and axes["pool_tokens"] != [None]:
        raise ArgumentError("--num-blocks and --pool-tokens both set the pool", remedy="give one of them")
    return grid(**axes)


def _source(path: Path | None, seed: int, limit: int | None) -> "Source":
    from blocktable.study import Source  # noqa: PLC0415 - as _cells

    return Source(None if path is None else str(path), seed, limit)


def _begin(cell: "Cell", source: "Source") -> "Simulation":
    geometry, blocks = cell.size()
    trace = source.load(geometry.max_model_len)
    name_bad_lines(source.path, trace.bad_lines)
    return cell.begin(trace, geometry, blocks)


def _report(path: Path, source: "Source", cell: "Cell", engine: str | None, facts: "Record", curves: "Curves") -> None:
    from blocktable.report import page  # noqa: PLC0415 - plotly, only here
    from blocktable.study import mark_front, ratios  # noqa: PLC0415

    record = cell.verdict(engine) | {"backend": "+".join(cell.backends) or None, "unfit": None} | facts
    record |= ratios(record) | {"curves": curves.as_dict()}
    mark_front([record])
    path.write_text(page([record], source.title), encoding="utf-8")


def _drive(simulation: "Simulation", curves: "Curves | None", *, quiet: bool) -> None:
    """Run to the end, with a progress bar where somebody watches."""

    def keep() -> None:
        if curves is not None:
            curves.add(simulation)

    if quiet or not sys.stderr.isatty():
        simulation.run(keep)
        return
    from rich import progress as bars  # noqa: PLC0415 - nobody watches a pipe
    from rich.console import Console  # noqa: PLC0415

    columns = (
        bars.TextColumn("requests"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[rate]} steps/s"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("left"),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tell = _reporter(simulation, progress)

        def after_step() -> None:
            keep()
            tell()

        simulation.run(after_step)


def _reporter(simulation: "Simulation", progress: Any) -> Callable[[], None]:
    task = progress.add_task("requests", total=simulation.requests, rate="")
    started = due = time.perf_counter()

    def report() -> None:
        nonlocal due
        now = time.perf_counter()
        if now >= due:
            rate = f"{simulation.steps / max(now - started, 1e-9):,.0f}"
            progress.update(task, completed=simulation.finished, rate=rate)
            due = now + 0.1

    return report


def _lines(facts: dict[str, Any], geometry: "Geometry") -> list[Row]:
    """Return the summary, a row of a label and a sentence for each matter."""
    usable, steps = facts["usable_blocks"], facts["steps"]
    held = facts["mean_blocks"] * geometry.block_size
    lines = [Row("requests", f"{facts['finished']:,} of {facts['requests']:,} finished")]
    if facts["interrupted"]:
        lines.insert(0, Row("interrupted", "the counts are those of the steps so far"))
    if facts["refused"]:
        named = ", ".join(map(str, facts["refused_lines"][:SHOWN])) + (", …" if facts["refused"] > SHOWN else "")
        lines.append(
            Row("refused", f"{facts['refused']:,} longer than {geometry.max_model_len:,} tokens: line {named}")
        )
    if facts["bad_lines"]:
        lines.append(Row("bad lines", f"{len(facts['bad_lines']):,} of the trace are no requests"))
    again = f"{facts['recomputed_tokens']:,} lost to preemption"
    peak = f"peak {facts['peak_blocks']:,} ({_percent(facts['peak_blocks'], usable)})"
    mean = f"mean {facts['mean_blocks']:,.0f} ({_percent(facts['mean_blocks'], usable)})"
    wasted = f"{facts['mean_wasted_tokens']:,.0f} tokens in half-full blocks on average"
    changed, copied = facts["changed_entries"], facts["full_copy_entries"]
    factor = f"{copied / max(changed, 1):,.0f} times as many"
    lines += [
        Row(
            "steps", f"{steps:,} in {facts['simulated_seconds']:,} simulated s, {facts['us_per_step']:.0f} µs each here"
        ),
        Row("tokens", f"{facts['computed_tokens']:,} computed, {again}; {facts['output_tokens']:,} generated"),
        Row("prefixes", _prefix_line(facts)),
        Row("preemptions", f"{facts['preemptions']:,}"),
        Row("blocks", f"{peak}, {mean} of {usable:,}"),
        Row("wasted", f"{wasted}, {_percent(facts['mean_wasted_tokens'], held)} of what is held"),
        Row("entries", f"{changed:,} changed against {copied:,} of a full copy per step, {factor}"),
        Row("kernel", _kernel_line(facts, geometry)),
    ]
    if facts["law_checks"]:
        lines.append(Row("laws", f"verified at {facts['law_checks']:,} steps"))
    return lines


def _prefix_line(facts: dict[str, Any]) -> str:
    if facts["prefix_cache"] == "off":
        return "not cached"
    hit, query = facts["prefix_hit_tokens"], facts["prefix_query_tokens"]
    return f"{_percent(hit, query)} hit, {hit:,} of {query:,} tokens; {facts['evictions']:,} cached blocks evicted"


def _kernel_line(facts: dict[str, Any], geometry: "Geometry") -> str:
    tables = f"{facts['kernel_checks']:,} tables of {geometry.kernel_width:,} columns"
    if not geometry.contracts:
        return f"{tables} hold max_model_len; no backend was named"
    return f"{tables} accepted by {', '.join(contract.name for contract in geometry.contracts)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"
