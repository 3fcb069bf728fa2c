"""Every stage of a graph, in order, from ATen operators to a callable that runs them on ONNX Runtime. Read this first.

Each stage is a call that takes data and returns data::

    joint                    passes on forward and backward together        run_joint
    aten, post_grad          passes on one direction                        run_post_grad -> PostGradGraph
    regions                  which nodes run on ONNX Runtime, and why not   split_graph   -> Split
    onnx, onnx_optimized     a region as a model, passes on it              emit          -> EmittedRegion
                             the graph, in which each region is one call    link          -> Program
    session                  the sessions, and the callable                 load          -> LoadedProgram

What cannot be translated, is rejected by ONNX Runtime, or is faster in PyTorch comes back as data, and the graph is
split again without it (``compile_graph``). An export is ``run_post_grad`` and ``emit``; ``explain`` stops after
``split_graph``, and ``fx_debug`` after ``run_post_grad``. ``pipeline.pipeline`` has what comes before: Dynamo's graph,
the stage ``pre_grad``, and AOTAutograd. Observers are told of each stage from here, and not by what is called.

``pipeline.runners`` imports this module only to compile a graph: it imports all of the exporter, which takes half a
second. A graph from the cache runs without it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.engine.manager import Checker
from passes.engine.results import PassResult

from ..errors import Kind, Reason, TranslationError, UnsupportedOperatorError
from ..events import count
from ..graphs.aliases import read_memory_of_owners, separate_returned_views
from ..graphs.artifacts import GraphName, Region, Split, attribute, operator_name
from ..graphs.example_values import real_arguments
from ..graphs.in_place import mark_partial_writes
from ..graphs.locations import where
from ..options import Options
from ..partition.coverage import CoverageCounts, warn_of_unused_converters
from ..partition.faster_in_pytorch import copied_writes, products_of_experts
from ..partition.pass_verification import GraphChecker, can_be_verified, evaluate, not_verified
from ..partition.program import LoadedProgram, Program, load, warn_of_rejections
from ..partition.regions import InPytorch, Support, all_nodes, assemble, attributes_of, rejected_nodes, split_graph
from ..runtime.integer_kernels import needs_exact_mixed_signs
from ..runtime.system_memory import give_back
from ..weights.region_session import Weight
from .emission import emit
from .observer import Observer
from .product_kernels import UNKNOWN, ProductKernel, product_kernels
from .stage_data import CompiledGraph, CompiledRegion, EmittedRegion, PostGradGraph
from .stage_passes import StagePasses

MAXIMUM_SPLITS = 8
"""How often a graph is split without single nodes. After that, rejected regions run in PyTorch as a whole."""


class Context:
    """What the graphs of one backend share.

    Args:
        options: of the backend.
        observer: is told of each stage.
        in_pytorch: why graphs run in PyTorch as a whole; empty if they do not.

    Attributes:
        support: which nodes ONNX Runtime can run.
        passes: those of each stage.
    """

    def __init__(self, options: Options, observer: Observer, *, in_pytorch: str = "") -> None:
        self.options = options
        self.observer = observer
        must_run_on_onnx = options.fallback == "error"
        self.support = Support(options.opset, options.providers, must_run_on_onnx=must_run_on_onnx)
        if in_pytorch:
            self.support = InPytorch(options.opset, options.providers, in_pytorch)
        self.passes = StagePasses(options, observer, self.support)


def run_pre_grad(
    context: Context, name: GraphName, module: fx.GraphModule, example_inputs: Sequence[object]
) -> list[PassResult]:
    """Runs the passes of ``pre_grad`` on one of Dynamo's graphs, in place."""
    checker = GraphChecker(example_inputs) if context.options.verify_passes else None
    return context.passes.run("pre_grad", name, module, checker=checker)


def run_joint(
    context: Context, name: GraphName, module: fx.GraphModule, arguments: Sequence[object] | None
) -> list[PassResult]:
    """Runs the passes of ``joint``, in place; ``arguments`` are those of Dynamo's graph, if they are known."""
    values = real_arguments(module, arguments) if context.options.verify_passes else None
    if context.options.verify_passes and values is None:
        not_verified("an argument is opaque, and its value is not known")
    return _run_joint(context, name, module, GraphChecker(values) if values is not None else None)


