"""The KV cache groups of a running vLLM, as this library's groups: kind, window, context-parallel ranks, pool."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from blocktable.geometry import plan
from blocktable.groups import Group

__all__ = ["Known", "knowing", "known", "make_group", "read_groups"]

# By the exact class: one that is derived from these may hold its blocks by other rules.
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "HiddenStateCacheSpec": "full",
    "SinkFullAttentionSpec": "full",
    "CrossAttentionSpec": "full",
    "EncoderOnlyAttentionSpec": "encoder",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "state",
    "CircularBufferSpec": "state",
}


class Known(NamedTuple):
    """The kinds and windows of all groups, the number of blocks, null block included, and of steps in flight at most."""

    kinds: tuple[tuple[str, int], ...]
    num_blocks: int | None
    depth: int = 2


_current: Known | str | None = None


@contextmanager
def knowing(groups: Known | str | None) -> Iterator[None]:
    """Let tables that are made inside know their groups, or the name of a cache whose kind nobody knows here."""
    global _current  # noqa: PLW0603 - vLLM makes its tables without saying for which groups
    before, _current = _current, groups
    try:
        yield
    finally:
        _current = before


def known() -> Known | None:
    """Return what is known of the groups whose tables are being made; None before vLLM knows them itself."""
    return _current if isinstance(_current, Known) else None


def is_strange() -> bool:
    """Return whether a group whose table is being made is of unknown kind, so that all of them are to be vLLM's own."""
    return isinstance(_current, str)


def read_groups(config: Any) -> Known | str:
    """Read a ``KVCacheConfig``; the name of a cache of unknown kind where there is one."""
    kinds = []
    for group in config.kv_cache_groups:
        spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)  # layers of one uniform type
        name = type(spec).__name__
        if name not in KINDS:
            return name
        window = getattr(spec, {"window": "sliding_window", "chunked": "attention_chunk_size"}.get(KINDS[name], ""), 0)
        kinds.append((KINDS[name], window))
    return Known(tuple(kinds), config.num_blocks)


def make_group(kind: tuple[str, int] | None, width: int, block_size: int, cp_size: int, cp_interleave: int) -> Group:
    """Return a group whose rows are ``width`` blocks, no more and no less, as vLLM asks for."""
    ranks = 1 if kind and kind[0] == "state" else cp_size
    tokens = width * block_size * ranks
    geometry = plan(
        max_model_len=tokens,
        block_size=block_size,
        cp_size=ranks,
        cp_interleave=cp_interleave if ranks > 1 else 1,
    )
    name, window = kind or _any_kind(tokens)
    if name == "encoder":
        name = "full"
    made: Any = name
    return Group(geometry, kind=made, window=window if name in ("window", "chunked") else 0)


def _any_kind(tokens: int) -> tuple[str, int]:
    """Return what stands in for a kind that is not known yet: a window that ends nowhere.

    Its rows hold whatever rows of any kind may hold: null blocks at the head, and blocks from there to the last token.
    """
    return "window", tokens


def pick(groups: Known | None, state: Sequence[bool], *, encoder: bool) -> list[tuple[str, int] | None]:
    """Return the kind of each table; ``state`` says which map no tokens, ``encoder`` whether those layers have one."""
    if groups is not None:
        kinds = [kind for kind in groups.kinds if encoder or kind[0] != "encoder"]
        if len(kinds) == len(state):
            return [("state", 0) if none else kind for kind, none in zip(kinds, state, strict=True)]
    return [("state", 0) if none else None for none in state]
