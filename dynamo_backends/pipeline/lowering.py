"""The stages from ``regions`` to ``session``: a graph becomes regions, a region a model, and all of it a Program.

``OnnxLowering`` is that of ``onnxrt`` and ``onnx_debug``; ``Lowering`` itself, with which PyTorch runs all, that of
``fx_debug``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import mark_weight
from passes.engine.results import PassResult

from ..errors import (
    KernelFaultError,
    Kind,
    Reason,
    SessionError,
    TranslationError,
    UnsupportedOperatorError,
    first_line,
)
from ..events import count, tell
from ..exporter.registration import described, registered_converter
from ..exporter.results import sizes_of
from ..exporter.translate import fold_constants, translate
from ..graphs.artifacts import CompiledGraph, CompiledRegion, GraphName, Region, Split, region_name
from ..graphs.locations import where
from ..options import Options
from ..partition.coverage import Report
from ..partition.pass_verification import Evaluation, ModelChecker
from ..partition.program import Program, ProviderCheck, RegionCode, RegionProgram
from ..partition.regions import Support, assemble, attributes_of, depth_first, producer_of, region_graph, split_graph
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.executable import Executable
from ..runtime.kernel_faults import check, fault_in, optimizers_to_disable, serialized
from ..runtime.providers import Provider, as_precise_as_pytorch, fallbacks, only_cpu, provider_name
from ..runtime.settings import SessionSettings
from ..runtime.system_memory import give_back
from ..weights.frozen_session import FrozenSession, Weight, load_session
from ..weights.selection import constants_of
from .observer import Observer
from .stage_passes import StagePasses

logger = logging.getLogger(__name__)

_MAXIMUM_SPLITS = 8
"""How often a graph is split anew after the runtime refused a region, node by node, before whole regions go."""


@dataclasses.dataclass(frozen=True, eq=False)
class PostGradGraph:
    """A graph after the passes of ``post_grad``, and what is known of it.

    Attributes:
        name: which graph.
        module: the graph.
        passes: what the passes did.
        evaluation: its values on real arguments, if the passes of ``onnx`` are to be checked.
        weights: the arguments that may be constants, by placeholder.
        is_undone: whether a pass so far was undone.
        seconds: the time that its stages take from here on.
    """

    name: GraphName
    module: fx.GraphModule
    passes: list[PassResult]
    evaluation: Evaluation | None
    weights: Mapping[fx.Node, Weight]
    is_undone: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time that the block takes to that of a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Lowering:
    """Makes Programs of graphs, all of which PyTorch runs."""

    def compile(self, graph: PostGradGraph) -> CompiledGraph:
        """The stages from ``regions`` to ``session``."""
        self.look(graph.name, graph.module, graph.weights)
        split = Split([], {})
        program = Program(assemble(graph.module, []), attributes_of(graph.module), (), Report.of(split))
        return CompiledGraph(graph.name, graph.module, split, [], program, graph.passes)

    def look(self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight]) -> None:
        """Sees each graph that is to run in PyTorch."""


@dataclasses.dataclass(frozen=True)
class OnnxLowering(Lowering):
    """Runs what ONNX can express on ONNX Runtime, and the rest in PyTorch.

    Args:
        options: of the backend.
        observer: is told of each stage, and may wrap what is called.
        support: which nodes ONNX Runtime can run.
        passes: those of the stage ``onnx``.
    """

    options: Options
    observer: Observer
    support: Support
    passes: StagePasses

    def compile(self, graph: PostGradGraph) -> CompiledGraph:
        """See ``Lowering.compile``.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
        """
        split, compiled = self._compile_regions(graph)
        report = Report.of(split)
        _tell_of_converters(split)
        attributes, regions = attributes_of(graph.module), list(split.regions)
        if self.options.fallback == "inductor" and not self.observer.watches:
            from .fused_fallback import compile_groups  # it leads to Inductor

            for group, runner in compile_groups(graph.module, split, graph.name.direction):
                regions.append(group)
                attributes[region_name(group.index)] = runner
        code = assemble(graph.module, regions)
        is_undone = graph.is_undone or any(result.undone for item in compiled for result in item.passes)
        varies = "a pass that was undone" if is_undone else ""
        if any(reason.kind is Kind.OUT_OF_MEMORY for reason in split.in_pytorch.values()):
            varies = "memory ran out"
        program = Program(code, attributes, tuple(item.program for item in compiled), report, varies)
        give_back()
        return CompiledGraph(graph.name, graph.module, split, compiled, program, graph.passes, graph.seconds)

    def _compile_regions(self, graph: PostGradGraph) -> tuple[Split, list[CompiledRegion]]:
        """Splits the graph and compiles its regions; what the runtime refuses is split off, in bounded rounds."""
        refused: dict[fx.Node, Reason] = {}
        for attempt in itertools.count():  # each round takes nodes from ONNX, so it ends
            with graph.timed("split"):
                split = split_graph(graph.module, self.support, refused)
            self._check_fallback(split)
            compiled: list[CompiledRegion] = []
            before = len(refused)
            for region in split.regions:
                try:
                    compiled.append(self._compile_region(graph, region, is_only=len(split.regions) == 1))
                except (SessionError, TranslationError) as error:
                    count("refused_regions")
                    culprits = self._find_refused(region, error)
                    if attempt >= _MAXIMUM_SPLITS:
                        culprits = dict.fromkeys(region.nodes, next(iter(culprits.values())))
                    refused.update(culprits)
            if len(refused) == before:
                self.observer.stage("regions", graph.name, split)
                for compiled_region in compiled:
                    for stage in ("onnx", "onnx_optimized", "session"):
                        self.observer.stage(stage, graph.name, compiled_region)
                return split, compiled
        raise AssertionError("unreachable")

    def _find_refused(self, region: Region, error: SessionError | TranslationError) -> dict[fx.Node, Reason]:
        """The nodes that keep a region from ONNX Runtime, with the reason: the one its error names, else those that it
        refuses by themselves, else the whole region."""
        named = [node for node in region.nodes if node.name == error.node]
        if named or isinstance(error, KernelFaultError):
            return {producer_of(node): error.reason for node in named or region.nodes}
        by_themselves = {}
        for node in region.operators:  # what takes one of several results has no translation of its own
            against = self.support.ask(node)
            if against is not None:
                by_themselves[node] = against
        refused = Reason(error.reason.kind, f"as a part of its region: {error.reason}")
        return by_themselves or dict.fromkeys(region.nodes, refused)

    def _compile_region(self, graph: PostGradGraph, region: Region, *, is_only: bool) -> CompiledRegion:
        """Makes the models and the session of a region.

        Args:
            graph: the graph.
            region: a region of it.
            is_only: whether it is the only region of the graph.
        """
        model_name = f"{graph.name.direction}_region_{region.index}"  # the same in every process: no number
        nodes = region.nodes if graph.name.direction == "inference" else depth_first(region)
        with graph.timed("export"):
            model = translate(nodes, region.inputs, region.outputs, opset=self.options.opset, name=model_name)
            fold_constants(model)
        inputs, outputs = _input_specs(region, model), output_specs(region, model)
        settings = SessionSettings(
            self.options.providers,
            self.options.threads,
            shares_graph=not is_only or graph.name.direction != "inference",  # PyTorch goes on at once in training
            spin=self.options.spin,
            disabled_optimizers=optimizers_to_disable(model),
        )
        checker = None
        if graph.evaluation is not None:
            arguments, results = [item.node for item in region.inputs], [item.node for item in region.outputs]
            checker = ModelChecker(graph.evaluation, arguments, results, inputs, outputs, settings)
        _mark(region, model, graph.weights)
        optimized = model.clone()
        with graph.timed("onnx_passes"):
            passes = self.passes.run("onnx", graph.name, optimized, region.index, checker)
        constants = constants_of(region, optimized, graph.weights)
        content = serialized(optimized, without=[inputs[i].name for i in constants])
        executable = Executable(content, inputs, outputs, settings, tuple(constants))
        with graph.timed("session"):
            program, session = self._with_session(graph.name, region, optimized, executable, constants)
        return CompiledRegion(graph.name, region, model, optimized, passes, program, session)

    def _with_session(
        self,
        name: GraphName,
        region: Region,
        model: ir.Model,
        executable: Executable,
        constants: Mapping[int, Weight],
    ) -> tuple[RegionProgram, BoundSession | FrozenSession]:
        """A region on the first providers that take it whole, and its session.

        A node that they refuse by itself is taken out of the region instead, so that the rest stays theirs.

        Args:
            name: of the graph.
            region: a region of it.
            model: of the region, after all passes.
            executable: the same, on the providers that the user named.
            constants: the weights that are constants, by position.

        Raises:
            SessionError: none takes it, or they refuse a node of it by itself.
        """
        left = fallbacks(executable.settings.providers)
        for providers in left:
            chosen = executable.on(as_precise_as_pytorch(providers))
            try:
                check(model, providers)
                session = load_session(chosen, constants, complete=self.options.weights == "checked")
            except SessionError as error:
                is_last = only_cpu(providers) or isinstance(error, KernelFaultError)
                if is_last or error.node is not None or any(map(self.support.ask, region.operators)):
                    self.observer.refused(name, region.index, model, error)
                    raise
                count("refused_by_provider")
                refused = f"{provider_name(providers[0])} refuses it: {first_line(str(error))}"
                tell(logger, f"{name} region {region.index}: {refused}")
                continue
            return self._program(region, model, chosen, left), session
        raise AssertionError("unreachable")  # the CPU provider comes last

    def _program(
        self, region: Region, model: ir.Model, executable: Executable, left: Iterator[tuple[Provider, ...]]
    ) -> RegionProgram:
        """The Program of a region that its first providers took.

        Args:
            region: the region.
            model: of it, after all passes.
            executable: the same, on the providers that took it.
            left: what can be tried after these.
        """
        check = None
        providers = executable.settings.providers
        if self.options.check_providers and not self.observer.watches and not only_cpu(providers):
            right = [item for item in left if fault_in(model, item) is None]
            others = tuple(executable.on(as_precise_as_pytorch(item)) for item in right)
            check = ProviderCheck(fx.GraphModule({}, region_graph(region), "Region"), others)
        return RegionProgram(executable, RegionCode.of(region_graph(region)), check)

    def _check_fallback(self, split: Split) -> None:
        if self.options.fallback != "error":
            return
        for node, reason in split.coverage.in_pytorch.items():
            if not reason.by_design:
                raise UnsupportedOperatorError(node.name, str(node.target), where(node), reason)


def _tell_of_converters(split: Split) -> None:
    """Warns of each operator whose registered converter is not used, with the user's line and what is wrong."""
    told = set()
    for node, reason in split.coverage.in_pytorch.items():
        converter = registered_converter(node.target)
        if converter is None or reason.by_design or (node.target, reason) in told:
            continue
        told.add((node.target, reason))
        line = where(node) or "an unknown line"
        tell(logger, f"the converter {described(converter)} of {node.target} at {line} is not used: {reason}")


