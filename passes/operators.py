"""Operators that passes put into graphs where ATen has none that means the same.

``dynamo_backends::attention`` and ``attention_backward`` are attention as a model writes it out. ATen's
``scaled_dot_product_attention`` is another function: it returns 0 for a row whose mask hides everything, where softmax
gives NaN, and on the CPU it has no kernel with dropout. PyTorch computes ours step by step; they are there to be one
node in a graph.
"""

from __future__ import annotations

import math

import torch

_library = torch.library.Library("dynamo_backends", "DEF")

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias=None, Tensor? hidden=None, Tensor? kept=None"
_NUMBERS = (
    "float scale=1.0, float fill=0.0, float kept_scale=1.0, bool upcast=False, bool fill_first=False, bool safe=False"
)
_library.define(f"attention({_TENSORS}, *, {_NUMBERS}) -> Tensor")
_library.define(f"attention_backward(Tensor grad, {_TENSORS}, *, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)")

attention = torch.ops.dynamo_backends.attention.default
attention_backward = torch.ops.dynamo_backends.attention_backward.default


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
        scores = scores * scale
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
    products = grad_probabilities * probabilities
    grad_scores = products - probabilities * products.sum(-1, keepdim=True)
    if hidden is not None:
        grad_scores = grad_scores.masked_fill(hidden, 0.0)
    scaled = grad_scores * scale if scale != 1.0 else grad_scores
    grad_query, grad_key = torch.matmul(scaled, key), torch.matmul(scaled.transpose(-2, -1), query)
    results = grad_query, grad_key, grad_value, grad_scores
    return tuple(item.contiguous() for item in results)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("dynamo_backends::attention", _attention, lib=_library)
torch.library.register_fake("dynamo_backends::attention_backward", _attention_backward, lib=_library)
