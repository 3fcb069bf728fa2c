"""Reads the values inside a model: a session of a copy of the model returns them as outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch

from .binding import BoundSession, OutputSpec
from .session import Session, final_session
from .settings import SessionSettings


def values_of_session(
    bound: BoundSession, session: Session, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """The ``wanted`` values inside a session, by name: those that its optimized model still has.

    The session itself does not run; ``bound`` binds the arguments of the region.

    Raises:
        SessionError: ONNX Runtime cannot write the optimized model, or rejects it with the values as outputs.
    """
    model, constants = session.optimized()
    return _exposed_values(bound, session, model, args, wanted, constants)


def values_of_model(
    bound: BoundSession, model: ir.Model, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """The ``wanted`` values inside a region's model, by name, without optimizations; constants are left out.

    The new session has the settings of the ``bound`` session. The model is changed: the values become its outputs.

    Raises:
        SessionError: ONNX Runtime rejects the model with the values as outputs.
    """
    return _exposed_values(bound, bound.session, model, args, wanted)


_STEP = "__stage"
"""Marks names that a pass gave to steps inside a node. In another model the same name may be another step."""


def common_values(
    bound: BoundSession, before: ir.Model, after: ir.Model, args: Sequence[object]
) -> Iterator[tuple[ir.Value, torch.Tensor, torch.Tensor]]:
    """The tensors whose names are in both models, in the execution order of ``after``: the value in ``after``, its
    tensor in ``before`` and in ``after``.

    Raises:
        SessionError: ONNX Runtime rejects one of the models with the values as outputs.
    """
    wanted = [
        OutputSpec(str(value.name), ir.tensor_adapters.to_torch_dtype(value.dtype))
        for node in before.graph
        for value in node.outputs
        if value.name and value.dtype is not None and _STEP not in value.name
    ]
    old, new = (tensors(values_of_model(bound, model.clone(), args, wanted)) for model in (before, after))
    for value in (value for node in after.graph for value in node.outputs):
        if value.name in old and value.name in new:
            yield value, old[value.name], new[value.name]


def _exposed_values(
    bound: BoundSession,
    session: Session,
    model: ir.Model,
    args: Sequence[object],
    wanted: Sequence[OutputSpec],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, object]:
    """The values of a model, whose outputs are replaced, and nodes removed that these do not need.

    With ``constants`` it is an optimized model.
    """
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    specs = [spec for spec in wanted if spec.name in values]
    if not specs:
        return {}
    model.graph.outputs.clear()
    add_outputs(model, values, specs)
    for node in reversed(model.graph):
        if not any(value.is_graph_output() or value.uses() for value in node.outputs):
            model.graph.remove(node, safe=True)
    constants = None if constants is None else used_constants(model, constants)
    exposed = exposed_session(model, session.settings, constants)
    results = BoundSession(exposed, bound.inputs, specs)(args)
    return {spec.name: value for spec, value in zip(specs, results, strict=True)}


def add_outputs(model: ir.Model, values: Mapping[str, ir.Value], specs: Sequence[OutputSpec]) -> None:
    """Adds outputs to a model, of its ``values`` by name."""
    for spec in specs:
        value = values[spec.name]
        value.dtype = ir.tensor_adapters.from_torch_dtype(spec.dtype)
        model.graph.outputs.append(value)


def used_constants(model: ir.Model, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The constants that an optimized model reads; the others are removed from it."""
    unused = {value.name: value for value in model.graph.inputs if value.name in constants and not value.uses()}
    for value in unused.values():
        model.graph.inputs.remove(value)
    for name, initializer in list(model.graph.initializers.items()):
        if not initializer.uses() and not initializer.is_graph_output():
            del model.graph.initializers[name]
    return {name: item for name, item in constants.items() if name not in unused}


def exposed_session(
    model: ir.Model, settings: SessionSettings, constants: Mapping[str, torch.Tensor] | None = None
) -> Session:
    """A session with the settings of another that does not optimize; with ``constants``, of an optimized model."""
    settings = dataclasses.replace(settings, optimize=False, shares_graph=True, arena=False)
    return Session(model, settings) if constants is None else final_session(model, settings, constants)


def tensors(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The values that are tensors, not numbers."""
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
