"""The expected results of one node, so that ``dumps`` can bisect its region without PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.translate import value_names
from ..graphs.artifacts import CompiledRegion
from ..numerics.exact import Environment, run_eager, run_exact, widen
from ..numerics.graph_execution import value_of
from ..numerics.tensor_measure import dense
from .node_sessions import NodeSessions


def expected_values_of(
    compiled: CompiledRegion, value: str, actual: Mapping[fx.Node, object], sessions: NodeSessions
) -> dict[str, dict[str, torch.Tensor]]:
    """Computes the node with the result ``value`` in PyTorch, on the inputs it has in the region's unoptimized model.

    ``actual`` are the values of the run. Returns tensors by ONNX value name: ``input`` has the node's inputs, ``eager``
    its results in the model's dtype, ``exact`` its results in float64.

    Raises:
        SessionError: the runtime rejects the model with all values as outputs.
    """
    nodes = [node for node in compiled.region.nodes if node.target is not operator.getitem]
    node = next(node for node in nodes if value in value_names(node))
    inside = sessions.region_values(compiled, [actual[item.node] for item in compiled.region.inputs])
    known: Environment = dict(actual)
    for item in compiled.region.nodes:
        if not isinstance(item.meta.get("val"), (tuple, list)) and value_names(item)[0] in inside:
            known[item] = inside[value_names(item)[0]]
    # inputs that the translation does not read, such as the bias in a normalization's backward, are not in the model
    inputs = {argument: value_of(argument, known) for argument in node.all_input_nodes}
    eager = run_eager(node, inputs)
    exact = run_exact(node, {key: pytree.tree_map(widen, item) for key, item in inputs.items()}, eager)
    return {
        "input": _tensors({value_names(key)[0]: item for key, item in inputs.items()}),
        "eager": _by_name(node, eager),
        "exact": _by_name(node, exact),
    }


def _by_name(node: fx.Node, results: object) -> dict[str, torch.Tensor]:
    items = results if isinstance(results, (tuple, list)) else [results]
    return _tensors(dict(zip(value_names(node), items, strict=True)))


def _tensors(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: dense(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
