"""Which view nodes run in PyTorch, how tensors are laid out in memory, and the order of regions and nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_same_as_eager, counted
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.exporter.translate import RegionInput, RegionOutput
from dynamo_backends.graphs.aliases import IN_PYTORCH, read_memory_of_owners, separate_returned_views
from dynamo_backends.graphs.artifacts import region_name
from dynamo_backends.graphs.layout import ROW_MAJOR, Layout, layout_of
from dynamo_backends.partition.regions import Region, Support, assemble, attributes_of, region_graph, split_graph

aten = torch.ops.aten


def captured(function: Callable[..., object], *args: torch.Tensor, symbolic: bool = False) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args)


def targets(module: fx.GraphModule, *, in_pytorch: bool) -> list[str]:
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    chosen = [node.target for node in calls if (IN_PYTORCH in node.meta) is in_pytorch]
    return [getattr(target, "overloadpacket", target).__name__ for target in chosen]


def assembled(
    module: fx.GraphModule, regions: list[Region], called: list[Callable[..., object]]
) -> Callable[[list[object]], object]:
    """A graph whose regions are calls."""
    names = {region_name(region.index): run for region, run in zip(regions, called, strict=True)}
    return fx.GraphModule({**attributes_of(module), **names}, assemble(module, regions))


# Views


def test_a_returned_view_of_an_argument_is_taken_in_pytorch() -> None:
    module = captured(lambda x: (x.t(), x.exp()), torch.randn(2, 3))
    assert separate_returned_views(module) == 1
    assert targets(module, in_pytorch=True) == ["t"]
    assert targets(module, in_pytorch=False) == ["exp"]


def test_results_that_share_memory_are_views_of_one() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y.t(), y.t()[1:]

    module = captured(function, torch.randn(2, 3))
    assert separate_returned_views(module) == 3
    assert targets(module, in_pytorch=True) == ["t", "t", "slice"]
    first, second, third = module(torch.randn(2, 3))
    assert first.data_ptr() == second.data_ptr() and third.data_ptr() == first.data_ptr() + 4


def test_a_view_that_is_returned_before_what_it_views() -> None:
    """It is a view of the one that is returned, and nothing reads the one it was of."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        t = y.t()
        return t[1:], t, y

    module = captured(function, torch.randn(2, 3))
    assert separate_returned_views(module) == 2
    assert targets(module, in_pytorch=True) == ["t", "slice"]
    assert targets(module, in_pytorch=False) == ["exp"]


def test_two_views_of_what_is_not_returned_share_memory_too() -> None:
    module = captured(lambda x: (lambda y: (y.t(), y.view(-1)))(x.exp()), torch.randn(2, 3))
    assert separate_returned_views(module) == 2
    assert targets(module, in_pytorch=False) == ["exp"]


def test_the_only_view_of_a_result_stays_in_its_region() -> None:
    module = captured(lambda x: (x.exp().t(), x.sin()), torch.randn(2, 3))
    assert separate_returned_views(module) == 0
    assert targets(module, in_pytorch=True) == []


def test_parts_of_one_tensor_share_its_memory() -> None:
    """They are views through the operator that returns several."""
    module = captured(lambda x: tuple(x.exp().split(1)), torch.randn(2, 3))
    assert separate_returned_views(module) >= 2
    assert targets(module, in_pytorch=True)[0] == "split"


