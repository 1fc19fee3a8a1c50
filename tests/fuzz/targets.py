"""What is fuzzed: each target takes any bytes, and raises where something other than an answer or a clear refusal comes out.

``tools/fuzz.py`` drives them by coverage with atheris; ``test_fuzz.py`` drives them for seconds by mutation of the corpus.
"""

import contextlib
import io
import shlex
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from blocktable import BlockTables, Delta, LawBroken, Replica, plan, recording, sanitize
from blocktable.cli import run
from blocktable.contracts.catalogue import read_catalogue
from blocktable.errors import ArgumentError, BlockTableError, DeltaError
from blocktable.recording.coding import HEAD, TAIL
from blocktable.recording.format import MAGIC
from blocktable.traces import MAX_TOKENS, read_trace

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz"))
GROUPS = [plan(max_model_len=64, block_size=4), plan(max_model_len=64, block_size=16)]


def delta(data: bytes) -> None:
    """Bytes as they are, and once more with the checksum mended, so that damage behind it is met too."""
    _one_delta(data)
    if len(data) >= 40:
        _one_delta(data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:])


def _one_delta(data: bytes) -> None:
    try:
        found = Delta.from_bytes(data)
    except DeltaError:
        return
    assert found.to_bytes() == data, "accepted, and not what it says"
    replica = Replica(GROUPS, max_rows=4)
    lawful = Delta(1, found.spans, found.values, found.copies, 0, replica.layout)
    before = replica.snapshot()
    try:
        replica.apply(lawful)
    except DeltaError:
        assert replica.snapshot() == before, "a refused delta left a trace"
        return
    replica.check()


def record(data: bytes) -> None:
    """A file as it is, and once more cut into records whose checksums fit."""
    _one_recording(data)
    _one_recording(MAGIC + b"".join(_framed(data[len(MAGIC) :])))


def _framed(data: bytes) -> Iterator[bytes]:
    at, chain = 0, 0
    while at + HEAD < len(data):
        size = int.from_bytes(data[at : at + HEAD], "little") % 4096
        body = data[at + HEAD : at + HEAD + size]
        chain = zlib.crc32(body, chain)
        yield len(body).to_bytes(HEAD, "little") + body + (chain & 0xFFFF).to_bytes(TAIL, "little")
        at += HEAD + size + TAIL


def _one_recording(data: bytes) -> None:
    path = FOLDER / "recording"
    path.write_bytes(data)
    try:
        made, found, _ = recording.calls(path)
        if len(found) > 200 or any(_large(what) for what in made):
            return
        for _ in recording.play(path):
            pass
    except LawBroken:
        raise
    except ArgumentError:
        return


def _large(what: dict) -> bool:
    rows, blocks = what.get("max_rows", 0), what.get("num_blocks") or 0
    widths = [shape[9] if len(shape) > 9 else 0 for shape in what.get("groups", [])]
    numbers = [rows, blocks, *widths]
    return not all(isinstance(n, int) and n < 10_000 for n in numbers)


def trace(data: bytes) -> None:
    """A trace file."""
    path = FOLDER / "trace"
    path.write_bytes(data)
    try:
        found = read_trace(path)
    except ArgumentError:
        return
    assert 1 <= found.input_length.min() <= found.input_length.max() <= MAX_TOKENS
    assert bool((found.arrival[1:] >= found.arrival[:-1]).all())
    assert found.hash_indptr.size == len(found) + 1


def contract(data: bytes) -> None:
    """A contract file."""
    with contextlib.suppress(BlockTableError):
        read_catalogue(data.decode("utf-8", "replace"), "fuzzed.toml")


def command(data: bytes) -> None:
    """A command line; those commands that only answer."""
    try:
        words = shlex.split(data.decode("utf-8", "replace"))
    except ValueError:
        return
    if not words or words[0] not in ("check", "backends", "replay", "shrink"):
        words = ["check", *words]
    if any("/" in word and Path(word.split("=")[-1]).is_absolute() for word in words) or "--out" in " ".join(words):
        return
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    assert code in (0, 1, 2, 3), f"{words} ends with {code}: {err.getvalue()[-500:]}"
    assert "Traceback" not in err.getvalue()
    answers = code in (1, 3) and any(word.startswith(("-q", "--q")) for word in words)  # --quiet: by its status alone
    assert code == 0 or answers or out.getvalue() or err.getvalue(), f"{words} says nothing"


TARGETS: dict[str, Callable[[bytes], None]] = {
    "delta": delta,
    "record": record,
    "trace": trace,
    "contract": contract,
    "command": command,
}


def seeds(target: str) -> list[bytes]:
    """Return what to begin from: well-formed inputs, made here so that they follow the formats of today."""
    if target == "delta":
        tables = BlockTables(GROUPS, max_rows=4)
        tables.append([0, 2], [0, 3, 4], [5, 6, 7, 8])
        first = tables.commit().to_bytes()
        tables.move([2], [1])
        tables.truncate([0], [1])
        return [first, tables.commit().to_bytes()]
    if target == "record":
        return [_recorded(kind) for kind in ("cache", "tables", "ring", "watch")]
    if target == "trace":
        line = '{"timestamp": %d, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}\n'
        table = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:01:46.68,7,44\n" * 3
        return ["".join(line % n for n in range(5)).encode(), table.encode()]
    if target == "contract":
        folder = Path(recording.__file__).parents[1] / "contracts"
        return [path.read_bytes()[:6000] for path in sorted(folder.glob("*.toml"))]
    return [
        b"check --engine vllm==0.19.1 --backend FLASHINFER_MLA --max-model-len 9416 --block-size 32",
        b"check -- vllm serve MODEL --max-model-len 9k --block-size 32 -dcp 2 --attention-config.backend CUTLASS_MLA",
        b"check --engine flashinfer==0.7.2 --backend trtllm-gen --max-model-len 9416 --block-size 32 --json",
        b"backends FLASHINFER_MLA",
        b"replay nothing.btr --to 3",
    ]


def _recorded(kind: str) -> bytes:
    from blocktable import KVCache
    from blocktable.testing import CacheWorkload, TablesWorkload

    path = FOLDER / kind
    with recording.record(path, ring=8192 if kind == "ring" else None):
        if kind == "watch":
            _watched()
        else:
            cache = kind != "tables"
            made: Any = (
                KVCache(GROUPS[:1], num_blocks=40, max_rows=4)
                if cache
                else BlockTables(GROUPS, max_rows=4, num_blocks=60)
            )
            work: Any = (CacheWorkload if cache else TablesWorkload)(made, 1)
            for _ in range(6):
                work.step()
    return path.read_bytes()


def _watched() -> None:
    watcher = sanitize.watch(GROUPS, num_blocks=40, mode="count")
    for step in range(6):
        tables = [np.arange(4 * g.width).reshape(4, -1) % (step + 1) for g in GROUPS]
        watcher.step(tables, [[step, 1, 0, 0], [1, 1, 0, 0]], copies=tables, requests=["a"], rows=[0])
