"""Loads ONNX models of any size: external weights stay in their files until they are read.

::

    model = load_model("model.onnx")       # with its local functions inlined
    model.initializers["layer.weight"]     # a view of the external data, not copied into memory

Damaged and truncated files are found when the model is loaded, and reported as ``DumpError``.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
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
    """A model whose external data is not loaded.

    Not onnx-ir's, which is for models of dumps (``load_ir``): version 1.1 loses the sparse initializers of a model, and
    does not read one that returns maps.
    """

    proto: onnx.ModelProto  # with local functions inlined
    folder: Path  # of its external data
    name: str  # for messages and tables

    @functools.cached_property
    def inputs(self) -> list[InputType]:
        """The inputs without a default value."""
        defaults = {item.name for item in self.proto.graph.initializer}
        return [_input_type(item) for item in self.proto.graph.input if item.name not in defaults]

    @property
    def initializers(self) -> dict[str, np.ndarray]:
        """The values of the initializers; external ones are views of their file; ``DumpError`` if a file is missing."""
        return {item.name: self._value_of(item) for item in self.proto.graph.initializer}

    def _value_of(self, tensor: onnx.TensorProto) -> np.ndarray:
        import onnx
        import onnx_ir as ir

        if not onnx.external_data_helper.uses_external_data(tensor):
            return onnx.numpy_helper.to_array(tensor)
        try:
            return ir.serde.deserialize_tensor(tensor, str(self.folder)).numpy()
        except (OSError, ValueError) as error:
            raise DumpError(f"{self.name}: the values of {tensor.name} cannot be read: {error}") from None

    def with_proto(self, proto: onnx.ModelProto) -> OnnxModel:
        """Another model with the same folder and name."""
        return dataclasses.replace(self, proto=proto)

    def copy(self) -> OnnxModel:
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return self.with_proto(proto)


def load_model(path: str | os.PathLike[str], name: str | None = None) -> OnnxModel:
    """Loads a model. Its ``name`` for messages is by default the path.

    Raises ``DumpError`` if the file or its external data is missing, damaged, or not a model.
    """
    from onnx.inliner import inline_local_functions

    path = Path(path)
    proto = _read(path)
    if proto.functions:
        proto = inline_local_functions(proto)
    return OnnxModel(proto, path.parent, str(path) if name is None else name)


def load_ir(path: Path) -> ir.Model:
    """Loads a model as onnx-ir's, with its local functions. External weights are read lazily.

    Raises:
        DumpError: as ``load_model``.
    """
    import onnx_ir as ir

    proto = _read(path)
    try:
        model = ir.from_proto(proto)
    except (ValueError, TypeError, KeyError) as error:
        raise DumpError(f"{path} is damaged: {first_line(str(error))}; dump again") from None
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        proto = onnx.load_model(path, load_external_data=False)
    except FileNotFoundError:
        raise DumpError(f"{path} does not exist") from None
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    except DecodeError as error:
        raise DumpError(f"{path} is damaged, or not an ONNX model: {error}") from None
    _sort(proto.graph)
    damage = _damage(proto, path.parent)
    if damage:
        raise DumpError(f"{path} is damaged, or not an ONNX model: {damage}")
    return proto


def _sort(graph: onnx.GraphProto) -> None:
    """Sorts the nodes so that each comes after those whose results it reads; ONNX Runtime accepts any order."""
    producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    read = [[producers[name] for name in read_by(node) if name in producers] for node in graph.node]
    if all(source < i for i, sources in enumerate(read) for source in sources):
        return
    try:
        order = list(graphlib.TopologicalSorter(dict(enumerate(read))).static_order())
    except graphlib.CycleError:  # what reads a value before it is computed is told as damage
        return
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend(nodes[i] for i in order)


def read_by(node: onnx.NodeProto) -> list[str]:
    """The names that a node and its subgraphs read from outside of it."""
    found = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]:
            own = {item.name for item in (*graph.input, *graph.initializer)}
            own.update(name for inner in graph.node for name in inner.output)
            found += [name for inner in graph.node for name in read_by(inner) if name not in own]
            found += [item.name for item in graph.output if item.name not in own]
    return found


def _damage(proto: onnx.ModelProto, folder: Path) -> str:
    """What is missing in a model that protobuf could parse; ``""`` if nothing is."""
    from onnx.external_data_helper import uses_external_data

    graph = proto.graph
    if not graph.output or not proto.opset_import:
        return "it has no graph with outputs" if not graph.output else "it has no opset"
    texts = (item for node in graph.node for item in (*node.input, *node.output, *_texts(node)))
    if any(isinstance(item, bytes) for item in texts):  # protobuf returns bytes that are not UTF-8
        return "a name is not valid text"
    known = {"", *(item.name for item in (*graph.input, *graph.initializer))}
    known.update(item.values.name for item in graph.sparse_initializer)
    for node in graph.node:
        unknown = [name for name in node.input if name not in known]
        if unknown:
            return f"the node {node.name or node.op_type} reads {unknown[0]}, which nothing computes"
        known.update(node.output)
    unknown = [item.name for item in graph.output if item.name not in known]
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


def _input_type(item: onnx.ValueInfoProto) -> InputType:
    import onnx

    if item.type.WhichOneof("value") != "tensor_type":
        kind = item.type.WhichOneof("value") or "value of no known type"
        return InputType(item.name, None, None, kind.replace("_type", ""))
    tensor = item.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape: Sizes | None = None
    if tensor.HasField("shape"):
        sizes = tensor.shape.dim
        shape = tuple(size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in sizes)
    return InputType(item.name, dtype, shape, f"{type_name(dtype)} {shape_text(shape)}")


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
