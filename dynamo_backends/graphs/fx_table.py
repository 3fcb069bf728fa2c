"""Formats an FX graph as a text table, a row for each node."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

from ..common.text_table import text_table
from .artifacts import operator_name
from .locations import where

_WIDTH = 72
"""Characters of a cell; longer text is cut."""


def graph_table(module: fx.GraphModule) -> str:
    """The table: opcode, name, target, arguments, dtype and shape, and source line of each node."""
    rows = [
        (node.op, node.name, _target(node), _arguments(node), _value(node), where(node)) for node in module.graph.nodes
    ]
    cells = [[_shorten(cell) for cell in row] for row in rows]
    headers = ["opcode", "name", "target", "args", "value", "source"]
    return text_table(cells, headers)


def _target(node: fx.Node) -> str:
    return operator_name(node) if getattr(node.target, "__module__", None) else str(node.target)


def _arguments(node: fx.Node) -> str:
    return ", ".join([*map(str, node.args), *(f"{name}={arg}" for name, arg in node.kwargs.items())])


def _value(node: fx.Node) -> str:
    """``f32[2, 3]``; the fake result is ``meta["val"]`` in AOTAutograd's graphs, ``"example_value"`` in Dynamo's."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_describe, value))
    return "" if value is None else _describe(value)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"
    return str(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
