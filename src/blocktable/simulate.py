"""A day of traffic through a KV cache: continuous batching at the level of blocks, without a model.

Each step takes a fixed time, and idle time jumps to the next arrival. A step serves, within its budget of tokens, first
the decodes, then the running prefill, then waiting requests in order of arrival, prompts in chunks. A waiting request
starts behind what is cached of its prompt when the rest of it fits. When blocks run out the youngest running request is
preempted: it gives up its row, goes back to the head of the queue, and computes its prompt and what it had generated
again, except for what is still cached. A step that preempts starts nobody. The token that ends a request is never
computed, so a request of p and o tokens fills p + o - 1 cells.

Three facts follow, and the code below rests on them. Running requests are older than waiting ones: admission goes by
arrival and preemption takes the youngest. At most one running request, the youngest, is still in its prompt: a prompt
that does not finish has used up the budget. The decodes fit the budget: a request starts on tokens that they leave.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._ints import ceil_div
from blocktable._prompts import Prompts
from blocktable._simulate_laws import Laws
from blocktable.cache import KVCache
from blocktable.errors import ArgumentError, OutOfBlocks
from blocktable.geometry import Geometry
from blocktable.traces import Trace

__all__ = ["Simulation", "Summary"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a simulation has counted so far; means are over steps, so idle time does not count."""

    requests: int  # in the trace
    finished: int
    refused: int  # longer than max_model_len
    refused_lines: tuple[int, ...]
    steps: int
    simulated_seconds: float
    computed_tokens: int
    recomputed_tokens: int  # lost by preemption and not found cached afterwards
    output_tokens: int
    preemptions: int
    usable_blocks: int
    peak_blocks: int
    mean_blocks: float
    mean_wasted_tokens: float  # cells of held blocks without a token
    changed_entries: int  # carried by the deltas
    full_copy_entries: int  # running rows x width, at every step
    kernel_checks: int
    law_checks: int
    us_per_step: float  # wall time on this machine
    prefix_hit_tokens: int  # of the prompts, and what was generated before a preemption: found cached
    prefix_query_tokens: int  # looked for when a request starts, or starts again
    evictions: int  # cached blocks reissued
    delta_bytes: int  # carried by the deltas, headers included
    mean_first_token_steps: float  # steps of the clock from a request's arrival to its first token, waiting included
    p95_first_token_steps: float


