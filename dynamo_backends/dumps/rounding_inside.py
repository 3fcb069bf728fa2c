"""What the nodes of an ONNX model may round: the magnitudes of the terms that they add up, and how many these are.

What is known of PyTorch's operators, in ``numerics.operator_facts``, is known of ONNX's, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from ..numerics import operator_facts as facts
from .reference_evaluator import Change, widened
from .submodels import Feeds

_OF_ATEN = {
    "Identity": "alias", "Flatten": "view", "Concat": "cat", "Pad": "constant_pad_nd", "Tile": "repeat", "Sum": "add",
    "MatMul": "mm", "Gemm": "mm", "Einsum": "matmul", "Conv": "convolution", "ConvTranspose": "convolution",
    "ReduceSum": "sum", "ReduceMean": "mean", "GlobalAveragePool": "mean", "AveragePool": "avg_pool2d",
    "LogSoftmax": "_log_softmax",
}  # fmt: skip
"""Operators whose name in PyTorch is another, beside capital letters. What is known of these is known of ONNX's."""

_NORMS = frozenset({"LayerNormalization", "InstanceNormalization", "GroupNormalization", "BatchNormalization"})


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
    names = {_name(node) for node in nodes}
    if names & facts.SUMS and all(map(facts.adds_up_named, names)):
        found = again(lambda array: np.abs(widened(array)))
        return None if found is None else found.abs()
    read = _value(nodes[0].inputs[0], feeds) if len(nodes) == 1 and nodes[0].inputs else None
    if read is None or nodes[0].outputs[0].name != name:
        return None
    [node] = nodes
    if node.op_type in _NORMS:
        return _of_normalization(node, read, feeds)
    if node.op_type == "Resize" and read.ndim in facts.POOLS:
        near = facts.POOLS[read.ndim](
            torch.from_numpy(np.abs(read)), 5, 1, 2
        ).numpy()  # cubic: two elements on each side
        found = again(lambda array: near if array.shape == near.shape else widened(array))
        return None if found is None else found.abs() * max(*found.shape[2:], *read.shape[2:])
    return facts.size_inside_named(_name(node), torch.from_numpy(read))


def _name(node: ir.Node) -> str:
    """The name of its operator in PyTorch, as far as there is one; also of ONNX Runtime's own operators."""
    return _OF_ATEN.get(node.op_type, node.op_type.lower())


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
    name, shapes = _name(node), [_shape(value, feeds) for value in node.inputs]
    first, second = [*shapes, (), ()][:2]
    if facts.adds_up_named(name) and name not in facts.SUMS:
        return len(shapes) if name == "add" else 1
    if name == "mm" and first:
        return first[0 if _integer(node, "transA", 0) else -1]
    if name == "convolution" and second:
        return facts.terms_of_weight(second)
    result = feeds.get(str(node.outputs[0].name))
    if name in ("sum", "mean") and result is not None:
        return max(1, math.prod(first) // max(1, result.size))
    return max(map(math.prod, shapes), default=1)


def _of_normalization(node: ir.Node, read: np.ndarray, feeds: Feeds) -> torch.Tensor | None:
    """See ``operator_facts.scaled``."""
    found = node.attributes.get("epsilon")
    epsilon = 1e-5 if found is None else float(found.value)
    columns = (1, -1, *[1] * (read.ndim - 2))
    given = [_value(value, feeds) for value in [*node.inputs[1:], *[None] * 4][:4]]
    if node.op_type == "GroupNormalization":  # before opset 21, the scale and bias are of groups
        given = [None if item is None else item.repeat(max(1, read.shape[1] // item.size)) for item in given]
    if node.op_type != "LayerNormalization":
        given = [None if item is None else item.reshape(columns) for item in given]
    scale, bias, means, variance = (None if item is None else torch.from_numpy(item).abs() for item in given)
    values = torch.from_numpy(read)
    if node.op_type == "BatchNormalization":
        if means is None or variance is None:
            return None
    else:
        axes = tuple(range(2, read.ndim))
        if node.op_type == "LayerNormalization":
            axes = tuple(range(_integer(node, "axis", -1) % read.ndim, read.ndim))
        elif node.op_type == "GroupNormalization":
            values, axes = values.reshape(read.shape[0], _integer(node, "num_groups", 1), -1), (2,)
        means, variance = values.abs().mean(axes, keepdim=True), values.var(axes, correction=0, keepdim=True)
    return facts.scaled(values.abs(), means, 1 / (variance + epsilon).sqrt(), read.shape, scale, bias)
