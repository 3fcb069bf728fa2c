"""ONNX models from files, as large as they may be: weights in files beside a model stay there until one is read.

::

    model = load_model("model.onnx")       # its local functions are inlined
    model.initializers["layer.weight"]     # from the file beside it, not copied into memory

A file that was cut, or whose weights are not there, is found when it is read, so that no message of ONNX Runtime's has
to be understood.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import first_line
from .reading import DumpError

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnx_ir as ir

Sizes: TypeAlias = "tuple[int | str | None, ...]"
"""A shape of a model: a symbolic dimension is its name, or ``None`` if it has none."""


@dataclasses.dataclass(frozen=True)
class InputType:
    """What an input of a model takes.

    Attributes:
        name: its name.
        dtype: of its elements, ``bfloat16`` and ``float8…`` as those of ``ml_dtypes``; ``None`` if it is no tensor.
        shape: ``None`` if the model does not say.
        described: the type in words.
    """

    name: str
    dtype: np.dtype | None
    shape: Sizes | None
    described: str


@dataclasses.dataclass(frozen=True)
class OnnxModel:
    """A model whose external data is not loaded.

    Attributes:
        proto: the model, its local functions inlined.
        folder: where its external data is.
        name: for messages and tables.
    """

    proto: onnx.ModelProto
    folder: Path
    name: str

    @functools.cached_property
    def inputs(self) -> list[InputType]:
        """What must be given; inputs with a default value are among the initializers."""
        defaults = {item.name for item in self.proto.graph.initializer}
        return [_input_type(item) for item in self.proto.graph.input if item.name not in defaults]

    @property
    def outputs(self) -> list[str]:
        """The names of what it returns."""
        return [item.name for item in self.proto.graph.output]

    @property
    def initializers(self) -> Mapping[str, np.ndarray]:
        """The values of the initializers, each read when it is asked for.

        Raises:
            DumpError: at reading, its file is not there, or too short.
        """
        return _Initializers(self)

    @property
    def external(self) -> list[str]:
        """The initializers whose values are in other files."""
        return [item.name for item in self.proto.graph.initializer if is_external(item)]

    def with_proto(self, proto: onnx.ModelProto) -> OnnxModel:
        """Another model with the same external data."""
        return dataclasses.replace(self, proto=proto)

    def copy(self) -> OnnxModel:
        """The same model, for changes."""
        import onnx

        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return self.with_proto(proto)


class _Initializers(Mapping[str, "np.ndarray"]):
    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        self._by_name = {item.name: item for item in model.proto.graph.initializer}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> np.ndarray:
        return _value_of(self._by_name[name], self._model)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's values are in another file."""
    return bool(tensor.data_location == tensor.EXTERNAL)


def load_model(path: str | os.PathLike[str], name: str | None = None) -> OnnxModel:
    """A model from a file.

    Args:
        path: ``model.onnx``; more than 2 GB of weights are in files beside it.
        name: for messages and tables; the path by default.

    Raises:
        DumpError: the file is not there, no model, or damaged; or one with its weights is.
    """
    from onnx.inliner import inline_local_functions

    path = Path(path)
    proto = _read(path)
    if proto.functions:
        proto = inline_local_functions(proto)
    return OnnxModel(proto, path.parent, str(path) if name is None else name)


