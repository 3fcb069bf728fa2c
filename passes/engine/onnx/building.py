"""Builds the ONNX nodes that replace one node, without the checks of ``editing.substitute``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Axis: TypeAlias = "int | None"
"""A size; ``None`` if it is known only at run time."""


class Replacement:
    """New nodes that replace ``node``, with its metadata."""

    def __init__(self, node: ir.Node) -> None:
        self.nodes: list[ir.Node] = []
        self._node = node

    def op(self, operator: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """Adds a node and returns its result, whose dtype is that of the first input unless it is a Cast or a Shape."""
        name = f"{self._node.name}__stage{len(self.nodes)}"
        node = ir.node(operator, inputs, attributes, name=name)
        node.metadata_props.update(self._node.metadata_props)
        (result,) = node.outputs
        result.name = name
        if operator == "Shape":
            result.dtype = ir.DataType.INT64
        elif operator == "Cast":
            result.dtype = ir.DataType(attributes["to"])
        elif inputs and inputs[0] is not None:
            result.dtype = inputs[0].dtype
        self.nodes.append(node)
        return result

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``value`` as another dtype; itself if it has that dtype."""
        return value if value.dtype == dtype else self.op("Cast", [value], to=dtype)

    def vector(self, numbers: Sequence[int]) -> ir.Value:
        """A constant int64 tensor of shape [len(numbers)]."""
        return self.constant(np.array(numbers, np.int64))

    def constant(self, array: np.ndarray) -> ir.Value:
        result = self.op("Constant", [], value=ir.tensor(array))
        result.dtype = ir.DataType.from_numpy(array.dtype)
        return result

    def put(self, results: Sequence[ir.Value]) -> None:
        """Replaces the node by the new nodes, and its named results by ``results``."""
        pairs = [(old, new) for old, new in zip(self._node.outputs, results, strict=False) if old.name]
        assert isinstance(self._node.graph, ir.Graph)
        ir.convenience.replace_nodes_and_values(
            self._node.graph, self._node, [self._node], self.nodes, [old for old, _ in pairs], [new for _, new in pairs]
        )


def sizes_of(value: ir.Value) -> list[Axis] | None:
    """A value's sizes, ``None`` for symbolic ones; ``None`` if the rank is unknown."""
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]
