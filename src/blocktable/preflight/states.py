"""What one layer of a model keeps as its recurrent state, from ``config.json``: the page that attention has to match.

>>> state = read_state(
...     {
...         "model_type": "qwen3_next",
...         "linear_num_key_heads": 16,
...         "linear_num_value_heads": 32,
...         "linear_key_head_dim": 128,
...         "linear_value_head_dim": 128,
...         "linear_conv_kernel_dim": 4,
...     }
... )
>>> state.size(ranks=1, drafts=0, element=2, matrix=None)
1097728
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["State", "read_state"]

_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}


class State(NamedTuple):
    """A convolution's last inputs, ``channels`` wide, and ``heads`` matrices of ``elements``, split over the ranks.

    ``group`` is the width of one of ``groups`` that are repeated where the ranks do not divide them. ``dtype`` is that of
    the matrix, None for the model's. ``chunked``: its kernel goes by chunks, to which some releases align the block.
    ``drafted``: the convolution keeps an input for each draft token too.
    """

    channels: int
    kernel: int
    heads: int = 0
    elements: int = 0
    groups: int = 0
    group: int = 0
    dtype: str | None = None
    chunked: bool = False
    drafted: bool = True

    def size(self, *, ranks: int, drafts: int, element: int, matrix: int | None) -> int | None:
        """Return the bytes of one rank; None where the ranks do not divide it.

        ``element`` counts the bytes of the convolution's values, ``matrix`` those of the matrices where they are asked for.
        """
        repeated = ranks - self.groups if self.groups % ranks else 0
        channels = self.channels + 2 * (self.groups + repeated) * self.group
        if channels % ranks or self.heads % ranks:
            return None
        rows = self.kernel - 1 + (drafts if self.drafted else 0)
        matrices = self.heads // ranks * self.elements * (matrix or _BYTES.get(self.dtype or "", element))
        return channels // ranks * rows * element + matrices


def read_state(config: Mapping[str, Any]) -> State | None:
    """Return the state of a text model's config; None for models whose state is not known. Cost: constant."""
    reader = _READERS.get(str(config.get("model_type")))
    try:
        state = reader(config) if reader else None
    except (KeyError, TypeError, ValueError):  # a size is absent, or is no number
        return None
    sizes = (state.channels, state.kernel, state.heads, state.elements, state.groups, state.group) if state else ()
    return state if all(type(size) is int and size >= 0 for size in sizes) else None


def _delta(config: Mapping[str, Any]) -> State:
    heads, key, value = config["linear_num_value_heads"], config["linear_key_head_dim"], config["linear_value_head_dim"]
    return State(
        channels=2 * config["linear_num_key_heads"] * key + heads * value,
        kernel=config["linear_conv_kernel_dim"],
        heads=heads,
        elements=key * value,
        dtype=config.get("mamba_ssm_dtype") if config["model_type"] != "qwen3_next" else None,
    )


def _mamba(channels: int, heads: int, head: int, width: int, kernel: int, groups: int, dtype: str | None) -> State:
    return State(
        channels=channels,
        kernel=kernel,
        heads=heads,
        elements=head * width,
        groups=groups,
        group=width,
        dtype=dtype,
        chunked=True,
    )


def _granite(config: Mapping[str, Any]) -> State:
    inner = config["mamba_expand"] * config["hidden_size"]
    return _mamba(inner, *_mamba_sizes(config), None)


def _falcon(config: Mapping[str, Any]) -> State:
    inner = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    return _mamba(inner, *_mamba_sizes(config), None)


def _mamba_sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_n_groups")
    heads, head, width, kernel, groups = (config[name] for name in names)
    return heads, head, width, kernel, groups


def _nemotron(config: Mapping[str, Any]) -> State:
    heads, head = config["mamba_num_heads"], config["mamba_head_dim"]
    dtype = config.get("mamba_ssm_cache_dtype", "float32")
    return _mamba(heads * head, heads, head, config["ssm_state_size"], config["conv_kernel"], config["n_groups"], dtype)


def _short(config: Mapping[str, Any]) -> State:
    return State(channels=config["conv_dim"], kernel=config["conv_L_cache"], drafted=False)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], State]]] = {
    "qwen3_next": _delta,
    "qwen3_5_text": _delta,
    "qwen3_5_moe_text": _delta,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "nemotron_h": _nemotron,
    "lfm2": _short,
}
