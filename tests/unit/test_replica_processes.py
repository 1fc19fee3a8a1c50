"""Replicas in real processes: four ranks over gloo, one killed and replaced, all equal bit for bit at the end (L11, L13)."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if os.environ.get("NUMBA_DISABLE_JIT") == "1":
    pytest.skip("the run with compiled loops does this", allow_module_level=True)
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

WORLD, VICTIM = 4, 2
WORKER = Path(__file__).with_name("replica_worker.py")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_ranks(steps: int, kill_at: int, limit: float, log: Path) -> list[dict[str, object]]:
    """Run the ranks, put a new process in the killed one's place, and return what each of the four ended with."""
    first, second = free_ports(2)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def start(rank: int, *more: str) -> subprocess.Popen[str]:
        numbers = map(str, (rank, WORLD, steps, 7, kill_at, first, second))
        command = [sys.executable, str(WORKER), *numbers, *more]
        with (log / f"rank{rank}{''.join(more)}").open("w") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)

    ranks = [start(rank) for rank in range(WORLD)]
    killed = ranks[VICTIM]
    deadline = time.monotonic() + limit
    try:
        assert killed.wait(limit) == -9, (log / f"rank{VICTIM}").read_text()[-2000:]
        ranks[VICTIM] = start(VICTIM, "--join")
        said = [one.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for one in ranks]
        assert [one.returncode for one in ranks] == [0] * WORLD, [path.read_text()[-1500:] for path in log.iterdir()]
    finally:
        for one in (*ranks, killed):
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize(
    ("steps", "kill_at", "limit"),
    [pytest.param(240, 120, 240, id="240"), pytest.param(10000, 6100, 1500, id="10000", marks=pytest.mark.long)],
)
def test_four_ranks_stay_equal_when_one_is_killed_and_replaced(
    steps: int, kill_at: int, limit: float, tmp_path: Path
) -> None:
    if steps == 10000 and os.environ.get("HYPOTHESIS_PROFILE") != "long":
        pytest.skip("the 10,000 steps run with `make long`")
    ends = run_ranks(steps, kill_at, limit, tmp_path)
    assert [end["rank"] for end in ends] == list(range(WORLD))
    assert len({end["digest"] for end in ends}) == 1
    assert {end["seq"] for end in ends} == {steps}
    assert ends[VICTIM]["snapshots"] == 1, "the new one started from a snapshot"
    assert all(int(str(end["positions"])) > 0 for end in ends), "slots of the ranks were compared"
