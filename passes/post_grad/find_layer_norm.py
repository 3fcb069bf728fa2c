"""Finds layer normalization that is written out, and writes it as one operator.

Rule: with ``c = x - mean(x, -1)`` and ``v = mean(c ** 2, -1)``, ``c / sqrt(v + eps) * weight + bias`` becomes
``aten.native_layer_norm(x, [size], weight, bias, eps)``; ``c * rsqrt(v + eps)`` and ``c * c`` for ``c ** 2`` count
alike.

Not without weight and bias (there is nothing to gain), not if they are no vectors of the size of the last dimension,
and not in half precisions, where each step rounds; nor if the variance is the unbiased one, or eps is added to the
root.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ..patterns import Pattern, pattern_pass

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match

_EPSILON = {"eps": 0.00123}


def _root(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return weight * (centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + eps)) + bias


def _reciprocal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return weight * (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)) + bias


def _two_means(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return weight * ((x - mean) / torch.sqrt(variance + eps)) + bias


def _replacement(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.ops.aten.native_layer_norm.default(x, [x.shape[-1]], weight, bias, eps)[0]


def _refusal(match: Match) -> str | None:
    value = match.kwargs["x"].meta["val"]
    if value.dtype not in (torch.float32, torch.float64):
        return f"it is computed in {value.dtype}, where each step rounds"
    if not isinstance(match.kwargs["eps"], float) or match.kwargs["eps"] <= 0:
        return "what is added to the variance is no positive number"
    for name in ("weight", "bias"):
        node = match.kwargs[name]
        if not isinstance(node, torch.fx.Node):
            return f"the {name} is no tensor"
        parameter = node.meta["val"]
        if parameter.ndim != 1 or parameter.shape[0] != value.shape[-1] or parameter.dtype is not value.dtype:
            return f"the {name} is {parameter.dtype} {tuple(parameter.shape)}, not one number for each feature"
    return None


def _patterns() -> list[Pattern]:
    x, weight, bias = torch.empty(2, 3, 8), torch.empty(8), torch.empty(8)
    pattern = functools.partial(Pattern, check=_refusal, scalars=_EPSILON, is_stored=True)
    searches = {"root": _root, "reciprocal": _reciprocal, "two_means": _two_means}
    return [pattern(name, search, _replacement, [x, weight, bias]) for name, search in searches.items()]


PASS = pattern_pass(
    "post_grad.find_layer_norm", "Writes layer normalization that is written out as one operator.", _patterns
)
