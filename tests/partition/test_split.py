"""Nodes form as few regions as their order allows, in linear time."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from dynamo_backends.errors import Kind, Reason
from dynamo_backends.graphs.artifacts import Region, Split, region_name
from dynamo_backends.partition.regions import Support, assemble, attributes_of, split_graph

aten = torch.ops.aten

_REASON = Reason(Kind.NO_TRANSLATION, "a test wants it there")


class _Chosen(Support):
    """A support check that sends chosen nodes to PyTorch."""

    def __init__(self, in_pytorch: set[fx.Node]) -> None:
        super().__init__(23, ["CPUExecutionProvider"])
        self.in_pytorch = in_pytorch

    def reason_against(self, node: fx.Node) -> Reason | None:
        return _REASON if node in self.in_pytorch else None


class _Theirs(OperatorSupportBase):
    def __init__(self, in_pytorch: set[fx.Node]) -> None:
        self.in_pytorch = in_pytorch

    def is_node_supported(self, submodules: object, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.in_pytorch


def random_graph(seed: int, size: int = 60) -> tuple[fx.GraphModule, set[fx.Node]]:
    """A graph of additions and sorts, which have two results, and which of its nodes run in PyTorch."""
    draw = random.Random(seed)
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = value = torch.ones(2)
    in_pytorch: set[fx.Node] = set()
    for _ in range(size):
        first, second = (draw.choice(nodes[-draw.choice((3, 10, 100)) :]) for _ in range(2))
        new = [graph.call_function(aten.add.Tensor, (first, second))]
        new[0].meta["val"] = value
        if draw.random() < 0.2:
            new.append(graph.call_function(aten.sort.default, (new[0],)))
            new += [graph.call_function(operator.getitem, (new[1], i)) for i in range(2)]
            new[1].meta["val"] = (value, value)
            for item in new[2:]:
                item.meta["val"] = value
        for group in (new[:1], new[1:]):
            if draw.random() < 0.2:
                in_pytorch.update(group)
        nodes += [node for node in new if node.target is not aten.sort.default]
    results = [node for node in nodes[1:] if not node.users and draw.random() < 0.9]
    graph.output(tuple(results + draw.sample(nodes[1:], 3)))
    return fx.GraphModule(torch.nn.Module(), graph), in_pytorch


def runnable(region: Region) -> object:
    """Computes a region's outputs in PyTorch."""

    def run(arguments: list[torch.Tensor]) -> list[object]:
        values: dict[fx.Node, object] = {item.node: arg for item, arg in zip(region.inputs, arguments, strict=True)}
        for node in region.nodes:
            args = fx.map_arg(node.args, values.__getitem__)
            values[node] = node.target(*args)  # type: ignore[operator]
        return [values[item.node] for item in region.outputs]

    return run


def split(seed: int) -> tuple[fx.GraphModule, Split, set[fx.Node]]:
    module, in_pytorch = random_graph(seed)
    return module, split_graph(module, _Chosen(in_pytorch), {}), in_pytorch


@pytest.mark.parametrize("seed", range(40))
def test_as_few_regions_as_pytorchs_partitioner_finds(seed: int) -> None:
    module, ours, in_pytorch = split(seed)
    alone = {node for node in ours.in_pytorch if node not in in_pytorch}  # a region of views alone
    theirs = CapabilityBasedPartitioner(module, _Theirs(in_pytorch | alone), allows_single_node_partition=True)
    assert 0 < len(ours.regions) <= len(theirs.propose_partitions())


@pytest.mark.parametrize("seed", range(40))
def test_each_node_is_in_one_region_or_in_pytorch_and_all_can_run(seed: int) -> None:
    module, ours, _ = split(seed)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    placed = [node for region in ours.regions for node in region.nodes] + list(ours.in_pytorch)
    assert sorted(placed, key=calls.index) == calls
    for region in ours.regions:
        for node in region.nodes:
            if node.target is operator.getitem:
                assert node.args[0] in region.nodes
    called = {region_name(region.index): _boxed(runnable(region)) for region in ours.regions}
    assembled = fx.GraphModule({**attributes_of(module), **called}, assemble(module, ours.regions))
    x = torch.tensor([1.0, 2.0])
    expected, found = module(x), assembled([x])
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def _boxed(run: object) -> object:
    return lambda *arguments: run(list(arguments))  # type: ignore[operator]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_view_of_an_argument_that_only_pytorch_reads_is_not_copied_by_a_session(is_shared: bool) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = weight.transpose(0, 1)
        return (x.relu() @ turned).sin(), turned.exp() if is_shared else x.exp()

    module = make_fx(function)(torch.ones(3, 3), torch.ones(3, 3))
    nodes = {node.target: node for node in module.graph.nodes}
    found = split_graph(module, _Chosen({nodes[aten.mm.default]}), {})
    assert (nodes[aten.transpose.int] in found.in_pytorch) is not is_shared
