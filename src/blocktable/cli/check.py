"""`blocktable check`: whether a launch will be refused for its block tables, and what would mend it."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Final

import typer

from blocktable.cli import launch as lines
from blocktable.contracts import Release, resolve_engine
from blocktable.errors import ArgumentError
from blocktable.preflight import Judgement, Launch, find_release, judge, worst

__all__ = ["command"]

# The first word that is no option of ours begins the launch line, with or without "--" before it.
SETTINGS: Final = {"allow_interspersed_args": False}

_EXIT: Final[Mapping[str, int]] = {"accepted": 0, "refused": 1, "unknown": 3}
_LABEL: Final[Mapping[str, str]] = {"accepted": "accepted", "refused": "refused", "unknown": "not known"}
_COLOUR: Final[Mapping[str, str]] = {"accepted": "green", "refused": "red", "unknown": "yellow"}
# Up to vLLM 0.25.1 prefill context parallelism splits the rows too (v1/worker/block_table.py); from 0.26.0 only that of
# the decode does (v1/kv_cache_interface.py).
_PREFILL_SPLITS_BEFORE: Final = (0, 26)


def command(
    launch: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- vllm serve MODEL …]",
            help="A launch line, as words or as one quoted string; the options before it win over what it says.",
            show_default=False,
        ),
    ] = None,
    *,
    engine: Annotated[
        str | None,
        typer.Option(
            help="The release that allocates, such as vllm==0.19.1 or flashinfer==0.7.2.",
            show_default="the vLLM installed here, else the newest in the catalogue",
        ),
    ] = None,
    kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="A kernel package in place of the one that the release pins, such as flashinfer==0.7.2.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "--attention-backend",
            help="An attention backend; may be repeated or a list with commas: each is judged.",
            show_default=False,
        ),
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="The longest request in tokens; 9k is 9000, 9K is 9216.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block.", show_default="what the release takes by itself")
    ] = None,
    cp_size: Annotated[
        int | None,
        typer.Option(
            "--cp-size",
            "--decode-context-parallel-size",
            "-dcp",
            min=1,
            help="Ranks over which a row is split.",
            show_default="1",
        ),
    ] = None,
    lookahead: Annotated[
        int | None, typer.Option(min=0, help="Speculative tokens ahead of a request.", show_default="0")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say whether a launch would be refused for its block tables, before any weight is loaded.

    Two sides meet: the width that the engine's release allocates per row, and what the attention kernel of that release accepts. A refusal comes with the error that the server would stop with and with ways out, each of them judged too.

    Exit status: 0 accepted, 1 refused, 2 wrong usage or input, 3 not known, naming the missing fact.
    """
    line = lines.read_launch(launch) if launch else lines.Launch()
    named: list[str | None] = [name for one in backend or () for name in one.split(",") if name] or ([line.backend])
    length = line.max_model_len if max_model_len is None else lines.parse_length(max_model_len)
    versions = _kernel_versions(kernels or ())
    answers = []
    for name in named:
        release, assumed = find_release(engine, None if launch else name)
        if launch and release.engine != "vllm":
            raise ArgumentError(
                f"the launch line starts vLLM, not {release.engine}", remedy="give --engine vllm==VERSION"
            )
        answer = judge(
            Launch(
                release=release,
                backend=name,
                max_model_len=length,
                block_size=block_size or line.block_size,
                cp_size=cp_size or _ranks(line, release),
                cp_interleave=line.interleave,
                lookahead=line.speculative_tokens if lookahead is None else lookahead,
                kernels=versions,
            )
        )
        answer = replace(answer, assumed=(*assumed, *answer.assumed, *_wanted(line)))
        answers.append(_without_backend(answer, line) if name is None else answer)
    _show_json(answers) if as_json else _show(answers)
    return _EXIT[worst(answers).verdict]


def _kernel_versions(specs: Sequence[str]) -> dict[str, str]:
    releases = [resolve_engine(spec) for one in specs for spec in one.split(",")]
    return {release.engine: release.version for release in releases}


def _ranks(line: lines.Launch, release: Release) -> int:
    from packaging.version import Version  # noqa: PLC0415 - the catalogue has loaded it already

    splits = Version(release.data_version).release < _PREFILL_SPLITS_BEFORE
    return line.decode_context_parallel * (line.prefill_context_parallel if splits else 1)


def _wanted(line: lines.Launch) -> Iterator[str]:
    ranks = line.decode_context_parallel
    if line.prefill_context_parallel == 1 and line.tensor_parallel % ranks:
        yield f"a --tensor-parallel-size that {ranks} divides; vLLM refuses {line.tensor_parallel}"


def _without_backend(answer: Judgement, line: lines.Launch) -> Judgement:
    """Say more exactly why no backend is known."""
    if line.backend_per_kind:
        why = "--attention-config names one per kind of layer, and the model's kinds are not given"
    elif line.env_backend:
        why = f"VLLM_ATTENTION_BACKEND={line.env_backend} is ignored by vLLM since 0.15; write --attention-backend"
    else:
        return answer
    return replace(answer, missing=(f"backend (--backend): {why}", *answer.missing[1:]))


def _show_json(answers: Sequence[Judgement]) -> None:
    objects = [asdict(answer) | {"error": answer.error or None} for answer in answers]
    result = objects[answers.index(worst(answers))]
    if len(objects) > 1:
        result = result | {"judgements": objects}
    typer.echo(json.dumps(result, ensure_ascii=False))


def _show(answers: Sequence[Judgement]) -> None:
    """Print whole lines where nobody watches, and a wrapped and coloured table on a terminal."""
    if not sys.stdout.isatty():
        for answer in answers:
            first, *more = _lines(answer)
            typer.echo(f"{_LABEL[answer.verdict]:<10} {first}")
            for line in more:
                typer.echo(f"{'':<10} {line}")
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe gets plain text
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for answer in answers:
        first, *more = _lines(answer)
        table.add_row(Text(_LABEL[answer.verdict], style=f"bold {_COLOUR[answer.verdict]}"), Text(first))
        for line in more:
            table.add_row("", Text(line))
    Console().print(table)


def _lines(answer: Judgement) -> Iterator[str]:
    yield answer.reason
    for missing in answer.missing:
        yield f"missing: {missing}"
    if answer.error:
        yield f"the server would stop with: {answer.error}"
    if answer.ways_out:
        yield f"ways out, each checked: {' · '.join(answer.ways_out)}"
    elif answer.verdict == "refused":
        yield "no way out was found by changing one setting"
    if answer.padding:
        yield f"padding: {answer.padding} of {answer.kernel_width} kernel blocks per row"
    if answer.assumed:
        yield f"assumed: {'; '.join(answer.assumed)}"
