"""Operators that passes put into graphs where ATen has none that means the same.

``dynamo_backends::attention`` and ``attention_backward`` are attention as a model writes it out. ATen's
``scaled_dot_product_attention`` is another function: it returns 0 for a row whose mask hides everything, where softmax
gives NaN, and on the CPU it has no kernel with dropout. PyTorch computes ours step by step; they are there to be one
node in a graph.

``dynamo_backends::interpolate`` is ``torch.nn.functional.interpolate``, which AOTAutograd would take apart into some
thirty nodes, and its gradient into as many as sixteen scattered sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad

aten = torch.ops.aten

_library = torch.library.Library("dynamo_backends", "DEF")

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias=None, Tensor? hidden=None, Tensor? kept=None"
_NUMBERS = (
    "float scale=1.0, float fill=0.0, float kept_scale=1.0, bool upcast=False, bool fill_first=False, bool safe=False"
)
_library.define(f"attention({_TENSORS}, *, {_NUMBERS}) -> Tensor")
_library.define(f"attention_backward(Tensor grad, {_TENSORS}, *, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)")

_library.define(
    "interpolate(Tensor input, int[]? size=None, float[]? scale_factor=None, *, str mode='nearest', "
    "bool align_corners=False) -> Tensor"
)

attention = torch.ops.dynamo_backends.attention.default
attention_backward = torch.ops.dynamo_backends.attention_backward.default
interpolate = torch.ops.dynamo_backends.interpolate.default


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor | None,
    scale: float,
    fill: float,
    upcast: bool,
    fill_first: bool,
    safe: bool,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1))
    if scale != 1.0:
        scores = scores.mul_(scale)
    if upcast and (bias is None or bias.dtype is torch.float32):
        scores = scores.float()
    if hidden is not None and fill_first:
        scores = scores.masked_fill(hidden, fill)
    if bias is not None:
        scores = scores + bias
    if hidden is not None and not fill_first:
        scores = scores.masked_fill(hidden, fill)
    if upcast:
        scores = scores.float()
    probabilities = torch.softmax(scores, -1)
    if safe:
        probabilities = probabilities.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return probabilities.to(query.dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    fill: float = 0.0,
    kept_scale: float = 1.0,
    upcast: bool = False,
    fill_first: bool = False,
    safe: bool = False,
) -> torch.Tensor:
    """``(softmax(where(hidden, fill, q k^T * scale + bias)) * kept * kept_scale) v``.

    Args:
        query: [..., S, D], floating point.
        key: [..., T, D], of query's dtype and leading dimensions, like ``value``.
        value: [..., T, E].
        bias: broadcastable to [..., S, T], of query's dtype, or float32 with ``upcast``.
        hidden: boolean, broadcastable to [..., S, T]: which scores become ``fill``.
        kept: boolean, [..., S, T]: which probabilities dropout keeps.
        scale, fill, kept_scale: see above.
        upcast: whether the softmax of half precisions is computed in float32, and its result rounded back; a float32
            bias is added in float32.
        fill_first: whether ``hidden`` is applied before the bias is added.
        safe: whether a row of scores that are all -inf has probabilities 0, not NaN.

    Returns:
        [..., S, E], contiguous.
    """
    probabilities = _probabilities(query, key, bias, hidden, scale, fill, upcast, fill_first, safe)
    if kept is not None:
        probabilities = probabilities * kept * kept_scale
    return torch.matmul(probabilities, value).contiguous()


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    fill: float = 0.0,
    kept_scale: float = 1.0,
    upcast: bool = False,
    fill_first: bool = False,
    safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key, value and, unreduced, of the bias.

    Args:
        grad: gradient of the result, [..., S, E].
        query, key, value, bias, hidden, kept, scale, fill, kept_scale, upcast, fill_first, safe: as
            in ``attention``.

    Returns:
        Gradients [..., S, D], [..., T, D], [..., T, E] and [..., S, T], contiguous.
    """
    probabilities = _probabilities(query, key, bias, hidden, scale, fill, upcast, fill_first, safe)
    dropped = probabilities if kept is None else probabilities * kept * kept_scale
    grad_value = torch.matmul(dropped.transpose(-2, -1), grad)
    grad_probabilities = torch.matmul(grad, value.transpose(-2, -1))
    if kept is not None:
        grad_probabilities = grad_probabilities * kept * kept_scale
    products = grad_probabilities.mul_(probabilities)  # scores are large: in the memory that is there
    grad_scores = products.sub_(probabilities.mul_(products.sum(-1, keepdim=True)))
    if hidden is not None:
        grad_scores = grad_scores.masked_fill_(hidden, 0.0)
    scaled = grad_scores * scale if scale != 1.0 else grad_scores
    grad_query, grad_key = torch.matmul(scaled, key), torch.matmul(scaled.transpose(-2, -1), query)
    results = grad_query, grad_key, grad_value, grad_scores
    return tuple(item.contiguous() for item in results)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynamo_backends::attention", _attention, lib=_library)
torch.library.register_fake("dynamo_backends::attention_backward", _attention_backward, lib=_library)


def _interpolate(
    input: torch.Tensor,
    size: list[int] | None = None,
    scale_factor: list[float] | None = None,
    *,
    mode: str = "nearest",
    align_corners: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.interpolate``, with sizes or factors for each dimension.

    Args:
        input: [N, C, ...], floating point, one to three dimensions to be resized.
        size: their sizes in the result; or else
        scale_factor: what their sizes are multiplied by.
        mode: a key of ``INTERPOLATION_BACKWARDS``.
        align_corners: as there; not for the nearest modes.

    Returns:
        [N, C, ...], of the memory format that eager chooses.
    """
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
"""PyTorch's gradient of an interpolation, by its mode and the number of dimensions that are resized."""


class _Interpolation(torch.autograd.Function):
    """``interpolate`` with its gradient, which is one kernel of PyTorch's."""

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
    if forward_ad._current_level >= 0:  # PyTorch's own has a tangent
        return _interpolate(input, size, scale_factor, mode=mode, align_corners=align_corners)
    result: torch.Tensor = _Interpolation.apply(input, size, scale_factor, mode, align_corners)
    return result


_library.impl("interpolate", _interpolate, "CompositeExplicitAutograd")
_library.impl("interpolate", _interpolate_with_gradient, "Autograd")
torch.library.register_fake("dynamo_backends::interpolate", _interpolate, lib=_library)
