"""The operator ``dynamo_backends::interpolate``: ``torch.nn.functional.interpolate`` as one node.

AOTAutograd decomposes PyTorch's own function into some thirty nodes, and its gradient into up to 16 scattered sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

aten = torch.ops.aten

_library = torch.library.Library("dynamo_backends", "DEF")

_library.define(
    "interpolate(Tensor input, int[]? size=None, float[]? scale_factor=None, *, str mode='nearest', "
    "bool align_corners=False) -> Tensor"
)

interpolate = torch.ops.dynamo_backends.interpolate.default


def _interpolate(
    input: torch.Tensor,
    size: list[int] | None = None,
    scale_factor: list[float] | None = None,
    *,
    mode: str = "nearest",
    align_corners: bool = False,
) -> torch.Tensor:
    """Resizes [N, C, ...], with a size or a factor for each resized dimension."""
    aligned = align_corners if mode.endswith("linear") else None
    return torch.nn.functional.interpolate(input, size, scale_factor, mode, aligned)


INTERPOLATION_BACKWARDS = {
    ("linear", 1): aten.upsample_linear1d_backward.default,
    ("bilinear", 2): aten.upsample_bilinear2d_backward.default,
    ("trilinear", 3): aten.upsample_trilinear3d_backward.default,
    ("nearest", 1): aten.upsample_nearest1d_backward.default,
    ("nearest", 2): aten.upsample_nearest2d_backward.default,
    ("nearest", 3): aten.upsample_nearest3d_backward.default,
    ("nearest-exact", 1): aten._upsample_nearest_exact1d_backward.default,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d_backward.default,
    ("nearest-exact", 3): aten._upsample_nearest_exact3d_backward.default,
}
"""PyTorch's gradient kernels, by mode and number of resized dimensions."""


class _Interpolation(torch.autograd.Function):
    """``interpolate`` whose gradient is one PyTorch kernel."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        input: torch.Tensor,
        size: list[int] | None,
        scale_factor: list[float] | None,
        mode: str,
        align_corners: bool,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = interpolate(input, size, scale_factor, mode=mode, align_corners=align_corners)
        factors: list[float] | list[None] = scale_factor or [None] * (input.ndim - 2)
        aligned = [align_corners] if mode.endswith("linear") else []
        ctx.arguments = (list(result.shape[2:]), list(input.shape), *aligned, *factors)
        ctx.kernel = INTERPOLATION_BACKWARDS[mode, input.ndim - 2]
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.kernel(grad, *ctx.arguments), None, None, None, None


def _interpolate_with_gradient(
    input: torch.Tensor,
    size: list[int] | None = None,
    scale_factor: list[float] | None = None,
    *,
    mode: str = "nearest",
    align_corners: bool = False,
) -> torch.Tensor:
    if forward_ad._current_level >= 0:  # PyTorch's function supports forward mode
        return _interpolate(input, size, scale_factor, mode=mode, align_corners=align_corners)
    result: torch.Tensor = _Interpolation.apply(input, size, scale_factor, mode, align_corners)
    return result


_library.impl("interpolate", _interpolate, "CompositeExplicitAutograd")
_library.impl("interpolate", _interpolate_with_gradient, "Autograd")
torch.library.register_fake("dynamo_backends::interpolate", _interpolate, lib=_library)
