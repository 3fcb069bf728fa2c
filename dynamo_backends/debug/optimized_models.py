"""The model that a session runs, as ONNX Runtime optimized it, and sessions of it with other outputs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from ..common.strides import element_bytes
from ..partition.exposed_values import expose, exposing, tensors
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.constants import give
from ..runtime.session import Session, declarations
from ..runtime.settings import SessionSettings, create_session

_CHUNK = 2**22
"""Bytes of a constant that are compared at once."""


def optimized_model(session: Session) -> tuple[ir.Model, dict[str, torch.Tensor]]:
    """The model of ``save_optimized``, and its large constants, which are inputs of the model.

    A constant that ONNX Runtime did not change is that of this session, and is not copied. Sizes and positions stay
    in the model: ONNX Runtime infers shapes from them.

    Raises:
        SessionError: ONNX Runtime cannot write it.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = ir.load(save_optimized(session, folder))
        constants = {}
        for name, value in list(model.graph.initializers.items()):
            if not isinstance(value.const_value, ir.ExternalTensor):
                continue
            if value.const_value.dtype == ir.DataType.INT64:
                value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=name)
            else:
                known = session.constants.get(name)
                is_known = known is not None and _has_bytes(known, value.const_value)
                constants[name] = known if known is not None and is_known else tensor_of(value.const_value)
                value.const_value = None
                del model.graph.initializers[name]
                model.graph.inputs.append(value)
    return model, constants


def save_optimized(session: Session, folder: str) -> str:
    """Writes the model that the session runs, with ONNX Runtime's layouts, fusions and internal operators.

    Constants of more than a kilobyte are written as external data. Returns the path of the model in the folder.

    Raises:
        SessionError: ONNX Runtime cannot write it.
    """
    options = session.settings.options(threads=1)
    path = options.optimized_model_filepath = os.path.join(folder, "model.onnx")
    if session.constants:
        prefix = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{prefix}file_name", "constants.data")
        options.add_session_config_entry(f"{prefix}min_size_in_bytes", "1024")
    give(options, session.constants)
    create_session(session.model, session.settings, options)
    return path


def final_session(
    model: ir.Model,
    settings: SessionSettings,
    inputs: Sequence[InputSpec],
    outputs: Sequence[OutputSpec],
    constants: Mapping[str, torch.Tensor],
) -> Session:
    """A session of a model that ``optimized_model`` returned; the model is not checked or changed.

    Raises:
        SessionError: ONNX Runtime rejected the model.
    """
    copy = model.clone()
    for value in [value for value in copy.graph.inputs if value.name in constants]:
        copy.graph.inputs.remove(value)
    return Session(
        ir.to_proto(copy).SerializeToString() + declarations(constants), settings, inputs, outputs, constants
    )


def values_of_session(
    session: Session, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, torch.Tensor]:
    """The ``wanted`` tensors inside a session, by name: those that its optimized model still has.

    The session itself does not run.

    Raises:
        SessionError: ONNX Runtime cannot write the optimized model, or rejects it with the values as outputs.
    """
    model, constants = optimized_model(session)
    specs = expose(model, wanted)
    if not specs:
        return {}
    constants = used_constants(model, constants)
    results = final_session(model, exposing(session.settings), session.inputs, specs, constants)(args)
    return tensors(zip((spec.name for spec in specs), results, strict=True))


def used_constants(model: ir.Model, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The constants that an optimized model reads; the others are removed from it."""
    unused = {value.name: value for value in model.graph.inputs if value.name in constants and not value.uses()}
    for value in unused.values():
        model.graph.inputs.remove(value)
    for name, initializer in list(model.graph.initializers.items()):
        if not initializer.uses() and not initializer.is_graph_output():
            del model.graph.initializers[name]
    return {name: item for name, item in constants.items() if name not in unused}


def _has_bytes(tensor: torch.Tensor, value: ir.ExternalTensor) -> bool:
    """Whether a tensor has the dtype, shape and bytes of a constant in a file."""
    dtype, sizes = ir.tensor_adapters.to_torch_dtype(value.dtype), tuple(value.shape.numpy())
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes) or not tensor.is_contiguous() or not value.size:
        return False
    ours = element_bytes(tensor)
    with open(value.path, "rb") as file:
        file.seek(value.offset or 0)
        return all(file.read(part.numel()) == bytes(np.from_dlpack(part)) for part in ours.split(_CHUNK))


def tensor_of(value: ir.TensorProtocol) -> torch.Tensor:
    """A copy of a constant, of any dtype."""
    dtype, sizes = ir.tensor_adapters.to_torch_dtype(value.dtype), value.shape.numpy()
    if not value.size:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(bytearray(value.tobytes()), dtype=dtype).reshape(sizes)
