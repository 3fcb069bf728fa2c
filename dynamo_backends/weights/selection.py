"""Which arguments of an inference graph are weights, and which of these become constants of its session.

Weights are what Dynamo calls static inputs: parameters, buffers and other tensors that a module holds. As constants,
ONNX Runtime packs and folds them; ``weights/frozen_session.py`` keeps them from being stale. In ONNX models they are
inputs at every stage, so that no pass can depend on their values, and the same model serves for others; passes ask
``onnx_editing.is_weight``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from ..graphs.aot import StaticInput
from ..runtime.constants import computed_from
from .changes import can_be_watched
from .frozen_session import Weight

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graphs.artifacts import Region


def weights_of(
    module: fx.GraphModule, static: Mapping[int, StaticInput], arguments: Sequence[object] | None
) -> dict[fx.Node, Weight]:
    """The arguments of a graph that may be constants.

    Args:
        module: an ATen graph.
        static: those of its arguments that are expected to stay the same, by position.
        arguments: all of a call, if these do not know their values.

    Returns:
        Their values by placeholder. Not among them is what the graph writes to, what has a symbolic shape, and what
        cannot be watched (``runtime.watch.can_be_watched``).
    """
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    found = {}
    for i, item in static.items():
        value = item.value if item.value is not None or arguments is None else arguments[i]
        if not isinstance(value, torch.Tensor) or not can_be_watched(value):
            continue
        if _has_fixed_shape(placeholders[i]) and not _is_written(placeholders[i]):
            found[placeholders[i]] = Weight(item.name, value, _is_statistic(placeholders[i]))
    return found


def _has_fixed_shape(placeholder: fx.Node) -> bool:
    return not any(isinstance(size, torch.SymInt) for size in placeholder.meta["val"].shape)


def _is_written(placeholder: fx.Node) -> bool:
    return any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable for user in placeholder.users
    )


def _is_statistic(placeholder: fx.Node) -> bool:
    """Whether a placeholder is a running mean or variance of batch norm, and nothing else."""
    reads = torch.ops.aten._native_batch_norm_legit_no_training.default
    return all(
        user.target is reads and placeholder in user.args[3:5] and placeholder not in user.args[:3]
        for user in placeholder.users
    )


def constants_of(region: Region, model: ir.Model, weights: Mapping[fx.Node, Weight]) -> dict[int, Weight]:
    """The weights that become constants of a region's session, by position among its inputs.

    What is only looked up in, at indices that are not constant, stays an input, as an embedding table does: nothing is
    gained there by a copy. (Where it is a weight of a product too, see ``runtime/constants.py``.)
    """
    inputs = list(zip(region.inputs, model.graph.inputs, strict=True))
    constant = computed_from(model.graph, (str(value.name) for item, value in inputs if item.node in weights))
    return {
        i: weights[item.node]
        for i, (item, value) in enumerate(inputs)
        if item.node in weights and not all(_looks_up(user, at, constant) for user, at in value.uses())
    }


def _looks_up(user: ir.Node, position: int, constant: Container[str]) -> bool:
    is_lookup = user.op_type == "Gather" and user.domain in ("", "ai.onnx") and position == 0
    return is_lookup and (user.inputs[1] is None or user.inputs[1].name not in constant)
