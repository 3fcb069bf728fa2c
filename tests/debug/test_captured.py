"""The comparison with the captured graph: results, arguments that a call changes, and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.debug.captured_graph import CapturedGraph, ComparedCall, JointGraphs
from dynamo_backends.debug.rows import Finding
from dynamo_backends.dumps.blame import Cause, CauseKind
from dynamo_backends.numerics.reference_runs import Results
from passes.engine.results import PassResult

aten = torch.ops.aten
X = torch.tensor([0.1, 0.5, 0.9])
Y = X + 1


def captured(*graphs: fx.GraphModule) -> CapturedGraph:
    """A captured graph, and the graph after each pass."""
    result = CapturedGraph(opset=18)
    result.pre_grad.start("pre_grad", graphs[0])
    for i, graph in enumerate(graphs[1:]):
        result.pre_grad.fired(PassResult(f"pre_grad.pass_{i}", 1, 1, 1, 0.0), graph)
    result.pre_grad.end("pre_grad", graphs[-1])
    return result


def symbolic(function: Callable[..., object]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def compared(
    whole: CapturedGraph, function: Callable[..., object], args: Sequence[object]
) -> tuple[object, ComparedCall]:
    """The results of a compared call of the compiled ``function``, and the call."""
    call = whole.begin_call(args)
    assert call is not None
    return whole.run_in_call(function, args, call), call


def call_of(function: Callable[..., object], *args: object) -> ComparedCall:
    return compared(captured(symbolic(function)), lambda *args: None, args)[1]


def wrong(function: Callable[..., object], args: Sequence[object], *results: object) -> list[str]:
    """The complaints about given results of a function that does not change its arguments."""
    finding = call_of(function, *args).judge_forward(results, args)
    assert (finding.culprit, finding.because, finding.unchecked) == (None, "", [])
    assert all(item.cause == Cause(CauseKind.RESULT) and item.source == "" for item in finding.wrong)
    return [f"{item.value}: {item.difference}" for item in finding.wrong]


def differing(function: Callable[..., object], args: Sequence[object], result: torch.Tensor) -> int:
    """How many elements of a comparison's result are said to differ."""
    counts = [re.match(rf"gt: (\d+) of {result.numel()} ", text) for text in wrong(function, args, result)]
    return sum(int(count[1]) for count in counts if count is not None)


@pytest.mark.parametrize(
    ("result", "datum"),
    [
        (X.sin(), ""),
        (X.sin() * (1 + 4e-7), ""),
        (X.sin() * (1 + 1e-4), r" \d\.\d+e-0\d at element \[\d\], tolerance"),
        (X.sin().double(), "torch.float64 .*torch.float32"),
        (X.sin().double() * 2, "torch.float64 .*torch.float32"),
        (X.sin().view(3, 1), r"\(3, 1\) .*\(3,\)"),
        (X.sin()[:1], r"\(1,\) .*\(3,\)"),
        (None, r"None .*\(3,\)"),
    ],
)
def test_what_is_said_of_a_result(result: object, datum: str) -> None:
    found = wrong(lambda x: (x.exp(), x.sin()), [X], X.exp(), result)
    assert len(found) == bool(datum) and all(re.search(f"^sin: .*{datum}", text) for text in found)


def test_what_is_said_of_results_that_are_decisions() -> None:
    """They may turn where float64 with rounding at random turns them: ten times as many as there."""
    x = torch.linspace(-1, 1, 200)
    turned = [(x > 0) ^ (torch.arange(200) < count) for count in (1, 2, 100)]
    for args in ([x], [x.to(torch.bfloat16)]):
        assert [differing(lambda x: (x > 0,), args, value) for value in turned] == [1, 2, 100]
    assert differing(lambda x, n: (x > n,), [x, 0], turned[1]) == 2
    assert re.search("^gt: .*torch.float32 .*torch.bool", wrong(lambda x: (x > 0,), [X], X)[0])
    assert differing(lambda x: (x > 0,), [X[:1]], X[:1] < 0) == 1
    ties = torch.tensor([1.0, 1.0 + 2**-23]) / 3  # sums that are equal in float32 alone
    assert wrong(lambda x: (x + 1e3 > 1e3 + x.flip(0),), [ties], torch.tensor([True, True])) == []
    near = torch.where(torch.arange(200) < 4, 1 / 3, x)
    assert wrong(lambda x: (x > 1 / 3,), [near], (near > 1 / 3) ^ (torch.arange(200) < 4)) == []
    assert differing(lambda x: (x > 1 / 3,), [near], (near > 1 / 3) ^ (torch.arange(200) < 100)) == 100


