"""One list of cases for every implementation of the device's kernels, bit for bit against the plain-Python model.

Implementations: the NumPy reference, the compiled loops, the torch fallback, Triton (interpreted in a process of its own
where there is no CUDA), and the last two on CUDA where there is one. Outputs are poisoned every other step.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blocktable
from blocktable import BlockTables, Contract, Group, TokenMultiple

torch = pytest.importorskip("torch")
from blocktable.device import DeviceTables, reference  # noqa: E402 - only with torch

HERE = Path(__file__)
_spec = spec_from_file_location("parity_cases", HERE.with_name("cases.py"))
assert _spec is not None
assert _spec.loader is not None
cases = sys.modules["parity_cases"] = module_from_spec(_spec)
_spec.loader.exec_module(cases)
Case, CASES, drive, INTERPRETED = cases.Case, cases.CASES, cases.drive, cases.INTERPRETED

LONGEST = "one row of 131072 entries"

on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")]
IMPLEMENTATIONS = [
    pytest.param("cpu", "reference", id="reference"),
    pytest.param("cpu", "compiled", id="compiled"),
    pytest.param("cpu", "fallback", id="fallback"),
    pytest.param("cuda", "fallback", id="fallback-cuda", marks=on_cuda),
    pytest.param("cuda", "kernels", id="triton-cuda", marks=on_cuda),
]
if INTERPRETED:
    IMPLEMENTATIONS = [pytest.param("cpu", "kernels", id="triton-interpreted")]
everywhere = pytest.mark.parametrize(("device", "kernels"), IMPLEMENTATIONS)


# ---- the tests


@everywhere
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=[pytest.mark.compiled] if case.name == LONGEST else []) for case in CASES],
)
def test_every_implementation_does_what_the_model_says(case: Any, device: str, kernels: str) -> None:
    drive(case, lambda tables, rank: DeviceTables(tables, device, cp_rank=rank, kernels=kernels))


@st.composite
def random_cases(draw: st.DrawFn) -> Any:
    """Groups of any kind and width, and steps of any sort (K3 to K7, K9, K15, K16)."""
    ranks = draw(st.integers(1, 3))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        kernel, ratio = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        block, kind = kernel * ratio, draw(st.sampled_from(["full", "window", "chunked", "state", "ring"]))
        shared = draw(st.sampled_from([1, ranks])) if kind != "state" else 1
        rule = TokenMultiple(draw(st.integers(1, 5)) * kernel)
        shape = blocktable.plan(
            max_model_len=draw(st.integers(1, 6)) * block * shared,
            block_size=block,
            contracts=[Contract("tiny", kernel_block_sizes=(kernel,), width_rule=rule)],
            cp_size=shared,
            cp_interleave=draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
        )
        groups.append(Group(shape, kind=kind, window=5 if kind in ("window", "chunked") else 0))
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 4))
    largest = draw(st.sampled_from([9, 2**31 // 4]))
    rank = draw(st.integers(0, max(group.geometry.cp_size for group in groups) - 1))
    return Case("random", "K3-K16", groups, 4, lambda: cases.random_steps(groups, seed, count, largest), rank=rank)


@everywhere
@given(case=random_cases())
@settings(max_examples=3 if cases.BRIEF else 1000 if cases.LONG else 20)
def test_random_tables_steps_and_arguments(device: str, kernels: str, case: Any) -> None:
    drive(case, lambda tables, rank: DeviceTables(tables, device, cp_rank=rank, kernels=kernels))


def keeps_the_tail(
    info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Any, padded: int
) -> None:
    held = batch.tables.copy()
    reference.gather(info, state, entries, rows, lengths, rank, batch, padded)
    stale = batch.tables == 0
    batch.tables[stale] = held[stale]


def forgets_padding_rows(*arguments: Any) -> None:
    *front, batch, padded = arguments
    reference.gather(*front, batch, min(padded, len(front[3])))


def expands_floor(info: Any, *rest: Any) -> None:
    wrong = info.copy()
    wrong[:-1, 4] = 1
    reference.gather(wrong, *rest)


def pads_with_zero(*arguments: Any) -> None:
    reference.slots(*arguments)
    arguments[-1][arguments[-1] == -1] = 0


def wraps_at_31_bits(*arguments: Any) -> None:
    reference.slots(*arguments)
    arguments[-1][:] = arguments[-1].astype(np.int32)


def every_rank_is_the_first(
    info: Any, state: Any, entries: Any, rows: Any, starts: Any, positions: Any, rank: int, out: Any
) -> None:
    reference.slots(info, state, entries, rows, starts, positions, 0 * rank, out)


def misses_the_last_span(
    info: Any, state: Any, entries: Any, spans: Any, values: Any, total: int, longest: int
) -> None:
    reference.apply(info, state, entries, spans[:-1], values, total, longest)


FAULTS = [
    ("gather", keeps_the_tail),
    ("gather", forgets_padding_rows),
    ("gather", expands_floor),
    ("slots", pads_with_zero),
    ("slots", wraps_at_31_bits),
    ("slots", every_rank_is_the_first),
    ("apply", misses_the_last_span),
]


@pytest.mark.skipif(INTERPRETED, reason="said by the other process")
@pytest.mark.parametrize(("verb", "broken"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_kernel_is_noticed(verb: str, broken: Callable[..., None]) -> None:
    def make(tables: BlockTables, rank: int) -> DeviceTables:
        device = DeviceTables(tables, "cpu", cp_rank=rank, kernels="reference")
        parts: dict[str, Any] = {name: getattr(reference, name) for name in ("apply", "gather", "slots")} | {
            verb: broken
        }

        def step(
            info: Any, state: Any, entries: Any, rows: Any, lengths: Any, rank: int, batch: Any, padded: int, *rest: Any
        ) -> None:
            starts, positions, out = rest
            parts["gather"](info, state, entries, rows, lengths, rank, batch, padded)
            parts["slots"](info, state, entries, rows, starts, positions, rank, out)

        device._do = SimpleNamespace(**parts, step=step)
        return device

    noticed = 0
    for case in CASES:
        if case.max_rows < 4096 and case.name != LONGEST:
            try:
                drive(case, make)
            except AssertionError:
                noticed += 1
    assert noticed, "no case noticed it"


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="the run with compiled loops does this")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: its kernels did not run")
def test_triton_interpreted_on_the_cpu() -> None:
    """The same cases through Triton's interpreter, in a process of its own: it must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(CASES) + 1} passed" in done.stdout, done.stdout[-300:]
