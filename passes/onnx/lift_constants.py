"""Turns ``Constant`` nodes into initializers, equal ones into one.

Rule: a ``Constant`` of numbers whose result is no output of a graph becomes an initializer of its name; constants of
the same dtype, shape and bytes, up to 4 KiB, share one. ONNX Runtime does the former at session creation anyway.

Before and after::

    a = Constant <value_ints=[2, 3]> ()      initializer a = [2, 3]
    x = Reshape(t, a)                        x = Reshape(t, a)
    b = Constant <value_ints=[2, 3]> ()      y = Reshape(u, a)
    y = Reshape(u, b)

Constants of subgraphs become initializers of their own graph and are not shared with others.
"""

from __future__ import annotations

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import nodes_of
from ..engine.registry import Pass

_SHARED_BYTES = 4096


def lift_constants(model: ir.Model, context: PassContext) -> int:
    """Makes initializers of constants, in place; returns how many nodes are gone."""
    known: dict[object, ir.Value] = {}
    for value in model.graph.initializers.values():
        if value.const_value is not None and not value.is_graph_input() and not value.is_graph_output():
            known.setdefault(_key(model.graph, value.const_value), value)
    fired = 0
    for node in nodes_of(model, "Constant"):
        result = node.outputs[0]
        tensor = ir.convenience.get_const_tensor(result)
        graph = node.graph
        if tensor is None or tensor.dtype == ir.DataType.STRING or result.is_graph_output() or graph is None:
            continue
        if not isinstance(graph, ir.Graph) or not context.allows(node):
            continue
        key = _key(graph, tensor)
        shared = known.get(key)
        if shared is None:
            shared = ir.Value(
                name=result.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor
            )
            graph.register_initializer(shared)
            known[key] = shared
        result.replace_all_uses_with(shared)
        graph.remove(node, safe=True)
        fired += 1
    return fired


def _key(graph: ir.Graph, tensor: ir.TensorProtocol) -> object:
    if tensor.nbytes > _SHARED_BYTES:
        return id(tensor)
    return id(graph), tensor.dtype, tuple(tensor.shape), tensor.tobytes()


PASS = Pass("onnx.lift_constants", "Turns constants into initializers, equal ones into one.", lift_constants)
