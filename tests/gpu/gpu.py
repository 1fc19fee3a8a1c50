"""Everything that needs a GPU, in one run: parity, memory checks, graph replay, timings. Started by tools/gpu.sh.

    gpu.py [--json FILE] [--only-parity]

Needs torch with CUDA, Triton and the library's own dependencies, no test runner. Prints one table, writes JSON, and exits
with 1 where anything differed.
"""

# ruff: noqa: T201 - a script that prints

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
import cases

import blocktable
from blocktable import BlockTables
from blocktable.device import DeviceTables
from blocktable.oracle import TablesModel

DEVICE = "cuda"
ROWS, WIDTH, BLOCK = 1024, 8192, 16
NUM_BLOCKS = 1 << 20
REPEATS, COPIES = 20, 4  # of the tables, in turn, so that no step finds its table in a cache


def parity(kernels: str, *, brief: bool) -> dict[str, Any]:
    """Run the case list; return how many agree and what differs."""
    wanted = [case for case in cases.CASES if not brief or (case.max_rows < 100 and "131072" not in case.name)]
    wrong = {}
    for case in wanted:
        try:
            cases.drive(case, lambda tables, rank: DeviceTables(tables, DEVICE, cp_rank=rank, kernels=kernels))
        except Exception:  # noqa: BLE001 - every failure belongs in the report
            wrong[case.id] = traceback.format_exc(limit=-2)[-1500:]
    torch.cuda.synchronize()
    return {"cases": len(wanted), "wrong": wrong}


def memcheck() -> dict[str, Any]:
    """Run a brief parity under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"ran": False, "why": "compute-sanitizer is not installed"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--only-parity"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor bounded by its own allocation
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, env=environment)
    except subprocess.TimeoutExpired:
        return {"ran": False, "why": "more than 150 s"}
    return {"ran": True, "clean": done.returncode == 0, "tail": (done.stdout + done.stderr)[-800:]}


def graph_replay(steps: int = 12) -> dict[str, Any]:
    """Capture one launch of gather and slots, change everything it reads, replay, and compare with the model."""
    groups = [cases.geometry(40, 32, 2), cases.geometry(24, 48, 3)]
    tables, model = BlockTables(groups, max_rows=16, num_blocks=5000), TablesModel(groups, max_rows=16, num_blocks=5000)
    device = DeviceTables(tables, DEVICE)
    padded, tokens = 8, 64
    rows = torch.full((padded,), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(padded + 1, dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)

    def step() -> tuple[Any, Any]:
        return device.prepare(rows, padded, lengths, starts, positions, tokens)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, and makes the buffers
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch, slots = step()
    rng, wrong = np.random.default_rng(5), []
    for number in range(steps):
        row = int(rng.integers(16))
        for group, shape in enumerate(groups):
            ids = [int(block) for block in rng.integers(1, 5000, int(rng.integers(1, shape.width + 1)))]
            for one in (tables, model):
                cases.assign([row], [ids], group)(one)
        device.apply(tables.commit())
        model.commit()
        picked = [int(r) for r in rng.permutation(16)[: int(rng.integers(1, padded + 1))]]
        most = [min(len(model.rows[g][r]) * s.block_size for g, s in enumerate(groups)) for r in picked]
        given = [int(rng.integers(0, n + 1)) for n in most]
        query = [int(n) for n in rng.integers(0, 5, len(picked))]
        where = [int(p) for p in rng.integers(-1, 900, sum(query))]
        asked = cases.Step(cases.nothing, picked, padded, given, query, where)
        rows.copy_(torch.tensor(picked + [-1] * (padded - len(picked))))
        lengths.copy_(torch.tensor(given + [0] * (padded - len(given))))
        ends = np.cumsum([0, *query])
        starts.copy_(torch.from_numpy(np.pad(ends, (0, padded - len(picked)), mode="edge")))
        positions[: len(where)] = torch.tensor(where, dtype=torch.int64)
        graph.replay()
        torch.cuda.synchronize()
        batch.has_lengths = True
        got, want = cases.actual_batch(batch, len(groups), csr=True), cases.expected_batch(model, asked, 0)
        try:
            for name in want:
                cases.same(f"replay {number}: {name}", got[name], want[name])
            cases.same(
                f"replay {number}: slots", slots, model.slot_mapping(picked, ends.tolist(), where, padded=tokens)
            )
        except AssertionError as error:
            wrong.append(str(error)[:800])
    return {"replays": steps, "wrong": wrong}


def on_device(calls: list[Callable[[], object]], before: Callable[[], object] | None = None) -> float:
    """Return the median microseconds of one call by the device's own clock; the calls are taken in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    taken = []
    for number in range(REPEATS):
        if before is not None:
            before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[number % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1000)
    return statistics.median(taken)


def full_tables() -> list[tuple[BlockTables, DeviceTables]]:
    shape = blocktable.plan(max_model_len=WIDTH * BLOCK, block_size=BLOCK)
    ids = np.random.default_rng(1).integers(1, NUM_BLOCKS, ROWS * (WIDTH - 128), dtype=np.int32)
    found = []
    for _ in range(COPIES):
        tables = BlockTables([shape], max_rows=ROWS, num_blocks=NUM_BLOCKS)
        tables.assign(np.arange(ROWS), np.arange(ROWS + 1) * (WIDTH - 128), ids)
        tables.commit()
        found.append((tables, DeviceTables(tables, DEVICE)))
    return found