class Simulation:
    """One run of a trace; ``step()`` until ``done``, or ``run()``.

    ``num_blocks`` counts the null block, ``token_budget`` the tokens that a step computes at most, ``max_rows`` the
    requests that run at once. Requests longer than the geometry's max_model_len are refused, counted and named, as a
    server would. With ``prefix_cache`` what was computed stays for later prompts that begin alike, the longest idle
    block going first; None: where the trace says which do (hash ids). With ``check`` every step also verifies the laws.
    Raises ArgumentError for limits that are not positive, and NeverFits when the pool cannot hold one request of
    max_model_len. A step raises ContractError when the kernel would refuse the table, and LawBroken. A step costs time in
    proportion to its running rows and tokens.

    >>> from blocktable import plan
    >>> from blocktable.traces import synthetic
    >>> geometry = plan(max_model_len=4096, block_size=32)
    >>> trace = synthetic(seed=0, max_model_len=4096).first(20)
    >>> summary = Simulation(trace, geometry, num_blocks=1024).run()
    >>> summary.finished, summary.changed_entries < summary.full_copy_entries
    (20, True)
    """

    def __init__(
        self,
        trace: Trace,
        geometry: Geometry,
        *,
        num_blocks: int,
        max_rows: int = 256,
        token_budget: int = 8192,
        step_ms: float = 30.0,
        prefix_cache: bool | None = None,
        check: bool = False,
    ) -> None:
        _check_limits(geometry, num_blocks, max_rows, token_budget, step_ms)
        self.trace = trace
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.clock = 0.0
        self._block_size = geometry.block_size
        self._step_seconds = step_ms / 1000
        self.prefix_cache = bool(trace.hash_ids.size) if prefix_cache is None else prefix_cache
        self._cache = KVCache([geometry], num_blocks=num_blocks, max_rows=max_rows, prefix_cache=self.prefix_cache)
        self._kernel_width = self._cache.tables.tables[0].kernel_array([]).shape[1]
        self._laws = Laws(self._cache, geometry) if check else None
        self._prompts = Prompts(trace)

        self._served = np.flatnonzero(trace.input_length + trace.output_length <= geometry.max_model_len)
        self.requests = self._served.size
        self._arrival = trace.arrival[self._served].tolist()
        self._prompt = trace.input_length[self._served].tolist()
        self._output = trace.output_length[self._served].tolist()
        self._todo = list(self._output)  # output tokens not yet sampled, of requests that do not run
        self._lost = [0] * self.requests  # tokens that a request held when it was preempted
        self._next = 0  # the first request that has never run
        self._preempted: list[int] = []  # the oldest, which runs again first, is last
        self._free_rows = list(range(max_rows))[::-1]
        self.finish_step = np.zeros(self.requests, np.int64)  # 0: not finished
        self.first_token = np.full(self.requests, np.nan)  # simulated seconds; NaN: none yet, or a request of no output
        # Of the last step, before the requests that finished in it left.
        self.stats = self._cache.stats()
        self.running = self.wasted_tokens = 0

        # The running requests, from the oldest to the youngest: _running entries of each array.
        self._running = 0
        self._state = np.zeros((6, max_rows), np.int64)
        # row; index into _served; tokens computed or found cached; tokens to have before the first is sampled; output
        # tokens to come; the token it generates
        self._row, self._request, self._computed, self._target, self._left, self._own = self._state
        self._tokens = np.zeros(max_rows, np.int64)  # what each of the scheduled ones computes in this step
        self._slots: list[Ints] = []  # where to, call by call
        self._each = np.arange(max_rows + 1)

        self.finished = self.steps = self._computed_tokens = self._recomputed_tokens = self._output_tokens = 0
        self._preemptions = self._peak = self._held_sum = self._wasted_sum = 0
        self._changed = self._full_copy = self._kernel_checks = self._nanoseconds = 0

    @property
    def done(self) -> bool:
        """Whether every request has finished or was refused."""
        return self.finished == self.requests

    @property
    def row_lengths(self) -> Ints:
        """Tokens computed of each running request, from the oldest to the youngest; a view until the next step."""
        return self._computed[: self._running]

    @property
    def waiting(self) -> int:
        """Requests that have arrived, or were preempted, and do not run."""
        return len(self._preempted) + max(bisect_right(self._arrival, self.clock) - self._next, 0)

    @property
    def preemptions(self) -> int:
        """How often a request gave up its row so far."""
        return self._preemptions

    def run(self, on_step: Callable[[], object] = lambda: None) -> Summary:
        """Step to the end, calling ``on_step`` after each step; return the summary."""
        while not self.done:
            self.step()
            on_step()
        return self.summary()

    def step(self) -> None:
        """Serve one step: schedule, commit, check, and finish who is done."""
        started = perf_counter_ns()
        if not self._running and not self._preempted:
            self.clock = max(self.clock, self._arrival[self._next])
        scheduled = self._schedule()
        self._hand_over(scheduled)
        self._finish(scheduled)
        if self._laws is not None and self.done:
            self._laws.recount()
        self.clock += self._step_seconds
        self.steps += 1
        self._nanoseconds += perf_counter_ns() - started

    def summary(self) -> Summary:
        """Return the counts of the steps so far."""
        steps = max(self.steps, 1)
        kept = np.zeros(len(self.trace), bool)
        kept[self._served] = True
        stats = self._cache.stats()
        waited = (self.first_token - self._arrival)[~np.isnan(self.first_token)] / self._step_seconds
        return Summary(
            requests=len(self.trace),
            finished=self.finished,
            refused=len(self.trace) - self.requests,
            refused_lines=tuple(self.trace.line[~kept].tolist()),
            steps=self.steps,
            simulated_seconds=round(self.clock, 3),
            computed_tokens=self._computed_tokens,
            recomputed_tokens=self._recomputed_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._preemptions,
            usable_blocks=self.num_blocks - 1,
            peak_blocks=self._peak,
            mean_blocks=self._held_sum / steps,
            mean_wasted_tokens=self._wasted_sum / steps,
            changed_entries=self._changed,
            full_copy_entries=self._full_copy,
            kernel_checks=self._kernel_checks,
            law_checks=self._laws.checks if self._laws else 0,
            us_per_step=self._nanoseconds / steps / 1000,
            prefix_hit_tokens=stats["hit_tokens"],
            prefix_query_tokens=stats["query_tokens"] if self.prefix_cache else 0,
            evictions=stats["evictions"],
            delta_bytes=stats["delta_bytes"],
            mean_first_token_steps=round(float(waited.mean()), 3) if waited.size else 0.0,
            p95_first_token_steps=round(float(np.quantile(waited, 0.95)), 3) if waited.size else 0.0,
        )

    def _schedule(self) -> int:
        """Decide what runs and make room for it; the scheduled requests are the first so many running ones, the result."""
        self._slots.clear()
        before = self._preemptions
        scheduled = self._decode()
        budget = self.token_budget - scheduled
        if budget and scheduled < self._running:  # the youngest, still in its prompt
            tokens = self._prefill(budget)
            budget -= tokens
            scheduled += bool(tokens)
        if self._preemptions == before:
            scheduled += self._admit(budget)
        return scheduled

    def _decode(self) -> int:
        """Extend every row that is past its prompt by a token, preempting until they fit; return how many they are."""
        while self._running:
            last = self._running - 1
            decodes = last + int(self._computed[last] >= self._target[last])
            try:
                self._slots.append(
                    self._cache.extend(self._row[:decodes], self._each[: decodes + 1], self._own[:decodes])
                )
            except OutOfBlocks:
                self._preempt_youngest()
                continue
            self._tokens[:decodes] = 1
            return decodes
        return 0

    def _prefill(self, budget: int) -> int:
        """Extend the youngest row by the next tokens of its prompt, or preempt it; return how many."""
        last = self._running - 1
        begin, target = int(self._computed[last]), int(self._target[last])
        end = min(target, begin + budget)
        text = self._text(int(self._request[last]), target)
        try:
            self._slots.append(self._cache.extend(self._row[last : last + 1], [0, end - begin], text[begin:end]))
        except OutOfBlocks:
            self._preempt_youngest()
            return 0
        self._tokens[last] = end - begin
        return end - begin

    def _admit(self, budget: int) -> int:
        """Start waiting requests while tokens, rows and blocks last; return how many."""
        before = self._running
        while budget and self._free_rows:
            if self._preempted:
                request = self._preempted[-1]
            elif self._next < self.requests and self._arrival[self._next] <= self.clock:
                request = self._next
            else:
                break
            tokens = self._start(request, budget)
            if not tokens:
                break
            if self._preempted:
                self._preempted.pop()
            else:
                self._next += 1
            budget -= tokens
        return self._running - before

    def _start(self, request: int, budget: int) -> int:
        """Open a row for a request if its whole prompt fits, what is cached aside; return the tokens that it computes."""
        target: int = self._prompt[request] + self._output[request] - self._todo[request]
        text = self._text(request, target)
        cached = int(self._cache.lookup([0, target], text)[0])
        tokens = min(target - cached, budget)
        rest = ceil_div(target, self._block_size) - ceil_div(cached + tokens, self._block_size)
        row = self._free_rows[-1]
        try:
            _, slots = self._cache.admit([row], [0, target], text, limit=tokens, headroom=rest)
        except OutOfBlocks:
            return 0
        self._slots.append(slots)
        own = self._prompts.own(int(self._served[request]))
        self._state[:, self._running] = self._free_rows.pop(), request, cached, target, self._todo[request], own
        self._tokens[self._running] = tokens
        self._running += 1
        self._recomputed_tokens -= min(cached, self._lost[request])
        return tokens

    def _text(self, request: int, length: int) -> Ints:
        return self._prompts.tokens(int(self._served[request]), length)

    def _preempt_youngest(self) -> None:
        self._running -= 1
        last = self._running
        request, lost = int(self._request[last]), int(self._computed[last])
        self._todo[request] = int(self._left[last])
        self._lost[request] = lost
        self._preempted.append(request)
        self._recomputed_tokens += lost
        self._preemptions += 1
        self._release(self._row[last : last + 1])

    def _release(self, rows: Ints) -> None:
        self._cache.free(rows)
        self._free_rows.extend(rows.tolist())

    def _hand_over(self, scheduled: int) -> None:
        """Do what an engine does before the model runs: commit, and ask the kernel; the slots are there."""
        delta = self._cache.commit()
        self.geometry.check((scheduled, self._kernel_width))
        self._kernel_checks += 1
        self._changed += int(delta.spans[:, 3].sum())
        self._full_copy += self._running * self.geometry.width
        rows, computed, tokens = self._row[:scheduled], self._computed[:scheduled], self._tokens[:scheduled]
        if self._laws is not None:
            self._laws.verify(delta, rows, computed, tokens, np.concatenate(self._slots, axis=1)[0])
        computed += tokens
        self._computed_tokens += int(tokens.sum())

    def _finish(self, scheduled: int) -> None:
        """Count what is held, sample a token for every row past its prompt, and free who has its last."""
        running = self._running
        self.stats = self._cache.stats()
        held = self.stats["held"]
        self._peak = max(self._peak, held)
        self._held_sum += held
        self.running, self.wasted_tokens = running, int((-self._computed[:running] % self._block_size).sum())
        self._wasted_sum += self.wasted_tokens
        sampled = self._computed[:scheduled] >= self._target[:scheduled]
        self._left[:scheduled] -= sampled
        self._output_tokens += int(np.count_nonzero(sampled))
        requests = self._request[:scheduled][sampled & (self._left[:scheduled] >= 0)]
        first = requests[np.isnan(self.first_token[requests])]
        if first.size:
            self.first_token[first] = self.clock + self._step_seconds
        ended = np.flatnonzero(sampled & (self._left[:scheduled] <= 0))
        if not ended.size:
            return
        # A request of no output, such as an embedding, ends with its prompt and samples nothing.
        self._output_tokens += int(self._left[ended].sum())
        self.finish_step[self._request[ended]] = self.steps + 1
        self.finished += ended.size
        self._release(self._row[ended])
        stays = np.ones(running, bool)
        stays[ended] = False
        self._running = running - ended.size
        self._state[:, : self._running] = self._state[:, :running][:, stays]


def _check_limits(geometry: Geometry, num_blocks: int, max_rows: int, token_budget: int, step_ms: float) -> None:
    limits = {"num_blocks": num_blocks, "max_rows": max_rows, "token_budget": token_budget, "step_ms": step_ms}
    for name, value in limits.items():
        kind = "number" if name == "step_ms" else "integer"
        if not _is_positive(value, Real if kind == "number" else Integral):
            raise ArgumentError(f"{name} is {value!r}", values={name: value}, remedy=f"{name} is a positive {kind}")
    if geometry.cp_size != 1:
        raise ArgumentError(
            f"cp_size is {geometry.cp_size}; a simulation drives one rank",
            values={"cp_size": geometry.cp_size},
            remedy="plan with cp_size=1",
        )


def _is_positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and bool(0 < value < math.inf)
