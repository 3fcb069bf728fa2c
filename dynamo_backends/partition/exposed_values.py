"""Reads the values inside a region's model: a session of a copy of the model returns them as outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir
import torch

from ..runtime.binding import OutputSpec
from ..runtime.session import Session
from ..runtime.settings import SessionSettings


def expose(model: ir.Model, wanted: Sequence[OutputSpec]) -> list[OutputSpec]:
    """Makes the ``wanted`` values that a model has its outputs, and removes nodes that these do not need."""
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    specs = [spec for spec in wanted if spec.name in values]
    model.graph.outputs.clear()
    add_outputs(model, values, specs)
    for node in reversed(model.graph):
        if not any(value.is_graph_output() or value.uses() for value in node.outputs):
            model.graph.remove(node, safe=True)
    return specs


def add_outputs(model: ir.Model, values: Mapping[str, ir.Value], specs: Sequence[OutputSpec]) -> None:
    """Adds outputs to a model, of its ``values`` by name."""
    for spec in specs:
        value = values[spec.name]
        value.dtype = ir.tensor_adapters.from_torch_dtype(spec.dtype)
        model.graph.outputs.append(value)


def exposing(settings: SessionSettings) -> SessionSettings:
    """The settings of a session that returns values of another's model."""
    return dataclasses.replace(settings, optimize=False, shares_graph=True, arena=False)


def values_of_model(
    session: Session, model: ir.Model, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, torch.Tensor]:
    """The ``wanted`` tensors inside a region's model, by name, without optimizations; constants are left out.

    The new session has the settings of another ``session``. The model is changed: the values become its outputs.

    Raises:
        SessionError: ONNX Runtime rejects the model with the values as outputs.
    """
    specs = expose(model, wanted)
    if not specs:
        return {}
    results = Session(model, exposing(session.settings), session.inputs, specs)(args)
    return tensors(zip((spec.name for spec in specs), results, strict=True))


def tensors(values: Iterable[tuple[str, object]]) -> dict[str, torch.Tensor]:
    """The values that are tensors, not numbers."""
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}
