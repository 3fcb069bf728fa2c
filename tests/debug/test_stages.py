"""The comparison of the stages: both ends in float64, and the first pass, node or decomposition that differs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import compiled
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.common.random_state import RandomState
from dynamo_backends.debug import call_runs
from dynamo_backends.debug.call_runs import CallRuns, KnownProducts, interpreted
from dynamo_backends.debug.first_changed_node import first_changed_node
from dynamo_backends.debug.stage_graphs import StageGraphs, copy_of, place_of_result
from dynamo_backends.debug.wrong_step import changing_step, wrong_step
from dynamo_backends.dumps.blame import Cause, CauseKind
from passes import Pass, PassContext
from passes.engine.results import PassResult

aten = torch.ops.aten
X = torch.tensor([0.1, 0.5, 0.9])
Function = Callable[..., Any]


def traced(function: Function, *args: object) -> fx.GraphModule:
    return make_fx(function)(*(args or (X.clone(),)))


def node_of(module: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in module.graph.nodes if node.name == name)


def with_target(module: fx.GraphModule, name: str, target: Function) -> fx.GraphModule:
    """The same graph with another operator at one node."""
    result = copy_of(module)
    node_of(result, name).target = target
    return result


def replaced(module: fx.GraphModule, name: str, target: Function, *, line: str = "") -> fx.GraphModule:
    """The same graph with another node, ``new``, instead of one."""
    result = copy_of(module)
    old = node_of(result, name)
    with result.graph.inserting_before(old):
        new = result.graph.create_node("call_function", target, old.args, old.kwargs, name="new")
    new.stack_trace = line or None
    old.replace_all_uses_with(new)
    result.graph.erase_node(old)
    return result


# Two programs in float64


def differences(before: Function, after: Function, *args: torch.Tensor) -> set[object]:
    """The keys of what differs between two functions, run as graphs of Dynamo are."""
    runs = CallRuns(args)
    first, second = (fx.symbolic_trace(function) for function in (before, after))
    return set(runs.differing(interpreted(first), runs.run(interpreted(first)), runs.run(interpreted(second))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (lambda x: x.sin() * 2, lambda x: 2 * x.sin(), False),
        (lambda x: x.sin() * 2, lambda x: x.sin() * 2 * (1 + 1e-10), True),
        (lambda x: (x + 1e6) - 1e6, lambda x: x + (1e6 - 1e6), False),
        (lambda x: x.sum() - x.flip(0).sum(), lambda x: x.sum() * 0, False),
        (lambda x: x.half(), lambda x: x * 1, False),
        (lambda x: (x, 3), lambda x: (x, 4), True),
        (lambda x: (x, None), lambda x: (x, x), True),
        (lambda x: x.argmax(), lambda x: x.argmin(), True),
        (lambda x: x > 0.4, lambda x: x > 0.6, True),
        (lambda x: x / 3 * 3 > x, lambda x: x > x, False),
        (lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(1), True),
        (lambda x: torch.cat([x, x * 0 - 1e30]), lambda x: torch.cat([x * 1.000001, x * 0 - 1e30]), True),
        (lambda x: torch.empty_like(x), lambda x: torch.empty_like(x), False),
        (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5), False),
        (lambda x: x.mul_(2).sin(), lambda x: x.mul(2).sin(), True),
        (lambda x: torch.arange(3).to(x) * x, lambda x: torch.arange(3).float() * x, False),
    ],
)
def test_what_is_more_than_the_rounding_of_float64(
    before: Function, after: Function, differs: bool, dtype: torch.dtype
) -> None:
    x = torch.tensor([0.1, 0.5, 0.9], dtype=dtype)
    given = x.clone()
    assert bool(differences(before, after, given)) == differs
    assert torch.equal(given, x), "the arguments are copied"


def test_views_stay_views_and_leaves_stay_leaves() -> None:
    """Of arguments that share memory; a leaf may be changed in place where no gradients are recorded."""
    h = torch.randn(3, 8).requires_grad_() * 1
    shared = h, h[:, :4], h.detach()[0]

    def right(h: torch.Tensor, v: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        v.mul_(0.5)
        return v.sum() + (h * h).sum() + row.sum()

    def wrong(h: torch.Tensor, v: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        changed = v * 0.5
        return changed.sum() + (h * h).sum() + row.sum()

    assert differences(right, right, *shared) == set()
    assert differences(right, wrong, *shared) == {0, ("argument", 0), ("gradient", 0)}
    with torch.no_grad():
        assert differences(lambda x: x.mul_(2), lambda x: x.add_(x), X.clone().requires_grad_()) == set()


def test_gradients_are_compared_and_nothing_of_the_users_is_touched() -> None:
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    state, hooks = torch.get_rng_state(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: hooks.append(t) or t, lambda t: t):
        found = differences(lambda x, w: x.sin() * w, lambda x, w: x.sin() * (0.5 * w + 0.5 * w.detach()), x, w)
    assert found == {("gradient", 1)} and x.grad is None and w.grad is None and not hooks
    assert torch.equal(torch.get_rng_state(), state)
    z = torch.complex(x.detach(), x.detach()).requires_grad_()
    assert differences(lambda z: z * z, lambda z: z * z.detach(), z) == {("gradient", 0)}
    assert differences(lambda x: x * 1, lambda x: x.detach() * 1, x) == {("gradient", 0)}


# The first node


def first(before: fx.GraphModule, after: fx.GraphModule, *args: object, casts: bool = False) -> tuple[str, str] | None:
    """The name and the source line of the first changed node."""
    found = first_changed_node(before, after, args or (X.clone(),), RandomState.now(), casts=casts)
    assert found is None or found.difference.is_wrong
    return None if found is None else found.place[:2]


def test_a_node_is_compared_with_its_namesake_on_the_same_values() -> None:
    before = traced(lambda x: (x.exp() * 2).sin().neg())
    assert first(before, copy_of(before)) is None
    wrong = with_target(with_target(before, "exp", aten.cos.default), "sin", aten.cos.default)
    assert first(before, wrong) == ("exp", "")
    assert first(with_target(before, "exp", aten.cos.default), wrong) == ("sin", "")
    node_of(before, "sin").stack_trace = 'File "here.py", line 7, in f\n    x.sin()'
    assert first(before, with_target(before, "sin", aten.cos.default)) == ("sin", "here.py:7")


@pytest.mark.parametrize("function", [lambda x: x.sin() * 2, lambda x: (x.exp(), x.sin())])
def test_a_node_that_the_pass_made_is_named_and_its_predecessors_line(function: Function) -> None:
    before = traced(function)
    node_of(before, "sin").stack_trace = 'File "here.py", line 7, in f\n    x.sin()'
    assert first(before, replaced(before, "sin", aten.sin.default)) is None
    assert first(before, replaced(before, "sin", aten.cos.default)) == ("new", "here.py:7")
    line = 'File "there.py", line 8, in f\n    x.cos()'
    assert first(before, replaced(before, "sin", aten.cos.default, line=line)) == ("new", "there.py:8")


def test_constants_and_decisions() -> None:
    before = traced(lambda x: x * torch.tensor([1.0, 2.0, 3.0]))
    assert first(before, copy_of(before)) is None
    assert first(before, traced(lambda x: x * torch.tensor([1.0, 2.0, 4.0]))) == ("_tensor_constant0", "")
    before = traced(lambda x: torch.where(x > 0.5, x * 2, x.neg()))
    assert first(before, with_target(before, "gt", aten.lt.Scalar)) == ("gt", "")
    mask = traced(lambda x: x.expand(3, 3).tril())
    moved = copy_of(mask)
    node_of(moved, "tril").args = (*node_of(moved, "tril").args, 1)
    assert first(mask, moved) == ("tril", ""), "three of nine elements"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_pass_may_round_a_constant(dtype: torch.dtype) -> None:
    """To the model's dtype; an error of a percent is more."""
    x = torch.linspace(-1, 1, 50).to(dtype)
    before = traced(lambda x: (x * 1.5).sin(), x)
    for factor, is_right in ((1.5 * (1 + torch.finfo(dtype).eps / 4), True), (1.515, False)):
        after = copy_of(before)
        node_of(after, "mul").args = (node_of(after, "mul").args[0], factor)
        assert first(before, after, x) == (None if is_right else ("mul", ""))


