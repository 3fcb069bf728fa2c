"""Builds a runner of one of AOTAutograd's graphs: loads its Program from the cache (``program_cache``), or compiles it.

``Pipeline`` and ``placement`` call this module. It provides for both:

- the safety net: if our own code fails, PyTorch runs the graph (``Runners.or_in_pytorch``);
- the lock, and the check of guards, for a graph that is compiled at a call, after Dynamo (``late_compile``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..common.call_statistics import reporting
from ..common.garbage_collection import only_new
from ..common.random_state import RandomState
from ..common.safety_net import or_original
from ..errors import first_line
from ..events import is_candidate_run
from ..exporter.decompositions import Decompositions, decomposition_table
from ..graphs import dynamo_frames
from ..graphs.artifacts import GraphName, Runner
from ..graphs.late_compile import compile_after_guards, compile_at_first_call
from ..graphs.pytorch_runner import boxed, boxed_code
from ..graphs.saving_mode import is_ahead_of_time, is_saving
from ..graphs.size_assumptions import Assumptions
from ..graphs.static_inputs import NO_WEIGHTS, StaticInput
from ..graphs.traced_sources import traced_modules
from ..numerics.exact import WIDER
from ..numerics.function_runs import NotRepeatableError
from ..options import Options
from ..partition.program import LoadedProgram, Program
from ..weights.region_session import Weight
from ..weights.selection import weights_of
from .observer import Observer
from .program_cache import ProgramCache

if TYPE_CHECKING:
    from .stage_data import CompiledGraph, PostGradGraph
    from .stages import Context

logger = logging.getLogger(__name__)

CompileGraph: TypeAlias = "Callable[[Context, PostGradGraph], tuple[CompiledGraph, LoadedProgram]]"
"""Compiles a graph of the stage ``post_grad``, and loads it: ``stages.compile_graph``, or what takes its place."""


def _are_wider(module: fx.GraphModule, arguments: Sequence[object]) -> bool:
    """Whether arguments are a graph's in float64: a debugger checks the stages."""
    fakes = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return any(
        isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor) and value.dtype is WIDER.get(fake.dtype)
        for fake, value in zip(fakes, arguments, strict=False)
    )


