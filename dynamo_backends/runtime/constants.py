"""Tensors that a session holds as constants, so that ONNX Runtime folds and packs them.

They do not pass through protobuf: the model only says that there are initializers of these names, dtypes and shapes,
and ONNX Runtime is given the memory. It copies what it keeps (1.31), and drops the copy where it packs it.

A serialized model without them gets them by concatenation, which in protobuf merges two messages. The few fields that
takes are written here, so that a model from the cache needs no library that makes models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import onnxruntime
import torch

from .dtypes import ONNX_NUMBERS
from .ort_internals import CALLS
from .tensors import to_ort

if TYPE_CHECKING:
    import onnx_ir as ir

TABLE = ".table"
"""What is added to the name of a constant for an input with the same value. Nodes that only look something up read that
one, in PyTorch's memory: they would keep ONNX Runtime from dropping the copy that it packed (embeddings that are also
the weight of the last layer)."""

Declaration: TypeAlias = "tuple[str, torch.dtype, Sequence[int]]"
"""The name, dtype and shape of a tensor that a model has."""


def declared(tensors: Iterable[Declaration]) -> bytes:
    """What a serialized model gets appended to have initializers, whose values come later."""
    return _appended(5, [_external_tensor(*tensor) for tensor in tensors])


def declared_as_inputs(tensors: Iterable[Declaration]) -> bytes:
    """What a serialized model gets appended to have inputs, after those that it has."""
    return _appended(11, [_value_info(*tensor) for tensor in tensors])


def _appended(field: int, items: Iterable[bytes]) -> bytes:
    """A ``ModelProto`` with a graph 7 with items in a field: initializer 5, input 11."""
    return _message((7, _message(*((field, item) for item in items))))


def _external_tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """A ``TensorProto``: dims 1, data_type 2, name 8, external_data 13 (key 1, value 2), data_location 14 (external 1).

    The numbers of fields are those of ``onnx.proto``.
    """
    length = math.prod(shape) * dtype.itemsize
    where = (("location", "memory"), ("offset", "0"), ("length", str(length)))
    return _message(
        *((1, size) for size in shape),
        (2, ONNX_NUMBERS[dtype]),
        (8, name),
        *((13, _message((1, key), (2, value))) for key, value in where),
        (14, 1),
    )


def _value_info(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """A ``ValueInfoProto``: name 1, type 2; in it tensor_type 1: elem_type 1, shape 2; of that dim 1: dim_value 1."""
    sizes = _message(*((1, _message((1, size))) for size in shape))
    return _message((1, name), (2, _message((1, _message((1, ONNX_NUMBERS[dtype]), (2, sizes))))))


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Fields of protobuf, by number: an integer that is not negative, a text, or another message."""
    written = b""
    for field, value in fields:
        if isinstance(value, int):
            written += _varint(field << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            written += _varint(field << 3 | 2) + _varint(len(content)) + content
    return written


def _varint(value: int) -> bytes:
    """An integer in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def give(options: onnxruntime.SessionOptions, constants: Mapping[str, torch.Tensor]) -> None:
    """Hands over the values of the initializers that ``declared`` announced."""
    if constants:
        values = [CALLS.public(to_ort(tensor)) for tensor in constants.values()]
        options.add_external_initializers(list(constants), values)


def computed_from(graph: ir.Graph, constants: Iterable[str]) -> set[str]:
    """The names of the values that depend on constants and initializers alone, these among them: ONNX Runtime computes
    them when it makes the session.

    Args:
        graph: its nodes are in execution order.
        constants: names of inputs that are constants of the session.
    """
    found = {*constants, *graph.initializers}
    for node in graph:
        are_known = all(value is None or value.name in found for value in node.inputs)
        if node.op_type == "Constant" or (node.inputs and are_known):
            found.update(value.name for value in node.outputs if value.name)
    return found
