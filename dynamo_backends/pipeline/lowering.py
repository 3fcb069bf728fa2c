"""Runs the stages from ``regions`` to ``session``: splits a graph into regions, and compiles each to an ONNX model.

The result is a Program. ``onnxrt`` and ``onnx_debug`` use ``OnnxLowering``. ``fx_debug`` uses ``Lowering`` itself, with
which PyTorch runs all of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

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
from ..events import count, warn
from ..exporter.converters.mixture_of_experts import GROUPED_PRODUCT
from ..exporter.registration import described, registered_converter
from ..exporter.results import number_dtype, sizes_of
from ..exporter.translate import fold_constants, translate
from ..graphs.artifacts import CompiledGraph, CompiledRegion, GraphName, Region, Split, operator_name
from ..graphs.in_place import PartialWrite
from ..graphs.layout import memory_extent
from ..graphs.locations import where
from ..numerics.exact import Environment
from ..options import Options
from ..partition.coverage import CoverageCounts
from ..partition.in_place_results import in_place_results
from ..partition.pass_verification import ModelChecker
from ..partition.program import Program, ProviderCheck, RegionCode, RegionProgram
from ..partition.regions import Support, assemble, attributes_of, depth_first, producer_of, region_graph, split_graph
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.executable import Executable
from ..runtime.integer_kernels import needs_exact_mixed_signs
from ..runtime.kernel_faults import check, fault_in, optimizers_to_disable, serialized
from ..runtime.product_kernels import UNKNOWN, ProductKernel, product_kernels
from ..runtime.providers import Provider, as_precise_as_pytorch, fallbacks, only_cpu, provider_name
from ..runtime.settings import SessionSettings
from ..runtime.system_memory import give_back
from ..weights.frozen_session import FrozenSession, Weight, load_session
from ..weights.selection import constants_of, is_of_a_weight
from .observer import Observer
from .stage_passes import StagePasses

logger = logging.getLogger(__name__)

_MAXIMUM_SPLITS = 8
"""How often a graph is split without the rejected nodes. After that, rejected regions run in PyTorch as a whole."""

_WORTH_A_CALL = 2**20
"""Bytes of an argument that are worth another call of a session if they are not copied twice: that takes 0.04 ms, a
call 0.02 (one thread, AMD EPYC)."""


@dataclasses.dataclass(frozen=True, eq=False)
class PostGradGraph:
    """A graph after the passes of ``post_grad``.

    Attributes:
        name, module: of the graph.
        passes: the results of these passes.
        evaluation: its values on real arguments, if the passes of ``onnx`` are checked.
        weights: the arguments that may be constants, by placeholder.
        writes: those that may be in place.
        is_undone: whether a pass so far was undone.
        seconds: of each following stage; filled by ``timed``.
    """

    name: GraphName
    module: fx.GraphModule
    passes: list[PassResult]
    evaluation: Environment | None
    weights: Mapping[fx.Node, Weight]
    writes: Sequence[PartialWrite]
    is_undone: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Lowering:
    """Compiles graphs to Programs that run in PyTorch as a whole."""

    def compile(self, graph: PostGradGraph) -> CompiledGraph:
        """Runs the stages from ``regions`` to ``session``."""
        self.record(graph)
        split = Split([], {})
        program = Program(assemble(graph.module, []), attributes_of(graph.module), (), CoverageCounts.of(split))
        return CompiledGraph(graph.name, graph.module, split, [], program, graph.passes)

    def record(self, graph: PostGradGraph) -> None:
        """Called with each graph, for subclasses."""


@dataclasses.dataclass(frozen=True)
class OnnxLowering(Lowering):
    """Compiles graphs to Programs that run on ONNX Runtime where possible, else in PyTorch.

    Args:
        options: of the backend.
        observer: is notified of each stage.
        support: which nodes ONNX Runtime can run.
        passes: runs those of the stage ``onnx``.
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
        coverage = CoverageCounts.of(split)
        _warn_of_unused_converters(split)
        attributes, code = attributes_of(graph.module), assemble(graph.module, split.regions)
        is_undone = graph.is_undone or any(result.undone for item in compiled for result in item.passes)
        varies = "a pass that was undone" if is_undone else ""
        if any(reason.kind is Kind.OUT_OF_MEMORY for reason in split.in_pytorch.values()):
            varies = "memory ran out"
        mixed_signs = any(needs_exact_mixed_signs(item.optimized_model) for item in compiled)
        program = Program(code, attributes, tuple(item.program for item in compiled), coverage, varies, mixed_signs)
        give_back()
        return CompiledGraph(graph.name, graph.module, split, compiled, program, graph.passes, graph.seconds)

    def _compile_regions(self, graph: PostGradGraph) -> tuple[Split, list[CompiledRegion]]:
        """Splits the graph and compiles its regions, until ONNX Runtime rejects none."""
        rejected = _experts_in_pytorch(graph)
        for attempt in itertools.count():  # terminates: each attempt but the last moves nodes to PyTorch
            with graph.timed("split"):
                split = split_graph(graph.module, self.support, rejected)
            self._check_fallback(split)
            compiled: list[CompiledRegion] = []
            before = len(rejected)
            for region in split.regions:
                try:
                    compiled.append(self._compile_region(graph, region, is_only=len(split.regions) == 1))
                except (SessionError, TranslationError) as error:
                    count("rejected_regions")
                    nodes = self._rejected_nodes(region, error)
                    if attempt >= _MAXIMUM_SPLITS:
                        nodes = dict.fromkeys(region.nodes, next(iter(nodes.values())))
                    rejected.update(nodes)
            if attempt < _MAXIMUM_SPLITS:
                rejected.update(_copied_writes(graph, compiled))
            if len(rejected) == before:
                self.observer.stage("regions", graph.name, split)
                for compiled_region in compiled:
                    for stage in ("onnx", "onnx_optimized", "session"):
                        self.observer.stage(stage, graph.name, compiled_region)
                return split, compiled
        raise AssertionError("unreachable")

    def _rejected_nodes(self, region: Region, error: SessionError | TranslationError) -> dict[fx.Node, Reason]:
        """The nodes because of which a region was rejected, with reasons: the one that the error names, else those that
        are rejected alone, else all."""
        named = [node for node in region.nodes if node.name == error.node]
        if named or isinstance(error, KernelFaultError):
            return {producer_of(node): error.reason for node in named or region.nodes}
        reasons = {node: self.support.probe(node) for node in region.operators}
        rejected_alone = {node: reason for node, reason in reasons.items() if reason is not None}
        reason_of_region = Reason(error.reason.kind, f"rejected with its region: {error.reason}")
        return rejected_alone or dict.fromkeys(region.nodes, reason_of_region)

    def _compile_region(self, graph: PostGradGraph, region: Region, *, is_only: bool) -> CompiledRegion:
        """Creates the models and the session of a region; ``is_only`` if it is the graph's only region."""
        model_name = f"{graph.name.direction}_region_{region.index}"  # without the graph's number, for the cache
        nodes = region.nodes if graph.name.direction == "inference" else depth_first(region)
        with graph.timed("export"):
            model = model_of(region, graph.weights, opset=self.options.opset, name=model_name, nodes=nodes)
        inputs, outputs = _input_specs(region, model), list(output_specs(region, model))
        settings = SessionSettings(
            self.options.providers,
            self.options.threads,
            shares_graph=not is_only or graph.name.direction != "inference",  # in training, PyTorch continues at once
            spin=self.options.spin,
            disabled_optimizers=optimizers_to_disable(model),
            idle_seconds=self.options.idle_seconds,
        )
        checker = None
        if graph.evaluation is not None:
            arguments, results = [item.node for item in region.inputs], [item.node for item in region.outputs]
            checker = ModelChecker(graph.evaluation, arguments, results, inputs, outputs, settings)
        optimized = model.clone()
        with graph.timed("onnx_passes"):
            passes = self.passes.run("onnx", graph.name, optimized, region.index, checker)
        constants = constants_of(region, optimized, graph.weights)
        if only_cpu(self.options.providers):
            for i, argument in in_place_results(region, optimized, graph.writes).items():
                outputs[i] = dataclasses.replace(outputs[i], written=argument)
        content = serialized(optimized, without=[inputs[i].name for i in constants])
        executable = Executable(content, inputs, tuple(outputs), settings, tuple(constants))
        with graph.timed("session"):
            program, session = self._create_session(graph.name, region, optimized, executable, constants)
        products: Sequence[ProductKernel] = ()
        if self.observer.watches:
            tensors = {inputs[i].name: inputs[i].in_memory_order(weight.tensor) for i, weight in constants.items()}
            products = product_kernels(optimized, tensors)
            if any(item.why == UNKNOWN for item in products):
                count("choices_not_known")
        return CompiledRegion(graph.name, region, model, optimized, passes, program, session, products)

    def _create_session(
        self,
        name: GraphName,
        region: Region,
        model: ir.Model,
        executable: Executable,
        constants: Mapping[int, Weight],
    ) -> tuple[RegionProgram, BoundSession | FrozenSession]:
        """The Program and the session of a region on the first providers that support it.

        Raises:
            SessionError: the rejected node is known, or no provider supports the region. In the first case the graph
                is split again without the node, and the rest of the region stays on these providers.
        """
        remaining = fallbacks(executable.settings.providers)
        for providers in remaining:
            chosen = executable.on(as_precise_as_pytorch(providers))
            try:
                check(model, providers)
                complete = self.options.weights == "checked"
                session = load_session(chosen, constants, complete=complete, frame=name.frame)
            except SessionError as error:
                is_last = only_cpu(providers) or isinstance(error, KernelFaultError)
                if is_last or error.node is not None or any(map(self.support.probe, region.operators)):
                    self.observer.rejected(name, region.index, model, error)
                    raise
                count("rejected_by_provider")
                rejection = f"{provider_name(providers[0])} rejects it: {first_line(str(error))}"
                warn(logger, f"{name} region {region.index}: {rejection}")
                continue
            return self._program(region, model, chosen, remaining), session
        raise AssertionError("unreachable")  # the CPU provider, which comes last, returns or raises

    def _program(
        self, region: Region, model: ir.Model, executable: Executable, remaining: Iterator[tuple[Provider, ...]]
    ) -> RegionProgram:
        """The Program of a region; ``remaining`` are the providers to try if results are wrong."""
        check = None
        providers = executable.settings.providers
        if self.options.check_providers and not self.observer.watches and not only_cpu(providers):
            correct = [item for item in remaining if fault_in(model, item) is None]
            others = tuple(executable.on(as_precise_as_pytorch(item)) for item in correct)
            check = ProviderCheck(fx.GraphModule({}, region_graph(region), "Region"), others)
        return RegionProgram(executable, RegionCode.of(region_graph(region)), check)

    def _check_fallback(self, split: Split) -> None:
        if self.options.fallback != "error":
            return
        for node, reason in split.coverage.in_pytorch.items():
            if not reason.by_design:
                raise UnsupportedOperatorError(node.name, operator_name(node), where(node), reason)


