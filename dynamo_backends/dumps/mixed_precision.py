"""Changes the floating-point dtype in which chosen nodes of an ONNX model compute.

::

    variant = widened(model, lambda node: node.op_type == "Softmax", ir.DataType.FLOAT)
    exact = widened(model, lambda node: True, ir.DataType.DOUBLE, wide_outputs=True)

A chosen node reads and returns the wider dtype. Values between two chosen nodes stay wide; for other nodes a ``Cast``
rounds them. The inputs of the model keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # dtypes of low precision

_WIDTH = {ir.DataType.FLOAT16: 1, ir.DataType.BFLOAT16: 1, ir.DataType.FLOAT: 2, ir.DataType.DOUBLE: 3}

_DTYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision")  # dtypes of results or intermediate values


def is_low(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in LOW


def widened(
    model: ir.Model, is_chosen: Callable[[ir.Node], bool], dtype: ir.DataType, *, wide_outputs: bool = False
) -> ir.Model:
    """A copy of a model in which chosen nodes compute in a wider dtype. Nodes with subgraphs are never changed.

    All values of the model must have a dtype. With ``wide_outputs``, its outputs that chosen nodes compute stay wide.
    """
    copy = model.clone()
    wide: dict[ir.Value, ir.Value] = {}
    for original, node in zip(model.graph, list(copy.graph), strict=True):
        if not is_chosen(original) or any(item.type in _SUBGRAPHS for item in original.attributes.values()):
            continue
        for i, value in enumerate(node.inputs):
            if value is not None and _is_narrower(value, dtype):
                if value not in wide:
                    cast = _cast(value, dtype, f"{value.name}__{dtype.name.lower()}")
                    copy.graph.insert_before(node, cast)
                    wide[value] = cast.outputs[0]
                node.replace_input_with(i, wide[value])
        if node.op_type == "Constant":
            continue  # the user's number has the model's precision; its readers widen it
        outputs = [value for value in node.outputs if value.name and _is_narrower(value, dtype)]
        _widen_attributes(node, dtype)
        for value in outputs:
            cast = _widen_result(value, dtype, node, wide_outputs=wide_outputs)
            if cast is not None:
                wide[cast.outputs[0]] = value
    common.RemoveUnusedNodesPass()(copy)
    return copy


_SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _is_narrower(value: ir.Value | ir.TensorProtocol, dtype: ir.DataType) -> bool:
    return value.dtype in _WIDTH and _WIDTH[value.dtype] < _WIDTH[dtype]


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
    to = f"{value.name}__to_{dtype.name.lower()}"
    return ir.node("Cast", [value], {"to": int(dtype)}, outputs=[output], name=to)


def _widen_result(value: ir.Value, dtype: ir.DataType, node: ir.Node, *, wide_outputs: bool) -> ir.Node | None:
    """Widens a node's result. A Cast to the narrow dtype takes over its name and its readers."""
    graph, name, narrow = node.graph, str(value.name), value.dtype
    assert isinstance(graph, ir.Graph) and narrow is not None
    is_output = value in graph.outputs
    value.type = ir.TensorType(dtype)  # a new type: the copy shares the old one with the model
    if wide_outputs and is_output and not value.uses():
        return None
    value.name = f"{name}__{dtype.name.lower()}"
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


def in_float64(model: ir.Model) -> ir.Model:
    """A copy in which all floating-point values are float64, including inputs, constants and subgraphs."""
    copy = model.clone()
    for graph in copy.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values.extend(node.outputs)
            _widen_attributes(node, ir.DataType.DOUBLE)
        for value in values:
            if _is_narrower(value, ir.DataType.DOUBLE):
                value.type = ir.TensorType(ir.DataType.DOUBLE)  # a new type, as above
            if value.const_value is not None and _is_narrower(value.const_value, ir.DataType.DOUBLE):
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float64), name=value.name)
    return copy


def _widen_attributes(node: ir.Node, dtype: ir.DataType) -> None:
    """Widens the dtypes and tensors in a node's attributes."""
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and _is_narrower(attribute.as_tensor(), dtype):
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(dtype.numpy())))
        elif name in _DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT:
            if _WIDTH.get(attribute.as_int(), _WIDTH[dtype]) < _WIDTH[dtype]:
                node.attributes[name] = ir.AttrInt64(name, int(dtype))
        elif name in ("value_float", "value_floats") and node.op_type == "Constant":
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(attribute.value, dtype.numpy())))
