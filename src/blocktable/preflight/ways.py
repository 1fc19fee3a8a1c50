"""Ways out of a refusal: changes of one setting, each of which is judged before it is offered."""

from collections.abc import Iterator
from dataclasses import replace

from blocktable._ints import align_up
from blocktable.contracts import Contract, known_versions, resolve_engine
from blocktable.contracts.engines import catalogue
from blocktable.contracts.hardware import runs_on
from blocktable.errors import BlockTableError
from blocktable.geometry import Geometry
from blocktable.geometry import ways_out as geometry_ways_out
from blocktable.preflight.completion import complete, listed_sizes
from blocktable.preflight.judgement import Judgement, assess
from blocktable.preflight.launch import Draft, Launch
from blocktable.preflight.memory import longest_that_fits
from blocktable.preflight.sizing import allocated, missing_length
from blocktable.preflight.tpu import DEFAULT_ROWS

__all__ = ["ways_out"]

_MOST_BACKENDS = 3  # named as a way out
_SGLANG = {
    "--max-model-len": "--context-length",
    "--block-size": "--page-size",
    "--backend": "--attention-backend",
    "--decode-context-parallel-size": "--dcp-size",
    "--tensor-parallel-size": "--tp-size",
    "--max-num-batched-tokens": "--chunked-prefill-size",
}


def ways_out(launch: Launch, answer: Judgement) -> Iterator[str]:
    """Yield changes to a refused launch, as its user would write them."""
    flags = _SGLANG if launch.release.engine == "sglang" else {}
    for way in _ways(launch, answer):
        flag, space, value = way.partition(" ")
        yield flags.get(flag, flag) + space + value


def _ways(launch: Launch, answer: Judgement) -> Iterator[str]:
    launch, _ = complete(launch)
    if launch.backend is None:
        yield from _block_sizes(launch, None, launch.block_size or 0)
        return
    contract = launch.contract
    launch = replace(launch, backend=contract.name)  # without an engine or a version of its own
    if answer.kernel_width is not None and answer.block_size is not None:
        yield from _lengths(launch, allocated(launch, contract, answer.block_size))
    yield from _block_sizes(launch, contract, answer.block_size or 0)
    yield from _memory(launch, contract, answer)
    yield from _pool(launch, answer)
    yield from _ranks(launch)
    if launch.kv_dtype != "auto" and _accepted(replace(launch, kv_dtype="auto")):
        yield "--kv-cache-dtype auto"
    if launch.cp_size > 1 and _accepted(replace(launch, cp_size=1, cp_interleave=1)):
        yield "--decode-context-parallel-size 1"
    if launch.draft.adds_layers and _accepted(replace(launch, draft=Draft(), lookahead=0)):
        yield "no --speculative-config"
    yield from _releases(launch)
    yield from _backends(launch, contract)


def _accepted(launch: Launch) -> bool:
    """Judge a way out; where the length is not known, what is not refused is all that can be had."""
    try:
        verdict = assess(launch).verdict
    except BlockTableError:
        return False
    return verdict == "accepted" or (verdict == "unknown" and bool(missing_length(launch)))


def _lengths(launch: Launch, geometry: Geometry) -> Iterator[str]:
    length = geometry.max_model_len
    works = [
        tokens
        for tokens in sorted(
            way["max_model_len"] for way in geometry_ways_out(geometry) if set(way) == {"max_model_len"}
        )
        if _accepted(replace(launch, max_model_len=tokens))
    ]
    shorter, longer = [one for one in works if one < length], [one for one in works if one > length]
    texts = [str(shorter[-1])] if shorter else []
    if longer:
        texts.append(str(longer[0]) if longer[0] == longer[-1] else f"{longer[0]} to {longer[-1]}")
    if texts:
        yield f"--max-model-len {', or '.join(texts)}"


def _block_sizes(launch: Launch, contract: Contract | None, block: int) -> Iterator[str]:
    """Yield the accepted block size nearest to the one refused, the larger of two that are equally near."""
    sizes = {16, 32, 64, 128, 256}
    if contract is not None:
        sizes |= {512, 1024} if contract.max_table_bytes else set()
        sizes |= listed_sizes((*contract.kernel_block_sizes, *contract.manager_block_sizes))
    for size in sorted(sizes - {block}, key=lambda size: (max(size, block) / max(min(size, block), 1), -size)):
        if _accepted(replace(launch, block_size=size)):
            yield f"--block-size {size}"
            return


