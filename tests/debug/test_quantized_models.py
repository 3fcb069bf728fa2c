"""The verdict on quantized models: a tie of a quantization is no fault; a wrong quantization is, and is named.

``pipeline/test_quantized.py`` tests the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torchao.quantization as ao
from conftest import compiled, counted
from onnxscript import opset18 as op
from torch import fx, nn
from torchao.quantization.granularity import PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import find_run
from dynamo_backends.exporter.converters import CONVERTERS
from passes import Pass, PassContext

aten, decomposed = torch.ops.aten, torch.ops.quantized_decomposed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(2)]).eval()


def by_torchao(config: Any) -> nn.Module:
    model = blocks()
    ao.quantize_(model, config)
    return model


def by_pt2e() -> nn.Module:
    """With the operators ``quantized_decomposed``."""
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    x = torch.randn(16, 64)
    model = prepare_pt2e(torch.export.export(blocks(), (x,)).module(), quantizer)
    model(x)
    return convert_pt2e(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "int8 weights": lambda: by_torchao(ao.Int8WeightOnlyConfig()),
    "int4 weights": lambda: by_torchao(ao.IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    "int8": lambda: by_torchao(ao.Int8DynamicActivationInt8WeightConfig()),
    "int4": lambda: by_torchao(ao.Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))),
    "pt2e": by_pt2e,
}


def graph_of(model: nn.Module, dump: Path) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        compiled(model, backend="onnx_debug", options={"dump_dir": str(dump)})(torch.randn(16, 64))
    (graph,) = find_run(dump).graphs
    return graph


@pytest.mark.parametrize("name", MODELS)
def test_what_is_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(MODELS[name](), tmp_path)
    assert graph.verdict == "ok" and not [
        item for item in graph.entry.unchecked if "does not run in float64" not in item
    ]
    assert counted("internal_failures") == 0
    assert main(["ls", "-d", str(tmp_path)]) == 0
    assert all(item in capsys.readouterr().out for item in graph.entry.unchecked[:1])


FAULTS: dict[str, tuple[str, int, Callable[[ir.Value], list[ir.Node]], Callable[[Any, fx.Node], fx.Node]]] = {
    "scale": (
        "clamp",
        -4,
        lambda value: [ir.node("Mul", [value, constant(1.01)])],
        lambda graph, node: graph.call_function(aten.mul.Tensor, (node, 1.01)),
    ),
    "zero point": (
        "round",
        -2,
        lambda value: [ir.node("Add", [value, constant(1.0)])],
        lambda graph, node: graph.call_function(aten.add.Tensor, (node, 1.0)),
    ),
    "axis": (
        "amax",
        -2,
        lambda value: [
            largest := ir.node("ReduceMax", [value]),
            ir.node("Expand", [largest.outputs[0], shape_of(value)]),
        ],
        lambda graph, node: graph.call_function(
            aten.expand.default, (graph.call_function(aten.amax.default, (node, [0, 1], True)), [16, 1])
        ),
    ),
    "bounds": (
        "clamp",
        -3,
        lambda value: [ir.node("Max", [value, constant(-127.0)])],
        lambda graph, node: graph.call_function(aten.clamp.default, (node, -127.0)),
    ),
}


def constant(number: float) -> ir.Value:
    return ir.node("Constant", [], {"value": ir.tensor(np.float32(number))}).outputs[0]


def shape_of(value: ir.Value) -> ir.Value:
    return ir.node("Shape", [value]).outputs[0]


def numbered(name: str, names: list[str], position: int) -> str:
    return [item for item in names if re.fullmatch(rf"{name}(_\d+)?", item)][position]


def in_onnx(fault: str) -> Callable[[ir.Model, PassContext], int]:
    """A wrong pass: inserts nodes after a value, which keeps its name."""
    name, position, make, _ = FAULTS[fault]

    def run(model: ir.Model, context: PassContext) -> int:
        values = {str(value.name): value for node in model.graph for value in node.outputs}
        value = values[numbered(name, list(values), position)]
        node, nodes = value.producer(), make(value)
        added = [item for last in nodes for item in [*(v.producer() for v in last.inputs), last]]
        added = [item for i, item in enumerate(added) if item is not node and item not in added[:i]]
        result = nodes[-1].outputs[0]
        for user, index in list(value.uses()):
            if user not in added:
                user.replace_input_with(index, result)
        value.name, result.name = "before_the_fault", value.name
        model.graph.insert_after(node, added)
        return 1

    return run


def in_fx(fault: str) -> Callable[[fx.GraphModule, PassContext], int]:
    name, position, _, make = FAULTS[fault]

    def run(module: fx.GraphModule, context: PassContext) -> int:
        nodes = {node.name: node for node in module.graph.nodes}
        node = nodes[numbered(name, list(nodes), position)]
        with module.graph.inserting_before(node.next):
            last = make(module.graph, node)
        last.meta["val"] = node.meta["val"]
        before = set(nodes.values())
        node.replace_all_uses_with(last, lambda user: user in before)
        return 1

    return run


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", ["post_grad", "onnx"])
def test_a_wrong_pass(stage: str, fault: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """In the third of four quantizations; ties of others change results by as much."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", (in_onnx if stage == "onnx" else in_fx)(fault)))
    graph = graph_of(MODELS["int8"](), tmp_path)
    blame = graph.entry.blame
    assert blame is not None and (blame.kind, blame.name) == ("pass", f"{stage}.wrong"), graph.verdict
    if stage == "onnx":
        assert re.fullmatch(rf"{FAULTS[fault][0]}(_\d+)?", blame.value)


