"""Engine releases as data: which width a release allocates, its default block size, and the kernels that it requires."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from blocktable._ints import align_up, ceil_div
from blocktable.contracts.rules import count
from blocktable.errors import ArgumentError

__all__ = ["GroupKind", "Release", "StateMode", "WidthPolicy"]

WidthPolicy = Literal["native", "floor-128", "gcd-128", "tokens-4096", "one-more"]
GroupKind = Literal["full", "window", "chunked", "state", "ring", "resident"]
StateMode = Literal["none", "align"]

_KINDS = ("full", "window", "chunked", "state", "ring", "resident")
_MODES = ("none", "align")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of an engine, as far as block tables are concerned.

    ``requires`` names the kernel packages and versions it pins, ``backends`` the backends that exist in it. A release
    newer than the data is judged as the newest known one: ``version`` is then what was asked for, ``data_version`` what
    it is judged as, and ``extrapolated`` is True. ``evidence`` and ``source`` are those of the width.
    ``prefill_ranks_divide``: context-parallel ranks of the prefill divide a row as those of the decode do.
    ``aligns_state``: the rows of state groups are rounded like those of attention groups; ``divides_state``: they are
    divided over context-parallel ranks like those. ``common_default``: the block size taken when none is asked for suits
    every backend of a model, not the first alone. ``match_unit_is_block``: a single group takes no other unit of hashing
    than its block. ``caches_state``: prefix caching is on for models with a recurrent state too. ``counts_in_flight``: a
    window holds the tokens of every step that is under way, not of one. ``reserves_null``: the null block is set aside
    before asking whether the longest request fits. ``fits_state``: the block of a model with a recurrent state is the least
    one whose page holds that state; ``fits_chunks``: where its kernel goes by chunks, a multiple of those.
    ``fills_states``: a step has to fill a block where states are cached. ``counts_drafts``: rows hold the draft tokens of a verification beside the longest request.
    """

    engine: str
    version: str
    data_version: str
    newest: bool
    extrapolated: bool
    width_policy: WidthPolicy
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
    requires: Mapping[str, str] = field(default_factory=dict, hash=False)
    backends: tuple[str, ...] = ()
    evidence: str = "read"
    source: str = ""

    def __str__(self) -> str:
        return f"{self.engine} {self.version}"

    def width(
        self,
        *,
        max_model_len: int,
        block_size: int,
        cp_size: int = 1,
        lookahead: int = 0,
        kind: GroupKind = "full",
        state_mode: StateMode = "align",
        policy: WidthPolicy | None = None,
    ) -> int:
        """Return the width in manager blocks that this release allocates for a row of a group of that kind.

        Attention groups (full, window, chunked) hold ``max_model_len`` tokens, split over ``cp_size`` ranks; lookahead
        does not widen them, since the engine never allocates past ``max_model_len``. A resident group (the sparse cache
        that every rank holds whole) is not split. A state group widens by its ``lookahead`` speculative blocks; with
        ``state_mode`` none it holds one block besides. A ring holds one block. ``policy`` stands in for the release's
        own, for a backend that sizes its rows itself. Cost: constant.

        >>> from blocktable.contracts import resolve_engine
        >>> [resolve_engine(f"vllm=={v}").width(max_model_len=9416, block_size=48) for v in ("0.20.2", "0.21.0", "0.32.0")]
        [197, 198, 200]
        """
        if kind not in _KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}", values={"kind": kind})
        tokens, block = count(max_model_len, "max_model_len"), count(block_size, "block_size")
        ranks, drafts = count(cp_size, "cp_size"), count(lookahead, "lookahead", least=0)
        if state_mode not in _MODES:
            raise ArgumentError(f"state_mode must be one of {', '.join(_MODES)}, got {state_mode!r}")
        if kind == "ring":
            return 1
        if kind == "state":
            held = 1 if state_mode == "none" else ceil_div(tokens, block * (ranks if self.divides_state else 1))
            return align_up(held + drafts, self.alignment(block)) if self.aligns_state else held + drafts
        if kind == "resident":
            ranks = 1
        if policy == "one-more":
            return tokens // (block * ranks) + 1
        return align_up(ceil_div(tokens, block * ranks), self.alignment(block, policy))

    def alignment(self, block_size: int, policy: WidthPolicy | None = None) -> int:
        """Return how many manager blocks an attention group's width is rounded up to, before any split into kernel blocks.

        >>> from blocktable.contracts import resolve_engine
        >>> resolve_engine("vllm==0.32.0").alignment(544)
        4
        """
        match policy or self.width_policy:
            case "floor-128":
                return max(128 // block_size, 1)
            case "gcd-128":
                return 128 // gcd(128, block_size)
            case "tokens-4096":
                return 4096 // gcd(4096, block_size)
            case _:
                return 1
