"""A study on a real local Ray of two workers, one of them killed midway. Skips by name where Ray is not installed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktable.study import Record, Source, Study, grid, run_cell

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # a minute to start; it warns of its own

SOURCE = Source(seed=3, limit=8)
CELLS = grid(block_size=[16, 32], max_model_len=[2048], num_blocks=[None], pool_tokens=[4096, 8192])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def busy_workers() -> Iterator[int]:
    """The workers of this test's Ray that run a cell: their title is the task's name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::_one"):
                yield int(entry.name)


def counts(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != "us_per_step"}


def test_a_worker_that_is_killed_midway_costs_no_cell(tmp_path: Path) -> None:
    told: list[int] = []
    killed: list[int] = []

    def kill_one(i: int) -> None:
        told.append(i)
        if not killed and (pid := next(busy_workers(), None)):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    records = Study(CELLS, SOURCE, ray="auto", kept=tmp_path / "kept").run(kill_one)
    assert killed
    assert [counts(record) for record in records] == [counts(run_cell(cell, SOURCE)) for cell in CELLS]
    assert sorted(told) == list(range(len(CELLS)))