def time_apply(pairs: list[tuple[BlockTables, DeviceTables]], rows: int, entries: int) -> tuple[float, float]:
    """Return the microseconds of an apply on the device, from its copy's start, and on the host until it returns."""
    device_us, host_us = [], []
    for number in range(REPEATS + COPIES):
        tables, device = pairs[number % COPIES]
        picked = np.arange(rows) * (ROWS // rows)
        tables.truncate(picked, np.full(rows, WIDTH - 128 - entries * (entries > 1)))
        tables.append(picked, np.arange(rows + 1) * entries, np.full(rows * entries, 7 + number, np.int32))
        delta = tables.commit()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter_ns()
        device.apply(delta)
        host_us.append((time.perf_counter_ns() - start) / 1000)
        end.record()
        torch.cuda.synchronize()
        device_us.append(begin.elapsed_time(end) * 1000)
    return statistics.median(device_us[COPIES:]), statistics.median(host_us[COPIES:])


def timings() -> list[dict[str, Any]]:
    """Time apply, gather and slots, beside copies of the whole table and the copy bandwidth of this device."""
    pairs = full_tables()
    host = torch.empty((ROWS, WIDTH), dtype=torch.int32, pin_memory=True).fill_(3)
    whole = [torch.empty((ROWS, WIDTH), dtype=torch.int32, device=DEVICE) for _ in range(COPIES)]
    upload = on_device([lambda t=t: t.copy_(host, non_blocking=True) for t in whole])
    found = []
    for name, rows, entries in (
        ("64 of 1024 rows", 64, 1),
        ("one entry in every row", ROWS, 1),
        ("4096 of one row", 1, 4096),
    ):
        device_us, host_us = time_apply(pairs, rows, entries)
        found.append(
            {
                "case": f"apply/{name}",
                "us": device_us,
                "host_us": host_us,
                "peer": "copy of the table",
                "peer_us": upload,
            }
        )
    picked = torch.randperm(ROWS, device=DEVICE)[:256]
    calls = [lambda d=device: d.gather(picked, 256) for _, device in pairs]
    size = 256 * WIDTH * 4
    sources = [torch.ones(size, dtype=torch.uint8, device=DEVICE) for _ in range(2 * COPIES)]
    copy = on_device([lambda i=i: sources[2 * i].copy_(sources[2 * i + 1]) for i in range(COPIES)])
    indexed = on_device([lambda t=t: t.index_select(0, picked) for t in whole])
    taken = on_device(calls)
    bandwidth = 2 * size / copy / 1e3  # GB/s, read and written
    found += [
        {
            "case": "gather/256x8192",
            "us": taken,
            "peer": f"copy of as many bytes, {bandwidth:.0f} GB/s",
            "peer_us": copy,
        },
        {"case": "gather/256x8192", "us": taken, "peer": "torch index_select", "peer_us": indexed},
    ]
    for requests, each in ((256, 1), (16, 512), (1024, 8)):
        rows = torch.arange(requests, device=DEVICE)
        starts = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32) * each
        positions = torch.arange(each, device=DEVICE).repeat(requests) + 5
        request = torch.arange(requests, device=DEVICE).repeat_interleave(each)

        def in_torch(t: Any, p: Any = positions, r: Any = request) -> Any:
            return t[r, p // BLOCK].to(torch.int64) * BLOCK + p % BLOCK

        mapped = on_device(
            [lambda d=device, r=rows, s=starts, p=positions: d.slot_mapping(r, s, p, 8192) for _, device in pairs]
        )
        peer = on_device([lambda t=t, f=in_torch: f(t) for t in whole])
        found.append({"case": f"slots/{requests}x{each}", "us": mapped, "peer": "torch indexing", "peer_us": peer})
    return found


def report(result: dict[str, Any]) -> bool:
    """Print one table; return whether nothing differed."""
    good = True
    print(f"{result['device']}  torch {torch.__version__}  {result['versions']}")
    for name in ("parity kernels", "parity fallback", "graph"):
        part = result[name]
        good &= not part["wrong"]
        count = part.get("cases", part.get("replays"))
        print(f"{name:<28}{count} run, {len(part['wrong'])} differ")
        for text in part["wrong"].values() if isinstance(part["wrong"], dict) else part["wrong"]:
            print(f"    {text}")
    check = result["memcheck"]
    good &= check.get("clean", True)
    said = check.get("why") or ("clean" if check["clean"] else check["tail"])
    print(f"{'compute-sanitizer memcheck':<28}{said}")
    print(f"\n{'case':<32}{'ours µs':>10}{'host µs':>10}  {'peer':<40}{'peer µs':>10}{'ratio':>8}")
    for row in result["rows"]:
        on_host = f"{row['host_us']:.1f}" if "host_us" in row else ""
        ratio = row["peer_us"] / row["us"]
        print(
            f"{row['case']:<32}{row['us']:>10.1f}{on_host:>10}  {row['peer']:<40}{row['peer_us']:>10.1f}{ratio:>8.2f}"
        )
    return good


def main() -> int:
    """Run all parts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("--only-parity", action="store_true")
    asked = options.parse_args()
    if asked.only_parity:
        wrong = parity("kernels", brief=True)["wrong"]
        print(*wrong.values(), sep="\n")
        return 1 if wrong else 0
    began = time.monotonic()
    versions = {name: metadata.version(name) for name in ("numpy", "numba", "triton")}
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "versions": versions}
    result["parity kernels"] = parity("kernels", brief=False)
    result["parity fallback"] = parity("fallback", brief=False)
    result["graph"] = graph_replay()
    result["rows"] = timings()
    result["memcheck"] = memcheck()
    result["seconds"] = round(time.monotonic() - began, 1)
    good = report(result)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
