"""Evaluates FX nodes that depend on no input of the graph, such as positions computed from ``arange``.

If ONNX Runtime cannot run such a node, PyTorch evaluates it at compile time, and its value becomes a constant of the
model. So it does not split the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.fx.editing import is_pure

KNOWN_VALUE = "known_value"
"""Key in a node's ``meta``: whether the node becomes a constant."""

_MAXIMUM_ELEMENTS = 2**18  # of one constant, to limit the size of the model

_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def nodes_of_known_values(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that can become constants: pure, small, and with no arguments but other such nodes.

    Args:
        calls: call_function nodes of a graph in execution order.
    """
    known: set[fx.Node] = set()
    for node in calls:
        if is_pure(node) and known.issuperset(node.all_input_nodes) and _is_small(node):
            known.add(node)
    return known


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return all(
        isinstance(item, torch.Tensor)
        and item.dtype in _DTYPES
        and item.device.type == "cpu"
        and all(isinstance(size, int) for size in item.shape)
        and math.prod(item.shape) <= _MAXIMUM_ELEMENTS
        for item in (value if isinstance(value, (tuple, list)) else [value])
    )


def known_value(node: fx.Node) -> ir.Value | list[ir.Value]:
    """The results of one of ``nodes_of_known_values``, each the output of a ``Constant`` node that is in no graph.

    Raises:
        Exception: any that the operators raise.
    """
    with _disable_current_modes(), torch.no_grad():
        value = _evaluate(node)
    return [_constant(item) for item in value] if isinstance(value, (tuple, list)) else _constant(value)


def _evaluate(node: fx.Node) -> Any:
    """The result of a node; it and its ancestors are computed once each."""
    needed: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        needed[current] = needed.pop(current, None)  # moves it after its users
        waiting += current.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for current in reversed(needed):
        args, kwargs = fx.map_arg((current.args, current.kwargs), values.__getitem__)
        assert callable(current.target)
        values[current] = current.target(*args, **kwargs)
    return values[node]


def _constant(value: torch.Tensor) -> ir.Value:
    tensor = ir.tensor(value.resolve_conj().resolve_neg().contiguous().numpy())
    return ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)]).outputs[0]
