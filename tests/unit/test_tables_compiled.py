"""The compiled loops: nothing is compiled after construction, no cache folder is needed, and plain Python does the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import blocktable
from blocktable import BlockTables, Delta, Group, KVCache, Replica
from blocktable.slots import positions

PACKAGE = Path(blocktable.__file__).parent

# A seeded run through every verb, printing one digest of all that it saw.
RUN = """
import hashlib, random, warnings
warnings.simplefilter("always")
import numpy as np
import blocktable
from blocktable import BlockTables, BlockTableError, Contract, Group, Replica
rng, seen = random.Random(5), hashlib.sha256()
split = blocktable.plan(max_model_len=96, block_size=8, contracts=[Contract("c", kernel_block_sizes=(4,))], cp_size=2)
groups = [Group(split), Group(blocktable.plan(max_model_len=60, block_size=6), kind="window", window=9)]
tables, mirror = BlockTables(groups, max_rows=5, num_blocks=50), Replica(groups, max_rows=5)
for step in range(150):
    rows = rng.sample(range(5), rng.randint(0, 5))
    counts = [rng.randint(0, 3) for _ in rows]
    indptr = np.cumsum([0, *counts])
    ids = [rng.randint(1, 51) for _ in range(sum(counts))]
    try:
        match rng.randrange(6):
            case 0: tables.append(rows, (indptr, indptr), (ids, ids), group=None)
            case 1: tables.assign(rows, indptr, ids, rng.randrange(2))
            case 2: tables.release(rows, counts, 1)
            case 3: tables.truncate(rows, counts, rng.randrange(2))
            case 4: tables.move(rows[:2], rows[2:])
            case 5: tables.copy(rows[1:3], rows[:2])
    except BlockTableError as error:
        seen.update(f"{type(error).__name__} {error}".encode())
    slots = tables.slot_mapping(rows, np.arange(len(rows) + 1) * 30, np.arange(30 * len(rows)) % 97, cp_rank=step % 2)
    delta = tables.commit()
    mirror.apply(delta)
    seen.update(delta.to_bytes() + slots.tobytes() + tables.tables[0].kernel_array(rows).tobytes())
tables.check()
mirror.check()
seen.update(mirror.snapshot())
print(seen.hexdigest())
"""


# The least that needs compiled loops: they are compiled anew here, in seconds.
SHORT = """
import warnings
warnings.simplefilter("always")
import blocktable
tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=1)
tables.append([0], [0, 2], [7, 9])
print(tables.commit().values.tolist())
"""

# Whether a loop and a helper of it are loaded, whether Numba's compiler is, and a loop of the user's own.
WARM = """
import sys
import numba
from blocktable import _kernels
print("write", len(_kernels.write.overloads))
print("touch", len(_kernels.touch.overloads))
print("compiler", "numba.cpython.unicode" in sys.modules)
print(numba.njit(lambda values: [value + 1 for value in values])([1, 2]))
"""

LOOPS = """
from blocktable._jit import compiled, i64
from parts import SIZE, grow
@compiled(i64(i64))
def loop(n):
    return grow(n, SIZE)
"""
PARTS = """
from blocktable._jit import helper, i64
SIZE = {size}
@helper(i64(i64, i64))
def grow(n, by):
    return n {step} by
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    return subprocess.run(
        [sys.executable, "-c", script], env=kept | environment, capture_output=True, text=True, check=True, timeout=300
    )


def exercise(integer: Any) -> None:
    """Call everything that tables offer, with arguments of one type."""

    def array(*values: int) -> Any:
        return list(values) if integer is list else np.array(values, integer)

    geometry = blocktable.plan(max_model_len=64, block_size=8)
    groups = [geometry, Group(geometry, kind="window", window=8)]
    tables, mirror = BlockTables(groups, max_rows=4), Replica(groups, max_rows=4)
    tables.append(array(0, 1), (array(0, 2, 3), array(0, 1, 2)), (array(1, 2, 3), array(4, 5)), group=None)
    tables.assign(array(2), array(0, 1), array(6))
    tables.append(array(2), array(0, 1), array(7))
    tables.truncate(array(0), array(1))
    tables.truncate(array(0), (array(1), array(0)), None)
    tables.release(array(1), array(1), 1)
    tables.move(array(0), array(3))
    tables.swap(array(1), array(2))
    tables.copy(array(1), array(0))
    tables.clear(array(3))
    with pytest.raises(blocktable.ArgumentError):
        tables.clear(array(9))
    tables.slot_mapping(array(0, 1), array(0, 2, 3), array(0, 1, 2), padded=5)
    positions(array(3, 4), array(0, 2, 3))
    tables.tables[0].kernel_array(array(0, 1))
    mirror.apply(Delta.from_bytes(tables.commit().to_bytes()))
    Replica.from_snapshot(tables.snapshot()).check()
    mirror.check()
    tables.check()
    tables.clear(array(0, 1, 2))
    tables.resize(groups)


