"""Calls for one row each, as engines make them, gathered into one batched call per step.

An engine hands over the new blocks of one request at a time. Rows wait here until the step's commit, or until a call
comes that the waiting ones must precede: another verb, or the same row again. The tables then change in the order of the
calls.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from blocktable.tables import BlockTables

__all__ = ["Pending"]


class Pending:
    """The calls that wait for ``tables``; at most one per row, all of one verb (``append``, ``assign`` or ``clear``).

    >>> import blocktable
    >>> tables = BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
    >>> pending = Pending(tables)
    >>> pending.add("assign", 0, ([3, 7],))
    >>> pending.add("append", 0, ([9],))
    >>> pending.flush()
    >>> tables[0].array[0].tolist()
    [3, 7, 9, 0]
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._groups = len(tables.shapes)
        self._verb = ""
        self._rows: dict[int, Sequence[Sequence[int]]] = {}

    def add(self, verb: str, row: int, ids: Sequence[Sequence[int]] = ()) -> None:
        """Let a call wait: ``ids`` are a row's blocks, one list per group, and stay as they are until the flush."""
        if verb != self._verb or row in self._rows:
            self.flush()
            self._verb = verb
        self._rows[row] = ids

    def flush(self) -> None:
        """Make the calls that wait; what the tables refuse raises their ArgumentError, and is not tried again."""
        if not self._rows:
            return
        waiting, self._rows = self._rows, {}
        rows, parts = list(waiting), waiting.values()
        if self._verb == "clear":
            self._tables.clear(rows)
            return
        write: Any = self._tables.append if self._verb == "append" else self._tables.assign
        if self._groups == 1:
            lists = [part[0] for part in parts]
            write(rows, [0, *accumulate(map(len, lists))], list(chain.from_iterable(lists)))
            return
        by_group = list(zip(*parts, strict=True))[: self._groups]  # a group without a table comes last
        indptr = tuple([0, *accumulate(map(len, lists))] for lists in by_group)
        write(rows, indptr, tuple(list(chain.from_iterable(lists)) for lists in by_group), group=None)
