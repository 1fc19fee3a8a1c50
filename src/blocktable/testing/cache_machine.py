"""The state machine of a KV cache: random calls on it and on the plain-Python model.

Tiny pools, forced evictions, steps in flight, drafts, forks and windows. Give it another cache with

    class Machine(CacheMachine):
        make = staticmethod(MyCache)           # called as MyCache(groups, num_blocks=..., max_rows=..., cp_rank=...)

Which of several equal blocks is taken is open, so the model follows: after each call it is told which blocks the cache took,
and refuses those that it may not take. Everything else must be equal: hits, counts, rows, slots, marks, copies, refusals.
"""

import random
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blocktable.cache import KVCache
from blocktable.contracts import Contract, TokenMultiple
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, NeverFits, OutOfBlocks
from blocktable.geometry import plan
from blocktable.groups import Group
from blocktable.oracle import Refused
from blocktable.oracle.cache import CacheModel, Never, Short, first
from blocktable.replica import Replica

Rng = random.Random
seeds = st.integers(0, 2**32 - 1).map(Rng)
MAX_ROWS = 4
KINDS = (
    ["full"],
    ["full"],
    ["window"],
    ["chunked"],
    ["full", "window"],
    ["full", "full"],
    ["full", "state"],
    ["state"],
)
MIXED = (["window", "chunked"], ["full", "window", "chunked"], ["full", "window", "state"])


def groups(rng: Rng, kinds: list[Any]) -> list[Group]:
    """Groups of blocks of 1 to 4 tokens, for rows of up to about 20; a padded one may hold more than the pool."""
    ranks = rng.choice([1, 1, 1, 2])
    length = rng.randint(1, 20)
    found = []
    for kind in kinds:
        block, state = rng.choice([1, 2, 2, 3, 4, 4]), rng.randint(1, 2) if kind == "state" else 1
        wide = Contract("wide", width_rule=TokenMultiple(block * rng.randint(3, 9)))
        geometry = plan(
            max_model_len=length,
            block_size=block,
            contracts=[wide] if rng.random() < 0.5 else [],
            extra_blocks=rng.randint(0, 1) + (state if kind == "state" else 0),
            cp_size=1 if kind == "state" else ranks,
            cp_interleave=rng.choice([n for n in range(1, block + 1) if block % n == 0]),
        )
        window = rng.randint(2, 7) if kind in ("window", "chunked") else 0
        found.append(Group(geometry, kind=kind, window=window, state_blocks=state))
    return found


