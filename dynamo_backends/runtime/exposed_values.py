"""The values inside a model, computed by a session of a copy of it that returns them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch

from .binding import BoundSession, OutputSpec
from .session import Session, final_session


def values_of_session(
    bound: BoundSession, session: Session, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """Values inside a session, by name: those that the model ONNX Runtime made of it still has.

    Args:
        bound: how the arguments are bound.
        session: the session; it is not run itself.
        args: of the region.
        wanted: the values.

    Raises:
        SessionError: the runtime does not write the model, or refuses it with the values exposed.
    """
    model, constants = session.optimized()
    return _exposed_values(bound, session, model, args, wanted, constants)


def values_of_model(
    bound: BoundSession, model: ir.Model, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """Values inside a model of a region, by name, with nothing optimized; constants are not among them.

    Args:
        bound: how the arguments are bound; the model's session has the settings of its session.
        model: the model; left as it is.
        args: of the region.
        wanted: the values.

    Raises:
        SessionError: the runtime refuses the model with the values exposed.
    """
    return _exposed_values(bound, bound.session, model.clone(), args, wanted)


_STEP = "__stage"
"""In the names of the steps that a pass made of a node: with other steps before, others may have them."""


def common_values(
    bound: BoundSession, before: ir.Model, after: ir.Model, args: Sequence[object]
) -> Iterator[tuple[ir.Value, torch.Tensor, torch.Tensor]]:
    """The tensors that two models both name, in the execution order of ``after``: the value there, and what it is in
    both.

    Args:
        bound: how the arguments of both are bound.
        before, after: the models; left as they are.
        args: of the region.

    Raises:
        SessionError: the runtime refuses one of the models with the values exposed.
    """
    wanted = [
        OutputSpec(str(value.name), ir.tensor_adapters.to_torch_dtype(value.dtype))
        for node in before.graph
        for value in node.outputs
        if value.name and value.dtype is not None and _STEP not in value.name
    ]
    old, new = (tensors(values_of_model(bound, model, args, wanted)) for model in (before, after))
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
    """The values of a model, which is changed; with ``constants`` it is given to ONNX Runtime as it is."""
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    specs = [spec for spec in wanted if spec.name in values]
    if not specs:
        return {}
    model.graph.outputs.clear()
    for spec in specs:
        value = values[spec.name]
        value.dtype = ir.tensor_adapters.from_torch_dtype(spec.dtype)
        model.graph.outputs.append(value)
    settings = dataclasses.replace(session.settings, optimize=False, shares_graph=True, arena=False)
    exposed = Session(model, settings) if constants is None else final_session(model, settings, constants)
    results = BoundSession(exposed, bound.inputs, specs)(args)
    return {spec.name: value for spec, value in zip(specs, results, strict=True)}


def tensors(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Those of the values that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
