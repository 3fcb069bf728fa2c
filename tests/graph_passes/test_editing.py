"""What a pass may change in a graph: values keep their dtype, shape and memory, or the edit is rejected."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynamo_backends.options import Options
from dynamo_backends.partition.regions import Support
from dynamo_backends.pipeline.pass_target import pass_target
from passes import Pass, PassContext, Target, fx_editing, onnx_editing, register, unregister
from passes.engine.fx.snapshot import FxSnapshot
from passes.engine.manager import PassManager, take_snapshot
from passes.engine.onnx import inference

aten = torch.ops.aten
OPTIONS = Options()
TARGET = pass_target(OPTIONS, Support(OPTIONS.opset, OPTIONS.providers))


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Registers a pass for the duration of a test."""
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
    """The pass of the documentation."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.neg.default):
        inner = node.args[0]
        if inner.target is not aten.neg.default:
            context.record_near_miss(node, "its argument is not negated", matched=1, of=2)
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
    "of an input that is changed": (lambda x: (y := x.neg().neg(), x.add_(1), y * 2)[2], 0),
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


def test_why_it_was_rejected() -> None:
    module = traced(lambda x: x.neg().neg(), torch.randn(3))
    context = PassContext("post_grad.unnegate", explain=True)
    assert unnegate(module, context) == 0
    assert "of its own" in context.near_misses[0].reason


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(arg) for arg in args))


REPLACEMENTS: dict[str, tuple[Callable[..., tuple], str]] = {
    "shape": (lambda node: (aten.unsqueeze.default, (node.args[0], 0)), "float32 [1, 3, 4], exp is float32 [3, 4]"),
    "dtype": (lambda node: (aten.gt.Scalar, (node.args[0], 0)), "bool [3, 4], exp is float32 [3, 4]"),
    "strides": (
        lambda node: (aten.empty_strided.default, ([3, 4], [1, 3])),
        "[1, 3], exp is float32 [3, 4]",
    ),
    "memory": (
        lambda node: (aten.alias.default, (node.args[0],)),
        "of its own",
    ),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_what_is_not_the_same_is_rejected(what: str) -> None:
    module = traced(lambda x: x.exp(), torch.randn(3, 4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    make, said = REPLACEMENTS[what]
    new = fx_editing.call(node, *make(node))
    context = PassContext("post_grad.mine", explain=True)
    assert not fx_editing.replace(node, new, context)
    assert said in context.near_misses[0].reason
    assert node in list(module.graph.nodes) and new not in list(module.graph.nodes)


def test_a_value_that_its_maker_only_claims_is_inferred() -> None:
    module = traced(lambda x: x.exp(), torch.randn(3, 4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    with module.graph.inserting_before(node):
        new = module.graph.call_function(aten.unsqueeze.default, (node.args[0], 0))
    assert not fx_editing.replace(node, new, PassContext("post_grad.mine"))


LIKE_IT = "new memory of the same dtype, shape and strides"


def replaced(
    function: Callable[..., object], old: str, new: Callable[[fx.GraphModule, fx.Node], fx.Node] | str, stage: str
) -> str:
    """Why one named node may not replace another; empty if it did."""
    module = traced(function, torch.randn(4, 4))
    nodes = {node.name: node for node in module.graph.nodes}
    node, context = nodes[old], PassContext(f"{stage}.mine", explain=True)
    if new is LIKE_IT:
        value = node.meta["val"]
        other = fx_editing.call(node, aten.empty_strided.default, (list(value.shape), list(value.stride())))
    else:
        other = nodes[new] if isinstance(new, str) else new(module, node)
    names = [item.name for item in module.graph.nodes if item is not other]
    if fx_editing.replace(node, other, context):
        assert not context.near_misses and node not in list(module.graph.nodes)
        return ""
    assert [item.name for item in module.graph.nodes if item is not other] == names
    return context.near_misses[0].reason


MEMORY: dict[str, tuple[Callable[..., object], str, str, str, str]] = {
    "a view of an input": (lambda x: x.t(), "t", LIKE_IT, "post_grad", "shares memory with x_1"),
    "a part of an input": (lambda x: x.split(2)[0], "getitem", LIKE_IT, "post_grad", "shares memory with x_1"),
    "a view of what is not needed": (lambda x: x.exp().t(), "t", LIKE_IT, "post_grad", ""),
    "a view of another result": (lambda x: (y := x.exp(), y.t()), "t", LIKE_IT, "post_grad", "memory with exp"),
    "a view that is only read": (lambda x: x.t().sin(), "t", LIKE_IT, "post_grad", ""),
    "a view that is read as it lies": (
        lambda x: x.t().as_strided((2, 2), (1, 2)).sin(),
        *("t", LIKE_IT, "post_grad", "shares memory with x_1"),
    ),
    "a view that is written": (lambda x: x.t().add_(1).sin(), "t", LIKE_IT, "post_grad", "shares memory with x_1"),
    "the same elsewhere": (lambda x: (x.exp().sin(), x.exp().cos()), "exp_1", "exp", "post_grad", ""),
    "the same elsewhere, returned": (
        lambda x: (x.exp(), x.exp()),
        *("exp_1", "exp", "post_grad", "of its own"),
    ),
    "the same elsewhere, of which a view is returned": (
        lambda x: (x.exp().sin(), x.exp()[1:]),
        *(
            "exp_1",
            "exp",
            "post_grad",
            "that of exp",
        ),
    ),
    "the same elsewhere, which is written": (
        lambda x: (y := x.exp(), z := x.exp().sin(), y.t().add_(1), z)[3],
        *("exp_1", "exp", "post_grad", "exp is written"),
    ),
    "the same elsewhere, before AOTAutograd": (
        lambda x: (x.exp().sin(), x.exp().cos()),
        *("exp_1", "exp", "pre_grad", "before AOTAutograd"),
    ),
    "the same elsewhere, in a joint graph": (lambda x: (x.exp().sin(), x.exp().cos()), "exp_1", "exp", "joint", ""),
    "an input, in a joint graph": (
        lambda x: x.neg().sin(),
        *("neg", "x_1", "joint", "memory of x_1"),
    ),
    "a result, in a joint graph": (
        lambda x: (x.exp(), x.exp().sin()),
        "exp_1",
        "exp",
        "joint",
        "memory of exp",
    ),
}


@pytest.mark.parametrize("what", MEMORY)
def test_memory_stays_whose_it_was(what: str) -> None:
    function, old, new, stage, said = MEMORY[what]
    found = replaced(function, old, new, stage)
    assert said in found if said else found == ""


def value_by(target: Callable[..., object], *args: object) -> Callable[[fx.GraphModule, fx.Node], fx.Node]:
    return lambda module, node: fx_editing.call(node, target, args)


VALUES: dict[str, tuple[Callable[..., object], str, Callable[[fx.GraphModule, fx.Node], fx.Node], str]] = {
    "strides of what is not returned": (
        lambda x: x.exp().sin(),
        *("exp", value_by(aten.empty_strided.default, [4, 4], [1, 4]), "[1, 4], exp is float32 [4, 4]"),
    ),
    "strides that address nothing": (
        lambda x: x[:1].exp().sin(),
        *("exp", value_by(aten.empty_strided.default, [1, 4], [9, 1]), ""),
    ),
    "strides of no elements": (
        lambda x: x[:0].exp().sin(),
        *("exp", value_by(aten.empty_strided.default, [0, 4], [1, 9]), ""),
    ),
    "a number": (
        lambda x: x.exp(),
        *(
            "exp",
            lambda module, node: fx_editing.call(node, aten.sym_size.int, (node.args[0], 0)),
            " 4, exp",
        ),
    ),
    "several": (
        lambda x: x.split(2)[0].sin(),
        *("split", lambda module, node: fx_editing.call(node, aten.split.Tensor, (node.args[0], 2)), ""),
    ),
    "several, of other shapes": (
        lambda x: x.split(2)[0].sin(),
        *(
            "split",
            lambda module, node: fx_editing.call(node, aten.split.Tensor, (node.args[0], 3)),
            "[3, 4], float32 [1",
        ),
    ),
    "more": (
        lambda x: x.split(2)[0].sin(),
        *(
            "split",
            lambda module, node: fx_editing.call(node, aten.split.Tensor, (node.args[0], 1)),
            "split is (float32",
        ),
    ),
    "another device": (
        lambda x: x.exp().sin(),
        *("exp", lambda module, node: device_of_no_memory(node), "on meta, exp"),
    ),
    "a sparse one": (
        lambda x: x.exp().sin(),
        *(
            "exp",
            lambda module, node: fx_editing.call(node, aten._to_sparse.default, node.args),
            "(torch.sparse_coo), exp",
        ),
    ),
}


def device_of_no_memory(node: fx.Node) -> fx.Node:
    return fx_editing.call(node, aten.empty.memory_format, ([4, 4],), {"device": torch.device("meta")})


@pytest.mark.parametrize("what", VALUES)
def test_what_is_put_in_the_place_of_a_value_is_alike(what: str) -> None:
    function, old, new, said = VALUES[what]
    found = replaced(function, old, new, "post_grad")
    assert said in found if said else found == ""


def test_numbers_may_be_equal_and_nothing_is_not() -> None:
    assert fx_editing.same_value(3, 5) and fx_editing.same_value(None, None)
    assert not fx_editing.same_value(None, 3) and not fx_editing.same_value((3,), None)
    assert fx_editing.same_value([3, None], (4, None)) and not fx_editing.same_value([3], [3, 3])


def test_new_memory_that_is_computed_with_a_size() -> None:
    """In the stage ``pre_grad`` a tensor may be changed in place: only what has memory of its own takes its place."""
    module = traced(lambda x: x * 4, torch.randn(4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    size = fx_editing.call(node, aten.sym_size.int, (node.args[0], 0))
    new = fx_editing.call(node, aten.mul.Tensor, (node.args[0], size))
    assert fx_editing.replace(node, new, PassContext("pre_grad.mine"))


def test_a_result_never_becomes_an_input_that_nothing_else_reads() -> None:
    module = traced(lambda x, y: y.exp(), torch.randn(4), torch.randn(4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    view = fx_editing.call(node, aten.alias.default, (next(iter(module.graph.nodes)),))
    assert not fx_editing.replace(node, view, PassContext("post_grad.mine"))


@pytest.mark.parametrize(("returned", "gradient"), [(False, False), (True, False), (True, True)])
def test_strides_that_a_pass_may_change(returned: bool, gradient: bool) -> None:
    """Those of what is not returned, if it asks for that; autograd lays gradients out."""
    module = traced(lambda x: x.exp() if returned else x.exp().sin(), torch.randn(4, 4))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    if gradient:
        node.meta["partitioner_tag"] = "is_backward"
    new = fx_editing.call(node, aten.empty_strided.default, ([4, 4], [1, 4]))
    allowed = gradient or not returned
    assert fx_editing.replace_all([(node, new)], PassContext("post_grad.mine"), strides=False) == allowed


def test_one_of_several_that_may_not_be_replaced_keeps_all() -> None:
    module = traced(lambda x: x.exp().sin(), torch.randn(4))
    exp, sine = (node for node in module.graph.nodes if node.op == "call_function")
    names = [node.name for node in module.graph.nodes]
    context = PassContext("post_grad.mine", explain=True)
    first = fx_editing.call(exp, aten.cosh.default, exp.args)
    second = fx_editing.call(sine, aten.unsqueeze.default, (first, 0))
    assert not fx_editing.replace_all([(exp, first), (sine, second)], context)
    assert [node.name for node in module.graph.nodes] == names
    assert [miss.node for miss in context.near_misses] == ["exp"]
    assert not fx_editing.replace_all([], context)
    inner = fx_editing.call(exp, aten.cosh.default, exp.args)
    assert not fx_editing.replace(exp, fx_editing.call(exp, aten.unsqueeze.default, (inner, 0)), context)
    assert [node.name for node in module.graph.nodes] == names, "what led to it is gone too"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3))),
        (aten.squeeze.dim, (torch.ones(2), 5)),
        (operator.getitem, ((1, 2), 7)),
        (operator.add, (1, "a")),
        (math.sqrt, (-1.0,)),
        (aten.sin.default, (torch.ones(2), 3)),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_cannot_be_computed_is_not_made(target: Callable[..., object], args: tuple) -> None:
    module = traced(lambda x: x.exp(), torch.randn(3, 4))
    names = [node.name for node in module.graph.nodes]
    with pytest.raises(fx_editing.NotComputable) as error:
        fx_editing.call(list(module.graph.nodes)[-1], target, args)
    assert str(target) in str(error.value) and "\n" not in str(error.value)
    assert [node.name for node in module.graph.nodes] == names


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.exp().sin(), {"sin"}),
        (lambda x: x.exp().t()[1:], {"exp", "t", "slice_1"}),
        (lambda x: (x.exp() + 1).split(2)[1].sin(), {"sin"}),
        (lambda x: x.exp().split(2)[1], {"exp", "split", "getitem_1"}),
        (lambda x: x.exp().t().as_strided((2, 2), (1, 2)).sin(), {"exp", "t", "sin"}),
        (lambda x: x.exp().view(torch.int32).bitwise_not(), {"exp", "bitwise_not"}),
        (lambda x: (y := x.exp(), y.t().add_(1), y.sin())[2], {"exp", "t", "sin"}),
    ],
)
def test_whose_memory_must_stay_its_own(function: Callable[..., object], kept: set[str]) -> None:
    nodes = traced(function, torch.randn(4, 4)).graph.nodes
    assert {node.name for node in nodes if node.op == "call_function" and fx_editing.is_needed(node)} == kept


def test_what_an_operator_of_higher_order_reads_keeps_its_memory() -> None:
    module = traced(lambda x: (x.exp().t(), x.sin())[1], torch.randn(4, 4))
    (view,) = module.graph.find_nodes(op="call_function", target=aten.t.default)
    with module.graph.inserting_after(view):
        module.graph.call_function(torch.ops.higher_order.cond, (True, None, None, (view,)))
    assert {node.name for node in module.graph.nodes if fx_editing.is_needed(node)} == {"exp", "t", "sin"}


def test_sizes_of_a_constant_are_numbers_in_a_dynamic_graph_too() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = fx.Graph()
    x, constant = graph.placeholder("x"), graph.get_attr("constant")
    x.meta["val"], constant.meta["val"] = mode.from_tensor(torch.ones(5, 1), static_shapes=False), torch.ones(3)
    value = fx_editing.call(graph.output(x), aten.add.Tensor, (x, constant)).meta["val"]
    assert [type(size) for size in value.shape] == [torch.SymInt, int] and value.shape[1] == 3


@torch.library.custom_op("test_editing::others", mutates_args=())
def others(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("target", "pure", "functional"),
    [
        (aten.add.Tensor, True, True),
        (aten.add_.Tensor, False, False),
        (aten.rand_like.default, False, False),
        (aten.empty.memory_format, False, True),
        (aten.nonzero.default, False, True),
        (aten._local_scalar_dense.default, False, True),
        (torch.ops.test_editing.others.default, False, True),
        (torch.ops.prims.convert_element_type.default, True, True),
        (operator.add, True, True),
        (math.floor, True, True),
        (torch.sin, False, False),
        (torch.ops.higher_order.cond, False, False),
    ],
    ids=lambda item: "" if isinstance(item, bool) else item.__name__,
)
def test_what_only_computes(target: Callable[..., object], pure: bool, functional: bool) -> None:
    node = fx.Graph().call_function(target)
    assert (fx_editing.is_pure(node), fx_editing.is_functional(node)) == (pure, functional)


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
    another_argument: r"extra, arg0_1, .* arg0_1\b",
    wrong_shape: r"float32 \[1, 3, 4\], .*float32 \[3, 4\]",
    wrong_dtype: r"bool \[3, 4\], .*float32 \[3, 4\]",
    shared_memory: r"memory of arg0_1\b",
    not_computable: r"\bexp\b.*\[5, 5\]",
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda item: item.__name__)
def test_a_graph_is_not_spoiled_by_whatever_a_pass_does(
    spoil: Callable[..., int], plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    plant("post_grad.spoil", spoil)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x: x.exp(), torch.randn(3, 4))
    assert "'post_grad.spoil'" in caplog.text and re.search(SPOILERS[spoil], caplog.text)
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
    said = [record.getMessage() for record in caplog.records]
    assert [re.findall(r"arg\d_1", text) for text in said] == [["arg1_1", "arg0_1", "arg0_1", "arg1_1"]] * 2


def test_nodes_out_of_order(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    plant("post_grad.spoil", out_of_order)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x: x.exp().sin(), torch.randn(3, 4))
    assert counted("undone pass post_grad.spoil") == 1 and "post_grad.spoil" in caplog.text


def test_an_author_need_not_recompile_nor_clean_up(plant: Callable[..., None]) -> None:
    def cosine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        return int(fx_editing.replace(node, fx_editing.call(node, aten.cos.default, node.args), context))

    item = Pass("post_grad.cosine", "Planted.", cosine)
    manager = PassManager(strict=True, passes=[item])
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


def test_results_that_share_memory_go_on_sharing_it() -> None:
    module = traced(lambda x: (y := x.exp(), y.t(), x.sin()), torch.randn(3, 4))
    snapshot = FxSnapshot(module)
    (view,) = module.graph.find_nodes(op="call_function", target=aten.t.default)
    view.target, view.args = aten.empty_strided.default, ([4, 3], [1, 4])
    assert snapshot.changed()
    assert re.search("result 1.* result 0", str(snapshot.problem(TARGET)))
    snapshot.restore()
    (sine,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    (exp,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    snapshot = FxSnapshot(module)
    sine.replace_all_uses_with(exp)
    assert snapshot.changed()
    assert re.search("result 0.* result 2", str(snapshot.problem(TARGET)))


def test_a_pass_after_one_that_is_undone_sees_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: fx.GraphModule, context: PassContext) -> int:
        context.record_near_miss("a node", "a reason")
        wrong_shape(module, context)
        raise KeyError("lost")

    def cosine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
        return int(fx_editing.replace(node, fx_editing.call(node, aten.cos.default, node.args), context))

    passes = (Pass("post_grad.spoil", "Planted.", spoil), Pass("post_grad.shape", "Planted.", wrong_shape))
    manager = PassManager(explain=True, passes=[*passes, Pass("post_grad.cosine", "Planted.", cosine)])
    module = traced(lambda x: (x * 2).exp(), torch.randn(3, 4))
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # a second passes with each look at it
    monkeypatch.setattr("passes.engine.manager.time", clock)
    results = manager.run("post_grad", module)
    assert [result.fired for result in results] == [0, 0, 1]
    assert [(result.nodes_before, result.nodes_after) for result in results] == [(2, 2)] * 3
    assert results[0].undone == "it failed: KeyError('lost')" and "it was float32 [3, 4]" in results[1].undone
    assert [(miss.node, miss.reason) for miss in results[0].near_misses] == [("a node", "a reason")]
    assert [result.milliseconds for result in results] == [1e3] * 3
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), (x * 2).cos())


def test_a_pass_that_the_check_objects_to_says_where_it_fired() -> None:
    class Objects:
        def problem(self, before: fx.GraphModule, after: fx.GraphModule, *, is_needed: bool = False) -> str:
            x = torch.randn(3)
            torch.testing.assert_close(before(x), x.sin())
            torch.testing.assert_close(after(x), x.cos())
            return "it is off"

    def cosine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        node.target = aten.cos.default
        context.matches += [f"node_{i}" for i in range(9)]
        return 1

    manager = PassManager(passes=[Pass("post_grad.cosine", "Planted.", cosine)])
    module = traced(torch.sin, torch.randn(3))
    (result,) = manager.run("post_grad", module, checker=Objects())
    assert result.undone.startswith("it is off") and re.findall("node_.", result.undone) == result.matches[:5]
    x = torch.randn(3)
    torch.testing.assert_close(module(x), x.sin())


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
    assert "post_grad.silent" in caplog.text
    assert counted("undone pass post_grad.silent") == 1


def test_a_pass_that_changed_nothing_did_not_fire(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    plant("onnx.boast", lambda model, context: 7)
    plant("joint.boast", lambda module, context: 7)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(torch.sin, torch.randn(3))
    assert caplog.text.count(" 7 times") == 2
    assert counted("pass onnx.boast") == counted("pass joint.boast") == 0


@pytest.mark.parametrize("said", [-1, 2.0, None])
def test_a_number_of_times_is_what_a_pass_returns(said: object) -> None:
    manager = PassManager(strict=True, passes=[Pass("post_grad.mine", "A test's.", lambda graph, context: said)])
    with pytest.raises(RuntimeError, match=re.escape(repr(said))):
        manager.run("post_grad", fx.symbolic_trace(lambda x: x + 1))


# ONNX models

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def run_pass(model: ir.Model, function: Callable[..., int]) -> str:
    """Runs one pass; returns why it was undone."""
    manager = PassManager(target=TARGET, passes=[Pass("onnx.mine", "A test's.", function)])
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
    onnx_another_input: r" x, extra, .* x\b",
    onnx_wrong_shape: r"Unsqueeze .*\[1, 3, 4\], .* e .*\[3, 4\]",
    onnx_wrong_dtype: "IsNaN .*BOOL, .* e .*FLOAT",
    onnx_gone: r"\breads e\b",
    onnx_output_is_input: r"\boutput\b.*\ban input\b",
    onnx_other_name: " y .* z$",
}


@pytest.mark.parametrize("spoil", ONNX_SPOILERS, ids=lambda item: item.__name__)
def test_a_model_is_not_spoiled_by_whatever_a_pass_does(spoil: Callable[..., int]) -> None:
    model = model_of(EXP)
    before = ir.to_proto(model)
    assert re.search(ONNX_SPOILERS[spoil], run_pass(model, spoil), re.M)
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
    assert any(word in context.near_misses[0].reason for word in said.split("|"))


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
    assert "[3, 5], and y is [1, 3, 5]" in context.near_misses[0].reason


LOOKED_AT = """m (float[N,4] x, float[M,4] z, float[] w) => (float[4,N] y, float[N,4] neg)
<float s = {2.5}, int64[2] axes = {1, 0}, int64[1] one = {3}, float[2] pair = {1.0, 2.0}, bool flag = {1}> {
  t = Transpose <perm = [1, 0]> (x)
  c = Constant <value = float {1.5}> ()
  u = Mul(t, c)
  v = Transpose(u)
  y = Transpose(v)
  neg = Neg(x)
}"""


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    produced = (value for node in model.graph for value in node.outputs)
    return {str(value.name): value for value in (*model.graph.inputs, *model.graph.initializers.values(), *produced)}


def test_what_a_pass_sees_of_a_model() -> None:
    model = model_of(LOOKED_AT)
    values = values_of(model)
    numbers = {"s": 2.5, "one": 3.0, "c": 1.5, "pair": None, "flag": None, "x": None}
    assert {name: onnx_editing.number(values[name]) for name in numbers} == numbers
    integers = {"axes": [1, 0], "one": [3], "s": None, "x": None}
    assert {name: onnx_editing.integers(values[name]) for name in integers} == integers
    for look in (onnx_editing.constant, onnx_editing.number, onnx_editing.integers, onnx_editing.sizes):
        assert look(None) is None
    assert onnx_editing.producer(None, "Mul") is None
    assert onnx_editing.sizes(values["x"]) == ["N", 4] and onnx_editing.sizes(values["w"]) is None
    values["w"].shape = ir.Shape([])
    assert onnx_editing.sizes(values["w"]) == []
    values["t"].shape = ir.Shape([None, 4])
    assert onnx_editing.sizes(values["t"]) is None
    values["t"].shape = None
    assert onnx_editing.sizes(values["t"]) is None
    transposes = list(onnx_editing.nodes_of(model, "Transpose"))
    assert [onnx_editing.permutation(node) for node in transposes] == [[1, 0]] * 3
    values["u"].shape = None
    assert onnx_editing.permutation(transposes[1]) is None
    multiply = onnx_editing.producer(values["u"], "Add", "Mul")
    assert multiply is values["u"].producer()
    assert onnx_editing.producer(values["u"], "Add") is onnx_editing.producer(values["x"], "Mul") is None
    assert onnx_editing.producer(values["u"], "Mul", domain="com.microsoft") is None
    assert multiply is not None
    assert onnx_editing.is_only_used_by(values["t"], multiply)
    assert not onnx_editing.is_only_used_by(values["x"], transposes[0])
    assert not onnx_editing.is_only_used_by(values["y"])


def test_nodes_of_subgraphs_are_seen_and_those_erased_meanwhile_are_not() -> None:
    model = model_of(
        "m (bool b, float[3] x) => (float[3] y) { s = Sin(x)  y = If (b) "
        "<then_branch = f () => (float[3] p) { p = Sin(x) }, else_branch = g () => (float[3] q) { q = Sin(s) }> }"
    )
    assert [node.outputs[0].name for node in onnx_editing.nodes_of(model, "Sin")] == ["s", "p", "q"]
    assert not list(onnx_editing.nodes_of(model, "Sin", domain="com.microsoft"))
    model = model_of("m (float[3] x) => (float[3] y) { a = Sin(x)  b = Sin(x)  y = Sin(x) }")
    seen = []
    for node in onnx_editing.nodes_of(model, "Sin"):
        seen.append(node.outputs[0].name)
        onnx_editing.erase_unused([model.graph[1].outputs[0]])
    assert seen == ["a", "y"]


def test_what_a_new_node_takes_over() -> None:
    model = model_of("m (float[3] x) => (float[3] y) { e = Exp(x)  n = Neg(e)  y = Abs(n) }")
    negate, absolute = model.graph[1], model.graph[2]
    negate.metadata_props["source"], negate.name = "a.py:3", "the_node"
    first = ir.Node(
        "", "Identity", [model.graph.inputs[0]], outputs=[onnx_editing.hidden_value(negate.outputs[0], "h")]
    )
    second = ir.Node("com.microsoft", "Gelu", first.outputs)
    context = PassContext("onnx.mine", explain=True)
    assert onnx_editing.substitute(model, context, negate.outputs, [first, second])
    assert [node.op_type for node in model.graph] == ["Identity", "Gelu", "Abs"], "what only the old node read is gone"
    value = absolute.inputs[0]
    assert value is second.outputs[0] and value is not None
    assert (value.name, value.dtype, onnx_editing.sizes(value)) == ("n", ir.DataType.FLOAT, [3])
    assert (first.outputs[0].name, first.outputs[0].dtype, onnx_editing.sizes(first.outputs[0])) == (
        "n__h",
        ir.DataType.FLOAT,
        [3],
    )
    assert (first.name, second.name) == ("node_n__h", "the_node")
    assert first.metadata_props == second.metadata_props == {"source": "a.py:3"}
    assert model.graph.opset_imports["com.microsoft"] == 1
    assert context.matches == ["n"] and not context.near_misses


def test_what_is_known_of_a_value_is_kept() -> None:
    """The types of other packages' operators need not be known; those of what takes their place are."""
    model = model_of("m (float[3] x) => (float[3] y) { e = com.microsoft.Mine(x)  y = Neg(e) }")
    assert model.graph[0].outputs[0].type is None
    new = ir.Node("", "Exp", [model.graph.inputs[0]])
    assert onnx_editing.substitute(model, PassContext("onnx.mine"), model.graph[0].outputs, [new])
    assert (new.outputs[0].dtype, onnx_editing.sizes(new.outputs[0])) == (ir.DataType.FLOAT, [3])


