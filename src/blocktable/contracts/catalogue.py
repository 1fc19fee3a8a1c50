"""Read a data file of contracts: TOML, one file per engine, every field validated at load.

Wrong data raises `CatalogueError` naming the file, the line, the entry and the field.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from blocktable.contracts.contract import Contract, Evidence, Layout, OffsetType, Strides, Tail
from blocktable.contracts.releases import Release, WidthPolicy
from blocktable.contracts.rules import parse_rule, parse_size
from blocktable.errors import ArgumentError, CatalogueError

__all__ = ["Call", "Catalogue", "Priority", "Record", "Sinks", "read_catalogue", "read_entries"]


_EVIDENCE: tuple[Evidence, ...] = ("run", "read", "inferred")
"""From strongest to weakest; an entry names the versions for each."""


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kernel package and entry point to which a backend hands its table: the rule is declared there, once."""

    engine: str
    name: str


class _Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[backend]]`` entry as written."""

    name: str
    versions: str = ""
    kernel_block_sizes: list[int | str] = []
    manager_block_sizes: list[int | str] = []
    default_block_size: int | None = None
    width_rule: str = "AnyWidth"
    min_width: int = 0
    max_table_bytes: int | None = None
    layout: Layout = "dense"
    tail: Tail = "ignored"
    strides: Strides = "any"
    dtype: str = "int32"
    offset_type: OffsetType = "int32"
    hardware: list[str] = []
    head_sizes: list[int] = []
    max_head_size: int | None = None
    only_head_sizes: list[int] = []
    only_grouped: bool | None = None
    only_quantized: bool | None = None
    only_latent: bool | None = None
    kv_dtypes: dict[str, list[str]] = {}
    qk_nope_head_sizes: list[int] = []
    unsuited: dict[str, str] = {}
    context_parallel: bool | None = None
    cp_max_interleave: int | None = None
    cp_drafts_interleave: bool = False
    fallback_block_size: int | None = None
    width_policy: WidthPolicy | None = None
    wrong_blocks: list[int | str] = []
    wrong_why: str = ""
    error_text: str = ""
    raised: str = ""
    where: str = ""
    refusals: dict[str, str] = {}
    width_first: bool = False
    source: str = ""
    run: str | None = None
    read: str | None = None
    inferred: str | None = None
    date: str = ""
    pitfalls: list[str] = []
    calls: Call | None = None


class _Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[release]]`` entry as written."""

    version: str
    width: WidthPolicy = "native"
    default_block_size: int | None = None
    prefill_ranks_divide: bool = False
    aligns_state: bool = False
    divides_state: bool = False
    common_default: bool = False
    match_unit_is_block: bool = False
    caches_state: bool = False
    counts_in_flight: bool = False
    reserves_null: bool = False
    fits_state: bool = False
    fits_chunks: bool = False
    fills_states: bool = False
    counts_drafts: bool = False
    requires: dict[str, str] = {}
    evidence: Evidence = "read"
    source: str = ""


