"""What passes may make of a graph: the same values, of the same dtype, shape and memory; whatever the pass does."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx

from dynamo_backends.options import Options
from dynamo_backends.pass_target import pass_target
from dynamo_backends.regions import Support
from passes import Pass, PassContext, fx_editing, onnx_editing, register, unregister
from passes.engine.fx.snapshot import FxSnapshot
from passes.engine.manager import PassManager, Switches
from passes.onnx.common_subexpressions import common_subexpressions

aten = torch.ops.aten
OPTIONS = Options()
TARGET = pass_target(OPTIONS, Support(OPTIONS.opset, OPTIONS.providers))


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Registers a pass for the length of a test."""
    names: list[str] = []

    def add(name: str, function: Callable[..., int], **settings: object) -> None:
        register(Pass(name, "Planted by a test.", function, **settings))
        names.append(name)

    yield add
    for name in names:
        unregister(name)


# Our passes, where shapes broadcast

BROADCAST: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "probabilities viewed with another rank": (
        lambda q, k, v: torch.bmm(torch.softmax(q @ k.T, -1).view(4, 1, 4), v),
        [(4, 16), (4, 16), (4, 4, 16)],
    ),
    "probabilities expanded": (
        lambda q, k, v: torch.bmm(torch.softmax(q @ k.T, -1).expand(3, 4, 4), v),
        [(4, 16), (4, 16), (3, 4, 16)],
    ),
    "probabilities whose rows are batches": (
        lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1).view(8, 1, 4), v),
        [(2, 4, 16), (2, 4, 16), (8, 4, 5)],
    ),
    "product scaled by a tensor of higher rank": (lambda a, b, c: (a @ b) * c * 3, [(4, 3), (3, 4), (1, 1, 1)]),
    "product scaled by a constant of higher rank": (
        lambda a, b: (a @ b) * torch.full((1, 1, 1), 0.5),
        [(4, 3), (3, 4)],
    ),
    "normalization with a number of higher rank": (
        lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + torch.full((1, 1, 1), 1e-3)),
        [(4, 8)],
    ),
    "centered, with a number of higher rank": (
        lambda x, w: (
            (x - x.mean(-1, keepdim=True))
            / torch.sqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + torch.full((1, 1, 1, 1), 1e-3))
            * w
        ),
        [(2, 4, 8), (8,)],
    ),
    "silu of a tensor that broadcasts": (lambda x, y: x * torch.sigmoid(y), [(4, 8), (1, 4, 8)]),
    "scaled attention of one head for several": (
        lambda q, k, v: torch.softmax(q @ k.mT * 0.5, -1) @ v,
        [(2, 4, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)],
    ),
    "quotient by one of higher rank": (lambda x: x / torch.ones(1, 1, 1) + x * torch.ones(1, 1, 1), [(4, 8)]),
    "sum with a zero of higher rank": (lambda x: (x - torch.zeros(1, 1, 1)).sin(), [(4, 8)]),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BROADCAST)
def test_shapes_are_eagers(name: str, dynamic: bool, training: bool) -> None:
    function, shapes = BROADCAST[name]
    tensors = [torch.randn(shape, requires_grad=training) for shape in shapes]
    everything = {"passes": {"enable": ["*"]}}
    with torch.set_grad_enabled(training):
        # float32, sums in another order
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        assert_same_as_eager(
            function, *tensors, settings={"dynamic": dynamic, "options": everything}, tolerance=tolerance
        )
    assert counted("runtime_failures") == 0


# A pass of an author who did not think of it


