"""Random but lawful work: what an engine might do next, call after call, as fast as the calls themselves.

A workload looks at the object alone, so that it can drive whatever has its verbs: for long runs under the sanitizer, for
recordings, for planted faults. The same seed makes the same calls, as long as the object returns the same.
"""

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from blocktable.errors import ArgumentError, OutOfBlocks

if TYPE_CHECKING:
    from blocktable.groups import Group

__all__ = ["CacheWorkload", "TablesWorkload"]


class CacheWorkload:
    """Steps of an engine over a ``KVCache``: prompts that begin alike, decodes, drafts, tokens that come later, forks.

    ``step()`` makes a few calls and a commit. Steps run one ahead of the tokens: what is freed is fenced with the step that
    may still read it. With ``calm``, no step goes past the pool, and there are neither forks nor drafts.

    >>> import blocktable
    >>> cache = blocktable.KVCache([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=40, max_rows=8)
    >>> work = CacheWorkload(cache, seed=7)
    >>> for _ in range(50):
    ...     delta = work.step()
    >>> work.close()
    >>> cache.stats()["held"]
    0
    """

    def __init__(self, cache: Any, seed: int = 0, *, texts: int = 4, longest: int | None = None) -> None:
        self.cache = cache
        self.rng = Random(seed)  # noqa: S311 - no secret
        limits = [group.geometry.max_model_len for group in cache.groups]
        self._longest = min(longest or limits[0], *limits)
        self._texts = [[self.rng.randrange(50) for _ in range(self._longest)] for _ in range(texts)]
        self._waiting: dict[int, int] = {}  # rows whose last tokens are not known yet, and how many there are
        self._step = self._retired = 0
        self._live: set[int] = set()
        self._state = any(group.kind == "state" for group in cache.groups)

    def step(self) -> Any:
        """Make the calls of one step; return its delta."""
        self._step += 1
        rng = self.rng
        self._confirm()
        for verb, chance in ((self._retire, 0.5), (self._finish, 0.25), (self._fork, 0.1), (self._cut, 0.15)):
            if rng.random() < chance:
                verb()
        if len(self._live) < self.cache.max_rows and rng.random() < 0.5:
            self._admit()
        self._extend()
        if rng.random() < 0.002:
            self.cache.reset_prefix()
        return self.cache.commit()

    def close(self) -> None:
        """Give everything back."""
        if self._live:
            self.cache.free(sorted(self._live))
        self._live.clear()
        self._waiting.clear()
        self.cache.retire(self._step)
        self.cache.commit()

    def _prompt(self) -> list[int]:
        text = list(self.rng.choice(self._texts))
        length = self.rng.randint(1, max(1, self._longest - 2))
        cut = self.rng.randint(0, length)
        return (
            text[:cut] + [self.rng.randrange(50) for _ in range(length - cut if self.rng.random() < 0.5 else 0)]
            or text[:1]
        )

    def _admit(self) -> None:
        rng = self.rng
        count = min(rng.choice([1, 1, 2]), self.cache.max_rows - len(self._live))
        rows = [int(row) for row in self.cache.acquire_rows(count)]
        prompts = [self._prompt() for _ in rows]
        indptr = np.cumsum([0, *map(len, prompts)])
        tokens = np.concatenate([np.array(prompt) for prompt in prompts])
        salts = [rng.choice([None, b"one", b"two"]) for _ in rows] if rng.random() < 0.2 else None
        if rng.random() < 0.2:
            self.cache.lookup(indptr, tokens, salts)
        try:
            if rng.random() < 0.1:
                self.cache.match(rows, indptr, tokens, salts)
            else:
                self.cache.admit(rows, indptr, tokens, salts, limit=rng.choice([None, None, self._longest // 2 + 1]))
        except OutOfBlocks:
            return self._preempt()
        self._live.update(rows)
        return None

    def _extend(self) -> None:
        rng, cache = self.rng, self.cache
        rows = [row for row in sorted(self._live) if row not in self._waiting]
        rows = [row for row in rows if int(cache.lengths[row]) + 4 < self._longest]
        rng.shuffle(rows)
        rows = rows[: rng.randint(0, len(rows))] if rng.random() < 0.3 else rows
        sizes = [rng.choice([1, 1, 1, 1, 3]) for _ in rows]
        indptr = [0, *np.cumsum(sizes).tolist()]
        later = rng.random() < 0.4
        tokens = None if later else np.array([rng.randrange(50) for _ in range(indptr[-1])], np.int64)
        try:
            if rng.random() < 0.2:
                _, served = cache.extend(rows, indptr, tokens, partial=True, headroom=rng.randint(0, 2))
            else:
                cache.extend(rows, indptr, tokens)
                served = len(rows)
        except OutOfBlocks:
            self._preempt()
            return
        if later:
            self._waiting |= dict(zip(rows[:served], sizes[:served], strict=True))

    def _confirm(self) -> None:
        """Let the tokens of the step before be known; of drafts, now and then, only the first ones are right."""
        rng, cache = self.rng, self.cache
        if not self._waiting:
            return
        rows = sorted(self._waiting)
        lengths = [int(cache.lengths[row]) for row in rows]
        starts = [int(cache.final[row]) for row in rows]
        tokens = [rng.randrange(50) for begin, end in zip(starts, lengths, strict=True) for _ in range(end - begin)]
        indptr = np.cumsum([0, *(end - begin for begin, end in zip(starts, lengths, strict=True))])
        cache.confirm(rows, lengths, indptr, np.array(tokens, np.int64))
        self._waiting.clear()

    def _finish(self) -> None:
        ready = sorted(self._live - self._waiting.keys())
        if ready:
            rows = self.rng.sample(ready, self.rng.randint(1, len(ready)))
            self.cache.free(rows, self.rng.choice([None, self._step]))
            self._live.difference_update(rows)

    def _preempt(self) -> None:
        ready = sorted(self._live)
        if ready:
            row = ready[-1]
            fenced = self.rng.random() < 0.5 and self._retired < self._step  # a retired step can read nothing
            self.cache.free([row], self._step if fenced else None)
            self._live.discard(row)
            self._waiting.pop(row, None)
        self.cache.retire(self._step)
        self._retired = self._step

    def _retire(self) -> None:
        self.cache.retire(self._step - self.rng.randint(1, 2))

    def _fork(self) -> None:
        ready = sorted(self._live - self._waiting.keys())
        if ready and len(self._live) < self.cache.max_rows:
            into = int(self.cache.acquire_rows(1)[0])
            self.cache.fork(self.rng.choice(ready), into)
            self._live.add(into)

    def _cut(self) -> None:
        """Cut a row's last tokens off, as when drafts are rejected."""
        ready = sorted(self._live - self._waiting.keys())
        if not ready:
            return
        row = self.rng.choice(ready)
        length = int(self.cache.lengths[row])
        try:
            self.cache.truncate([row], [max(0, length - self.rng.randint(0, 5))], self.rng.choice([None, self._step]))
        except ArgumentError as error:
            least = error.values.get("least")
            if least is None:
                raise
            self.cache.truncate([row], [int(str(least))])


class TablesWorkload:
    """Calls on host tables: rows that grow, shrink, move and come back, in all groups at once.

    ``step()`` makes a few calls, maps the slots of a step, and commits. Blocks come from a plain list of free ids.

    >>> import blocktable
    >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=4)], max_rows=4, num_blocks=65)
    >>> work = TablesWorkload(tables, seed=7)
    >>> for _ in range(20):
    ...     delta = work.step()
    """

    def __init__(self, tables: Any, seed: int = 0) -> None:
        self.tables = tables
        self.groups: list[Group] = list(tables.groups)
        self.rng = Random(seed)  # noqa: S311 - no secret
        self.rows: list[list[list[int]]] = [[[] for _ in range(tables.max_rows)] for _ in self.groups]
        limit = tables.num_blocks or 4096
        self._free = list(range(1, limit))

    def step(self) -> Any:
        """Make the calls of one step; return its delta."""
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            rng.choices(
                [self._grow, self._assign, self._shrink, self._leave, self._release, self._turn], [6, 1, 2, 1, 2, 2]
            )[0]()
        self._slots()
        return self.tables.commit()

    def _some(self) -> list[int]:
        rows = range(self.tables.max_rows)
        return self.rng.sample(rows, self.rng.randint(1, len(rows)))

    def _take(self, n: int) -> list[int]:
        n = min(n, len(self._free))
        return [self._free.pop(self.rng.randrange(len(self._free))) for _ in range(n)]

    def _give(self, ids: list[int]) -> None:
        self._free += [block for block in ids if block]

    def _ragged(self, parts: list[list[int]]) -> tuple[list[int], list[int]]:
        return [0, *np.cumsum([len(part) for part in parts]).tolist()], [block for part in parts for block in part]

    def _grow(self) -> None:
        rows = self._some()
        found = []
        for g, group in enumerate(self.groups):
            parts = [
                self._take(min(self.rng.randint(0, 3), group.geometry.width - len(self.rows[g][row]))) for row in rows
            ]
            for row, part in zip(rows, parts, strict=True):
                self.rows[g][row] += part
            found.append(self._ragged(parts))
        self.tables.append(rows, tuple(part[0] for part in found), tuple(part[1] for part in found), group=None)

    def _assign(self) -> None:
        g, rows = self.rng.randrange(len(self.groups)), self._some()[:2]
        for row in rows:
            self._give(self.rows[g][row])
            self.rows[g][row] = self._take(self.rng.randint(0, self.groups[g].geometry.width))
        self.tables.assign(rows, *self._ragged([self.rows[g][row] for row in rows]), group=g)

    def _shrink(self) -> None:
        g, rows = self.rng.randrange(len(self.groups)), self._some()
        counts = [self.rng.randint(len(self.rows[g][row]) // 2, len(self.rows[g][row])) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            self._give(self.rows[g][row][count:])
            self.rows[g][row] = self.rows[g][row][:count]
        self.tables.truncate(rows, counts, group=g)

    def _leave(self) -> None:
        rows = self._some()[:2]
        for table in self.rows:
            for row in rows:
                self._give(table[row])
                table[row] = []
        self.tables.clear(rows)

    def _release(self) -> None:
        windowed = [g for g, group in enumerate(self.groups) if group.kind in ("window", "chunked", "state")]
        if not windowed:
            return
        g, rows = self.rng.choice(windowed), self._some()
        counts = [self.rng.randint(0, len(self.rows[g][row])) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            self._give(self.rows[g][row][:count])
            self.rows[g][row] = [0] * count + self.rows[g][row][count:]
        self.tables.release(rows, counts, g)

    def _turn(self) -> None:
        """Move or swap rows."""
        rows = self._some()
        half = len(rows) // 2
        a, b = rows[:half], rows[half : 2 * half]
        if self.rng.random() < 0.5:
            self.tables.swap(a, b)
            for table in self.rows:
                for one, other in zip(a, b, strict=True):
                    table[one], table[other] = table[other], table[one]
        else:
            self.tables.move(a, b)
            for table in self.rows:
                for one, other in zip(a, b, strict=True):
                    self._give(table[other])
                    table[other], table[one] = table[one], []

    def _slots(self) -> None:
        rows = self._some()
        far = max(g.geometry.width * g.geometry.block_size * g.geometry.cp_size for g in self.groups)
        starts = [self.rng.randint(0, far) for _ in rows]
        indptr = [0, *np.cumsum([self.rng.randint(0, 5) for _ in rows]).tolist()]
        positions = [start + t for start, (a, b) in zip(starts, pairwise(indptr), strict=True) for t in range(b - a)]
        rank = self.rng.randrange(max(group.geometry.cp_size for group in self.groups))
        padded = len(positions) + self.rng.randint(0, 4)
        self.tables.slot_mapping(rows, indptr, positions, padded=padded, cp_rank=rank)
        for g in range(len(self.groups)):
            self.tables.tables[g].kernel_array(rows)
