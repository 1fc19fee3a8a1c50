"""Judge one launch: block size, context parallelism, then the width that is allocated against the width that is accepted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blocktable.contracts import Contract, Release
from blocktable.contracts.contract import common_kernel_block
from blocktable.contracts.hardware import runs_on
from blocktable.errors import ContractError, GeometryError, UnknownName
from blocktable.geometry import Geometry, plan
from blocktable.preflight.choice import choose, refused_reasons
from blocktable.preflight.completion import companions, complete, is_part, own_block_size
from blocktable.preflight.groups import Group, groups_of
from blocktable.preflight.hybrid import block_that_holds_a_state
from blocktable.preflight.launch import Launch, is_unread
from blocktable.preflight.memory import Memory, Unknown, longest_that_fits, measure
from blocktable.preflight.pool import memory_problem, pool_problem, ranks_problem

__all__ = ["Judgement", "Verdict", "allocated", "assess", "missing_length"]

Verdict = Literal["refused", "unknown", "accepted"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The answer for one backend.

    ``verdict`` is refused, unknown or accepted; ``width`` is what the release allocates, in manager blocks, and
    ``kernel_width`` the same in kernel blocks, ``padding`` of them beyond need. ``max_model_len`` is the longest request,
    ``memory`` what the pool holds, ``groups`` the tables of all layers, as far as they are known. ``reason`` is one sentence, ``error`` what the server would
    stop with. ``ways_out`` were judged too, each accepted. ``assumed`` names what was taken for granted,
    ``missing`` what nobody can know from the question.
    """

    verdict: Verdict
    engine: str
    backend: str | None = None
    block_size: int | None = None
    kernel_block_size: int | None = None
    width: int | None = None
    kernel_width: int | None = None
    padding: int | None = None
    max_model_len: int | None = None
    memory: Memory | None = None
    groups: tuple[Group, ...] = ()
    reason: str = ""
    error: str = ""
    ways_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def assess(launch: Launch) -> Judgement:
    """Judge one backend, without looking for ways out."""
    launch, notes = complete(launch)
    answer = _assess(launch)
    return replace(answer, assumed=(*notes, *answer.assumed))


def _assess(launch: Launch) -> Judgement:
    release = launch.release
    answer = Judgement(
        verdict="unknown",
        engine=f"{release.engine}=={release.version}" if release.version else release.engine,
        block_size=launch.block_size,
        max_model_len=_length(launch),
    )
    if lacking := _lacks_on_cpu(launch):
        return _refused(
            answer, f"{release} has no {lacking} for a CPU", f"NotImplementedError: {lacking} is not supported on CPU."
        )
    if launch.backend is None:
        return _without_backend(launch, answer)
    try:
        contract = launch.contract
    except UnknownName as error:
        if not is_unread(error):
            raise
        name = str(error.values["name"])
        missing = (f"rule: what {name} demands of its table, which nobody has read", *missing_length(launch))
        return replace(answer, backend=name, missing=missing, reason=error.message)
    block, unaligned = _block(launch, contract)
    launch, fitted = _fit_length(launch, contract, block)
    memory, held = _memory(launch, contract, block)
    answer = replace(
        answer,
        backend=contract.name,
        block_size=block,
        max_model_len=_length(launch),
        memory=memory,
        assumed=(*_assumptions(launch, contract, block, unaligned), *fitted, *held),
    )
    reasons = refused_reasons(launch, contract) if release.engine == "vllm" and "cpu" not in contract.hardware else ()
    if any(reason != "block_size not supported" for reason in reasons):
        return _refused(
            answer, f"{release} does not select {contract.name}: {', '.join(reasons)}", selection(contract, reasons)
        )
    if launch.hardware and contract.hardware and not any(runs_on(one, launch.hardware) for one in contract.hardware):
        return _refused(answer, f"{contract.name} runs on {', '.join(contract.hardware)}, not on {launch.hardware}")
    if launch.kv_dtype != "auto" and not contract.accepts_cache(launch.kv_dtype, launch.hardware):
        return _refused(answer, f"{contract.name} reads no KV cache of dtype {launch.kv_dtype}")
    if problem := ranks_problem(launch):
        return _refused(answer, *problem)
    if fitted and not answer.max_model_len:
        text = (
            "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token."
        )
        return _refused(answer, "the memory holds no request at all", text)
    if block is None and unaligned and (problem := pool_problem(launch, 0, launch.num_blocks)):
        return _refused(answer, *problem)
    if block is None and unaligned:
        missing = (f"block_size (--block-size): {unaligned}", *missing_length(launch))
        return replace(answer, missing=missing, reason="the model keeps a recurrent state beside its attention")
    if block is None:
        missing = (f"block_size (--block-size): {release} has none of its own", *missing_length(launch))
        return replace(answer, missing=missing, reason=f"{release} takes the block size from its caller")
    if launch.cp_size > 1 and contract.context_parallel is False:
        return _refused(answer, f"{contract.name} does not run under context parallelism (size {launch.cp_size})")
    if launch.cp_size > 1 and contract.cp_max_interleave and launch.cp_interleave > contract.cp_max_interleave:
        most = f"an interleave of at most {contract.cp_max_interleave}"
        return _refused(answer, f"{contract.name} takes {most} under context parallelism, got {launch.cp_interleave}")
    if (
        launch.cp_size > 1
        and launch.cp_interleave > 1
        and launch.lookahead
        and _drafts_need_interleave_1(launch, contract)
    ):
        return _refused(answer, f"{contract.name} takes no drafts with an interleave of {launch.cp_interleave}")
    if launch.cp_size > 1 and block % launch.cp_interleave and not _interleaves_by_block(launch):
        sizes = f"({block}) should be greater than or equal to and divisible by cp_kv_cache_interleave_size"
        text = f"AssertionError: Block_size{sizes} ({launch.cp_interleave})." if release.engine == "vllm" else ""
        return _refused(answer, f"an interleave of {launch.cp_interleave} does not divide blocks of {block}", text)
    if problem := pool_problem(launch, block, answer.memory.num_blocks if answer.memory else launch.num_blocks):
        return _refused(answer, *problem)
    try:
        geometry = allocated(launch, contract, block)
    except GeometryError as error:
        if "wrong" in error.values:
            return _refused(answer, f"{error.message}; the server would start")
        if "accepted" not in error.values:
            raise
        return _refused(answer, error.message, _block_error(launch, contract, block))
    return _judge_width(launch, contract, geometry, replace(answer, kernel_block_size=geometry.kernel_block_size))


