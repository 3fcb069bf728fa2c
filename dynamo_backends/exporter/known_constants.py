"""Nodes of an FX graph whose values are known before the call, since they depend on no argument.

Where ONNX has no right translation of such a node, its value, computed by PyTorch, stands in the model instead: the
positions and index tables that models compute from ``arange`` need not split a graph.
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
"""Key in a node's ``meta``: whether its translation is its value."""

_MOST_ELEMENTS = 2**18
"""Of one value: what is longer would make the model large."""

_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def nodes_of_known_values(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of a graph's nodes, given in execution order, that only compute, from nothing but others such."""
    found: set[fx.Node] = set()
    for node in calls:
        if is_pure(node) and all(source in found for source in node.all_input_nodes) and _is_small(node):
            found.add(node)
    return found


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else [value]
    return all(
        isinstance(item, torch.Tensor)
        and item.dtype in _DTYPES
        and item.device.type == "cpu"
        and all(isinstance(size, int) for size in item.shape)
        and math.prod(item.shape) <= _MOST_ELEMENTS
        for item in items
    )


def known_value(node: fx.Node) -> ir.Value | list[ir.Value]:
    """The results of one of ``nodes_of_known_values``, each that of a ``Constant`` node which is in no graph yet.

    Raises:
        RuntimeError, ValueError, IndexError, ZeroDivisionError: whatever its operator raises.
    """
    with _disable_current_modes(), torch.no_grad():
        value = _computed(node)
    return [_constant(item) for item in value] if isinstance(value, (tuple, list)) else _constant(value)


def _computed(node: fx.Node) -> Any:
    """What a node returns, each node that leads to it computed once."""
    needed: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        needed[current] = needed.pop(current, None)
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
