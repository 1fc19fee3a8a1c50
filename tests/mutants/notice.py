"""Run one area under the sanitizer, or its state machine without; print the law, or the error, or ``nothing``.

Started by tools/mutants.py with a sabotaged copy of the source in front.
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from blocktable import AnyWidth, BlockTables, Contract, Group, KVCache, LawBroken, Replica, TokenMultiple, plan
from blocktable.errors import BlockTableError

ROOT = Path(os.environ["BLOCKTABLE_ROOT"])


# ---- under the sanitizer


def planned(**how: Any) -> Any:
    return plan(**({"max_model_len": 48, "block_size": 4} | how))


def geometries() -> Iterator[None]:
    """Tables of many shapes: what a constructor of sanitized tables looks at."""
    rng = Random(5)
    for _ in range(600):
        kernel, ratio, ranks = rng.choice([1, 2, 3, 4, 6, 8]), rng.randint(1, 4), rng.choice([1, 1, 2])
        block = kernel * ratio
        sizes = tuple({kernel, rng.choice([1, 2, 3, 5]) * kernel})
        rule = rng.choice([AnyWidth(), TokenMultiple(kernel * rng.randint(1, 7)), TokenMultiple(24)])
        contracts = [Contract("one", kernel_block_sizes=sizes, width_rule=rule)]
        if rng.random() < 0.5:
            contracts.append(Contract("two", kernel_block_sizes=(kernel, block)))
        how = {"lookahead": rng.choice([0, 0, 5, block]), "extra_blocks": rng.choice([0, 0, 3]), "cp_size": ranks}
        try:
            geometry = plan(max_model_len=rng.randint(1, 90), block_size=block, contracts=contracts, **how)
            BlockTables([geometry], max_rows=1, sanitize=True)
        except LawBroken:
            raise
        except (BlockTableError, ZeroDivisionError):
            continue
        yield


def tables() -> Iterator[None]:
    """Random calls, right and wrong ones, on sanitized tables, followed by a sanitized replica."""
    from blocktable.testing import tables_machine as machine

    machine.note = lambda *_: None
    for seed in range(40):
        rng = Random(seed)
        one = machine.TablesMachine()
        type(one).make = staticmethod(lambda *a, **n: BlockTables(*a, sanitize=True, **n))
        machine.Replica = lambda *a, **n: Replica(*a, sanitize=True, **n)
        machine.Replica.from_snapshot = Replica.from_snapshot
        try:
            one.start(rng, [rng.choice(machine.KINDS) for _ in range(rng.randint(1, 3))])
            for _ in range(60):
                one.step(Random(rng.randrange(2**32)))
                yield
        except LawBroken as error:
            if (
                error.law in ("L7", "L8")
                and "slot_mapping" in str(error)
                and ("twice" in str(error) or "both" in str(error))
            ):
                continue  # the machine's own calls put two tokens at one place
            raise
        except (AssertionError, IndexError, ValueError, KeyError):
            continue
    wide = BlockTables([plan(max_model_len=64, block_size=16)], max_rows=2, sanitize=True)
    wide.append([0], [0, 3], [2**27 - 1, 2**24 + 1, 5])
    wide.slot_mapping([0], [0, 3], [0, 20, 40])
    wide.commit()
    yield


SETS = [
    [planned()],
    [Group(planned()), Group(planned(block_size=2), kind="window", window=7)],
    [Group(planned(block_size=8)), Group(planned(), kind="chunked", window=12)],
    [planned(cp_size=2, cp_interleave=2)],
    [Group(planned(), kind="window", window=9)],
    [Group(planned()), Group(planned(extra_blocks=2), kind="state", state_blocks=2)],
]


def caches() -> Iterator[None]:
    """A workload, then random calls, right and wrong ones, on sanitized caches."""
    from blocktable.testing import CacheWorkload
    from blocktable.testing import cache_machine as machine

    for seed in range(18):
        groups = SETS[seed % len(SETS)]
        rank = seed % max((g.geometry if isinstance(g, Group) else g).cp_size for g in groups)
        try:
            cache = KVCache(groups, num_blocks=26 + 5 * (seed % 3), max_rows=4, cp_rank=rank, sanitize=True)
            work = CacheWorkload(cache, seed, texts=2)
            for _ in range(30):
                work.step()
                yield
            work.close()
        except (AssertionError, IndexError, ValueError, KeyError):
            continue
    yield from tight()
    machine.note = lambda *_: None
    for seed in range(60):
        rng = Random(seed)
        one = machine.CacheMachine()
        type(one).make = staticmethod(lambda *a, **n: KVCache(*a, sanitize=True, **n))
        try:
            one.start(rng, rng.choice(machine.KINDS + machine.MIXED))
            for _ in range(40):
                one.step(Random(rng.randrange(2**32)))
                yield
        except (AssertionError, IndexError, ValueError, KeyError):
            continue


def tight() -> Iterator[None]:
    """Rows of every length on a padded table whose pool is smaller than one row's width."""
    wide = planned(contracts=[Contract("wide", width_rule=TokenMultiple(64))])
    cache = KVCache([wide], num_blocks=14, max_rows=1, sanitize=True)
    for length in range(40, 66):
        try:
            cache.admit([0], [0, length], [7] * length)
        except LawBroken:
            raise
        except BlockTableError:
            continue
        cache.free([0])
        yield