def _lacks_on_cpu(launch: Launch) -> str:
    """Return which attention of the model vLLM does not have on a CPU (get_attn_backend_cls, platforms/cpu.py)."""
    model = launch.model
    if launch.release.engine != "vllm" or launch.hardware != "cpu" or model is None:
        return ""
    if model.kind == "mla" and "CPU_MLA" not in launch.release.backends:
        return "MLA"
    return "Sparse Attention" if model.sparse else ""


def _judge_width(launch: Launch, contract: Contract, geometry: Geometry, answer: Judgement) -> Judgement:
    if missing := missing_length(launch):
        return replace(answer, missing=missing, reason="the width of a row follows from the longest request")
    answer = replace(answer, width=geometry.width, kernel_width=geometry.kernel_width, padding=geometry.padding)
    allocates = _changed(launch, geometry) + _allocates(launch.release, geometry)
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
    if answer.memory and (problem := memory_problem(launch, contract, geometry.block_size, answer.memory)):
        return _refused(answer, *problem)
    groups, drafted = groups_of(launch, contract, geometry), _draft(launch, geometry.block_size)
    if drafted and drafted.verdict == "refused":
        return _refused(answer, f"the draft model: {drafted.reason}", drafted.error)
    if drafted:
        groups += tuple(one._replace(kind=f"draft {one.kind}") for one in drafted.groups)
    assumed = (*answer.assumed, *_drafts_assumed(launch, drafted))
    accepted = f"{allocates}; {contract.name} takes {demand}"
    return replace(answer, verdict="accepted", groups=groups, assumed=assumed, reason=accepted)


def _draft(launch: Launch, block: int) -> Judgement | None:
    """Judge the layers of a draft model, which shares the block and, in vLLM, never the backend; None where none is told."""
    draft = launch.draft
    model = replace(launch.model, kept=None) if draft.inside and launch.model else draft.model
    if launch.release.engine != "vllm" or not draft.adds_layers or (model is None and draft.backend is None):
        return None
    alone = replace(
        launch,
        backend=draft.backend,
        model=model,
        block_size=block,
        kv_dtype=draft.kv_dtype or launch.kv_dtype,
        tensor_parallel=draft.ranks or launch.tensor_parallel,
        draft=draft._replace(method=""),
        memory=None,
        num_blocks=None,
        connector=None,
        prefix_match_unit=None,
    )
    return assess(alone)