class Runners:
    """Builds runners of AOTAutograd's graphs.

    Args:
        options: of the backend.
        observer: is notified of each stage.
        compile_graph: compiles the graphs of the stage ``post_grad``; by default ``stages.compile_graph``.
    """

    def __init__(
        self,
        options: Options,
        observer: Observer,
        compile_graph: CompileGraph | None = None,
    ) -> None:
        self.options = options
        self.observer = observer
        self._compile_graph = compile_graph
        self._on_provider: dict[int, Runners] = {}
        self.place = ""  # of the code whose graphs are compiled, see ``dynamo_frames.place_being_compiled``

    @functools.cached_property
    def context(self) -> Context:
        """What the stages share, created at first use."""
        from .stages import Context  # imported lazily, see there

        return Context(self.options, self.observer)

    def on_provider(self, position: int) -> Runners:
        """The same for the execution providers from a position of the option ``providers`` on."""
        if not position:
            return self
        if position not in self._on_provider:
            options = dataclasses.replace(self.options, providers=self.options.providers[position:])
            self._on_provider[position] = Runners(options, self.observer, self._compile_graph)
        self._on_provider[position].place = self.place
        return self._on_provider[position]

    @functools.cached_property
    def programs(self) -> ProgramCache:
        """The cache on disk, which is off if each graph must be compiled."""
        must_compile = self.observer.watches or self._compile_graph is not None or self.options.verify_passes
        return ProgramCache(self.options, is_on=self.options.cache and not must_compile)

    def decompositions(self) -> Decompositions:
        """The decompositions of operators that have no translation."""
        return decomposition_table(self.options.opset, self.programs.translated_operators())

    def on_onnx(
        self,
        name: GraphName,
        module: fx.GraphModule,
        *,
        is_joint: bool = False,
        weights: Mapping[int, StaticInput] = NO_WEIGHTS,
    ) -> Runner:
        """Runs the stages from ``aten`` to ``session`` on one functional ATen graph.

        With ``verify_passes``, or if the values of weights are not known, the graph is compiled at its first call.

        Args:
            name: of the graph.
            module: the graph; changed in place.
            is_joint: whether the joint passes run too: AOTAutograd calls no partitioner for an inference graph.
            weights: the arguments that are parameters or buffers, by position.
        """
        build = functools.partial(self._load_or_compile, name, module, is_joint=is_joint, weights=weights)
        if not self.options.verify_passes and all(weight.value is not None for weight in weights.values()):
            return build(None)

        def at_first_call(arguments: Sequence[object]) -> Runner:
            if _are_wider(module, arguments):
                raise NotRepeatableError("the graph is compiled at its first call, from the model's values")
            return self.or_in_pytorch(name, module, lambda _: build(arguments))

        return compile_at_first_call(at_first_call)

    @only_new()
    def _load_or_compile(
        self,
        name: GraphName,
        module: fx.GraphModule,
        arguments: Sequence[object] | None,
        *,
        is_joint: bool,
        weights: Mapping[int, StaticInput],
    ) -> Runner:
        """See ``on_onnx``; ``arguments`` are those of a call, if they are known."""
        is_at_a_call = (
            arguments is not None or not dynamo_frames.is_dynamo_compiling()
        )  # a backward with static sizes, too
        compiling = compile_after_guards(name, Assumptions(module)) if is_at_a_call else contextlib.nullcontext()
        with compiling, _disable_current_modes():  # no real tensor can be created in AOTAutograd's fake mode
            constants = weights_of(module, weights, arguments)
            placeholders = list(module.graph.find_nodes(op="placeholder"))
            by_position = {i: constants[node] for i, node in enumerate(placeholders) if node in constants}
            # AOTAutograd's cache is found by the graph, and PyTorch's precompile cache compares sources itself.
            sources = traced_modules(module.graph) if is_ahead_of_time() else []
            compile_it = functools.partial(self._compiled, name, module, arguments, constants, is_joint=is_joint)
            program, run = self.programs.loaded_or(compile_it, name, module, by_position, is_joint=is_joint)
        run = reporting(run, program.coverage.of_calls(name))
        program.coverage.log(name, self.place)
        if not is_saving() or self.observer.watches:
            return run
        from .output_code import saved_graph  # imported lazily: it imports Inductor

        return saved_graph(run, name, program, by_position, self.options, sources)

    def _compiled(
        self,
        name: GraphName,
        module: fx.GraphModule,
        arguments: Sequence[object] | None,
        weights: Mapping[fx.Node, Weight],
        *,
        is_joint: bool,
    ) -> tuple[Program, Runner]:
        """Runs all stages: a Program, and its runner."""
        from .stages import compile_graph, run_post_grad  # imported lazily, see there

        graph = run_post_grad(self.context, name, module, arguments, weights, is_joint=is_joint)
        compiled, loaded = (self._compile_graph or compile_graph)(self.context, graph)
        return compiled.program, self.observer.runner(compiled, loaded)

    def in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        """A runner of the graph in PyTorch, after all passes; used if the user registered passes."""
        from .stages import Context, compile_graph, run_post_grad  # imported lazily, see there

        def build(graph: fx.GraphModule) -> Runner:
            context = Context(self.options, self.observer, in_pytorch="its engine is PyTorch")
            with _disable_current_modes():
                return compile_graph(context, run_post_grad(context, name, graph, None, {}, is_joint=False))[1].run

        return self.or_in_pytorch(name, module, build)

    def or_in_pytorch(
        self, name: GraphName | None, module: fx.GraphModule, compile_it: Callable[[fx.GraphModule], Runner]
    ) -> Runner:
        """The result of ``compile_it(module)``, which may change the graph; if it fails, PyTorch runs the original."""
        with _disable_current_modes():
            random_state = RandomState.now()

        why = ""

        def failed(error: Exception) -> None:
            nonlocal why
            with _disable_current_modes():
                random_state.restore()
            why = f"the compile failed, PyTorch runs it: {type(error).__name__}: {first_line(str(error))}"
            if name is not None:
                self.observer.not_compiled(name, why)

        runner = or_original(
            module,
            lambda: boxed(compile_it(module)),
            lambda graph: boxed(boxed_code(graph, name, why)),
            what=f"the compile of {name or 'a graph'}",
            instead="PyTorch runs the graph",
            must_compile=lambda: self.options.fallback == "error" or is_candidate_run() or is_ahead_of_time(),
            failed=failed,
        )
        if not is_saving():
            return runner
        from .output_code import as_saved

        reason = "the option verify_passes" if self.options.verify_passes else "a compile that failed"
        if self.observer.watches or self._compile_graph is not None:
            reason = "its backend, which is for debugging"
        return as_saved(runner, reason)
