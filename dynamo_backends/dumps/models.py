"""Loads ONNX models of any size: external weights stay in their files until they are read.

::

    model = load_model("model.onnx")       # with its local functions inlined
    model.initializers["layer.weight"]     # a view of the external data, not copied into memory

Damaged and truncated files are found when the model is loaded, and reported as ``DumpError``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import first_line
from .reading import DumpError

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnx_ir as ir

OnnxValue: TypeAlias = "np.ndarray | list[OnnxValue] | dict[object, object] | None"
"""A tensor, a sequence, a map, or an empty optional."""

Sizes: TypeAlias = "tuple[int | str | None, ...]"
"""A shape: a symbolic dimension is its name, or ``None`` if it has none."""


@dataclasses.dataclass(frozen=True)
class InputType:
    """The name and type of an input of a model."""

    name: str
    dtype: np.dtype | None  # ``None`` if it is not a tensor
    shape: Sizes | None  # ``None`` if unknown
    described: str  # the type as text: ``float32 2x3``


@dataclasses.dataclass(frozen=True)
class OnnxModel:
    """A model, its local functions inlined. External data is not loaded."""

    model: ir.Model
    name: str  # for messages and tables

    @functools.cached_property
    def inputs(self) -> list[InputType]:
        """The inputs without a default value."""
        return [_input_type(item) for item in self.model.graph.inputs if item.const_value is None]

    @property
    def initializers(self) -> dict[str, np.ndarray]:
        """The values of the initializers; external ones are views of their file; ``DumpError`` if a file is missing."""
        return {name: self._value_of(item.const_value) for name, item in self.model.graph.initializers.items()}

    @functools.cached_property
    def computed(self) -> list[str]:
        """The names of the values that its nodes compute."""
        return [str(value.name) for node in self.model.graph for value in node.outputs if value.name]

    def _value_of(self, tensor: ir.TensorProtocol | None) -> np.ndarray:
        import numpy as np

        assert tensor is not None
        try:
            array: np.ndarray = tensor.numpy()
        except (OSError, ValueError) as error:
            raise DumpError(f"{self.name}: the values of {tensor.name} cannot be read: {error}") from None
        if array.dtype.kind != "S":
            return array
        return np.array([item.decode() for item in array.reshape(-1)], object).reshape(array.shape)


def load_model(path: str | os.PathLike[str], name: str | None = None) -> OnnxModel:
    """Loads a model. Its ``name`` for messages is by default the path.

    Raises ``DumpError`` if the file or its external data is missing, damaged, or not a model.
    """
    from onnx_ir.passes import common

    model = load_ir(Path(path))
    if model.functions:
        common.InlinePass()(model)
    return OnnxModel(model, str(path) if name is None else name)


def load_ir(path: Path) -> ir.Model:
    """Loads a model as onnx-ir's, with its local functions; nodes are sorted. External weights are read lazily.

    Raises:
        DumpError: as ``load_model``; or it has what onnx-ir 1.1 cannot represent: sparse initializers, or maps.
    """
    import onnx
    import onnx_ir as ir
    from google.protobuf.message import DecodeError

    try:
        proto = onnx.load_model(path, load_external_data=False)
    except FileNotFoundError:
        raise DumpError(f"{path} does not exist") from None
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    except DecodeError as error:
        raise DumpError(f"{path} is damaged, or not an ONNX model: {error}") from None
    damage = _damage(proto, path.parent)
    if damage:
        raise DumpError(f"{path} is damaged, or not an ONNX model: {damage}")
    try:
        model = ir.from_proto(proto)
        model.graph.sort()
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError) as error:
        raise DumpError(f"{path} cannot be read: {first_line(str(error))}") from None
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def external_folder(model: ir.Model) -> str:
    """The folder of a model's external weights, or ``""``."""
    import onnx_ir as ir

    tensors: list[object] = [value.const_value for value in model.graph.initializers.values()]
    attributes = (item for node in model.graph for item in node.attributes.values() if not item.is_ref())
    tensors += [item.value for item in attributes if item.type == ir.AttributeType.TENSOR]
    return next((str(tensor.base_dir) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)), "")