def _drafts_assumed(launch: Launch, drafted: Judgement | None) -> Iterator[str]:
    if (
        launch.draft.adds_layers
        and launch.release.engine == "vllm"
        and (drafted is None or drafted.verdict == "unknown")
    ):
        yield f"a draft model whose attention takes blocks of this size; {launch.release} chooses its backend apart"


def _length(launch: Launch) -> int | None:
    return launch.max_model_len if isinstance(launch.max_model_len, int) else None


def _block(launch: Launch, contract: Contract) -> tuple[int | None, str]:
    """Return the block size that is really taken, and what is missing to know how it is aligned to a recurrent state."""
    asked = launch.block_size or own_block_size(launch, contract)
    if asked is None:
        return None, ""
    block = contract.effective_block_size(asked)
    if launch.release.engine != "vllm" or not launch.model or not launch.model.state:
        return block, ""
    try:
        return block_that_holds_a_state(launch, contract, block), ""
    except Unknown as fact:
        return launch.block_size, str(fact)


def _fit_length(launch: Launch, contract: Contract, block: int | None) -> tuple[Launch, tuple[str, ...]]:
    """Return the launch with the length that ``auto`` comes to, where the memory and the model are known."""
    most = launch.model.max_model_len if launch.model else None
    if launch.max_model_len != "auto" or block is None or most is None:
        return launch, ()
    try:
        length = longest_that_fits(launch, contract, block, most)
    except Unknown:
        return launch, ()
    fitted = replace(launch, max_model_len=length) if length else launch
    return fitted, (f"a longest request of {length} tokens, which auto comes to",)


def _memory(launch: Launch, contract: Contract | None, block: int | None) -> tuple[Memory | None, tuple[str, ...]]:
    """Return what the pool holds, and what is assumed where a pool is given of which that is not known."""
    if block is None:
        return None, ()
    given = launch.memory is not None or launch.num_blocks is not None
    try:
        memory = measure(launch, contract, block)
    except Unknown as fact:
        return None, (f"a pool that holds a request of full length: not known without {fact}",) if given else ()
    missing = memory.missing if given else ()
    return memory, tuple(f"a pool that holds a request of full length: not known without {fact}" for fact in missing)


def _without_backend(launch: Launch, answer: Judgement) -> Judgement:
    release = launch.release
    choice = choose(launch)
    if choice is not None:
        text = f"ValueError: No valid attention backend found for cuda with … Reasons: {{{choice}}}."
        return _refused(answer, f"{release} finds no backend that suits", text if launch.hardware != "rocm" else "")
    lacking = [what for what, fact in (("a GPU", launch.hardware), ("a model", launch.model)) if fact is None]
    if lacking:
        none = f"none is named, nor {' and '.join(lacking)} to choose one"
    elif launch.hardware == "cpu":
        none = "whether the CPU has AMX tiles, which take AMX_MLA in place of CPU_MLA"
    else:
        none = f"the order in which {release} tries backends on {launch.hardware}, which is not in the catalogue"
    missing = (f"backend (--backend): {none}", *missing_length(launch))
    memory, _ = _memory(launch, None, launch.block_size)
    return replace(
        answer, missing=missing, memory=memory, reason=f"{release} chooses a backend by the GPU and the model"
    )


def _interleaves_by_block(launch: Launch) -> bool:
    """Whether a connector sets the interleave to the block by itself."""
    return launch.connector is not None and launch.connector.name == "NixlConnector"


def _drafts_need_interleave_1(launch: Launch, contract: Contract) -> bool:
    return launch.release.engine == "vllm" and bool(contract.context_parallel) and not contract.cp_drafts_interleave


def selection(contract: Contract, reasons: Sequence[str]) -> str:
    """Return what vLLM says when a backend that was named does not suit (get_attn_backend_cls in platforms/cuda.py)."""
    name = f"AttentionBackendEnum.{contract.name}"
    return f"ValueError: Selected backend {name} is not valid for this configuration. Reason: {list(reasons)}"


def missing_length(launch: Launch) -> tuple[str, ...]:
    """Return what to say where the length is not known; nothing where it is."""
    if launch.max_model_len == "auto" and launch.memory is None and launch.num_blocks is None:
        return ("max_model_len (--max-model-len): auto is sized by the memory that the server finds (--gpu-memory)",)
    if launch.max_model_len == "auto":
        fact = "a model (--model)" if launch.model is None else "what the model keeps, and how long it may get"
        return (f"max_model_len (--max-model-len): auto follows from the memory and from {fact}",)
    if launch.max_model_len is None:
        return ("max_model_len (--max-model-len): not given, so it is the model's own",)
    return ()