def unnegate(module: fx.GraphModule, context: PassContext) -> int:
    """The documentation's."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.neg.default):
        inner = node.args[0]
        if inner.target is not aten.neg.default:
            context.refuse(node, "its argument is not negated", matched=1, of=2)
        else:
            fired += fx_editing.replace(node, inner.args[0], context)
    return fired


def changed_after(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """The result is changed in place outside the compiled part; the argument is what it was, or not, as in eager."""
    run = compiled(function)

    def call(x: torch.Tensor) -> object:
        result = run(x)
        result.add_(1)
        return result, x

    return call


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_result_never_becomes_its_input(stage: str, plant: Callable[..., None]) -> None:
    plant(f"{stage}.unnegate", unnegate)
    x = torch.randn(5)
    with torch.no_grad():
        changed_after(lambda x: x.neg().neg())(given := x.clone())
        assert torch.equal(given, x)
        changed_after(lambda x: x.neg().neg().view(5, 1))(given := x.clone())
        assert torch.equal(given, x)
    assert counted(f"pass {stage}.unnegate") == 0


FORMS: dict[str, tuple[Callable[..., object], int]] = {
    "inside": (lambda x: x.neg().neg().sin(), 1),
    "returned": (lambda x: x.neg().neg(), 0),
    "returned twice": (lambda x: (x.neg().neg(), x.neg().neg()), 0),
    "of what is returned": (lambda x: (y := x.exp(), y.neg().neg()), 0),
    "a view of it is returned": (lambda x: x.neg().neg()[1:], 0),
    "of a view": (lambda x: x.t().neg().neg() @ x, 1),
    "of another dtype": (lambda x: x.double().neg().neg().float().sin(), 1),
    "broadcast after": (lambda x: x.neg().neg() + x.unsqueeze(0).exp(), 1),
    "changed after": (lambda x: x.neg().neg().add_(1).sin(), 1),
    "of an input that is changed": (lambda x: (y := x.neg().neg(), x.add_(1), y * 2)[2], 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_documented_pass_on_cases_its_author_did_not_think_of(
    form: str, dynamic: bool, plant: Callable[..., None]
) -> None:
    plant("post_grad.unnegate", unnegate)
    function, fires = FORMS[form]
    with torch.no_grad():
        assert_same_as_eager(function, torch.randn(4, 4), calls=2, settings={"dynamic": dynamic})
    assert counted("pass post_grad.unnegate") == fires
    assert_same_as_eager(function, torch.randn(4, 4).exp_(), settings={"dynamic": dynamic})


def test_what_a_backward_may_read_never_becomes_an_input(plant: Callable[..., None]) -> None:
    """``sin`` saves what it reads: if that were the input, a change of it in place would reach the gradient."""
    plant("joint.unnegate", unnegate)
    assert_same_as_eager(lambda x: x.neg().neg().sin(), torch.randn(3, requires_grad=True))
    assert counted("pass joint.unnegate") == 0
    assert_same_as_eager(lambda x: (x * 2).neg().neg().sin(), torch.randn(3, requires_grad=True))
    assert counted("pass joint.unnegate") == 2  # of the product, which is no input's memory, and of its gradient


def test_why_it_was_refused() -> None:
    module = traced(lambda x: x.neg().neg(), torch.randn(3))
    context = PassContext("post_grad.unnegate", explain=True)
    assert unnegate(module, context) == 0
    assert "a result of the graph, which must be a tensor of its own" in [miss.reason for miss in context.refusals][0]


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(arg) for arg in args))


REPLACEMENTS: dict[str, tuple[Callable[..., tuple], str]] = {
    "shape": (lambda node: (aten.unsqueeze.default, (node.args[0], 0)), "float32 [1, 3, 4], exp is float32 [3, 4]"),
    "dtype": (lambda node: (aten.gt.Scalar, (node.args[0], 0)), "bool [3, 4], exp is float32 [3, 4]"),
    "strides": (
        lambda node: (aten.empty_strided.default, ([3, 4], [1, 3])),
        "float32 [3, 4] with strides [1, 3], exp is float32 [3, 4]",
    ),
    "memory": (
        lambda node: (aten.alias.default, (node.args[0],)),
        "a result of the graph, which must be a tensor of its own",
    ),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_what_is_not_the_same_is_refused(what: str) -> None:
    module = traced(lambda x: x.exp(), torch.randn(3, 4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    make, said = REPLACEMENTS[what]
    new = fx_editing.call(node, *make(node))
    context = PassContext("post_grad.mine", explain=True)
    assert not fx_editing.replace(node, new, context)
    assert said in context.refusals[0].reason
    assert new._erased and not node._erased


def test_a_value_that_its_maker_only_claims_is_inferred() -> None:
    module = traced(lambda x: x.exp(), torch.randn(3, 4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    with module.graph.inserting_before(node):
        new = module.graph.call_function(aten.unsqueeze.default, (node.args[0], 0))
    assert not fx_editing.replace(node, new, PassContext("post_grad.mine"))


# A pass that uses none of that


def wrong_shape(module: fx.GraphModule, context: PassContext) -> int:
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    with module.graph.inserting_before(node):
        new = module.graph.call_function(aten.unsqueeze.default, (node.args[0], 0))
        new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    return 1


def wrong_dtype(module: fx.GraphModule, context: PassContext) -> int:
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    node.target = aten.isnan.default
    return 1


def shared_memory(module: fx.GraphModule, context: PassContext) -> int:
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    node.replace_all_uses_with(node.args[0])
    return 1


def not_computable(module: fx.GraphModule, context: PassContext) -> int:
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    node.target, node.args = aten.view.default, (node.args[0], [5, 5])
    return 1


def out_of_order(module: fx.GraphModule, context: PassContext) -> int:
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    with module.graph.inserting_after(node):
        new = module.graph.call_function(aten.exp.default, node.args)
    (sine,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    sine.append(new)
    sine.args = (new,)
    return 1


def another_argument(module: fx.GraphModule, context: PassContext) -> int:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("extra")
    return 1


SPOILERS = {
    another_argument: "the graph takes the arguments extra, arg0_1, it took arg0_1",
    wrong_shape: "is float32 [1, 3, 4], it was float32 [3, 4]",
    wrong_dtype: "is bool [3, 4], it was float32 [3, 4]",
    shared_memory: "shares memory with arg0_1, it did with nothing",
    not_computable: "exp cannot be computed any more",
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda item: item.__name__)
def test_a_graph_is_not_spoiled_by_whatever_a_pass_does(
    spoil: Callable[..., int], plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    plant("post_grad.spoil", spoil)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x: x.exp(), torch.randn(3, 4))
    assert "'post_grad.spoil'" in caplog.text and SPOILERS[spoil] in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="'post_grad.spoil'"), torch.no_grad():
        compiled(lambda x: x.exp(), options={"fallback": "error"})(torch.randn(3, 4))


def test_arguments_out_of_order(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    def swap(module: fx.GraphModule, context: PassContext) -> int:
        first, second = module.graph.find_nodes(op="placeholder")
        second.append(first)
        return 1

    for stage in ("joint", "post_grad"):
        plant(f"{stage}.swap", swap)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x, y: (x - 2 * y).sin(), torch.randn(3), torch.randn(3))
    said = "the graph takes the arguments arg1_1, arg0_1, it took arg0_1, arg1_1"
    assert [said in record.getMessage() for record in caplog.records] == [True, True]


def test_nodes_out_of_order(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    plant("post_grad.spoil", out_of_order)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x: x.exp().sin(), torch.randn(3, 4))
    assert "the graph is not well formed any more" in caplog.text


def test_an_author_need_not_recompile_nor_clean_up(plant: Callable[..., None]) -> None:
    def cosine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        return int(fx_editing.replace(node, fx_editing.call(node, aten.cos.default, node.args), context))

    item = Pass("post_grad.cosine", "Planted.", cosine)
    manager = PassManager(strict=True)
    manager._by_stage["post_grad"] = [item]
    module = traced(lambda x: (x * 2).sin(), torch.randn(3))
    (result,) = manager.run("post_grad", module)
    x = torch.randn(3)
    torch.testing.assert_close(module(x), (x * 2).cos())
    assert (result.fired, result.nodes_after) == (1, 2)


def test_a_pass_that_is_undone_leaves_names_meta_and_order() -> None:
    module = traced(lambda x, y: (x.exp() + y).sin(), torch.randn(3), torch.randn(3))
    before = [(node.name, node.target, str(node.args), node.meta["val"]) for node in list(module.graph.nodes)[:-1]]
    snapshot = FxSnapshot(module)
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            node.target, node.meta = aten.cos.default, {}
    assert snapshot.changed()
    snapshot.restore()
    assert [(n.name, n.target, str(n.args), n.meta["val"]) for n in list(module.graph.nodes)[:-1]] == before
    x = torch.randn(3)
    torch.testing.assert_close(module(x, x), (x.exp() + x).sin())


# What a pass says of itself


def test_a_pass_that_says_nothing_of_its_change_is_checked_all_the_same(
    plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def silent(module: fx.GraphModule, context: PassContext) -> int:
        for node in module.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default
        return 0

    plant("post_grad.silent", silent)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(torch.sin, torch.randn(3), settings={"options": {"verify_passes": True}})
    assert "post_grad.silent" in caplog.text and "it said that it had not fired, and changed the graph" in caplog.text
    assert counted("undone pass post_grad.silent") == 1


def test_a_pass_that_changed_nothing_did_not_fire(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    plant("onnx.boast", lambda model, context: 7)
    plant("joint.boast", lambda module, context: 7)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(torch.sin, torch.randn(3))
    assert caplog.text.count("it said that it had fired 7 times, and changed nothing") == 2
    assert counted("pass onnx.boast") == counted("pass joint.boast") == 0


@pytest.mark.parametrize("said", [-1, 2.0, None])
def test_a_number_of_times_is_what_a_pass_returns(said: object) -> None:
    manager = PassManager(strict=True)
    manager._by_stage["post_grad"] = [Pass("post_grad.mine", "A test's.", lambda graph, context: said)]
    with pytest.raises(RuntimeError, match="a pass returns how many times it fired"):
        manager.run("post_grad", fx.symbolic_trace(lambda x: x + 1))


# ONNX models

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def run_pass(model: ir.Model, function: Callable[..., int]) -> str:
    """Runs one pass; returns why it was undone."""
    manager = PassManager(Switches(disable=("*",)), TARGET)
    manager._by_stage["onnx"] = [Pass("onnx.mine", "A test's.", function)]
    (result,) = manager.run("onnx", model)
    return result.undone


EXP = "m (float[3,4] x) => (float[3,4] y) { e = Exp(x)  y = Neg(e) }"


def onnx_wrong_shape(model: ir.Model, context: PassContext) -> int:
    node = model.graph[0]
    axes = onnx_editing.new_constant(
        model, "axes", onnx.numpy_helper.to_array(onnx.helper.make_tensor("a", 7, [1], [0]))
    )
    node.op_type = "Unsqueeze"
    node.resize_inputs(2)
    node.replace_input_with(1, axes)
    return 1


def onnx_wrong_dtype(model: ir.Model, context: PassContext) -> int:
    model.graph[0].op_type = "IsNaN"
    return 1


def onnx_gone(model: ir.Model, context: PassContext) -> int:
    model.graph.remove(model.graph[0], safe=False)
    return 1


def onnx_output_is_input(model: ir.Model, context: PassContext) -> int:
    model.graph.outputs[0] = model.graph.inputs[0]
    return 1


def onnx_other_name(model: ir.Model, context: PassContext) -> int:
    model.graph.outputs[0].name = "z"
    return 1


def onnx_another_input(model: ir.Model, context: PassContext) -> int:
    model.graph.inputs.append(ir.Value(name="extra"))
    return 1


ONNX_SPOILERS = {
    onnx_another_input: "the model has the inputs x, extra, it had x",
    onnx_wrong_shape: "Unsqueeze gives [1, 3, 4], and e is [3, 4]",
    onnx_wrong_dtype: "IsNaN gives BOOL, and e is FLOAT",
    onnx_gone: "reads e, which is not computed before it",
    onnx_output_is_input: "is an input, whose memory is not its own",
    onnx_other_name: "the output y is named z",
}


@pytest.mark.parametrize("spoil", ONNX_SPOILERS, ids=lambda item: item.__name__)
def test_a_model_is_not_spoiled_by_whatever_a_pass_does(spoil: Callable[..., int]) -> None:
    model = model_of(EXP)
    before = ir.to_proto(model)
    assert ONNX_SPOILERS[spoil] in run_pass(model, spoil)
    after = ir.to_proto(model)
    assert [node.op_type for node in after.graph.node] == ["Exp", "Neg"]
    assert after.graph.output == before.graph.output and after.graph.input == before.graph.input
    onnx.checker.check_model(after)


@pytest.mark.parametrize(
    ("operator", "domain", "said"),
    [
        ("Not", "", "cannot be computed|Not"),
        ("IsNaN", "", "BOOL, and"),
        ("Shape", "", "INT64, and"),
        ("NoSuchOperator", "com.microsoft", "NoSuchOperator"),
        ("NoSuchOperator", "nobodys.domain", "NoSuchOperator"),
    ],
)
def test_what_is_put_in_a_model_is_inferred(operator: str, domain: str, said: str) -> None:
    model = model_of(EXP)
    context = PassContext("onnx.mine", target=TARGET, explain=True)
    (old,) = model.graph[0].outputs
    new = ir.Node(domain, operator, [model.graph.inputs[0]])
    assert not onnx_editing.substitute(model, context, [old], [new])
    assert any(word in context.refusals[0].reason for word in said.split("|"))


def test_what_the_runtime_alone_knows_is_inferred_too() -> None:
    """``FusedMatMul`` has no schema in ONNX: its shape is what ONNX Runtime says."""
    model = model_of(
        "m (float[3,4] a, float[4,5] b) => (float[1,3,5] y) { p = MatMul(a, b)  y = Unsqueeze(p, z) }".replace(
            "float[1,3,5] y) {", "float[1,3,5] y) <int64[1] z = {0}> {"
        )
    )
    context = PassContext("onnx.mine", target=TARGET, explain=True)
    new = ir.Node("com.microsoft", "FusedMatMul", model.graph[0].inputs)
    assert not onnx_editing.substitute(model, context, [model.graph.outputs[0]], [new])
    assert "[3, 5], and y is [1, 3, 5]" in context.refusals[0].reason


class TestMergingEqualNodes:
    def run(self, graph: str, *, allowed: bool = True) -> tuple[int, list[str], PassContext]:
        model = model_of(graph)
        context = PassContext("onnx.common_subexpressions", explain=True)
        if not allowed:
            context.allows = lambda node: False  # type: ignore[method-assign]
        fired = common_subexpressions(model, context)
        onnx.checker.check_model(ir.to_proto(model))
        return fired, [node.op_type for node in model.graph], context

    def test_it_counts_what_is_gone(self) -> None:
        graph = "m (float[3] x) => (float[3] y) { a = Exp(x)  b = Exp(x)  c = Neg(a)  d = Neg(b)  y = Add(c, d) }"
        assert self.run(graph)[:2] == (2, ["Exp", "Neg", "Add"])

    def test_it_asks(self) -> None:
        graph = "m (float[3] x) => (float[3] y) { a = Exp(x)  b = Exp(x)  y = Add(a, b) }"
        assert self.run(graph, allowed=False)[:2] == (0, ["Exp", "Exp", "Add"])

    @pytest.mark.parametrize("draw", ["RandomNormalLike(x)", "RandomUniformLike(x)", "Bernoulli(x)"])
    def test_draws_stay_apart(self, draw: str) -> None:
        assert self.run(f"m (float[3] x) => (float[3] y) {{ a = {draw}  b = {draw}  y = Sub(a, b) }}")[0] == 0

    def test_attributes_tell_nodes_apart(self) -> None:
        form = "a = Elu <alpha = {}> (x)  b = Elu <alpha = {}> (x)  y = Sub(a, b)"
        for first, second, fires in ((1.0, 1.0, 1), (1.0, 2.0, 0), (0.0, -0.0, 0)):
            graph = f"m (float[3] x) => (float[3] y) {{ {form.format(first, second)} }}"
            assert self.run(graph)[0] == fires, (first, second)

    def test_outputs_keep_name_and_memory(self) -> None:
        graph = "m (float[3] x) => (float[3] y, float[3] z) { y = Exp(x)  z = Exp(x) }"
        fired, operators, context = self.run(graph)
        assert (fired, operators) == (0, ["Exp", "Exp"])
        assert "another output's memory" in context.refusals[0].reason

    def test_of_two_names_the_one_of_an_fx_node_is_kept(self) -> None:
        model = model_of("m (float[3] x) => (float[3] y) { hidden = Exp(x)  exp = Exp(x)  y = Add(hidden, exp) }")
        model.graph[1].metadata_props["fx_node"] = "exp"
        assert common_subexpressions(model, PassContext("onnx.common_subexpressions")) == 1
        assert [value.name for node in model.graph for value in node.outputs] == ["exp", "y"]


# What it costs


def test_a_snapshot_costs_less_than_a_copy() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x.sin() + 1
        return x

    module = traced(function, torch.randn(3))

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    taken = min(seconds(lambda: FxSnapshot(module).changed()) for _ in range(5))
    copied = min(seconds(lambda: copy.deepcopy(module.graph)) for _ in range(5))
    assert taken < copied / 4  # 0.3 of 6 ms


def test_nothing_of_ours_warns() -> None:
    """Forward, backward and inference, with all passes, in a process where each warning of PyTorch's is an error."""
    script = """
        import warnings, torch
        layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1)
        model = torch.nn.Sequential(*layers)
        compiled = torch.compile(model, backend="onnxrt", options={"passes": {"enable": ["*"]}})
        x = torch.randn(3, 4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled(x).sum().backward()
            with torch.no_grad():
                compiled(x)
                torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="onnxrt")(x)
    """
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