def test_other_users_of_a_returned_view_keep_their_own() -> None:
    """So that no region is cut in two."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        t = y.t()
        return y, t, t.sin()

    module = captured(function, torch.randn(2, 3))
    assert separate_returned_views(module) == 1
    assert targets(module, in_pytorch=True) == ["t"]
    assert targets(module, in_pytorch=False) == ["exp", "t", "sin"]
    (sin,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert IN_PYTORCH not in sin.args[0].meta


# as_strided


def strided(make: Callable[[torch.Tensor], torch.Tensor], *rest: object) -> fx.GraphModule:
    return captured(lambda x: torch.as_strided(make(x), *rest), torch.randn(4, 6))


def test_as_strided_reads_the_memory_of_the_owner() -> None:
    module = strided(lambda x: x.exp().t(), (2, 2), (1, 3), 1)
    assert read_memory_of_owners(module) == 1
    x = torch.randn(4, 6)
    assert torch.equal(module(x), torch.as_strided(x.exp().t(), (2, 2), (1, 3), 1))
    assert targets(module, in_pytorch=True) == []
    assert targets(module, in_pytorch=False) == ["exp", "as_strided"]


def test_as_strided_reads_permuted_memory_in_its_order() -> None:
    def permuted(x: torch.Tensor) -> torch.Tensor:
        return x.t().exp()  # it has the strides of x.t()

    module = strided(permuted, (3, 2), (2, 5))
    assert read_memory_of_owners(module) == 1
    assert targets(module, in_pytorch=False) == ["t", "exp", "permute", "as_strided"]
    x = torch.randn(4, 6)
    assert torch.equal(module(x), torch.as_strided(permuted(x), (3, 2), (2, 5)))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.view_as_complex(x.exp().view(3, 4, 2)),
        lambda x: x.exp().view(torch.int32),
        lambda x: (x.exp().view(torch.int32) + 0).view(torch.float32),
    ],
)
def test_as_strided_reads_memory_as_the_dtype_of_its_argument(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same_as_eager(lambda x: view(x).as_strided((3,), (2,), 1), torch.randn(4, 6))


def test_as_strided_of_permuted_memory_runs_on_onnx() -> None:
    assert_same_as_eager(lambda x: torch.as_strided(x.t().exp(), (3, 2), (2, 5)) * 2, torch.randn(4, 6))
    assert counted("nodes_in_pytorch") == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[1:],
        lambda x: torch.empty_strided((4, 6), (12, 2)).copy_(x),
        lambda x: torch.empty_strided((4, 6), (7, 1)).copy_(x),
    ],
    ids=["argument", "view of an argument", "every second element", "gaps between rows"],
)
def test_as_strided_of_unknown_memory_runs_in_pytorch(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = strided(make, (2, 2), (1, 1))
    assert read_memory_of_owners(module) == 0
    (node,) = module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert IN_PYTORCH in node.meta


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "value",
    [lambda: torch.empty(5, 6)[1:], lambda: torch.eye(4).to_sparse_csr(), lambda: None],
    ids=["begins before the tensor", "not strided", "no tensor"],
)
def test_as_strided_of_other_memory_runs_in_pytorch(value: Callable[[], torch.Tensor | None]) -> None:
    """An operator of another package may return a part of its memory, which its schema does not tell."""
    module = strided(lambda x: x.exp(), (2, 2), (1, 1), 0)
    (exp,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    exp.meta["val"] = value()
    assert read_memory_of_owners(module) == 0
    (node,) = module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert IN_PYTORCH in node.meta


def test_each_as_strided_is_looked_at() -> None:
    """One that runs in PyTorch, one that reads the right memory as it is, and one that does not."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.exp()
        return [torch.as_strided(source, (2, 2), (1, 3)) for source in (x, y, y.t())]

    module = captured(function, torch.randn(4, 6))
    assert read_memory_of_owners(module) == 1
    nodes = module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert [IN_PYTORCH in node.meta for node in nodes] == [True, False, False]
    assert nodes[1].args[0] is nodes[2].args[0]


# Layout


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.empty(2, 3), ROW_MAJOR),
        (torch.empty(()), ROW_MAJOR),
        (torch.empty(3, 2).t(), Layout(permutation=(1, 0))),
        (torch.empty(2, 5, 6, 3).permute(0, 3, 1, 2), Layout(permutation=(0, 2, 3, 1))),
        (torch.empty_strided((2, 1, 3), (3, 99, 1)), ROW_MAJOR),
        (torch.empty_strided((1, 1), (7, 9)), ROW_MAJOR),
        (torch.empty_strided((3, 1, 2), (1, 5, 3)), Layout(permutation=(1, 2, 0))),
        (torch.empty_strided((0, 3), (1, 9)), ROW_MAJOR),
        (torch.empty_strided((2, 3), (0, 1)), Layout(strides=(0, 1))),
        (torch.empty(4, 6)[:, ::2], Layout(strides=(6, 2))),
        (torch.empty(4, 6)[:, :3], Layout(strides=(6, 1))),
        (torch.empty(4, 1, 6)[..., :3], Layout(strides=(6, 6, 1))),
    ],
    ids=lambda item: str((tuple(item.shape), item.stride())) if isinstance(item, torch.Tensor) else "",
)
def test_layouts(tensor: torch.Tensor, layout: Layout) -> None:
    assert layout_of(tensor) == layout
    assert not layout_of(tensor).is_symbolic
    if layout.permutation is not None:
        assert tensor.permute(layout.permutation).is_contiguous()


def test_layouts_of_symbolic_sizes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp(), x.t().exp(), x.exp()[:, :2], x.exp().t()

    nodes = captured(function, torch.randn(4, 6), symbolic=True).graph.output_node().args[0]
    assert isinstance(nodes, (list, tuple))
    row_major, memory, slices, transposed = [layout_of(node.meta["val"]) for node in nodes]  # type: ignore[union-attr]
    assert row_major == ROW_MAJOR
    assert memory == transposed == Layout(permutation=(1, 0))
    assert slices.is_symbolic


