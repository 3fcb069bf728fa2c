"""What a compared call does beside judging values: its results, its gradients, errors, threads, calls within calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compiled, counted
from onnxscript import opset18 as op
from torch import fx

from dynamo_backends.debug import run_comparison, session_values
from dynamo_backends.debug.captured_graph import CapturedGraph
from dynamo_backends.debug.manifest import flush_manifests
from dynamo_backends.debug.session_values import SessionValues
from dynamo_backends.dumps.reading import DumpedGraph, find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.partition import program
from dynamo_backends.pipeline import stages
from dynamo_backends.runtime.session import Session
from passes import Pass, PassContext

aten = torch.ops.aten


def debugged(function: Callable[..., Any], dump: Path, **options: object) -> Callable[..., Any]:
    return compiled(function, backend="onnx_debug", dynamic=True, options={"dump_dir": str(dump), **options})


def graphs(dump: Path) -> dict[str, DumpedGraph]:
    flush_manifests()
    return {graph.direction: graph for graph in find_run(dump).graphs}


def verdicts(dump: Path) -> dict[str, str | None]:
    return {direction: graph.verdict for direction, graph in graphs(dump).items()}


def wrong_beyond_five(operator: object) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that makes an elementwise function 1 % too large where its argument is above 5."""

    def run(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is operator]
        for node in nodes:
            x, value = node.args[0], node.meta["val"]
            with module.graph.inserting_after(node):
                is_above = module.graph.call_function(aten.gt.Scalar, (x, 5.0))
                scaled = module.graph.call_function(aten.mul.Tensor, (node, 1.01))
                chosen = module.graph.call_function(aten.where.self, (is_above, scaled, node))
            for item in (chosen, scaled, is_above):
                node.append(item)
            node.append(scaled)
            node.append(is_above)
            is_above.meta["val"] = value > 5
            scaled.meta["val"] = chosen.meta["val"] = value
            node.replace_all_uses_with(chosen, lambda user, own=(is_above, scaled, chosen): user not in own)
        return len(nodes)

    return run


def test_results_in_another_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each value is right, and the loaded program returns them to the wrong readers."""
    load = program.load

    def swapped(found: program.Program, *args: Any, **kwargs: Any) -> program.LoadedProgram:
        output = found.code.output_node()
        first, second = output.args[0]  # type: ignore[misc, union-attr]
        output.args = ((second, first),)
        return load(found, *args, **kwargs)

    monkeypatch.setattr(stages, "load", swapped)
    x = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        first, _ = debugged(lambda x: (x.sin(), x.cos()), tmp_path)(x)
    assert torch.allclose(first, x.cos())
    entry = graphs(tmp_path)["inference"].entry
    assert entry.verdict is not None and entry.verdict.startswith("diverges at sin"), entry.verdict
    assert entry.blame is not None and entry.blame.kind == "result"


def test_results_that_the_graph_overwrites(tmp_path: Path) -> None:
    """What is returned, and compared, is the memory after the write."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        x.mul_(2.0)
        return x, y

    x = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        result, _ = debugged(function, tmp_path)(x)
    assert result is x and verdicts(tmp_path) == {"inference": "ok"}


