"""The graph before and after each pass that fired, as a unified diff in the dump: ``passes/joint.remove_noops.diff``.

::

    --- before onnx.remove_unused
    +++ after onnx.remove_unused: fired 1, nodes 3 -> 2
     relu: f32[2, 3] = Relu(x)  # model.py:17
    -dead: f32[2, 3] = Neg(relu)  # model.py:18
     tanh: f32[2, 3] = Tanh(relu)  # model.py:19
"""

from __future__ import annotations

import difflib
import re

import onnx_ir as ir
from torch import fx

from passes.engine.manager import PassResult

from .dump_folder import DumpFolder
from .stage_files import stage_text

_ABBREVIATIONS = {
    ir.DataType.FLOAT: "f32",
    ir.DataType.DOUBLE: "f64",
    ir.DataType.FLOAT16: "f16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.INT64: "i64",
    ir.DataType.INT32: "i32",
    ir.DataType.BOOL: "b8",
}
_FREED = re.compile(r";  (\w+ = )+None$", re.MULTILINE)
"""Where the generated code lets go of a value: in a diff these would move with every use."""

_LONGEST_CONSTANT = 8
"""Elements of a constant that are written out."""


class PassDiffs:
    """Writes the diffs of one graph's passes; the pass manager tells it of each.

    Args:
        folder: the run folder.
        relative: the graph's or the region's folder in it.
    """

    def __init__(self, folder: DumpFolder, relative: str) -> None:
        self._folder = folder
        self._relative = relative
        self._before: list[str] = []

    def start(self, stage: str, graph: object) -> None:
        self._before = graph_text(graph).splitlines()

    def fired(self, result: PassResult, graph: object) -> None:
        after = graph_text(graph).splitlines()
        said = f"after {result.name}: fired {result.fired}, nodes {result.nodes_before} -> {result.nodes_after}"
        if result.undone:
            said += f"; undone: {result.undone}"
        lines = difflib.unified_diff(self._before, after, f"before {result.name}", said, n=3, lineterm="")
        self._folder.write_text(f"{self._relative}/passes/{result.name}.diff", "\n".join(lines) + "\n")
        if not result.undone:
            self._before = after


def graph_text(graph: object) -> str:
    """A graph as text, one line or a few for each node: Python for FX, ``model_text`` for ONNX."""
    if isinstance(graph, fx.GraphModule):
        return _FREED.sub("", stage_text(graph))
    assert isinstance(graph, ir.Model)
    return model_text(graph)


def model_text(model: ir.Model) -> str:
    """An ONNX model, one line for each input, initializer and node: results, types, operator, attributes, source."""
    graph = model.graph
    lines = [f"input {_typed(value)}" for value in graph.inputs]
    lines += [f"initializer {_typed(value)}{_content(value)}" for value in graph.initializers.values()]
    lines += [_node_text(node) for node in graph]
    lines.append("return " + ", ".join(str(value.name) for value in graph.outputs))
    return "\n".join(lines) + "\n"


def _node_text(node: ir.Node) -> str:
    results = ", ".join(map(_typed, node.outputs))
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    arguments = [str(value.name) if value is not None else "None" for value in node.inputs]
    arguments += [f"{name}={_attribute(attribute)}" for name, attribute in node.attributes.items()]
    source = node.metadata_props.get("source", "")
    return f"{results} = {operator}({', '.join(arguments)})" + (f"  # {source}" if source else "")


def _typed(value: ir.Value) -> str:
    if value.dtype is None:
        return str(value.name)
    dtype = _ABBREVIATIONS.get(value.dtype, value.dtype.name.lower())
    return f"{value.name}: {dtype}" + (f"[{', '.join(map(str, value.shape))}]" if value.shape is not None else "")


def _content(value: ir.Value) -> str:
    tensor = value.const_value
    if tensor is None or tensor.size > _LONGEST_CONSTANT:
        return ""
    return f" = {tensor.numpy().tolist()}"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return str(tensor.numpy().tolist()) if tensor.size <= _LONGEST_CONSTANT else f"<{tensor.size} elements>"
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "<graph>"
    return str(attribute.value)
