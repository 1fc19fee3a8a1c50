"""Packed layers compute what the plain ones do, and only where they are meant to."""

from typing import Any

import pytest
import torch

from blocktable.engine.packed import PackedLinear, pack


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 333])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_plain_one(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(96, 131, bias=bias)
    packed = PackedLinear(plain)
    assert torch.equal(packed.weight, plain.weight)
    given = torch.randn(1, rows, 96)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(given.double(), plain.weight.double(), plain.bias.double() if bias else None)
        assert packed(given).shape == (1, rows, 131)
        torch.testing.assert_close(packed(given).double(), exact, rtol=1e-5, atol=1e-5)


class Small(torch.nn.Module):
    """What ``pack`` asks of a model."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.device = dtype, torch.device("cpu")
        self.up, self.kv_b_proj, self.norm = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_packed(dtype: torch.dtype) -> None:
    model: Any = Small(dtype)
    pack(model)
    kinds = [type(layer) for layer in (model.up, model.inner[0], model.inner[1])]
    assert kinds == [PackedLinear if dtype == torch.float32 else torch.nn.Linear] * 3
    assert type(model.kv_b_proj) is torch.nn.Linear
    assert type(model.norm) is torch.nn.LayerNorm
