"""Turns ``Constant`` nodes into initializers, equal ones into one.

Rule: a ``Constant`` whose result is no output of a graph becomes an initializer of its name; initializers of one graph
of the same dtype, shape and bytes, up to 1024 elements, share one. ONNX Runtime does the former at session creation
anyway. The work is ``onnx_ir``'s ``LiftConstantsToInitializersPass`` and ``DeduplicateInitializersPass``, which ask at
no constant: it is one match.

Before and after::

    a = Constant <value_ints=[2, 3]> ()      initializer a = [2, 3]
    x = Reshape(t, a)                        x = Reshape(t, a)
    b = Constant <value_ints=[2, 3]> ()      y = Reshape(u, a)
    y = Reshape(u, b)

Not the latter if an initializer is an output: ``onnx_ir`` warns of such.

Needed: the patterns on ONNX models read constants as initializers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..engine.context import PassContext
from ..engine.onnx.editing import nodes_of
from ..engine.registry import Pass

_SHARED_ELEMENTS = 1024


def lift_constants(model: ir.Model, context: PassContext) -> int:
    """Makes initializers of constants, in place; returns how many nodes are gone."""
    constants = [node for node in nodes_of(model, "Constant") if not node.outputs[0].is_graph_output()]
    if not constants or not context.allows("the constants"):
        return 0
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    initializers = [value for graph in model.graphs() for value in graph.initializers.values()]
    if not any(value.is_graph_output() or value.is_graph_input() for value in initializers):
        common.DeduplicateInitializersPass(size_limit=_SHARED_ELEMENTS)(model)
    return sum(node.graph is None for node in constants)


PASS = Pass("onnx.lift_constants", "Turns constants into initializers, equal ones into one.", lift_constants)
