"""The stages in order, from Dynamo's graph to a callable on ONNX Runtime.

``onnxrt`` and ``onnx_debug`` are this one pipeline; they differ in the observer. The stages and where they are::

    dynamo, pre_grad   Pipeline.compile_dynamo_graph   torch IR
    joint              Pipeline.partition              forward and backward together
    aten, post_grad    Pipeline.compile_aten_graph     one direction
    regions            regions.split_graph             what goes to ONNX
    onnx ... session   _compile_region                 one model for each region
    run                CompiledGraph.run               called for each batch
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.manager import Checker, PassManager, PassResult

from . import aot
from .aliases import read_memory_of_owners, separate_returned_views
from .errors import KernelFaultError, SessionError, TranslationError, UnsupportedOperatorError
from .exporter.decompositions import decomposition_table
from .exporter.locations import source_line
from .exporter.translate import fold_constants, translate, value_names
from .observer import GraphName, Observer, Runner
from .options import Options
from .pass_target import pass_target
from .regions import (
    BY_DESIGN,
    Region,
    Split,
    Support,
    assemble,
    first_line,
    is_operator,
    producer_of,
    refusal_reason,
    region_module,
    split_graph,
)
from .runtime.binding import BoundSession, InputSpec, OutputSpec
from .runtime.session import Session
from .verification import Evaluation, GraphChecker, ModelChecker, at_first_call

logger = logging.getLogger(__name__)

_MAXIMUM_SPLITS = 8
"""How often a graph is split anew after the runtime refused a region, node by node, before whole regions go."""

_graph_numbers = itertools.count()
_graph_numbers_lock = threading.Lock()


def count(event: str, number: int = 1) -> None:
    """Counts an event under ``torch._dynamo.utils.counters["dynamo_backends"]``."""
    counters["dynamo_backends"][event] += number


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """A region with its models and its session, as the stages from ``onnx`` on make them."""

    graph: GraphName
    region: Region
    model: ir.Model
    optimized_model: ir.Model | None = None
    passes: list[PassResult] = dataclasses.field(default_factory=list)
    bound: BoundSession | None = None
    in_pytorch: fx.GraphModule | None = None
    must_run_on_onnx: bool = False
    """Whether a failure of the session is an error (``fallback="error"``) rather than PyTorch's to make good."""

    def __post_init__(self) -> None:
        self.__name__ = f"region_{self.region.index}"  # what the generated code of the graph calls it
        self._has_failed = False

    def __call__(self, *args: object) -> Sequence[object]:
        assert self.bound is not None and self.in_pytorch is not None
        try:
            return self.bound(args)
        except SessionError as error:
            return self._rescue(args, error)

    def _rescue(self, args: Sequence[object], error: SessionError) -> Sequence[object]:
        """Runs the region in PyTorch after the session failed on these arguments; PyTorch's own error wins."""
        assert self.in_pytorch is not None
        results = self.in_pytorch(*args)
        count("runtime_failures")
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.region.index}: ONNX Runtime failed on this call: {error}. "
                "Remove options={'fallback': 'error'} to let PyTorch run the region."
            )
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "%s region %d: ONNX Runtime failed on this call, PyTorch ran the region, as it will where it fails "
                "again: %s",
                self.graph,
                self.region.index,
                first_line(str(error)),
            )
        return results


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """One forward, backward or inference graph, ready to run."""

    name: GraphName
    module: fx.GraphModule
    split: Split
    regions: list[CompiledRegion]
    assembled: fx.GraphModule
    """The graph with each region as one call; its arguments come boxed."""
    passes: list[PassResult]

    @property
    def run(self) -> Runner:
        return self.assembled.forward