def test_a_wrong_gradient_of_a_backward_that_does_not_run(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    planted(Pass("joint.wrong", "a wrong pass", wrong_beyond_five(aten.cos.default)))
    function = debugged(lambda x: x.sin(), tmp_path)
    y = function(torch.full((4,), 6.0, requires_grad=True))
    found = verdicts(tmp_path)
    assert found["forward"] == "ok" and "pass joint.wrong" in str(found["backward"]), found
    assert graphs(tmp_path)["backward"].entry.runs == 0
    y.sum().backward()
    entry = graphs(tmp_path)["backward"].entry
    assert entry.compared_runs == 1 and entry.blame is not None and entry.blame.gradients == ["grad of x"]


@pytest.mark.parametrize("wrong_first", [False, True])
def test_gradients_of_two_forwards_at_once(wrong_first: bool, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The gradient of one is wrong; its backward runs after both forwards."""
    planted(Pass("joint.wrong", "a wrong pass", wrong_beyond_five(aten.cos.default)))
    function = debugged(lambda x: x.sin(), tmp_path)
    wrong, right = torch.full((4,), 6.0, requires_grad=True), torch.ones(6, requires_grad=True)
    both = (wrong, right) if wrong_first else (right, wrong)
    sum(function(x).sum() for x in both).backward()
    entry = graphs(tmp_path)["backward"].entry
    assert "pass joint.wrong" in str(entry.verdict) and entry.sizes == {"x": [4]} and entry.compared_runs == 2


def test_threads_have_findings_of_their_own(
    planted: Callable[[Pass], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both threads have compared their stages before one of them goes on."""
    planted(Pass("joint.wrong", "a wrong pass", wrong_beyond_five(aten.sin.default)))
    function = debugged(lambda x: x.sin() * 1, tmp_path)
    with torch.no_grad():
        function(torch.ones(3))
    assert verdicts(tmp_path) == {"inference": "ok"}
    check, barrier = CapturedGraph.check, threading.Barrier(2)

    def both_check(self: CapturedGraph, *args: Any) -> object:
        found = check(self, *args)
        barrier.wait(60)
        return found

    monkeypatch.setattr(CapturedGraph, "check", both_check)
    failures: list[BaseException] = []

    def call(x: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                function(x)
        except BaseException as error:
            failures.append(error)

    arguments = torch.full((4,), 6.0), torch.ones(6)
    threads = [threading.Thread(target=call, args=(x,)) for x in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = graphs(tmp_path)["inference"].entry
    assert not failures and entry.compared_runs == 3
    assert "pass joint.wrong" in str(entry.verdict) and entry.sizes == {"x": [4]}


@pytest.mark.parametrize(
    "method", [(CapturedGraph, "check"), (run_comparison, "hashes"), (run_comparison.Judge, "judge")]
)
def test_a_comparison_that_fails_once_is_made_by_the_next_call(
    method: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    works, tries = getattr(*method), 0

    def fails_once(*args: Any) -> object:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise MemoryError
        return works(*args)

    monkeypatch.setattr(*method, fails_once)
    function = debugged(lambda x: x.sin(), tmp_path)
    with torch.no_grad():
        for _ in range(3):
            function(torch.ones(4))
    entry = graphs(tmp_path)["inference"].entry
    assert entry.compared_runs == 1 and str(entry.verdict).startswith("not comparable")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    found = torch.library.Library("compared_calls", "FRAGMENT")
    yield found
    found._destroy()


@pytest.mark.parametrize("compare", ["first", "every"])
def test_a_compiled_function_within_a_call_of_another(
    compare: str, library: torch.library.Library, tmp_path: Path
) -> None:
    """Each is compared by itself, and what runs while values are judged is not."""
    inner = compiled(
        lambda x: x.tan() * 3, backend="onnx_debug", options={"dump_dir": str(tmp_path / "in"), "compare": compare}
    )
    library.define("inner(Tensor x) -> Tensor")
    library.impl("inner", lambda x: inner(x), "CPU")
    library.impl("inner", lambda x: torch.empty_like(x), "Meta")
    operator = torch.ops.compared_calls.inner
    function = debugged(lambda x: operator(x.sin()).cos(), tmp_path / "out", compare=compare)
    x = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(function(x), ((x.sin().tan() * 3).cos()), atol=1e-6)
    assert counted("internal_failures") == 0
    assert verdicts(tmp_path / "out") == {"inference": "ok"}
    assert graphs(tmp_path / "out")["inference"].entry.compared_runs == (2 if compare == "every" else 1)
    flush_manifests()
    found = [graph.entry for graph in find_run(tmp_path / "in").graphs]
    assert {entry.verdict for entry in found if entry.compared_runs} == {"ok"}  # others are in float64


def test_a_function_that_calls_itself(library: torch.library.Library, tmp_path: Path) -> None:
    """The call within has findings of its own."""

    def twice(x: torch.Tensor, again: bool) -> torch.Tensor:
        y = x.sin()
        return torch.ops.compared_calls.again(y) if again else y * 2

    function = debugged(twice, tmp_path, compare="every")
    library.define("again(Tensor x) -> Tensor")
    library.impl("again", lambda x: function(x, False), "CPU")
    library.impl("again", lambda x: torch.empty_like(x), "Meta")
    x = torch.linspace(-1, 1, 8)
    with torch.no_grad():
        function(x, False)
        for _ in range(2):
            assert torch.allclose(function(x, True), x.sin().sin() * 2)
    flush_manifests()
    found = [graph.entry for graph in find_run(tmp_path).graphs if graph.entry.compared_runs]
    assert [entry.verdict for entry in found] == ["ok", "ok"] and all(entry.compared_runs >= 2 for entry in found)


def test_what_shows_the_values_of_a_session_goes_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A weight changes, and another session takes the place of the first."""
    made: list[tuple[weakref.ref[object], weakref.ref[object]]] = []
    init = SessionValues.__init__

    def keeping(self: SessionValues, region: Any, bound: Any) -> None:
        init(self, region, bound)
        made.append((weakref.ref(self), weakref.ref(bound)))

    monkeypatch.setattr(SessionValues, "__init__", keeping)
    model = torch.nn.Linear(64, 64).eval()
    function = debugged(model, tmp_path, compare="every")
    with torch.no_grad():
        function(torch.randn(4, 64))
        model.weight.add_(0.01)
        function(torch.randn(4, 64))
        function(torch.randn(4, 64))
    gc.collect()
    assert len(made) == 2 and verdicts(tmp_path) == {"inference": "ok"}
    assert [(shown() is None, session() is None) for shown, session in made] == [(True, True), (False, False)]


def test_weights_that_show_values_are_those_of_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    optimized = session_values.optimized_model

    def kept(session: Session) -> tuple[Any, dict[str, torch.Tensor]]:
        model, constants = optimized(session)
        found.append((session.constants, constants))
        return model, constants

    monkeypatch.setattr(session_values, "optimized_model", kept)
    function = debugged(torch.nn.Linear(64, 64).eval(), tmp_path)
    with torch.no_grad():
        function(torch.randn(4, 64))
    assert verdicts(tmp_path) == {"inference": "ok"}
    ours, shown = found[-1]
    same = [name for name, value in shown.items() if value is ours.get(name)]
    assert same and all(torch.equal(shown[name], ours[name]) for name in same)


def test_nodes_of_operators_with_underscores_are_counted_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``aten.__lshift__`` and ``aten.__rshift__`` are wrong by themselves."""
    for operator in (aten.__lshift__.Tensor, aten.__rshift__.Tensor):
        monkeypatch.setitem(CONVERTERS, operator, lambda x, y: op.Sub(x, y))
    x, y = torch.arange(8, 16), torch.ones(8, dtype=torch.int64)
    function = debugged(lambda x, y: (x << y, x >> y), tmp_path)
    with torch.no_grad():
        function(x, y)
    entry = graphs(tmp_path)["inference"].entry
    assert entry.blame is not None and entry.blame.more == len(entry.wrong_nodes) - 1 == 1, entry.wrong_nodes


def naive_softmax(module: fx.GraphModule, context: PassContext) -> int:
    """A pass that computes a softmax without the largest element, so that it overflows."""
    nodes = module.graph.find_nodes(op="call_function", target=aten._softmax.default)
    for node in nodes:
        x, dim, _ = node.args
        with module.graph.inserting_before(node):
            powers = module.graph.call_function(aten.exp.default, (x,))
            total = module.graph.call_function(aten.sum.dim_IntList, (powers, [dim], True))
            shares = module.graph.call_function(aten.div.Tensor, (powers, total))
        powers.meta["val"] = shares.meta["val"] = node.meta["val"]
        total.meta["val"] = node.meta["val"].sum(dim, True)
        node.replace_all_uses_with(shares)
        module.graph.erase_node(node)
    return len(nodes)


def test_a_rewrite_that_overflows_where_eager_does_not(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """It is right in float64, and each of its nodes is right on the numbers that it got."""
    planted(Pass("post_grad.naive_softmax", "softmax without the largest element", naive_softmax))
    x = torch.linspace(-300, 300, 32).reshape(4, 8)
    with torch.no_grad():
        result = debugged(lambda x: x.softmax(-1), tmp_path)(x)
    assert result.isnan().any()
    verdict = verdicts(tmp_path)["inference"]
    assert verdict is not None and verdict.startswith("diverges at softmax")


def test_a_result_that_rounding_makes_nan(tmp_path: Path) -> None:
    """The root of a difference of nearly equal numbers: eager's is finite by chance."""
    x = torch.rand(64, 1).expand(64, 50).contiguous() + 100

    def deviation(x: torch.Tensor) -> torch.Tensor:
        return (x.square().mean(-1) - x.mean(-1).square()).sqrt()

    with torch.no_grad():
        debugged(deviation, tmp_path)(x)
    assert verdicts(tmp_path) == {"inference": "ok"}


def test_a_second_backward_of_one_graph(tmp_path: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    options = {"dump_dir": str(tmp_path)}
    result = compiled(layer, backend="onnx_debug", options=options)(torch.randn(6, 8, requires_grad=True))
    result.sum().backward(retain_graph=True)
    result.square().sum().backward()
    assert verdicts(tmp_path) == {"forward": "ok", "backward": "ok"}


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_of_functions(transform: Callable[..., Any], tmp_path: Path) -> None:
    """They disable hooks of saved tensors while they run."""
    function = transform(lambda x: (x.sin() * x.exp()).sum())
    with torch.no_grad():
        debugged(lambda x: function(x), tmp_path)(torch.randn(4))
    graph = graphs(tmp_path)["inference"]
    assert graph.verdict == "ok" and not graph.entry.unchecked
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.randn(3, requires_grad=True).exp()
