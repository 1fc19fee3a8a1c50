"""The scheduler: which rows compute which tokens in the next step, and what the tokens of a finished step mean.

    step = scheduler.schedule()            # extend, admit, preempt; commit: the step's delta
    events = scheduler.complete(tokens)    # of the oldest step in flight: confirm, truncate, free, fork

Several steps may be in flight. A row whose next token is still being drawn is extended by a token not yet known; the
worker that draws it feeds it back by itself, and the scheduler confirms it to the cache once the step that computes it is
done. A row that is freed meanwhile is fenced: no block of it is handed out before the steps that may read it are done.
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from blocktable.cache import KVCache
from blocktable.engine.drafts import look_up
from blocktable.engine.poison import unowned
from blocktable.engine.requests import Event, Request, Sequence
from blocktable.engine.step import Step
from blocktable.errors import ArgumentError, OutOfBlocks

__all__ = ["Scheduler"]


class Entry(NamedTuple):
    """One sequence in one step: its row, the tokens it computes (drafts last), and its row's length afterwards."""

    sequence: Sequence
    row: int
    tokens: list[int]
    drafts: int
    length: int
    draws: int


class Scheduler:
    """Continuous batching over a ``KVCache``: first come, first served, in steps of at most ``token_budget`` tokens.

    ``draft`` is the most tokens guessed per sequence and step. ``poison``: steps name the blocks that nobody owns.
    ``vocabulary``: token ids lie below it. One thread owns the object.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        token_budget: int,
        draft: int = 0,
        poison: bool = False,
        vocabulary: int = 1 << 31,
    ) -> None:
        for name, value, least in (("token_budget", token_budget, 1), ("draft", draft, 0)):
            if value < least:
                raise ArgumentError(
                    f"{name} is {value}", values={name: value}, remedy=f"pass {least} or more tokens per step"
                )
        self.vocabulary = vocabulary
        self.cache, self.token_budget, self.draft, self.poison = cache, token_budget, draft, poison
        self.longest = cache.groups[0].geometry.max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = self.steps = self.peak_blocks = self.guessed = self.accepted = 0
        self._unused = list(range(cache.max_rows))
        self._flying: deque[tuple[int, list[Entry]]] = deque()
        self._requests = 0

    @property
    def in_flight(self) -> int:
        """Steps scheduled and not yet completed."""
        return len(self._flying)

    def refuse(self, request: Request) -> None:
        """Raise ArgumentError for a prompt that no row can hold with a token to come, or whose tokens are none."""
        size = len(request.prompt)
        for place, token in enumerate(request.prompt):
            if not 0 <= token < self.vocabulary:
                raise ArgumentError(
                    f"token {place} of the prompt is {token}, and the model has {self.vocabulary} tokens",
                    values={"place": place, "token": token, "vocabulary": self.vocabulary},
                    remedy="encode the prompt with the tokenizer of this model",
                )
        if size >= self.longest:
            raise ArgumentError(
                f"the prompt has {size} tokens, and a row holds {self.longest} with the answer",
                law="L1",
                values={"prompt": size, "limit": self.longest},
                remedy=f"shorten it to {self.longest - 1} tokens, or raise max_model_len if the model has the positions",
            )

    def add(self, *requests: Request) -> list[int]:
        """Queue requests and return their numbers; an answer is cut where its row ends.

        Raises what ``refuse`` does for the first that is refused; none is queued then.
        """
        for request in requests:
            self.refuse(request)
        return [self._queue(request) for request in requests]

    def _queue(self, request: Request) -> int:
        most = min(request.max_tokens, self.longest - len(request.prompt))
        request = replace(request, max_tokens=most)
        number = self._requests
        self._requests += 1
        self.waiting.append(Sequence(request, number, tokens=list(request.prompt), forks=request.samples > 1))
        return number

    def abort(self, number: int) -> None:
        """Drop what is left of a request; steps in flight run to their end, and what they may read is fenced until then."""
        for sequence in [one for one in (*self.running, *self.waiting) if one.number == number]:
            sequence.finish = "abort"
            self._retire(sequence)

    # The next step

    def schedule(self) -> Step | None:
        """Return the next step, committed, or None when there is nothing to compute at the moment."""
        preempted = self.preemptions
        entries = self._go_on()
        if self.preemptions == preempted:
            entries += self._admit(self.token_budget - sum(len(entry.tokens) for entry in entries))
        if not entries:
            return None
        self.steps += 1
        for entry in entries:
            entry.sequence.pending += entry.draws > 0
        self._flying.append((self.steps, entries))
        self.peak_blocks = max(self.peak_blocks, self.cache.stats()["held"])
        return self._packed(entries)

    def _go_on(self) -> list[Entry]:
        """Extend the running rows, the oldest first; where blocks are short, the youngest give theirs back."""
        wanted: list[Entry] = []
        budget = self.token_budget
        for sequence in self.running:
            if budget and (entry := self._next(sequence, budget)):
                wanted.append(entry)
                budget -= len(entry.tokens)
        done = 0
        while done < len(wanted):
            done += self._extend(wanted[done:])
            if done < len(wanted):
                if self._flying and len(self.running) == 1:
                    break  # its own blocks are fenced: they come back with the step in flight
                self._preempt(self.running[-1])
                wanted = [entry for entry in wanted if entry.sequence.row is not None]
                if self._flying:
                    break  # so are those of the one that was preempted
        return wanted[:done]

    def _next(self, sequence: Sequence, budget: int) -> Entry | None:
        """Return what a running sequence computes next: a chunk of what is known, or the token being drawn."""
        assert sequence.row is not None  # noqa: S101 - for the type checker: it runs
        known = len(sequence.tokens)
        if sequence.length < known:
            tokens = sequence.tokens[sequence.length : sequence.length + budget]
        elif sequence.pending and not self._waits(sequence) and sequence.length < sequence.most:
            tokens = [-1]
        else:
            return None
        drafts: list[int] = []
        if self.draft and known - sequence.length == 1:
            room = min(self.draft, budget - 1, sequence.most - sequence.length - 1)
            drafts = look_up(sequence.tokens, room)
        length = sequence.length + len(tokens) + len(drafts)
        draws = 1 + len(drafts) if length >= known else 0
        return Entry(sequence, sequence.row, tokens + drafts, len(drafts), length, draws)

    def _waits(self, sequence: Sequence) -> bool:
        """Whether the next input hangs on the result in flight: drafts need the last token, forks the whole prompt."""
        return self.draft > 0 or sequence.forks

    def _extend(self, entries: list[Entry]) -> int:
        """Lengthen the rows of the first entries that fit; return how many those are."""
        rows = [entry.row for entry in entries]
        indptr = np.cumsum([0, *(len(entry.tokens) for entry in entries)])
        tokens = [token for entry in entries for token in entry.tokens]
        final = [
            int(self.cache.final[entry.row]) if entry.tokens[0] == -1 else entry.length - entry.drafts
            for entry in entries
        ]
        _, served = self.cache.extend(rows, indptr, np.array(tokens), final=final, partial=True)
        for entry in entries[:served]:
            entry.sequence.length = entry.length
        return int(served)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's row away; it waits to be computed again, up to what is still cached then."""
        self._vacate(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.row is not None  # noqa: S101 - for the type checker: it runs
        self.cache.free([sequence.row], fence=self.steps if self._flying else None)
        self._unused.append(sequence.row)
        sequence.row, sequence.length = None, 0

    def _admit(self, budget: int) -> list[Entry]:
        """Open rows for waiting sequences on what is cached of them, as far as budget, rows and blocks go."""
        entries: list[Entry] = []
        while budget > 0 and self.waiting and self._unused and not self.waiting[0].pending:
            sequence = self.waiting[0]
            row, tokens = self._unused[-1], sequence.tokens
            salts = None if sequence.request.salt is None else [sequence.request.salt]
            try:
                cached, _ = self.cache.admit(
                    [row], [0, len(tokens)], np.array(tokens), salts, budget, headroom=len(self.running)
                )
            except OutOfBlocks:
                break
            self._unused.pop()
            self.running.append(self.waiting.popleft())
            begin = int(cached[0])
            sequence.row, sequence.length = row, min(len(tokens), begin + budget)
            draws = int(sequence.length == len(tokens))
            entries.append(Entry(sequence, row, tokens[begin : sequence.length], 0, sequence.length, draws))
            budget -= sequence.length - begin
        return entries

    def _packed(self, entries: list[Entry]) -> Step:
        """Commit, and write the step down."""
        counts = [len(entry.tokens) for entry in entries]
        starts = np.cumsum([0, *counts])
        draws: list[tuple[int, int, int, float]] = []
        for entry, end in zip(entries, starts[1:].tolist(), strict=True):
            request, sample = entry.sequence.request, entry.sequence.sample
            if entry.sequence.forks and entry.draws:
                seeds = [request.seed + sample for sample in range(request.samples)]
                draws += [(end - 1, -1, seed, request.temperature) for seed in seeds]
            else:
                places = range(end - entry.draws, end)
                into = -1 if entry.drafts else entry.row
                draws += [(place, into, request.seed + sample, request.temperature) for place in places]
        at, into_rows, seeds_of, temperatures = zip(*draws, strict=True) if draws else ((), (), (), ())
        return Step(
            number=self.steps,
            delta=self.cache.commit().to_bytes(),
            rows=np.array([entry.row for entry in entries], np.int32),
            starts=starts.astype(np.int32),
            tokens=np.array([token for entry in entries for token in entry.tokens], np.int64),
            lengths=np.array([entry.length for entry in entries], np.int32),
            at=np.array(at, np.int64),
            into=np.array(into_rows, np.int64),
            seeds=np.array(seeds_of, np.int64),
            temperatures=np.array(temperatures, np.float64),
            poison=unowned(self.cache) if self.poison else np.zeros(0, np.int64),
        )

    # A step that is done

    def complete(self, tokens: list[int]) -> list[Event]:
        """Take the tokens drawn by the oldest step in flight; return one event per token that a sequence gained."""
        number, entries = self._flying.popleft()
        self.cache.retire(number)
        events: list[Event] = []
        forks: list[tuple[Sequence, list[int]]] = []
        cuts: list[tuple[int, int]] = []
        begin = 0
        for entry in entries:
            sequence = entry.sequence
            size = sequence.request.samples if sequence.forks and entry.draws else entry.draws
            drawn, begin = tokens[begin : begin + size], begin + size
            sequence.pending -= entry.draws > 0
            if sequence.finish:
                continue
            if sequence.forks and drawn:
                forks.append((sequence, drawn))
                drawn = drawn[:1]
            right = _accepted(entry, drawn)
            self.guessed += entry.drafts
            self.accepted += right
            if right < entry.drafts:
                cuts.append((entry.row, entry.length - entry.drafts + right))
            self._gain(sequence, drawn[: right + 1], events)
        self._confirm(entries, dict(cuts))
        for sequence, drawn in forks:
            self._fork(sequence, drawn, events)
        for entry in entries:
            if entry.sequence.finish:
                self._retire(entry.sequence)
        return events

    def _gain(self, sequence: Sequence, drawn: list[int], events: list[Event]) -> None:
        """Append tokens until one of them ends the sequence."""
        request = sequence.request
        for token in drawn:
            sequence.tokens.append(token)
            if token in request.stop:
                sequence.finish = "stop"
            elif len(sequence.tokens) == len(request.prompt) + request.max_tokens:
                sequence.finish = "length"
            events.append(Event(sequence.number, sequence.sample, token, sequence.finish))
            if sequence.finish:
                break

    def _confirm(self, entries: list[Entry], cuts: dict[int, int]) -> None:
        """Mark as final what this step computed and whose tokens are known by now; drop drafts that were wrong."""
        rows, lengths, tokens = [], [], []
        for entry in entries:
            row, known = entry.row, len(entry.sequence.tokens)
            if entry.sequence.row != row:
                continue  # preempted since, or done
            length = min(cuts.get(row, entry.length), known)
            mark = int(self.cache.final[row])
            if length > mark:
                rows.append(row)
                lengths.append(length)
                tokens.append(entry.sequence.tokens[mark:length])
        if rows:
            indptr = np.cumsum([0, *map(len, tokens)])
            self.cache.confirm(rows, lengths, indptr, np.array([token for part in tokens for token in part]))
        for entry in entries:
            if entry.row in cuts and entry.sequence.row == entry.row:
                entry.sequence.length = cuts[entry.row]
                fence = self.steps if self._flying else None
                self.cache.truncate([entry.row], [cuts[entry.row]], fence=fence)

    def _fork(self, sequence: Sequence, drawn: list[int], events: list[Event]) -> None:
        """Let the other samples go on from the prompt that this one computed; without a free row they wait for one."""
        sequence.forks = False
        prompt = list(sequence.request.prompt)
        for sample, token in enumerate(drawn[1:], 1):
            twin = Sequence(sequence.request, sequence.number, sample, list(prompt))
            self._gain(twin, [token], events)
            if twin.finish:
                continue
            if self._unused and sequence.row is not None:
                twin.row, twin.length = self._unused.pop(), sequence.length
                self.cache.fork(sequence.row, twin.row)
                self.running.append(twin)
            else:
                self.waiting.append(twin)

    def _retire(self, sequence: Sequence) -> None:
        """Give back what a finished sequence holds."""
        if sequence.row is not None:
            self._vacate(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def start_over(self) -> None:
        """Forget every step in flight and everything computed: the memory behind the cache is gone."""
        self._flying.clear()
        self.cache.retire(self.steps)
        for sequence in reversed(self.running):
            self._vacate(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        for sequence in self.waiting:
            sequence.pending = 0
        self.cache.reset_prefix()


def _accepted(entry: Entry, drawn: list[int]) -> int:
    """Return how many drafts are what the model itself drew in their places."""
    drafts = entry.tokens[len(entry.tokens) - entry.drafts :]
    for place, draft in enumerate(drafts):
        if drawn[place] != draft:
            return place
    return entry.drafts
