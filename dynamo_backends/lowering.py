"""The stages from ``regions`` to ``session``: regions become models, models sessions, sessions callables.

A ``Lowering`` makes a callable of a graph of the stage ``post_grad``. ``OnnxLowering`` is that of ``onnxrt`` and
``onnx_debug``; ``Lowering`` itself is that of ``fx_debug``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import PassResult, mark_weight

from .artifacts import (
    CompiledGraph,
    CompiledRegion,
    GraphName,
    Region,
    RunnableRegion,
    Runner,
    Split,
    without_graph,
)
from .coverage_report import Report
from .errors import KernelFaultError, SessionError, TranslationError, UnsupportedOperatorError, first_line
from .events import count, tell
from .exporter.locations import where
from .exporter.registration import described, registered_converter
from .exporter.results import sizes_of
from .exporter.translate import fold_constants, translate
from .freezing import constants_of
from .frozen import FrozenSession, Weight, load
from .observer import Observer
from .options import Options
from .provider_check import CheckedSession
from .reasons import Reason
from .regions import (
    Support,
    assemble,
    depth_first,
    producer_of,
    region_module,
    split_graph,
)
from .runtime.binding import BoundSession, InputSpec, OutputSpec
from .runtime.executable import Executable
from .runtime.heap import give_back
from .runtime.kernels import optimizers_to_disable, serialized
from .runtime.providers import Provider, as_precise_as_pytorch, fallbacks, only_cpu, provider_name
from .runtime.settings import SessionSettings
from .stage_passes import StagePasses
from .verification import Evaluation, ModelChecker

logger = logging.getLogger(__name__)

Built = TypeVar("Built")

_MAXIMUM_SPLITS = 8
"""How often a graph is split anew after the runtime refused a region, node by node, before whole regions go."""


class Lowering:
    """Makes a callable of a graph, which it runs in PyTorch."""

    def lower(
        self,
        name: GraphName,
        module: fx.GraphModule,
        passes: list[PassResult],
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
    ) -> Runner:
        """What is called for a graph, with its arguments boxed.

        Args:
            name: which graph.
            module: the graph after the passes of ``post_grad``.
            passes: what these did.
            evaluation: the graph's values on real arguments, if the passes of ``onnx`` are to be checked.
            weights: the arguments that may be constants, by placeholder.
        """
        self.look(name, module, weights)
        return assemble(module, [], []).forward

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

    def lower(
        self,
        name: GraphName,
        module: fx.GraphModule,
        passes: list[PassResult],
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
    ) -> Runner:
        """See ``Lowering.lower``.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
        """
        return self.observer.runner(self.compile(name, module, passes, evaluation, weights))

    def compile(
        self,
        name: GraphName,
        module: fx.GraphModule,
        passes: list[PassResult],
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
    ) -> CompiledGraph:
        """The graph with its regions' sessions, see ``lower``."""
        seconds: dict[str, float] = {}
        split, regions = self._compile_regions(name, module, evaluation, weights, seconds)
        Report.of(split).tell(name)
        _tell_of_converters(split)
        called: list[tuple[Region, Callable[..., object]]] = [(item.region, item.runnable) for item in regions]
        if self.options.fallback == "inductor" and not self.observer.watches:
            from .fused_fallback import compile_groups  # it leads to Inductor

            called += compile_groups(module, split, name.direction)
        assembled = assemble(module, [region for region, _ in called], [runnable for _, runnable in called])
        give_back()
        return CompiledGraph(name, module, split, regions, assembled, passes, seconds)

    def _compile_regions(
        self,
        name: GraphName,
        module: fx.GraphModule,
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
        seconds: dict[str, float],
    ) -> tuple[Split, list[CompiledRegion]]:
        """Splits the graph and compiles its regions; what the runtime refuses is split off, in bounded rounds.

        The time of the stages is added to ``seconds``.
        """
        refused: dict[fx.Node, Reason] = {}
        for attempt in itertools.count():  # each round takes nodes from ONNX, so it ends
            with _timed(seconds, "split"):
                split = split_graph(module, self.support, refused)
            self._check_fallback(split)
            compiled: list[CompiledRegion] = []
            before = len(refused)
            for region in split.regions:
                try:
                    is_only = len(split.regions) == 1
                    compiled.append(
                        self._compile_region(name, module, region, evaluation, weights, seconds, is_only=is_only)
                    )
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

    def _compile_region(
        self,
        name: GraphName,
        module: fx.GraphModule,
        region: Region,
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
        seconds: dict[str, float],
        *,
        is_only: bool,
    ) -> CompiledRegion:
        """Makes the models and the session of a region.

        Args:
            name: which graph.
            module: the graph.
            region: a region of it.
            evaluation: the graph's values, if the passes of ``onnx`` are to be checked.
            weights: the arguments that may be constants.
            seconds: the time of the stages is added to it.
            is_only: whether it is the only region of the graph.
        """
        model_name = f"{name.direction}_region_{region.index}"  # the same in every process: no number of the graph
        nodes = region.nodes if name.direction == "inference" else depth_first(region)
        with _timed(seconds, "export"):
            model = translate(nodes, region.inputs, region.outputs, opset=self.options.opset, name=model_name)
            fold_constants(model)
        inputs, outputs = _input_specs(region, model), _output_specs(region, model)
        settings = SessionSettings(
            self.options.providers,
            self.options.threads,
            shares_graph=not is_only or name.direction != "inference",  # PyTorch goes on at once in a training step
            spin=self.options.spin,
            disabled_optimizers=optimizers_to_disable(model),
        )
        checker = None
        if evaluation is not None:
            arguments, results = [item.node for item in region.inputs], [item.node for item in region.outputs]
            checker = ModelChecker(evaluation, arguments, results, inputs, outputs, settings)
        _mark(region, model, weights)
        optimized = model.clone()
        with _timed(seconds, "onnx_passes"):
            passes = self.passes.run("onnx", name, optimized, region.index, checker)
        constants = constants_of(region, optimized, weights)

        def build(providers: tuple[Provider, ...]) -> tuple[Executable, BoundSession | FrozenSession]:
            given = dataclasses.replace(settings, providers=as_precise_as_pytorch(providers))
            content = serialized(optimized, given.providers, without=[inputs[i].name for i in constants])
            executable = Executable(content, inputs, outputs, given, tuple(constants))
            return executable, load(executable, constants, complete=self.options.weights == "checked")

        others = fallbacks(self.options.providers)
        try:
            with _timed(seconds, "session"):
                providers, (executable, loaded) = self._on_first_that_takes_it(
                    f"{name} region {region.index}", region, others, build
                )
        except SessionError as error:
            self.observer.refused(name, region.index, optimized, error)
            raise
        in_pytorch = region_module(module, region)
        session: BoundSession | FrozenSession | CheckedSession = loaded
        if self.options.check_providers and not self.observer.watches and not only_cpu(providers):
            called = f"{name} region {region.index}"
            session = CheckedSession(called, loaded, providers, others, lambda next_: build(next_)[1], in_pytorch)
        must_run_on_onnx = self.options.fallback == "error"
        runnable = RunnableRegion(name, region.index, session, without_graph(in_pytorch), must_run_on_onnx)
        return CompiledRegion(name, region, model, optimized, passes, executable, runnable)

    def _on_first_that_takes_it(
        self,
        called: str,
        region: Region,
        all_providers: Iterator[tuple[Provider, ...]],
        build: Callable[[tuple[Provider, ...]], Built],
    ) -> tuple[tuple[Provider, ...], Built]:
        """What is built of a region on the first providers that take it whole.

        A node that they refuse by itself is taken out of the region instead, so that the rest stays theirs.

        Raises:
            SessionError: none takes it, or they refuse a node of it by itself.
        """
        for providers in all_providers:
            try:
                return providers, build(providers)
            except SessionError as error:
                is_last = only_cpu(providers) or isinstance(error, KernelFaultError)
                if is_last or error.node is not None or any(map(self.support.ask, region.operators)):
                    raise
                count("refused_by_provider")
                tell(logger, f"{called}: {provider_name(providers[0])} refuses it: {first_line(str(error))}")
        raise AssertionError("unreachable")  # the CPU provider comes last

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


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the time that the block takes to that of a stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


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


def _output_specs(region: Region, model: ir.Model) -> tuple[OutputSpec, ...]:
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