def test_results_and_outputs_that_are_computed_otherwise() -> None:
    model = model_of("m (float[4,2] x) => (float[2,2] a, float[2,2] b) { a, b = Split <num_outputs = 2> (x) }")
    model.graph.opset_imports["com.microsoft"] = 7
    (split,) = model.graph
    parts = onnx_editing.new_constant(model, "sizes", np.array([2, 2], dtype=np.int64))
    new = ir.Node("", "Split", [model.graph.inputs[0], parts], num_outputs=2)
    after = list(split.outputs)
    assert onnx_editing.substitute(model, PassContext("onnx.mine", target=TARGET), after, [new])
    assert [value.name for value in model.graph.outputs] == ["a", "b"]
    assert list(model.graph.outputs) == list(new.outputs) and [node.op_type for node in model.graph] == ["Split"]
    assert model.graph.opset_imports["com.microsoft"] == 7
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize("why", ["kernel", "bisector", "shape"])
def test_what_is_not_put_in_leaves_the_model_as_it_was(why: str) -> None:
    model = model_of(EXP)
    before = str(ir.to_proto(model))
    (old,) = model.graph[0].outputs
    target = Target(rejects=lambda node: "no kernel" if node.op_type == "Sin" and why == "kernel" else None)
    context = PassContext("onnx.mine", target=target, explain=True)
    if why == "bisector":
        context.allows = lambda node: False  # type: ignore[method-assign]
    constant = ir.node("Constant", [], {"value_float": 1.0})
    sine = ir.Node("", "Sin" if why != "shape" else "Size", [model.graph.inputs[0]])
    nodes = [constant, sine, ir.Node("", "Add", [*sine.outputs, *constant.outputs])] if why != "shape" else [sine]
    assert not onnx_editing.substitute(model, context, [old], nodes)
    assert str(ir.to_proto(model)) == before
    assert len(list(model.graph.inputs[0].uses())) == 1, "what was made and not used reads nothing any more"
    data = {"kernel": ["Sin: no kernel"], "bisector": [], "shape": ["INT64"]}[why]
    assert [datum in miss.reason for datum, miss in zip(data, context.near_misses, strict=True)] == [True] * len(data)
    assert all((miss.node, miss.matched, miss.of) == ("e", 1, 1) for miss in context.near_misses)


