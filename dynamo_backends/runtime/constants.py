"""Tensors that a session holds as constants, so that ONNX Runtime folds and packs them.

They do not pass through protobuf: the model only says that there are initializers of these names, dtypes and shapes,
and ONNX Runtime is given the memory. It copies what it keeps (1.31), and drops the copy where it packs it.

A serialized model without them gets them by concatenation, which in protobuf merges two messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from .tensors import to_ort

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


def _onnx_dtype(dtype: torch.dtype) -> int:
    return int(ir.tensor_adapters.from_torch_dtype(dtype))


def give(options: onnxruntime.SessionOptions, constants: Mapping[str, torch.Tensor]) -> None:
    """Hands over the values of the initializers that ``declared`` announced."""
    if constants:
        values = [onnxruntime.OrtValue(to_ort(tensor)) for tensor in constants.values()]
        options.add_external_initializers(list(constants), values)