def _experts_in_pytorch(graph: PostGradGraph) -> dict[fx.Node, Reason]:
    """The products of experts whose weights are no constants, with the reason."""
    reason = Reason(Kind.FASTER_IN_PYTORCH, "a session would copy the weights of all experts")
    calls = [node for node in graph.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    products = [node for node in calls if node.target.name() == GROUPED_PRODUCT]
    return {node: reason for node in products if not is_of_a_weight(node.args[1], graph.weights)}


def _copied_writes(graph: PostGradGraph, compiled: Sequence[CompiledRegion]) -> dict[fx.Node, Reason]:
    """The writes into parts of large arguments for which a session would copy the rest, with the reason."""
    reason = Reason(Kind.FASTER_IN_PYTORCH, "it writes into a part of an argument, of which a session would copy all")
    results = {
        item.node: spec
        for region in compiled
        for item, spec in zip(region.region.outputs, region.executable.outputs, strict=True)
    }
    on_onnx = {node for region in compiled for node in region.region.nodes}
    copied: dict[fx.Node, Reason] = {}
    for write in graph.writes:
        is_in_place = write.writes[-1] in results and results[write.writes[-1]].written is not None
        if not is_in_place and _size(write.argument) >= _WORTH_A_CALL and not on_onnx.isdisjoint(write.writes):
            copied.update(dict.fromkeys(write.writes, reason))
    return copied


def _size(argument: fx.Node) -> int:
    """The bytes of a tensor's memory; symbolic sizes count as their hints."""
    value = argument.meta["val"]
    return int(memory_extent(value) * value.itemsize)


def _warn_of_unused_converters(split: Split) -> None:
    """Logs each operator whose registered converter is not used, with the user's line and the reason."""
    for node, reason in split.coverage.in_pytorch.items():
        converter = registered_converter(node.target)
        if converter is not None and not reason.by_design:
            line = where(node) or "an unknown line"
            text = f"the converter {described(converter)} of {node.target} at {line} is not used: {reason}"
            warn(logger, "", {text: text})


def model_of(
    region: Region,
    weights: Mapping[fx.Node, Weight],
    *,
    opset: int,
    name: str = "region",
    nodes: Sequence[fx.Node] | None = None,
) -> ir.Model:
    """A region's ONNX model before the passes, with folded constants; inputs that are weights are marked for them.

    Args:
        region: the region.
        weights: the graph's weights, by placeholder.
        opset: of the model.
        name: of the ONNX graph.
        nodes: the region's nodes in another order.

    Raises:
        TranslationError: a node cannot be translated.
    """
    ordered = region.nodes if nodes is None else nodes
    model = fold_constants(translate(ordered, region.inputs, region.outputs, opset=opset, name=name))
    for item, value in zip(region.inputs, model.graph.inputs, strict=True):
        if item.node in weights:
            mark_weight(value)
    return model


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
    """The dtypes, shapes and strides of a region's results."""
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
            dtype = number_dtype(meta)
            assert dtype is not None
            specs.append(OutputSpec(value.name, dtype, is_number=True, sizes=()))
    return tuple(specs)