class Pipeline:
    """Compiles the graphs of one ``torch.compile`` call."""

    def __init__(self, options: Options, observer: Observer) -> None:
        self.options = options
        self.observer = observer
        self.support = Support(options.opset, options.providers)
        self.passes = PassManager(
            options.passes,
            pass_target(options, self.support),
            explain=observer.explains,
            strict=options.fallback == "error",
        )
        self._numbers_by_aot_id: dict[str, int] = {}

    def compile_dynamo_graph(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """The whole pipeline on one of Dynamo's graphs.

        Args:
            module: the graph, in torch IR.
            example_inputs: what it will be called with, tensors and symbolic integers.

        Returns:
            What Dynamo calls instead of the graph, with the graph's arguments.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
        """
        graph = GraphName(_next_graph_number())
        self.observer.stage("dynamo", graph, module)
        checker = GraphChecker(example_inputs) if self.options.verify_passes else None
        self.observer.passes(graph, self._run_passes("pre_grad", graph, module, checker=checker))
        self.observer.stage("pre_grad", graph, module)

        def compile_direction(direction: str) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
            name = GraphName(graph.index, direction)

            def compiler(aten: fx.GraphModule, inputs: Sequence[object]) -> Runner:
                return self.compile_aten_graph(name, aten, is_joint=direction == "inference")

            return compiler

        backend = aot_autograd(
            fw_compiler=compile_direction("forward"),
            bw_compiler=compile_direction("backward"),
            inference_compiler=compile_direction("inference"),
            partition_fn=self.partitioner(graph, example_inputs),
            decompositions=decomposition_table(self.options.opset),
        )
        result: Callable[..., object] = backend(module, example_inputs)
        count("graphs")  # not before: Dynamo may give up an attempt and trace again, with a float made a constant
        if aot.is_recompile():
            count("recompiles")
        return result

    def compile_for_aot_autograd(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        """The pipeline from the stage ``aten`` on, for ``aot_autograd(fw_compiler=...)``.

        AOTAutograd tells only by the name of the graph which direction it is compiling, and which forward a backward
        belongs to.
        """
        aot_id, direction = aot.graph_being_compiled()
        if aot_id not in self._numbers_by_aot_id:
            self._numbers_by_aot_id[aot_id] = _next_graph_number()
            count("graphs")
        return self.compile_aten_graph(GraphName(self._numbers_by_aot_id[aot_id], direction), module)

    def partitioner(
        self, graph: GraphName, example_inputs: Sequence[object]
    ) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
        """AOTAutograd's ``partition_fn``: the joint passes, then the min-cut partitioner."""

        def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
            verify = self.options.verify_passes
            checker = GraphChecker(aot.real_arguments(joint, example_inputs)) if verify else None
            self._joint(graph, joint, checker)
            return aot.min_cut_partition(joint, inputs, **kwargs)

        return partition

    def _run_passes(
        self,
        stage: str,
        graph: GraphName,
        artifact: Any,
        region: int | None = None,
        checker: Checker | None = None,
    ) -> list[PassResult]:
        """Runs the passes of a stage on a graph or a region's model; counts what they did."""
        label = str(graph) if region is None else f"{graph} region {region}"
        listener = self.observer.pass_listener(GraphName(graph.index) if stage == "joint" else graph, region)
        results = self.passes.run(stage, artifact, name=label, checker=checker, listener=listener)
        for result in results:
            if result.undone:
                count(f"undone pass {result.name}")
            elif result.fired:
                count(f"pass {result.name}", result.fired)
        return results

    def _joint(self, graph: GraphName, module: fx.GraphModule, checker: Checker | None) -> None:
        results = self._run_passes("joint", graph, module, checker=checker)
        self.observer.passes(GraphName(graph.index), results)
        read_memory_of_owners(module)  # not only later: the partitioner may save a view, and its memory would be lost
        self.observer.stage("joint", GraphName(graph.index), module)

    def compile_aten_graph(self, name: GraphName, module: fx.GraphModule, *, is_joint: bool = False) -> Runner:
        """The stages from ``aten`` to ``session`` on one functional ATen graph; returns its boxed callable.

        Args:
            name: which graph.
            module: the graph; changed in place.
            is_joint: whether the joint passes run too: AOTAutograd calls no partitioner for an inference graph.
        """

        def build(arguments: Sequence[object] | None) -> Runner:
            with _disable_current_modes():  # AOTAutograd's fake mode, in which no real tensor can be made
                checker = GraphChecker(arguments) if arguments is not None else None
                if is_joint:
                    self._joint(name, module, checker)
                self.observer.stage("aten", name, module)
                _complete_meta(module)
                passes = self._run_passes("post_grad", name, module, checker=checker)
                read_memory_of_owners(module)
                separate_returned_views(module)
                self.observer.stage("post_grad", name, module)
                evaluation = None if arguments is None else Evaluation(module, arguments, exact=True)
                return self.lower(name, module, passes, evaluation)

        return aot.boxed(at_first_call(build) if self.options.verify_passes else build(None))

    def lower(
        self, name: GraphName, module: fx.GraphModule, passes: list[PassResult], evaluation: Evaluation | None = None
    ) -> Runner:
        """The stages from ``regions`` to ``session``; ``fx_debug`` puts PyTorch in their place.

        Args:
            name: which graph.
            module: the graph after the passes of ``post_grad``.
            passes: what these did.
            evaluation: the graph's values on real arguments, if the passes of ``onnx`` are to be checked.
        """
        split, regions = self._compile_regions(name, module, evaluation)
        self._report(name, split)
        assembled = assemble(module, split, regions)
        return self.observer.runner(CompiledGraph(name, module, split, regions, assembled, passes))

    def _compile_regions(
        self, name: GraphName, module: fx.GraphModule, evaluation: Evaluation | None
    ) -> tuple[Split, list[CompiledRegion]]:
        """Splits the graph and compiles its regions; what the runtime refuses is split off, in bounded rounds."""
        refused: dict[fx.Node, str] = {}
        for attempt in itertools.count():  # each round takes nodes from ONNX, so it ends
            split = split_graph(module, self.support, refused)
            self._check_fallback(split)
            compiled: list[CompiledRegion] = []
            before = len(refused)
            for region in split.regions:
                try:
                    alone = len(split.regions) == 1
                    compiled.append(self._compile_region(name, module, region, evaluation, alone=alone))
                except (SessionError, TranslationError) as error:
                    count("refused_regions")
                    culprits = self._find_refused(region, error)
                    if attempt >= _MAXIMUM_SPLITS:
                        culprits = dict.fromkeys(region.nodes, next(iter(culprits.values())))
                    refused.update(culprits)
            if len(refused) == before:
                self.observer.stage("regions", name, split)
                for region_compiled in compiled:
                    self._observe_region(name, region_compiled)
                return split, compiled
        raise AssertionError("unreachable")

    def _observe_region(self, name: GraphName, compiled: CompiledRegion) -> None:
        for stage in ("onnx", "onnx_optimized", "session"):
            self.observer.stage(stage, name, compiled)

    def _find_refused(self, region: Region, error: Exception) -> dict[fx.Node, str]:
        """The nodes the runtime refuses: those its error names, else those that fail alone, else the whole region."""
        if isinstance(error, KernelFaultError):
            culprits = [node for node in region.nodes if node.name == error.fx_node] or region.nodes
            return {producer_of(node): error.reason for node in culprits}
        text = str(error)
        reason = refusal_reason(text)
        named = [node for node in region.nodes if any(f"node_{name}" in _words(text) for name in value_names(node))]
        if named:
            return {producer_of(node): reason for node in named}
        alone = {}
        for node in region.nodes:
            against = self.support.ask(node)
            if against is not None:
                alone[producer_of(node)] = against
        return alone or dict.fromkeys(region.nodes, f"ONNX Runtime refuses the region it is in: {first_line(text)}")

    def _compile_region(
        self, name: GraphName, module: fx.GraphModule, region: Region, evaluation: Evaluation | None, *, alone: bool
    ) -> CompiledRegion:
        model_name = f"graph_{name.index}_{name.direction}_region_{region.index}"
        model = translate(region.nodes, region.inputs, region.outputs, opset=self.options.opset, name=model_name)
        fold_constants(model)
        compiled = CompiledRegion(name, region, model)
        inputs, outputs = _input_specs(compiled), _output_specs(compiled)
        checker = self._model_checker(region, inputs, outputs, evaluation) if evaluation is not None else None
        compiled.optimized_model = model.clone()
        compiled.passes = self._run_passes("onnx", name, compiled.optimized_model, region.index, checker)
        compiled.in_pytorch = region_module(module, region)
        compiled.must_run_on_onnx = self.options.fallback == "error"
        threads = self.options.threads
        session = Session(
            compiled.optimized_model,
            self.options.providers,
            threads=threads or torch.get_num_threads(),
            alone=alone,
            disabled_optimizers=_optimizers_to_disable(region),
        )
        compiled.bound = BoundSession(session, inputs, outputs, device=_device(region), threads=threads)
        return compiled

    def _model_checker(
        self, region: Region, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec], evaluation: Evaluation
    ) -> ModelChecker:
        arguments, results = [item.node for item in region.inputs], [item.node for item in region.outputs]
        return ModelChecker(evaluation, arguments, results, inputs, outputs, self.options.providers)

    def _check_fallback(self, split: Split) -> None:
        if self.options.fallback != "error":
            return
        for node, reason in split.in_pytorch.items():
            if is_operator(node) and reason not in BY_DESIGN:
                raise UnsupportedOperatorError(
                    f"node {node.name!r} ({node.target}) at {source_line(node) or 'an unknown line'} cannot run on "
                    f"ONNX Runtime: {reason}. Remove options={{'fallback': 'error'}} to run it in PyTorch."
                )

    def _report(self, name: GraphName, split: Split) -> None:
        count("regions", len(split.regions))
        operators = {node: reason for node, reason in split.in_pytorch.items() if is_operator(node)}
        count("nodes_on_onnx", sum(1 for region in split.regions for node in region.nodes if is_operator(node)))
        count("nodes_in_pytorch", len(operators))
        grouped = collections.Counter((str(node.target), reason) for node, reason in operators.items())
        for (target, _), number in grouped.items():
            count(f"fallback {target}", number)
        telling = [
            f"{target} x{number} ({reason})" for (target, reason), number in grouped.items() if reason not in BY_DESIGN
        ]
        if telling:
            logger.warning(
                "%s: %d of %d operators run in PyTorch, in %d region(s) the rest on ONNX Runtime: %s",
                name,
                len(operators),
                sum(1 for node in split.in_pytorch if is_operator(node))
                + sum(1 for region in split.regions for node in region.nodes if is_operator(node)),
                len(split.regions),
                "; ".join(telling),
            )


def _next_graph_number() -> int:
    with _graph_numbers_lock:
        return next(_graph_numbers)


def _words(text: str) -> set[str]:
    for mark in "()',:":
        text = text.replace(mark, " ")
    return set(text.split())


def _complete_meta(module: fx.GraphModule) -> None:
    """Gives ``meta["val"]`` to constants that tracing lifted into attributes."""
    for node in module.graph.find_nodes(op="get_attr"):
        if "val" not in node.meta:
            value = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value


def _input_specs(compiled: CompiledRegion) -> list[InputSpec]:
    specs = []
    for item, value in zip(compiled.region.inputs, compiled.model.graph.inputs, strict=True):
        meta = item.node.meta["val"]
        dtype = meta.dtype if isinstance(meta, torch.Tensor) else None
        assert value.name is not None
        specs.append(InputSpec(value.name, dtype, item.permutation))
    return specs


def _output_specs(compiled: CompiledRegion) -> list[OutputSpec]:
    specs = []
    region = compiled.region
    for item, layout, value in zip(region.outputs, region.layouts, compiled.model.graph.outputs, strict=True):
        meta = item.node.meta["val"]
        assert value.name is not None
        if isinstance(meta, torch.Tensor):
            specs.append(OutputSpec(value.name, meta.dtype, False, layout.permutation, layout.strides))
        else:
            dtype = torch.bool if isinstance(meta, (bool, torch.SymBool)) else torch.int64
            specs.append(OutputSpec(value.name, dtype, is_number=True))
    return specs


def _optimizers_to_disable(region: Region) -> tuple[str, ...]:
    """Optimizers of ONNX Runtime 1.31 that change results, or cost time.

    ``NoopElimination`` makes ``x`` of ``x + 0``, where ``-0.0 + 0`` is ``0.0`` (our ``remove_noops`` remove the rest of
    what it does). ``MatMulScaleFusion`` moves a float64 scale into the float32 attribute ``alpha`` of ``FusedMatMul``,
    rounded. ``SkipLayerNormFusion`` and ``BiasSkipLayerNormFusion`` put a kernel there that takes five times as long as
    the ``Add`` and the ``LayerNormalization`` it replaces. ``SimplifiedLayerNormFusion`` forgets the rank of an epsilon
    that has more dimensions than what is normalized; our pass ``onnx.layer_norm`` does not.
    """
    is_double = any(
        isinstance(v := node.meta.get("val"), torch.Tensor) and v.dtype is torch.float64 for node in region.nodes
    )
    skips = ("SkipLayerNormFusion", "BiasSkipLayerNormFusion")
    always = ("NoopElimination", *skips, "SimplifiedLayerNormFusion")
    return (*always, "MatMulScaleFusion") if is_double else always


def _device(region: Region) -> torch.device:
    for output in region.outputs:
        value = output.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")
