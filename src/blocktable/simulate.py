"""A day of traffic through block tables: continuous batching at the level of blocks, without a model.

Each step takes a fixed time, and idle time jumps to the next arrival. A step serves, within its budget of tokens, first
the decodes, then the running prefill, then waiting requests in order of arrival, prompts in chunks. A waiting request
starts when its whole prompt fits the free blocks. When blocks run out the youngest running request is preempted: it
gives up its row, goes back to the head of the queue, and computes its prompt and what it had generated again. The token
that ends a request is never computed, so a request of p and o tokens fills p + o - 1 cells.

Four facts follow, and the code below rests on them. Running requests are older than waiting ones: admission goes by
arrival and preemption takes the youngest. At most one running request, the youngest, is still in its prompt: a prompt
that does not finish has used up the budget. The decodes fit the budget: a request starts on tokens that they leave. Who
is preempted does not start in the same step: what it gave up is short of what it needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable._ints import align_up, ceil_div
from blocktable.delta import Delta
from blocktable.errors import ArgumentError, LawBroken, NeverFits
from blocktable.geometry import Geometry
from blocktable.pool import BlockPool
from blocktable.replica import Replica
from blocktable.tables import BlockTables
from blocktable.traces import Trace

__all__ = ["Simulation", "Summary"]

PADDING = 64  # tokens: engines pad the tokens of a step to the sizes of their captured graphs

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
    recomputed_tokens: int  # computed before and lost by preemption
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
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0


class _Rows:
    """The rows of one full-attention group over one pool of blocks."""

    def __init__(self, geometry: Geometry, num_blocks: int, max_rows: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables([geometry], max_rows=max_rows, num_blocks=num_blocks)

    def grow(self, rows: Ints, counts: Ints) -> None:
        """Append so many new blocks to each row."""
        indptr = np.concatenate([[0], np.cumsum(counts)])
        self.tables.append(rows, indptr, self.pool.allocate(int(indptr[-1])))

    def free(self, rows: Ints) -> None:
        """Empty the rows and give their blocks back."""
        table = self.tables.tables[0]
        ids = [table.array[row, : table.num_blocks[row]] for row in rows.tolist()]
        held = np.concatenate(ids)
        self.tables.clear(rows)
        self.pool.free(held)


class Simulation:
    """One run of a trace; ``step()`` until ``done``, or ``run()``.

    ``num_blocks`` counts the null block, ``token_budget`` the tokens that a step computes at most, ``max_rows`` the
    requests that run at once. Requests longer than the geometry's max_model_len are refused, counted and named, as a
    server would. With ``check`` every step also verifies the laws. Raises ArgumentError for limits that are not
    positive, and NeverFits when the pool cannot hold one request of max_model_len. A step raises ContractError when
    the kernel would refuse the table, and LawBroken. A step costs time in proportion to its running rows and tokens.

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
        self._rows = _Rows(geometry, num_blocks, max_rows)
        self._kernel_width = self._rows.tables.tables[0].kernel_array([]).shape[1]
        self._laws = _Laws(self._rows, geometry) if check else None

        self._served = np.flatnonzero(trace.input_length + trace.output_length <= geometry.max_model_len)
        self.requests = self._served.size
        self._arrival = trace.arrival[self._served].tolist()
        self._prompt = trace.input_length[self._served].tolist()
        self._output = trace.output_length[self._served].tolist()
        self._todo = list(self._output)  # output tokens not yet sampled, of requests that do not run
        self._next = 0  # the first request that has never run
        self._preempted: list[int] = []  # the oldest, which runs again first, is last
        self._free_rows = list(range(max_rows))[::-1]
        self.finish_step = np.zeros(self.requests, np.int64)  # 0: not finished

        # The running requests, from the oldest to the youngest: _running entries of each array.
        self._running = 0
        self._state = np.zeros((6, max_rows), np.int64)
        # row; index into _served; tokens computed; tokens to compute before the first is sampled; output tokens to
        # come; tokens that the row's blocks hold
        self._row, self._request, self._computed, self._target, self._left, self._room = self._state
        self._tokens = np.zeros(max_rows, np.int64)  # what each of the scheduled ones computes in this step
        self._start = np.zeros(max_rows + 1, np.int64)  # and where its tokens start among those of all

        self.finished = self.steps = self._computed_tokens = self._recomputed_tokens = self._output_tokens = 0
        self._preemptions = self._peak = self._held_sum = self._wasted_sum = 0
        self._changed = self._full_copy = self._kernel_checks = self._nanoseconds = 0

    @property
    def done(self) -> bool:
        """Whether every request has finished or was refused."""
        return self.finished == self.requests

    def run(self, on_step: Callable[[], object] = lambda: None) -> Summary:
        """Step to the end, calling ``on_step`` after each step; return the summary."""
        while not self.done:
            self.step()
            on_step()
        return self.summary()

    def step(self) -> None:
        """Serve one step: schedule, grow the rows, commit, map the slots, check, and finish who is done."""
        started = perf_counter_ns()
        if not self._running and not self._preempted:
            self.clock = max(self.clock, self._arrival[self._next])
        scheduled = self._schedule()
        self._grow(scheduled)
        self._hand_over(scheduled)
        self._finish(scheduled)
        self.clock += self._step_seconds
        self.steps += 1
        self._nanoseconds += perf_counter_ns() - started

    def summary(self) -> Summary:
        """Return the counts of the steps so far."""
        steps = max(self.steps, 1)
        kept = np.zeros(len(self.trace), bool)
        kept[self._served] = True
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
        )

    def _schedule(self) -> int:
        """Decide what runs; the scheduled requests are the first so many running ones, the result."""
        decodes, free = self._keep_decodes()
        self._tokens[:decodes] = 1
        budget = self.token_budget - decodes
        scheduled = decodes
        if budget and scheduled < self._running:  # the youngest, still in its prompt
            tokens = min(int(self._target[scheduled] - self._computed[scheduled]), budget)
            end = int(self._computed[scheduled]) + tokens
            needed = ceil_div(end - int(self._room[scheduled]), self._block_size)
            if needed > free:
                self._preempt_youngest()
            else:
                self._tokens[scheduled] = tokens
                budget -= tokens
                free -= needed
                scheduled += 1
        return scheduled + self._admit(budget, free)

    def _keep_decodes(self) -> tuple[int, int]:
        """Preempt until every decode has its block; return how many they are and the blocks that they leave free."""
        while True:
            last = self._running - 1
            in_prompt = last >= 0 and self._computed[last] < self._target[last]
            decodes = self._running - int(in_prompt)
            needed = int(np.count_nonzero(self._computed[:decodes] == self._room[:decodes]))
            free = self._rows.pool.num_free - needed
            if free >= 0:
                return decodes, free
            self._preempt_youngest()

    def _admit(self, budget: int, free: int) -> int:
        """Start waiting requests while tokens, rows and blocks last; return how many."""
        before = self._running
        while budget and self._free_rows:
            if self._preempted:
                request = self._preempted[-1]
            elif self._next < self.requests and self._arrival[self._next] <= self.clock:
                request = self._next
            else:
                break
            target = self._prompt[request] + self._output[request] - self._todo[request]
            tokens = min(target, budget)
            if ceil_div(target, self._block_size) > free:
                break
            if self._preempted:
                self._preempted.pop()
            else:
                self._next += 1
            self._state[:, self._running] = self._free_rows.pop(), request, 0, target, self._todo[request], 0
            self._tokens[self._running] = tokens
            self._running += 1
            budget -= tokens
            free -= ceil_div(tokens, self._block_size)
        return self._running - before

    def _preempt_youngest(self) -> None:
        self._running -= 1
        last = self._running
        request = int(self._request[last])
        self._todo[request] = int(self._left[last])
        self._preempted.append(request)
        self._recomputed_tokens += int(self._computed[last])
        self._preemptions += 1
        self._release(self._row[last : last + 1])

    def _release(self, rows: Ints) -> None:
        self._rows.free(rows)
        self._free_rows.extend(rows.tolist())

    def _grow(self, scheduled: int) -> None:
        """Give each scheduled row the blocks that its tokens of this step need: most need none."""
        over = self._computed[:scheduled] + self._tokens[:scheduled] - self._room[:scheduled]
        crossing = np.flatnonzero(over > 0)
        if crossing.size:
            blocks = np.array([ceil_div(tokens, self._block_size) for tokens in over[crossing].tolist()])
            self._rows.grow(self._row[crossing], blocks)
            self._room[crossing] += blocks * self._block_size
        self._peak = max(self._peak, self._rows.pool.num_held)

    def _hand_over(self, scheduled: int) -> None:
        """Do what an engine does before the model runs: commit, map slots, and ask the kernel."""
        tables = self._rows.tables
        delta = tables.commit()
        rows, tokens = self._row[:scheduled], self._tokens[:scheduled]
        start = self._start[: scheduled + 1]
        np.cumsum(tokens, out=start[1:])
        total = int(start[-1])
        positions = np.repeat(self._computed[:scheduled] - start[:-1], tokens) + np.arange(total)
        slots = tables.slot_mapping(rows, start, positions, padded=align_up(total, PADDING))
        self.geometry.check((scheduled, self._kernel_width))
        self._kernel_checks += 1
        self._computed_tokens += total
        self._changed += int(delta.spans[:, 3].sum())
        self._full_copy += self._running * self.geometry.width
        if self._laws is not None:
            self._laws.verify(delta, rows, tokens, positions, slots[0])

    def _finish(self, scheduled: int) -> None:
        """Count the tokens of this step, sample one for every row past its prompt, and free who has its last."""
        running = self._running
        self._computed[:scheduled] += self._tokens[:scheduled]
        held = self._rows.pool.num_held
        self._held_sum += held
        self._wasted_sum += held * self._block_size - int(self._computed[:running].sum())
        sampled = self._computed[:scheduled] >= self._target[:scheduled]
        self._left[:scheduled] -= sampled
        self._output_tokens += int(np.count_nonzero(sampled))
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