def test_a_pass_may_come_nearer_to_float64() -> None:
    x = torch.tensor([1e-9, 2e-9])
    before = traced(lambda x: (x + 1).log(), x)
    after = with_target(before, "log", aten.log1p.default)
    node_of(after, "log").args = tuple(after.graph.find_nodes(op="placeholder"))
    assert first(before, after, x) is None and first(before, after, x, casts=True) is None
    assert first(after, before, x, casts=True) == ("log", "")


def test_random_numbers_and_uninitialized_memory() -> None:
    before = traced(lambda x: aten.bernoulli.p(x, 0.5) * x + torch.rand_like(x))
    assert first(before, copy_of(before)) is None
    assert first(before, with_target(before, "mul", aten.add.Tensor)) == ("mul", "")
    before = traced(lambda x: torch.ones_like(x).fill_(3.0) * x)
    assert first(before, with_target(before, "ones_like", aten.empty_like.default)) is None
    assert first(before, with_target(before, "ones_like", aten.zeros_like.default)) == ("ones_like", "")


# The first pass


def stage(*graphs: tuple[str, fx.GraphModule]) -> StageGraphs:
    (name, before), *others = graphs
    result = StageGraphs()
    result.start(name, before)
    for name, graph in others:
        result.fired(PassResult(name, 1, 3, 3, 0.0, undone="yes" if name == "undone" else ""), graph)
    result.end("post_grad", others[-1][1] if others else before)
    return result


