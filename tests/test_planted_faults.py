"""Faults planted one at a time, in every stage: ``onnx_debug`` says so, and names the pass, the node and its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from conftest import compiled
from torch import fx, nn

from passes import Pass, PassContext, register, unregister

aten = torch.ops.aten


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))  # silu of the perceptron


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.first(x)))  # silu of the convolutional network
        return self.second(y).mean((2, 3))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, activation=F.gelu, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x)
        return self.head(F.silu(y))  # silu of the transformer


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (5, 8)),
    "convolutional network": (Convolutional, (2, 3, 10, 10)),
    "transformer": (Transformer, (2, 6, 16)),
}


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def verdicts(model: nn.Module, shape: tuple[int, ...], mode: str, dump: Path) -> dict[str, str]:
    """By direction, the verdicts of one compared run."""
    torch.manual_seed(0)
    x = torch.randn(*shape)
    function = compiled(model, backend="onnx_debug", dynamic=mode == "dynamic", options={"dump_dir": str(dump)})
    if mode == "training":
        function(x).square().sum().backward()
    else:
        with torch.no_grad():
            function(x)
    graphs = json.loads((dump / "latest" / "manifest.json").read_text())["graphs"]
    return {graph["direction"]: graph["verdict"] for graph in graphs}


def scale(stage: str) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that makes SiLU 1 % too large."""
    targets = {F.silu} if stage == "pre_grad" else {aten.silu.default}
    multiply: Callable[..., object] = torch.mul if stage == "pre_grad" else aten.mul.Tensor

    def run(module: fx.GraphModule, context: PassContext) -> int:
        fired = 0
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in targets:
                with module.graph.inserting_after(node):
                    scaled = module.graph.call_function(multiply, (node, 1.01))
                scaled.meta.update({key: node.meta[key] for key in ("val", "example_value") if key in node.meta})
                node.replace_all_uses_with(scaled, lambda user, new=scaled: user is not new)
                fired += 1
        module.recompile()
        return fired

    return run


def scale_onnx(model: ir.Model, context: PassContext) -> int:
    """The same in the ONNX model; the value keeps its name."""
    fired = 0
    for node in list(model.graph):
        if any(value.name == "silu" for value in node.outputs):
            value = node.outputs[0]
            factor = ir.node("Constant", [], {"value": ir.tensor(np.float32(1.01))})
            scaled = ir.node("Mul", [value, factor.outputs[0]])
            for user, index in list(value.uses()):
                if user is not scaled:
                    user.replace_input_with(index, scaled.outputs[0])
            value.name, scaled.outputs[0].name = "before_scaling", "silu"
            model.graph.insert_after(node, [factor, scaled])
            model.graph.outputs[:] = [scaled.outputs[0] if item is value else item for item in model.graph.outputs]
            fired += 1
    return fired


@pytest.fixture
def planted() -> Iterator[Callable[[Pass], None]]:
    names: list[str] = []

    def plant(item: Pass) -> None:
        register(item)
        names.append(item.name)

    yield plant
    for name in names:
        unregister(name)


@pytest.mark.parametrize("mode", ["inference", "training", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad", "onnx"])
def test_a_wrong_pass(stage: str, name: str, mode: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    run = scale_onnx if stage == "onnx" else scale(stage)
    planted(Pass(f"{stage}.wrong", "Planted by a test.", run))  # type: ignore[arg-type]
    make, shape = MODELS[name]
    found = verdicts(make(), shape, mode, tmp_path)
    direction = "forward" if mode == "training" else "inference"
    assert found[direction].startswith("diverges at "), found
    assert f"pass {stage}.wrong" in found[direction]
    assert line_of(f"silu of the {name}") in found[direction]