def load_ir(path: Path) -> ir.Model:
    """The same as onnx-ir's, with its local functions; weights in other files are read when they are asked for.

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
        raise DumpError(f"{path} is no ONNX model, or damaged: {error}") from None
    damage = _damage(proto, path.parent)
    if damage:
        raise DumpError(f"{path} is no ONNX model, or damaged: {damage}")
    return proto


def _damage(proto: onnx.ModelProto, folder: Path) -> str:
    """Why a model that could be parsed cannot be whole; ``""`` if it may be."""
    graph = proto.graph
    if not graph.output or not proto.opset_import:
        return "it has no graph with outputs" if not graph.output else "it names no opset"
    texts = (item for node in graph.node for item in (*node.input, *node.output, *_texts(node)))
    if any(isinstance(item, bytes) for item in texts):  # what protobuf gives where it is no UTF-8
        return "a name in it is no text"
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
    for tensor in filter(is_external, _tensors(proto)):
        try:
            file, _, end = _place(tensor, folder)
            size = file.stat().st_size
        except OSError as error:
            return f"the values of {tensor.name} cannot be read from {error.filename}: {error.strerror}"
        except (ValueError, TypeError, KeyError) as error:
            return f"the values of {tensor.name}: {error}"
        if size < end:
            return f"{file}, with the values of {tensor.name}, is cut: it has {size} of at least {end} bytes"
    return ""


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """The tensors of a model, wherever they are: in subgraphs, functions and attributes, too."""
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
    """What a node is called, and its metadata."""
    yield from (node.name, node.op_type, node.domain)
    for item in node.metadata_props:
        yield from (item.key, item.value)


def _place(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int]:
    """The file with a tensor's values, and where they begin and end in it.

    Raises:
        ValueError: it is outside the folder, or the place is no number.
    """
    import onnx

    where = {entry.key: entry.value for entry in tensor.external_data}
    path = (folder / where.get("location", "")).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"they are outside the model's folder, in {path}")
    start = int(where.get("offset", "0"))
    bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    bits = next((size for name, size in _PACKED.items() if _dtype_name(tensor).endswith(name)), bits)
    length = (math.prod(tensor.dims) * bits + 7) // 8
    if start < 0 or length < 0:
        raise ValueError("their place or size is negative")
    return path, start, start + length


_PACKED = {"FLOAT4E2M1": 4, "UINT4": 4, "INT4": 4, "UINT2": 2, "INT2": 2}
"""Bits of an element, where a byte holds several."""


def _dtype_name(tensor: onnx.TensorProto) -> str:
    import onnx

    return str(onnx.TensorProto.DataType.Name(tensor.data_type))


def _input_type(item: onnx.ValueInfoProto) -> InputType:
    import onnx

    if item.type.WhichOneof("value") != "tensor_type":
        kind = item.type.WhichOneof("value") or "value of no known type"
        return InputType(item.name, None, None, kind.replace("_type", ""))
    tensor = item.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape: Sizes | None = None
    if tensor.HasField("shape"):
        shape = tuple(_size(dimension) for dimension in tensor.shape.dim)
    return InputType(item.name, dtype, shape, f"{type_name(dtype)} {shape_text(shape)}")


def _size(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dimension.HasField("dim_value"):
        return int(dimension.dim_value)
    return str(dimension.dim_param) or None


def type_name(dtype: np.dtype) -> str:
    """``float32``; ``string`` for numpy's objects."""
    return "string" if dtype.kind in "OSU" else dtype.name


def shape_text(shape: Sequence[int | str | None] | None) -> str:
    """``2x3``, with ``?`` for sizes without a name; ``scalar``; ``any shape``."""
    if shape is None:
        return "any shape"
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"


def _value_of(tensor: onnx.TensorProto, model: OnnxModel) -> np.ndarray:
    """The values of an initializer; those of another file as a view of that file."""
    import onnx

    if not is_external(tensor):
        return onnx.numpy_helper.to_array(tensor)
    import numpy as np

    if _dtype_name(tensor).endswith(tuple(_PACKED)):
        return onnx.numpy_helper.to_array(tensor, base_dir=str(model.folder))
    dtype, shape = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    try:
        path, start, end = _place(tensor, model.folder)
        if start == end:
            return np.empty(shape, dtype)
        mapped = np.memmap(path, np.uint8, "r", start, (end - start,))
    except (OSError, ValueError) as error:
        raise DumpError(f"{model.name}: the values of {tensor.name} cannot be read: {error}") from None
    return np.asarray(mapped).view(dtype).reshape(shape)
