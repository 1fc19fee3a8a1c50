"""Look at vLLM's tables at each step, whosever they are: the laws, checked by ``sanitize.watch`` from the outside.

The first finding of each law is logged with its place, later ones are counted; `reports` holds them all. What stock vLLM
is known to break is in docs/findings.md.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from blocktable.integrations import _patches
from blocktable.integrations.vllm import logger, stay_stock
from blocktable.integrations.vllm_groups import make_group, pick, read_groups

__all__ = ["install", "reports"]

_watched: list[Any] = []


def install() -> None:
    """Watch the tables of each worker of this process, once they are made."""
    _patches.wrap(import_module("vllm.v1.worker.worker_base").WorkerWrapperBase, "initialize_from_config", _initialize)


def reports() -> list[Any]:
    """Return the report of each watched worker of this process: ``counts`` by law, and the ``findings``."""
    return [observer.watch.report for observer in _watched]


def _initialize(original: Callable[..., None], wrapper: Any, kv_cache_configs: list[Any]) -> None:
    original(wrapper, kv_cache_configs)
    groups = read_groups(kv_cache_configs[wrapper.global_rank])
    if isinstance(groups, str):
        stay_stock("observe", f"the cache {groups} is of a kind it does not know")
        return
    runner = getattr(wrapper.worker, "model_runner", None)
    batch: Any = getattr(runner, "input_batch", None)
    first, second = getattr(batch, "block_table", None), getattr(runner, "block_tables", None)
    tables: Any = second if first is None else first
    if not getattr(tables, "block_tables", None):  # an encoder's worker, or that of a model without attention
        logger.info("blocktable observe: this worker has no tables")
        return
    _watched.append(_ObserverV2(tables, groups) if first is None else _ObserverV1(tables, groups))
    logger.info("blocktable observe: %s", type(tables).__name__)


class _Observer:
    """A watcher, and what was logged of its report."""

    def __init__(self, groups: list[Any], num_blocks: int | None, rank: int) -> None:
        from blocktable.sanitize import watch  # noqa: PLC0415 - Numba, which must not be imported before the worker

        ranks = max(group.geometry.cp_size for group in groups)
        self.watch = watch(groups, num_blocks=num_blocks, cp_rank=rank if ranks > 1 else 0, mode="count")
        self._logged: set[str] = set()

    def without_given_up(self, g: int, table: Any, computed: Any) -> Any:
        """Return a group's table without the blocks that its window has given up.

        The scheduler frees those and hands them to others, but never tells the workers: their rows keep the ids, in front
        of what a kernel reads.
        """
        group = self.watch.groups[g]
        if group.kind not in ("window", "chunked"):
            return table
        window = group.window
        dead = computed // window * window if group.kind == "chunked" else np.maximum(computed - window + 1, 0)
        found = np.array(table.cpu() if hasattr(table, "cpu") else table)
        blocks = dead // (group.geometry.block_size * group.geometry.cp_size)
        found[: blocks.size][np.arange(found.shape[1]) < blocks[:, None]] = 0
        return found

    def look(self, *arrays: Any, **named: Any) -> None:
        """Look at one step, and log the first finding of each law."""
        for finding in self.watch.step(*arrays, **named):
            if finding.law not in self._logged:
                self._logged.add(finding.law)
                logger.warning("blocktable observe: %s (further ones of %s are only counted)", finding, finding.law)


class _ObserverV1(_Observer):
    """The first runner's tables: persistent rows in batch order, the host's beside the device's."""

    def __init__(self, tables: Any, known: Any) -> None:
        parts = tables.block_tables
        self._tables = tables
        self._state = [_maps_nothing(part) for part in parts]
        ranks, rank, interleave = parts[0].dcp_world_size, parts[0].dcp_rank, parts[0].cp_kv_cache_interleave_size
        kinds = zip(pick(known, self._state, encoder=False), parts, strict=True)
        groups = [
            make_group(kind, one.max_num_blocks_per_req, one.block_size, ranks, interleave) for kind, one in kinds
        ]
        super().__init__(groups, known.num_blocks, rank)
        self._compute = tables.compute_slot_mapping
        tables.compute_slot_mapping = self._step

    def _step(self, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        self._compute(num_reqs, query_start_loc, positions)
        parts, tokens = self._tables.block_tables, positions.shape[0]
        none = np.full(tokens, -1)  # such a group's slots are not used, and stock leaves them as they were
        starts = query_start_loc[: num_reqs + 1]
        computed = _computed(starts, positions)
        self.look(
            [self.without_given_up(g, part.get_numpy_array(), computed) for g, part in enumerate(parts)],
            [part.num_blocks_per_row[:num_reqs] for part in parts],
            query_start_loc=starts,
            positions=positions,
            slots=[
                none if state else part.slot_mapping.gpu[:tokens]
                for part, state in zip(parts, self._state, strict=True)
            ],
            copies=[
                self.without_given_up(g, part.get_device_tensor(num_reqs), computed) for g, part in enumerate(parts)
            ],
        )


class _ObserverV2(_Observer):
    """The second runner's tables: the rows gathered for the step. Those of finished requests stay as they were."""

    def __init__(self, tables: Any, known: Any) -> None:
        sizes, sharded = tables.block_sizes, tables.dcp_sharded
        widths = [table.shape[1] for table in tables.input_block_tables]
        stock = getattr(tables, "_slot_mapping_enabled", None)  # vLLM's own keep it to themselves
        enabled = tables.slot_mapping_enabled if stock is None else stock
        kinds = zip(pick(known, [not one for one in enabled], encoder=True), widths, sizes, sharded, strict=True)
        groups = [
            make_group(kind, width, size, tables.cp_size if split else 1, tables.cp_interleave)
            for kind, width, size, split in kinds
        ]
        super().__init__(groups, known.num_blocks, tables.cp_rank)
        self._tables = tables
        self._gathered: tuple[Any, int] = (None, 0)  # what the last gather was for
        self._gather, self._compute = tables.gather_block_tables, tables.compute_slot_mappings
        tables.gather_block_tables, tables.compute_slot_mappings = self._note, self._step

    def _note(self, idx_mapping: Any, num_reqs_padded: int, **named: Any) -> Any:
        if not named:
            self._gathered = idx_mapping, num_reqs_padded
        return self._gather(idx_mapping, num_reqs_padded, **named)

    def _step(self, idx_mapping: Any, query_start_loc: Any, positions: Any, *args: Any, **named: Any) -> Any:
        slots = self._compute(idx_mapping, query_start_loc, positions, *args, **named)
        gathered, padded = self._gathered
        if gathered is idx_mapping and "out" not in named:
            requests = idx_mapping.cpu().numpy()
            counts = [np.where(requests >= 0, np.asarray(one)[requests], 0) for one in self._tables.num_blocks.np]
            starts = query_start_loc[: requests.size + 1]
            computed, tables = _computed(starts, positions), self._tables.input_block_tables
            self.look(
                [self.without_given_up(g, table[:padded], computed) for g, table in enumerate(tables)],
                counts,
                rows=np.where(requests >= 0, np.arange(requests.size), -1),
                query_start_loc=starts,
                positions=positions,
                slots=list(slots),
                requests=requests.tolist(),
            )
        return slots


def _computed(starts: Any, positions: Any) -> Any:
    """Return how many tokens each request of a step had before it: the position of its first token."""
    begins, where = starts.cpu().numpy(), positions.cpu().numpy()
    return np.where(begins[1:] > begins[:-1], where[np.minimum(begins[:-1], max(where.size - 1, 0))], 0)


def _maps_nothing(part: Any) -> bool:
    mode = getattr(part, "slot_mapping_mode", None)
    return bool(part.maps_nothing if mode is None else mode.value == "none")
