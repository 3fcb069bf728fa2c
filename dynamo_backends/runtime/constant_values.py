"""Which values of a model are constant once its weights are: ONNX Runtime computes them when it makes the session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def computed_from(graph: ir.Graph, constants: Iterable[str]) -> set[str]:
    """The names of the values that depend on constants and initializers alone, these among them.

    Args:
        graph: its nodes are in execution order.
        constants: names of inputs that are constants of the session.
    """
    found = {*constants, *graph.initializers}
    for node in graph:
        if node.op_type == "Constant" or (node.inputs and all(_is_in(value, found) for value in node.inputs)):
            found.update(value.name for value in node.outputs if value.name)
    return found


def _is_in(value: ir.Value | None, names: set[str]) -> bool:
    return value is None or value.name in names
