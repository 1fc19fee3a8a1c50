"""`blocktable run`: answer prompts with a real model, through block tables under a kernel's contract."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from blocktable.cli.output import INTERRUPTED, Row, print_rows
from blocktable.errors import ArgumentError, BlockTableError, ContractError
from blocktable.geometry import plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blocktable.engine import Engine, Request

__all__ = ["command"]


def command(
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="A local folder with a Hugging Face model.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default="stdin")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: {"prompt": …} or {"messages": […]}, with max_tokens and the like; - is stdin.'),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt that all prompts share.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, above temperature 0.")] = 0,
    backend: Annotated[
        str | None, typer.Option(help="The kernel whose table contract is enforced, such as FLASHINFER_MLA.")
    ] = None,
    engine_width: Annotated[
        str | None, typer.Option(help="Allocate rows as wide as that release does, such as vllm==0.19.1.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row.", show_default="the model's positions")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=2, help="Blocks of the pool, the null block included.", show_default="16384 tokens or one row"
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens that a step computes at most.")] = 512,
    draft: Annotated[int, typer.Option(min=0, help="Tokens guessed per step by prompt lookup, and verified.")] = 0,
    sync: Annotated[bool, typer.Option("--sync", help="Schedule each step when the one before is done.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that follow by deltas; 0: a thread.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Start a worker that dies again, and go on.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="as the weights are stored")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Verify the laws, and every worker's tables, at every step.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The answers alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when all is answered.")] = False,
) -> None:
    """Answer prompts with a language model whose attention reads through checked block tables.

    Prints the answers as they come, in the order of the prompts, then what the cache did. Exit status: 0 answered, 1 a
    table refused by the kernel, a law broken or a worker that died, 2 wrong usage or input, 130 interrupted, with the
    counts so far.
    """
    try:
        if max_model_len is not None:
            _plan(max_model_len, block_size, backend, engine_width)  # a refused launch loads nothing
        asked = _asked(prompt or [], prompts, system)
        engine = _engine(
            model,
            dtype,
            backend=backend,
            engine_width=engine_width,
            block_size=block_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            max_rows=max_rows,
            token_budget=token_budget,
            draft=draft,
            ahead=not sync,
            check=check,
            workers=workers,
            restart=restart,
        )
    except (BlockTableError, OSError, ImportError) as error:
        _stop(error)
    with engine:
        for note in engine.notes:
            typer.echo(f"note: {note}", err=True)
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        raise typer.Exit(Run(engine, asked, options, quiet=quiet, as_json=as_json).answer())


def _plan(max_model_len: int, block_size: int, backend: str | None, engine_width: str | None) -> None:
    contracts = [] if backend is None else [backend]
    geometry = plan(max_model_len=max_model_len, block_size=block_size, contracts=contracts, engine=engine_width)
    geometry.check((1, geometry.kernel_width))


def _engine(model: Path | None, dtype: str | None, **options: Any) -> "Engine":
    try:
        import torch  # noqa: PLC0415 - a refused launch does without

        from blocktable.engine import Engine  # noqa: PLC0415
        from blocktable.engine.smollm2 import smollm2  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError(
            f"run needs torch and transformers: {error}", remedy="pip install 'blocktable[hf]'"
        ) from None
    if dtype not in (None, "float32", "bfloat16"):
        raise ArgumentError(f"unknown dtype {dtype!r}", remedy="use float32 or bfloat16")
    return Engine(model or smollm2(), dtype=getattr(torch, dtype) if dtype else None, **options)


def _stop(error: Exception) -> NoReturn:
    """Say why nothing is answered: the kernel's own error in its own words, anything else in ours."""
    if isinstance(error, ContractError):
        raised = error.values.get("raised")
        typer.echo(f"{raised}: {error}" if raised else f"blocktable run: {error}", err=True)
        raise typer.Exit(1)
    text = f"cannot read {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    typer.echo(f"blocktable run: {text}", err=True)
    raise typer.Exit(2)


def _asked(texts: list[str], path: Path | None, system: str | None) -> list[dict[str, Any]]:
    """Return what is asked: chat messages each, and options of its own."""
    asked: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    if path is not None:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8", errors="replace")
        lines = enumerate(text.splitlines(), 1)
        asked += [_line(str(path), number, line) for number, line in lines if line.strip()]
    elif not asked and not sys.stdin.isatty():
        asked = [{"prompt": sys.stdin.read().strip()}]
    if not asked or not all(one.get("prompt") or one.get("messages") for one in asked):
        raise ArgumentError("there is no prompt", remedy="pass --prompt TEXT, --prompts FILE, or text on stdin")
    for one in asked:
        if "messages" not in one:
            one["messages"] = [{"role": "user", "content": one["prompt"]}]
        if system is not None:
            one["messages"] = [{"role": "system", "content": system}, *one["messages"]]
    return asked


def _line(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"{path} line {number} is no JSON: {error}") from None
    if isinstance(found, str):
        found = {"prompt": found}
    known: dict[str, Any] = {
        "prompt": str,
        "messages": list,
        "max_tokens": int,
        "temperature": (int, float),
        "seed": int,
    }
    if not isinstance(found, dict) or not ({"prompt", "messages"} & found.keys()):
        raise ArgumentError(
            f"{path} line {number} has no prompt", remedy='write {"prompt": "…"} or {"messages": [...]}'
        )
    for name, value in found.items():
        if name not in known or not isinstance(value, known[name]) or isinstance(value, bool):
            raise ArgumentError(
                f"{path} line {number}: {name} is {value!r}",
                values={"line": number, "name": name},
                remedy=f"give {', '.join(known)} only, each of its own type",
            )
    if not all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in found.get("messages", ())):
        raise ArgumentError(
            f"{path} line {number}: a message has no content", remedy='write {"role": "user", "content": "…"}'
        )
    return found


