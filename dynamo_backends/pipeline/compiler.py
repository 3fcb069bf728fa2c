"""Runs our passes on FX graphs, and lowers the graphs to Programs.

``pipeline/runners.py`` imports this module only to compile a graph: it imports all of the exporter, which takes half a
second. A graph from the cache runs without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.engine.manager import Checker
from passes.engine.results import PassResult

from ..graphs import aot
from ..graphs.aliases import read_memory_of_owners, separate_returned_views
from ..graphs.artifacts import CompiledGraph, GraphName
from ..graphs.in_place import mark_partial_writes
from ..numerics.exact import attribute
from ..options import Options
from ..partition.pass_verification import GraphChecker, can_be_verified, evaluate, not_verified
from ..partition.regions import InPytorch, Support
from ..weights.frozen_session import Weight
from .lowering import Lowering, OnnxLowering, PostGradGraph
from .observer import Observer
from .stage_passes import StagePasses


class Compiler:
    """Compiles graphs.

    Args:
        options, observer, lowering: see ``Runners``.
        in_pytorch: why graphs run in PyTorch as a whole; empty if they do not.
    """

    def __init__(
        self, options: Options, observer: Observer, lowering: Lowering | None, *, in_pytorch: str = ""
    ) -> None:
        self._options = options
        self._observer = observer
        support = Support(options.opset, options.providers)
        if in_pytorch:
            support = InPytorch(options.opset, options.providers, in_pytorch)
        self._passes = StagePasses(options, observer, support)
        self._lowering = lowering or OnnxLowering(options, observer, support, self._passes)

    def pre_grad(self, graph: GraphName, module: fx.GraphModule, example_inputs: Sequence[object]) -> list[PassResult]:
        """Runs the stage ``pre_grad`` on one of Dynamo's graphs, in place."""
        checker = GraphChecker(example_inputs) if self._options.verify_passes else None
        return self._passes.run("pre_grad", graph, module, checker=checker)

    def joint(self, graph: GraphName, module: fx.GraphModule, arguments: Sequence[object] | None) -> None:
        """Runs the stage ``joint`` on a joint graph, in place; ``arguments`` are those of Dynamo's graph, if known."""
        values = aot.real_arguments(module, arguments) if self._options.verify_passes else None
        if self._options.verify_passes and values is None:
            not_verified("an argument is opaque, and its value is not known")
        self._joint(graph, module, GraphChecker(values) if values is not None else None)

    def _joint(self, graph: GraphName, module: fx.GraphModule, checker: Checker | None) -> list[PassResult]:
        results = self._passes.run("joint", graph, module, checker=checker)
        self._observer.passes(GraphName(graph.index), results)
        read_memory_of_owners(module)  # before the partitioner, which may save a view without its base
        self._observer.stage("joint", GraphName(graph.index), module)
        return results

    def aten(
        self,
        name: GraphName,
        module: fx.GraphModule,
        arguments: Sequence[object] | None,
        weights: Mapping[fx.Node, Weight],
        *,
        is_joint: bool,
    ) -> CompiledGraph:
        """Runs the stages from ``aten`` to ``session``.

        Args:
            name: of the graph.
            module: the graph; changed in place.
            arguments: real values of its placeholders; ``None`` if they are not known.
            weights: the arguments that may be constants, by placeholder.
            is_joint: whether the joint passes run too.
        """
        is_checked = self._options.verify_passes and arguments is not None
        checker = GraphChecker(arguments) if is_checked else None  # type: ignore[arg-type]
        joint = self._joint(name, module, checker) if is_joint else []
        self._observer.stage("aten", name, module)
        _complete_meta(module)
        passes = self._passes.run("post_grad", name, module, checker=checker)
        read_memory_of_owners(module)
        separate_returned_views(module)
        self._observer.stage("post_grad", name, module)
        is_verified = checker is not None and can_be_verified(module)
        evaluation = evaluate(module, arguments) if is_verified else None  # type: ignore[arg-type]
        is_undone = any(result.undone for result in (*joint, *passes))
        writes = mark_partial_writes(module)
        graph = PostGradGraph(name, module, passes, evaluation, weights, writes, is_undone=is_undone)
        return self._lowering.compile(graph)


def _complete_meta(module: fx.GraphModule) -> None:
    """Sets ``meta["val"]`` of constants that tracing lifted into attributes."""
    for node in module.graph.find_nodes(op="get_attr"):
        if "val" not in node.meta:
            value = attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value
