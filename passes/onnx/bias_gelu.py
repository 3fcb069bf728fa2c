"""Fuses GELU with the bias before it.

Rule: ``Gelu`` (the exact one, of float32) of a sum of a tensor and a vector of its last dimension, which has no other
use, becomes ``com.microsoft.BiasGelu``.

Before and after (x: [B, S, H], b: [H])::

    s = Add(x, b)                            y = com.microsoft.BiasGelu (x, b)
    y = Gelu <approximate="none"> (s)

It must not fire for the tanh form: ``FastGelu`` with a bias took 77 us where ``Add`` and ``Gelu`` took 44 (2x64x1024,
two threads). ``BiasGelu`` is what ONNX Runtime makes of the exact form itself: 59 us both.
"""

from __future__ import annotations

import onnx_ir as ir

from ..context import PassContext
from ..onnx_graph import hidden_value, is_only_used_by, nodes_of, producer, same_shape, sizes, substitute
from ..registry import Pass


def bias_gelu(model: ir.Model, context: PassContext) -> int:
    """Fuses biases in place; returns how many."""
    fired = 0
    for domain in ("", "com.microsoft"):
        for node in nodes_of(model, "Gelu", domain=domain):
            fired += _rewrite(model, context, node)
    return fired


def _rewrite(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    total, result = producer(node.inputs[0], "Add"), node.outputs[0]
    approximate = node.attributes.get("approximate")
    if total is None or (approximate is not None and approximate.as_string() != "none"):
        return False
    if result.dtype != ir.DataType.FLOAT:
        context.refuse(node, f"it is of {result.dtype}, not float32", matched=2, of=2)
        return False
    if not is_only_used_by(total.outputs[0], node):
        context.refuse(node, "the sum is needed elsewhere", matched=2, of=2)
        return False
    shape = sizes(result)
    for i, j in ((0, 1), (1, 0)):
        value, bias = total.inputs[i], total.inputs[j]
        if shape and len(shape) > 1 and sizes(bias) == shape[-1:] and same_shape(value, result):
            outputs = [hidden_value(result, "gelu")]
            new = ir.Node("com.microsoft", "BiasGelu", [value, bias], outputs=outputs)
            return substitute(model, context, [result], [new])
    context.refuse(node, "what is added is no vector of the last dimension", matched=2, of=2)
    return False


PASS = Pass("onnx.bias_gelu", "Fuses GELU with the bias before it.", bias_gelu)
