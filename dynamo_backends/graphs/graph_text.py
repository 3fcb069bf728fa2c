"""Describes the nodes of FX graphs and ONNX models in one form, and writes ONNX models as text, a line for each node::

input x: f32[2, 3]
relu: f32[2, 3] = Relu(x)  # model.py:17
return relu
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

if TYPE_CHECKING:
    import onnx_ir as ir

Kind = Literal["input", "initializer", "node", "output"]


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """An input, an initializer, a node, or the list of outputs. Unknown texts are empty.

    Attributes:
        kind: which of these.
        results: the names of its results, at least one; ``("return",)`` for the outputs.
        operator: of a node: ``aten.relu.default``, ``getitem``, ``Relu``, ``com.microsoft.Gelu``.
        arguments: as text: names of values, constants, ``axis=-1``.
        types: the type of each result: ``f32[2, 3]``, in FX with strides ``f32[2, 3][3, 1]``.
        source: the user's ``file:line``.
        code: the text of that line.
        origin: the FX node that an ONNX node was translated from.
        user_name: the user's name of an input: ``encoder.fc.weight``.
    """

    kind: Kind
    results: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    operator: str = ""
    arguments: tuple[str, ...] = ()
    types: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("",)
    source: str = ""
    code: str = ""
    origin: str = ""
    user_name: str = ""

    @property
    def name(self) -> str:
        """The name of its first result."""
        return self.results[0]

    @property
    def call(self) -> str:
        """The operator with its arguments: ``aten.relu.default(x)``."""
        return f"{self.operator}({', '.join(self.arguments)})"

    @property
    def text(self) -> str:
        """The line of the graph's text, without the source."""
        if self.kind == "output":
            return f"return {', '.join(self.arguments)}"
        results = ", ".join(
            f"{name}: {type_}" if type_ else name for name, type_ in zip(self.results, self.types, strict=True)
        )
        if self.kind == "node":
            return f"{results} = {self.call}"
        return f"{self.kind} {results}" + "".join(f" = {value}" for value in self.arguments)


_FREE_STATEMENTS = re.compile(r";  (\w+ = )+None$", re.MULTILINE)


def without_freeing(code: str) -> str:
    """The code of an FX graph without ``;  x = None``, which would clutter a diff."""
    return _FREE_STATEMENTS.sub("", code)


_LARGEST_CONSTANT = 8
"""Larger constants, in elements, are not written out."""


def onnx_nodes(model: ir.Model) -> list[GraphNode]:
    """The inputs, nodes, outputs and initializers of a model, all of whose values have names."""
    return [*_onnx_nodes(model.graph, model.graph.initializers.values())]


def _onnx_nodes(graph: ir.Graph | ir.Function, initializers: Sequence[ir.Value] = ()) -> Iterator[GraphNode]:
    initialized = {id(value) for value in initializers}
    for value in graph.inputs:
        if id(value) not in initialized:
            yield GraphNode("input", (str(value.name),), types=(_type(value),))
    for node in graph:
        arguments = [str(value.name) if value is not None else "None" for value in node.inputs]
        arguments += [f"{name}={_attribute(attribute)}" for name, attribute in node.attributes.items()]
        yield GraphNode(
            "node",
            tuple(str(value.name) for value in node.outputs),
            f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            tuple(arguments),
            tuple(map(_type, node.outputs)),
            source=node.metadata_props.get("source", ""),
            origin=node.metadata_props.get("fx_node", ""),
        )
    yield GraphNode("output", ("return",), arguments=tuple(str(value.name) for value in graph.outputs))
    for value in initializers:
        yield GraphNode("initializer", (str(value.name),), arguments=_content(value), types=(_type(value),))


def model_text(model: ir.Model) -> str:
    """The text of a model and of its functions."""
    lines = [_line(node) for node in onnx_nodes(model)]
    for function in model.functions.values():
        lines += ["", f"function {function.domain}.{function.name}:"]
        lines += [f"    {_line(node)}" for node in _onnx_nodes(function)]
    return "\n".join(lines) + "\n"


def _line(node: GraphNode) -> str:
    return f"{node.text}  # {node.source}" if node.source else node.text


def _type(value: ir.Value) -> str:
    if value.dtype is None:
        return ""
    return value.dtype.short_name() + (f"[{', '.join(map(str, value.shape))}]" if value.shape is not None else "")


def _content(value: ir.Value) -> tuple[str, ...]:
    tensor = value.const_value
    return () if tensor is None or tensor.size > _LARGEST_CONSTANT else (str(tensor.numpy().tolist()),)


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"  # the function's parameter
    kind = attribute.type.name
    if kind == "TENSOR":
        tensor = attribute.as_tensor()
        return str(tensor.numpy().tolist()) if tensor.size <= _LARGEST_CONSTANT else f"<{tensor.size} elements>"
    if kind in ("GRAPH", "GRAPHS"):
        return "<graph>"
    if kind == "FLOAT":
        return f"{attribute.as_float():.7g}"  # the digits of a float32
    return str(attribute.value)
