"""Where steps run: on a thread of this process, or in worker processes that follow by deltas and token ids alone.

An executor runs steps in the order in which they are submitted; ``result`` waits for the oldest.
"""

import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import current_thread, main_thread
from typing import NamedTuple, Protocol

import msgspec
import torch

from blocktable.engine.models import Model
from blocktable.engine.step import Step
from blocktable.engine.worker import Worker
from blocktable.errors import BlockTableError, LawBroken
from blocktable.geometry import Geometry

__all__ = ["Executor", "Here", "Processes", "Result", "Spec", "WorkerDied"]


class WorkerDied(BlockTableError):  # noqa: N818
    """A worker process ended, or its step raised; the message has its reason."""


class Spec(NamedTuple):
    """What a worker is made of besides its model."""

    geometries: list[Geometry]
    num_blocks: int
    snapshot: bytes


class Result(NamedTuple):
    """The tokens of a step, and each worker's digest of its tables where that was asked for."""

    tokens: list[int]
    checksums: list[int]


class Executor(Protocol):
    """Runs steps in order."""

    def submit(self, step: Step, *, check: bool) -> None:
        """Send a step out; returns at once."""

    def result(self) -> Result:
        """Wait for the oldest step; raises what it raised, WorkerDied where its process ended."""
        ...

    def restart(self, snapshot: bytes) -> None:
        """Replace workers that ended, and forget the steps in flight; tables begin as the snapshot says."""

    def close(self) -> None:
        """Stop."""


class Here:
    """One worker on a thread of this process."""

    def __init__(self, model: Model, spec: Spec) -> None:
        self.worker = Worker(model, *spec)
        self._thread = ThreadPoolExecutor(1, "worker")
        self._futures: deque[Future[Result]] = deque()

    def submit(self, step: Step, *, check: bool) -> None:
        """Queue a step for the thread."""
        self._futures.append(self._thread.submit(_run, self.worker, step, check=check))

    def result(self) -> Result:
        """Wait for the oldest step."""
        return self._futures.popleft().result()

    def restart(self, snapshot: bytes) -> None:
        """Do nothing: a thread ends with its process."""

    def close(self) -> None:
        """Let the step that runs finish, and stop the thread."""
        self._thread.shutdown(cancel_futures=True)


def _run(worker: Worker, step: Step, *, check: bool) -> Result:
    tokens = worker.run(step)
    return Result(tokens, [worker.checksum()] if check else [])


class Peer:
    """A worker process and the pipe to it; ``owed`` counts the answers that it has not given yet."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, spec: Spec, count: int) -> None:
        context = get_context("forkserver")  # torch is imported once for all workers, and no thread of ours is copied
        context.set_forkserver_preload(["blocktable.engine.executors"])
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, folder, dtype, spec, count)
        self.process = context.Process(target=serve, args=arguments, name="blocktable-worker", daemon=True)
        with interrupts_ignored():
            self.process.start()
        theirs.close()
        self.owed = 1  # that it is ready

    def send(self, data: bytes) -> None:
        """Send a step; what went wrong is for ``receive`` to say."""
        self.owed += 1
        with suppress(OSError):
            self.pipe.send_bytes(data)

    def receive(self) -> Result:
        """Wait for the oldest answer; raises WorkerDied with the worker's own reason, or how its process ended."""
        self.owed -= 1
        try:
            reason, tokens, sums = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=tuple[str, list[int], list[int]])
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            named = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            reason, tokens, sums = f"worker process {self.process.pid} ended {named}", [], []
        if reason:
            raise WorkerDied(reason, values={"pid": self.process.pid}, remedy="--restart starts such a worker again")
        return Result(tokens, sums)

    def drained(self) -> bool:
        """Read and drop what the worker still owes; say whether it is alive."""
        try:
            while self.owed:
                self.receive()
        except WorkerDied:
            return False
        return self.process.is_alive()

    def end(self) -> None:
        """Close the pipe, with which the worker ends."""
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let a process that starts here inherit that Ctrl-C is not for it: the one that schedules decides when to stop."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Processes:
    """``count`` worker processes, each with the whole model; all get the same bytes and must draw the same tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, spec: Spec, count: int) -> None:
        self._folder, self._dtype, self._spec, self._count = folder, dtype, spec, count
        self.peers: list[Peer] = []
        try:
            self.peers = [self._start(spec.snapshot) for _ in range(count)]
            for peer in self.peers:
                peer.receive()
        except BaseException:
            self.close()
            raise

    def _start(self, snapshot: bytes) -> Peer:
        return Peer(self._folder, self._dtype, self._spec._replace(snapshot=snapshot), self._count)

    def submit(self, step: Step, *, check: bool) -> None:
        """Send a step's bytes to every worker."""
        data = (b"\1" if check else b"\0") + step.to_bytes()
        for peer in self.peers:
            peer.send(data)

    def result(self) -> Result:
        """Wait for every worker's result of the oldest step; all must have drawn the same tokens."""
        results = [peer.receive() for peer in self.peers]
        for worker, result in enumerate(results):
            if result.tokens != results[0].tokens:
                raise LawBroken(
                    f"worker {worker} drew other tokens than worker 0",
                    law="L11",
                    values={"worker": worker, "tokens": result.tokens, "first": results[0].tokens},
                )
        return Result(results[0].tokens, [one for result in results for one in result.checksums])

    def restart(self, snapshot: bytes) -> None:
        """Start workers that ended from a snapshot; let the others finish what they have, and drop it."""
        for place, peer in enumerate(self.peers):
            if not peer.drained():
                peer.end()
                self.peers[place] = self._start(snapshot)
                self.peers[place].receive()

    def close(self) -> None:
        """End the workers."""
        for peer in self.peers:
            peer.end()
        self.peers = []


def serve(pipe: Connection, folder: Path, dtype: torch.dtype | None, spec: Spec, count: int) -> None:
    """Be a worker process: load the model, say so, and run steps until the pipe closes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    try:
        worker = Worker(Model.load(folder, dtype), *spec)
        pipe.send_bytes(_answer(Result([], [])))
        while True:
            data = pipe.recv_bytes()
            pipe.send_bytes(_answer(_run(worker, Step.from_bytes(data[1:]), check=data[:1] == b"\1")))
    except (EOFError, OSError):
        return
    except Exception as error:  # noqa: BLE001 - the other side raises it
        reason = str(error) if isinstance(error, BlockTableError) else f"{type(error).__name__}: {error}"
        pipe.send_bytes(_answer(Result([], []), reason))


def _answer(result: Result, reason: str = "") -> bytes:
    return msgspec.msgpack.encode((reason, result.tokens, result.checksums))
