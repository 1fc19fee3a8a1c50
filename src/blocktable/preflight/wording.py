"""What an answer says: what is allocated, what is taken for granted, what a server would print."""

from collections.abc import Iterator

from blocktable.contracts import Contract, Release
from blocktable.contracts.contract import common_kernel_block
from blocktable.errors import ContractError
from blocktable.geometry import Geometry
from blocktable.preflight.completion import companions, is_part
from blocktable.preflight.demands import selection
from blocktable.preflight.launch import Launch
from blocktable.preflight.sizing import length_of
from blocktable.preflight.tpu import DEFAULT_ROWS

__all__ = ["allocates", "assumptions", "block_error", "changed", "kernel_text"]


def allocates(release: Release, geometry: Geometry) -> str:
    """Say how wide a row is that the release allocates."""
    # A kernel package leaves the block size, and so the table, to its caller.
    who = f"{release} allocates" if release.default_block_size else f"{geometry.max_model_len} tokens need"
    text = f"{who} {geometry.width} blocks per row"
    if geometry.kernel_block_size != geometry.block_size:
        text += f", {geometry.kernel_width} kernel blocks of {geometry.kernel_block_size} tokens"
    return text


def changed(launch: Launch, geometry: Geometry) -> str:
    """Say which block the engine takes in place of the one asked for, if it does."""
    if launch.block_size in (None, geometry.block_size):
        return ""
    return f"{launch.release} changes blocks of {launch.block_size} to {geometry.block_size}; "


def block_error(launch: Launch, contract: Contract, block: int) -> str:
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
            return kernel_text(error)
    return ""


def kernel_text(error: ContractError) -> str:
    """Return what a kernel says, with the type of its exception."""
    raised = error.values.get("raised")
    return f"{raised}: {error.message}" if raised else error.message


def assumptions(launch: Launch, contract: Contract, block: int | None, unaligned: str) -> Iterator[str]:
    """Yield what is taken for granted, each as a phrase."""
    release = launch.release
    runs_on = f" ({', '.join(contract.hardware)})" if contract.hardware else ""
    longest, length = launch.model.max_model_len if launch.model else None, length_of(launch)
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
    if contract.max_table_bytes and launch.max_num_seqs is None:
        yield f"{DEFAULT_ROWS} requests at once, which {release} takes by itself"
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