def culprit(graphs: StageGraphs, *args: torch.Tensor) -> tuple[str, Cause] | None:
    found = wrong_step(RandomState.now(), graphs, args or (X.clone(),))
    return None if found is None else (found.value, found.cause)


def test_the_first_wrong_pass_of_a_stage() -> None:
    right = traced(lambda x: (x.sin() * 2, x.exp()))
    wrong = with_target(right, "sin", aten.cos.default)
    more = with_target(wrong, "exp", aten.neg.default)
    graphs = stage(("post_grad", right), ("undone", more), ("right", copy_of(right)), ("bad", wrong), ("later", more))
    assert culprit(graphs) == ("sin", Cause(CauseKind.PASS, "bad"))
    assert culprit(stage(("post_grad", right), ("right", copy_of(right)))) is None
    assert culprit(stage(("post_grad", right))) is None
    graphs = stage(("post_grad", right))
    graphs.end("post_grad", wrong)  # changed by nobody who says so
    assert culprit(graphs) == ("sin", Cause(CauseKind.STAGE, "post_grad"))


def test_a_pass_that_writes_into_an_argument() -> None:
    right = traced(lambda x: (x.sin(), x.cos()))
    for target in (aten.sin_.default, aten.sin.default):
        found = culprit(stage(("post_grad", right), ("bad", with_target(right, "sin", target))))
        assert found == (None if target is aten.sin.default else ("sin", Cause(CauseKind.PASS, "bad")))
    given = X.clone()
    culprit(stage(("post_grad", right), ("bad", with_target(right, "sin", aten.sin_.default))), given)
    assert torch.equal(given, X)
    graphs = traced(lambda x: (x.sin(), x.copy_(x + 1))[:1]), traced(lambda x: (x.sin(), x.copy_(x + 2))[:1])
    assert culprit(stage(("post_grad", graphs[0]), ("bad", graphs[1]))) == ("add", Cause(CauseKind.PASS, "bad"))


def test_graphs_of_a_stage_are_copies() -> None:
    """Passes go on with the graph, the subgraphs of operators of higher order too."""
    module = traced(lambda x: x.sin())
    graphs = stage(("post_grad", module))
    node_of(module, "sin").target = aten.cos.default
    assert node_of(graphs.first, "sin").target is aten.sin.default
    module.inner = traced(lambda x: x.sin())
    with module.graph.inserting_before(node_of(module, "sin")):
        module.graph.get_attr("inner")
    copied = copy_of(module)
    node_of(module.inner, "sin").target = aten.cos.default
    assert node_of(copied.inner, "sin").target is aten.sin.default  # type: ignore[arg-type]


def test_places_of_results() -> None:
    module = traced(lambda x, y: (x.sin(), y, None), X, X)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    found = [place_of_result(module, key).name for key in (0, 2, ("argument", 1), ("gradient", 0))]
    assert found == ["sin", "result 2", f"the input {names[1]}", f"grad of {names[0]}"]


# Whole calls


def graphs_of(dump: Path) -> dict[str, Any]:
    graphs = json.loads((dump / "latest" / "manifest.json").read_text())["graphs"]
    return {f"{graph['index']}/{graph['direction']}": graph for graph in graphs}


def debugged(function: Function, dump: Path, **settings: Any) -> Function:
    return compiled(function, backend="onnx_debug", options={"dump_dir": str(dump)}, **settings)


