"""A capacity study: one trace through a grid of settings, so that an operator can choose among them.

A `Cell` is one combination of settings; `run_cell` simulates it and asks `check` about it; `Study` runs all cells on
several processes, keeps each as soon as it is done, and goes on where an interrupted run ended. A cell depends on nothing
but its settings and the trace, so the same cell gives the same counts wherever and whenever it runs.
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blocktable
from blocktable.curves import Curves
from blocktable.errors import ArgumentError, BlockTableError
from blocktable.geometry import Geometry, plan
from blocktable.preflight import Launch, find_release, judge, worst
from blocktable.simulate import Simulation
from blocktable.traces import Trace, read_trace, synthetic

__all__ = [
    "ASSUMED_MODEL_LEN",
    "ASSUMED_POOL",
    "Cell",
    "Record",
    "Source",
    "Study",
    "facts",
    "grid",
    "mark_front",
    "run_cell",
]

ASSUMED_MODEL_LEN = 131072  # tokens
ASSUMED_POOL = 524288  # tokens, some 36 GB of an 8B model or of DeepSeek's latent cache at 16 bits
MOST_LOSSES = 3  # in a row, of workers that died before any cell was done

Record = dict[str, Any]
"""What is known of a cell: its settings, what `check` says, what it counted or why it could not run, and its curves."""

OBJECTIVES = {"pool_tokens": -1, "hit_rate": 1, "preemptions": -1, "mean_first_token_steps": -1}
"""What an operator pays and gets, and whether less or more of it is better. No times of this machine: noise must not decide."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from: a file, or without one a synthetic hour from ``seed``; the first ``limit`` of them."""

    path: str | None = None
    seed: int = 0
    limit: int | None = None

    @property
    def title(self) -> str:
        """What a report calls it."""
        name = f"a synthetic hour (seed {self.seed})" if self.path is None else Path(self.path).name
        return name if self.limit is None else f"the first {self.limit:,} requests of {name}"

    def load(self, max_model_len: int) -> Trace:
        """Read or make the trace; a synthetic one holds nothing longer than ``max_model_len``."""
        trace = synthetic(self.seed, max_model_len=max_model_len) if self.path is None else read_trace(self.path)
        return trace if self.limit is None else trace.first(self.limit)

    def digest(self) -> str:
        """Return what tells these requests from others: of a file its content."""
        content = f"synthetic {self.seed}".encode() if self.path is None else Path(self.path).read_bytes()
        return hashlib.sha256(content + f" first {self.limit}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of settings; None is what `simulate` takes by itself.

    The pool has ``num_blocks`` blocks, the null block included, or else holds ``pool_tokens`` tokens. Every one of
    ``backends`` has to accept the tables.
    """

    block_size: int = 32
    num_blocks: int | None = None
    pool_tokens: int | None = None
    backends: tuple[str, ...] = ()
    prefix_cache: bool | None = None
    max_model_len: int | None = None
    max_rows: int = 256
    token_budget: int = 8192
    step_ms: float = 30.0
    check: bool = False

    def size(self) -> tuple[Geometry, int]:
        """Plan the tables; return the geometry, and the blocks of the pool."""
        blocks = self.num_blocks
        if blocks is None and self.pool_tokens is not None:
            blocks = self.pool_tokens // self.block_size + 1
            if blocks == 1:
                raise ArgumentError(
                    f"a pool of {self.pool_tokens} tokens holds no block of {self.block_size}",
                    law="L1",
                    values={"pool_tokens": self.pool_tokens, "block_size": self.block_size},
                    remedy=f"give it {self.block_size} tokens or more",
                )
        longest = self.max_model_len
        if longest is None:
            held = ASSUMED_MODEL_LEN if blocks is None else (blocks - 1) * self.block_size
            longest = min(ASSUMED_MODEL_LEN, held)
        geometry = plan(max_model_len=longest, block_size=self.block_size, contracts=self.backends)
        return geometry, blocks or max(ASSUMED_POOL // self.block_size, geometry.min_blocks) + 1

    def begin(self, trace: Trace, geometry: Geometry, blocks: int) -> Simulation:
        """Return the cell's simulation before its first step; raises ArgumentError when no request fits."""
        simulation = Simulation(
            trace,
            geometry,
            num_blocks=blocks,
            max_rows=self.max_rows,
            token_budget=self.token_budget,
            step_ms=self.step_ms,
            prefix_cache=self.prefix_cache,
            check=self.check,
        )
        if simulation.done:
            raise ArgumentError(
                f"each of the {len(trace)} requests is longer than max_model_len {geometry.max_model_len}",
                law="L1",
                values={"requests": len(trace), "max_model_len": geometry.max_model_len},
                remedy=f"--max-model-len {int((trace.input_length + trace.output_length).max())} serves all of them",
            )
        return simulation

    def verdict(self, engine: str | None = None) -> Record:
        """Return what `check` says of a launch with these settings: the verdict, of which release, and why."""
        if not self.backends:
            return {"verdict": None, "verdict_engine": None, "verdict_reason": "no backend was named"}
        try:
            longest = self.size()[0].max_model_len
        except BlockTableError:  # the cell will say so; its backends are judged all the same
            longest = self.max_model_len or ASSUMED_MODEL_LEN
        releases = [find_release(engine, name)[0] for name in self.backends]
        answer = worst(
            [
                judge(Launch(release, name, max_model_len=longest, block_size=self.block_size))
                for release, name in zip(releases, self.backends, strict=True)
            ]
        )
        return {"verdict": answer.verdict, "verdict_engine": answer.engine, "verdict_reason": answer.reason}


def grid(**axes: Sequence[Any]) -> list[Cell]:
    """Return a cell for each combination of the values given per field, the last field varying fastest.

    >>> [(cell.block_size, cell.num_blocks) for cell in grid(block_size=[16, 32], num_blocks=[1000, 2000])]
    [(16, 1000), (16, 2000), (32, 1000), (32, 2000)]
    """
    cells = [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return list(dict.fromkeys(cells))


def facts(simulation: Simulation, *, finding: str = "", interrupted: bool = False) -> Record:
    """Return what a simulation has counted so far, with the plan and the limits in force."""
    geometry = simulation.geometry
    return asdict(simulation.summary()) | {
        "bad_lines": [asdict(line) for line in simulation.trace.bad_lines],
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
        "prefix_cache": "lru" if simulation.prefix_cache else "off",
    }


def ratios(record: Record) -> Record:
    """Return what only a comparison needs: the pool in tokens as asked for, shares of hits and waste, the peak as a share."""
    held = record["mean_blocks"] * record["block_size"]
    return {
        "pool_tokens": record.get("pool_tokens") or record["usable_blocks"] * record["block_size"],
        "hit_rate": record["prefix_hit_tokens"] / max(record["prefix_query_tokens"], 1),
        "waste": record["mean_wasted_tokens"] / max(held, 1),
        "peak": record["peak_blocks"] / record["usable_blocks"],
    }


def run_cell(
    cell: Cell, source: Source, engine: str | None = None, on_step: Callable[[Simulation], object] = lambda _: None
) -> Record:
    """Simulate a cell to its end, and ask `check` about it.

    A cell that cannot run (no geometry, a pool too small for one request) says so in ``unfit``; one that broke a law or
    was refused by its kernel says so in ``finding``, with the counts up to that step. Raises OSError and ArgumentError
    for a trace that cannot be read.

    >>> record = run_cell(Cell(block_size=48, max_model_len=4096, backends=("FLASHINFER_MLA",)), Source(limit=5))
    >>> record["verdict"], record["unfit"].partition(";")[0]
    ('refused', 'no kernel block divides 48 and suits FLASHINFER_MLA (32 or 64)')
    """
    record = asdict(cell) | cell.verdict(engine) | {"backend": "+".join(cell.backends) or None, "unfit": None}
    del record["backends"]
    try:
        geometry, blocks = cell.size()
    except BlockTableError as error:
        return record | {"unfit": str(error)}
    trace = source.load(geometry.max_model_len)
    try:
        simulation = cell.begin(trace, geometry, blocks)
    except (BlockTableError, MemoryError) as error:
        return record | {"unfit": str(error) or "out of memory"}
    curves, finding = Curves(), ""

    def after_step() -> None:
        curves.add(simulation)
        on_step(simulation)

    try:
        simulation.run(after_step)
    except BlockTableError as error:
        finding = str(error)
    record |= facts(simulation, finding=finding)
    return record | ratios(record) | {"curves": curves.as_dict()}


def mark_front(records: Sequence[Record]) -> None:
    """Set ``front``: no other cell is at least as good in every objective and better in one (the Pareto front).

    Cells that did not run to their end, and those that `check` refuses, neither stand on it nor push others off.

    >>> cells = [{"pool_tokens": t, "hit_rate": h, "preemptions": 0, "mean_first_token_steps": 1, "unfit": None,
    ...           "finding": None, "verdict": "accepted"} for t, h in [(100, 0.1), (200, 0.2), (200, 0.1)]]
    >>> mark_front(cells)
    >>> [cell["front"] for cell in cells]
    [True, True, False]
    """
    running = [r for r in records if not (r["unfit"] or r["finding"] or r["verdict"] == "refused")]
    scores = [[record[name] * sign for name, sign in OBJECTIVES.items()] for record in running]
    for record in records:
        record["front"] = False
    for record, mine in zip(running, scores, strict=True):
        record["front"] = not any(
            theirs != mine and all(a >= b for a, b in zip(theirs, mine, strict=True)) for theirs in scores
        )


class Study:
    """All cells of a grid over one trace.

    ``jobs`` processes (all cores by default) share the cells, or with ``ray`` the cluster at that address. ``kept`` is a
    file of JSON lines: a cell is appended when it is done, and is not run again while release, trace, engine and settings
    are the same. ``progress`` is a folder in which each running cell says how far it is.

    >>> study = Study(grid(block_size=[16, 32], max_model_len=[4096]), Source(limit=20), jobs=1)
    >>> [record["finished"] for record in study.run()]
    [20, 20]
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        source: Source,
        *,
        engine: str | None = None,
        jobs: int | None = None,
        kept: Path | None = None,
        progress: Path | None = None,
        ray: str | None = None,
    ) -> None:
        self.cells = list(cells)
        self.records: list[Record | None] = [None] * len(self.cells)
        self._source, self._engine, self._kept, self._progress, self._ray = source, engine, kept, progress, ray
        self._jobs = jobs or min(_cores(), len(self.cells))
        digest = source.digest()
        self._keys = [_key(cell, digest, engine) for cell in self.cells]
        if self._jobs > 1 and ray is None and find_spec("joblib") is None:
            raise ArgumentError(
                f"{self._jobs} processes at once need joblib, which is not installed",
                values={"jobs": self._jobs},
                remedy="pip install 'blocktable[report]', or --jobs 1",
            )
        if kept is not None and kept.exists():
            found = dict(_read_kept(kept))
            self.records = [found.get(key) for key in self._keys]

    def run(self, on_cell: Callable[[int], object] = lambda _: None) -> list[Record]:
        """Run the cells that are not known yet, calling ``on_cell(index)`` after each; return all records in order.

        Raises what a cell raises, and RuntimeError when workers keep dying; what was done until then is kept.
        """
        if self._kept is not None:
            self._kept.open("ab").close()  # fails here where it cannot be written, not after the first cell
        losses = 0
        while missing := [i for i, record in enumerate(self.records) if record is None]:
            try:
                for i, record in self._results(missing):
                    self._keep(i, record)
                    on_cell(i)
                    losses = 0
            except Exception as error:
                # A worker that was killed, as for want of memory, takes unfinished cells with it: they are run again.
                losses += 1
                if not _is_loss(error) or losses > MOST_LOSSES:
                    raise
        return self.done()

    def done(self) -> list[Record]:
        """Return the records that there are, in the order of the cells."""
        return [record for record in self.records if record is not None]

    def _results(self, indices: Sequence[int]) -> Iterator[tuple[int, Record]]:
        if self._jobs == 1 and self._ray is None:
            yield from (self._one(i) for i in indices)
            return
        if self._ray is not None:
            yield from self._on_ray(indices, self._ray)
            return
        from joblib import Parallel, delayed  # noqa: PLC0415 - one process does without

        work = (delayed(_one)(i, self.cells[i], self._source, self._engine, self._progress) for i in indices)
        yield from Parallel(n_jobs=self._jobs, return_as="generator_unordered")(work)

    def _on_ray(self, indices: Sequence[int], address: str) -> Iterator[tuple[int, Record]]:
        """Run cells as tasks of a Ray cluster; Ray itself runs a task again whose worker or machine is lost.

        joblib's own Ray backend hands results over only when all are there, so that an interruption would lose them.
        """
        if find_spec("ray") is None:
            raise ArgumentError("--ray needs Ray, which is not installed", remedy="pip install ray, or leave --ray out")
        import ray  # noqa: PLC0415 - a cluster's, and large

        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        task = ray.remote(max_retries=MOST_LOSSES)(_one)
        waiting = [task.remote(i, self.cells[i], self._source, self._engine, None) for i in indices]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)

    def _one(self, i: int) -> tuple[int, Record]:
        return _one(i, self.cells[i], self._source, self._engine, self._progress)

    def _keep(self, i: int, record: Record) -> None:
        self.records[i] = record
        if self._kept is not None:
            line = json.dumps({"key": self._keys[i], "record": record}) + "\n"
            with self._kept.open("ab", buffering=0) as file:  # in one piece: another study may append to the same file
                file.write(line.encode())


def _one(i: int, cell: Cell, source: Source, engine: str | None, progress: Path | None) -> tuple[int, Record]:
    """Run one cell, in whatever process; every third of a second tell how far it is, and stop if nobody waits for it."""
    due, parent = 0.0, os.getppid()

    def look(simulation: Simulation) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return
        due = now + 0.3
        if os.getppid() != parent:  # the study was killed: its workers must not go on for minutes
            raise SystemExit
        if progress is not None:
            (progress / str(i)).write_text(f"{simulation.finished} {simulation.requests} {simulation.steps}")

    return i, run_cell(cell, source, engine, look)


def _key(cell: Cell, digest: str, engine: str | None) -> str:
    said = json.dumps([blocktable.__version__, digest, engine, asdict(cell)])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def _read_kept(path: Path) -> Iterator[tuple[str, Record]]:
    text = path.read_text(encoding="utf-8", errors="replace")  # whatever else stands in the file is stepped over
    if text and not text.endswith("\n"):  # an interruption cut the last line: the next one must not go on in it
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in text.splitlines():
        try:
            kept = json.loads(line)
            yield kept["key"], kept["record"]
        except (ValueError, KeyError, TypeError):
            continue


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_loss(error: Exception) -> bool:
    """Whether a worker died, rather than that a cell failed."""
    return type(error).__name__ in ("TerminatedWorkerError", "BrokenProcessPool")
