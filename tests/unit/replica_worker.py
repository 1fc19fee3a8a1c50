"""One rank of the process test: rank 0 holds the host's tables, every rank follows them, over gloo on the loopback.

    replica_worker.py RANK WORLD STEPS SEED KILL_AT PORT PORT_AFTER [--join]

At step KILL_AT rank 2 is killed in the middle of a step. The others notice, form a group anew with the process that
takes its place, and go on. The last line printed is JSON: what this rank ended with.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import blocktable
from blocktable import BlockTables, Delta, Replica
from blocktable.device import DeviceTables

ROOM = 1 << 14  # bytes of a message
ROWS, VICTIM, LOOK = 8, 2, 50  # slots are compared every LOOK steps


def shapes(world: int) -> list[blocktable.Geometry]:
    return [
        blocktable.plan(max_model_len=world * 8 * 12, block_size=8, cp_size=world, cp_interleave=2),
        blocktable.plan(max_model_len=640, block_size=32),
    ]


class Host:
    """Rank 0's tables, changed at random."""

    def __init__(self, world: int, seed: int) -> None:
        self.tables = BlockTables(shapes(world), max_rows=ROWS, num_blocks=5000)
        self.rng = np.random.default_rng(seed)

    def step(self) -> bytes:
        rng, tables = self.rng, self.tables
        for _ in range(3):
            row, other, verb = int(rng.integers(ROWS)), int(rng.integers(ROWS)), int(rng.integers(8))
            group = int(rng.integers(2))
            live, width = int(tables[group].num_blocks[row]), tables[group].array.shape[1]
            if verb < 4 and live < width:
                count = int(rng.integers(1, min(4, width - live) + 1))
                tables.append([row], [0, count], rng.integers(1, 5000, count), group=group)
            elif verb == 4:
                tables.truncate([row], [int(rng.integers(live + 1))], group=group)
            elif verb == 5:
                tables.clear([row])
            elif verb == 6:
                tables.move([row], [other])
            else:
                tables.copy([row], [other])
        return tables.commit().to_bytes()


def share(message: bytes | None) -> bytes:
    """Send rank 0's bytes to all."""
    buffer = torch.zeros(ROOM, dtype=torch.uint8)
    if message is not None:
        framed = len(message).to_bytes(8, "little") + message
        buffer[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    raw = buffer.numpy().tobytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def form(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


class Follower:
    """What every rank keeps: a replica, and device tables that map this rank's slots."""

    def __init__(self, rank: int, snapshot: bytes) -> None:
        self.rank = rank
        self.replica = Replica.from_snapshot(snapshot)
        self.device = DeviceTables(self.replica, "cpu", cp_rank=rank)

    def apply(self, data: bytes) -> None:
        delta = Delta.from_bytes(data)
        self.replica.apply(delta)
        self.device.apply(delta)

    def slots(self, row: int, length: int) -> torch.Tensor:
        mapped = self.device.slot_mapping([row], [0, length], np.arange(length), length)[0, :length]
        host = self.replica.slot_mapping([row], [0, length], np.arange(length), cp_rank=self.rank)[0]
        assert mapped.tolist() == host.tolist()
        return mapped.clone()


def look_at_slots(follower: Follower, world: int, step: int) -> int:
    """Compare the ranks' slots of one row: each position has one owner, or none where the row has no block."""
    row = step // LOOK % ROWS
    length = int(follower.replica[0].num_blocks[row]) * 8 * world + 5
    mine = follower.slots(row, length)
    all_of_them = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(all_of_them, mine)
    owners = (torch.stack(all_of_them) >= 0).sum(0)
    assert (owners[: length - 5] == 1).all(), owners.tolist()
    assert (owners[length - 5 :] == 0).all()
    return length - 5


def main() -> None:
    rank, world, steps, seed, kill_at, port, port_after = map(int, sys.argv[1:8])
    joins = "--join" in sys.argv
    torch.set_num_threads(1)
    host = Host(world, seed) if rank == 0 else None
    empty = BlockTables(shapes(world), max_rows=ROWS).snapshot()
    follower = Follower(rank, empty)
    positions, snapshots = 0, 0
    step = kill_at + 1 if joins else 0
    pending: bytes | None = None
    form(rank, world, port_after if joins else port)
    if joins:
        follower, snapshots = catch_up(host, follower, rank)
    while step < steps:
        try:
            pending = host.step() if host is not None else None
            data = share(pending)
            if step == kill_at and rank == VICTIM and not joins:
                os.kill(os.getpid(), signal.SIGKILL)  # it has the step, and dies before it says so
            follower.apply(data)
            if step % LOOK == 0:
                positions += look_at_slots(follower, world, step)
            dist.barrier()
        except RuntimeError:
            if step != kill_at:
                raise
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
            form(rank, world, port_after)
            follower, new = catch_up(host, follower, rank)
            snapshots += new
        step += 1
    end = follower.replica.snapshot()
    assert host is None or end == host.tables.snapshot()
    assert follower.device.snapshot() == end
    follower.replica.check()
    digest = hashlib.sha256(end).hexdigest()
    dist.barrier()
    end_state = {"digest": digest, "seq": follower.replica.seq, "positions": positions, "snapshots": snapshots}
    sys.stdout.write(json.dumps({"rank": rank} | end_state) + "\n")
    dist.destroy_process_group()


def catch_up(host: Host | None, follower: Follower, rank: int) -> tuple[Follower, int]:
    """In a group formed anew: whoever is not where the host is starts from the host's snapshot."""
    data = share(host.tables.snapshot() if host is not None else None)
    there = Replica.from_snapshot(data)
    behind = follower.replica.seq != there.seq
    return (Follower(rank, data), 1) if behind else (follower, 0)


if __name__ == "__main__":
    main()
