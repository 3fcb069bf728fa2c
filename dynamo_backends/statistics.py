"""The dtype of the statistics that a normalization saves for its gradient, where PyTorch's fake tensors have another.

On a CPU the kernel takes half precision with float32 weights, as under autocast, and returns mean and inverse standard
deviation in float32; the fake tensors are in half precision (PyTorch 2.13). What is compiled for these would refuse the
real ones, or misread them.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)

_TENSORS = {
    aten.native_layer_norm.default: (0, 2, 3),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_batch_norm.default: (0, 1, 2, 3, 4),
    aten._native_batch_norm_legit_functional.default: (0, 1, 2, 3, 4),
    aten._native_batch_norm_legit_no_training.default: (0, 1, 2, 3, 4),
    aten._native_batch_norm_legit.no_stats: (0, 1, 2),
}
"""Normalizations, and which of their arguments are tensors: what is normalized, then weights and running statistics."""


def correct_statistics(module: fx.GraphModule) -> None:
    """Gives the saved statistics of normalizations in half precision the dtypes that PyTorch's kernels give them.

    Args:
        module: an ATen graph; its nodes' ``meta["val"]`` change in place.
    """
    for node in module.graph.nodes:
        if node.target not in _TENSORS:
            continue
        values = [_value(node, i) for i in _TENSORS[node.target]]
        first = values[0]
        if first is None or first.dtype not in _HALVES or first.device.type != "cpu":
            continue
        dtypes = _dtypes(node.target, tuple(value.dtype if value is not None else None for value in values))
        result, mean, deviation, *others = node.meta["val"]
        node.meta["val"] = (result, mean.to(dtypes[0]), deviation.to(dtypes[1]), *others)
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]


def _value(node: fx.Node, position: int) -> torch.Tensor | None:
    argument = node.args[position]
    return argument.meta["val"] if isinstance(argument, fx.Node) else None


@functools.cache
def _dtypes(target: torch._ops.OpOverload, dtypes: tuple[torch.dtype | None, ...]) -> tuple[torch.dtype, torch.dtype]:
    """What PyTorch's kernel saves; it is asked with tensors of a few elements."""
    normalized, *others = dtypes
    assert normalized is not None
    with _disable_current_modes():
        x = torch.zeros(2, 4, dtype=normalized)
        rest = [torch.ones(4, dtype=dtype) if dtype is not None else None for dtype in others]
        if target is aten.native_layer_norm.default:
            results = target(x, [4], *rest, 1e-5)
        elif target is aten.native_group_norm.default:
            results = target(x, *rest, 2, 4, 1, 2, 1e-5)
        elif target is aten._native_batch_norm_legit_no_training.default:
            results = target(x, *rest, 0.1, 1e-5)
        else:
            results = target(x, *rest, True, 0.1, 1e-5)
    return results[1].dtype, results[2].dtype
