"""``run_parity``: anybody's tables through the cases of ours, against the plain-Python model."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from blocktable.oracle import TablesModel
from blocktable.sanitize.laws import as_numbers
from blocktable.state import TableState
from blocktable.testing.cases import CASES, Case, Step

__all__ = ["expected_batch", "run_parity"]

VERBS = ("append", "assign", "truncate", "clear", "release", "move", "swap", "copy")


def run_parity(make: Callable[..., Any], cases: Iterable[Case] = CASES) -> list[str]:
    """Put tables through the cases, step by step beside the plain-Python model; raise AssertionError at the first difference.

    Parameters
    ----------
    make
        ``make(groups, max_rows=..., num_blocks=..., cp_rank=...)`` returns the tables, or None where they cannot have such
        groups. They offer

        - ``assign(rows, indptr, ids, group)``, and whichever they have of the other verbs of ``BlockTables``; for one that
          they do not have, the rows that it changes are assigned;
        - ``commit()``, if changes have to be sent anywhere before they are seen;
        - ``gather(rows, padded, lengths)``, whose result has ``tables`` (per group [padded, kernel width], kernel blocks,
          row -1: padding) and whichever it has of ``rows``, ``seq_lens``, ``num_blocks``, ``kv_indptr``, ``kv_indices`` and
          ``last_page_len``; ``lengths`` may be None;
        - ``slot_mapping(rows, query_start_loc, positions, padded)`` -> [groups, at least padded], -1 behind the tokens.

        Arrays come and go as NumPy's or torch's. ``BlockTables`` itself will do as it is.
    cases
        The cases to run, ``blocktable.testing.CASES`` unless given.

    Returns the names of the cases that were run. Cost: seconds.

    >>> from blocktable import BlockTables
    >>> ran = run_parity(lambda groups, max_rows, num_blocks, cp_rank: BlockTables(groups, max_rows=max_rows, num_blocks=num_blocks))
    >>> "rows that shrink, move and come back" in ran
    True
    """
    ran = []
    for case in cases:
        made = make(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks, cp_rank=case.rank)
        if made is not None:
            tables = _Host(made, case.rank) if isinstance(made, TableState) else made
            _run(case, tables)
            ran.append(case.name)
    return ran


def _run(case: Case, tables: Any) -> None:
    model = TablesModel(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    verbs = _Verbs(tables, model)
    for number, step in enumerate(case.steps()):
        step.change(verbs)
        model.commit()
        if hasattr(tables, "commit"):
            tables.commit()
        where = f"{case.name} ({case.kinds}), step {number}"
        rows, positions = np.array(step.rows, np.int32), np.array(step.positions, np.int64)
        lengths = None if step.lengths is None else np.array(step.lengths, np.int64)
        starts = np.cumsum([0, *step.query], dtype=np.int64)
        compare(where, tables.gather(rows, step.padded, lengths), expected_batch(model, step, case.rank))
        padded = int(starts[-1]) + step.unused
        slots = as_numbers(tables.slot_mapping(rows, starts, positions, padded))
        expected = model.slot_mapping(
            step.rows, starts.tolist(), step.positions, padded=slots.shape[1], cp_rank=case.rank
        )
        same(f"{where}: slots", slots, expected)


class _Verbs:
    """The verbs of a case's changes, done in the model and in the tables."""

    def __init__(self, tables: Any, model: TablesModel) -> None:
        self._tables, self._model = tables, model

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def both(*args: Any, **named: Any) -> None:
            before = [[list(row) for row in table] for table in self._model.rows]
            getattr(self._model, verb)(*args, **named)
            if hasattr(self._tables, verb):
                getattr(self._tables, verb)(*args, **named)
                return
            for g, table in enumerate(self._model.rows):
                changed = [row for row, blocks in enumerate(table) if blocks != before[g][row]]
                indptr = np.cumsum([0, *(len(table[row]) for row in changed)]).tolist()
                self._tables.assign(changed, indptr, [block for row in changed for block in table[row]], g)

        return both


