"""Computes equal subexpressions once.

Rule: a node with the operator, attributes and inputs of an earlier one of its graph becomes that one::

    a = Exp(x); b = Exp(x); y = Add(a, b)
    a = Exp(x); y = Add(a, a)

Not for

1. operators that draw random numbers, and those with inner graphs, which may;
2. outputs of the model where both are, or one is an input's or a constant's: each has a name, and memory, of its own.

``onnx_ir``'s ``CommonSubexpressionEliminationPass`` does it for whole models: it asks nobody for leave at each node, it
keeps the first of two names even if only the second is an FX node's, and it puts an ``Identity`` where an output would
lose its name.
"""

from __future__ import annotations

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import use_all_existing
from ..engine.registry import Pass

_RANDOM = {
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Multinomial", "Bernoulli", "Dropout"),
}
_NUMBERS = (ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.STRING)
_LISTS = (ir.AttributeType.FLOATS, ir.AttributeType.INTS, ir.AttributeType.STRINGS)


def common_subexpressions(model: ir.Model, context: PassContext) -> int:
    """Merges equal nodes in place; returns how many are gone."""
    fired = 0
    for graph in (model.graph, *model.graph.subgraphs()):
        known: dict[object, ir.Node] = {}
        for node in list(graph):
            key = _key(node)
            first = node if key is None else known.setdefault(key, node)
            if first is not node:
                fired += use_all_existing(node.outputs, first.outputs, context)
    return fired


def _key(node: ir.Node) -> object:
    """Equal for nodes that compute the same; ``None`` for those of which that is not known."""
    if node.op_type in _RANDOM or node.domain not in ("", "ai.onnx", "com.microsoft"):
        return None
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        if attribute.is_ref() or attribute.type not in (*_NUMBERS, *_LISTS, ir.AttributeType.TENSOR):
            return None
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            value = (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
        attributes.append((name, attribute.type, repr(value)))  # repr: 0.0 is not -0.0, and NaN is NaN
    inputs = tuple(None if value is None else id(value) for value in node.inputs)
    return node.op_identifier(), tuple(attributes), inputs, tuple(value.name == "" for value in node.outputs)


PASS = Pass("onnx.common_subexpressions", "Computes equal subexpressions once.", common_subexpressions)