class _Priority(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[priority]]`` entry as written: the order in which a release tries backends."""

    model: Literal["gqa", "mla"]
    hardware: list[str]
    order: list[str]
    versions: str = ""
    families: list[str] = []
    max_heads: int | None = None
    quantized: bool = False
    head_size: int | None = None


class _Sinks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[sinks]]`` entry as written: on which hardware a backend takes attention sinks; one that is not named takes none."""

    name: str
    hardware: list[str]
    versions: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole data file as written."""

    engine: str
    packages: list[str] = []
    named_last: bool = False
    release: list[_Release] = []
    exists: dict[str, str] = {}
    parts: dict[str, str] = {}
    aliases: dict[str, str] = {}
    instead: dict[str, str] = {}
    refusals: dict[str, str] = {}
    backend: list[_Backend] = []
    priority: list[_Priority] = []
    sinks: list[_Sinks] = []


@dataclass(frozen=True)
class Record:
    """A contract, the versions it speaks for, how it is known in which of them, and the call that its backend makes.

    With ``only_head_sizes`` it speaks for models of those head sizes alone, with ``only_grouped`` for those with grouped
    queries, or without, with ``only_quantized`` for KV caches in 8 bits or fewer, or others,
    with ``only_latent`` for models that cache a latent (MLA), or others.
    """

    contract: Contract
    versions: SpecifierSet
    only_head_sizes: tuple[int, ...]
    only_grouped: bool | None
    only_quantized: bool | None
    only_latent: bool | None
    known: tuple[tuple[Evidence, SpecifierSet], ...]
    calls: Call | None

    @property
    def special(self) -> bool:
        """Whether it speaks for some models alone."""
        others = (self.only_grouped, self.only_quantized, self.only_latent)
        return bool(self.only_head_sizes) or any(one is not None for one in others)

    def suits(self, head_size: int | None, grouped: bool | None, quantized: bool | None, latent: bool | None) -> bool:
        """Whether it speaks for such a model and for such a KV cache."""
        return (
            (not self.only_head_sizes or head_size in self.only_head_sizes)
            and self.only_grouped in (None, grouped)
            and self.only_quantized in (None, quantized)
            and self.only_latent in (None, latent)
        )

    def speaks_for(self, version: Version) -> bool:
        """Whether the version lies in the range."""
        return self.versions.contains(version, prereleases=True)

    def evidence(self, version: Version) -> Evidence:
        """Return how the rule is known in a version: the strongest that holds there, else carried from another one."""
        for evidence, versions in self.known:
            if self.speaks_for(version) and versions.contains(version, prereleases=True):
                return evidence
        return "carried"


@dataclass(frozen=True)
class Priority:
    """The order in which releases try backends for a kind of model on some hardware.

    With ``families`` for models of those types alone, with ``max_heads`` for models of at most so many heads per rank, with ``quantized`` for a KV cache in 8 bits or fewer
    whatever the heads, with ``head_size`` for that head size alone.
    """

    versions: SpecifierSet
    model: Literal["gqa", "mla"]
    hardware: tuple[str, ...]
    order: tuple[str, ...]
    families: tuple[str, ...]
    max_heads: int | None
    quantized: bool
    head_size: int | None


@dataclass(frozen=True)
class Sinks:
    """Where a backend takes attention sinks, in those releases: hardware patterns, ``"*"`` for all."""

    name: str
    versions: SpecifierSet
    hardware: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue:
    """One data file, read: releases ascending, records by name, existence ranges by name, aliases.

    ``parts`` are backends that layers of a model bring themselves, which nobody can select; ``instead`` says of names
    that an engine has or had, and that select nothing, what to use; ``refusals`` are texts that entries inherit. ``named_last``: a bare name means this engine only
    where no other has it.
    """

    engine: str
    packages: tuple[str, ...]
    named_last: bool
    releases: Mapping[Version, Release]
    records: Mapping[str, tuple[Record, ...]]
    exists: Mapping[str, SpecifierSet]
    parts: Mapping[str, SpecifierSet]
    aliases: Mapping[str, str]
    instead: Mapping[str, str]
    refusals: Mapping[str, str]
    priorities: tuple[Priority, ...]
    sinks: tuple[Sinks, ...]


def read_catalogue(text: str, file: str, *, names: Iterable[str] = ()) -> Catalogue:
    """Read and validate the text of a data file; ``file`` is its name for errors. Cost: linear, tens of milliseconds.

    ``names`` are backends whose entries are kept elsewhere.
    """
    where = _Where(text, file)
    data = _decode(text, file, where)
    records = _records(data, data.refusals, where)
    parts = {name: where.range(versions, "parts", None, name) for name, versions in data.parts.items()}
    exists = {name: SpecifierSet() for name in (*names, *records) if name not in parts}
    exists |= {name: where.range(versions, "exists", None, name) for name, versions in data.exists.items()}
    for alias, name in data.aliases.items():
        if name not in exists:
            where.fail("aliases", None, alias, f"{name!r} is no backend of this file")
    return Catalogue(
        engine=data.engine,
        packages=tuple(data.packages),
        named_last=data.named_last,
        releases=_releases(data, exists, where),
        records=records,
        exists=exists,
        parts=parts,
        aliases=data.aliases,
        instead=data.instead,
        refusals=data.refusals,
        priorities=tuple(_priority(one, exists, where, index) for index, one in enumerate(data.priority)),
        sinks=tuple(_sinks(one, exists, where, index) for index, one in enumerate(data.sinks)),
    )


def read_entries(text: str, file: str, refusals: Mapping[str, str]) -> tuple[Record, ...]:
    """Return the records of the entries of one backend, from text that holds them and the engine's name alone."""
    where = _Where(text, file)
    (records,) = _records(_decode(text, file, where), refusals, where).values()
    return records


def _decode(text: str, file: str, where: "_Where") -> _File:
    try:
        return msgspec.toml.decode(text, type=_File)
    except msgspec.ValidationError as error:
        where.fail_at(str(error))
    except msgspec.DecodeError as error:
        raise CatalogueError(f"{file}: not valid TOML: {error}", values={"file": file}) from None


def _records(data: _File, refusals: Mapping[str, str], where: "_Where") -> dict[str, tuple[Record, ...]]:
    records: dict[str, tuple[Record, ...]] = {}
    for index, backend in enumerate(data.backend):
        records[backend.name] = (*records.get(backend.name, ()), _record(backend, data.engine, refusals, where, index))
    return records


def _priority(written: _Priority, exists: Mapping[str, SpecifierSet], where: "_Where", index: int) -> Priority:
    for name in written.order:
        if name not in exists:
            where.fail("priority", index, "order", f"{name!r} is no backend of this file")
    return Priority(
        versions=where.range(written.versions, "priority", index, "versions"),
        model=written.model,
        hardware=tuple(written.hardware),
        order=tuple(written.order),
        families=tuple(written.families),
        max_heads=written.max_heads,
        quantized=written.quantized,
        head_size=written.head_size,
    )


def _sinks(written: _Sinks, exists: Mapping[str, SpecifierSet], where: "_Where", index: int) -> Sinks:
    if written.name not in exists:
        where.fail("sinks", index, "name", f"{written.name!r} is no backend of this file")
    return Sinks(
        name=written.name,
        versions=where.range(written.versions, "sinks", index, "versions"),
        hardware=tuple(written.hardware),
    )


