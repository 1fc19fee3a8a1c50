"""Write docs/backends.md from the catalogue: `python tools/backends_page.py`; a test fails when the page is stale."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from blocktable.contracts import Contract, get_contract, known_engines, known_versions
from blocktable.contracts.catalogue import Catalogue, Record
from blocktable.contracts.engines import catalogue
from blocktable.contracts.fields import describe_sizes

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "flashinfer": "FlashInfer"}

HEAD = """# Backends: what each demands of its block table

Generated from the catalogue by `python tools/backends_page.py`; `blocktable backends NAME` explains one. Widths count kernel
blocks, sizes count tokens. Known: `run` called, `read` in the source, `inferred` from other source, `carried` over from
another release.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for engine in sorted(known_engines(), key=list(TITLES).index):
        parts += _engine(catalogue(engine), TITLES[engine])
    return "\n".join(parts).rstrip() + "\n"


def _engine(data: Catalogue, title: str) -> Iterator[str]:
    newest = Version(known_versions(data.engine)[-1])
    yield f"## {title} {newest}\n"
    names = [name for name in data.releases[newest].backends if name in data.records]
    yield _rows(data, names, newest)
    unread = [f"`{name}`" for name in data.releases[newest].backends if name not in data.records]
    if unread:
        yield f"Not read yet: {', '.join(unread)}.\n"
    parts = [name for name, versions in data.parts.items() if newest in versions and name in data.records]
    if parts:
        yield f"### {title}: what layers bring themselves\n"
        yield _rows(data, parts, newest)
    if data.instead or data.aliases:
        yield f"### {title}: other names\n"
        yield from (f"- `{name}`: {use}" for name, use in data.instead.items())
        yield from (f"- `{alias}` is `{name}`" for alias, name in data.aliases.items())
        yield ""
    if data.priorities:
        yield f"### {title}: who runs when none is named\n"
        yield _table(("hardware", "model", "releases", "order"), _orders(data))
    yield f"### {title}: sources, and what bites all the same\n"
    for name in (*names, *parts):
        yield from _details(name, data.records[name])
    yield ""


def _rows(data: Catalogue, names: Iterable[str], version: Version) -> str:
    header = (
        "backend",
        "kernel blocks",
        "width",
        "default",
        "runs on",
        "head sizes",
        "KV cache",
        "context parallel",
        "known",
    )
    return _table(
        header,
        (
            _row(_resolved(record, version), _only(record), record.evidence(version))
            for name in names
            for record in data.records[name]
            if record.speaks_for(version)
        ),
    )


def _resolved(record: Record, version: Version) -> Contract:
    """Return the contract under the rule of the kernel package that it calls, if it calls one."""
    contract = record.contract
    if not record.calls:
        return contract
    hardware = contract.hardware[0].replace(".x", ".0")
    return get_contract(contract.name, engine=contract.engine, version=str(version), hardware=hardware)


def _only(record: Record) -> str:
    grouped = {True: ", only grouped queries", False: ", no grouped queries", None: ""}[record.only_grouped]
    grouped += ", only a quantized KV cache" if record.only_quantized else ""
    grouped += ", only MLA" if record.only_latent else ""
    return (f"only {_list(record.only_head_sizes)}" if record.only_head_sizes else "") + grouped


def _row(contract: Contract, only: str, evidence: str) -> tuple[str, ...]:
    heads = (_list(contract.head_sizes) or "any") + only if not only.startswith("only") else only
    if contract.max_head_size:
        heads = f"up to {contract.max_head_size}"
    sizes = describe_sizes(contract.kernel_block_sizes)
    if contract.fallback_block_size:
        sizes += f", else {contract.fallback_block_size}"
    return (
        f"`{contract.name}`",
        sizes,
        repr(contract.width_rule).replace("tokens=", "").removesuffix("()"),
        str(contract.default_block_size or "-"),
        ", ".join(contract.hardware) or "any",
        heads,
        _caches(contract),
        {True: "yes", False: "no", None: "not known"}[contract.context_parallel],
        evidence,
    )


def _caches(contract: Contract) -> str:
    """Write the dtypes of a KV cache that a backend takes, by hardware where that decides."""
    if not contract.kv_dtypes:
        return "not read"
    if len(contract.kv_dtypes) == 1:
        return ", ".join(contract.kv_dtypes[0][1])
    return "; ".join(f"{'else' if on == '*' else on}: {', '.join(some)}" for on, some in reversed(contract.kv_dtypes))


def _orders(data: Catalogue) -> Iterator[tuple[str, ...]]:
    for one in data.priorities:
        model = one.model.upper()
        if one.families:
            model = ", ".join(f"`{family}`" for family in one.families)
        if one.max_heads:
            model += f", at most {one.max_heads} heads per rank"
        if one.quantized:
            model += " or a quantized KV cache"
        if one.head_size:
            model += f", head size {one.head_size}"
        yield ", ".join(one.hardware), model, str(one.versions) or "all", " · ".join(one.order)


def _details(name: str, records: Iterable[Record]) -> Iterator[str]:
    told: set[str] = set()
    for record in records:
        contract = record.contract
        text = f"- `{name}`{f' ({contract.versions})' if contract.versions else ''}: {contract.source}"
        if record.calls:
            text += f"; judged by `{record.calls.engine}:{record.calls.name}`"
        if text not in told:
            yield text
        told.add(text)
        notes = [*contract.pitfalls, *(f"wrong answers: {contract.wrong_why}" for _ in contract.wrong_blocks[:1])]
        yield from (f"    - {note}" for note in notes if note not in told)
        told.update(notes)


def _list(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