def exercise_cache(integer: Any) -> None:
    """Call everything that a cache offers, with arguments of one type."""

    def array(*values: int) -> Any:
        return list(values) if integer is list else np.array(values, integer)

    geometry = blocktable.plan(max_model_len=32, block_size=4)
    cache = KVCache([geometry, Group(geometry, kind="window", window=8)], num_blocks=60, max_rows=5)
    cache.admit(array(0, 1), array(0, 5, 9), array(1, 2, 3, 4, 5, 1, 2, 3, 4), limit=array(9, 1), final=array(2, 0))
    cache.extend(array(0), array(0, 2))
    cache.confirm(array(0), array(7), array(0, 2), array(6, 7))
    cache.confirm(array(0), array(7))
    cache.extend(array(0, 1), array(0, 1, 2), array(8, 9), partial=True, final=array(7, 0))
    cache.fork(0, 2)
    cache.extend(array(2), array(0, 1), array(8))
    cache.commit()
    cache.truncate(array(0), array(7), fence=1)
    cache.free(array(0, 2), fence=2)
    cache.retire(2)
    cache.lookup(array(0, 6), array(1, 2, 3, 4, 5, 6))
    cache.match(array(3), array(0, 6), array(1, 2, 3, 4, 5, 6), salts=[b"a"])
    with pytest.raises(blocktable.ArgumentError):
        cache.free(array(9))
    with pytest.raises(blocktable.OutOfBlocks):
        cache.extend(array(1), array(0, 1), array(5), headroom=60)
    if integer in (list, np.int64):
        cache.admit(array(4), array(0, 5), array(2**40, 2, 3, 4, 5))  # tokens of two words from here on
        cache.extend(array(4), array(0, 1), array(2**41))
    cache.acquire_rows(1)
    cache.snapshot()
    cache.stats()
    cache.check()
    cache.reset_prefix()
    cache.commit()


def dispatchers() -> dict[str, int]:
    """Every compiled function of the package that is loaded, and how many specialisations it has."""
    return {
        f"{name}.{attribute}": len(value.overloads)
        for name, module in list(sys.modules.items())
        if name.startswith("blocktable")
        for attribute, value in vars(module).items()
        if isinstance(value, numba.core.dispatcher.Dispatcher)
    }


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_nothing_is_compiled_after_construction() -> None:
    BlockTables([blocktable.plan(max_model_len=64, block_size=8)], max_rows=1)
    Replica([blocktable.plan(max_model_len=64, block_size=8)], max_rows=1)
    KVCache([blocktable.plan(max_model_len=64, block_size=8)], num_blocks=9, max_rows=1)
    before = dispatchers()
    assert len(before) > 10
    assert set(before.values()) <= {0, 1}  # none: a helper whose loops were all found in the cache
    with numba.core.event.install_recorder("numba:compile") as recorder:
        for integer in (list, np.int32, np.int64, np.uint8, np.uint64, np.int16):
            exercise(integer)
            exercise_cache(integer)
    assert dispatchers() == before
    assert recorder.buffer == []


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_a_warm_start_loads_the_loops_alone(tmp_path: Path) -> None:
    """Neither their helpers, nor what Numba needs to compile; and what it loads still lets users compile their own."""
    run(SHORT, NUMBA_CACHE_DIR=str(tmp_path))
    warm = run(SHORT + WARM, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_DEBUG_CACHE="1").stdout
    assert "data loaded from" in warm
    assert "data saved to" not in warm
    assert warm.endswith("write 1\ntouch 0\ncompiler False\n[2, 3]\n")


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_a_loop_is_compiled_anew_when_a_helper_or_a_constant_of_another_file_changes(tmp_path: Path) -> None:
    """An upgrade that leaves the loop's own file as it was must not leave old code in the cache."""
    (tmp_path / "loops.py").write_text(LOOPS)
    for size, step, want in ((1, "+", 6), (2, "+", 7), (2, "*", 10)):
        (tmp_path / "parts.py").write_text(PARTS.format(size=size, step=step))
        done = run("import loops; print(loops.loop(5))", PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "c"))
        assert done.stdout == f"{want}\n"


def test_plain_python_gives_the_same_results() -> None:
    assert run(RUN).stdout == run(RUN, NUMBA_DISABLE_JIT="1").stdout


def test_an_unwritable_cache_folder_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    """Root may write anywhere, so every place where a cache could go is made a path below a regular file."""
    copy = tmp_path / "site" / "blocktable"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()
    wall = tmp_path / "file"
    wall.touch()
    nowhere = str(wall / "below")
    places = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"), nowhere)
    done = run(SHORT, PYTHONPATH=str(copy.parent), PYTHONDONTWRITEBYTECODE="1", **places)
    assert "RuntimeWarning: no folder for compiled loops can be written" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr
    assert done.stdout == "[7, 9]\n"
