"""Tensors that a session holds as constants, so that ONNX Runtime folds and packs them.

They do not pass through protobuf: the model only says that there are initializers of these names, dtypes and shapes,
and ONNX Runtime is given the memory. It copies what it keeps (1.31), and drops the copy where it packs it.

A serialized model without them gets them by concatenation, which in protobuf merges two messages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from .tensors import to_ort

TABLE = ".table"
"""What is added to the name of a constant for an input with the same value. Nodes that only look something up read that
one, in PyTorch's memory: they would keep ONNX Runtime from dropping the copy that it packed (embeddings that are also
the weight of the last layer)."""

Declaration: TypeAlias = "tuple[str, torch.dtype, Sequence[int]]"
"""The name, dtype and shape of a tensor that a model has."""


def declared(tensors: Iterable[Declaration]) -> bytes:
    """What a serialized model gets appended to have initializers, whose values come later."""
    part = onnx.ModelProto()
    for name, dtype, shape in tensors:
        initializer = part.graph.initializer.add()
        initializer.name = name
        initializer.data_type = _onnx_dtype(dtype)
        initializer.dims.extend(shape)
        initializer.data_location = onnx.TensorProto.EXTERNAL
        length = math.prod(shape) * dtype.itemsize
        for key, value in (("location", "memory"), ("offset", "0"), ("length", str(length))):
            initializer.external_data.add(key=key, value=value)
    return part.SerializeToString()


def declared_as_inputs(tensors: Iterable[Declaration]) -> bytes:
    """What a serialized model gets appended to have inputs, after those that it has."""
    part = onnx.ModelProto()
    for name, dtype, shape in tensors:
        part.graph.input.append(onnx.helper.make_tensor_value_info(name, _onnx_dtype(dtype), shape))
    return part.SerializeToString()


def with_tables(graph: onnx.GraphProto, constants: Collection[str]) -> None:
    """Lets the lookups of a graph read inputs of their own instead of what will be constants; in place."""
    looked_up = {node.input[0]: node for node in graph.node if node.op_type == "Gather" and node.input[0] in constants}
    declared_inputs = {item.name: item for item in graph.input}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in looked_up:
            node.input[0] += TABLE
    for name in looked_up:
        table = graph.input.add()
        table.CopyFrom(declared_inputs[name])
        table.name = name + TABLE


def _onnx_dtype(dtype: torch.dtype) -> int:
    return int(ir.tensor_adapters.from_torch_dtype(dtype))


def give(options: onnxruntime.SessionOptions, constants: Mapping[str, torch.Tensor]) -> None:
    """Hands over the values of the initializers that ``declared`` announced."""
    if constants:
        values = [onnxruntime.OrtValue(to_ort(tensor)) for tensor in constants.values()]
        options.add_external_initializers(list(constants), values)
