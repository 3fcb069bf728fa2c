"""Selects the arguments of an inference graph that are weights, and those that become constants of its session.

Weights are Dynamo's static inputs: parameters, buffers and other tensors that a module holds. ONNX Runtime folds and
packs constants. In ONNX models weights are inputs at every stage, so that no pass depends on their values and a model
serves for other weights; passes use ``onnx_editing.is_weight``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.engine.fx.editing import written_nodes

from ..graphs.static_inputs import StaticInput
from ..runtime.constants import computed_from
from .region_session import Weight
from .watchable import can_be_watched

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..graphs.artifacts import Region


def weights_of(
    module: fx.GraphModule, static: Mapping[int, StaticInput], arguments: Sequence[object] | None
) -> dict[fx.Node, Weight]:
    """The arguments of a graph that may be constants, by placeholder.

    An argument must be watchable (``watchable.can_be_watched``), of fixed shape, and not written by the graph.

    Args:
        module: an ATen graph.
        static: the arguments that are expected to stay the same, by position.
        arguments: all arguments of a call, for those whose value is not in ``static``.
    """
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    written = {argument for node in module.graph.nodes for argument in written_nodes(node)}
    weights = {}
    for i, item in static.items():
        value = item.value if item.value is not None or arguments is None else arguments[i]
        if not isinstance(value, torch.Tensor) or not can_be_watched(value):
            continue
        has_fixed_shape = not any(isinstance(size, torch.SymInt) for size in placeholders[i].meta["val"].shape)
        if has_fixed_shape and placeholders[i] not in written:
            weights[placeholders[i]] = Weight(item.name, value, _is_statistic(placeholders[i]))
    return weights


def _is_statistic(placeholder: fx.Node) -> bool:
    """Whether a placeholder is only used as a running mean or variance of batch norm."""
    batch_norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    return all(
        user.target is batch_norm and placeholder in user.args[3:5] and placeholder not in user.args[:3]
        for user in placeholder.users
    )


def is_of_a_weight(node: fx.Node, weights: Container[fx.Node]) -> bool:
    """Whether a node is a weight, or a view or cast of one, which is folded."""
    while node not in weights and len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return node in weights


def constants_of(region: Region, model: ir.Model, weights: Mapping[fx.Node, Weight]) -> dict[int, Weight]:
    """The weights that become constants of a region's session, by position among its inputs.

    A weight that is only looked up in (``Gather``) at indices that are not constant stays an input, as an embedding
    table does: a copy gains nothing. ``constants.TABLE`` handles one that is also a factor of a product.
    """
    inputs = list(zip(region.inputs, model.graph.inputs, strict=True))
    computed = computed_from(model.graph, (str(value.name) for item, value in inputs if item.node in weights))
    return {
        i: weights[item.node]
        for i, (item, value) in enumerate(inputs)
        if item.node in weights and not all(_looks_up(user, at, computed) for user, at in value.uses())
    }


def _looks_up(user: ir.Node, position: int, computed: Container[str]) -> bool:
    is_lookup = user.op_type == "Gather" and user.domain in ("", "ai.onnx") and position == 0
    return is_lookup and (user.inputs[1] is None or user.inputs[1].name not in computed)