def _run_joint(context: Context, name: GraphName, module: fx.GraphModule, checker: Checker | None) -> list[PassResult]:
    results = context.passes.run("joint", name, module, checker=checker)
    context.observer.passes(GraphName(name.index), results)
    read_memory_of_owners(module)  # before the partitioner, which may save a view without its base
    context.observer.stage("joint", GraphName(name.index), module)
    return results


def run_post_grad(
    context: Context,
    name: GraphName,
    module: fx.GraphModule,
    arguments: Sequence[object] | None,
    weights: Mapping[fx.Node, Weight],
    *,
    is_joint: bool,
) -> PostGradGraph:
    """Runs the passes of ``joint``, if ``is_joint``, and of ``post_grad``; see ``compile_aten``."""
    is_checked = context.options.verify_passes and arguments is not None
    checker = GraphChecker(arguments) if is_checked else None  # type: ignore[arg-type]
    joint = _run_joint(context, name, module, checker) if is_joint else []
    context.observer.stage("aten", name, module)
    _complete_meta(module)
    passes = context.passes.run("post_grad", name, module, checker=checker)
    read_memory_of_owners(module)
    separate_returned_views(module)
    context.observer.stage("post_grad", name, module)
    is_verified = checker is not None and can_be_verified(module)
    evaluation = evaluate(module, arguments) if is_verified else None  # type: ignore[arg-type]
    is_undone = any(result.undone for result in (*joint, *passes))
    writes = mark_partial_writes(module)
    return PostGradGraph(name, module, passes, evaluation, weights, writes, is_undone=is_undone)


def _complete_meta(module: fx.GraphModule) -> None:
    """Sets ``meta["val"]`` of constants that tracing lifted into attributes."""
    for node in module.graph.find_nodes(op="get_attr"):
        if "val" not in node.meta:
            value = attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value


def compile_graph(context: Context, graph: PostGradGraph) -> tuple[CompiledGraph, LoadedProgram]:
    """Runs the stages from ``regions`` to ``session``, until nothing is rejected.

    Raises:
        UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
    """
    moved = products_of_experts(graph.module.graph, graph.weights)  # to PyTorch, with reasons
    attempts = 0
    program: Program | None = None
    loaded: LoadedProgram | None = None
    while True:  # terminates: each attempt but the last moves more nodes to PyTorch
        attempts += 1
        with graph.timed("split"):
            split = split_graph(graph.module, context.support, moved)
        _check_fallback(context.options, split)
        emitted, more = _emit_all(context, graph, split)
        if not more:
            program = link(graph, split, emitted)
            with graph.timed("session"):
                loaded = load(program, graph.name, _by_position(graph), context.options)
            more = _rejected(context, graph.name, emitted, loaded)
        if not more:
            break
        if attempts > MAXIMUM_SPLITS:
            more = {node: reason for region in split.regions for node, reason in _of_region(region, more).items()}
        assert not more.keys() <= moved.keys(), "a region has nodes that run in PyTorch"
        moved |= more
        if loaded is not None:
            program = loaded = None
            gc.collect()  # its sessions are freed before the next are made; a graph module is in a reference cycle
    assert program is not None and loaded is not None
    warn_of_rejections(program, graph.name, loaded)
    warn_of_unused_converters(split)
    compiled = _compiled(context, graph, split, emitted, program, loaded)
    give_back()
    return compiled, loaded


def _of_region(region: Region, moved: Mapping[fx.Node, Reason]) -> dict[fx.Node, Reason]:
    """All nodes of a region, if one of them moves to PyTorch."""
    reason = next((moved[node] for node in region.nodes if node in moved), None)
    return {} if reason is None else dict.fromkeys(region.nodes, reason)


def run_in_pytorch(context: Context, graph: PostGradGraph) -> tuple[CompiledGraph, LoadedProgram]:
    """PyTorch runs all of a graph, for ``fx_debug`` and ``explain``."""
    split = Split([], {})
    program = link(graph, split, [])
    compiled = CompiledGraph(graph.name, graph.module, split, [], program, graph.passes)
    return compiled, load(program, graph.name, {}, context.options)


def _check_fallback(options: Options, split: Split) -> None:
    for node, reason in split.coverage.in_pytorch.items() if options.fallback == "error" else ():
        if not reason.by_design:
            raise UnsupportedOperatorError(node.name, operator_name(node), where(node), reason)


