"""The user's names of a graph's inputs, however Dynamo reaches them, and of the modules of its nodes."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from dynamo_backends.graphs import user_names
from dynamo_backends.graphs.locations import module_path

X = torch.randn(2, 4)
LAYER = nn.Linear(4, 4)
SCALE = torch.ones(4)


class Other(nn.Module):
    shift = torch.ones(4)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scales = [torch.ones(4)]
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x) * self.scales[0] + self.seen
        torch._dynamo.graph_break()
        return self.fc(x) + self.shift

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Callable_:  # noqa: N801
    def __init__(self) -> None:
        self.layer = LAYER

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def with_model(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def with_global(x: torch.Tensor) -> torch.Tensor:
    return LAYER(x) * SCALE


def with_import(x: torch.Tensor) -> torch.Tensor:
    import a_package.a_module_of_scales as module  # type: ignore[import-not-found]

    return x * module.scale


def in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    layer = nn.Linear(4, 4)
    return lambda x: layer(x)


BOUND = Other().project

CASES: dict[str, tuple[Callable[..., Any], tuple[object, ...], set[str], set[str]]] = {
    "a method": (Other(), (X,), {"fc.weight", "fc.bias", "scales[0]", "seen", "shift", "x"}, {"fc"}),
    "another method": (Other().project, (X,), {"fc.weight", "fc.bias", "x"}, {"fc"}),
    "an argument": (with_model, (LAYER, X), {"model.weight", "model.bias", "x"}, set()),
    "a global": (with_global, (X,), {"LAYER.weight", "LAYER.bias", "SCALE", "x"}, set()),
    "a global method": (lambda x: BOUND(x), (X,), {"BOUND.fc.weight", "BOUND.fc.bias", "x"}, {"fc"}),
    "of another file": (with_import, (X,), {"a_package.a_module_of_scales.scale", "x"}, set()),
    "a closure": (in_a_closure(), (X,), {"layer.weight", "layer.bias", "x"}, set()),
    "a partial of a model": (functools.partial(LAYER), (X,), {"weight", "bias", "input"}, set()),
    "an object": (Callable_(), (X,), {"layer.weight", "layer.bias", "x"}, {"layer"}),
    "a method of PyTorch's": (nn.Sequential(LAYER).forward, (X,), {"0.weight", "0.bias", "input"}, {"0"}),
}


@pytest.mark.parametrize("case", CASES)
def test_names(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("a_package"), types.ModuleType("a_package.a_module_of_scales")
    module.scale = torch.ones(4)  # type: ignore[attr-defined]
    package.a_module_of_scales = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    function, arguments, expected, paths = CASES[case]
    found: set[str] = set()
    modules: set[str] = set()

    def backend(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
        found.update(name.text for name in user_names.argument_names(graph))
        modules.update(module_path(node) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*arguments)
    assert found == expected
    assert modules - {""} == paths
