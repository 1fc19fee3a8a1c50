"""The block of a model that keeps a recurrent state: the least one whose page holds that state, whatever was asked for."""

from blocktable._ints import ceil_div
from blocktable.contracts import Contract, MultipleOf
from blocktable.preflight.launch import Launch
from blocktable.preflight.memory import Unknown, attention_bytes, state_bytes

__all__ = ["block_that_holds_a_state"]


def block_that_holds_a_state(launch: Launch, contract: Contract, block: int) -> int:
    """Return the block that the release takes in place of ``block``; raises `Unknown` where a fact is missing.

    vLLM sizes it in steps of the block asked for, or of the kernel's least one where that is larger.
    """
    model, release = launch.model, launch.release
    if not release.fits_state or model is None:
        raise Unknown(f"the block to which {release} aligns a recurrent state, which nobody has read")
    if model.kind == "mla":
        raise Unknown(f"the block to which {release} aligns a recurrent state beside a latent")
    if (
        model.recurrent
        and model.recurrent.chunked
        and (release.fits_chunks or (launch.lookahead and not _newest(launch)))
    ):
        raise Unknown(f"the block to which {release} aligns a recurrent state whose kernel goes by chunks")
    least = min((one.base if isinstance(one, MultipleOf) else one for one in contract.kernel_block_sizes), default=1)
    step = max(least, block)
    return max(block, step * ceil_div(state_bytes(launch), step * attention_bytes(launch, contract)))


def _newest(launch: Launch) -> bool:
    return launch.release.newest or launch.release.extrapolated
