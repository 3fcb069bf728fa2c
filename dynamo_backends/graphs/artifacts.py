"""Data that the stages exchange: names of graphs, regions, and the split of a graph, which says what runs where."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable

import torch
from torch import fx

from ..errors import Reason
from .in_place import is_write_back
from .layout import Layout

Runner = Callable[[list[object]], object]
"""A compiled graph. It takes its arguments boxed, in one list that it empties, and returns the results."""


@dataclasses.dataclass(frozen=True)
class GraphName:
    """The number of a Dynamo graph, and the direction ``forward``, ``backward`` or ``inference``; ``""`` before
    AOTAutograd.

    ``frame`` is the number of the Python frame, the same when it is compiled again; ``None`` if it is not known.
    """

    index: int
    direction: str = ""
    frame: int | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return f"graph {self.index} {self.direction}".rstrip()


@dataclasses.dataclass(frozen=True)
class RegionOutput:
    """A result of a region's model, and the order of its dimensions in memory.

    Attributes:
        node: the FX node.
        permutation: ``None`` if it is row-major. Else the model returns it transposed by this, named
            ``<node>__memory``; the caller transposes back without a copy, and so gets eager's strides.
        index: which of the node's results, if it has several.
    """

    node: fx.Node
    permutation: tuple[int, ...] | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class RegionInput:
    """An argument of a region's model, and the order of its dimensions in memory, as in ``RegionOutput``."""

    node: fx.Node
    permutation: tuple[int, ...] | None = None


def operator_name(node: fx.Node) -> str:
    """The name of what a node calls: ``aten.add.Tensor``, ``operator.mul``, ``math.trunc``."""
    target = node.target
    name = getattr(target, "__qualname__", None)
    if name is None or isinstance(target, (str, torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    return f"{target.__module__.lstrip('_')}.{name}"


def attribute(module: torch.nn.Module, name: str) -> object:
    """What a ``get_attr`` node reads: ``name`` may lead through submodules."""
    return operator.attrgetter(name)(module)


def is_operator(call: fx.Node) -> bool:
    """Whether a call is an operator of the model: not ``getitem``, which selects one of several results, and not what
    AOTAutograd adds to copy a new value into an argument."""
    return call.target is not operator.getitem and not is_write_back(call)


@dataclasses.dataclass
class Region:
    """Nodes of one graph that run as one ONNX model.

    Attributes:
        index: position among the graph's regions.
        nodes: in execution order.
        inputs: nodes outside of the region that it reads: tensors and symbolic integers.
        outputs: nodes of the region that other nodes read.
        layouts: the memory layout of each output in eager.
    """

    index: int
    nodes: list[fx.Node]
    inputs: list[RegionInput]
    outputs: list[RegionOutput]
    layouts: list[Layout]

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes that are operators, see ``is_operator``."""
        return [node for node in self.nodes if is_operator(node)]


@dataclasses.dataclass
class Split:
    """The regions of a graph, and the reason for each node that runs in PyTorch."""

    regions: list[Region]
    in_pytorch: dict[fx.Node, Reason]

    @functools.cached_property
    def coverage(self) -> Coverage:
        """How much of the graph runs on ONNX Runtime."""
        in_pytorch = {node: reason for node, reason in self.in_pytorch.items() if is_operator(node)}
        return Coverage(sum(len(region.operators) for region in self.regions), in_pytorch)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a graph runs on ONNX Runtime; counters, log, manifest and tables all use it.

    Attributes:
        on_onnx: the number of operators on ONNX Runtime.
        in_pytorch: the operators in PyTorch, each with its reason.
    """

    on_onnx: int
    in_pytorch: dict[fx.Node, Reason]

    @property
    def total(self) -> int:
        """The number of operators of the graph."""
        return self.on_onnx + len(self.in_pytorch)

    @property
    def share(self) -> float:
        """The share of operators on ONNX Runtime, 0 to 1; 1 if there are no operators."""
        return self.on_onnx / self.total if self.total else 1.0

    @property
    def fallbacks(self) -> collections.Counter[tuple[str, Reason]]:
        """The number of operators in PyTorch by name (``aten.sort.default``) and reason."""
        return collections.Counter((operator_name(node), reason) for node, reason in self.in_pytorch.items())


def region_name(index: int) -> str:
    """The name of a region in the code of its graph."""
    return f"region_{index}"