TWICE = "a = Exp(x)  b = Exp(x)"
EXISTING: dict[str, tuple[str, str, str, str, list[str] | str]] = {
    "of no name": (f"(float[3] x) => (float[3] y) {{ {TWICE}  y = Add(a, b) }}", "b", "a", "", ["a", "y"]),
    "of an FX node's name": (f"(float[3] x) => (float[3] y) {{ {TWICE}  y = Add(a, b) }}", "b", "a", "b", ["b", "y"]),
    "both": (f"(float[3] x) => (float[3] y) {{ {TWICE}  y = Add(a, b) }}", "b", "a", "ab", ["a", "y"]),
    "an output": ("(float[3] x) => (float[3] y) { a = Exp(x)  y = Exp(x) }", "y", "a", "a", ["y"]),
    "by an output": (
        "(float[3] x) => (float[3] y, float[3] z) { y = Exp(x)  b = Exp(x)  z = Neg(b) }",
        "b",
        "y",
        "b",
        ["y", "z"],
    ),
    "by an input": ("(float[3] x) => (float[3] y) { b = Identity(x)  y = Neg(b) }", "b", "x", "b", ["y"]),
    "an output by another": (
        "(float[3] x) => (float[3] y, float[3] z) { y = Exp(x)  z = Exp(x) }",
        *("z", "y", "", "another output"),
    ),
    "an output by an input": (
        "(float[3] x) => (float[3] y) { y = Identity(x) }",
        *("y", "x", "", "an input"),
    ),
    "an output by a constant": (
        "(float[3] x) => (float[1] y) { c = Constant <value = float[1] {1.0}> ()  y = Identity(c) }",
        *("y", "c", "", "an input"),
    ),
    "of another shape": (
        "(float[3] x, float[1,3] w) => (float[1,3] y) { a = Exp(x)  b = Exp(w)  y = Add(a, b) }",
        *("b", "a", "", "[3], and b is [1, 3]"),
    ),
}


