"""A model of one ONNX node, to ask ONNX Runtime about it."""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from ..onnx_versions import IR_VERSION


def signature(node: ir.Node) -> Hashable:
    """All that an answer about a node depends on but the opset; inputs are told apart by dtype and rank."""
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(None if value is None else (str(value.dtype), _rank(value)) for value in node.inputs)
    outputs = tuple(value.name != "" for value in node.outputs)
    return node.domain, node.op_type, attributes, inputs, outputs


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def model_of(node: ir.Node, opset: int, *, with_sizes: bool = False) -> ir.Model:
    """A model of one node: its inputs become the model's, of the same types and of any size, or of the same sizes."""
    inputs = [None if value is None else _input(f"input_{i}", value, with_sizes) for i, value in enumerate(node.inputs)]
    outputs = [ir.Value(name="" if value.name == "" else f"output_{i}") for i, value in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    imports = {"": opset}
    imports.setdefault(node.domain, 1)
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        [value for value in outputs if value.name],
        nodes=[copy],
        opset_imports=imports,
        name="one_node",
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _input(name: str, value: ir.Value, with_sizes: bool) -> ir.Value:
    rank = _rank(value)
    any_size = None if rank is None else ir.Shape([None] * rank)
    return ir.Value(name=name, type=value.type, shape=value.shape if with_sizes else any_size)