def _mark(region: Region, model: ir.Model, weights: Mapping[fx.Node, Weight]) -> None:
    """Tells the passes which inputs of a region's model are weights."""
    for item, value in zip(region.inputs, model.graph.inputs, strict=True):
        if item.node in weights:
            mark_weight(value)


def _input_specs(region: Region, model: ir.Model) -> tuple[InputSpec, ...]:
    specs = []
    for item, value in zip(region.inputs, model.graph.inputs, strict=True):
        meta = item.node.meta["val"]
        assert value.name is not None
        if isinstance(meta, torch.Tensor):
            sizes = sizes_of(meta)
            specs.append(InputSpec(value.name, meta.dtype, item.permutation, sizes=sizes, device=meta.device))
        else:
            specs.append(InputSpec(value.name, None, sizes=sizes_of(meta)))
    return tuple(specs)


def output_specs(region: Region, model: ir.Model) -> tuple[OutputSpec, ...]:
    """How the results of a region's model become tensors."""
    specs = []
    for item, layout, value in zip(region.outputs, region.layouts, model.graph.outputs, strict=True):
        meta = item.node.meta["val"]
        assert value.name is not None
        if isinstance(meta, torch.Tensor):
            specs.append(
                OutputSpec(
                    value.name,
                    meta.dtype,
                    permutation=layout.permutation,
                    strides=layout.strides,
                    exact=layout.exact_strides(meta),
                    sizes=sizes_of(meta),
                    device=meta.device,
                )
            )
        else:
            dtype = torch.bool if isinstance(meta, (bool, torch.SymBool)) else torch.int64
            specs.append(OutputSpec(value.name, dtype, is_number=True, sizes=()))
    return tuple(specs)
