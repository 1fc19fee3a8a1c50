"""The engine: prompts in, tokens out, over one scheduler and one worker or several.

engine = Engine("path/of/a/model")
for completion in engine.generate(["The sea", "A mountain"], max_tokens=32): …
"""

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from jinja2 import TemplateError

from blocktable.cache import KVCache
from blocktable.engine.executors import Executor, Here, Processes, Result, Spec, WorkerDied
from blocktable.engine.models import Model, load_tokenizer, read_shape
from blocktable.engine.requests import Completion, Event, Request
from blocktable.engine.scheduler import Scheduler
from blocktable.errors import ArgumentError, BlockTableError, LawBroken
from blocktable.geometry import Geometry, plan
from blocktable.groups import Group

__all__ = ["Engine"]

POOL_TOKENS = 16384  # of the default pool, unless one row takes more
DEATHS = 2  # of workers in a row that are taken for accidents


class Engine:
    """Continuous batching of a Hugging Face causal language model over a ``KVCache``.

    Parameters
    ----------
    model
        A local folder, or a model that is already loaded (then ``workers`` must be 0). Its attention reads block tables
        from then on: load it again to use it by itself.
    backend
        The table contract that is enforced at every attention call, as `get_contract` takes it; None: any table.
    engine_width
        A release such as "vllm==0.19.1", whose width is allocated, judged by nobody but the contract.
    block_size, max_model_len, num_blocks, max_rows
        The cache: tokens per block; tokens per row (the model's own limit); blocks in the pool, the null block
        included (what 16384 tokens or one row take); rows at once.
    token_budget
        Tokens per step; a longer prompt is computed in chunks.
    draft
        Tokens guessed per step by prompt lookup, and verified; 0: none.
    ahead
        Schedule a step while the one before still runs. False: one after the other, to read and to debug.
    check, poison
        Verify every law and that the workers' tables equal the host's, at every step; fill what nobody owns with NaN.
    workers, restart
        Processes that run the model, each the whole of it, as tensor-parallel ranks would its shares: the same delta
        and token ids go to each. 0: none, a thread of this process. ``restart``: one that dies is started again, unless
        it keeps dying before any request has gained a token.

    Raises ArgumentError for a model that cannot be loaded or served, GeometryError or ContractError for a table that the
    backend's kernel refuses, NeverFits for a pool that cannot hold one row. One thread owns the object; several streams
    of it may be read by turns.
    """

    def __init__(
        self,
        model: Any,
        *,
        backend: str | None = None,
        engine_width: str | None = None,
        block_size: int = 32,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        max_rows: int = 32,
        token_budget: int = 512,
        prefix_cache: bool = True,
        draft: int = 0,
        ahead: bool = True,
        check: bool = False,
        poison: bool = False,
        workers: int = 0,
        restart: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.folder = Path(model) if isinstance(model, (str, Path)) else None
        if workers and self.folder is None:
            raise ArgumentError(
                "workers load the model themselves, and this one is loaded already",
                remedy="pass its folder, or workers=0",
            )
        if workers < 0:
            raise ArgumentError(f"workers is {workers}", values={"workers": workers}, remedy="pass 0 or more")
        here = None if workers else Model.load(self.folder, dtype) if self.folder else Model(model)
        self.shape = here.shape if here else read_shape(Path(model))
        limit = max_model_len or self.shape.max_positions
        self._refuse_long_rope(limit)
        self.geometry = plan_table(limit, block_size, backend, engine_width)
        groups = [Group(self.geometry, kind=one.kind, window=one.window) for one in self.shape.groups]
        if num_blocks is None:
            num_blocks = 1 + len(groups) * max(self.geometry.min_blocks + 1, -(-POOL_TOKENS // block_size))
        self.cache = KVCache(groups, num_blocks=num_blocks, max_rows=max_rows, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            self.cache, token_budget=token_budget, draft=draft, poison=poison, vocabulary=self.shape.vocabulary
        )
        self.check, self.restart, self.depth = check, restart, 1 + ahead
        geometries = [self.geometry] * len(groups)
        spec = Spec(geometries, num_blocks, self.cache.snapshot())
        self.executor: Executor = Here(here, spec) if here else Processes(Path(model), dtype, spec, workers)
        self.scheduler.longest = min(limit, self.shape.max_positions)
        self._sums: deque[int] = deque()
        self._inboxes: dict[int, deque[Event]] = {}  # by request number: where its stream reads
        self._deaths = 0  # of workers, since a request gained a token
        self._broken: BaseException | None = None
        self._tokenizer: Any = None

    @property
    def notes(self) -> list[str]:
        """What the launch does not refuse and its user should know, in sentences."""
        notes = []
        limit, positions = self.geometry.max_model_len, self.shape.max_positions
        if limit > positions:
            notes.append(f"max_model_len {limit} is past the model's {positions} positions; longer prompts are refused")
        notes += [
            f"{contract.name} runs no heads of {self.shape.head_dim} elements: its table is enforced all the same"
            for contract in self.geometry.contracts
            if not contract.accepts_head(self.shape.head_dim)
        ]
        return notes

    def describe_kernel(self) -> str:
        """Say which table the kernel was handed, at every attention call."""
        width, block = self.geometry.kernel_width, self.geometry.kernel_block_size
        names = ", ".join(contract.name for contract in self.geometry.contracts) or "no contract asked"
        return f"{names}: rows of {width} blocks of {block} tokens"

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in the model's folder, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def generate(self, prompts: Iterable[Any], **options: Any) -> list[list[Completion]]:
        """Answer prompts and return, per prompt, its completions, one per sample.

        A prompt is a text (a chat turn where the tokenizer has a chat template), a list of chat messages, or a sequence
        of token ids. ``options`` are those of ``Request``: max_tokens, temperature, seed, samples, stop, salt; ``stop``
        is the model's end-of-sequence tokens unless it is given.
        """
        requests = [self.request(prompt, **options) for prompt in prompts]
        found: dict[int, list[Completion]] = {}
        for event in self.stream(requests):
            samples = found.setdefault(event.request, [])
            while len(samples) <= event.sample:
                samples.append(Completion([], ""))
            samples[event.sample].tokens.append(event.token)
            samples[event.sample].finish = event.finish
        answers = [found[place] for place in range(len(requests))]
        if self.folder is not None and (self.folder / "tokenizer_config.json").is_file():
            for completion in (one for answer in answers for one in answer):
                completion.text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return answers

    def request(self, prompt: Any, **options: Any) -> Request:
        """Return the request that a prompt makes, encoded where it is text."""
        if "stop" not in options:
            options["stop"] = self.stop_tokens()
        return Request(prompt=tuple(self.encode(prompt)), **options)

    def encode(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids; without a chat template, what a chat says is one text."""
        if not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict)):
            return [int(token) for token in prompt]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            if self.tokenizer.chat_template:
                return list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            return list(self.tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"])
        except (KeyError, TypeError, TemplateError) as error:
            raise ArgumentError(
                f"the model's chat template does not take this chat: {type(error).__name__}: {error}",
                remedy='write messages as {"role": "user", "content": "…"}; not every model knows the role system',
            ) from error

    def stop_tokens(self) -> frozenset[int]:
        """Return the model's end-of-sequence tokens."""
        end = self.shape.end
        return frozenset([] if end is None else [end] if isinstance(end, int) else end)

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Serve requests and yield every token as it becomes known; requests are numbered in order, from 0 on.

        All are refused, or none. A stream that is left early gives up what it had not finished.
        """
        requests = list(requests)
        self._refuse_broken()
        numbers = {number: place for place, number in enumerate(self.scheduler.add(*requests))}
        inbox: deque[Event] = deque()
        self._inboxes |= dict.fromkeys(numbers, inbox)
        left = sum(request.samples for request in requests)
        try:
            while left:
                while not inbox:
                    self._refuse_broken()
                    self._advance()
                event = inbox.popleft()
                left -= bool(event.finish)
                yield event._replace(request=numbers[event.request])
        finally:
            for number in numbers:
                del self._inboxes[number]
            if self._broken is None:
                for number in numbers if left else ():
                    self.scheduler.abort(number)
                while self.scheduler.in_flight and not self._inboxes:
                    self._advance()

    def _advance(self) -> None:
        """Do one thing of the run; what raises leaves a step half done, here or in a worker, and ends the engine."""
        try:
            self._send_or_take()
        except BaseException as error:
            self._broken = error
            raise

    def _send_or_take(self) -> None:
        """Send out the next step or take the tokens of the oldest one, and put each where its stream reads."""
        submitted = self.scheduler.in_flight < self.depth and self._submit()
        if not self.scheduler.in_flight:
            raise LawBroken("requests wait and no step can be made: somebody else holds blocks", law="L9")
        if not submitted or self.scheduler.in_flight == self.depth:
            for event in self._finish():
                if event.request in self._inboxes:
                    self._inboxes[event.request].append(event)

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            reason = str(self._broken) or type(self._broken).__name__
            raise BlockTableError(
                f"this engine has stopped: {reason}",
                values={"raised": type(self._broken).__name__},
                remedy="make a new one",
            )

    def _refuse_long_rope(self, limit: int) -> None:
        """Refuse lengths at which transformers turns the rotary embedding of a whole pass: a batch holds both kinds."""
        most = self.shape.long_rope
        if 0 < most < limit:
            raise ArgumentError(
                f"the model's rotary embedding changes past {most} tokens for all rows of a pass, and rows may take {limit}",
                values={"max_model_len": limit, "original_max_position_embeddings": most},
                remedy=f"pass a max_model_len of at most {most}",
            )

    def _submit(self) -> bool:
        """Schedule a step and send it out; say whether there was one."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        if self.check:
            self.cache.check()
            self._sums.append(zlib.crc32(self.cache.snapshot()))
        self.executor.submit(step, check=self.check)
        return True

    def _finish(self) -> list[Event]:
        """Wait for the oldest step in flight, and take its tokens."""
        try:
            result = self.executor.result()
        except WorkerDied:
            self._deaths += 1
            if not self.restart or self._deaths > DEATHS:
                raise
            self.scheduler.start_over()
            self._sums.clear()
            self.executor.restart(self.cache.snapshot())
            return []
        if self.check:
            self._compare(result)
        events = self.scheduler.complete(result.tokens)
        self._deaths = 0 if events else self._deaths
        return events

    def _compare(self, result: Result) -> None:
        """Hold the workers' tables to the host's, bit for bit."""
        expected = self._sums.popleft()
        for worker, found in enumerate(result.checksums):
            if found != expected:
                raise LawBroken(
                    f"the tables of worker {worker} differ from the host's", law="L11", values={"worker": worker}
                )

    def close(self) -> None:
        """Stop the workers."""
        self._broken = self._broken or BlockTableError("it was closed")
        self.executor.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the workers."""
        self.close()


def plan_table(max_model_len: int, block_size: int, backend: str | None, engine_width: str | None) -> Geometry:
    """Plan a row, and let the backend's kernel judge the table that a release allocates for it."""
    contracts = [] if backend is None else [backend]
    geometry = plan(max_model_len=max_model_len, block_size=block_size, contracts=contracts, engine=engine_width)
    geometry.check((1, geometry.kernel_width))
    return geometry
