"""float64 graphs compute in float64: no intermediate value is rounded to float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import compiled
from torch.nn import functional as F

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scaled product": lambda x, y: (x * 0.1) @ (y * 0.1),
    "addmm": lambda x, y: torch.addmm(x, x, y, alpha=0.1, beta=0.3),
    "baddbmm": lambda x, y: torch.baddbmm(x[None], x[None], y[None], alpha=0.1, beta=0.3),
    "hardtanh": lambda x, y: F.hardtanh(x, -0.1, 0.1),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.1),
    "gelu": lambda x, y: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "elu": lambda x, y: F.elu(x, 0.3) + F.leaky_relu(y, 0.1) + F.softplus(x, 0.3) + F.selu(y),
    "norm": lambda x, y: torch.linalg.vector_norm(x, 3.3) + y,
    "constants": lambda x, y: torch.full_like(x, 0.1) * y + torch.arange(0.0, 0.4, 0.1, dtype=torch.float64),
    "clamp": lambda x, y: x.clamp(0.1, 0.3) + y.masked_fill(x > 0, 0.1) + torch.lerp(x, y, 0.1),
    "logarithms": lambda x, y: (x.abs() + 1).log2() + (y.abs() + 0.1).log10(),
    "written normalization": lambda x, y: (
        (x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + 1e-3).sqrt() + y
    ),
    "relu and clamp": lambda x, y: x.relu().clamp(-0.1, 0.3) + y,
    "normalization": lambda x, y: F.layer_norm(x, (4,), eps=1e-3) + F.batch_norm(y, None, None, training=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_to_the_last_digits(name: str) -> None:
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(compiled(FUNCTIONS[name])(x, y), FUNCTIONS[name](x, y), rtol=1e-13, atol=1e-14)
