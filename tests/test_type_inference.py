"""ONNX's schemas are asked once about alike nodes, and about each node that differs in what they are told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from passes.engine.context import Target
from passes.engine.onnx import inference


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ir.Node]:
    """The nodes that the schemas are asked about; nothing is known before."""
    nodes: list[ir.Node] = []
    ask = inference._ask_schema

    def noting(node: ir.Node, opset: int) -> list[inference.Inferred | None] | None:
        nodes.append(node)
        return ask(node, opset)

    monkeypatch.setattr(inference, "_answers", {})
    monkeypatch.setattr(inference, "_ask_schema", noting)
    return nodes


def reshaped(
    target: Sequence[int],
    shape: Sequence[int | str] = (2, 6),
    dtype: ir.DataType = ir.DataType.FLOAT,
    allowzero: int = 0,
) -> tuple[ir.DataType | None, list[int | str | None]]:
    """The inferred dtype and shape of a ``Reshape`` to a constant shape."""
    tensor = ir.Tensor(np.array(target, np.int64))
    sizes = ir.Value(name="sizes", type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(shape))
    node = ir.Node("", "Reshape", [x, sizes], [ir.AttrInt64("allowzero", allowzero)])
    assert inference.settle_types(node, 20, Target()) is None
    assert node.outputs[0].shape is not None
    return node.outputs[0].dtype, inference.dims_of(node.outputs[0].shape)


def test_alike_nodes_are_asked_about_once(asked: list[ir.Node]) -> None:
    assert reshaped([3, 4]) == reshaped([3, 4]) == (ir.DataType.FLOAT, [3, 4])
    assert len(asked) == 1


def test_what_differs_is_asked_about(asked: list[ir.Node]) -> None:
    assert reshaped([3, -1]) == (ir.DataType.FLOAT, [3, 4])
    assert reshaped([4, -1]) == (ir.DataType.FLOAT, [4, 3])  # another constant
    assert reshaped([4, -1], (4, 6)) == (ir.DataType.FLOAT, [4, 6])  # another shape
    assert reshaped([4, -1], dtype=ir.DataType.DOUBLE) == (ir.DataType.DOUBLE, [4, 3])  # another dtype
    assert reshaped([0, 0], (0, 6)) == (ir.DataType.FLOAT, [0, 6])
    assert reshaped([0, 0], (0, 6), allowzero=1) == (ir.DataType.FLOAT, [0, 0])  # another attribute
    assert len(asked) == 6


def test_the_answers_kept_are_bounded(asked: list[ir.Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_MOST_ANSWERS", 3)
    for size in (1, 2, 3, 4, 6, 12):
        reshaped([size, -1])
        assert len(inference._answers) <= 3


def test_what_cannot_be_computed_is_not_kept(asked: list[ir.Node]) -> None:
    for _ in range(2):
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
        node = ir.Node("", "MatMul", [x, x])
        said = inference.settle_types(node, 20, Target())
        assert said is not None and "MatMul cannot be computed" in said
    assert len(asked) == 2
