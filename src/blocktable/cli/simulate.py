"""`blocktable simulate`: replay an hour of traffic through a KV cache, and say what the pool and the kernel saw."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from blocktable.errors import ArgumentError, BlockTableError
from blocktable.geometry import plan

if TYPE_CHECKING:
    from blocktable.geometry import Geometry
    from blocktable.simulate import Simulation
    from blocktable.traces import Trace

__all__ = ["command"]

ASSUMED_MODEL_LEN = 131072  # tokens
ASSUMED_POOL = 524288  # tokens, some 36 GB of an 8B model or of DeepSeek's latent cache at 16 bits
SHOWN = 10  # line numbers in a message
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class PrefixCache(StrEnum):
    """Whether what was computed stays for later prompts: not at all, or until its block is the longest idle."""

    OFF = "off"
    LRU = "lru"


def command(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Mooncake JSON lines or Azure CSV; without it, a synthetic hour.", show_default=False),
    ] = None,
    *,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 32,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Blocks of the pool, the null block included.",
            show_default=f"{ASSUMED_POOL} tokens, or one request of --max-model-len",
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 256,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the longest request, prompt and output; longer ones are refused.",
            show_default=f"{ASSUMED_MODEL_LEN}, or what --num-blocks holds",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A kernel that checks the tables at every step, such as FLASHINFER_MLA; may be repeated."),
    ] = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens that a step computes at most.")] = 8192,
    prefix_cache: Annotated[
        PrefixCache | None,
        typer.Option(
            help="Keep what was computed for prompts that begin alike; the longest idle block goes first.",
            show_default="lru where the trace has hash ids, else off",
        ),
    ] = None,
    step_ms: Annotated[float, typer.Option(help="Simulated milliseconds per step.")] = 30.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic hour.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Verify the laws at every step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Drive a trace of requests through a KV cache by continuous batching, without a model.

    Every step ends as an engine's does: the slots are there, the changed entries are committed, and the kernel is asked
    whether it accepts the table. Exit status: 0 done, 1 a law broken or a table refused, 2 wrong usage or input, 130
    interrupted, with the counts so far.
    """
    try:
        geometry, blocks = _size(block_size, num_blocks, max_model_len, backend or [])
        requests = _requests(trace, seed, limit, geometry)
        simulation = _simulation(
            requests,
            geometry,
            num_blocks=blocks,
            max_rows=max_rows,
            token_budget=token_budget,
            step_ms=step_ms,
            prefix_cache=None if prefix_cache is None else prefix_cache is PrefixCache.LRU,
            check=check,
        )
    except (BlockTableError, OSError, MemoryError) as error:
        _wrong(error)
    except KeyboardInterrupt:
        typer.echo("interrupted before the first step", err=True)
        raise typer.Exit(INTERRUPTED) from None

    finding, interrupted = "", False
    try:
        _drive(simulation)
    except BlockTableError as error:
        finding = str(error)
    except KeyboardInterrupt:
        interrupted = True
    facts = _facts(simulation, requests, finding=finding, interrupted=interrupted)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _print(_lines(facts, geometry))
    if finding:
        typer.echo(f"finding at step {facts['steps'] + 1}: {finding}", err=True)
    if finding or interrupted:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _wrong(error: BaseException) -> NoReturn:
    text = str(error) or "out of memory"
    if isinstance(error, OSError):
        text = f"cannot read {error.filename}: {error.strerror}"
    typer.echo(f"blocktable simulate: {text}", err=True)
    raise typer.Exit(2)