def test_an_input_that_the_graph_changes_is_a_result() -> None:
    args = [X.clone()]
    call = call_of(lambda x: x.add_(1) * 2, *args)
    (said,) = call.judge_forward([(X + 1) * 2], args).wrong
    assert said.value == "the input x" and said.difference.ours is not None and said.difference.ours.max_abs == 1.0
    assert call.judge_forward([(X + 1) * 2], [X + 1]) == Finding()


def test_a_wrong_pass_of_the_captured_graph() -> None:
    before, after = symbolic(lambda x: torch.sin(x) * 2), symbolic(lambda x: torch.cos(x) * 2)
    right = symbolic(lambda x: 2 * torch.sin(x))
    _, call = compared(captured(before, right, after), lambda *args: None, [X])
    culprit = call.judge_forward([X.sin() * 2], [X]).culprit
    assert culprit is not None and str(culprit.cause) == "pass pre_grad.pass_1"
    whole = captured(before, right)
    _, call = compared(whole, lambda *args: None, [X])
    assert call.judge_forward([X.sin() * 2], [X]) == Finding()
    whole.pre_grad.end("pre_grad", after)  # changed by nobody who says so
    culprit = call.judge_forward([X.sin() * 2], [X]).culprit
    assert culprit is not None and str(culprit.cause) == "stage pre_grad"


def gradients(call: ComparedCall, results: Sequence[object], found: dict[int, object]) -> Finding:
    call.judge_forward(results, [])
    return call.judge_backward({0: torch.ones(3)}, found)


def test_gradients() -> None:
    """Of the arguments that have one; what explains them is the fault of the forward."""
    x, y = X.clone().requires_grad_(), X.clone()
    call = call_of(lambda x, y: (x.sin() * y,), x, y)
    assert gradients(call, [X.sin() * X], {0: X.cos() * X}) == Finding()
    call.fault = "diverges"
    found = gradients(call, [X.sin() * X], {0: X.cos()})
    assert found.because == "its forward diverges"
    (said,) = found.wrong
    assert said.value == "grad of x" and said.difference.ours is not None
    (said,) = gradients(call, [X.sin() * X], {0: None}).wrong
    assert said.value == "grad of x" and said.difference


def test_gradients_of_complex_numbers() -> None:
    x = torch.complex(X, Y).requires_grad_()
    call, tangent = call_of(lambda x: (x * x,), x), torch.complex(Y, X)
    call.judge_forward([x.detach() ** 2], [x])
    right = tangent * (2 * x.detach()).conj()
    assert call.judge_backward({0: tangent}, {0: right}) == Finding()
    call.judge_forward([x.detach() ** 2], [x])
    assert len(call.judge_backward({0: tangent}, {0: right * 1.01}).wrong) == 1


def test_an_argument_that_is_no_leaf_may_be_changed_in_place() -> None:
    x = X.clone().requires_grad_() * 1
    call = call_of(lambda x, n: (x.mul_(2).sin() * n,), x, 3)
    changed = [X * 2, 3]
    assert call.judge_forward([(X * 2).sin() * 3], changed) == Finding()
    assert call.judge_backward({0: torch.ones(3)}, {0: (X * 2).cos() * 6}) == Finding()


def test_a_leaf_may_be_changed_in_place_where_no_gradients_are_recorded() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        call = call_of(lambda x: (x.mul_(2).sin(),), x)
    assert call.judge_forward([(X * 2).sin()], [X * 2]) == Finding()


