"""ONNX models of which chosen nodes compute in another floating-point dtype than the model's own.

::

    variant = widened(model, lambda node: node.op_type == "Softmax", ir.DataType.FLOAT)
    exact = widened(model, lambda node: True, ir.DataType.DOUBLE, wide_outputs=True)

A chosen node reads and returns the wider dtype. Between two chosen nodes values stay wide; where another node reads
what a chosen one returns, a ``Cast`` rounds it. The inputs of the model keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Dtypes of low precision."""

_WIDTH = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 1, ir.DataType.FLOAT: 2, ir.DataType.DOUBLE: 3}

_DTYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision")
"""What names the dtype of a result, or of what is in between."""


def is_low(value: ir.Value | None) -> bool:
    """Whether a value is of low precision."""
    return value is not None and value.dtype in LOW


def widened(
    model: ir.Model, is_chosen: Callable[[ir.Node], bool], dtype: ir.DataType, *, wide_outputs: bool = False
) -> ir.Model:
    """A copy of a model in which chosen nodes compute in a wider dtype.

    A node with a subgraph stays as it is: what is in it is not looked into.

    Args:
        model: every value of it with its dtype; left as it is.
        is_chosen: of a node of the model.
        dtype: the wider dtype; floating-point values that are narrower are widened.
        wide_outputs: whether outputs of the model that chosen nodes compute are wide too.
    """
    copy = model.clone()
    chosen = {
        id(ours)
        for theirs, ours in zip(model.graph, copy.graph, strict=True)
        if is_chosen(theirs) and not any(item.type in _SUBGRAPHS for item in theirs.attributes.values())
    }
    wide: dict[ir.Value, ir.Value] = {}
    casts: list[ir.Node] = []
    for node in list(copy.graph):
        if id(node) not in chosen:
            continue
        for i, value in enumerate(node.inputs):
            if value is not None and _is_narrower(value, dtype):
                if value not in wide:
                    cast = _cast(value, dtype, _name(str(value.name), dtype))
                    copy.graph.insert_before(node, cast)
                    casts.append(cast)
                    wide[value] = cast.outputs[0]
                node.replace_input_with(i, wide[value])
        if node.op_type == "Constant":
            continue  # the user's number has the model's precision; who reads it widens it
        outputs = [value for value in node.outputs if value.name and _is_narrower(value, dtype)]
        _widen_attributes(node, dtype)
        for value in outputs:
            cast = _give_up_name(value, dtype, node, wide_outputs=wide_outputs)
            if cast is not None:
                casts.append(cast)
                wide[cast.outputs[0]] = value
    outputs_of_model = set(copy.graph.outputs)
    for cast in reversed(casts):
        if not cast.outputs[0].uses() and cast.outputs[0] not in outputs_of_model:
            copy.graph.remove(cast, safe=True)
    return copy


_SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _is_narrower(value: ir.Value, dtype: ir.DataType) -> bool:
    return value.dtype in _WIDTH and _WIDTH[value.dtype] < _WIDTH[dtype]


def _name(name: str, dtype: ir.DataType) -> str:
    """Of a value in a wider dtype."""
    return f"{name}__{dtype.name.lower()}"


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{value.name}__to_{dtype.name.lower()}")
    cast.outputs[0].name = name
    cast.outputs[0].type = ir.TensorType(dtype)
    cast.outputs[0].shape = value.shape
    return cast


def _give_up_name(value: ir.Value, dtype: ir.DataType, node: ir.Node, *, wide_outputs: bool) -> ir.Node | None:
    """Makes a node's result wide; a Cast to what it was takes its name and its readers."""
    graph, name, narrow = node.graph, str(value.name), value.dtype
    assert isinstance(graph, ir.Graph) and narrow is not None
    is_output = value in graph.outputs
    value.type = ir.TensorType(dtype)  # not its dtype: the copy shares the type with the model
    if wide_outputs and is_output and not value.uses():
        return None
    value.name = _name(name, dtype)
    users = list(value.uses())
    cast = _cast(value, narrow, name)
    for user, index in users:
        user.replace_input_with(index, cast.outputs[0])
    graph.insert_after(node, cast)
    if is_output and not wide_outputs:
        graph.outputs[:] = [cast.outputs[0] if item is value else item for item in graph.outputs]
    elif is_output:
        value.name, cast.outputs[0].name = name, f"{name}__narrow"
    return cast


def _widen_attributes(node: ir.Node, dtype: ir.DataType) -> None:
    """Makes the dtypes that a node names as wide."""
    for name in _DTYPE_ATTRIBUTES:
        found = node.attributes.get(name)
        if found is not None and not found.is_ref() and found.type == ir.AttributeType.INT:
            named = ir.DataType(found.as_int())
            if named in _WIDTH and _WIDTH[named] < _WIDTH[dtype]:
                node.attributes[name] = ir.AttrInt64(name, int(dtype))
    value = node.attributes.get("value")
    if node.op_type == "ConstantOfShape" and value is not None:
        tensor = value.as_tensor()
        if tensor.dtype in _WIDTH and _WIDTH[tensor.dtype] < _WIDTH[dtype]:
            array = tensor.numpy().astype(dtype.numpy())
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
