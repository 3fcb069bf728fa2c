"""Results that PyTorch leaves undefined (several values written to one place) are not reported as wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import compiled
from onnxscript import opset18 as op
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.dumps.reading import find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.numerics.segments import RecordedValues, SegmentCheck

aten = torch.ops.aten
REPEATED, ONCE = torch.tensor([0, 2, -3, 1]), torch.tensor([0, 2, 3, 1])  # of five places, -3 is the third
ROWS, NUMBER = torch.randn(4, 3), torch.randn(1)
MASK = torch.tensor([True, False, True, True, True])

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], bool]] = {
    "index_put": (lambda x, i, v: aten.index_put(x, [i], v), (REPEATED, ROWS), True),
    "index_put of a column": (lambda x, i, v: aten.index_put(x, [None, i % 3], v), (REPEATED, torch.randn(5, 4)), True),
    "index_put of elements": (lambda x, i, v: aten.index_put(x, [i, i * 0], v), (REPEATED, torch.randn(4)), True),
    "index_put, once": (lambda x, i, v: aten.index_put(x, [i], v), (ONCE, ROWS), False),
    "index_put, adding": (lambda x, i, v: aten.index_put(x, [i], v, True), (REPEATED, ROWS), False),
    "index_put of one number": (lambda x, i, v: aten.index_put(x, [i], v), (REPEATED, NUMBER), False),
    "index_put of a mask": (lambda x, i, v: aten.index_put(x, [i], v), (MASK, ROWS), False),
    "index_copy": (lambda x, i, v: aten.index_copy(x, 0, i % 5, v), (REPEATED, ROWS), True),
    "index_copy, once": (lambda x, i, v: aten.index_copy(x, 0, i, v), (ONCE, ROWS), False),
    "put": (lambda x, i, v: aten.put(x, i, v), (torch.tensor([0, 14, -1, 1]), torch.randn(4)), True),
    "put, adding": (lambda x, i, v: aten.put(x, i, v, True), (torch.tensor([0, 14, -1, 1]), torch.randn(4)), False),
    "scatter": (lambda x, i, v: aten.scatter(x, 1, i, v), (torch.tensor([[0, 0], [1, 2]]), ROWS[:2, :2]), True),
    "scatter, once": (lambda x, i, v: aten.scatter(x, 0, i, v), (torch.tensor([[0, 0], [1, 2]]), ROWS[:2, :2]), False),
}


def verdict_of(name: str, dump: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., object] | None) -> str:
    """The verdict on an operator that writes, and on what reads it."""
    write, arguments, _ = CASES[name]

    def function(x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return write(x.sin(), *more).cos(), x.exp()

    if wrong is not None:
        monkeypatch.setitem(CONVERTERS, aten.cos.default, wrong)
    with torch.no_grad():
        compiled(function, backend="onnx_debug", options={"dump_dir": str(dump)})(torch.randn(5, 3), *arguments)
    (graph,) = find_run(dump).graphs
    return str(graph.verdict)


def off(x: ir.Value) -> object:
    return op.Mul(op.Cos(x), 1.01)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_and_what_reads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is undefined hides no fault of a node that reads it."""
    assert verdict_of(name, tmp_path / "right", monkeypatch, None) == "ok"
    torch._dynamo.reset()
    assert verdict_of(name, tmp_path / "wrong", monkeypatch, off).startswith("diverges at cos ")


@pytest.mark.parametrize("name", CASES)
def test_which_elements_are_undefined(name: str) -> None:
    """Of the numbers that were written there, any is right; any other is a fault."""
    write, arguments, is_undefined = CASES[name]
    module = make_fx(write)(torch.randn(5, 3), *arguments)
    inputs = module.graph.find_nodes(op="placeholder")
    given = dict(zip(inputs, (torch.zeros(5, 3), *arguments), strict=True))
    nodes = [item for item in module.graph.nodes if item.op == "call_function"]
    right = write(torch.zeros(5, 3), *arguments)

    def is_wrong(position: int, number: float) -> bool:
        value = right.clone()
        value.view(-1)[position] = number
        check = SegmentCheck(nodes, given, RecordedValues({(nodes[-1], None): value}))
        (judged,) = (item for item in check.judge() if item.node is nodes[-1])
        return judged.is_wrong

    elements = list(enumerate(right.view(-1).tolist()))
    assert all(is_wrong(i, number + 100) for i, number in elements)
    written = arguments[-1].flatten().tolist()
    others = [is_wrong(i, other) for i, number in elements for other in written if other != number]
    assert any(others) and all(others) != is_undefined
