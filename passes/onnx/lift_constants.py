"""Turns ``Constant`` nodes into initializers, and merges equal ones.

Rule: a ``Constant`` whose result is no graph output becomes an initializer; initializers of one graph with equal dtype,
shape and bytes, up to 1024 elements, become one::

    a = Constant <value_ints=[2, 3]> ()      initializer a = [2, 3]
    x = Reshape(t, a)                        x = Reshape(t, a)
    b = Constant <value_ints=[2, 3]> ()      y = Reshape(u, a)
    y = Reshape(u, b)

``onnx_ir``'s ``LiftConstantsToInitializersPass`` and ``DeduplicateInitializersPass`` do the work, as one match. Nothing
is merged if an initializer is an output, for which ``onnx_ir`` warns.

The other passes on ONNX models expect constants to be initializers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..engine.context import PassContext
from ..engine.onnx.editing import nodes_of
from ..engine.registry import Pass

_SHARED_ELEMENTS = 1024


def lift_constants(model: ir.Model, context: PassContext) -> int:
    """Turns constants into initializers in place; returns how many nodes were removed."""
    constants = [node for node in nodes_of(model, "Constant") if not node.outputs[0].is_graph_output()]
    if not constants or not context.allows("the constants"):
        return 0
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    initializers = [value for graph in model.graphs() for value in graph.initializers.values()]
    if not any(value.is_graph_output() or value.is_graph_input() for value in initializers):
        common.DeduplicateInitializersPass(size_limit=_SHARED_ELEMENTS)(model)
    return sum(node.graph is None for node in constants)


PASS = Pass("onnx.lift_constants", "Turns constants into initializers, equal ones into one.", lift_constants)
