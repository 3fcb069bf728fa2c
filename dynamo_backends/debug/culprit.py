"""What is right at the node that a verdict names, so that a dump can be cut down without PyTorch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..artifacts import CompiledRegion
from ..exporter.translate import value_names
from ..numerics.distance import dense
from ..numerics.exact import Environment, run_eager, run_exact, widen
from .replay import Replay


@dataclasses.dataclass(frozen=True)
class NodeReference:
    """One node on the values that its region's model, nothing optimized, computes before it; by ONNX value.

    Attributes:
        inputs: what the node is given.
        eager: what PyTorch makes of it in the model's dtype.
        exact: the same in float64.
    """

    inputs: Mapping[str, torch.Tensor]
    eager: Mapping[str, torch.Tensor]
    exact: Mapping[str, torch.Tensor]


def reference_of(
    compiled: CompiledRegion, value: str, actual: Mapping[fx.Node, object], replay: Replay
) -> NodeReference:
    """The reference of the node of a region that computes ``value``.

    Args:
        compiled: the region.
        value: the name of one of the node's results.
        actual: the values of the run, by node.
        replay: the sessions.

    Raises:
        SessionError: the runtime refuses the model with all values exposed.
    """
    node = next(
        node for node in compiled.region.nodes if value in value_names(node) and node.target is not operator.getitem
    )
    inside = replay.region_values(compiled, [actual[item.node] for item in compiled.region.inputs])
    given: Environment = {argument: _value(argument, inside, actual) for argument in node.all_input_nodes}
    eager = run_eager(node, given)
    exact = run_exact(node, {key: pytree.tree_map(widen, item) for key, item in given.items()}, eager)
    return NodeReference(
        {value_names(key)[0]: dense(item) for key, item in given.items() if isinstance(item, torch.Tensor)},
        _by_name(node, eager),
        _by_name(node, exact),
    )


def _value(
    node: fx.Node, inside: Mapping[tuple[fx.Node, int | None], object], actual: Mapping[fx.Node, object]
) -> object:
    """The value of a node of a region, or of one before it.

    What nothing in the model needs is not in it, such as the bias that the gradient of a normalization is given:
    PyTorch computes it from what is.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        assert isinstance(node.args[1], int)
        found = inside.get((node.args[0], node.args[1]))
    else:
        found = inside.get((node, None))
    if found is not None:
        return found
    if node in actual:
        return actual[node]
    return run_eager(node, {item: _value(item, inside, actual) for item in node.all_input_nodes})


def _by_name(node: fx.Node, results: object) -> dict[str, torch.Tensor]:
    items = results if isinstance(results, (tuple, list)) else [results]
    named = zip(value_names(node), items, strict=True)
    return {name: dense(item) for name, item in named if isinstance(item, torch.Tensor)}