def _size(
    block_size: int, num_blocks: int | None, max_model_len: int | None, backends: list[str]
) -> "tuple[Geometry, int]":
    """Plan the tables, and settle the limits that were not given."""
    if max_model_len is None:
        held = ASSUMED_MODEL_LEN if num_blocks is None else (num_blocks - 1) * block_size
        max_model_len = min(ASSUMED_MODEL_LEN, held)
    geometry = plan(max_model_len=max_model_len, block_size=block_size, contracts=backends)
    if num_blocks is None:
        num_blocks = max(ASSUMED_POOL // block_size, geometry.min_blocks) + 1
    return geometry, num_blocks


def _requests(path: Path | None, seed: int, limit: int | None, geometry: "Geometry") -> "Trace":
    """Read or make the trace, and name its bad lines on stderr."""
    from blocktable.traces import read_trace, synthetic  # noqa: PLC0415 - help and wrong usage need no NumPy

    trace = synthetic(seed, max_model_len=geometry.max_model_len) if path is None else read_trace(path)
    for line in trace.bad_lines[:SHOWN]:
        typer.echo(f"{path} line {line.number} is no request: {line.reason}", err=True)
    if len(trace.bad_lines) > SHOWN:
        typer.echo(f"{path}: {len(trace.bad_lines) - SHOWN} more lines are no requests", err=True)
    return trace if limit is None else trace.first(limit)


def _simulation(trace: "Trace", geometry: "Geometry", **limits: Any) -> "Simulation":
    from blocktable.simulate import Simulation  # noqa: PLC0415 - nor compiled loops

    simulation = Simulation(trace, geometry, **limits)
    if simulation.done:
        raise ArgumentError(
            f"each of the {len(trace)} requests is longer than max_model_len {geometry.max_model_len}",
            law="L1",
            values={"requests": len(trace), "max_model_len": geometry.max_model_len},
            remedy=f"--max-model-len {int((trace.input_length + trace.output_length).max())} serves all of them",
        )
    return simulation


def _drive(simulation: "Simulation") -> None:
    """Run to the end, with a progress bar where somebody watches."""
    if not sys.stderr.isatty():
        simulation.run()
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
        simulation.run(_reporter(simulation, progress))


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


def _facts(simulation: "Simulation", trace: "Trace", *, finding: str, interrupted: bool) -> dict[str, Any]:
    geometry = simulation.geometry
    return asdict(simulation.summary()) | {
        "bad_lines": [asdict(line) for line in trace.bad_lines],
        "interrupted": interrupted,
        "finding": finding or None,
        "block_size": geometry.block_size,
        "kernel_block_size": geometry.kernel_block_size,
        "width": geometry.width,
        "kernel_width": geometry.kernel_width,
        "padding": geometry.padding,
        "max_model_len": geometry.max_model_len,
        "num_blocks": simulation.num_blocks,
        "max_rows": simulation.max_rows,
        "token_budget": simulation.token_budget,
        "prefix_cache": PrefixCache.LRU if simulation.prefix_cache else PrefixCache.OFF,
    }


def _lines(facts: dict[str, Any], geometry: "Geometry") -> list[tuple[str, str]]:
    """Return the summary as pairs of a label and a sentence."""
    usable, steps = facts["usable_blocks"], facts["steps"]
    held = facts["mean_blocks"] * geometry.block_size
    lines = [("requests", f"{facts['finished']:,} of {facts['requests']:,} finished")]
    if facts["interrupted"]:
        lines.insert(0, ("interrupted", "the counts are those of the steps so far"))
    if facts["refused"]:
        named = ", ".join(map(str, facts["refused_lines"][:SHOWN])) + (", …" if facts["refused"] > SHOWN else "")
        lines.append(("refused", f"{facts['refused']:,} longer than {geometry.max_model_len:,} tokens: line {named}"))
    if facts["bad_lines"]:
        lines.append(("bad lines", f"{len(facts['bad_lines']):,} of the trace are no requests"))
    again = f"{facts['recomputed_tokens']:,} lost to preemption"
    peak = f"peak {facts['peak_blocks']:,} ({_percent(facts['peak_blocks'], usable)})"
    mean = f"mean {facts['mean_blocks']:,.0f} ({_percent(facts['mean_blocks'], usable)})"
    wasted = f"{facts['mean_wasted_tokens']:,.0f} tokens in half-full blocks on average"
    changed, copied = facts["changed_entries"], facts["full_copy_entries"]
    factor = f"{copied / max(changed, 1):,.0f} times as many"
    lines += [
        ("steps", f"{steps:,} in {facts['simulated_seconds']:,} simulated s, {facts['us_per_step']:.0f} µs each here"),
        ("tokens", f"{facts['computed_tokens']:,} computed, {again}; {facts['output_tokens']:,} generated"),
        ("prefixes", _prefix_line(facts)),
        ("preemptions", f"{facts['preemptions']:,}"),
        ("blocks", f"{peak}, {mean} of {usable:,}"),
        ("wasted", f"{wasted}, {_percent(facts['mean_wasted_tokens'], held)} of what is held"),
        ("entries", f"{changed:,} changed against {copied:,} of a full copy per step, {factor}"),
        ("kernel", _kernel_line(facts, geometry)),
    ]
    if facts["law_checks"]:
        lines.append(("laws", f"verified at {facts['law_checks']:,} steps"))
    return lines


def _prefix_line(facts: dict[str, Any]) -> str:
    if facts["prefix_cache"] == PrefixCache.OFF:
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


def _print(lines: list[tuple[str, str]]) -> None:
    """Print a table on a terminal, and plain text, whole lines of it, elsewhere."""
    if not sys.stdout.isatty():
        for label, text in lines:
            typer.echo(f"{label:<12} {text}")
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe gets plain text
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for label, text in lines:
        table.add_row(Text(label, style="bold"), Text(text))
    Console().print(table)