def allocated(launch: Launch, contract: Contract, block: int) -> Geometry:
    """Return the table that the release allocates, unjudged; raises `GeometryError` where no kernel block fits."""
    # Where the length is not known the block size is judged alone, which one token does as well as many.
    length = launch.max_model_len if isinstance(launch.max_model_len, int) else 1
    return plan(
        max_model_len=length + (launch.lookahead if launch.release.counts_drafts else 0),
        block_size=block,
        contracts=(contract, *companions(launch)),
        engine=launch.release,
        cp_size=launch.cp_size,
        cp_interleave=launch.cp_interleave if launch.cp_size > 1 else 1,
    )


def _refused(answer: Judgement, reason: str, error: str = "") -> Judgement:
    return replace(answer, verdict="refused", reason=reason, error=error)


def _changed(launch: Launch, geometry: Geometry) -> str:
    if launch.block_size in (None, geometry.block_size):
        return ""
    return f"{launch.release} changes blocks of {launch.block_size} to {geometry.block_size}; "


def _allocates(release: Release, geometry: Geometry) -> str:
    # A kernel package leaves the block size, and so the table, to its caller.
    who = f"{release} allocates" if release.default_block_size else f"{geometry.max_model_len} tokens need"
    text = f"{who} {geometry.width} blocks per row"
    if geometry.kernel_block_size != geometry.block_size:
        text += f", {geometry.kernel_width} kernel blocks of {geometry.kernel_block_size} tokens"
    return text


def _block_error(launch: Launch, contract: Contract, block: int) -> str:
    """Return what the server says about a block size that the backend does not take."""
    release = launch.release
    if is_part(contract) or (
        companions(launch) and contract.accepts_manager(block) and common_kernel_block(block, [contract])
    ):
        return f"ValueError: No common block size for {block}"  # in the worker; how it goes on differs by release
    if release.engine == "vllm" and "cpu" not in contract.hardware:
        # Said before any kernel is asked, in all releases from 0.19.0 on.
        return selection(contract, ["block_size not supported"])
    try:
        contract.check_table((1, 128), block, max_seq_len=128 * block)
    except ContractError as error:
        if error.values.get("raised"):
            return _kernel_text(error)
    return ""


def _kernel_text(error: ContractError) -> str:
    raised = error.values.get("raised")
    return f"{raised}: {error.message}" if raised else error.message


def _assumptions(launch: Launch, contract: Contract, block: int | None, unaligned: str) -> Iterator[str]:
    release = launch.release
    runs_on = f" ({', '.join(contract.hardware)})" if contract.hardware else ""
    longest, length = launch.model.max_model_len if launch.model else None, _length(launch)
    if release.engine == "vllm" and longest and length and length > longest:
        yield f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, since {length} tokens are more than the {longest} of the model's config"
    if launch.hardware is None:
        yield f"hardware on which {contract.name} runs{runs_on}"
    if launch.lookahead and release.counts_drafts:
        yield f"rows that hold {launch.lookahead} draft tokens of a verification, which {release} adds"
    drafts = launch.lookahead and not release.counts_drafts
    unwidened = f", which {release} does not widen by a lookahead of {launch.lookahead}" if drafts else ""
    if not launch.model or not launch.model.kept:
        yield f"{'layers that form' if launch.model else 'a model of'} one full-attention group{unwidened}"
    elif drafts:
        yield f"rows of attention{unwidened}"
    if launch.block_size is not None and unaligned:
        yield f"block size {block} as asked for, although {release} may align it to the recurrent state"
    if launch.block_size is None and block is not None:
        yield f"block size {block}, which {release} takes by itself for {contract.name}"
    if release.extrapolated:
        yield f"{release} behaves as {release.data_version}, the newest in the catalogue"
    for kernel, version in release.requires.items():
        if f"; {kernel}: " in contract.source and kernel not in launch.kernels:
            yield f"{kernel} {version}, which {release} pins"
    if contract.evidence == "inferred":
        yield f"the rule of {contract.name} is inferred, not read from the kernel"
    if contract.evidence == "carried":
        yield f"the rule of {contract.name} is carried over from a near release; it was not read in {release}"
    if release.evidence == "carried":
        yield f"the width that {release} allocates is carried over from a near release"
