"""`blocktable backends`: what each attention backend demands of its block table, as a list or one explained."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from blocktable.cli.flags import parse_count
from blocktable.cli.output import Row, print_columns, print_rows
from blocktable.contracts import (
    Contract,
    Release,
    get_contract,
    known_engines,
    known_versions,
    list_contracts,
    resolve_engine,
)
from blocktable.contracts.fields import describe_sizes
from blocktable.errors import ArgumentError, BlockTableError, UnknownName
from blocktable.preflight import Judgement, Launch, find_release, judge

__all__ = ["command", "options"]

_LENGTH, _BLOCK = 9416, 32  # the example of every explanation


def options(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "List what each attention backend of a release demands of its block table, or explain one: its rule, what it "
        "makes of 9416 tokens in blocks of 32, its source, how the rule is known, and what bites all the same."
    )
    parser.epilog = "exit status: 0 listed, 1 an installed engine differs from the catalogue, 2 wrong usage or input"
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="the backend to explain")
    add(
        "--engine",
        metavar="RELEASE",
        help="such as vllm==0.19.1; without it the newest of every engine, or of the engine that has NAME",
    )
    add("--block-size", metavar="TOKENS", help="list those that take blocks of that size, whole or split")
    add(
        "--installed",
        action="store_true",
        help="ask the vLLM, FlashInfer and SGLang installed here, and list everything in which they differ from the catalogue",
    )
    add("--json", dest="as_json", action="store_true", help="print one JSON array, or an object for NAME")
    add("--quiet", "-q", action="store_true", help="names alone, one a line; with --installed only what differs")


def command(
    *, name: str | None, engine: str | None, block_size: str | None, installed: bool, as_json: bool, quiet: bool
) -> int:
    """List the backends, or explain the one named, or hold the catalogue against what is installed."""
    if installed:
        return _installed(as_json=as_json, quiet=quiet)
    _list_or_explain(name=name, engine=engine, block_size=block_size, as_json=as_json, quiet=quiet)
    return 0


def _installed(*, as_json: bool, quiet: bool) -> int:
    from blocktable.preflight.installed import interrogate  # noqa: PLC0415 - it imports an engine

    found = list(interrogate())
    if not found:
        raise ArgumentError(
            "no vLLM is installed here, nor FlashInfer or SGLang", remedy="run this with the Python that has one"
        )
    differ = [finding for finding in found if finding.differs]
    if as_json:
        print(json.dumps([finding._asdict() for finding in found], ensure_ascii=False))  # noqa: T201 - a command's output
        return 1 if differ else 0
    rows = [Row(finding.subject, finding.differs, "red") for finding in differ]
    if quiet:
        print_rows(rows)
        return 1 if differ else 0
    rows += [Row(one.subject, f"not compared: {one.skipped}", "yellow") for one in found if one.skipped]
    for engine, several in groupby(found, key=lambda finding: finding.engine):
        some = list(several)
        apart, left = sum(bool(one.differs) for one in some), sum(bool(one.skipped) for one in some)
        rows.append(Row(engine, f"{len(some) - apart - left} agree, {apart} differ, {left} not compared", "cyan"))
    print_rows(rows)
    return 1 if differ else 0


def _list_or_explain(
    *, name: str | None, engine: str | None, block_size: str | None, as_json: bool, quiet: bool
) -> None:
    block = None if block_size is None else parse_count(block_size, "--block-size")
    if name is not None:
        _explain(name, engine, as_json=as_json, quiet=quiet)
        return
    releases = [resolve_engine(one) for one in ([engine] if engine else known_engines())]
    found = [
        (release, contract)
        for release in releases
        for contract in list_contracts(release.engine, version=release.version)
        if block is None or _takes(release, contract, block)
    ]
    unread = [
        (release, name)
        for release in releases
        for name in release.backends
        if block is None and name not in {contract.name for _, contract in found}
    ]
    if as_json:
        objects = [_as_object(release, contract) for release, contract in found]
        objects += [{"engine": str(release), "name": name, "evidence": None} for release, name in unread]
        print(json.dumps(objects, ensure_ascii=False))  # noqa: T201 - a command's output
        return
    if quiet:
        print("\n".join([contract.name for _, contract in found] + [name for _, name in unread]))  # noqa: T201
        return
    lines: list[tuple[str, ...]] = [
        ("BACKEND", "ENGINE", "KERNEL BLOCKS", "WIDTH", "HARDWARE", "CONTEXT PARALLEL", "KNOWN")
    ]
    lines += [_line(release, contract) for release, contract in found]
    lines += [(name, str(release), "?", "?", "?", "?", "not yet") for release, name in unread]
    print_columns(lines)


def _takes(release: Release, contract: Contract, block: int) -> bool:
    answer = judge(Launch(release, contract.name, block_size=block))
    return (
        answer.verdict != "refused" and answer.block_size == block
    )  # an engine that takes another in its place does not


def _line(release: Release, contract: Contract) -> tuple[str, ...]:
    return (
        contract.name,
        str(release),
        describe_sizes(contract.kernel_block_sizes),
        _rule(contract),
        _hardware(contract),
        _context_parallel(contract),
        contract.evidence,
    )


def _rule(contract: Contract) -> str:
    return repr(contract.width_rule).replace("tokens=", "").removesuffix("()")


def _hardware(contract: Contract) -> str:
    return ", ".join(contract.hardware) or "any"


def _context_parallel(contract: Contract) -> str:
    if contract.context_parallel is None:
        return "not known"
    most = f", interleave up to {contract.cp_max_interleave}" if contract.cp_max_interleave else ""
    return f"yes{most}" if contract.context_parallel else "no"


def _explain(name: str, engine: str | None, *, as_json: bool, quiet: bool) -> None:
    release, _ = find_release(engine, name)
    contract = get_contract(name, engine=release.engine, version=release.version or None)
    example = _example(release, contract)
    history = list(_history(release, contract.name))
    if quiet and not as_json:
        print(contract.name)  # noqa: T201 - a command's output
        return
    if as_json:
        told = {"example": example and {"verdict": example.verdict, "reason": example.reason, "error": example.error}}
        print(json.dumps(_as_object(release, contract) | told | {"history": history}, ensure_ascii=False))  # noqa: T201
        return
    print_rows(list(_rows(release, contract, example, history)))


def _example(release: Release, contract: Contract) -> Judgement | None:
    try:
        return judge(Launch(release, contract.name, max_model_len=_LENGTH, block_size=_BLOCK))
    except BlockTableError:
        return None


def _rows(release: Release, contract: Contract, example: Judgement | None, history: Sequence[str]) -> Iterator[Row]:
    yield Row(contract.name, f"in {release}" if release.version else f"of {release.engine}", "cyan")
    yield Row("kernel blocks", f"{describe_sizes(contract.kernel_block_sizes)} tokens")
    if contract.manager_block_sizes:
        yield Row("manager blocks", f"{describe_sizes(contract.manager_block_sizes)} tokens")
    if contract.default_block_size:
        yield Row("default", f"blocks of {contract.default_block_size} tokens when none are asked for")
    yield Row("width rule", _rule(contract))
    if example is not None:
        yield Row(f"at {_LENGTH} / {_BLOCK}", f"{example.verdict}: {example.reason}")
        if example.error:
            yield Row("", example.error)
    if contract.error_text:
        yield Row(
            "error", f"{contract.raised}: {contract.error_text}" + (f" ({contract.where})" if contract.where else "")
        )
    yield Row("table", f"{contract.layout}, {contract.dtype}, strides: {contract.strides}, tail: {contract.tail}")
    yield Row("hardware", _hardware(contract))
    for index, (on, dtypes) in enumerate(contract.kv_dtypes):
        where = "" if len(contract.kv_dtypes) == 1 else f" on {'other hardware' if on == '*' else on}"
        yield Row("" if index else "KV cache", ", ".join(dtypes) + where)
    yield Row("context parallel", _context_parallel(contract))
    yield Row("source", contract.source or "not given")
    yield Row("known by", contract.evidence + (f", {contract.date}" if contract.date else ""))
    for index, one in enumerate(history):
        yield Row("" if index else "releases", one)
    for index, one in enumerate(contract.pitfalls):
        yield Row("" if index else "pitfalls", one)


def _history(release: Release, name: str) -> Iterator[str]:
    """Yield one sentence for each run of releases in which the backend demands the same."""
    if not release.version:
        return
    versions = known_versions(release.engine)
    told = {version: _demand(release.engine, version, name) for version in versions}
    for demand, run in groupby(versions, key=told.__getitem__):
        first, *rest = run
        yield f"{release.engine} {first}{f' to {rest[-1]}' if rest else ''}: {demand}"


def _demand(engine: str, version: str, name: str) -> str:
    try:
        contract = get_contract(name, engine=engine, version=version)
    except UnknownName:
        return "does not exist"
    sizes = describe_sizes(contract.kernel_block_sizes)
    return f"{_rule(contract)}, kernel blocks of {sizes}, context parallel: {_context_parallel(contract)}"


def _as_object(release: Release, contract: Contract) -> dict[str, Any]:
    return {
        "engine": str(release),
        "name": contract.name,
        "kernel_block_sizes": [str(size) for size in contract.kernel_block_sizes],
        "manager_block_sizes": [str(size) for size in contract.manager_block_sizes],
        "default_block_size": contract.default_block_size,
        "width_rule": _rule(contract),
        "layout": contract.layout,
        "dtype": contract.dtype,
        "strides": contract.strides,
        "tail": contract.tail,
        "hardware": list(contract.hardware),
        "kv_dtypes": {on: list(dtypes) for on, dtypes in contract.kv_dtypes},
        "context_parallel": contract.context_parallel,
        "error_text": contract.error_text,
        "raised": contract.raised,
        "source": contract.source,
        "evidence": contract.evidence,
        "date": contract.date,
        "pitfalls": list(contract.pitfalls),
    }
