"""What is right at the node that a verdict names, so that a dump can be cut down without PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledRegion
from ..numerics.distance import dense
from ..numerics.exact import Environment, run_eager, run_exact, widen
from ..numerics.graph_execution import value_of
from .node_sessions import Replay


def reference_of(
    compiled: CompiledRegion, value: str, actual: Mapping[fx.Node, object], replay: Replay
) -> dict[str, dict[str, torch.Tensor]]:
    """The node of a region that computes ``value``, on the values before it in the region's unoptimized model.

    Args:
        compiled: the region.
        value: the name of one of the node's results.
        actual: the values of the run, by node.
        replay: the sessions.

    Returns:
        By ONNX value: under ``input`` what the node is given, under ``eager`` what PyTorch makes of it in the model's
        dtype, under ``exact`` the same in float64.

    Raises:
        SessionError: the runtime refuses the model with all values exposed.
    """
    nodes = [node for node in compiled.region.nodes if node.target is not operator.getitem]
    node = next(node for node in nodes if value in value_names(node))
    inside = replay.region_values(compiled, [actual[item.node] for item in compiled.region.inputs])
    known: Environment = dict(actual)
    for item in compiled.region.nodes:
        if not isinstance(item.meta.get("val"), (tuple, list)) and value_names(item)[0] in inside:
            known[item] = inside[value_names(item)[0]]
    # what nothing in the model needs, such as the bias that the gradient of a normalization is given, is computed
    given = {argument: value_of(argument, known) for argument in node.all_input_nodes}
    eager = run_eager(node, given)
    exact = run_exact(node, {key: pytree.tree_map(widen, item) for key, item in given.items()}, eager)
    return {
        "input": _tensors({value_names(key)[0]: item for key, item in given.items()}),
        "eager": _by_name(node, eager),
        "exact": _by_name(node, exact),
    }


def _by_name(node: fx.Node, results: object) -> dict[str, torch.Tensor]:
    items = results if isinstance(results, (tuple, list)) else [results]
    return _tensors(dict(zip(value_names(node), items, strict=True)))


def _tensors(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: dense(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
