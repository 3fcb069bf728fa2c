"""Runs of a graph node by node, in eager and in float64: values, recorded results, freed values, tolerances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.debug.rounding_runs import explained_by_rounding
from dynamo_backends.debug.rows import Row
from dynamo_backends.exporter.translate import value_names
from dynamo_backends.numerics.graph_execution import FxExecution, PerturbedExecution, results_in_float64, value_of
from dynamo_backends.numerics.local_error import NodeCheck, Segment

aten = torch.ops.aten
X = torch.tensor([0.1, 0.5, 0.9])
EPS = torch.finfo(torch.float32).eps
ONE = torch.ones(3)
SIGNS = torch.tensor([1.0, -1.0]).repeat(5000)
HILBERT = 1 / (torch.arange(4.0)[:, None] + torch.arange(4) + 1)


@torch.library.custom_op("test_graph_execution::single", mutates_args=())
def single(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("float32 only")
    return x * 2


single.register_fake(torch.empty_like)


def graph_of(function: Callable[..., object]) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = make_fx(function)(X.clone())
    return module, {node.name: node for node in module.graph.nodes}


def test_values_are_dropped_after_their_last_use() -> None:
    module, nodes = graph_of(lambda x: x.sin().exp().neg())
    execution = FxExecution(module, [X], torch.get_rng_state(), compared={"sin"})
    execution.reach(nodes["neg"])
    assert set(execution.eager) == {nodes["sin"], nodes["neg"]}
    torch.testing.assert_close(execution.exact_of(nodes["neg"]), X.double().sin().exp().neg())
    assert execution.release(nodes["sin"]) == [nodes["sin"]] and set(execution.exact) == {nodes["neg"]}


def test_results_in_float64_alone() -> None:
    """In the order in which they are computed; numbers and ``None`` too; arguments are not changed."""
    module, _ = graph_of(lambda x: (x.neg(), None, x.sin().exp(), x.sin(), x.copy_(x * 2), 3))
    for given in (X.clone(), X.double()):
        found = dict(results_in_float64(module, [given], torch.get_rng_state()))
        assert torch.equal(given.float(), X)
        wide = given.double()
        assert found.pop(1) is None and found.pop(5) == 3
        for i, right in enumerate((-wide, None, wide.sin().exp(), wide.sin(), wide * 2)):
            if right is not None:
                torch.testing.assert_close(found[i], right, rtol=1e-15, atol=0.0)
    module, _ = graph_of(lambda x: (y := x.sin(), y, y.exp()))  # returned twice, and read
    assert dict(results_in_float64(module, [X], torch.get_rng_state())).keys() == {0, 1, 2}
    module, _ = graph_of(lambda x: (x.view(-1).mul_(2), x))  # an argument's memory by another name
    given = X.double()
    results = results_in_float64(module, [given], torch.get_rng_state())
    assert all(torch.equal(value, X.double() * 2) for _, value in results) and torch.equal(given.float(), X)  # type: ignore[arg-type]
    counter = torch.tensor([5, 5, 5])
    (count, _), *_ = results_in_float64(
        make_fx(lambda n: (n.add_(1), n))(counter.clone()), [counter], torch.get_rng_state()
    )
    assert count == 0 and counter.tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match="float32 only"):
        list(results_in_float64(graph_of(lambda x: (single(x.sin()),))[0], [X], torch.get_rng_state()))


def test_what_is_recorded_is_not_computed_again() -> None:
    module, nodes = graph_of(lambda x: torch.rand_like(x) * x)
    drawn = torch.tensor([1.0, 2.0, 3.0])
    execution = FxExecution(module, [X], torch.get_rng_state(), recorded={nodes["rand_like"]: drawn})
    execution.reach(nodes["mul"])
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), drawn.double() * X.double())


def test_what_rounding_decides_is_told_and_eagers() -> None:
    module, nodes = graph_of(lambda x: (x * x > 0, x.long() > 0))
    tiny = torch.full((3,), 1e-30)
    execution = FxExecution(module, [tiny], torch.get_rng_state())
    for node in module.graph.nodes:
        if node.op != "output":
            execution.run(node)
    compared = [node for node in nodes.values() if node.target is torch.ops.aten.gt.Scalar]
    assert compared[0] in execution.decisions and compared[1] not in execution.decisions
    assert not execution.exact_of(compared[0]).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_a_node_that_writes_does_so_once_on_each_side(dtype: torch.dtype) -> None:
    module, nodes = graph_of(lambda x: x.add_(1) * 2)
    x = X.to(dtype)
    execution = FxExecution(module, [x.clone()], torch.get_rng_state())
    execution.reach(nodes["mul"])
    wide = x if dtype.is_complex else x.double()
    torch.testing.assert_close(execution.eager[nodes["mul"]], (x + 1) * 2)
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), (wide + 1) * 2)


def test_a_node_may_write_into_eagers_result_that_float64_took_over() -> None:
    """A bit-cast is not computed in float64."""
    module, nodes = graph_of(lambda x: x.double().view(torch.int64).view(torch.float64).add_(1) * 2)
    execution = FxExecution(module, [X.clone()], torch.get_rng_state())
    execution.reach(nodes["mul"])
    torch.testing.assert_close(execution.eager[nodes["mul"]], (X.double() + 1) * 2)
    torch.testing.assert_close(execution.exact_of(nodes["mul"]), (X.double() + 1) * 2)


def test_float64_alone_does_not_write_into_the_graphs_tensors() -> None:
    module, nodes = graph_of(lambda x: x * 2)
    module.register_buffer("buffer", torch.zeros(3, dtype=torch.float64))
    with module.graph.inserting_before(nodes["mul"]):
        buffer = module.graph.get_attr("buffer")
        added = module.graph.call_function(torch.ops.aten.add_.Scalar, (buffer, 1))
    FxExecution(module, [X.clone()], torch.get_rng_state(), eager=False).reach(added)
    assert not module.buffer.any()


def test_float64_with_rounding_at_random() -> None:
    """Of what a node reads that computes; not of views, what is recorded, and what is infinite."""
    x = torch.cat([torch.ones(98) / 3, torch.tensor([torch.inf, -torch.inf])])
    module = make_fx(lambda x: (x.view(2, 50), torch.rand_like(x), x * 3 > 1, x * 3, single(x)))(x)
    nodes = module.graph.output_node().all_input_nodes
    found = []
    for seed in (0, 0, 1):
        execution = PerturbedExecution(module, [x], torch.get_rng_state(), seed, recorded={nodes[1]: x})
        execution.reach(nodes[-1])
        viewed, random, turned, product, halves = (execution.exact_of(node) for node in nodes)
        assert torch.equal(viewed, x.double().view(2, 50)) and torch.equal(random, x.double())  # type: ignore[arg-type]
        assert 20 < int(turned.sum()) < 80  # type: ignore[attr-defined]
        torch.testing.assert_close(product, x.double() * 3, rtol=EPS, atol=0)
        torch.testing.assert_close(halves, x.double() * 2, rtol=2 * EPS, atol=0)
        found.append(product)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_value_that_is_not_known_is_computed_of_those_that_are() -> None:
    module, nodes = graph_of(lambda x: (x.sin() + 1).exp())
    known: dict[fx.Node, object] = {nodes["sin"]: torch.zeros(3)}
    torch.testing.assert_close(value_of(nodes["exp"], known), torch.ones(3).exp())
    assert nodes["add"] in known


# What a node may be off


def check_of(function: Callable[..., object], args: Sequence[torch.Tensor]) -> NodeCheck:
    graph = make_fx(function)(*args).graph
    graph.eliminate_dead_code()
    *inputs, _ = (node for node in graph.nodes if node.op != "call_function")
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return NodeCheck(Segment(nodes, dict(zip(inputs, args, strict=True))))


def is_wrong(function: Callable[..., object], args: Sequence[torch.Tensor], value: torch.Tensor) -> bool:
    return check_of(function, args).verdicts([value])[0].is_wrong


@pytest.mark.parametrize(
    ("function", "args", "right", "wrong"),
    [
        # units in the last place
        (lambda x: aten.sort.default(x)[0], [ONE], ONE + 7 * EPS, ONE + 9 * EPS),
        # numbers inside of the computation: the terms of a sum; numbers near one
        (lambda x: x.sum(), [SIGNS], torch.tensor(2e-3), torch.tensor(1e-2)),
        (lambda x: aten.silu(x), [ONE * 1e-6], ONE * 5e-7 + 3 * EPS, ONE * 5e-7 + 20 * EPS),
        # eager's own error, of a value that is nearer to float64
        (lambda x: single(x), [ONE], ONE * 2, ONE * 2.1),
        (lambda x: aten.linalg_inv_ex.default(x)[0], [HILBERT], HILBERT.double().inverse().float(), HILBERT * 2),
        # where arguments are moved; eager happens to be exact
        (lambda x: aten.prod.default(x), [torch.ones(1000)], torch.tensor(1 + 100 * EPS), torch.tensor(1.001)),
        # one after the other, of which the first is no value of the model
        (lambda x: (x * 1e4).sin(), [ONE], (ONE * 1e4).sin() + 3e-3, (ONE * 1e4).sin() + 0.1),
        (lambda x: x.log() > 0, [torch.ones(50)], torch.ones(50) > 0, torch.ones(50)),
        (lambda x: x.log() > 0, [torch.ones(50) * 1.01], torch.ones(50) > 0, torch.ones(50) < 0),
        (torch.bucketize, [ONE, ONE], torch.tensor([3, 3, 0]), torch.tensor([3, 3, 0]).int()),
        (torch.bucketize, [ONE * 0.99, ONE], torch.tensor([0, 0, 0]), torch.tensor([3, 3, 0])),
    ],
)
def test_what_explains_a_result(
    function: Callable[..., object], args: list[torch.Tensor], right: torch.Tensor, wrong: torch.Tensor
) -> None:
    assert not is_wrong(function, args, right) and is_wrong(function, args, wrong)


def test_terms_that_cancel_in_a_mean_are_inside_of_a_normalization() -> None:
    x = SIGNS.view(2, 1, 5000)
    graph = fx.Graph()
    given = graph.placeholder("x")
    node = graph.call_function(aten.native_batch_norm.default, (given, None, None, None, None, True, 0.1, 1e-5))
    check = NodeCheck(Segment([node], {given: x}))
    for mean, is_off in ((2e-7, False), (1e-6, True)):
        assert [item.is_wrong for item in check.verdicts([None, torch.tensor([mean]), None])] == [False, is_off, False]


def test_what_is_said_of_an_element() -> None:
    (said,) = check_of(lambda x: x.exp(), [ONE]).verdicts([ONE.exp() * torch.tensor([1, 1.1, 1])])
    assert said.index == (1,) and said.ours is not None and said.ours.error == pytest.approx(0.272, rel=1e-2)
    assert is_wrong(lambda x: x.exp(), [ONE], ONE.exp().int()) and is_wrong(lambda x: x.exp(), [ONE], ONE.exp()[:2])
    assert not check_of(lambda x: x.exp(), [ONE]).verdicts([None])[0].is_wrong


@pytest.mark.parametrize(
    ("dtype", "function", "wrong"),
    [
        (torch.float32, lambda x: x - 1, True),
        (torch.float32, lambda x: x > 1, True),
        (torch.float32, lambda x: torch.where(x > 2, x, x - 1), False),  # of several nodes
        (torch.float32, lambda x: aten.sub.Tensor(x, x, alpha=1 - 2**-10), False),
        (torch.bfloat16, lambda x: x - 1, True),
        (torch.bfloat16, lambda x: x - 1.001, False),  # which may become 1
        (torch.float16, lambda x: x - 1, False),  # of numbers that may not have been rounded before
        (torch.float16, lambda x: x > 1, False),
    ],
)
def test_what_is_rounded_once_is_not_excused_by_what_it_reads(
    dtype: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor], wrong: bool
) -> None:
    x = torch.ones(50, dtype=dtype)
    for given, by, is_off in ((x, 0.0, False), (x, torch.finfo(dtype).eps, wrong), (x * 4, 0.5, True)):
        right = function(given)
        assert is_wrong(function, [given], right ^ (by > 0) if right.dtype is torch.bool else right + by) == is_off


def test_what_rounding_at_random_explains() -> None:
    """Terms that cancel and a comparison near a tie; no error of a single rounding. Random numbers are the run's."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = aten.sort.default((x + 1e4) - 1e4)[0]
        return largest, (x.log() > 0) + 0, x * 2, (x.exp() > 9) + 0, torch.rand_like(x) * 2

    x = torch.ones(50)
    module = make_fx(function)(x)
    (given,) = module.graph.find_nodes(op="placeholder")
    (random,) = module.graph.find_nodes(op="call_function", target=aten.rand_like.default)
    outputs = module.graph.output_node().all_input_nodes
    rows = {value_names(node)[0]: Row(node.name, "") for node in outputs}
    graph, run = SimpleNamespace(module=module, regions=[]), SimpleNamespace()
    for error, explained in ((0, set(rows)), (1e-3, {"sort__0", "add_1"}), (1, {"add_1"})):
        results = [x + error, x.long() * 0 + (error > 0), x * 2 + error, x.long() * 0 + (error > 0), x * 0.6 + error]
        run.values = {given: x, random: x * 0.3, **dict(zip(outputs, results, strict=True))}
        assert set(explained_by_rounding(graph, run, None, rows)) == explained  # type: ignore[arg-type]