@pytest.mark.parametrize("what", EXISTING)
def test_a_value_that_is_there_in_the_place_of_another(what: str) -> None:
    text, result, value, named, expected = EXISTING[what]
    model = model_of(f"m {text}")
    values, context = values_of(model), PassContext("onnx.mine", explain=True)
    for name in named:
        if (node := values[name].producer()) is not None:
            node.metadata_props["fx_node"] = name
    done = onnx_editing.use_existing(values[result], values[value], context)
    if isinstance(expected, str):
        assert not done and [expected in miss.reason for miss in context.near_misses] == [True]
        return
    assert done and [item.name for node in model.graph for item in node.outputs] == expected
    assert context.matches == [result]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_whose_result_a_name_is() -> None:
    model = model_of(
        "m (float[3] x) => (float[3] y) { exp = Exp(x)  exp__1 = Neg(exp)  exp__h = Abs(exp__1)  y = Sin(exp__h) }"
    )
    for node in model.graph:
        node.metadata_props["fx_node"] = "exp"
    names = {name: onnx_editing.is_named(value) for name, value in values_of(model).items()}
    assert names == {"x": True, "exp": True, "exp__1": True, "exp__h": False, "y": False}
    model.graph[0].metadata_props.clear()
    assert not onnx_editing.is_named(model.graph[0].outputs[0])


