"""Types and shapes of the results of ONNX nodes: inferred, and compared with what is claimed of them.

ONNX's schemas tell them of ONNX's own operators; of others the target does (``Target.infers``), as far as its runtime
knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from ..context import Inferred, Target

_MOST_DATA = 16
"""Elements of a constant input that inference is told of, as sizes and axes."""


def infer_types(nodes: Iterable[ir.Node], opset: int) -> None:
    """Gives results of ONNX's own operators the dtype and shape they lack, as far as the schemas tell; in place.

    Args:
        nodes: in execution order.
        opset: the version of ONNX's own operators.
    """
    for node in nodes:
        if any(output.type is None or output.shape is None for output in node.outputs):
            settle_types(node, opset, Target())


def settle_types(node: ir.Node, opset: int, target: Target) -> str | None:
    """Infers what a node returns: gives its results the dtype and shape they lack.

    Args:
        node: its inputs have types and shapes, as far as these are known.
        opset: the version of ONNX's own operators.
        target: is asked about other operators.

    Returns:
        What is claimed of a result and cannot be, or why the node cannot be computed; ``None`` if nothing is wrong.
    """
    if any(value is not None and value.type is None for value in node.inputs):
        return None
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
        said = contradiction(output, dtype, dims)
        if said is not None:
            return f"{node.op_type} gives {said}"
        output.type = output.type or ir.TensorType(dtype)
        if output.shape is None and dims is not None:
            output.shape = ir.Shape(dims)
    return None


def contradiction(value: ir.Value, dtype: ir.DataType | None, dims: Sequence[int | str | None] | None) -> str | None:
    """What is claimed of a value and is not so; ``None`` if all may be.

    Args:
        value: what is claimed.
        dtype, dims: what it is, as far as that is known. Sizes of different names are taken to be different.
    """
    if dtype is not None and value.dtype is not None and dtype != value.dtype:
        return f"{dtype}, and {value.name} is {value.dtype}"
    if dims is None or value.shape is None:
        return None
    claimed = dims_of(value.shape)
    both = zip(claimed, dims, strict=False)
    if len(claimed) != len(dims) or any(one != other and None not in (one, other) for one, other in both):
        return f"{_written(dims)}, and {value.name} is {_written(claimed)}"
    return None


def dims_of(shape: ir.Shape) -> list[int | str | None]:
    """A shape's sizes: numbers, names, or ``None`` where nothing is known."""
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def _written(dims: Sequence[int | str | None]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _by_schema(node: ir.Node, opset: int) -> list[Inferred | None] | None:
    """What ONNX's schema says, ``None`` if there is none. Raises ``InferenceError``."""
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