def test_a_view_that_is_changed_after_a_graph_break_is_right(tmp_path: Path) -> None:
    linear = nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = linear(x)
        v = h[:, :4]
        torch._dynamo.graph_break()
        v.mul_(0.5)
        return v.sum() + (h * h).sum()

    debugged(function, tmp_path)(torch.randn(4, 8)).backward()
    found = {name: (graph["verdict"], graph["unchecked"]) for name, graph in graphs_of(tmp_path).items()}
    assert len(found) == 4 and all(item == ("ok", []) for item in found.values()), found


def test_what_was_never_written_is_no_stages_fault(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y[0] = x[0]
        return y

    with torch.no_grad():
        debugged(function, tmp_path)(torch.randn(3, 4))
    (graph,) = graphs_of(tmp_path).values()
    assert graph["blame"] is None or graph["blame"]["stage"] not in ("pre_grad", "joint", "aten", "post_grad"), graph


def test_a_pass_that_overwrites_the_users_input(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    def in_place(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        node.target = aten.sin_.default
        return 1

    planted(Pass("post_grad.wrong", "Planted by a test.", in_place))
    with torch.no_grad():
        debugged(lambda x: x.sin(), tmp_path)(torch.randn(4))
    (graph,) = graphs_of(tmp_path).values()
    assert graph["verdict"].startswith("diverges at sin") and "pass post_grad.wrong" in graph["verdict"]


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_function_in_lower_precision_beside_half_precision(
    stage: str, planted: Callable[[Pass], None], tmp_path: Path
) -> None:
    """In a graph that has bfloat16 elsewhere."""

    def lower(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
        with module.graph.inserting_before(node):
            low = module.graph.call_function(aten._to_copy.default, node.args, {"dtype": torch.bfloat16})
            root = module.graph.call_function(aten.rsqrt.default, (low,))
            raised = module.graph.call_function(aten._to_copy.default, (root,), {"dtype": torch.float32})
        for new, dtype in ((low, torch.bfloat16), (root, torch.bfloat16), (raised, torch.float32)):
            new.meta["val"] = node.meta["val"].to(dtype)
        node.replace_all_uses_with(raised)
        module.graph.erase_node(node)
        return 1

    planted(Pass(f"{stage}.wrong", "Planted by a test.", lower))
    half = torch.randn(4, 8).bfloat16()
    with torch.no_grad():
        debugged(lambda x, y: (y * 2).sin() + (x.square() + 1).rsqrt(), tmp_path)(torch.randn(4, 8), half)
    (graph,) = graphs_of(tmp_path).values()
    assert f"pass {stage}.wrong" in graph["verdict"], graph


@pytest.mark.parametrize("dynamo", [True, False])
def test_gradients_whose_arguments_have_no_key(dynamo: bool, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """AOTAutograd replaces arguments that share memory by one: it describes their gradients otherwise."""

    def scale(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is aten.cos.default]
        for node in nodes:  # the derivative of the sine
            with module.graph.inserting_after(node):
                scaled = module.graph.call_function(aten.mul.Tensor, (node, 1.01))
            scaled.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(scaled, lambda user, new=scaled: user is not new)
        return len(nodes)

    planted(Pass("joint.wrong", "Planted by a test.", scale))
    h = torch.randn(4, 8).requires_grad_() * 1

    def function(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        v.mul_(0.5)
        return h.sin() + v.sum()

    if dynamo:
        debugged(function, tmp_path)(h, h[:, :4]).sum().backward()
    else:
        compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path))
        backend = aot_autograd(
            fw_compiler=compiler, partition_fn=compiler.partition_fn, decompositions=decomposition_table()
        )
        torch.compile(function, backend=backend)(h, h[:, :4]).sum().backward()
    verdicts = [graph["verdict"] for graph in graphs_of(tmp_path).values()]
    assert any("pass joint.wrong" in verdict for verdict in verdicts), graphs_of(tmp_path)


def test_the_users_backward_is_undisturbed(tmp_path: Path) -> None:
    """It runs later, twice, and in another thread."""
    linear, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    model = nn.Sequential(linear, norm, nn.Dropout(0.5), nn.Tanh())
    x = torch.randn(4, 8)

    def train(function: Function) -> list[torch.Tensor]:
        torch.manual_seed(0)
        norm.reset_running_stats()
        model.zero_grad()
        losses = [function(x).square().sum() for _ in range(2)]
        thread = threading.Thread(target=losses[1].backward)
        thread.start()
        thread.join()
        losses[0].backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        return [*gradients, norm.running_mean.clone(), torch.rand(1)]  # type: ignore[union-attr]

    expected, actual = train(model), train(debugged(model, tmp_path))
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    assert {(graph["verdict"], *graph["unchecked"]) for graph in graphs_of(tmp_path).values()} == {("ok",)}


def test_a_collective_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    @torch.library.custom_op("planted::all_reduce", mutates_args=())
    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 2

    all_reduce.register_fake(torch.empty_like)
    monkeypatch.setattr("dynamo_backends.numerics.function_runs.is_collective", lambda func: "all_reduce" in str(func))
    with torch.no_grad():
        debugged(lambda x: all_reduce(x).sin(), tmp_path)(torch.randn(4))
    (graph,) = graphs_of(tmp_path).values()
    assert any("all_reduce" in said for said in graph["unchecked"]), graph["unchecked"]
    assert len([value for value in calls if value.dtype is torch.float64]) <= 1  # type: ignore[attr-defined]


def test_a_pass_that_adds_a_cast_and_is_right() -> None:
    """A cast of what was in half precision already changes nothing."""
    x = X.half()
    before = traced(lambda x: x.float() * 2, x)
    after = traced(lambda x: x.float().half().float() * 2, x)
    assert changing_step(RandomState.now(), stage(("post_grad", before), ("right", after)), [x], casts=True) is None


def test_a_pass_that_computes_a_float64_function_in_float32(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """A cast to a lower precision than the model's, which is not half."""

    def lower(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        source, wide = node.all_input_nodes[0].meta["val"], node.meta["val"]
        with module.graph.inserting_before(node):
            low = module.graph.call_function(aten._to_copy.default, node.args, {"dtype": torch.float32})
        with module.graph.inserting_after(node):
            raised = module.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float64})
        node.replace_all_uses_with(raised, lambda user: user is not raised)
        node.args = (low,)
        low.meta["val"], node.meta["val"], raised.meta["val"] = source.float(), wide.float(), wide
        return 1

    planted(Pass("post_grad.wrong", "Planted by a test.", lower))
    with torch.no_grad():
        debugged(lambda x: x.sin() * 2, tmp_path)(torch.randn(8, dtype=torch.float64))
    (graph,) = graphs_of(tmp_path).values()
    assert "pass post_grad.wrong" in graph["verdict"], graph["verdict"]


def test_a_constant_that_is_written_in_inference_mode(tmp_path: Path) -> None:
    """Its tensors count no versions."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, shifted = torch.zeros(4), torch.zeros(4)
        sums.add_(x)
        before = shifted + x
        shifted.add_(1)
        return sums * 2, before + shifted * x

    with torch.inference_mode():
        debugged(function, tmp_path)(torch.ones(4))
    (graph,) = graphs_of(tmp_path).values()
    assert (graph["verdict"], graph["unchecked"]) == ("ok", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_functions_with_limits_of_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Which float64 has others of."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        infinite = x / 0
        limited = torch.nan_to_num(infinite), infinite.nan_to_num(0.0, 5.0), infinite.nan_to_num(neginf=-5.0)
        return (*limited, F.rms_norm(x, (8,)))

    with torch.no_grad():
        debugged(function, tmp_path)(torch.randn(4, 8, dtype=dtype) * 1e-3)
    (graph,) = graphs_of(tmp_path).values()
    assert (graph["verdict"], graph["unchecked"]) == ("ok", [])


def test_the_memory_of_arguments_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    digest = call_runs.xxh3_64_intdigest
    monkeypatch.setattr(call_runs, "xxh3_64_intdigest", lambda data: read.append(data.nbytes) or digest(data))
    memory = torch.randn(64)
    views = memory.split(8)
    before = call_runs.hashes([*views, 3])
    assert read == [memory.nbytes] and len({*before[:-1]}) == 1
    views[3].mul_(2)
    assert before != call_runs.hashes([*views, 3])


@pytest.mark.parametrize("kind", ["subclass", "coo", "csr", "parameter"])
def test_whether_arguments_of_any_kind_are_changed(kind: str) -> None:
    memory = torch.eye(3)
    make: dict[str, Callable[[], torch.Tensor]] = {
        "subclass": lambda: TwoTensor(torch.ones(3, 3), memory),
        "coo": memory.to_sparse,
        "csr": memory.to_sparse_csr,
        "parameter": lambda: nn.Parameter(memory),
    }
    value = make[kind]()
    before = call_runs.hashes([value])
    assert None not in before and before == call_runs.hashes([value])
    with torch.no_grad():
        (value.b if isinstance(value, TwoTensor) else value).mul_(2)
    assert before != call_runs.hashes([value])
    assert call_runs.hashes([torch.ones(3, device="meta")]) == [None]


def scaled(target: Any, factor: float) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that multiplies the results of an operator."""

    def change(module: fx.GraphModule, context: PassContext) -> int:
        nodes = module.graph.find_nodes(op="call_function", target=target)
        for node in nodes:
            with module.graph.inserting_after(node):
                new = module.graph.call_function(aten.mul.Tensor, (node, factor))
            node.replace_all_uses_with(new, lambda user, new=new: user is not new)
        return len(nodes)

    return change


def test_training_with_dynamic_sizes(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """Their backward is compiled before it first runs, so as to run once."""
    planted(Pass("joint.wrong", "Planted by a test.", scaled(aten.relu.default, 1.01)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    debugged(model, tmp_path, dynamic=True)(torch.randn(4, 8)).square().mean().backward()
    for graph in graphs_of(tmp_path).values():
        assert "pass joint.wrong" in graph["verdict"] and not graph["unchecked"]


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_nan_in_a_perturbed_run_excuses_nothing(stage: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The variance of equal numbers is zero, and a little below with other rounding."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", scaled(aten.sin.default, 2.0)))

    def function(x: torch.Tensor) -> torch.Tensor:
        deviation = (x.pow(2).mean(-1) - x.mean(-1) ** 2).sqrt()
        return (x.sin().sum(-1) * (deviation + 1)).sum()

    x = torch.rand(6, 16)
    x[4:] = 0.5
    with torch.no_grad():
        debugged(function, tmp_path)(x)
    (graph,) = graphs_of(tmp_path).values()
    assert f"pass {stage}.wrong" in graph["verdict"]


def test_a_pass_that_drops_the_last_operator(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    def drop(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
        return 1

    planted(Pass("post_grad.wrong", "Planted by a test.", drop))
    with torch.no_grad():
        debugged(lambda x: (x @ x).sin() + x * 0.03, tmp_path)(torch.randn(64, 64).bfloat16())
    (graph,) = graphs_of(tmp_path).values()
    assert "pass post_grad.wrong" in graph["verdict"]


def test_what_a_pass_added_before_a_node_of_the_same_name() -> None:
    """Only what took the place of another node is compared with that."""
    before = traced(lambda x: (x * 2).tanh())
    after = copy_of(before)
    tanh = node_of(after, "tanh")
    with after.graph.inserting_before(tanh):
        added = after.graph.call_function(aten.tanh.default, tanh.args)
    tanh.target, tanh.args = aten.mul.Tensor, (added, 1.01)
    assert first(before, after) == ("tanh", "")


def test_a_known_product_is_not_computed_again() -> None:
    products, calls = KnownProducts(), []
    left, right = torch.randn(3, 4), torch.randn(5, 4)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        def compute() -> torch.Tensor:
            calls.append(1)
            return left @ right

        return products.result(aten.mm.default, (left, right), {}, compute)

    first = product(left, right.t())
    again = product(left.clone(), right.clone().t())
    assert len(calls) == 1 and torch.equal(first, again)
    assert first.untyped_storage().data_ptr() != again.untyped_storage().data_ptr()
    product(left, right.t())  # each is used once
    product(left, right.t().contiguous())  # a kernel may add in another order
    product(left + 1e-6, right.t())
    assert len(calls) == 4


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_a_known_product_that_was_overwritten(in_inference_mode: bool) -> None:
    weight = torch.randn(4, 4)

    def in_place(x: torch.Tensor) -> Any:
        return aten.relu_.default(aten.mm.default(x, weight))

    def functional(x: torch.Tensor) -> Any:
        return aten.relu.default(aten.mm.default(x, weight))

    first, other = (traced(function, torch.randn(4, 4)) for function in (in_place, functional))
    with torch.inference_mode(in_inference_mode):
        runs, products = CallRuns([torch.randn(4, 4)]), KnownProducts()
        expected = runs.run(interpreted(first), products=products)
        actual = runs.run(interpreted(other), products=products)
        assert not runs.differing(interpreted(first), expected, actual)