def least_pool(found: list[Group]) -> int:
    """The usable blocks that the constructor asks for, from its documentation."""
    total = 0
    for group in found:
        g = group.geometry
        if group.kind == "state":
            total += group.state_blocks
        elif group.window:
            total += min(g.min_blocks, -(-group.window // (g.block_size * g.cp_size)) + 1)
        else:
            total += g.min_blocks
    return total


class CacheMachine(RuleBasedStateMachine):
    """A cache and the model do the same."""

    make: ClassVar[Callable[..., Any]] = staticmethod(KVCache)

    @initialize(rng=seeds, kinds=st.sampled_from(KINDS + MIXED))
    def start(self, rng: Rng, kinds: list[str]) -> None:
        found = groups(rng, kinds)
        usable = least_pool(found) + rng.choice([0, 0, 1, 2, 4, 8])
        rank = rng.randrange(max(group.geometry.cp_size for group in found))
        how: dict[str, Any] = {"num_blocks": usable + 1, "max_rows": MAX_ROWS, "cp_rank": rank}
        if rng.random() < 0.1:
            how["prefix_cache"] = False
        note(f"groups {found}, {how}")
        self.cache, self.model = type(self).make(found, **how), CacheModel(found, **how)
        self.replica = Replica(found, max_rows=MAX_ROWS)
        self.alphabet = rng.choice([[0, 1], [0, 1], [7], [0, 2**31 - 1], [0, 2**40], list(range(1000))])
        self.step_number = 0

    # ---- both

    def both(self, verb: str, *arguments: Any, **named: Any) -> Any:
        """Call the model to see what should happen, then the cache, then let the model follow."""
        note(f"{verb}{arguments}{named or ''}")
        saved, before = self.model._saved(), self.cache.stats()
        self.model.choose = first
        refused: Refused | None = None
        try:
            getattr(self.model, verb)(*arguments, **named)
        except Refused as error:
            refused = error
        self.model._restore(saved)
        exact = verb != "admit" or self.settled(arguments[0], arguments[1], arguments[2], named.get("salts"))
        try:
            result = getattr(self.cache, verb)(*arguments, **named)
        except (ArgumentError, OutOfBlocks) as error:
            one = verb == "admit" or (verb == "extend" and len(arguments[0]) == 1)
            self.refused_alike(refused, error, exact=exact, counted=exact and one)
            after = self.cache.stats()
            assert {name: after[name] for name in STABLE} == {name: before[name] for name in STABLE}
            return None
        assert refused is None or not exact, f"the model refuses: {refused}"
        self.follow(verb, arguments, named, result)
        return result

    def settled(self, rows: list[int], indptr: list[int], tokens: list[int], salts: Any) -> bool:
        """Whether nothing about an admit is open.

        What is evicted for one row may be what another one would hit; prefixes without a block may have been forgotten;
        and of several blocks that hold the same, one may be idle and another not.
        """
        if len(rows) != 1:
            return not rows
        salt, prompt = (salts and salts[0]) or b"", tokens[: indptr[1]]
        hits = self.model.hits(salt, prompt)
        labels = [self.model._label(g, salt, prompt, column) for g, column in self.model._needed(hits[0])]
        return len(hits) == 1 and all(len(self.model.blocks.holding(label)) == 1 for label in labels)

    def refused_alike(self, refused: Refused | None, error: Any, *, exact: bool, counted: bool) -> None:
        note(f"refused: {error!r}")
        assert error.remedy
        if isinstance(error, OutOfBlocks):
            assert error.law == "L9"
            assert int(error.values["needed"]) + int(error.values["headroom"]) > int(error.values["available"])  # type: ignore[call-overload]
            if isinstance(refused, Short):
                if counted:  # of several rows, the model stops at the first that does not fit
                    assert (error.needed, error.available) == (refused.needed, refused.available)
                return
            assert not exact, f"the model says {refused!r}"
        else:  # of two things wrong in one call, which is named is open
            assert refused is not None or not exact
            assert not exact or not isinstance(refused, Short), f"the model says {refused!r}"
            if isinstance(error, NeverFits) and isinstance(refused, Never):
                assert error.largest == refused.largest

    def follow(self, verb: str, arguments: Any, named: Any, result: Any) -> None:
        """Do it in the model too, with the blocks that the cache took."""
        found = dict(zip(arguments[0], result[0] if verb == "admit" else result, strict=True)) if verb in HITS else {}

        def taken(what: str, where: tuple[int, ...], allowed: list[int]) -> int:
            if what == "hit":
                return int(found[where[0]])
            group, row, column = where
            return int(self.cache.tables.tables[group].array[row, column])

        self.model.choose = taken
        expected = getattr(self.model, verb)(*arguments, **named)
        if verb == "admit":
            assert result[0].tolist() == expected[0]
            assert result[1].tolist() == expected[1]
        elif verb == "extend":
            slots, served = result if named.get("partial") else (result, len(arguments[0]))
            assert (slots.tolist(), served) == expected
        elif verb == "match":
            assert result.tolist() == expected
        else:
            assert result is None

    # ---- arguments

    def rarely(self, rng: Rng) -> bool:
        return rng.random() < 0.05

    def used(self, rng: Rng) -> list[int]:
        """Some rows in use, in any order; now and then any rows."""
        if self.rarely(rng):
            return [rng.randint(-1, MAX_ROWS) for _ in range(rng.randint(0, 3))]
        rows = sorted(self.model.rows)
        return rng.sample(rows, rng.randint(min(1, len(rows)), len(rows)))

    def unused(self, rng: Rng) -> list[int]:
        if self.rarely(rng):
            return [rng.randint(-1, MAX_ROWS) for _ in range(rng.randint(0, 3))]
        rows = [row for row in range(MAX_ROWS) if row not in self.model.rows]
        return rng.sample(rows, min(len(rows), rng.choice([1, 1, 1, 2, 3])))

    def text(self, rng: Rng, length: int) -> list[int]:
        return [rng.choice(self.alphabet) for _ in range(length)]

    def prompts(self, rng: Rng, count: int) -> tuple[list[int], list[int]]:
        indptr, tokens = [0], []
        for _ in range(count):
            length = self.model.largest + 1 if rng.random() < 0.1 else rng.randint(0, self.model.largest)
            tokens += self.text(rng, length)
            indptr.append(len(tokens))
        if tokens and self.rarely(rng):
            tokens[rng.randrange(len(tokens))] = rng.choice([-1, -1, -2])
        return indptr, tokens

    def salts(self, rng: Rng, rows: list[int]) -> Any:
        if rng.random() < 0.8:
            return None
        return [rng.choice([None, b"a", b"b"]) for _ in rows]

    def fence(self, rng: Rng) -> int | None:
        self.step_number += rng.randint(0, 1)
        return rng.choice([None, None, self.step_number, self.step_number, self.step_number - self.rarely(rng)])

    # ---- verbs

    def admit(self, rng: Rng) -> None:
        rows = self.unused(rng)
        named: dict[str, Any] = {"salts": self.salts(rng, rows)}
        indptr, tokens = self.prompts(rng, len(rows))
        if rng.random() < 0.3:
            named["limit"] = rng.choice([rng.randint(0, 8), [rng.randint(0, 8) for _ in rows]])
        if rng.random() < 0.15:
            named["final"] = [rng.randint(0, 4) for _ in rows]
        if rng.random() < 0.15:
            named["headroom"] = rng.randint(0, 3)
        self.both("admit", rows, indptr, tokens, **named)

    def match(self, rng: Rng) -> None:
        rows = self.unused(rng)
        self.both("match", rows, *self.prompts(rng, len(rows)), salts=self.salts(rng, rows))

    def extend(self, rng: Rng) -> None:
        """A step: some rows decode, some take drafts or a chunk, tokens now, later or in part."""
        rows = self.used(rng)
        if self.rarely(rng):
            rows += [row for row in self.unused(rng) if row not in rows]
        counts = [rng.choice([0, 1, 1, 1, 2, 3, 5]) for _ in rows]
        indptr = [sum(counts[:i]) for i in range(len(rows) + 1)]
        tokens: Any = self.text(rng, indptr[-1])
        mode, named = rng.random(), dict[str, Any]()
        if mode < 0.3:
            tokens = None
        elif mode < 0.45:
            tokens = [rng.choice([token, -1]) for token in tokens]
        if rng.random() < 0.3:
            lengths = [len(self.model.rows[row].tokens) if row in self.model.rows else 0 for row in rows]
            named["final"] = [rng.randint(0, n + counts[i] + self.rarely(rng)) for i, n in enumerate(lengths)]
        if rng.random() < 0.2:
            named["partial"] = True
        if rng.random() < 0.25:
            named["headroom"] = rng.randint(0, 3)
        if self.rarely(rng):
            named["salts"] = self.salts(rng, rows)
        self.both("extend", rows, indptr, tokens, **named)

    def confirm(self, rng: Rng) -> None:
        rows = self.used(rng)
        lengths, indptr, tokens = [], [0], []
        for row in rows:
            one = self.model.rows.get(row)
            final, length = (one.final, len(one.tokens)) if one else (0, 0)
            lengths.append(rng.randint(final, length) if not self.rarely(rng) else length + rng.choice([-9, 1]))
            held = one.tokens[final : lengths[-1]] if one else []
            tokens += [rng.choice([-1, rng.choice(self.alphabet)]) if t >= 0 else self.text(rng, 1)[0] for t in held]
            indptr.append(len(tokens))
        if tokens and self.rarely(rng):
            tokens[rng.randrange(len(tokens))] = -1
        if rng.random() < 0.2:
            self.both("confirm", rows, lengths)
        else:
            self.both("confirm", rows, lengths, indptr, tokens)

    def truncate(self, rng: Rng) -> None:
        rows, lengths = self.used(rng), []
        for row in rows:
            length = len(self.model.rows[row].tokens) if row in self.model.rows else 0
            least = self.model.least(row) if row in self.model.rows and not self.rarely(rng) else 0
            lengths.append(rng.randint(min(least, length), length + self.rarely(rng)))
        self.both("truncate", rows, lengths, self.fence(rng))

    def free(self, rng: Rng) -> None:
        self.both("free", self.used(rng)[:2], self.fence(rng))

    def retire(self, rng: Rng) -> None:
        self.both("retire", self.step_number - rng.randint(0, 2))

    def fork(self, rng: Rng) -> None:
        rows, into = self.used(rng), self.unused(rng)
        if rows and into:
            self.both("fork", rows[0], into[0])

    def lookup(self, rng: Rng) -> None:
        count = rng.randint(0, 3)
        indptr, tokens = self.prompts(rng, count)
        tokens = [max(token, 0) for token in tokens]
        salts = self.salts(rng, list(range(count)))
        parts = [tokens[indptr[i] : indptr[i + 1]] for i in range(count)]
        found = self.cache.lookup(indptr, tokens, salts)
        for i, hit in enumerate(found.tolist()):
            assert hit in self.model.hits((salts and salts[i]) or b"", parts[i])

    def reset_prefix(self, _: Rng) -> None:
        self.both("reset_prefix")

    def commit(self, _: Rng) -> None:
        note("commit")
        delta = Delta.from_bytes(self.cache.commit().to_bytes())
        self.replica.apply(delta)
        assert delta.copies.tolist() == [list(copy) for copy in self.model.commit()]
        for g, table in enumerate(self.cache.tables.tables):
            assert self.replica.tables[g].array.tolist() == table.array.tolist()

    WEIGHTS: ClassVar[dict[Any, float]] = {
        admit: 6,
        match: 1,
        extend: 8,
        confirm: 4,
        truncate: 3,
        free: 4,
        retire: 2,
        fork: 2,
        lookup: 2,
        reset_prefix: 0.3,
        commit: 3,
    }

    @rule(rng=seeds)
    def step(self, rng: Rng) -> None:
        """Do one call, chosen by weight."""
        rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0](self, rng)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        stats, counts = self.cache.stats(), self.model.blocks.count()
        assert {name: stats[name] for name in counts} == counts
        assert sum(counts.values()) == self.model.usable
        for row in range(MAX_ROWS):
            one = self.model.rows.get(row)
            assert self.cache.lengths[row] == (len(one.tokens) if one else 0)
            assert self.cache.final[row] == (one.final if one else 0)
            for g, table in enumerate(self.cache.tables.tables):
                blocks = one.blocks[g] if one else []
                assert int(table.num_blocks[row]) == len(blocks)
                assert table.array[row].tolist() == blocks + [0] * (table.array.shape[1] - len(blocks))


HITS = ("match", "admit")
STABLE = (
    "free",
    "cached",
    "held",
    "fenced",
    "hit_tokens",
    "query_tokens",
    "evictions",
    "blocks_popped",
    "blocks_pushed",
)