class Run:
    """One run: it feeds the engine, prints what comes back, and sums up."""

    def __init__(
        self, engine: "Engine", asked: list[dict[str, Any]], options: dict[str, Any], *, quiet: bool, as_json: bool
    ) -> None:
        self.engine, self.asked, self.options = engine, asked, options
        self.quiet, self.as_json = quiet, as_json
        self.tokens: list[list[int]] = []
        self.done: list[bool] = []
        self.titles: list[str] = []
        self.current, self.shown = 0, ""
        self.refused = 0

    def answer(self) -> int:
        """Serve all prompts and return the exit code."""
        code, started = 0, time.perf_counter()
        try:
            requests = list(self._requests())
            started = time.perf_counter()
            for event in self.engine.stream(requests):
                self.tokens[event.request].append(event.token)
                self.done[event.request] = bool(event.finish)
                if not self.as_json:
                    self._show()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BlockTableError as error:
            typer.echo(f"\nblocktable run: {error}", err=True)
            code = 1
        self._sum_up(time.perf_counter() - started, interrupted=code == INTERRUPTED)
        return code or (2 if self.refused else 0)

    def _requests(self) -> "Iterator[Request]":
        """Encode the prompts; those that no row could hold are named and left out."""
        for one in self.asked:
            options = self.options | {name: one[name] for name in self.options if name in one}
            try:
                request = self.engine.request(one["messages"], **options)
                self.engine.scheduler.refuse(request)
            except ArgumentError as error:
                typer.echo(f"blocktable run: {_title(one)!r}: {error}", err=True)
                self.refused += 1
                continue
            self.tokens.append([])
            self.done.append(False)
            self.titles.append(_title(one))
            yield request

    def _show(self) -> None:
        """Print what is new of the first answer that is not printed whole, and go on to the next when it is done."""
        while self.current < len(self.tokens) and self.tokens[self.current]:
            if not self.shown and len(self.titles) > 1:
                typer.echo(f"> {self.titles[self.current]}")
            text = self.engine.tokenizer.decode(self.tokens[self.current], skip_special_tokens=True)
            whole = self.done[self.current]
            if not whole and text.endswith("\ufffd"):
                return  # the rest of a character is still to come
            sys.stdout.write(text[len(self.shown) :])
            sys.stdout.flush()
            self.shown = text or " "
            if not whole:
                return
            typer.echo("\n")
            self.current, self.shown = self.current + 1, ""

    def _sum_up(self, seconds: float, *, interrupted: bool) -> None:
        engine = self.engine
        stats, scheduler = engine.cache.stats(), engine.scheduler
        count = sum(map(len, self.tokens))
        hit, query = stats["hit_tokens"], stats["query_tokens"]
        usable = engine.cache.num_blocks - 1
        answered = f"{sum(self.done)} of {len(self.asked)}"
        if self.as_json:
            typer.echo(json.dumps(self._counted(seconds, interrupted=interrupted), ensure_ascii=False))
            return
        if self.tokens and not (self.current == len(self.tokens) or not self.shown):
            typer.echo("")
        if self.quiet:
            return
        rows = [
            Row("answered", answered + (", interrupted" if interrupted else "")),
            Row("tokens", f"{count} generated in {seconds:.1f} s, {count / max(seconds, 1e-9):.1f} tokens per second"),
            Row("prefixes", f"{100 * hit / max(query, 1):.1f} % hit, {hit} of {query} tokens"),
            Row("preemptions", f"{scheduler.preemptions}"),
            Row("blocks", f"peak {scheduler.peak_blocks} of {usable}"),
            Row("entries", f"{stats['cells_written']} committed in {scheduler.steps} steps"),
            Row("kernel", engine.describe_kernel()),
        ]
        if scheduler.draft:
            rows.append(Row("drafts", f"{scheduler.accepted} of {scheduler.guessed} tokens guessed right"))
        if engine.check:
            rows.append(Row("laws", f"verified at {scheduler.steps} steps, with the tables of every worker"))
        print_rows(rows)

    def _counted(self, seconds: float, *, interrupted: bool) -> dict[str, Any]:
        """Return every answer and every count; an answer that is not ``done`` was interrupted."""
        engine = self.engine
        scheduler, decode = engine.scheduler, engine.tokenizer.decode
        return {
            "answers": [
                {"prompt": title, "text": decode(tokens, skip_special_tokens=True), "tokens": len(tokens), "done": done}
                for title, tokens, done in zip(self.titles, self.tokens, self.done, strict=True)
            ],
            "asked": len(self.asked),
            "interrupted": interrupted,
            "seconds": seconds,
            "steps": scheduler.steps,
            "preemptions": scheduler.preemptions,
            "peak_blocks": scheduler.peak_blocks,
            "num_blocks": engine.cache.num_blocks,
            "guessed": scheduler.guessed,
            "accepted": scheduler.accepted,
            "kernel": engine.describe_kernel(),
            "stats": engine.cache.stats(),
        }


def _title(one: dict[str, Any]) -> str:
    text = " ".join(str(one.get("prompt") or one["messages"][-1].get("content", "")).split())
    return text if len(text) <= 80 else text[:79] + "…"