def test_a_call_without_arguments_in_autocast() -> None:
    """It is run again in the autocast it was called in."""
    graph = fx.Graph()
    ones = graph.call_function(torch.ones, ((2, 2),))
    graph.output((graph.call_function(torch.mm, (ones, ones)),))
    whole = captured(fx.GraphModule({}, graph))
    half, full = torch.full((2, 2), 2.0, dtype=torch.bfloat16), torch.full((2, 2), 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        _, call = compared(whole, lambda: None, [])
    assert call.judge_forward([half], []) == Finding()
    (said,) = call.judge_forward([full], []).wrong
    assert said.value == "mm" and "torch.bfloat16" in str(said.difference)
    _, call = compared(whole, lambda: None, [])
    with torch.autocast("cpu", torch.bfloat16):
        assert call.judge_forward([full], []) == Finding()


def test_a_wrong_pass_of_the_captured_graph_that_gradients_show() -> None:
    before = symbolic(lambda x: (torch.sin(x),))
    after = symbolic(lambda x: (torch.sin(x) + (torch.cos(x) - torch.cos(x).detach()),))
    x = X.clone().requires_grad_()
    _, call = compared(captured(before, after), lambda *args: None, [x])
    assert call.judge_forward([X.sin()], [x]) == Finding()
    culprit = call.judge_backward({0: torch.ones(3)}, {0: X.cos()}).culprit
    assert culprit is not None and (culprit.value, culprit.cause.name) == ("grad of x", "pre_grad.pass_0")


def test_what_was_traced() -> None:
    """Dynamo's graph beside the first joint graph: a decomposition that is wrong, or the trace."""
    call = call_of(lambda x: (x.sin(), x.exp()), X)
    exact = {0: X.double().sin(), 1: X.double().exp(), 7: X.double()}
    call.traced = Results({0: X.sin(), 1: X.exp(), 7: X}, exact)
    assert call.judge_forward([X.sin(), X.exp()], [X]) == Finding()
    call.traced = Results({0: X.sin()}, {0: exact[0]})
    assert call.judge_forward([X.sin(), X.exp()], [X]) == Finding()
    call.traced = Results({0: X.sin(), 1: X.exp() * 2}, {**exact, 1: exact[1] * 2})
    culprit = call.judge_forward([X.sin(), X.exp()], [X]).culprit
    assert culprit is not None
    assert (culprit.value, culprit.source, culprit.cause) == ("exp", "", Cause(CauseKind.TRACE))
    assert culprit.difference.ours is not None and culprit.difference.ours.max_abs == pytest.approx(2.46, rel=1e-2)


def test_a_wrong_decomposition_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph that changes an argument in place, and has a result without a gradient."""

    def wrong_silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(x)
        return grad * sigmoid * (1 + x * (1 - sigmoid)) * 1.01

    monkeypatch.setattr(CapturedGraph, "decompositions", lambda self: {aten.silu_backward.default: wrong_silu_backward})
    given = X.clone().requires_grad_()
    right = torch.autograd.grad(torch.nn.functional.silu(given * 2).sum() * 3, given)[0]
    exact = {("gradient", 0): right.double()}
    tangents: dict[object, torch.Tensor] = {0: torch.full((3,), 3.0), ("input", 0): torch.zeros(3)}
    call = call_of(lambda x, n: (torch.nn.functional.silu(x.mul_(2)), n), given * 1, 3)
    assert call.judge_forward([torch.nn.functional.silu(X * 2), 3], [X * 2, 3]) == Finding()
    call.traced = Results({("gradient", 0): right * 1.01}, {("gradient", 0): exact["gradient", 0] * 1.01})
    culprit = call.judge_backward(tangents, {0: right}).culprit
    assert culprit is not None and str(culprit.cause) == "decomposition of aten.silu_backward.default"


# Which backward belongs to which call


def test_a_backward_is_known_by_what_it_is_handed() -> None:
    whole = captured(symbolic(lambda x: (x.sin(),)))
    calls = []
    tensors = [X.clone() for _ in range(6)]
    results = [X.clone().requires_grad_().sin() for _ in tensors]
    for i, tensor in enumerate(tensors):
        call = compared(whole, lambda *args: None, [X])[1]
        call.save({"x": tensor, "size": i, "state_of_the_forward": i, "sparse": tensor.to_sparse()})
        whole.keep_for_backward(call, [results[i].grad_fn])
        calls.append(call)
    assert whole.find_call({"x": tensors[0], "size": 0}) is None  # four are kept
    assert whole.find_call({"x": tensors[3], "size": 4}) is None
    assert whole.find_call({"x": tensors[3].clone(), "size": 3}) is None
    assert whole.find_call({"x": tensors[3][:1], "size": 3}) is None
    assert whole.find_call({"x": 3, "size": 3}) is None
    assert whole.find_call({"unknown": 3}) is None
    assert whole.find_call({"x": tensors[3], "size": 3, "state": None}) is calls[3]
    assert whole.find_call({"x": tensors[3], "size": 3}) is None
    tensors[4].add_(1)
    assert whole.find_call({"x": tensors[4], "size": 4}) is None
    assert whole.find_call({}) is calls[2]
    results[5] = results[5] * 2  # by which the backward can still come
    whole.keep_for_backward(calls[3], [])
    assert whole.find_call({"size": 3}) is None, "no result has a gradient"
    whole.keep_for_backward(calls[3], [results[3].grad_fn])
    del results[3:5]
    assert whole.find_call({"size": 3}) is None, "its backward cannot come"
    whole.joint.start("joint", described(lambda x, tangent: (x.sin(), tangent * x.cos())))
    whole.drop()
    assert whole.find_call({"x": tensors[5], "size": 5}) is None
    assert (whole.pre_grad.steps, whole.pre_grad.attributes, whole.joint.steps) == ([], [], [])


def test_a_call_is_there_while_it_runs() -> None:
    whole = captured(symbolic(lambda x: (x.sin(),)))
    seen: list[object] = []
    result, call = compared(whole, lambda x: seen.append(whole.current_call), [X])
    assert (result, seen, whole.current_call) == (None, [call], None)
    with pytest.raises(ZeroDivisionError):
        compared(whole, lambda x: 1 / 0, [X])
    assert whole.current_call is None


def test_attributes_are_arguments_of_the_captured_graph() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = x * 0 + self.seen
            return self.seen.add_(x) * 3 + before

    module = Counts()
    whole = captured(symbolic(module))
    assert [value is module.seen for value in whole.pre_grad.attributes] == [True]
    _, call = compared(whole, module, [X])
    assert torch.equal(call.arguments[0], torch.zeros(3)) and torch.equal(call.arguments[1], X)  # type: ignore[arg-type]
    assert call.judge_forward([X * 3], [X]) == Finding()
    assert torch.equal(module.seen, X), "the comparison has not changed it once more"
    module.seen.zero_()
    (said,) = call.judge_forward([X * 3], [X]).wrong
    assert said.value == "the input seen" and said.difference.ours is not None
    whole.drop()
    assert whole.pre_grad.attributes == []


# The stage joint by itself


def described(function: Callable[..., object]) -> fx.GraphModule:
    """A joint graph of one argument and one result with AOTAutograd's descriptions; further results have none."""
    module = make_fx(function)(X.clone(), Y.clone())  # the trace runs it, and it may write
    descriptors = (PlainAOTInput(0), TangentAOTInput(PlainAOTOutput(0)))
    for node, descriptor in zip(module.graph.find_nodes(op="placeholder"), descriptors, strict=True):
        node.meta["desc"] = descriptor
    module.graph.output_node().meta["desc"] = [PlainAOTOutput(0), GradAOTOutput(PlainAOTInput(0))]
    return module


def joint(
    before: Callable[..., object], after: Callable[..., object] | None = None, end: Callable[..., object] | None = None
) -> JointGraphs:
    """The graphs of the stage, with the pass that made ``after``; the stage may end with another graph."""
    graphs = JointGraphs()
    if after is not None:
        graphs.start("joint", described(before))
        graphs.fired(PassResult("joint.planted", 1, 1, 1, 0.0), described(after))
    graphs.end("joint", described(end or after or before))
    return graphs


OTHER = Results({}, {0: X.double()})
"""Results of a later graph that are not those of the stage."""


def test_results_and_gradients_of_the_stage_joint() -> None:
    def before(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), tangent * x.cos(), tangent * 2

    def after(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), tangent * x.sin(), tangent * 2

    state = torch.get_rng_state()
    graphs = joint(before, after)
    name = graphs.first.graph.find_nodes(op="placeholder")[1].name
    assert graphs.judge({}, [X], state, gradients=False) == (Finding(), None)  # float64 alone is enough
    finding, results = graphs.judge({}, [X], state, gradients=False, final=OTHER)
    assert finding == Finding() and results is not None
    assert list(results.eager) == list(results.exact) == [0] and torch.equal(results.eager[0], X.sin())  # type: ignore[arg-type]
    finding, results = graphs.judge({name: X}, [X], state, gradients=True)
    assert finding.culprit is not None and str(finding.culprit.cause) == "pass joint.planted"
    assert results is not None and list(results.eager) == [("gradient", 0)]
    finding, results = graphs.judge({}, [X], state, gradients=True)
    (said,) = finding.unchecked
    assert "joint" in said and f" {name} " in said and results is None
    (said,) = graphs.judge({name: X}, (), state, gradients=True)[0].unchecked
    assert "joint" in said
    first = graphs.first.graph.find_nodes(op="placeholder")[0].name
    finding, _ = graphs.judge({first: X, name: X}, (), state, gradients=True)
    assert finding.culprit is not None
    graphs.arguments[0] = None  # as what AOTAutograd adds, states of random numbers
    (said,) = graphs.judge({}, [X], state, gradients=False)[0].unchecked
    assert f" {first} " in said
    finding, _ = joint(before, before, end=after).judge({name: X}, [X], state, gradients=True)
    assert finding.culprit is not None and str(finding.culprit.cause) == "stage joint"
    graphs = joint(before)
    assert graphs.judge({first: X}, (), state, gradients=False) == (Finding(), None)  # nothing to compare with
    finding, results = graphs.judge({}, [X], state, gradients=False, final=OTHER)
    assert finding == Finding() and results is not None
    assert JointGraphs().judge({}, [X], state, gradients=False) == (Finding(), None)


def test_a_gradient_of_terms_that_cancel() -> None:
    """Rounding of the large terms explains it; a small gradient beside a large one has none of that."""

    def cancels(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), tangent * 1e4, (tangent * 1e4 + tangent) - tangent * 1e4

    def small(factor: float) -> Callable[..., object]:
        return lambda x, tangent: (x.sin(), tangent * 1e4, tangent * factor)

    state = torch.get_rng_state()
    for before, after, is_right in ((cancels, small(1.0), True), (small(1.0), small(1.001), False)):
        graphs = joint(before, after)
        graphs.results = [0, ("gradient", 0), ("gradient", 1)]
        name = graphs.first.graph.find_nodes(op="placeholder")[1].name
        assert (graphs.judge({name: Y}, [X], state, gradients=True)[0] == Finding()) == is_right


def test_a_pass_that_writes_another_value_into_an_argument() -> None:
    graphs = joint(lambda x, y: (x.sin(), y, x.copy_(x + 1))[:2], lambda x, y: (x.sin(), y, x.copy_(x + 2))[:2])
    culprit, _ = graphs.culprit([X.clone(), X.clone()], torch.get_rng_state())
    assert culprit is not None and str(culprit.cause) == "pass joint.planted"


def test_a_joint_graph_that_changes_an_argument() -> None:
    graphs = joint(lambda x, tangent: (x.sin(), tangent * x.cos(), x.copy_(x + 1)))
    other = Results({}, {**OTHER.exact, ("input", 0): X.double()})
    finding, results = graphs.judge({}, [X], torch.get_rng_state(), gradients=False, final=other)
    assert finding == Finding() and results is not None and list(results.eager) == [0, ("input", 0)]
