"""Keeps an interpolation one node, which AOTAutograd would decompose.

Rule::

    interpolate(x, scale_factor=2, mode="bilinear")                   # x: f32[1, 64, 32, 32]

    dynamo_backends.interpolate(x, None, [2.0, 2.0], mode="bilinear", align_corners=False)

PyTorch decomposes interpolations whatever decompositions a compiler chooses: a bilinear one becomes thirty nodes that
gather and mix four images, its gradient four sums at indices. ONNX has ``Resize``; the gradient is one PyTorch kernel.

Not for

1. bicubic interpolation, for which ``Resize`` is ten times as slow as PyTorch's kernel, or ``antialias``;
2. symbolic sizes of the resized dimensions, or a gradient with a symbolic batch that fake tensors cannot infer;
3. other dtypes than float32, or transforms of ``torch.func``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from .. import operators
from ..engine.context import PassContext
from ..engine.fx.editing import call, replace, value_of
from ..engine.registry import Pass

_SIGNATURE = inspect.signature(torch.nn.functional.interpolate)


def interpolate(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces interpolations in place; returns how many."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.nn.functional.interpolate):
        arguments = _SIGNATURE.bind(*node.args, **node.kwargs)
        arguments.apply_defaults()
        given = arguments.arguments
        reason = _reason_against(node, given)
        if reason is not None:
            context.record_near_miss(node, reason, matched=1, of=1)
            continue
        result = value_of(node)
        assert result is not None
        by_factor = given["size"] is None and not given["recompute_scale_factor"]
        size = None if by_factor else list(result.shape[2:])
        factors = _for_each(given["scale_factor"], result.ndim - 2) if by_factor else None
        options = {"mode": given["mode"], "align_corners": bool(given["align_corners"])}
        new = call(node, operators.interpolate, (given["input"], size, factors), options)
        fired += replace(node, new, context)
    return fired


def _for_each(factor: Any, dimensions: int) -> list[float]:
    """A factor for each dimension, from one or several."""
    return [float(item) for item in factor] if isinstance(factor, Sequence) else [float(factor)] * dimensions


def _reason_against(node: fx.Node, given: dict[str, Any]) -> str | None:
    value, result = value_of(given["input"]), value_of(node)
    if value is None or type(value) is not FakeTensor or result is None or value.dtype is not torch.float32:
        return "its argument is no plain float32 tensor"
    if (given["mode"], value.ndim - 2) not in operators.INTERPOLATION_BACKWARDS or given["antialias"]:
        return f"ONNX Runtime has no fast kernel for mode {given['mode']}{' with antialias' * bool(given['antialias'])}"
    if not all(isinstance(size, int) for size in (*value.shape[2:], *result.shape[2:])):
        return "the resized dimensions are symbolic"
    has_symbolic_batch = not all(isinstance(size, int) for size in value.shape[:2])
    is_in_python = given["mode"].startswith("nearest") and value.ndim == 4  # the gradient's meta function (2.13)
    if has_symbolic_batch and value.requires_grad and not is_in_python:
        return "PyTorch cannot infer its gradient for a symbolic batch"
    if any(isinstance(item, fx.Node) for item in _pytree.tree_leaves(given["scale_factor"])):
        return "its factors are computed in the graph"
    if result.numel() == 0:
        return "it is empty"
    if any("functorch" in str(getattr(other.target, "__module__", "")) for other in node.graph.nodes):
        return "a transform of torch.func is in the graph"
    return None


PASS = Pass(
    "pre_grad.interpolate",
    "Keeps an interpolation one node, which is a Resize, and its gradient one kernel of PyTorch's.",
    interpolate,
)
