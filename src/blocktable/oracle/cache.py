"""A KV cache as plain lists and dictionaries: one row at a time, a prefix as the tuple of all its tokens.

Where the meaning leaves a choice open, such as which of several equal blocks is taken, the model asks ``choose``: by
default it takes the first, and a test that follows a real cache answers with what that one took. Either way it must be
among those allowed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm
from typing import Any

from blocktable.groups import Group
from blocktable.oracle.blocks import Blocks, Label
from blocktable.oracle.tables import Refused

Choose = Callable[[str, tuple[int, ...], list[int]], int]
"""(what, where, allowed) -> one of the allowed. what: "new" or "adopted" at (group, row, column), "hit" at (row,)."""


class Short(Refused):
    """The pool is short of blocks for now."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__("L9", f"{needed} blocks are needed, {available} are available")
        self.needed, self.available = needed, available


class Never(Refused):
    """The row could not be held by an empty pool either."""

    def __init__(self, tokens: int, largest: int) -> None:
        super().__init__("L9", f"a row of {tokens} tokens never fits, {largest} would")
        self.largest = largest


@dataclass
class Row:
    """A row in use: its tokens (-1: not known), how many are final, and its blocks in each group (0: given back)."""

    salt: bytes
    tokens: list[int] = field(default_factory=list)
    final: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    indexed: bool = True

    def copy(self) -> "Row":
        """Return the same row again."""
        return replace(self, tokens=list(self.tokens), blocks=[list(table) for table in self.blocks])


def first(_what: str, _where: tuple[int, ...], allowed: list[int]) -> int:
    """Choose the first of the allowed."""
    return allowed[0]


