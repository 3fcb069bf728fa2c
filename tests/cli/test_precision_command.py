"""``dynamo-backends precision``: which nodes of a low-precision graph must compute in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import compiled
from onnx.reference import ReferenceEvaluator
from torch import nn

from dynamo_backends.cli import main
from dynamo_backends.dumps.mixed_precision import widened
from dynamo_backends.dumps.precision import RegionPrecision, RegionSearch, find_precision
from dynamo_backends.dumps.reading import DumpedGraph, find_run
from dynamo_backends.graphs.locations import short_file


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


class Attention(nn.Module):
    """Attention as it is written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, 3 * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)  # the projection
        query, key, value = (item.unflatten(-1, (4, 4)).transpose(1, 2) for item in (query, key, value))  # the heads
        scores = query @ key.transpose(-1, -2)  # the scores
        weights = (scores - scores.amax(-1, keepdim=True)).exp()  # the weights
        return x + ((weights / weights.sum(-1, keepdim=True)) @ value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """The keys of the second attention are ``offset`` plus small numbers, which float16 loses at 1000."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.second, self.third = Attention(16), Attention(16), Attention(16)
        with torch.no_grad():
            self.second.project.bias[16:32] += offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def dumped(model: nn.Module, dump: Path, dtype: torch.dtype) -> DumpedGraph:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16).to(dtype)
    with torch.no_grad():
        compiled(model.to(dtype), backend="onnx_debug", options={"dump_dir": str(dump)})(x)
    (graph,) = find_run(dump).graphs
    return graph


def only(found: list[RegionPrecision]) -> RegionPrecision:
    (region,) = found
    return region


def test_attention_with_large_keys(tmp_path: Path) -> None:
    """Each value is right on the numbers it was computed from, so the verdict is ok; float64 has other results."""
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    assert graph.verdict == "ok" and only(find_precision(graph)).outcome == "ok"
    found = only(find_precision(graph, strict=True))
    assert found.outcome == "found" and found.reference.startswith("float64")
    assert {node.module.split(".")[0] for node in found.nodes} == {"second"}, "the others are right in float16"
    lines = {int(node.source.split(":")[-1]) for node in found.nodes}
    assert lines <= {line_of(what) for what in ("# the projection", "# the heads", "# the scores", "# the weights")}
    assert 1 <= len(found.nodes) < found.candidates / 3
    assert not all(error.is_right for error in found.before) and all(error.is_right for error in found.after)


def test_no_node_of_the_set_can_be_left_out(tmp_path: Path) -> None:
    """Each smaller set is wrong when it is tried by itself."""
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    found = only(find_precision(graph, strict=True))
    names = [node.fx_node for node in found.nodes]
    assert names
    search = RegionSearch(graph, graph.regions[0], True, lambda said: None)
    search.find()
    assert all(item.is_right for item in search.errors(names))
    for left_out in names:
        assert not all(item.is_right for item in search.errors([name for name in names if name != left_out]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_that_is_right(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(Model(0.0), tmp_path, dtype)
    assert graph.verdict == "ok"
    assert all(item.outcome in ("ok", "not low") for item in find_precision(graph))
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(graph.name)


def test_a_graph_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(Model(0.0), tmp_path, torch.float32)
    assert only(find_precision(graph)).outcome == "not low"
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 0
    assert "float16 or bfloat16" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    assert main(["precision", graph.reference, "-d", str(tmp_path), "--strict"]) == 1
    shown, progress = capsys.readouterr()
    assert "torch.autocast" in shown and "in float32, in second" in shown and f"{short_file(__file__)}:" in shown
    assert "nodes in float32: right" in progress
    assert main(["precision", graph.reference, "-d", str(tmp_path), "--strict", "--json"]) == 1
    (said,) = json.loads(capsys.readouterr().out)
    assert said["regions"][0]["outcome"] == "found" and said["regions"][0]["nodes"][0]["module"].startswith("second")


def _chain() -> ir.Model:
    """x * x / 1000, in float16."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape([2]))
    thousand = ir.node("Constant", [], {"value": ir.tensor(np.float16(1000))}, name="thousand")
    square = ir.node("Mul", [x, x], name="square")
    quotient = ir.node("Div", [square.outputs[0], thousand.outputs[0]], name="quotient")
    for node in (thousand, square, quotient):
        node.outputs[0].name = node.name
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
        node.outputs[0].shape = x.shape if node is not thousand else ir.Shape([])
    graph = ir.Graph([x], [quotient.outputs[0]], nodes=[thousand, square, quotient], opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [((), [np.inf, 0.004]), (("square",), [np.inf, 0.004]), (("square", "quotient"), [1000.0, 0.004])],
    ids=["none", "one", "both"],
)
def test_values_between_wide_nodes_stay_wide(chosen: tuple[str, ...], expected: list[float]) -> None:
    """1000 squared is beyond float16; between two nodes in float32 it is not rounded."""
    model = _chain()
    variant = widened(model, lambda node: node.name in chosen, ir.DataType.FLOAT)
    content = ir.to_proto(variant).SerializeToString()
    # Not ONNX Runtime: it has no such kernels on the CPU, and itself keeps such values in float32.
    (found,) = ReferenceEvaluator(content).run(None, {"x": np.array([1000, 2], np.float16)})
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=1e-3)
    assert [value.dtype for node in model.graph for value in node.outputs] == [ir.DataType.FLOAT16] * 3, "as it was"


def test_outputs_may_stay_wide() -> None:
    variant = widened(_chain(), lambda node: True, ir.DataType.DOUBLE, wide_outputs=True)
    session = onnxruntime.InferenceSession(ir.to_proto(variant).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["quotient"], {"x": np.array([1000, 2], np.float16)})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [1000, 0.004])