def _emit_all(
    context: Context, graph: PostGradGraph, split: Split
) -> tuple[list[EmittedRegion], dict[fx.Node, Reason]]:
    """The regions as models, and the nodes that must run in PyTorch: no translation, a wrong kernel, copied memory."""
    options, observer = context.options, context.observer
    emitted: list[EmittedRegion] = []
    moved: dict[fx.Node, Reason] = {}
    for region in split.regions:
        try:
            item = emit(
                graph,
                region,
                options,
                context.passes,
                is_only=len(split.regions) == 1,
                checks_results=options.check_providers and not observer.watches,
            )
        except TranslationError as error:
            moved |= rejected_nodes(region, error, context.support) or all_nodes(region, error)
            count("rejected_regions")
            continue
        emitted.append(item)
        if item.fault is not None:
            observer.rejected(graph.name, region.index, item.optimized_model, item.fault)
            moved |= rejected_nodes(region, item.fault, context.support)
            count("rejected_regions")
    return emitted, moved | copied_writes(
        graph.writes, [(item.region, item.program.executable.outputs) for item in emitted]
    )


def link(graph: PostGradGraph, split: Split, emitted: Sequence[EmittedRegion]) -> Program:
    """The Program of a graph."""
    varies = ""
    if graph.is_undone or any(result.undone for item in emitted for result in item.passes):
        varies = "a pass that was undone"
    if any(reason.kind is Kind.OUT_OF_MEMORY for reason in split.in_pytorch.values()):
        varies = "memory ran out"
    return Program(
        assemble(graph.module, split.regions),
        attributes_of(graph.module),
        tuple(item.program for item in emitted),
        CoverageCounts.of(split),
        varies,
        mixed_signs=any(needs_exact_mixed_signs(item.optimized_model) for item in emitted),
    )


def _by_position(graph: PostGradGraph) -> dict[int, Weight]:
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    return {i: graph.weights[node] for i, node in enumerate(placeholders) if node in graph.weights}


def _rejected(
    context: Context, name: GraphName, emitted: Sequence[EmittedRegion], loaded: LoadedProgram
) -> dict[fx.Node, Reason]:
    """The nodes that ONNX Runtime rejected, so that the rest of their regions runs on the first provider.

    If none is to blame, the region runs on the next provider, or in PyTorch. With ``fallback="error"`` the next
    provider runs it if one does, because a node in PyTorch is an error.
    """
    moved: dict[fx.Node, Reason] = {}
    for item, region in zip(emitted, loaded.regions, strict=True):
        if not region.rejections or (region.session is not None and context.options.fallback == "error"):
            continue
        error, model = region.rejections[-1], item.optimized_model
        nodes = rejected_nodes(item.region, region.rejections[0], context.support)
        if nodes or region.session is None:
            context.observer.rejected(name, item.region.index, model, error)
            count("rejected_regions")
            moved |= nodes or all_nodes(item.region, error)
    return moved


def _compiled(
    context: Context,
    graph: PostGradGraph,
    split: Split,
    emitted: Sequence[EmittedRegion],
    program: Program,
    loaded: LoadedProgram,
) -> CompiledGraph:
    """What observers see of a graph; they are told of the stages here, when nothing is rejected any more."""
    observer = context.observer
    regions = [
        CompiledRegion(graph.name, item, region, _products(item) if observer.watches else ())
        for item, region in zip(emitted, loaded.regions, strict=True)
    ]
    observer.stage("regions", graph.name, split)
    for region in regions:
        for stage in ("onnx", "onnx_optimized", "session"):
            observer.stage(stage, graph.name, region)
    return CompiledGraph(graph.name, graph.module, split, regions, program, graph.passes, graph.seconds)


def _products(item: EmittedRegion) -> Sequence[ProductKernel]:
    """How the products of a region are computed, with the weights of the compile."""
    inputs = item.program.executable.inputs
    tensors = {inputs[i].name: inputs[i].in_memory_order(weight.tensor) for i, weight in item.constants.items()}
    products = product_kernels(item.optimized_model, tensors)
    if any(product.why == UNKNOWN for product in products):
        count("choices_not_known")
    return products
