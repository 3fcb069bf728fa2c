"""The parts of a verdict one by one: comparison of stages, the first wrong node, the conclusion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.debug.first_changed_node import first_wrong_node, first_wrong_node_in_float64
from dynamo_backends.debug.repeated_runs import Instability
from dynamo_backends.debug.rows import Blame, Error, Finding, GraphComparison, Row
from dynamo_backends.debug.stage_comparison import StageGraphs, changed, copy_of, difference, name_of_result
from dynamo_backends.debug.verdict import conclude
from dynamo_backends.dumps.blame import Cause, CauseKind
from dynamo_backends.numerics.measure import Measure
from dynamo_backends.numerics.reference_runs import Results
from dynamo_backends.numerics.verdicts import Verdict
from passes.engine.results import PassResult

aten = torch.ops.aten
NAN = math.nan
X = torch.tensor([0.1, 0.5, 0.9])


def traced(function: Callable[..., object], *args: object) -> fx.GraphModule:
    return make_fx(function)(*(args or (X,)))


def node_of(module: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in module.graph.nodes if node.name == name)


def with_target(module: fx.GraphModule, name: str, target: Callable[..., object]) -> fx.GraphModule:
    """The same graph with another operator at one node."""
    result = copy_of(module)
    node_of(result, name).target = target
    result.recompile()
    return result


# Stages


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        (X.double(), X.double() * (1 + 1e-15), False),
        (X.double(), X.double() * (1 + 1e-8), True),
        (X.double() * 1e6, X.double() * 1e6 + 1e-9, False),
        (torch.zeros(2), torch.zeros(2) + 1e-15, False),
        (torch.zeros(2), torch.zeros(2) + 1e-8, True),
        (X, torch.tensor([0.1, 0.5, NAN]), True),
        (torch.tensor([NAN]), torch.tensor([NAN]), False),
        (X, X.double(), True),
        (X, X.view(3, 1), True),
        (X, None, True),
        (None, X, True),
        (None, None, False),
        (3, 3, False),
        (3, 4, True),
        (NAN, NAN, False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), True),
    ],
)
def test_what_is_more_than_the_rounding_of_float64(old: object, new: object, differs: bool) -> None:
    results = [Results({}, {0: 1.0, 1: value}) for value in (old, new)]
    assert changed(*results) == differs
    assert changed(results[0], Results({}, {1: old}))
    assert changed(Results({}, {1: old}), results[0])


@pytest.mark.parametrize(("error", "is_changed"), [(1e-17, True), (1e-7, False)])
def test_numbers_that_cancel_have_the_rounding_of_eager_in_float64(error: float, is_changed: bool) -> None:
    """Of a gradient that is zero nothing is left but rounding, which differs between two orders of operations."""
    exact, other = (torch.tensor([value, -value], dtype=torch.float64) for value in (2e-16, 3e-16))
    eager = torch.tensor([error, -error])
    assert changed(Results({0: eager}, {0: exact}), Results({0: eager}, {0: other})) == is_changed


def test_rounding_may_turn_what_is_discrete() -> None:
    def results(value: object) -> Results:
        return Results({0: value}, {0: value})

    for old, new in ((torch.tensor([1, 2]), torch.tensor([1, 3])), (3, 4), (X, X * (1 + 1e-7))):
        assert not difference(results(old), results(new), 0).is_wrong
    for old, new in ((torch.tensor([1]), torch.tensor([1.0])), (torch.tensor([1.0]), torch.tensor([1]))):
        assert difference(results(old), results(new), 0).complaint
    found = difference(results(X), results(X * 1.01), 0)
    assert found.is_wrong and found.is_of_size


def stage(*graphs: tuple[str, fx.GraphModule]) -> StageGraphs:
    (name, first), *others = graphs
    result = StageGraphs()
    result.start(name, first)
    for name, graph in others:
        result.fired(PassResult(name, 1, 3, 3, 0.0, undone="yes" if name == "undone" else ""), graph)
    result.end("post_grad", others[-1][1] if others else first)
    return result


def test_the_first_wrong_pass_of_a_stage() -> None:
    right = traced(lambda x: (x.sin() * 2, x.exp()))
    as_right = copy_of(right)
    node_of(as_right, "mul").args = (2.0, node_of(as_right, "sin"))
    node_of(as_right, "mul").args = node_of(as_right, "mul").args[::-1]
    wrong = with_target(right, "sin", aten.cos.default)
    more = with_target(wrong, "exp", aten.neg.default)
    graphs = stage(("post_grad", right), ("undone", more), ("right", as_right), ("bad", wrong), ("later", more))
    culprit, first = graphs.culprit([X], torch.get_rng_state())
    assert culprit is not None
    assert (culprit.value, culprit.cause, culprit.source) == ("sin", Cause(CauseKind.PASS, "bad"), "")
    assert [node_of(graph, "exp").target for graph in (graphs.first, graphs.last)] == [
        aten.exp.default,
        aten.neg.default,
    ]
    torch.testing.assert_close(first.eager[0], X.sin() * 2)
    second, first = graphs.culprit([X], torch.get_rng_state(), {1: 0})
    assert second is not None and (second.value, second.cause.name) == ("exp", "later")
    torch.testing.assert_close(first.eager, {0: X.exp()})
    assert stage(("post_grad", right), ("right", as_right)).culprit([X], torch.get_rng_state())[0] is None
    assert stage(("post_grad", right)).culprit([X], torch.get_rng_state())[0] is None
    graphs = stage(("post_grad", right), ("bad", wrong))
    assert [node_of(graph, "sin").target for graph in (graphs.first, graphs.last)] == [
        aten.sin.default,
        aten.cos.default,
    ]


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


def test_names_of_results() -> None:
    module = traced(lambda x, y: (x.sin(), y, None), X, X)
    assert name_of_result(module, 0) == ("sin", "")
    assert name_of_result(module, 2) == ("result 2", "")
    assert name_of_result(module, ("input", 1))[0] == f"the input {list(module.graph.nodes)[1].name}"
    assert name_of_result(module, ("gradient", 0))[0] == f"grad of {list(module.graph.nodes)[0].name}"


# The first wrong node


def first_wrong(before: fx.GraphModule, after: fx.GraphModule, *args: object) -> tuple[str, Verdict] | None:
    """The first wrong node and its error; asserts that the order of the nodes does not matter."""
    found = first_wrong_node(before, after, args or (X,), torch.get_rng_state())
    return None if found is None else (found[0], found[2])


def test_a_node_is_compared_with_its_namesake() -> None:
    before = traced(lambda x: (x.exp() * 2).sin().neg())
    assert first_wrong(before, copy_of(before)) is None
    found = first_wrong(before, with_target(before, "sin", aten.cos.default))
    assert found is not None and found[0] == "sin" and found[1].is_wrong and found[1].is_of_size
    wrong = with_target(before, "sin", aten.cos.default)
    for graph in (before, wrong):  # the line is known of either
        node_of(graph, "sin").stack_trace = 'File "here.py", line 7, in f\n    x.sin()'
        place = first_wrong_node(before, wrong, [X], torch.get_rng_state())
        assert place is not None and place[:2] == ("sin", "here.py:7")
        node_of(graph, "sin").meta.pop("stack_trace")


def test_a_node_that_the_pass_made_is_named_and_its_predecessors_line() -> None:
    before = traced(lambda x: x.sin() * 2)
    node_of(before, "sin").stack_trace = 'File "here.py", line 7, in f\n    x.sin()'
    after = copy_of(before)
    sine = node_of(after, "sin")
    with after.graph.inserting_before(sine):
        new = after.graph.call_function(aten.cos.default, sine.args)
    sine.replace_all_uses_with(new)
    after.graph.erase_node(sine)
    found = first_wrong_node(before, after, [X], torch.get_rng_state())
    assert found is not None and found[:2] == (new.name, "here.py:7")
    new.stack_trace = 'File "there.py", line 8, in f\n    x.cos()'
    found = first_wrong_node(before, after, [X], torch.get_rng_state())
    assert found is not None and found[:2] == (new.name, "there.py:8")


def test_a_result_that_the_pass_made_is_named() -> None:
    before = traced(lambda x: (x.exp(), x.sin()))
    node_of(before, "sin").stack_trace = 'File "here.py", line 7, in f\n    x.sin()'
    for target, found in ((aten.cos.default, ("new", "here.py:7")), (aten.sin.default, None)):
        after = copy_of(before)
        sine = node_of(after, "sin")
        with after.graph.inserting_before(sine):
            new = after.graph.create_node("call_function", target, sine.args, {}, name="new")
        sine.replace_all_uses_with(new)
        after.graph.erase_node(sine)
        said = first_wrong_node(before, after, [X], torch.get_rng_state())
        assert (said and said[:2]) == found
        new.stack_trace = 'File "there.py", line 8, in f\n    x.cos()'
        said = first_wrong_node(before, after, [X], torch.get_rng_state())
        assert (said and said[:2]) == (found and ("new", "there.py:8"))


def test_a_comparison_that_the_pass_made_may_be_turned_by_rounding() -> None:
    before = traced(lambda x: x > 0.5)
    after = copy_of(before)
    old = node_of(after, "gt")
    with after.graph.inserting_before(old):
        new = after.graph.create_node("call_function", aten.lt.Scalar, old.args, {}, name="new")
    old.replace_all_uses_with(new)
    after.graph.erase_node(old)
    assert first_wrong(before, after) is None


def test_constants_of_a_graph() -> None:
    before = traced(lambda x: x * torch.tensor([1.0, 2.0, 3.0]))
    assert first_wrong(before, copy_of(before)) is None
    name, _ = first_wrong(before, traced(lambda x: x * torch.tensor([1.0, 2.0, 4.0]))) or ("", "")
    assert name == "_tensor_constant0"


def test_nodes_in_another_order() -> None:
    before = traced(lambda x: x.sin() + x.cos())
    after = copy_of(before)
    node_of(after, "sin").prepend(node_of(after, "cos"))
    assert first_wrong(before, after) is None
    assert (first_wrong(before, with_target(after, "sin", aten.exp.default)) or [""])[0] == "sin"
    assert (first_wrong(after, with_target(before, "cos", aten.exp.default)) or [""])[0] == "cos"


def test_what_a_comparison_decides_is_judged_by_what_follows() -> None:
    before = traced(lambda x: torch.where(x > 0.5, x * 2, x.neg()))
    after = with_target(before, "gt", aten.lt.Scalar)
    assert (first_wrong(before, after) or [""])[0] == "where"
    integers = torch.tensor([1, 2])
    before = traced(lambda x: x > 1, integers)
    assert (first_wrong(before, with_target(before, "gt", aten.lt.Scalar), integers) or [""])[0] == "gt"


def test_random_numbers_are_the_same_in_both() -> None:
    before = traced(lambda x: aten.bernoulli.p(x, 0.5) * x + torch.rand_like(x))
    state = torch.get_rng_state()
    assert first_wrong(before, copy_of(before)) is None
    torch.set_rng_state(state)
    assert (first_wrong(before, with_target(before, "mul", aten.add.Tensor)) or [""])[0] == "mul"
    before = traced(lambda x: torch.rand_like(x) * 2)
    wrong = copy_of(before)
    node_of(wrong, "mul").args = (node_of(wrong, "rand_like"), 2.02)
    assert (first_wrong(before, wrong) or [""])[0] == "mul"


def test_a_pass_may_come_nearer_to_float64() -> None:
    x = torch.tensor([1e-9, 2e-9])
    before = traced(lambda x: (x + 1).log(), x)
    after = with_target(before, "log", aten.log1p.default)
    node_of(after, "log").args = tuple(after.graph.find_nodes(op="placeholder"))
    assert first_wrong(before, after, x) is None
    assert (first_wrong(after, before, x) or [""])[0] == "log"


def test_what_is_not_initialized_is_not_compared() -> None:
    before = traced(lambda x: torch.ones_like(x).fill_(3.0) * x)
    assert first_wrong(before, with_target(before, "ones_like", aten.empty_like.default)) is None
    assert (first_wrong(before, with_target(before, "ones_like", aten.zeros_like.default)) or [""])[0] == "ones_like"


def test_several_results() -> None:
    before = traced(lambda x: aten.sort.default(x.neg())[0])
    assert first_wrong(before, copy_of(before)) is None
    wrong = copy_of(before)
    node_of(wrong, "sort").args = (node_of(wrong, "neg"), -1, True)
    assert (first_wrong(before, wrong) or [""])[0] in ("sort", "getitem")


def test_arguments_are_not_changed() -> None:
    before = traced(lambda x: x.add_(1))
    x = X.clone()
    assert first_wrong(before, copy_of(before), x) is None
    assert torch.equal(x, X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_rounding_hides_is_found_in_float64(dtype: torch.dtype) -> None:
    """A comparison that is wrong, and half a percent in half precision."""
    x = torch.linspace(-1, 1, 50).to(dtype)

    def found(before: fx.GraphModule, after: fx.GraphModule) -> str:
        return (first_wrong_node_in_float64(before, after, [x], torch.get_rng_state()) or [""])[0]

    compares = traced(lambda x: (x * 2 > 0.5) & (x < 0.9), x)
    assert found(compares, copy_of(compares)) == ""
    assert found(compares, with_target(compares, "gt", aten.lt.Scalar)) == "gt"
    scales = traced(lambda x: (x * 1.5).sin() + torch.rand_like(x), x)
    assert found(scales, copy_of(scales)) == ""
    wrong = copy_of(scales)
    node_of(wrong, "mul").args = (node_of(wrong, "mul").args[0], 1.5075)
    assert found(scales, wrong) == "mul"
    rounded = copy_of(scales)  # a constant in the dtype of the graph, as a pass may compute it
    factor = 1.5 * (1 + torch.finfo(dtype).eps / 4)
    node_of(rounded, "mul").args = (node_of(rounded, "mul").args[0], factor)
    assert found(scales, rounded) == ""
    # of several operations on constants there is more rounding, but in half precision a right pass has few
    node_of(rounded, "mul").args = (node_of(rounded, "mul").args[0], 1.5 * (1 + 2 * torch.finfo(dtype).eps))
    assert found(scales, rounded) == ("" if dtype is torch.float32 else "mul")


def test_a_graph_of_integers_in_float64() -> None:
    integers = torch.tensor([1, 2])
    before = traced(lambda x: x + 1, integers)
    state = torch.get_rng_state()
    assert first_wrong_node_in_float64(before, copy_of(before), [integers], state) is None
    found = first_wrong_node_in_float64(before, with_target(before, "add", aten.mul.Tensor), [integers], state)
    assert found is not None and found[:2] == ("add", "") and re.match("2 of 2 ", str(found[2]))


# A row

RIGHT, WRONG = Measure(), Measure(0.5, 0.5, 0.5, 1e6, 0, 1.0, share=1e5, error=0.5, limit=5e-6)


def row(**fields: object) -> Row:
    return Row("mul", "aten.mul.Tensor", dtype="float32", **fields)  # type: ignore[arg-type]


def unstable(threads: int = 1, difference: Measure = WRONG) -> Instability:
    return Instability(1, threads, torch.float32, difference)


@pytest.mark.parametrize(
    ("fields", "mark", "explained", "in_model"),
    [
        ({}, " ", True, True),
        ({"onnx": RIGHT, "eager": RIGHT}, "~", True, True),
        ({"onnx": RIGHT, "eager": RIGHT, "equals_eager": True}, "=", True, True),
        ({"onnx": RIGHT, "eager": RIGHT, "complaint": "dtype"}, "!", False, True),
        ({"complaint": "dtype"}, "!", False, True),
        ({"onnx": WRONG, "eager": RIGHT}, "~", False, False),  # what it was given explains it
        ({"onnx": WRONG, "eager": RIGHT, "local_onnx": RIGHT}, "~", False, False),
        ({"onnx": WRONG, "eager": RIGHT, "local_onnx": WRONG}, "!", False, False),
        ({"onnx": RIGHT, "eager": RIGHT, "local_onnx": WRONG}, "!", True, True),
        ({"onnx": RIGHT, "eager": RIGHT, "session": WRONG}, "~", False, True),
        ({"onnx": WRONG, "eager": RIGHT, "session": RIGHT}, "~", True, False),
        ({"onnx": RIGHT, "eager": RIGHT, "local_instability": unstable()}, "?", True, True),
        ({"onnx": RIGHT, "eager": RIGHT, "local_instability": unstable(difference=RIGHT)}, "~", True, True),
        ({"onnx": RIGHT, "eager": RIGHT, "local_eager": WRONG, "local_instability": unstable()}, "~", True, True),
    ],
)
def test_what_a_row_says(fields: dict[str, object], mark: str, explained: bool, in_model: bool) -> None:
    found = row(**fields)
    assert (found.mark, found.explained, found.propagated_explained) == (mark, explained, in_model)
    assert found.entry.mark == mark


def test_when_a_session_is_unstable() -> None:
    assert not row().unstable_in_session
    assert row(session_instability=unstable(), eager=RIGHT).unstable_in_session
    assert row(session_instability=unstable()).unstable_in_session
    assert not row(session_instability=unstable(), eager=WRONG).unstable_in_session
    assert str(unstable()).startswith("with 1 thread, ")
    assert str(unstable(2)).endswith("1 thread and with 2")


def test_the_worst_output_is_that_of_the_largest_share() -> None:
    def output(name: str, *, error: float, scale: float, nonfinite: int = 0, **fields: object) -> Row:
        ours = Measure(error, error, error, 1.0, nonfinite, scale)
        return Row(name, "aten.mul.Tensor", dtype="float32", **{"is_output": True, "onnx": ours, **fields})  # type: ignore[arg-type]

    rows = [
        output("large", error=1.0, scale=1e6),
        output("small", error=0.1, scale=1.0, eager=RIGHT),
        output("zero", error=0.01, scale=0.0),
        output("inside", error=9.0, scale=1.0, is_output=False),
        row(is_output=True),
    ]
    comparison = GraphComparison(rows=rows)
    assert comparison.worst == Error("small", rows[1].onnx, RIGHT)  # type: ignore[arg-type]
    rows.append(output("session", error=0.0, scale=1.0, session=Measure(0.2, 0.2, 0.2, 1.0, 0, 1.0)))
    found = comparison.worst
    assert found is not None and (found.value, found.onnx.max_abs, found.eager) == ("session", 0.2, None)
    rows.append(output("infinite", error=0.0, scale=1.0, nonfinite=1))
    assert comparison.worst is not None and comparison.worst.value == "infinite"
    assert GraphComparison(rows=rows[3:5]).worst is None


def test_the_worst_error_of_what_diverges_is_a_fault() -> None:
    """A small error of the outputs says nothing of a pass that is wrong."""
    rows = [row(is_output=True, onnx=RIGHT, eager=RIGHT), row(onnx=WRONG, eager=RIGHT)]
    rows[0].name, rows[1].name = "y", "x"
    by_a_pass = Finding(Blame("z", BAD, difference=Verdict("off", WRONG, RIGHT)))
    of_a_result = Finding(wrong=[result("y", Verdict("off", WRONG, RIGHT))])
    of_dtype = Finding(wrong=[result("y", Verdict("dtype torch.int64 instead of torch.int32"))])
    for finding, value in ((by_a_pass, "z"), (of_a_result, "y"), (of_dtype, None)):
        worst = conclude(GraphComparison(rows=rows), [finding], {}).worst
        assert (worst and worst.value) == value and (worst is None or worst.onnx == WRONG)
    blamed = GraphComparison(Blame("x", Cause(CauseKind.NODE), source="a.py:3"), rows=rows)
    assert blamed.worst is not None and blamed.worst.value == "x"


# The conclusion

BAD = Cause(CauseKind.PASS, "joint.bad")
MUL = Blame("mul", Cause(CauseKind.NODE), source="a.py:3")


def result(name: str, said: Verdict = Verdict("off")) -> Blame:  # noqa: B008
    return Blame(name, Cause(CauseKind.RESULT), source="a.py:7", difference=said)


OFF = result("sin")


def culprit(node: str) -> Finding:
    return Finding(Blame(node, BAD, source="a.py:7", difference=Verdict("off by a lot")))


@pytest.mark.parametrize(
    ("blame", "findings", "expected", "note"),
    [
        (None, [], None, "as it was"),
        (None, [Finding()], None, "as it was"),
        (MUL, [Finding()], MUL, "as it was"),
        (None, [Finding(), culprit("sin")], ("sin", BAD), "off by a lot"),
        (None, [culprit("sin"), culprit("cos")], ("sin", BAD), "off by a lot"),
        (MUL, [culprit("sin")], ("sin", BAD), "mul (a.py:3)"),
        (None, [Finding(wrong=[OFF, result("cos")])], OFF, ""),
        (None, [Finding(wrong=[OFF]), Finding(because="its forward diverges")], OFF, ""),
        (MUL, [Finding(wrong=[OFF])], MUL, "as it was"),
    ],
)
def test_the_earliest_fault_is_the_verdict(
    blame: Blame | None, findings: Sequence[Finding], expected: Blame | tuple[str, Cause] | None, note: str
) -> None:
    found = conclude(GraphComparison(blame, note="as it was"), findings, {})
    assert found.unchecked == [] and note in found.note and found.ok == (expected is None)
    because = "".join(finding.because for finding in findings)
    assert (found.blame.because if found.blame else "") == because and because in found.verdict
    if isinstance(expected, Blame):
        expected = (expected.value, expected.cause)
    assert (found.blame and (found.blame.value, found.blame.cause)) == expected
    assert found.blame is None or found.verdict.startswith(f"diverges at {found.blame.value} ({found.blame.source})")


def test_what_was_not_checked_is_said_of_what_is_ok() -> None:
    findings = [Finding(unchecked=["b"]), Finding(unchecked=["c", "d", "e"])]
    found = conclude(GraphComparison(unchecked=["a"]), findings, {})
    assert found.ok and found.unchecked == ["a", "b", "c", "d", "e"] and "a; b; c" in found.note
    found = conclude(GraphComparison(MUL, note="as it was"), findings, {})
    assert (found.note, found.unchecked) == ("as it was", ["b", "c", "d", "e"])