def test_constants_of_one_name_are_kept_apart() -> None:
    model = model_of(EXP)
    first, second = (onnx_editing.new_constant(model, "axes", np.array([i])) for i in range(2))
    assert [first.name, second.name] == ["constant.axes", "constant.axes_"]
    assert [onnx_editing.integers(value) for value in (first, second)] == [[0], [1]]
    assert (first.dtype, onnx_editing.sizes(first)) == (ir.DataType.INT64, [1])
    hidden = onnx_editing.hidden_value(model.graph[0].outputs[0], "flat", [12])
    assert (hidden.name, hidden.dtype, onnx_editing.sizes(hidden)) == ("e__flat", ir.DataType.FLOAT, [12])


class TestInference:
    """Inference of the results of a node, and the errors for wrong claims about them."""

    def settle(self, node: ir.Node, *claims: tuple[ir.DataType | None, list | None], **target: object) -> str | None:
        for output, (dtype, dims) in zip(node.outputs, claims, strict=False):
            output.type = None if dtype is None else ir.TensorType(dtype)
            output.shape = None if dims is None else ir.Shape(dims)
        return inference.settle_types(node, 20, Target(**target))  # type: ignore[arg-type]

    def value(self, *dims: int | str | None, dtype: ir.DataType | None = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name="v", type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape(dims))

    def test_what_is_not_known_is_filled_in(self) -> None:
        node = ir.Node("", "Transpose", [self.value("N", 4)])
        assert self.settle(node) is None
        (result,) = node.outputs
        assert (result.dtype, onnx_editing.sizes(result)) == (ir.DataType.FLOAT, [4, "N"])

    @pytest.mark.parametrize(
        ("dims", "differs"),
        [
            ([4, "N"], False),
            ([None, "N"], False),
            ([4, None], False),
            ([5, "N"], True),
            ([4, "M"], True),
            ([4], True),
            (None, False),
        ],
    )
    def test_claims(self, dims: list | None, differs: bool) -> None:
        node = ir.Node("", "Transpose", [self.value("N", 4)], outputs=[ir.Value(name="r")])
        problem = self.settle(node, (ir.DataType.FLOAT, dims))
        claimed = "" if dims is None else f"[{', '.join(map(str, dims))}]"
        assert (problem is not None) == differs
        assert problem is None or ("[4, N]" in problem and problem.endswith(f" r is {claimed}"))
        problem = self.settle(node, (ir.DataType.INT64, None))
        assert problem is not None and re.search("FLOAT.* r .*INT64", problem)

    def test_a_size_that_is_not_known_is_no_contradiction(self) -> None:
        node = ir.Node("", "Transpose", [self.value(None, 4)], outputs=[ir.Value(name="r")])
        assert self.settle(node, (ir.DataType.FLOAT, [4, 7])) is None
        problem = self.settle(node, (ir.DataType.FLOAT, [5, 7]))
        assert problem is not None and "[4, ?]" in problem and "[5, 7]" in problem

    def test_a_guard_may_make_an_expression_a_number(self) -> None:
        node = ir.Node("", "Transpose", [self.value("max(0, N - 2)", 4)], outputs=[ir.Value(name="r")])
        assert self.settle(node, (ir.DataType.FLOAT, [4, 1])) is None
        assert self.settle(node, (ir.DataType.FLOAT, [4, "N"])) is not None

    def test_inputs_that_are_left_out_or_not_known(self) -> None:
        most = ir.Value(name="most", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
        clip = ir.Node("", "Clip", [self.value(3, 4), None, most])
        assert self.settle(clip) is None and onnx_editing.sizes(clip.outputs[0]) == [3, 4]
        unknown = ir.Node("", "Neg", [ir.Value(name="u")])
        assert self.settle(unknown) is None and unknown.outputs[0].type is None

    def test_an_input_behind_one_that_is_left_out(self) -> None:
        scales = onnx_editing.new_constant(model_of(EXP), "scales", np.array([1, 1, 2, 3], dtype=np.float32))
        node = ir.Node("", "Resize", [self.value(1, 2, 4, 4), None, scales])
        assert self.settle(node) is None and onnx_editing.sizes(node.outputs[0]) == [1, 2, 8, 12]

    def test_what_a_model_lacks(self) -> None:
        model = model_of("m (float[3,4] x) => (float[4,3] y) { e = Exp(x)  n = Neg(e)  y = Transpose(n) }")
        e, n, y = (node.outputs[0] for node in model.graph)
        e.type, n.shape = None, None
        inference.infer_types(model.graph, 20)
        assert [(v.dtype, onnx_editing.sizes(v)) for v in (e, n)] == [(ir.DataType.FLOAT, [3, 4])] * 2

    def test_constants_tell_sizes(self) -> None:
        model = model_of(EXP)
        shape = onnx_editing.new_constant(model, "shape", np.array([2, 6], dtype=np.int64))
        node = ir.Node("", "Reshape", [model.graph.inputs[0], shape])
        assert self.settle(node) is None and onnx_editing.sizes(node.outputs[0]) == [2, 6]

    def test_what_cannot_be_computed(self) -> None:
        node = ir.Node("", "MatMul", [self.value(3, 4), self.value(3, 4)])
        said = str(self.settle(node))
        assert said.startswith("MatMul cannot be computed: ") and "\n" not in said

    def test_other_operators_are_the_targets(self) -> None:
        node = ir.Node("com.microsoft", "Mine", [self.value(3)], num_outputs=3)
        found = [None, (ir.DataType.INT64, None), (ir.DataType.FLOAT, ["N"])]
        assert self.settle(node, infers=lambda node: found) is None
        kinds = [(value.dtype, onnx_editing.sizes(value)) for value in node.outputs]
        assert kinds == [(None, None), (ir.DataType.INT64, None), (ir.DataType.FLOAT, ["N"])]
        unknown = ir.Node("com.microsoft", "Mine", [self.value(3)])
        assert self.settle(unknown) is None and unknown.outputs[0].type is None


# What a snapshot sees and takes back


def sine_of(module: fx.GraphModule) -> fx.Node:
    return next(iter(module.graph.find_nodes(op="call_function", target=aten.sin.default)))


def reorder(module: fx.GraphModule) -> None:
    sine_of(module).prepend(next(iter(module.graph.find_nodes(op="call_function", target=aten.cos.default))))


def add_node(module: fx.GraphModule) -> None:
    sine = sine_of(module)
    sine.replace_all_uses_with(fx_editing.call(sine.next, aten.neg.default, (sine,)), lambda user: user.op == "output")


def erase_result(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    output.args = (output.args[0][:1],)  # type: ignore[index]


CHANGES: dict[str, Callable[[fx.GraphModule], object]] = {
    "operator": lambda module: setattr(sine_of(module), "target", aten.cos.default),
    "arguments": lambda module: setattr(sine_of(module), "args", (sine_of(module).prev,)),
    "keyword": lambda module: module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)[0].update_kwarg(
        "dtype", torch.float32
    ),
    "name": lambda module: setattr(sine_of(module), "name", "renamed"),
    "order": reorder,
    "another node": add_node,
    "fewer results": erase_result,
    "attribute": lambda module: setattr(module, "_tensor_constant0", torch.full((3,), 9.0)),
    "attribute that becomes a parameter": lambda module: change_to_parameter(module, "_tensor_constant0"),
    "attribute of a submodule": lambda module: setattr(module.inner, "weight", torch.full((3,), 9.0)),
    "another graph": lambda module: setattr(module, "graph", fx_copy(module.graph)),
}


def change_to_parameter(module: fx.GraphModule, name: str) -> None:
    delattr(module, name)
    setattr(module, name, torch.nn.Parameter(torch.full((3,), 9.0)))


def fx_copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_of_a_graph_is_seen_and_taken_back(what: str) -> None:
    constant = torch.tensor([1.0, 2.0, 3.0])
    x = torch.randn(3)
    module = make_fx(lambda x: ((x * constant).sin(), x.cos(), x.view(3, 1).sum([1], dtype=torch.float64)))(x)
    module.add_submodule("inner", torch.nn.Module())
    module.inner.register_buffer("weight", torch.tensor([4.0, 5.0, 6.0]))  # type: ignore[union-attr]
    with module.graph.inserting_before(sine := sine_of(module)):
        sine.args = (
            module.graph.call_function(aten.mul.Tensor, (sine.args[0], module.graph.get_attr("inner.weight"))),
        )
    module.recompile()
    for node in module.graph.nodes:
        node.meta["mine"] = node.name
    text, expected = str(module.graph), module(x)
    names = [(node.name, node.meta["mine"]) for node in list(module.graph.nodes)[:-1]]
    snapshot = FxSnapshot(module)
    assert not snapshot.changed()
    CHANGES[what](module)
    assert snapshot.changed()
    torch.testing.assert_close(snapshot.before()(x), expected)
    snapshot.restore()
    assert str(module.graph) == text
    assert [(node.name, node.meta["mine"]) for node in list(module.graph.nodes)[:-1]] == names
    torch.testing.assert_close(module(x), expected)
    assert module.graph.owning_module is module


def test_nodes_that_nobody_reads_are_no_change_unless_they_have_effects() -> None:
    module = traced(lambda x: x.sin(), torch.randn(3))
    sine = sine_of(module)
    snapshot = FxSnapshot(module)
    fx_editing.call(sine, aten.neg.default, (fx_editing.call(sine, aten.exp.default, sine.args),))
    assert not snapshot.changed() and len(module.graph.nodes) == 3
    fx_editing.call(sine, aten.rand.default, ([3],), {"device": torch.device("cpu")})
    assert snapshot.changed() and len(module.graph.nodes) == 4
    module = traced(lambda x: (x.exp(), x.sin())[1], torch.randn(3))
    snapshot = FxSnapshot(module)
    assert not snapshot.changed() and len(module.graph.nodes) == 4, "what nobody read before is the graph's own"


def change_outputs(model: ir.Model) -> None:
    model.graph.outputs[0] = model.graph[1].outputs[0]


def inner_of(model: ir.Model) -> ir.Node:
    return next(node for graph in model.graph.subgraphs() for node in graph)


ONNX_CHANGES: dict[str, Callable[[ir.Model], object]] = {
    "operator": lambda model: setattr(model.graph[0], "op_type", "Cos"),
    "domain": lambda model: setattr(model.graph[0], "domain", "com.microsoft"),
    "input": lambda model: model.graph[1].replace_input_with(0, model.graph.inputs[0]),
    "attribute": lambda model: model.graph[2].attributes.add(ir.AttrFloat32("alpha", 2.0)),
    "a node less": lambda model: onnx_editing.use_instead(model.graph[1].outputs[0], model.graph[0].outputs[0]),
    "outputs": change_outputs,
    "the name of an output": lambda model: setattr(model.graph.outputs[0], "name", "renamed"),
    "the name of an input": lambda model: setattr(model.graph.inputs[0], "name", "renamed"),
    "a constant": lambda model: setattr(
        model.graph.initializers["c"], "const_value", ir.tensor(np.array([7.0], dtype=np.float32))
    ),
    "a node of a subgraph": lambda model: setattr(inner_of(model), "op_type", "Cos"),
    "an attribute of a subgraph": lambda model: inner_of(model).attributes.add(ir.AttrFloat32("alpha", 2.0)),
}


@pytest.mark.parametrize("what", ONNX_CHANGES)
def test_each_change_of_a_model_is_seen_and_taken_back(what: str) -> None:
    text = (
        "(float[3] x, bool b) => (float[3] z) <float[1] c = {2.0}> { s = Sin(x)  e = Exp(s)  l = Elu(e)  y = Add(l, c)"
    )
    branches = "then_branch = f () => (float[3] p) { p = Elu(y) }, else_branch = g () => (float[3] q) { q = Elu(x) }"
    inner = f"z = If (b) <{branches}>"
    has_subgraph = "subgraph" in what
    model = model_of(f"m {text} {inner if has_subgraph else 'z = Neg(y)'} }}")
    model.graph[0].metadata_props["source"] = "a.py:3"
    model.graph[0].name = "the_sine"
    before = ir.to_proto(model)
    snapshot = take_snapshot(model)
    assert not snapshot.changed()
    ONNX_CHANGES[what](model)
    assert snapshot.changed()
    assert ir.to_proto(snapshot.before()) == before
    snapshot.restore()
    assert ir.to_proto(model) == before


def test_constants_that_nothing_uses_are_no_change() -> None:
    model = model_of("m (float[3] x) => (float[3] y) <float[1] c = {2.0}> { y = Neg(x) }")
    snapshot = take_snapshot(model)
    onnx_editing.new_constant(model, "axes", np.array([1]))
    assert not snapshot.changed() and list(model.graph.initializers) == ["c"]
    del model.graph.initializers["c"]
    assert not snapshot.changed()


def two_outputs(model: ir.Model, context: PassContext) -> int:
    model.graph.outputs.append(model.graph.outputs[0])
    return 1


def twice_named(model: ir.Model, context: PassContext) -> int:
    model.graph[0].outputs[0].name = "x"
    return 1


def no_output(model: ir.Model, context: PassContext) -> int:
    model.graph.outputs[0] = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3, 4]))
    return 1


def one_output_more(model: ir.Model, context: PassContext) -> int:
    model.graph.outputs.append(model.graph[0].outputs[0])
    return 1


def claimed_dtype(model: ir.Model, context: PassContext) -> int:
    node = model.graph[1]
    node.op_type, node.domain = "Mine", "com.microsoft"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    return 1


@pytest.mark.parametrize(
    ("spoil", "datum"),
    [
        (two_outputs, "two outputs"),
        (twice_named, " x$"),
        (no_output, " y .*no node"),
        (one_output_more, "2 outputs, 1"),
        (claimed_dtype, " y .*FLOAT16"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_model_that_is_malformed_is_put_back(spoil: Callable[..., int], datum: str) -> None:
    model = model_of(EXP)
    before = ir.to_proto(model)
    manager = PassManager(passes=[Pass("onnx.mine", "A test's.", spoil)])
    (result,) = manager.run("onnx", model)
    assert re.search(datum, result.undone, re.M) and ir.to_proto(model) == before


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
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
