"""``run_parity``: anybody's tables through the cases of ours, against the plain-Python model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from blocktable.errors import ArgumentError
from blocktable.oracle import TablesModel
from blocktable.sanitize.laws import as_numbers
from blocktable.state import TableState
from blocktable.testing.cases import CASES, Case, Step

__all__ = ["expected_batch", "run_parity", "same"]

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
        - ``gather(rows, padded, lengths)``, whose result, a dict or an object with attributes, has ``tables`` (per group
          [padded, kernel width], kernel blocks, row -1: padding) and whichever it has of ``rows`` and ``seq_lens`` [padded]
          and, per group, ``num_blocks`` and ``last_page_len`` [padded], ``kv_indptr`` [padded + 1] and ``kv_indices``, of
          which the first kv_indptr[-1] are looked at; what it does not have is absent or None; ``lengths`` may be None;
        - ``slot_mapping(rows, query_start_loc, positions, padded)`` -> [groups, at least padded], -1 behind the tokens.

        Arrays come and go as NumPy's or torch's and hold integers. ``BlockTables`` itself will do as it is.
    cases
        The cases to run, ``blocktable.testing.CASES`` unless given.

    Returns the names of the cases that were run. An exception of the tables comes through as it is, with a note of the case,
    the step and the call. Raises ArgumentError for cases that are none. Cost: seconds.

    >>> from blocktable import BlockTables
    >>> ran = run_parity(lambda groups, max_rows, num_blocks, cp_rank: BlockTables(groups, max_rows=max_rows, num_blocks=num_blocks))
    >>> "rows that shrink, move and come back" in ran
    True
    """
    ran = []
    for case in _listed(cases):
        with _during(f"{case.name}: make"):
            made = make(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks, cp_rank=case.rank)
        if made is not None:
            tables = _Host(made, case.rank) if isinstance(made, TableState) else made
            _run(case, tables)
            ran.append(case.name)
    return ran


def _listed(cases: Any) -> list[Case]:
    """Return the cases, once they all are such."""
    listed = list(cases) if hasattr(cases, "__iter__") else [cases]
    wrong = [one for one in listed if not isinstance(one, Case)]
    if wrong or isinstance(cases, Case):
        raise ArgumentError(
            f"run_parity: cases must be a list of cases, got {wrong[0] if wrong else cases!r}",
            values={"cases": cases},
            remedy="choose from blocktable.testing.CASES, such as [case for case in CASES if case.name in names]",
        )
    return listed


def _run(case: Case, tables: Any) -> None:
    model = TablesModel(case.groups, max_rows=case.max_rows, num_blocks=case.num_blocks)
    verbs = _Verbs(tables, model)
    for number, step in enumerate(case.steps()):
        where = f"{case.name} ({case.kinds}), step {number}"
        with _during(f"{where}: changes"):
            step.change(verbs)
            model.commit()
            if hasattr(tables, "commit"):
                tables.commit()
        rows, positions = np.array(step.rows, np.int32), np.array(step.positions, np.int64)
        lengths = None if step.lengths is None else np.array(step.lengths, np.int64)
        starts = np.cumsum([0, *step.query], dtype=np.int64)
        with _during(f"{where}: gather"):
            batch = tables.gather(rows, step.padded, lengths)
        compare(where, batch, expected_batch(model, step, case.rank), len(case.groups))
        padded = int(starts[-1]) + step.unused
        with _during(f"{where}: slot_mapping"):
            mapped = tables.slot_mapping(rows, starts, positions, padded)
        slots = _numbers(f"{where}: slots", mapped)
        if slots.ndim != 2 or len(slots) != len(case.groups) or slots.shape[1] < padded:
            wanted = f"({len(case.groups)}, {padded} or more)"
            raise AssertionError(f"{where}: slots have the shape {slots.shape}, wanted {wanted}")
        expected = model.slot_mapping(
            step.rows, starts.tolist(), step.positions, padded=slots.shape[1], cp_rank=case.rank
        )
        same(f"{where}: slots", slots, expected)


@contextmanager
def _during(where: str) -> Iterator[None]:
    """Note where it was on an exception of the tables: it is theirs, and none of ours takes its place."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


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


def compare(where: str, batch: Any, expected: dict[str, Any], groups: int) -> None:
    """Raise AssertionError where a batch has something else than the model says, of what it has at all."""
    for name, wanted in expected.items():
        field, _, group = name.partition(" ")
        with _during(f"{where}: {field}"):
            found = batch.get(field) if isinstance(batch, dict) else getattr(batch, field, None)
        if found is None:
            if field == "tables":
                raise AssertionError(f"{where}: what gather returned, a {type(batch).__name__}, has no tables")
            continue
        if group:
            found = _of_group(f"{where}: {field}", found, int(group), groups)
        array = _numbers(f"{where}: {name}", found)
        if field == "kv_indices" and array.ndim == 1:
            array = array[: len(wanted)]  # the rest is left over from earlier steps
        same(f"{where}: {name}", array, wanted)


def _of_group(name: str, found: Any, group: int, groups: int) -> Any:
    """Return one group's array of a field that has one of each."""
    if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise AssertionError(f"{name} is of type {type(found).__name__}, wanted an array for each of {groups} groups")
    with _during(name):
        if len(found) == groups:
            return found[group]
    raise AssertionError(f"{name} has {len(found)} arrays, wanted one for each of {groups} groups")


def _numbers(name: str, found: Any) -> Any:
    """Return an array of integers; raise AssertionError for anything else."""
    try:
        with _during(name):
            array = as_numbers(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise AssertionError(f"{name} cannot be read as an array: {error}") from error
    if array.size and array.dtype.kind not in "iu":
        raise AssertionError(f"{name} holds {array.dtype}, wanted integers:\n{array}")
    return array


def same(name: str, found: Any, expected: Any) -> None:
    """Raise AssertionError where two arrays differ in shape or, naming the first places, in values."""
    array, wanted = as_numbers(found), np.array(expected, np.int64)
    if array.shape != wanted.shape:
        raise AssertionError(f"{name} has the shape {array.shape}, wanted {wanted.shape}")
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
        found[f"tables {g}"] = np.array(tables, np.int64).reshape(len(rows), width)  # also of a batch of none
        found[f"num_blocks {g}"] = pages
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
