"""The objects alive after a compile: those that a run needs, and none that only an observer reads."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator

import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_values, compiled, counted
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import dynamo_backends
from dynamo_backends.errors import SessionError
from dynamo_backends.graphs.artifacts import Region, Split
from dynamo_backends.graphs.pytorch_runner import without_graph
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.stage_data import CompiledGraph, CompiledRegion
from dynamo_backends.runtime.session import Session

ONLY_FOR_OBSERVERS = (ir.Model, CompiledGraph, CompiledRegion, Region, Split)


class Model(nn.Module):
    """Two regions, with a sort in PyTorch and a constant tensor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).sort().values * torch.tensor([0.5, 2.0]).repeat(4)
        return self.second(y).relu()


def alive(*types: type) -> list[object]:
    return [item for item in gc.get_objects() if issubclass(type(item), types)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """References to a test's graphs: those given to the observer, the split ones, and those of the regions."""
    references: list[weakref.ref] = []
    original = fx.GraphModule.__init__

    def note(self: fx.GraphModule, root: object, graph: fx.Graph, class_name: str = "GraphModule") -> None:
        original(self, root, graph, class_name)
        if class_name in ("SplitGraph", "Region"):
            references.append(weakref.ref(graph))

    def stage(self: Observer, name: str, graph: object, artifact: object) -> None:
        if name == "post_grad":
            assert isinstance(artifact, fx.GraphModule)
            references.append(weakref.ref(artifact.graph))

    monkeypatch.setattr(fx.GraphModule, "__init__", note)
    monkeypatch.setattr(Observer, "stage", stage)
    return references


def by_name(model: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    return compiled(model, options=options)


def by_aot_autograd(model: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    compiler = dynamo_backends.onnx_compiler(**options)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=dynamo_backends.decomposition_table(),
    )
    return torch.compile(model, backend=backend)


@pytest.fixture(params=[by_name, by_aot_autograd])
def compile_it(request: pytest.FixtureRequest) -> Iterator[Callable[..., Callable[..., torch.Tensor]]]:
    gc.collect()
    yield request.param


@pytest.mark.parametrize(("is_training", "options"), [(False, {}), (True, {"verify_passes": True})], ids=str)
def test_no_model_and_no_graph_stays(
    is_training: bool, options: dict[str, object], compile_it: Callable, seen: list[weakref.ref]
) -> None:
    before = {id(item) for item in alive(*ONLY_FOR_OBSERVERS)}
    model = Model()
    function = compile_it(model, **options)
    x = torch.randn(3, 8)
    with torch.set_grad_enabled(is_training):
        result = function(x)
        if is_training:
            result.sum().backward()
        gc.collect()
        assert len(seen) >= (4 if is_training else 2)
        assert [type(item) for item in alive(*ONLY_FOR_OBSERVERS) if id(item) not in before] == []
        assert [reference() for reference in seen if reference() is not None] == []
        assert_same_values(function(x), model(x))


def test_a_rescue_still_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What PyTorch runs where a session fails needs no graph."""
    model = Model()
    function = compiled(model)
    x = torch.randn(3, 8)

    def fail(*_: object) -> object:
        raise SessionError("no memory")

    with torch.no_grad():
        function(x)
        gc.collect()
        monkeypatch.setattr(Session, "__call__", fail)
        assert_same_values(function(x), model(x))
    assert counted("runtime_failures") == 2
    assert re.search(r"region 1: .*no memory", caplog.text)


def test_code_without_its_graph_finds_attributes_of_modules() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    linear = graph.call_module("parts.linear", (x,))
    graph.output(graph.call_function(torch.mul, (linear, graph.get_attr("parts.linear.bias"))))
    parts = nn.ModuleDict({"linear": nn.Linear(3, 2)})
    code = without_graph(fx.GraphModule(nn.ModuleDict({"parts": parts}), graph))
    y = torch.randn(4, 3)
    assert_same_values(code(y), parts["linear"](y) * parts["linear"].bias)


@pytest.mark.parametrize("is_training", [False, True])
def test_the_first_batch_is_not_kept(is_training: bool, compile_it: Callable) -> None:
    function = compile_it(Model())
    x = torch.randn(3, 8)
    reference = weakref.ref(x)
    result = function(x)
    if is_training:
        result.sum().backward()
    del x, result
    gc.collect()
    assert reference() is None
