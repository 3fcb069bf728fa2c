"""``swiglu(gate, up)``: ``silu(gate) * up``, as in most feed-forward layers."""

from __future__ import annotations

import torch


@torch.library.custom_op("my_backend_extras::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, for tensors of the same shape and dtype."""
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


def _backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = ctx.saved_tensors
    sigmoid = torch.sigmoid(gate)
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


swiglu.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
