"""Linear layers whose weights are laid out once for the processor's own matrix kernels, as vLLM's CPU worker does it.

A decode step is a few rows against every weight of the model, and nearly all of its time. PyTorch hands float32 to a
library that makes its own arrangement of the weight at every call; with the arrangement made beforehand, eight rows take a
half to a third of the time. It concerns the model alone: tables, cache and scheduler know nothing of it.
"""

from typing import Any

import torch

__all__ = ["pack"]


class PackedLinear(torch.nn.Module):
    """A linear layer [out, in] whose weight is oneDNN's; ``weight`` makes a plain copy of it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        rows = 8  # the layout that suits a decode step; whole prompts are no slower in it
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)  # noqa: SLF001 - what torch.compile calls
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows · weightᵀ + bias."""
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")  # noqa: SLF001
        return found

    @property
    def weight(self) -> torch.Tensor:
        """For whoever reads it: the weight as it was."""
        plain: torch.Tensor = self.packed.to_dense()
        return plain


def pack(model: Any) -> None:
    """Replace the plain linear layers of a float32 model on a CPU; anything else stays as it is.

    A weight that another layer shares (an embedding) stays there too, and takes its room twice.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                # DeepSeek's expansion of latents is read as a weight, at every step.
                if type(layer) is torch.nn.Linear and name != "kv_b_proj":
                    setattr(parent, name, PackedLinear(layer))
