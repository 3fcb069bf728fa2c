"""Tensors that a session holds as constants, so that ONNX Runtime folds and packs them.

Constants do not pass through protobuf. The model declares initializers by name, dtype and shape, and ONNX Runtime gets
a pointer to the values. It copies what it keeps (1.31), and frees the copy once it is packed.

Declarations are appended to a serialized model: in protobuf, concatenating two messages merges them. The few fields
are written here, so that a model from the cache needs no library that makes models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import onnxruntime
import torch

from .dtypes import ONNX_NUMBERS
from .ort_internals import CALLS
from .tensors import to_ort

if TYPE_CHECKING:
    import onnx_ir as ir

TABLE = ".table"
"""Suffix of a constant's name for a second input with the same value, in PyTorch's memory. Lookups (``Gather``) read
this input. If they read the constant (embeddings tied to the last layer), ONNX Runtime could not free the copy that it
packed."""

Declaration: TypeAlias = "tuple[str, torch.dtype, Sequence[int]]"
"""The name, dtype and shape of a tensor in a model."""


def declared(tensors: Iterable[Declaration]) -> bytes:
    """Bytes to append to a serialized model to declare initializers; ``give`` passes their values."""
    return _appended(5, [_external_tensor(*tensor) for tensor in tensors])


def declared_as_inputs(tensors: Iterable[Declaration]) -> bytes:
    """Bytes to append to a serialized model to add inputs after its own."""
    return _appended(11, [_value_info(*tensor) for tensor in tensors])


def _appended(field: int, items: Iterable[bytes]) -> bytes:
    """A ``ModelProto`` whose graph (7) has items in a field: initializer 5, input 11."""
    return _message((7, _message(*((field, item) for item in items))))


def _external_tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """A ``TensorProto``: dims 1, data_type 2, name 8, external_data 13 (key 1, value 2), data_location 14 (external 1).

    Field numbers are those of ``onnx.proto``.
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
    """A ``ValueInfoProto``: name 1, type 2; in it tensor_type 1: elem_type 1, shape 2; in that dim 1: dim_value 1."""
    sizes = _message(*((1, _message((1, size))) for size in shape))
    return _message((1, name), (2, _message((1, _message((1, ONNX_NUMBERS[dtype]), (2, sizes))))))


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A protobuf message. Values are non-negative integers, texts, or serialized messages."""
    message = b""
    for field, value in fields:
        if isinstance(value, int):
            message += _varint(field << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            message += _varint(field << 3 | 2) + _varint(len(content)) + content
    return message


def _varint(value: int) -> bytes:
    """An integer in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def give(options: onnxruntime.SessionOptions, constants: Mapping[str, torch.Tensor]) -> None:
    """Passes the values of declared initializers to a session that will be made with ``options``."""
    if constants:
        values = [CALLS.public(to_ort(tensor.cpu())) for tensor in constants.values()]
        options.add_external_initializers(list(constants), values)


def computed_from(graph: ir.Graph, constants: Iterable[str]) -> set[str]:
    """The names of values that ONNX Runtime computes when it makes the session: constants, initializers, and what
    depends on these alone. The nodes must be in execution order; a subgraph may read values that its node does not."""
    names = {*constants, *graph.initializers}
    for node in graph:
        if any(attribute.type.name in ("GRAPH", "GRAPHS") for attribute in node.attributes.values()):
            continue
        are_known = all(value is None or value.name in names for value in node.inputs)
        if node.op_type == "Constant" or (node.inputs and are_known):
            names.update(value.name for value in node.outputs if value.name)
    return names


def with_choices_made(model: bytes, weights: Sequence[Declaration], constants: Collection[str]) -> tuple[bytes, int]:
    """A serialized model in which each ``If`` of a pass takes its second branch that ``constants`` do not decide.

    Passes write one where ONNX Runtime is to choose a kernel when it knows the weights (``Builder.choose``). If these
    are inputs, each call would decide, and convert the weights for the kernel.

    Args:
        model: without the inputs ``weights``.
        weights: the tensors that may be constants.
        constants: the names of those that are.

    Returns:
        The model, and how many there are.
    """
    if b"If" not in model:
        return model, 0  # without importing libraries that create models
    import onnx
    import onnx_ir as ir

    from passes.engine.choices import OTHERWISE

    proto = onnx.load_from_string(model)
    complete = ir.from_proto(onnx.load_from_string(model + declared_as_inputs(weights)))
    known, made = computed_from(complete.graph, constants), 0
    for node in proto.graph.node:
        if any(item.key == OTHERWISE for item in node.metadata_props) and node.input[0] not in known:
            node.input[0], made = f"{node.output[0]}__no", made + 1
            proto.graph.initializer.append(onnx.helper.make_tensor(node.input[0], onnx.TensorProto.BOOL, [], [0]))
    return (proto.SerializeToString(), made) if made else (model, 0)