def _memory(launch: Launch, contract: Contract, answer: Judgement) -> Iterator[str]:
    """Yield the longest request that the pool holds, and the pool that holds the one asked for."""
    memory, block, length = answer.memory, answer.block_size, launch.max_model_len
    if memory is None or block is None or not isinstance(length, int):
        return
    needed = memory.blocks_per_request
    if needed is None or memory.num_blocks is None or needed < memory.num_blocks + (not launch.release.reserves_null):
        return
    fits = longest_that_fits(launch, contract, block, length)
    if fits and _accepted(replace(launch, max_model_len=fits)):
        yield f"--max-model-len {fits}"
    blocks = needed + launch.release.reserves_null
    if launch.num_blocks is not None and _accepted(replace(launch, num_blocks=blocks)):
        yield f"--num-gpu-blocks-override {blocks}"
    elif launch.num_blocks is None and _accepted(replace(launch, memory=blocks * memory.bytes_per_block)):
        yield f"--kv-cache-memory-bytes {blocks * memory.bytes_per_block}"


def _pool(launch: Launch, answer: Judgement) -> Iterator[str]:
    blocks = answer.memory.num_blocks if answer.memory else launch.num_blocks
    if launch.max_num_seqs and blocks and launch.max_num_seqs > blocks:
        if _not_refused(replace(launch, max_num_seqs=blocks)):
            yield f"--max-num-seqs {blocks}"
        if launch.num_blocks and _not_refused(replace(launch, num_blocks=launch.max_num_seqs)):
            yield f"--num-gpu-blocks-override {launch.max_num_seqs}"
    yield from _area(launch, answer)
    yield from _budget(launch, answer)
    if launch.prefix_match_unit and _not_refused(replace(launch, prefix_match_unit=None)):
        yield "no --prefix-match-unit"


def _area(launch: Launch, answer: Judgement) -> Iterator[str]:
    """Yield as many rows as the kernel's memory holds, where it bounds them."""
    most, width = launch.contract.max_table_bytes, answer.kernel_width
    rows = most // (4 * width) if most and width else 0
    if 0 < rows < (launch.max_num_seqs or DEFAULT_ROWS) and _accepted(replace(launch, max_num_seqs=rows)):
        yield f"--max-num-seqs {rows}"


def _budget(launch: Launch, answer: Judgement) -> Iterator[str]:
    """Yield the least budget of tokens that mends the launch; SGLang's chunks are whole pages."""
    given, block = launch.batched_tokens, answer.block_size or 1
    if given is None:
        return
    fits = (launch.max_num_seqs, answer.block_size, answer.max_model_len, align_up(given, block))
    for budget in sorted({one for one in fits if one and one > given}):
        if _accepted(replace(launch, batched_tokens=budget)):
            yield f"--max-num-batched-tokens {budget}"
            return


def _ranks(launch: Launch) -> Iterator[str]:
    """Yield the most ranks, of fewer than asked for, that split the heads."""
    model, split = launch.model, launch.tensor_parallel
    if model is None or model.heads % split == 0:
        return
    fewer = next(ranks for ranks in range(min(split - 1, model.heads), 0, -1) if model.heads % ranks == 0)
    shared = launch.shared_ranks and fewer
    if _accepted(replace(launch, tensor_parallel=fewer, shared_ranks=shared)):
        yield f"--tensor-parallel-size {fewer}"


def _not_refused(launch: Launch) -> bool:
    """Judge a way out of what a pool is refused for: a model with state may leave other facts open."""
    return assess(launch).verdict != "refused"


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
    known = catalogue(release.engine).records
    for name in release.backends:
        if name == contract.name or name not in known or _family(name) != _family(contract.name):
            continue
        other = replace(launch, backend=name)
        read = other.contract.evidence != "inferred"
        if found < _MOST_BACKENDS and read and _covers(other.contract, contract, launch.hardware) and _accepted(other):
            found += 1
            yield f"{flag} {name}"


def _family(name: str) -> tuple[object, ...]:
    """Backends of other models, of other KV caches and of other entry points are no way out."""
    point, dot, _ = name.partition(".")
    words = ("MLA", "SPARSE", "CPU", "DIFFKV", "QUANT", "MSA", "ROCM", "TRITON_FLASH")
    return (*(word in name.upper() for word in words), point if dot else "")


def _covers(other: Contract, contract: Contract, hardware: str | None) -> bool:
    """Whether the other backend runs on the hardware, or where that is not known on all on which this one does."""
    if hardware is not None:
        return not other.hardware or any(runs_on(pattern, hardware) for pattern in other.hardware)
    if not other.hardware:
        return "cpu" not in contract.hardware
    return bool(contract.hardware) and all(
        any(_matches(pattern, hardware) for pattern in other.hardware) for hardware in contract.hardware
    )


def _matches(pattern: str, hardware: str) -> bool:
    return pattern == hardware or (pattern.endswith(".x") and hardware.startswith(pattern[:-1]))