class _Host:
    """Host tables as tables under test: what kernels see comes from ``kernel_array``."""

    def __init__(self, tables: Any, rank: int) -> None:
        self._of, self._rank = tables, rank

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS and name != "commit":
            raise AttributeError(name)
        return getattr(self._of, name)

    def gather(self, rows: Any, padded: int, lengths: Any) -> Any:
        """Return the rows in batch order."""
        del lengths
        named = np.array([*rows.tolist(), *[-1] * (padded - len(rows))], np.int64)
        here = named >= 0
        tables, counts = [], []
        for g, table in enumerate(self._of.tables):
            shape = self._of.shapes[g]
            full = np.zeros((padded, shape.kernel_width), np.int64)
            full[here] = table.kernel_array(named[here])
            live = np.zeros(padded, np.int64)
            live[here] = table.num_blocks[named[here]] * (shape.block_size // shape.kernel_block_size)
            tables.append(full)
            counts.append(live)
        return {"rows": named, "tables": tables, "num_blocks": counts}

    def slot_mapping(self, rows: Any, starts: Any, positions: Any, padded: int) -> Any:
        """Return the slots of this rank."""
        return self._of.slot_mapping(rows, starts, positions, padded=padded, cp_rank=self._rank)


def compare(where: str, batch: Any, expected: dict[str, Any]) -> None:
    """Raise AssertionError where a batch has something else than the model says, of what it has at all."""
    for name, wanted in expected.items():
        field, _, group = name.partition(" ")
        try:
            found = batch[field] if isinstance(batch, dict) else getattr(batch, field)
        except (KeyError, AttributeError, ValueError):
            if field == "tables":
                raise
            continue
        array = as_numbers(found[int(group)] if group else found)
        same(f"{where}: {name}", array[: len(wanted)] if field == "kv_indices" else array, wanted)


def same(name: str, array: Any, expected: Any) -> None:
    """Raise AssertionError, naming the first places, where two arrays differ."""
    wanted = np.array(expected, np.int64).reshape(array.shape) if array.size else np.zeros(array.shape, np.int64)
    if not np.array_equal(array, wanted):
        where = np.argwhere(array != wanted)[:5].tolist()
        raise AssertionError(f"{name} differs, first at {where}:\n{array}\nwanted\n{wanted}")


def expected_batch(model: TablesModel, step: Step, rank: int) -> dict[str, Any]:
    """Return what a gather must give: what has groups is named ``tables 0``, ``tables 1``, and so on."""
    rows = step.rows + [-1] * (step.padded - len(step.rows))
    found: dict[str, Any] = {"rows": rows}
    given = [0] * len(rows) if step.lengths is None else [*step.lengths, *[0] * (step.padded - len(step.rows))]
    lengths = [length if row >= 0 else 0 for row, length in zip(rows, given, strict=True)]
    found["seq_lens"] = lengths
    for g, group in enumerate(model.groups):
        shape = group.geometry
        width, ratio, page = shape.kernel_width, shape.ratio, shape.kernel_block_size
        tables = [model.kernel_row(g, row) if row >= 0 else [0] * width for row in rows]
        pages = [len(model.rows[g][row]) * ratio if row >= 0 else 0 for row in rows]
        found[f"tables {g}"], found[f"num_blocks {g}"] = tables, pages
        if step.lengths is None:
            continue
        indptr, indices, last = [0], [], []
        for table, live, length in zip(tables, pages, lengths, strict=True):
            turn, chunk = shape.cp_size * shape.cp_interleave, shape.cp_interleave
            # This rank's tokens, one turn at a time: whole turns give a chunk each, the last one what is left of it.
            local = length // turn * chunk + sum(1 for o in range(length % turn) if o // chunk == rank % shape.cp_size)
            held = min(-(-local // page), live)
            indices += table[:held]
            indptr.append(len(indices))
            last.append(min(local - (held - 1) * page, page) if held else 1)
        found[f"kv_indptr {g}"], found[f"kv_indices {g}"], found[f"last_page_len {g}"] = indptr, indices, last
    return found