def test_a_layout_holds_for_all_sizes() -> None:
    """To look at sizes puts no guards on them: the graph would be compiled anew for others."""
    module = captured(lambda x: x.permute(2, 0, 1).exp(), torch.randn(4, 5, 6), symbolic=True)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    value = node.meta["val"]
    guards = list(value.fake_mode.shape_env.guards)
    assert layout_of(value) == Layout(permutation=(1, 2, 0))
    assert value.fake_mode.shape_env.guards == guards


def test_layouts_of_sizes_that_only_the_data_tells() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.new_zeros(x.nonzero().shape[0], 3)
        return rows, rows.t(), rows[:, :2], x.nonzero()

    nodes = captured(function, torch.ones(2, 3), symbolic=True).graph.output_node().args[0]
    assert isinstance(nodes, (list, tuple))
    rows, transposed, sliced, found = [layout_of(node.meta["val"]) for node in nodes]  # type: ignore[union-attr]
    assert rows == ROW_MAJOR
    assert transposed == Layout(permutation=(1, 0))
    assert sliced.is_symbolic
    assert found.is_symbolic, "nonzero's columns lie one after another, and how far apart the data tells"


# Assembly


def region_of(index: int, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Region:
    layouts = [ROW_MAJOR] * len(outputs)
    return Region(
        index, nodes, [RegionInput(node) for node in inputs], [RegionOutput(node) for node in outputs], layouts
    )


def test_regions_take_and_return_what_crosses_their_borders() -> None:
    """Each value once; what a region alone reads stays in it, or ONNX Runtime could not fuse it away."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.exp() * x
        ordered, _ = wide.neg().sort()
        return ordered.sin() + wide, ordered.cos() + y

    module = captured(function, torch.ones(2), torch.ones(2))
    split = split_graph(module, Support(18, ("CPUExecutionProvider",)), {})
    borders = [([item.node.name for item in r.inputs], [item.node.name for item in r.outputs]) for r in split.regions]
    assert borders == [(["x_1"], ["mul", "neg"]), (["getitem", "mul", "y_1"], ["add", "add_1"])]
    assert [node.name for node in split.in_pytorch] == ["sort", "getitem", "getitem_1"]
    assert [[node.name for node in region.operators] for region in split.regions] == [
        ["exp", "mul", "neg"],
        ["sin", "add", "cos", "add_1"],
    ]


def test_writes_to_arguments_come_after_all_reads() -> None:
    """AOTAutograd puts them last; a region that reads the old value may be assembled around them."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        early = x.exp()
        late = y.sin() + x
        x.copy_(early)
        return late

    module = captured(function, torch.ones(2), torch.ones(2))
    names = {node.name: node for node in module.graph.nodes}
    x, y = [node for node in module.graph.nodes if node.op == "placeholder"]
    nodes = [names["exp"], names["sin"], names["add"]]
    region = region_of(0, nodes, [x, y], [names["exp"], names["add"]])
    run = assembled(module, [region], [fx.GraphModule(module, region_graph(region))])
    first, second = torch.ones(2), torch.ones(2)
    late = run([first, second])
    torch.testing.assert_close(late, torch.ones(2).sin() + 1)
    torch.testing.assert_close(first, torch.ones(2).exp())


def test_regions_run_as_close_to_the_order_of_the_graph_as_they_can() -> None:
    ran: list[int] = []
    module = captured(lambda x: (x.exp(), x.sin(), x.cos(), x.tanh()), torch.ones(2))
    (x,) = module.graph.find_nodes(op="placeholder")
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    regions = [region_of(i, [node], [x], [node]) for i, node in enumerate(calls)]

    def recorder(region: Region) -> Callable[..., object]:
        run = fx.GraphModule(module, region_graph(region))

        def call(*args: object) -> object:
            ran.append(region.index)
            return run(*args)

        return call

    argument = torch.ones(2)
    results = assembled(module, regions, [recorder(region) for region in regions])([argument])
    assert ran == [0, 1, 2, 3]
    torch.testing.assert_close(results, module(argument))


def test_draws_keep_their_order_though_a_region_has_to_wait() -> None:
    """The first draw needs the region, the region needs what comes after the second draw."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.exp()
        first = torch.rand_like(wide)
        second = torch.rand_like(x)
        return first, second, wide + x.neg()

    module = captured(function, torch.ones(2))
    names = {node.name: node for node in module.graph.nodes}
    (x,) = module.graph.find_nodes(op="placeholder")
    region = region_of(0, [names["exp"], names["add"]], [x, names["neg"]], [names["exp"], names["add"]])
    run = assembled(module, [region], [fx.GraphModule(module, region_graph(region))])
    torch.manual_seed(0)
    expected = module(torch.ones(2))
    torch.manual_seed(0)
    torch.testing.assert_close(run([torch.ones(2)]), expected)