def devices() -> Iterator[None]:
    """The cases of run_parity, and random steps, on sanitized device tables."""
    from blocktable.device import DeviceTables
    from blocktable.testing.cases import Case, cases, random_steps

    groups = [Group(planned()), Group(planned(block_size=6), kind="window", window=5)]
    more = [Case("random", "", groups, 4, lambda s=s: random_steps(groups, s, 6, 2**20)) for s in range(6)]
    for case in [*cases(brief=True), *more]:
        if case.name == "one row of 131072 entries":
            continue
        host = BlockTables(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
        device = DeviceTables(host, "cpu", cp_rank=case.rank, kernels="reference", sanitize=True)
        for step in case.steps():
            try:
                step.change(host)
                device.apply(host.commit())
                starts = np.cumsum([0, *step.query])
                device.gather(step.rows, step.padded, step.lengths)
                device.slot_mapping(step.rows, starts, step.positions, int(starts[-1]) + step.unused)
            except LawBroken as error:
                if "twice" in str(error) or "both" in str(error):
                    continue  # cases name a row several times
                raise
            yield


# ---- the state machines


def run_machine(machine: Any) -> None:
    """Run a machine for what tests/property runs it for by default."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=480,
            stateful_step_count=48,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def tables_machine() -> None:
    from blocktable.testing import TablesMachine, run_parity

    run_machine(TablesMachine)
    run_parity(
        lambda groups, max_rows, num_blocks, cp_rank: (
            None if max_rows > 100 else BlockTables(groups, max_rows=max_rows, num_blocks=num_blocks)
        )
    )


def cache_machine() -> None:
    from blocktable.testing import CacheMachine

    run_machine(CacheMachine)


def plan_machine() -> None:
    """Plan against a search that knows the rules alone."""
    rng = Random(3)
    for _ in range(1500):
        kernel, ratio, ranks, tokens = (
            rng.choice([1, 2, 3, 4, 6, 8]),
            rng.randint(1, 4),
            rng.choice([1, 2]),
            rng.randint(1, 90),
        )
        block, multiple, ahead, extra = kernel * ratio, rng.randint(1, 30), rng.choice([0, 5]), rng.choice([0, 3])
        sizes = (kernel, rng.choice([1, 2, 3]) * kernel)
        contract = Contract("one", kernel_block_sizes=sizes, width_rule=TokenMultiple(multiple))
        how = {"max_model_len": tokens, "lookahead": ahead, "extra_blocks": extra, "cp_size": ranks}
        contracts = [contract, Contract("two", kernel_block_sizes=(kernel,))][: rng.randint(1, 2)]
        found = plan(block_size=block, contracts=contracts, **how)
        best = kernel if len(contracts) > 1 else max(size for size in sizes if block % size == 0)
        blocks = next(n for n in range(1000) if n * block * ranks >= tokens + ahead) + extra
        width = next(w for w in range(10**6) if w >= blocks * (block // best) and w * best % multiple == 0)
        assert (found.kernel_block_size, found.min_blocks) == (best, blocks)
        assert (found.kernel_width, found.width) == (width, width * best // block)


def device_machine() -> None:
    spec = spec_from_file_location("parity_cases", ROOT / "tests" / "parity" / "cases.py")
    module = module_from_spec(spec)
    sys.modules["parity_cases"] = module
    spec.loader.exec_module(module)
    for case in module.cases(brief=True):
        if case.name != "one row of 131072 entries":
            module.drive(case, lambda t, rank: module.DeviceTables(t, "cpu", cp_rank=rank, kernels="reference"))


SANITIZED: dict[str, Callable[[], Iterator[None]]] = {
    "tables": tables,
    "cache": caches,
    "plan": geometries,
    "device": devices,
}
MACHINES = {"tables": tables_machine, "cache": cache_machine, "plan": plan_machine, "device": device_machine}


def main() -> None:
    how, area = sys.argv[1:]
    try:
        if how == "sanitizer":
            for _ in SANITIZED[area]():
                pass
        else:
            MACHINES[area]()
    except LawBroken as error:
        print(error.law)
    except BaseException as error:  # noqa: BLE001 - whatever a sabotaged library raises
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:80]}")
    else:
        print("nothing")


if __name__ == "__main__":
    main()
