"""Infers dtypes and shapes of the results of ONNX nodes, and compares them with those the values have.

ONNX's schemas infer those of ONNX's own operators, ``Target.infers`` those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from ..context import Inferred, Target

_MOST_DATA = 16
"""Constants of up to so many elements, such as sizes and axes, are passed to the inference."""


def infer_types(nodes: Iterable[ir.Node], opset: int) -> None:
    """Sets missing dtypes and shapes of the results of ONNX's own operators, for nodes in execution order."""
    for node in nodes:
        if any(output.type is None or output.shape is None for output in node.outputs):
            settle_types(node, opset, Target())


def settle_types(node: ir.Node, opset: int, target: Target) -> str | None:
    """Sets missing dtypes and shapes of a node's results, and checks those that are set.

    Args:
        node: the node, whose inputs have types and shapes as far as known.
        opset: the version of ONNX's own operators.
        target: infers other operators.

    Returns:
        The contradiction, or why the node cannot be computed; else ``None``.
    """
    if any(value is not None and value.type is None for value in node.inputs):
        return None
    if node.op_type == "If":
        return _settle_choice(node)
    try:
        known: Sequence[Inferred | None] | None = _by_schema(node, opset) if node.domain in ("", "ai.onnx") else None
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        return f"{node.op_type} cannot be computed: {str(error).strip().splitlines()[-1]}"
    if known is None:
        known = target.infers(node)
    for output, found in zip(node.outputs, known or (), strict=False):
        if found is None:
            continue
        dtype, dims = found
        problem = contradiction(output, dtype, dims)
        if problem is not None:
            return f"{node.op_type} gives {problem}"
        output.type = output.type or ir.TensorType(dtype)
        if output.shape is None and dims is not None:
            output.shape = ir.Shape(dims)
    return None


def _settle_choice(node: ir.Node) -> str | None:
    """``settle_types`` of an ``If``, whose branches have types: their schema does not know the values around them."""
    branches = [attribute.as_graph().outputs for attribute in node.attributes.values()]
    for output, first, second in zip(node.outputs, *branches, strict=True):
        for branch in (first, second):
            problem = contradiction(output, branch.dtype, None if branch.shape is None else dims_of(branch.shape))
            if problem is not None:
                return f"a branch gives {problem}"
            output.type = output.type or branch.type
        output.shape = output.shape or first.shape or second.shape
    return None


def contradiction(value: ir.Value, dtype: ir.DataType | None, dims: Sequence[int | str | None] | None) -> str | None:
    """How a value's dtype or shape differs from the inferred ones, or ``None``. Unknown ones do not differ.

    Args:
        value: the value.
        dtype, dims: the inferred dtype and shape. Different symbolic names are different sizes.
    """
    if dtype is not None and value.dtype is not None and dtype != value.dtype:
        return f"{dtype}, and {value.name} is {value.dtype}"
    if dims is None or value.shape is None:
        return None
    claimed = dims_of(value.shape)
    both = zip(claimed, dims, strict=False)
    if len(claimed) != len(dims) or any(_differ(*sizes) for sizes in both):
        return f"{_written(dims)}, and {value.name} is {_written(claimed)}"
    return None


def _differ(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes differ. A guard of PyTorch may have made an expression such as ``max(0, s - 2)`` a number."""
    if None in (one, other) or one == other:
        return False
    return isinstance(one, int) == isinstance(other, int) or "max(" not in f"{one} {other}".lower()


def dims_of(shape: ir.Shape) -> list[int | str | None]:
    """A shape's sizes: numbers, symbolic names, or ``None`` if unknown."""
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def _written(dims: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _by_schema(node: ir.Node, opset: int) -> list[Inferred | None] | None:
    """The types that ONNX's schema infers, ``None`` without a schema. Raises ``InferenceError``."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    names = ["" if value is None else f"input_{i}" for i, value in enumerate(node.inputs)]
    proto = onnx.helper.make_node(node.op_type, names, [f"output_{i}" for i in range(len(node.outputs))])
    proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
    types, data = {}, {}
    for name, value in zip(names, node.inputs, strict=True):
        if value is None or value.type is None:
            continue
        types[name] = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(types[name], value.shape)
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.size <= _MOST_DATA:
            data[name] = ir.serde.serialize_tensor(tensor)
    found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
    return [_read(found.get(f"output_{i}")) for i in range(len(node.outputs))]


def _read(proto: onnx.TypeProto | None) -> Inferred | None:
    kind = None if proto is None else ir.serde.deserialize_type_proto_for_type(proto)
    if proto is None or not isinstance(kind, ir.TensorType):
        return None
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    return kind.dtype, None if shape is None else dims_of(shape)