def _damage(proto: onnx.ModelProto, folder: Path) -> str:
    """What is missing in a model that protobuf could parse; ``""`` if nothing is."""
    from onnx.external_data_helper import uses_external_data

    graph = proto.graph
    if not graph.output or not proto.opset_import:
        return "it has no graph with outputs" if not graph.output else "it has no opset"
    if graph.sparse_initializer:
        return "it has sparse initializers, which are not supported"
    texts = (item for node in graph.node for item in (*node.input, *node.output, *_texts(node)))
    if any(isinstance(item, bytes) for item in texts):  # protobuf returns bytes that are not UTF-8
        return "a name is not valid text"
    known = {"", *(item.name for item in (*graph.input, *graph.initializer))}
    known.update(name for node in graph.node for name in node.output)
    for node in graph.node:
        unknown = [name for name in node.input if name not in known]
        if unknown:
            return f"the node {node.name or node.op_type} reads {unknown[0]}, which nothing computes"
    unknown = [item.name for item in graph.output if not item.name or item.name not in known]
    if unknown:
        return f"nothing computes its output {unknown[0]}"
    for tensor in filter(uses_external_data, _tensors(proto)):
        try:
            file, end = _external_data(tensor, folder)
            size = file.stat().st_size
        except OSError as error:
            return f"the values of {tensor.name} cannot be read from {error.filename}: {error.strerror}"
        except (ValueError, TypeError, KeyError) as error:
            return f"the values of {tensor.name}: {error}"
        if size < end:
            return f"{file}, with the values of {tensor.name}, is truncated: it has {size} of at least {end} bytes"
    return ""


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """All tensors of a model, including those in subgraphs, functions and attributes."""
    import onnx
    from google.protobuf.message import Message

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in [value] if isinstance(value, Message) else value:
                yield from _tensors(item)


def _texts(node: onnx.NodeProto) -> Iterator[object]:
    """The names and the metadata of a node."""
    yield from (node.name, node.op_type, node.domain)
    for item in node.metadata_props:
        yield from (item.key, item.value)


def _external_data(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int]:
    """The file with a tensor's values, and the position of their end.

    Raises ``ValueError`` if the file is outside the folder, or the offset is invalid.
    """
    import onnx_ir as ir

    where = {entry.key: entry.value for entry in tensor.external_data}
    path = (folder / where.get("location", "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"they are outside the model's folder, in {path}")
    start = int(where.get("offset", "0"))
    length = (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    if start < 0 or length < 0:
        raise ValueError("their offset or size is negative")
    return path, start + length


def _input_type(value: ir.Value) -> InputType:
    import onnx_ir as ir

    name = str(value.name)
    if not isinstance(value.type, ir.TensorType):
        kind = type(value.type).__name__.removesuffix("Type").lower() if value.type else "value of no known type"
        return InputType(name, None, None, kind)
    shape: Sizes | None = None
    if value.shape is not None:
        shape = tuple(size if isinstance(size, int) else size.value for size in value.shape)
    dtype = value.type.dtype.numpy()
    return InputType(name, dtype, shape, f"{type_name(dtype)} {shape_text(shape)}")


def type_name(dtype: np.dtype) -> str:
    """``float32``; ``string`` for numpy's objects."""
    return "string" if dtype.kind in "OSU" else dtype.name


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """``2x3``, with ``?`` for unnamed dimensions; ``scalar``; ``any shape``."""
    if shape is None:
        return "any shape"
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def described(value: OnnxValue) -> str:
    """``float32 2x3``, ``sequence of 4``, ``map``, ``empty``."""
    if value is None or isinstance(value, (list, tuple, dict)):
        return "empty" if value is None else "map" if isinstance(value, dict) else f"sequence of {len(value)}"
    return f"{type_name(value.dtype)} {shape_text(value.shape)}"


def kind_of(dtype: np.dtype) -> str:
    """``float``, ``complex``, ``integer``, ``bool`` or ``string``, also for the dtypes of ``ml_dtypes``."""
    if dtype.kind in "OSU":
        return "string"
    if dtype.kind in "biufc":
        return {"b": "bool", "f": "float", "c": "complex"}.get(dtype.kind, "integer")
    return "integer" if "int" in dtype.name else "float"