def _releases(data: _File, exists: Mapping[str, SpecifierSet], where: "_Where") -> dict[Version, Release]:
    written: dict[Version, _Release] = {}
    for index, release in enumerate(data.release):
        version = where.version(release.version, index)
        if version in written:
            where.fail("release", index, "version", f"{release.version} is listed twice")
        written[version] = release
    newest = max(written, default=None)
    return {
        version: _release(data.engine, one, newest=version == newest, backends=_existing(exists, version))
        for version, one in sorted(written.items())
    }


def _release(engine: str, written: _Release, *, newest: bool, backends: tuple[str, ...]) -> Release:
    """Return a release with what is written of it, each field under its own name but for the width's."""
    fields = msgspec.structs.asdict(written)
    return Release(
        engine=engine,
        data_version=written.version,
        newest=newest,
        extrapolated=False,
        width_policy=fields.pop("width"),
        backends=backends,
        **fields,
    )


def _existing(exists: Mapping[str, SpecifierSet], version: Version) -> tuple[str, ...]:
    names = [name for name, versions in exists.items() if versions.contains(version, prereleases=True)]
    return tuple(sorted(names, key=lambda name: ("." in name, name)))  # an entry point's own backends come last


def _record(backend: _Backend, engine: str, refusals: Mapping[str, str], where: "_Where", index: int) -> Record:
    fields = {name: getattr(backend, name) for name in backend.__struct_fields__}
    calls, name, heads = fields.pop("calls"), fields.pop("name"), tuple(fields.pop("only_head_sizes"))
    grouped, quantized, latent = (fields.pop(f"only_{what}") for what in ("grouped", "quantized", "latent"))
    # An entry's empty text takes back the text that the file gives for all.
    fields["refusals"] = {check: text for check, text in (dict(refusals) | fields["refusals"]).items() if text}
    known = tuple(
        (evidence, where.range(versions, "backend", index, evidence))
        for evidence in _EVIDENCE
        if (versions := fields.pop(evidence)) is not None
    )
    field = "name"
    try:
        for field in ("kernel_block_sizes", "manager_block_sizes", "wrong_blocks"):
            fields[field] = tuple(parse_size(size) for size in fields[field])
        field = "width_rule"
        fields[field] = parse_rule(fields[field])
        contract = Contract(name, engine=engine, evidence=known[0][0] if known else "read", **fields)
    except ArgumentError as error:
        # Contract itself says which field it refuses, as the first word of its message or in its values.
        named = next((key for key in fields if key in error.values or error.message.startswith(key)), field)
        where.fail("backend", index, named, error.message)
    return Record(
        contract,
        where.range(backend.versions, "backend", index, "versions"),
        heads,
        grouped,
        quantized,
        latent,
        known,
        calls,
    )


class _Where:
    """Turns a table, the number of its entry and a field into file, line and entry for errors."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file

    def fail_at(self, message: str) -> NoReturn:
        """Raise for one of msgspec's messages, which end in a path such as ``$.backend[3].min_width``."""
        problem, _, path = message.rpartition(" - at `")
        problem = problem or message
        match = re.match(r"\$\.(\w+)(?:\[(\d+)\])?(?:\.(\w+))?", path)
        named = re.search(r"field `(\w+)`", problem)
        table, number, field = match.groups() if match else ("", None, None)
        index = None if number is None else int(number)
        self.fail(table or "", index, field or (named[1] if named else ""), problem)

    def fail(self, table: str, index: int | None, field: str, problem: str) -> NoReturn:
        lines = self._lines()
        line = lines.get((table, index, field)) or lines.get((table, index, "")) or lines.get(("", None, table))
        entry = f"[[{table}]] {index + 1}" if index is not None else f"[{table}]" if table else "top level"
        place = f"{self.file}:{line}" if line else self.file
        raise CatalogueError(
            f"{place}: {entry}: {field or 'entry'}: {problem}",
            values={"file": self.file, "line": line, "entry": entry, "field": field},
        )

    def _lines(self) -> dict[tuple[str, int | None, str], int]:
        """Line numbers of every table header (field "") and of every key's first mention below it."""
        found: dict[tuple[str, int | None, str], int] = {}
        counts: dict[str, int] = {}
        table, index = "", None
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
                table, index = header[2], None
                if header[1] == "[[":
                    index = counts[table] = counts.get(table, -1) + 1
                found[table, index, ""] = number
            elif key := re.match(r"\s*[\"']?([\w-]+)[\w.\"'-]*\s*=", line):
                found.setdefault((table, index, key[1]), number)
        return found

    def version(self, text: str, index: int) -> Version:
        try:
            return Version(text)
        except InvalidVersion:
            self.fail("release", index, "version", f"{text!r} is no version")

    def range(self, text: str, table: str, index: int | None, field: str) -> SpecifierSet:
        try:
            return SpecifierSet(text)
        except InvalidSpecifier:
            self.fail(table, index, field, f"{text!r} is no version range")
