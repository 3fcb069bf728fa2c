"""What the nodes of an ONNX model may round: the magnitudes of the terms that they add up, and how many these are.

The same for operators of PyTorch is in ``numerics.operator_facts``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch

from ..numerics.operator_facts import size_inside_named
from .reference_evaluator import Change, widened
from .submodels import Feeds

_MOVES = frozenset(
    {
        "Identity", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Slice", "Gather", "Expand",
        "Pad", "Split", "Tile",
    }
)  # fmt: skip

_ADDS = frozenset({"Add", "Sum"})

_SUMS = frozenset(
    {
        "MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "ReduceSum", "ReduceMean", "CumSum", "AveragePool",
        "GlobalAveragePool",
    }
)  # fmt: skip
"""Operators that, on magnitudes, return the sums of the magnitudes of their terms."""

_NORMS = frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization", "BatchNormalization"})

_OF_ONE = {"LogSoftmax": "_log_softmax"}
"""Functions whose name differs in PyTorch."""

_POOLS: Mapping[int, Callable[..., torch.Tensor]] = {
    3: torch.nn.functional.max_pool1d,
    4: torch.nn.functional.max_pool2d,
    5: torch.nn.functional.max_pool3d,
}


def terms(model: ir.Model, feeds: Feeds) -> int:
    """The most terms that a node of a model adds up for an element; of an operator that is not known, all that it
    reads."""
    return max((_terms(node, feeds) for node in model.graph), default=1)


def magnitudes(
    model: ir.Model, feeds: Feeds, name: str, again: Callable[[Change], torch.Tensor | None]
) -> torch.Tensor | None:
    """What a value may round, in units of the sum of the magnitudes of the terms of each element, or of the largest
    number inside its computation; ``None`` if that is not known.

    ``again`` computes the value in float64 from changed numbers.
    """
    nodes = list(model.graph)
    operators = {node.op_type for node in nodes}
    if operators & _SUMS and operators <= _SUMS | _ADDS | _MOVES:
        found = again(lambda array: np.abs(widened(array)))
        return None if found is None else found.abs()
    read = _value(nodes[0].inputs[0], feeds) if len(nodes) == 1 and nodes[0].inputs else None
    if read is None or nodes[0].outputs[0].name != name:
        return None
    [node] = nodes
    if node.op_type in _NORMS:
        return _of_normalization(node, read, feeds)
    if node.op_type == "Resize" and read.ndim in _POOLS:
        near = _POOLS[read.ndim](torch.from_numpy(np.abs(read)), 5, 1, 2).numpy()  # cubic: two elements on each side
        found = again(lambda array: near if array.shape == near.shape else widened(array))
        return None if found is None else found.abs() * max(*found.shape[2:], *read.shape[2:])
    return size_inside_named(_OF_ONE.get(node.op_type, node.op_type.lower()), torch.from_numpy(read))


def _value(value: ir.Value | None, feeds: Feeds) -> np.ndarray | None:
    """A floating-point value that a node reads, in float64."""
    if value is None:
        return None
    array = feeds.get(str(value.name)) if value.const_value is None else value.const_value.numpy()
    return None if array is None or array.dtype.kind in "biuOSU" else widened(array)


def _shape(value: ir.Value | None, feeds: Feeds) -> tuple[int, ...]:
    if value is None:
        return ()
    array = feeds.get(str(value.name)) if value.const_value is None else value.const_value
    return () if array is None else tuple(map(int, array.shape))


def _integer(node: ir.Node, name: str, otherwise: int) -> int:
    found = node.attributes.get(name)
    return otherwise if found is None or found.is_ref() else int(found.value)


def _terms(node: ir.Node, feeds: Feeds) -> int:
    name, shapes = node.op_type, [_shape(value, feeds) for value in node.inputs]
    if name in _MOVES | _ADDS:
        return len(shapes) if name in _ADDS else 1
    first, second = [*shapes, (), ()][:2]
    if name == "MatMul" and first:
        return first[-1]
    if name == "Gemm" and len(first) == 2:
        return first[0 if _integer(node, "transA", 0) else 1]
    if name == "Conv" and second:
        return math.prod(second[1:])
    if name == "ConvTranspose" and second:
        return math.prod((second[0], *second[2:]))
    if name in ("ReduceSum", "ReduceMean", "GlobalAveragePool") and node.outputs[0].name in feeds:
        return max(1, math.prod(first) // max(1, feeds[str(node.outputs[0].name)].size))
    return max(map(math.prod, shapes), default=1)


def _of_normalization(node: ir.Node, read: np.ndarray, feeds: Feeds) -> torch.Tensor | None:
    """``(|x| + mean |x|) / deviation * |weight| + |bias|``."""
    found = node.attributes.get("epsilon")
    epsilon = 1e-5 if found is None else float(found.value)
    scale, bias, *given = [_value(value, feeds) for value in [*node.inputs[1:], None, None][:4]]
    size = np.abs(read)
    if node.op_type == "BatchNormalization":
        columns = (1, -1, *[1] * (read.ndim - 2))
        mean, variance = (None if item is None else item.reshape(columns) for item in given)
        if mean is None or variance is None:
            return None
        inner = (size + np.abs(mean)) / np.sqrt(variance + epsilon)
    else:
        columns = (1, -1, *[1] * (read.ndim - 2))
        grouped, axes = size, tuple(range(2, read.ndim))
        if node.op_type == "LayerNormalization":
            axes = tuple(range(_integer(node, "axis", -1) % read.ndim, read.ndim))
            columns = None
        values = read
        if node.op_type == "GroupNormalization":
            values = read.reshape(read.shape[0], _integer(node, "num_groups", 1), -1)
            grouped, axes = np.abs(values), (2,)
        deviation = np.sqrt(values.var(axes, keepdims=True) + epsilon)
        inner = ((grouped + grouped.mean(axes, keepdims=True)) / deviation).reshape(read.shape)
    for item, is_added in ((scale, False), (bias, True)):
        if item is not None:
            item = np.abs(item if columns is None else item.reshape(columns))
            if node.op_type == "GroupNormalization" and item.size not in (1, read.shape[1]):
                item = item.repeat(read.shape[1] // item.size, 1)  # of each group, before opset 21
            inner = inner + item if is_added else inner * item
    return torch.from_numpy(np.ascontiguousarray(inner))