def wrong_scale(x: ir.Value, y: ir.Value) -> object:
    return op.Mul(op.Div(x, y), 1.01)


def wrong_zero_point(x: ir.Value, y: ir.Value) -> object:
    return op.Add(op.Add(x, y), 1.0)


def wrong_axis(x: ir.Value, axis: Any, keepdim: bool = False) -> object:
    return op.Expand(op.ReduceMax(x), op.Concat(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1]), axis=0))


def wrong_bounds(x: ir.Value, low: float | None = None, high: float | None = None) -> object:
    return op.Clip(x, -127.0, 127.0) if low == -128 else op.Max(x, low)


def wrong_group(x: ir.Value, y: ir.Value) -> object:
    """Scales of groups of 32 weights, in reverse order."""
    shape = y.shape if isinstance(y, ir.Value) else ()
    if shape is not None and len(shape) == 3:
        y = op.Gather(y, op.Constant(value_ints=[1, 0]), axis=1)
    return op.Mul(x, y)


def numbers(scale: float = 1.0, zero: int = 0, low: int = 0) -> Callable[..., object]:
    """A converter of ``quantize_per_tensor``, with faults."""

    def convert(x: ir.Value, step: float, zero_point: int, least: int, most: int, dtype: object) -> object:
        whole = op.Add(op.Round(op.Div(x, step * scale)), float(zero_point + zero))
        return op.Cast(op.Clip(whole, float(least + low), float(most)), to=ir.DataType.UINT8)

    return convert


def wrong_axis_of_weights(
    x: ir.Value, scales: ir.Value, zeros: ir.Value, axis: int, least: int, most: int, dtype: object
) -> object:
    scales = op.Slice(scales, op.Constant(value_ints=[0]), op.Constant(value_ints=[64]))
    return op.Mul(op.Cast(x, to=ir.DataType.FLOAT), scales)


CONVERTED: dict[str, tuple[str, Any, Callable[..., object], str]] = {
    "scale": ("int8", aten.div.Tensor, wrong_scale, "div"),
    "zero point": ("int8", aten.add.Tensor, wrong_zero_point, "add_1"),
    "axis": ("int8", aten.amax.default, wrong_axis, "amax"),
    "bounds": ("int8", aten.clamp.default, wrong_bounds, "clamp_1"),
    "group": ("int4 weights", aten.mul.Tensor, wrong_group, "mul_2"),
    "scale of pt2e": ("pt2e", decomposed.quantize_per_tensor.default, numbers(scale=1.01), "quantize_per_tensor"),
    "zero point of pt2e": ("pt2e", decomposed.quantize_per_tensor.default, numbers(zero=1), "quantize_per_tensor"),
    "bounds of pt2e": ("pt2e", decomposed.quantize_per_tensor.default, numbers(low=30), "quantize_per_tensor"),
    "axis of pt2e": (
        "pt2e",
        decomposed.dequantize_per_channel.default,
        wrong_axis_of_weights,
        "dequantize_per_channel",
    ),
}


@pytest.mark.parametrize("fault", CONVERTED)
def test_a_wrong_converter(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, target, wrong, value = CONVERTED[fault]
    monkeypatch.setitem(CONVERTERS, target, wrong)
    graph = graph_of(MODELS[name](), tmp_path)
    blame = graph.entry.blame
    assert blame is not None and (blame.kind, blame.value) == ("node", value), graph.verdict


def test_a_quantization_that_divides_by_the_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eager multiplies by the reciprocal of the scale: its last place may differ, and turn a tie."""
    monkeypatch.setitem(CONVERTERS, decomposed.quantize_per_tensor.default, numbers())
    assert graph_of(by_pt2e(), tmp_path).verdict == "ok"