class CacheModel:
    """What ``KVCache`` should do, slowly.

    >>> import blocktable
    >>> model = CacheModel([blocktable.plan(max_model_len=64, block_size=4)], num_blocks=17, max_rows=2)
    >>> model.admit([0], [0, 6], [5, 6, 7, 8, 9, 10])
    ([0], [[4, 5, 6, 7, 8, 9]])
    >>> model.free([0])
    >>> model.lookup([0, 5], [5, 6, 7, 8, 1])
    [4]
    """

    def __init__(
        self, groups: Sequence[Any], *, num_blocks: int, max_rows: int, prefix_cache: bool = True, cp_rank: int = 0
    ) -> None:
        self.groups = [group if isinstance(group, Group) else Group(group) for group in groups]
        self.usable, self.max_rows, self.cp_rank = num_blocks - 1, max_rows, cp_rank
        self.blocks = Blocks(num_blocks)
        self.rows: dict[int, Row] = {}
        self.copies: list[tuple[int, int, int]] = []
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()  # every prefix that entered the index
        self.crowded = False
        self.last_fence: int | None = None
        self.choose: Choose = first
        self.paged = [g for g, group in enumerate(self.groups) if group.kind != "state"]
        self.unit = lcm(*(self.span(g) for g in self.paged)) if self.paged else 1
        self.cached = prefix_cache and len(self.paged) == len(self.groups)
        self.largest = self._largest()

    # ---- sizes

    def span(self, g: int) -> int:
        """Return the tokens that a block of a group stands for."""
        return self.groups[g].geometry.block_size * self.groups[g].geometry.cp_size

    def columns(self, g: int, tokens: int) -> int:
        """Return the entries of a row of so many tokens."""
        if self.groups[g].kind == "state":
            return self.groups[g].state_blocks if tokens else 0
        return -(-tokens // self.span(g))

    def dead(self, g: int, mark: int) -> int:
        """Return the leading blocks that a group no longer reads once so many tokens are final."""
        group = self.groups[g]
        if group.kind == "window":
            return max(0, mark - group.window + 1) // self.span(g)
        return mark // group.window * group.window // self.span(g) if group.kind == "chunked" else 0

    def _largest(self) -> int:
        def fits(tokens: int) -> bool:
            held = 0
            for g, group in enumerate(self.groups):
                columns = self.columns(g, tokens)
                if columns > group.geometry.width:
                    return False
                held += min(columns, -(-group.window // self.span(g)) + 1) if group.window else columns
            return held <= self.usable

        tokens = 0
        most = [group.geometry.width * self.span(g) for g, group in enumerate(self.groups) if g in self.paged]
        most = most or [group.geometry.max_model_len + group.geometry.lookahead for group in self.groups]
        while tokens < min(most) and fits(tokens + 1):
            tokens += 1
        return tokens

    # ---- prefixes

    def hits(self, salt: bytes, tokens: Sequence[int]) -> list[int]:
        """Return the lengths that may be found cached for a prompt, the longest first.

        Only the first is right, unless prefixes without a block may have been forgotten.
        """
        found: list[int] = []
        if not self.cached:
            return [0]
        for length in range((len(tokens) - 1) // self.unit * self.unit, 0, -self.unit):
            prefix = tuple(tokens[:length])
            wanted = [self._label(g, salt, tokens, column) for g, column in self._needed(length)]
            if (salt, prefix) in self.known and all(self.blocks.holding(label) for label in wanted):
                found.append(length)
                if self._remembered(salt, prefix):
                    return found
        return [*found, 0]

    def _needed(self, length: int) -> list[tuple[int, int]]:
        """Return the (group, column) that must still be held for a hit of a length."""
        return [(g, c) for g in range(len(self.groups)) for c in range(self.dead(g, length), length // self.span(g))]

    def _remembered(self, salt: bytes, prefix: tuple[int, ...]) -> bool:
        """Return whether a prefix cannot have been forgotten: a block needs it, and there were never too many such."""
        if not self._rooted(salt, prefix):
            return False
        chain = [prefix[:end] for end in range(self.unit, len(prefix) + 1, self.unit)]
        return not self.crowded or all(self._backed(salt, one) for one in chain)

    def _rooted(self, salt: bytes, prefix: tuple[int, ...]) -> bool:
        """Return whether a prefix, or one that continues it, has a block."""
        labels = [one.label for one in self.blocks.all.values() if one.label]
        return any(label[1] == salt and label[2][: len(prefix)] == prefix for label in labels)

    def _backed(self, salt: bytes, prefix: tuple[int, ...]) -> bool:
        """Return whether a prefix itself has a block, in any group."""
        return any(one.label is not None and one.label[1:3] == (salt, prefix) for one in self.blocks.all.values())

    def _crowd(self) -> None:
        """Notice when prefixes that only their continuations need reach the cap: from then on some may be forgotten."""
        if any(group.window for group in self.groups):
            bare = [one for one in self.known if self._rooted(*one) and not self._backed(*one)]
            self.crowded = self.crowded or len(bare) >= self.usable

    def _label(self, g: int, salt: bytes, tokens: Sequence[int], column: int) -> Label:
        """Return what a full block contains: all tokens up to the end of its unit, and which part of the unit it is."""
        per = self.unit // self.span(g)
        return g, salt, tuple(tokens[: (column // per + 1) * self.unit]), column % per

    def _enter(self, index: int) -> None:
        """Let the units of a row that lie wholly below its final mark enter the index."""
        row = self.rows[index]
        if not self.cached or not row.indexed:
            return
        for end in range(self.unit, row.final + 1, self.unit):
            self.known.add((row.salt, tuple(row.tokens[:end])))
            for g in range(len(self.groups)):
                for column in range((end - self.unit) // self.span(g), end // self.span(g)):
                    block = row.blocks[g][column]
                    if block:
                        self.blocks.label(block, self._label(g, row.salt, row.tokens, column))

    # ---- verbs

    def lookup(self, indptr: Sequence[int], tokens: Sequence[int], salts: Any = None) -> list[int]:
        """Return the cached tokens of each prompt."""
        self._cuts(indptr, len(indptr) - 1, tokens)
        self._tokens(tokens)
        parts = [list(tokens[a:b]) for a, b in pairwise(indptr)]
        return [self.hits((salts[i] if salts else None) or b"", part)[0] for i, part in enumerate(parts)]

    def match(self, rows: Sequence[int], indptr: Sequence[int], tokens: Sequence[int], salts: Any = None) -> list[int]:
        """Open unused rows on the longest cached prefixes."""
        with self._all_or_nothing():
            self._prompts(rows, indptr, tokens)
            parts = [list(tokens[a:b]) for a, b in pairwise(indptr)]
            return [
                self._open(row, part, (salts[i] if salts else None) or b"")
                for i, (row, part) in enumerate(zip(rows, parts, strict=True))
            ]

    def admit(
        self,
        rows: Sequence[int],
        indptr: Sequence[int],
        tokens: Sequence[int],
        salts: Any = None,
        limit: Any = None,
        *,
        final: Any = None,
        headroom: int = 0,
    ) -> tuple[list[int], list[list[int]]]:
        """Match, then extend by what the limit allows."""
        with self._all_or_nothing():
            self._prompts(rows, indptr, tokens)
            limits: list[Any] = [limit] * len(rows) if limit is None or isinstance(limit, int) else list(limit)
            for i, row in enumerate(rows):
                self._check_prompt(row, list(tokens[indptr[i] : indptr[i + 1]]), limits[i], final and final[i])
            slots: list[list[int]] = [[] for _ in self.groups]
            cached, needed = [], 0
            for i, row in enumerate(rows):
                prompt = list(tokens[indptr[i] : indptr[i + 1]])
                held: int = self._open(row, prompt, (salts[i] if salts else None) or b"")
                end = len(prompt) if limits[i] is None else min(len(prompt), held + int(limits[i]))
                mark = None if final is None else max(int(final[i]), held)
                needed += self._lengthen(row, prompt[held:end], mark, headroom, slots, needed)
                cached.append(held)
            return cached, slots

    def extend(
        self,
        rows: Sequence[int],
        indptr: Sequence[int],
        tokens: Any = None,
        *,
        final: Any = None,
        salts: Any = None,
        partial: bool = False,
        headroom: int = 0,
    ) -> tuple[list[list[int]], int]:
        """Lengthen rows; return their slots and how many rows were served."""
        with self._all_or_nothing():
            given = [-1] * (indptr[-1] if len(indptr) else 0) if tokens is None else list(tokens)
            self._known_rows(rows)
            self._cuts(indptr, len(rows), given)
            parts = [given[a:b] for a, b in pairwise(indptr)]
            marks = [None] * len(rows) if final is None else final
            given_salts = salts or [None] * len(rows)
            slots: list[list[int]] = [[] for _ in self.groups]
            needed, served = 0, 0
            for i, row in enumerate(rows):
                saved = self._saved()
                self._check_extend(row, parts[i], marks[i], given_salts[i])
                self.rows.setdefault(row, self._new(given_salts[i] or b""))
                try:
                    needed += self._lengthen(row, parts[i], marks[i], headroom, slots, needed)
                except Short:
                    self._restore(saved)
                    if partial:
                        return slots, i
                    for k in range(
                        i + 1, len(rows)
                    ):  # what no state of the pool would allow goes before what this one does
                        self._check_extend(rows[k], parts[k], marks[k], given_salts[k])
                    raise
                served += 1
            return slots, served

    def confirm(self, rows: Sequence[int], lengths: Sequence[int], indptr: Any = None, tokens: Any = None) -> None:
        """Raise final marks; windows move on at once."""
        with self._all_or_nothing():
            self._used(rows)
            if tokens is not None:
                self._cuts(indptr, len(rows), tokens)
            for i, index in enumerate(rows):
                row, length = self.rows[index], lengths[i]
                if not row.final <= length <= len(row.tokens):
                    raise Refused("L10", f"row {index} cannot be confirmed up to {length}")
                if tokens is not None:
                    given = tokens[indptr[i] : indptr[i + 1]]
                    if len(given) != length - row.final or any(token < -1 for token in given):
                        raise Refused("L10", f"row {index} needs the tokens of {row.final}..{length - 1}")
                    for k, token in enumerate(given):
                        if token != -1:
                            row.tokens[row.final + k] = token
                if -1 in row.tokens[:length]:
                    raise Refused("L10", f"row {index} has unknown tokens below {length}")
                row.final = length
                self._enter(index)
                self._advance(index, length)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int], fence: int | None = None) -> None:
        """Cut rows; blocks beyond go back."""
        with self._all_or_nothing():
            self._used(rows)
            self._rising(fence)
            for index, length in zip(rows, lengths, strict=True):
                row = self.rows[index]
                if not self.least(index) <= length <= len(row.tokens):
                    raise Refused("L2", f"row {index} cannot be cut to {length}, at least {self.least(index)}")
                if length == len(row.tokens):
                    continue
                cut = length // self.unit * self.unit
                for g in range(len(self.groups)):
                    kept = self.columns(g, length)
                    for column in range(len(row.blocks[g]) - 1, -1, -1):
                        block = row.blocks[g][column]
                        through = g in self.paged and column >= cut // self.span(g) and length < cut + self.unit
                        if block and column < kept and through and length > cut and length % self.unit:
                            self._forget(block, index)
                        if block and column >= kept:
                            self._drop(block, index, fence)
                    del row.blocks[g][kept:]
                del row.tokens[length:]
                row.final = min(row.final, length)

    def least(self, index: int) -> int:
        """Return the least length that a row can be cut to."""
        row, least = self.rows[index], 0
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                least = max(least, row.final)
            gone = next((c for c, block in enumerate(row.blocks[g]) if block), len(row.blocks[g]))
            while group.window and self.dead(g, least) < gone:
                least += 1
        return least

    def free(self, rows: Sequence[int], fence: int | None = None) -> None:
        """Take rows out of use."""
        with self._all_or_nothing():
            self._used(rows)
            self._rising(fence)
            for index in rows:
                for table in self.rows.pop(index).blocks:
                    for block in reversed(table):
                        if block:
                            self._drop(block, index, fence)

    def retire(self, n: int) -> None:
        """Let the blocks of every fence up to n be reissued."""
        self.blocks.retire(n)

    def fork(self, row: int, into: int) -> None:
        """Let an unused row hold what another holds."""
        with self._all_or_nothing():
            self._used([row])
            self._row(into)
            if into in self.rows:
                raise Refused("L8", f"row {into} is in use")
            self.rows[into] = self.rows[row].copy()
            for table in self.rows[into].blocks:
                for block in table:
                    if block:
                        self.blocks.adopt(block, into)

    def reset_prefix(self) -> None:
        """Forget every prefix; rows in use answer no prompt any more."""
        self.known.clear()
        self.crowded = False
        for one in self.blocks.all.values():
            one.label = None
        for row in self.rows.values():
            row.indexed = False

    def commit(self) -> list[tuple[int, int, int]]:
        """Return the copies to run before the step's writes; their sources may be reissued from here on."""
        copies, self.copies = self.copies, []
        for _, source, _ in copies:
            self.blocks.copied(source)
        return copies

    # ---- one row

    def _new(self, salt: bytes) -> Row:
        return Row(salt, blocks=[[] for _ in self.groups])

    def _open(self, index: int, prompt: list[int], salt: bytes) -> int:
        allowed = self.hits(salt, prompt)
        length = self._chosen("hit", (index,), allowed)
        row = self.rows[index] = self._new(salt)
        row.tokens, row.final = prompt[:length], length
        for g in self.paged:
            row.blocks[g] = [0] * (length // self.span(g))
        for g, column in self._needed(length):
            allowed = self.blocks.holding(self._label(g, salt, prompt, column))
            block = self._chosen("adopted", (g, index, column), allowed)
            self.blocks.adopt(block, index)
            row.blocks[g][column] = block
        return length

    def _check_prompt(self, index: int, prompt: list[int], limit: int | None, final: int | None) -> None:
        if limit is not None and limit < 0:
            raise Refused("L2", f"row {index} has limit {limit}")
        self._check_extend(index, prompt, final, None)

    def _check_extend(self, index: int, part: list[int], final: int | None, salt: bytes | None) -> None:
        row = self.rows.get(index) or self._new(salt or b"")
        if salt is not None and salt != row.salt:
            raise Refused("L10", f"row {index} has another salt")
        tokens = row.tokens + part
        self._tokens(part)
        if len(tokens) > self.largest:
            raise Never(len(tokens), self.largest)
        if final is not None and (not 0 <= final <= len(tokens) or -1 in tokens[:final]):
            raise Refused("L10", f"row {index} cannot be final up to {final}")

    def _lengthen(self, index: int, part: list[int], final: int | None, headroom: int, slots: Any, needed: int) -> int:
        """Extend one row: windows first, then blocks, then tokens and slots, then the mark; return the blocks it took."""
        row = self.rows[index]
        begin, end = len(row.tokens), len(row.tokens) + len(part)
        self._check_extend(index, part, final, None)
        self._advance(index, min(row.final, begin))
        copied = [(g, c) for g, c in self._written(index, begin) if len(self.blocks.all[row.blocks[g][c]].owners) > 1]
        copied = copied if part else []
        grown = [
            (g, c) for g in range(len(self.groups)) for c in range(len(row.blocks[g]), self.columns(g, end)) if part
        ]
        take = len(copied) + len(grown)
        if take + headroom > self.blocks.available():
            raise Short(needed + take, needed + self.blocks.available())
        for g, column in copied:
            source = row.blocks[g][column]
            self.blocks.all[source].copies += 1
            row.blocks[g][column] = self._take(g, index, column)
            self.copies.append((g, source, row.blocks[g][column]))
            self._drop(source, index, None)
        for g, column in grown:
            row.blocks[g].append(self._take(g, index, column))
        for g, column in self._written(index, begin):
            if part:
                self._forget(row.blocks[g][column], index)
        row.tokens += part
        for g in range(len(self.groups)):
            slots[g] += [self._slot(g, index, position) for position in range(begin, end)]
        default = row.tokens.index(-1) if -1 in row.tokens else end
        row.final = max(row.final, default if final is None else final)
        self._enter(index)
        return take

    def _written(self, index: int, begin: int) -> list[tuple[int, int]]:
        """Return the entries that exist and that tokens from ``begin`` on are written into; all of a state group."""
        found = []
        for g, group in enumerate(self.groups):
            start = 0 if group.kind == "state" else begin // self.span(g)
            found += [(g, column) for column in range(start, len(self.rows[index].blocks[g]))]
        return found

    def _advance(self, index: int, mark: int) -> None:
        row = self.rows[index]
        for g in range(len(self.groups)):
            for column in reversed(range(min(self.dead(g, mark), len(row.blocks[g])))):
                if row.blocks[g][column]:
                    self._drop(row.blocks[g][column], index, None)
                    row.blocks[g][column] = 0

    def _drop(self, block: int, index: int, fence: int | None) -> None:
        """Take a row from a block's owners; with the last one a copy into it that is still to come is called off."""
        self.blocks.drop(block, index, fence)
        for copy in [copy for copy in self.copies if copy[2] == block and not self.blocks.all[block].owners]:
            self.copies.remove(copy)
            self.blocks.copied(copy[1])

    def _forget(self, block: int, index: int) -> None:
        if self.blocks.all[block].owners == {index}:
            self.blocks.all[block].label = None

    def _take(self, g: int, index: int, column: int) -> int:
        block = self._chosen("new", (g, index, column), self.blocks.reissuable())
        self.blocks.take(block, index)
        return block

    def _chosen(self, what: str, where: tuple[int, ...], allowed: list[int]) -> int:
        chosen = self.choose(what, where, allowed)
        if chosen not in allowed:
            raise AssertionError(f"{what} at {where}: {chosen} was taken, allowed were {allowed}")
        return chosen

    def _slot(self, g: int, index: int, position: int) -> int:
        geometry = self.groups[g].geometry
        if self.groups[g].kind == "state":
            return -1
        block = self.rows[index].blocks[g][position // self.span(g)]
        offset, ranks, chunk = position % self.span(g), geometry.cp_size, geometry.cp_interleave
        if ranks > 1 and offset // chunk % ranks != self.cp_rank:
            return -1
        return block * geometry.block_size + offset // (chunk * ranks) * chunk + offset % chunk

    # ---- rules

    def _row(self, index: int) -> None:
        if not 0 <= index < self.max_rows:
            raise Refused("L2", f"there is no row {index}")

    def _known_rows(self, rows: Sequence[int]) -> None:
        for index in rows:
            self._row(index)
        if len(set(rows)) != len(rows):
            raise Refused("L8", f"a row comes twice in {list(rows)}")

    def _used(self, rows: Sequence[int]) -> None:
        self._known_rows(rows)
        for index in rows:
            if index not in self.rows:
                raise Refused("L9", f"row {index} is not in use")

    def _prompts(self, rows: Sequence[int], indptr: Sequence[int], tokens: Sequence[int]) -> None:
        self._known_rows(rows)
        self._cuts(indptr, len(rows), tokens)
        self._tokens(tokens)
        for index in rows:
            if index in self.rows:
                raise Refused("L8", f"row {index} is in use")

    def _tokens(self, tokens: Sequence[int]) -> None:
        if any(token < -1 for token in tokens):
            raise Refused("L10", "a token lies below -1")

    def _cuts(self, indptr: Sequence[int], rows: int, values: Sequence[int]) -> None:
        falling = any(indptr[i] > indptr[i + 1] for i in range(len(indptr) - 1))
        if len(indptr) != rows + 1 or indptr[0] != 0 or falling or indptr[-1] != len(values):
            raise Refused("L2", f"{list(indptr)} does not cut {len(values)} values into {rows} parts")

    def _rising(self, fence: int | None) -> None:
        if fence is None:
            return
        retired = self.blocks.retired
        if (self.last_fence is not None and fence < self.last_fence) or (retired is not None and fence <= retired):
            raise Refused("L9", f"fence {fence} does not rise")
        self.last_fence = fence

    def _saved(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks.copy(),
            "rows": {index: row.copy() for index, row in self.rows.items()},
            "copies": list(self.copies),
            "known": set(self.known),
            "last_fence": self.last_fence,
            "crowded": self.crowded,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            setattr(self, name, value)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        saved = self._saved()
        try:
            yield
        except Refused:
            self._restore(saved)
            raise
        self._crowd()
