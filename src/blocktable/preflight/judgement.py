"""Judge one launch: block size, context parallelism, then the width that is allocated against the width that is accepted."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from blocktable.contracts import Contract
from blocktable.errors import ContractError, GeometryError, UnknownName
from blocktable.geometry import Geometry
from blocktable.preflight.choice import choose
from blocktable.preflight.completion import complete
from blocktable.preflight.demands import cpu_problem, parallel_problem, selection_problem
from blocktable.preflight.groups import Group, groups_of
from blocktable.preflight.launch import Launch, is_unread
from blocktable.preflight.layers import Layers
from blocktable.preflight.memory import Memory
from blocktable.preflight.pool import memory_problem, pool_problem
from blocktable.preflight.sizing import allocated, block_of, fit_length, length_of, missing_length, pool_of
from blocktable.preflight.tpu import DEFAULT_ROWS
from blocktable.preflight.wording import allocates, assumptions, block_error, changed, kernel_text

__all__ = ["Judgement", "Verdict", "assess"]

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
        max_model_len=length_of(launch),
    )
    if problem := cpu_problem(launch):
        return _refused(answer, *problem)
    if launch.backend is None:
        return _of_unread_model(launch, answer) if launch.unread else _without_backend(launch, answer)
    try:
        contract = launch.contract
    except UnknownName as error:
        if not is_unread(error):
            raise
        name = str(error.values["name"])
        missing = (f"rule: what {name} demands of its table, which nobody has read", *missing_length(launch))
        return replace(answer, backend=name, missing=missing, reason=error.message)
    if launch.unread:
        return _of_unread_model(launch, replace(answer, backend=contract.name))
    block, unaligned = block_of(launch, contract)
    launch, fitted = fit_length(launch, contract, block)
    memory, held = pool_of(launch, contract, block)
    answer = replace(
        answer,
        backend=contract.name,
        block_size=block,
        max_model_len=length_of(launch),
        memory=memory,
        assumed=(*assumptions(launch, contract, block, unaligned), *fitted, *held),
    )
    if problem := selection_problem(launch, contract):
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
    if problem := parallel_problem(launch, contract, block):
        return _refused(answer, *problem)
    if problem := pool_problem(launch, block, answer.memory.num_blocks if answer.memory else launch.num_blocks):
        return _refused(answer, *problem)
    try:
        geometry = allocated(launch, contract, block)
    except GeometryError as error:
        if "wrong" in error.values:
            return _refused(answer, f"{error.message}; the server would start")
        if "accepted" not in error.values:
            raise
        return _refused(answer, error.message, block_error(launch, contract, block))
    return _judge_width(launch, contract, geometry, replace(answer, kernel_block_size=geometry.kernel_block_size))


def _judge_width(launch: Launch, contract: Contract, geometry: Geometry, answer: Judgement) -> Judgement:
    if missing := missing_length(launch):
        return replace(answer, missing=missing, reason="the width of a row follows from the longest request")
    answer = replace(answer, width=geometry.width, kernel_width=geometry.kernel_width, padding=geometry.padding)
    told = changed(launch, geometry) + allocates(launch.release, geometry)
    widths = contract.widths(geometry.kernel_block_size, geometry.max_seq_len)
    demand = contract.width_rule.describe(geometry.kernel_block_size, geometry.max_seq_len)
    if widths.multiple == 1 and widths.low <= 1 and widths.high is None:
        demand = "any width"  # a multiple of one, say
    try:
        geometry.check((1, geometry.kernel_width))
    except ContractError as error:
        return _refused(answer, f"{told}; {contract.name} needs {demand}", kernel_text(error))
    if too_large := _area(launch, contract, geometry):
        return _refused(answer, f"{told}; {too_large}")
    if launch.cp_size > 1 and contract.context_parallel is None:
        missing = (
            f"context_parallel: whether {contract.name} runs under it in {launch.release}, which nobody has read",
        )
        return replace(answer, missing=missing, reason=told)
    if answer.memory and (problem := memory_problem(launch, contract, geometry.block_size, answer.memory)):
        return _refused(answer, *problem)
    groups, drafted = groups_of(launch, contract, geometry), _draft(launch, geometry.block_size)
    if drafted and drafted.verdict == "refused":
        return _refused(answer, f"the draft model: {drafted.reason}", drafted.error)
    if drafted:
        groups += tuple(one._replace(kind=f"draft {one.kind}") for one in drafted.groups)
    assumed = (*answer.assumed, *_drafts_assumed(launch, drafted))
    pattern, switch = launch.altered
    if re.fullmatch(pattern, contract.name):
        missing = (f"rule: what {contract.name} demands with {switch}, which is not in the catalogue",)
        return replace(answer, groups=groups, assumed=assumed, missing=missing, reason=told)
    accepted = f"{told}; {contract.name} takes {demand}"
    return replace(answer, verdict="accepted", groups=groups, assumed=assumed, reason=accepted)


def _area(launch: Launch, contract: Contract, geometry: Geometry) -> str:
    """Hold the table of all rows against the memory in which the kernel holds it."""
    rows, most = launch.max_num_seqs or DEFAULT_ROWS, contract.max_table_bytes
    size = rows * geometry.kernel_width * 4
    if most is None or size <= most:
        return ""
    return f"{rows} rows of that take {size:,} bytes, and {contract.name} holds {most:,} (rows · width · 4)"


def _draft(launch: Launch, block: int) -> Judgement | None:
    """Judge the layers of a draft model, which shares the block and, in vLLM, never the backend; None where none is told."""
    draft = launch.draft
    model = draft.model
    if draft.inside and launch.model:
        model = replace(launch.model, kept=Layers(launch.model.drafting) if launch.model.drafting else None)
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


def _without_backend(launch: Launch, answer: Judgement) -> Judgement:
    release = launch.release
    choice = choose(launch)
    if choice is not None:
        text = f"ValueError: No valid attention backend found for cuda with … Reasons: {{{choice}}}."
        return _refused(answer, f"{release} finds no backend that suits", text if launch.hardware != "rocm" else "")
    facts = (("a GPU (--gpu)", launch.hardware), ("a model (--model, the folder of its config.json)", launch.model))
    lacking = [what for what, fact in facts if fact is None]
    if launch.unordered:
        none = f"none is named, and {launch.unordered} changes what {release} chooses in a way that is not in the catalogue"
    elif lacking:
        none = f"none is named, nor {' and '.join(lacking)} to choose one"
    elif launch.hardware == "cpu" and release.engine == "vllm":
        none = "whether the CPU has AMX tiles, which take AMX_MLA in place of CPU_MLA"
    else:
        none = f"the order in which {release} tries backends on {launch.hardware}, which is not in the catalogue"
    missing = (f"backend (--backend): {none}", *missing_length(launch))
    memory, _ = pool_of(launch, None, launch.block_size)
    return replace(
        answer, missing=missing, memory=memory, reason=f"{release} chooses a backend by the GPU and the model"
    )


def _of_unread_model(launch: Launch, answer: Judgement) -> Judgement:
    missing = (f"model (--model): {launch.unread}", *missing_length(launch))
    return replace(answer, missing=missing, reason="the model is of a kind whose tables nobody has read")


def _refused(answer: Judgement, reason: str, error: str = "") -> Judgement:
    return replace(answer, verdict="refused", reason=reason, error=error)
