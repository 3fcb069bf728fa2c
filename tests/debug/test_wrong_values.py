"""What a verdict says of a fault beyond its place: the layer, the wrong elements, the other wrong nodes; and what was
registered in vain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from conftest import compiled
from onnxscript import opset20 as op
from torch import fx, nn

import dynamo_backends
from dynamo_backends import register_converter, unregister_converter
from dynamo_backends.debug.manifest import flush_manifests
from dynamo_backends.dumps.reading import DumpedRun, find_run
from passes import Pass, PassContext

aten = torch.ops.aten


class Layers(nn.Module):
    """Equal layers, whose nodes share a source line."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def converters() -> Iterator[None]:
    yield
    unregister_converter(aten.gelu, aten.sinh, aten.tanh)


def dumped(model: Callable[..., object], folder: Path) -> DumpedRun:
    """One compared run."""
    torch.manual_seed(0)
    with torch.no_grad():
        compiled(model, backend="onnx_debug", options={"dump_dir": str(folder)})(torch.randn(8, 32))
    return find_run(folder)


@pytest.mark.usefixtures("converters")
def test_a_converter_that_is_wrong_where_its_argument_is_negative(tmp_path: Path) -> None:
    @register_converter(aten.gelu.default)
    def wrong_where_negative(x: ir.Value, approximate: str = "none") -> object:
        right = op.Gelu(x, approximate=approximate)
        return op.Where(op.Less(x, op.CastLike(0.0, x)), op.Mul(right, op.CastLike(1.01, x)), right)

    (graph,) = dumped(Layers(), tmp_path).graphs
    blame, others = graph.entry.blame, graph.entry.wrong_nodes
    assert blame is not None and blame.elements is not None and blame.elements.pattern in graph.entry.note
    assert blame.code.startswith(f"{Path(__file__).name}:") and f"converter ({blame.code})" in graph.entry.verdict
    assert blame.module == "layers.0.1" and f"in {blame.module}" in graph.entry.verdict
    assert "addmm is negative" in blame.elements.pattern
    assert all(item.inputs["addmm"] < 0 for item in blame.elements.worst)
    assert {item.module for item in others} == {f"layers.{i}.1" for i in range(3)} and blame.more == 2
    assert {item.code for item in others} == {blame.code}
    errors = [item.error.max_abs / item.error.scale for item in others]
    assert errors == sorted(errors, reverse=True)
    table = (graph.folder / "side_by_side.txt").read_text()
    assert blame.elements.text in table and all(item.module in table for item in others)
    (graph,) = dumped(lambda features: F.gelu(features), tmp_path / "of an argument").graphs
    assert "all where features is negative" in graph.entry.note


@pytest.mark.usefixtures("converters")
def test_many_small_errors_of_one_sign_are_told_and_are_no_verdict(tmp_path: Path) -> None:
    def bias(folder: Path) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            compiled(torch.tanh, backend="onnx_debug", options={"dump_dir": str(folder)})(torch.randn(64, 64))
        [graph] = find_run(folder).graphs
        [row] = [item for item in graph.rows() if item.name == "tanh"]
        found = row.mean_difference or 0.0
        assert graph.entry.verdict == "ok" and ("on average" in graph.entry.note) == (abs(found) > 1)
        return found

    assert abs(bias(tmp_path / "right")) < 1

    @register_converter(aten.tanh.default)
    def tanh(x: ir.Value) -> object:
        return op.Mul(op.Tanh(x), op.CastLike(1 + 6e-7, x))

    assert 4 < bias(tmp_path / "wrong") < 6


@pytest.mark.usefixtures("converters")
def test_a_wrong_pass_and_a_wrong_converter(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    @register_converter(aten.sinh.default)
    def wrong_sinh(x: ir.Value) -> object:
        return op.Mul(op.Sinh(x), op.CastLike(1.1, x))

    def to_sinh(module: fx.GraphModule, context: PassContext) -> int:
        for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
            node.target, node.kwargs = aten.sinh.default, {}
        return 1

    planted(Pass("joint.wrong", "Planted by a test.", to_sinh))
    (graph,) = dumped(Layers(), tmp_path).graphs
    blame, first = graph.entry.blame, graph.entry.wrong_nodes[0]
    assert blame is not None and blame.name == "joint.wrong"
    assert "wrong_values.py" in first.code and f"converter ({first.code})" in graph.entry.note


@pytest.mark.parametrize("stage", ["pre_grad", "post_grad"])
def test_a_pass_that_is_wrong_in_one_of_several_equal_layers(
    stage: str, planted: Callable[[Pass], None], tmp_path: Path
) -> None:
    def scale_negatives_of_the_last(module: fx.GraphModule, context: PassContext) -> int:
        last = [node for node in module.graph.nodes if node.target in (F.gelu, aten.gelu.default)][-1]
        leaky: Callable[..., object] = F.leaky_relu if stage == "pre_grad" else aten.leaky_relu.default
        with module.graph.inserting_after(last):
            scaled = module.graph.call_function(leaky, (last, 1.01))
        scaled.meta.update({key: last.meta[key] for key in ("val", "example_value") if key in last.meta})
        last.replace_all_uses_with(scaled, lambda user: user is not scaled)
        module.recompile()
        return 1

    planted(Pass(f"{stage}.wrong", "Planted by a test.", scale_negatives_of_the_last))
    (graph,) = dumped(Layers(), tmp_path).graphs
    blame = graph.entry.blame
    assert blame is not None and (blame.name, blame.module) == (f"{stage}.wrong", "layers.2.1")
    assert blame.elements is not None and "expected is negative" in blame.elements.pattern


@pytest.mark.usefixtures("converters")
def test_converters_and_passes_that_no_graph_uses(
    planted: Callable[[Pass], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    @register_converter(aten.sinh.default)
    def unused_sinh(x: ir.Value) -> object:
        return op.Sinh(x)

    @register_converter(aten.gelu)  # with the overloads that no graph has
    def good_gelu(x: ir.Value, approximate: str = "none") -> object:
        return op.Gelu(x, approximate=approximate)

    planted(Pass("post_grad.in_vain", "Planted by a test.", lambda module, context: 0))
    run = dumped(Layers(), tmp_path)
    flush_manifests()
    flush_manifests()
    (said,) = (record.getMessage() for record in caplog.records if record.name == "dynamo_backends.debug.manifest")
    assert "unused_sinh" in said and "good_gelu" not in said
    unused = json.loads((run.folder / "manifest.json").read_text())["unused"]
    assert len(unused) == 2 and "aten.sinh.default" in unused[0] and "post_grad.in_vain" in unused[1]
    explained = dynamo_backends.explain(Layers())(torch.randn(8, 32))
    assert explained.unused_extensions == unused and all(item in str(explained) for item in unused)