class _Laws:
    """The laws, verified after each commit against something that does not share the code it judges."""

    def __init__(self, rows: _Rows, geometry: Geometry) -> None:
        self.checks = 0
        self._tables, self._pool, self._geometry = rows.tables, rows.pool, geometry
        self._replica = Replica([geometry], max_rows=self._tables.max_rows)

    def verify(self, delta: Delta, rows: Ints, tokens: Ints, positions: Ints, slots: Ints) -> None:
        """Raise LawBroken or ContractError; ``rows`` compute ``tokens`` each, at ``positions``."""
        self._tables.check()
        self._pool.check()
        self._replica.apply(delta)
        table, block_size = self._tables.tables[0], self._geometry.block_size
        _check_owners(table.array, table.num_blocks, self._pool.references)
        _check_replica(table.array, self._replica.tables[0].array)
        kernel_table = table.kernel_array(rows)
        self._geometry.check(kernel_table.shape, dtype=kernel_table.dtype)
        blocks = table.array[np.repeat(rows, tokens), positions // block_size].astype(np.int64)
        _check_slots(blocks * block_size + positions % block_size, slots)
        self.checks += 1


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
    if num_blocks - 1 < geometry.min_blocks:
        largest = (num_blocks - 1) * geometry.block_size
        raise NeverFits(
            f"a request of {geometry.max_model_len} tokens needs {geometry.min_blocks} blocks, {num_blocks - 1} are usable",
            law="L9",
            values={"needed": geometry.min_blocks, "usable": num_blocks - 1, "largest": largest},
            remedy=f"num_blocks of at least {geometry.min_blocks + 1}, or max_model_len of at most {largest}",
        )


def _is_positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and bool(0 < value < math.inf)


def _check_owners(array: NDArray[np.int32], num_blocks: NDArray[np.int32], references: Ints) -> None:
    """Raise LawBroken unless each block is live in the tables as often as the pool counts owners (L3, L9)."""
    live = np.concatenate([array[row, : num_blocks[row]] for row in np.flatnonzero(num_blocks)])
    found = np.bincount(live, minlength=references.size)
    wrong = np.flatnonzero(found != references)
    if wrong.size:
        block = int(wrong[0])
        raise LawBroken(
            f"block {block} is live in {found[block]} rows and has {references[block]} owners",
            law="L9",
            values={"id": block, "rows": int(found[block]), "owners": int(references[block])},
        )


def _check_replica(host: NDArray[np.int32], replica: NDArray[np.int32]) -> None:
    """Raise LawBroken unless the deltas alone have made the same table elsewhere (L11)."""
    if not np.array_equal(host, replica):
        row, column = np.argwhere(host != replica)[0].tolist()
        raise LawBroken(
            f"row {row} column {column} is {host[row, column]} on the host and {replica[row, column]} on a replica",
            law="L11",
            values={"row": row, "column": column},
        )


def _check_slots(expected: Ints, slots: Ints) -> None:
    """Raise LawBroken unless each token has its own slot, no two the same, and padding is -1 (L6, L7)."""
    wrong = np.flatnonzero(slots[: expected.size] != expected)
    if wrong.size:
        i = int(wrong[0])
        raise LawBroken(
            f"token {i} of the step has slot {slots[i]} instead of {expected[i]}",
            law="L7",
            values={"index": i, "slot": int(slots[i]), "expected": int(expected[i])},
        )
    in_order = np.sort(expected)
    twice = in_order[1:][(in_order[1:] == in_order[:-1]) | (in_order[1:] < 0)]
    if twice.size:
        raise LawBroken(f"two tokens of a step share slot {twice[0]}", law="L7", values={"slot": int(twice[0])})
    stray = np.flatnonzero(slots[expected.size :] != -1)
    if stray.size:
        i = expected.size + int(stray[0])
        raise LawBroken(
            f"slot {slots[i]} stands at {i}, past the {expected.size} tokens of the step",
            law="L6",
            values={"index": i, "slot": int(slots[i])},
        )
