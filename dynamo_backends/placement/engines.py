"""The engines that run the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime and Inductor.

With ``placement="fastest"`` ONNX Runtime is an engine for each execution provider of the option ``providers``.

PyTorch runs a graph without our passes, which are for ONNX; if users registered passes, all passes run. Nothing is
autotuned while an observer watches: it sees all graphs on ONNX Runtime.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from passes.engine.registry import are_only_built_in

from ..cache.graphs import cached_graphs
from ..common.autocast import autocast_dtypes
from ..common.call_statistics import reporting
from ..errors import CandidateError
from ..events import GraphSummary
from ..exporter.decompositions import Decompositions
from ..graphs.artifacts import GraphName, Runner, is_operator
from ..graphs.in_place import is_write_back
from ..graphs.late_compile import compile_after_guards
from ..graphs.operators import is_collective
from ..graphs.pytorch_runner import boxed_code
from ..graphs.size_assumptions import Assumptions
from ..graphs.static_inputs import NO_WEIGHTS, StaticInput
from ..options import Options
from ..runtime.providers import Provider, provider_name
from .autotuner import BUDGET, Autotuner, TunedGraph, may_draw

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"

_MOST_SECONDS = 300.0
"""Seconds, in all, for which this process compiles with Inductor."""

_KNOWN_LIBRARIES = frozenset({"aten", "prims", "dynamo_backends"})
"""Libraries whose operators declare their side effects."""


class Runners(Protocol):
    """Makes runners of graphs on ONNX Runtime, see ``pipeline.runners``."""

    options: Options

    def on_provider(self, position: int) -> Runners:
        """The same for the execution providers from a position of the option ``providers`` on."""

    def decompositions(self) -> Decompositions:
        """Those of operators that have no translation."""

    def on_onnx(
        self, name: GraphName, module: fx.GraphModule, *, is_joint: bool, weights: Mapping[int, StaticInput]
    ) -> Runner:
        """A runner of a graph of the stage ``aten``, or ``joint``."""

    def in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        """A runner of a graph in PyTorch, after all passes."""


class Placement:
    """Makes runners of the graphs of a frame, whose operators AOTAutograd did not decompose.

    Args:
        runners: make runners on ONNX Runtime, of decomposed graphs.
        frame: identifies the frame, see ``describe_frame``.
    """

    seconds_of_inductor = 0.0  # of this process; engines compile in one thread at a time

    def __init__(self, runners: Runners, frame: str) -> None:
        self._runners, self._options, self._frame = runners, runners.options, frame
        self._created = time.perf_counter()
        BUDGET.begin()
        self._assumptions: Assumptions | None = None
        self._tuner: Autotuner | None = None
        self._is_fixed = False  # whether PyTorch runs all graphs, because one of them may not be tuned

    def runner(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, StaticInput] = NO_WEIGHTS
    ) -> Runner:
        """A runner of one graph, by the fastest engine.

        If results must not depend on timing, or the graph must not run twice, inference runs on ONNX Runtime, and
        training in PyTorch, forward and backward.

        Args:
            name: of the graph.
            module: the graph of the stage ``aten``.
            weights: the arguments that are parameters or buffers, by position.
        """
        is_inference, is_fastest = name.direction == "inference", self._options.placement == "fastest"
        may_be_tuned = may_run_twice(module) and not torch.are_deterministic_algorithms_enabled()
        if is_inference and not (may_be_tuned and is_fastest):
            return self._on_onnx(name, weights, 0, module)
        self._is_fixed |= not may_be_tuned
        if self._is_fixed:
            if self._tuner is not None:  # the forward's, which would wait for steps of both
                self._tuner.give_up()
            return self._in_pytorch(name, module)
        names_only = {i: StaticInput(item.name) for i, item in weights.items()}  # values: those of a call
        candidates = {
            engine: functools.partial(self._on_onnx, name, names_only, i)
            for i, engine in enumerate(_on_providers(self._options.providers if is_fastest else ()))
        }
        if is_fastest:
            candidates[INDUCTOR] = functools.partial(_by_inductor, name)
        if self._tuner is None:
            directions = ["inference"] if is_inference else ["forward", "backward"]
            cache = cached_graphs(self._options) if self._options.cache else None
            percent = 100 if is_fastest else self._options.autotune_budget
            self._tuner = Autotuner(
                [PYTORCH, *candidates], directions, cache, self._frame, foreign=[INDUCTOR], percent=percent
            )
            BUDGET.spend(time.perf_counter() - self._created)
        builders = {engine: functools.partial(self._built, name, make, module) for engine, make in candidates.items()}
        return TunedGraph(name, module, self._in_pytorch(name, module), builders, self._tuner)

    def _built(self, name: GraphName, make: Callable[[fx.GraphModule], Runner], module: fx.GraphModule) -> Runner:
        """An engine's runner of a copy of a graph, compiled at a call.

        The graphs of a frame share their symbols, so that an assumption of one engine would be a fact for the next. So
        no engine compiles if something was assumed since the first one did.

        Raises:
            CandidateError: the runner would only be right for some sizes.
        """
        self._assumptions = self._assumptions or Assumptions(module)
        with compile_after_guards(name, self._assumptions):
            return make(_copy_of(module))

    def _in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        copied = _copy_of(module)
        return boxed_code(copied, name) if are_only_built_in() else self._runners.in_pytorch(name, copied)

    def _on_onnx(
        self, name: GraphName, weights: Mapping[int, StaticInput], provider: int, module: fx.GraphModule
    ) -> Runner:
        from ..exporter.decompose import decompose  # imported lazily: it imports onnx

        decompose(module, self._runners.decompositions())
        is_joint = are_only_built_in() or name.direction == "inference"  # no joint pass has run
        return self._runners.on_provider(provider).on_onnx(name, module, is_joint=is_joint, weights=weights)


def placement_of(runners: Runners, module: fx.GraphModule, arguments: Sequence[object]) -> Placement | None:
    """The placement of a frame's graphs; ``None`` if all must run on ONNX Runtime.

    Args:
        runners: of the backend.
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
    """
    options = runners.options
    must_run_on_onnx = options.placement == "onnx" or options.fallback == "error" or options.verify_passes
    is_trained = torch.is_grad_enabled() and any(
        isinstance(arg, torch.Tensor) and arg.requires_grad for arg in arguments
    )
    if must_run_on_onnx or not (options.placement == "fastest" or is_trained):
        return None
    return Placement(runners, describe_frame(module, arguments))


def _on_providers(providers: Sequence[Provider]) -> list[str]:
    """ONNX Runtime as an engine: on all execution providers, on those without the first, and so on."""
    names = [f"{ONNX} on {provider_name(provider)}" for provider in providers]
    return [ONNX, *(f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names) if i)]


def _by_inductor(name: GraphName, module: fx.GraphModule) -> Runner:
    """Inductor's runner.

    Raises:
        CandidateError: its time is used up.
    """
    from ..graphs.inductor import compile_with_inductor

    if Placement.seconds_of_inductor > _MOST_SECONDS:
        raise CandidateError(f"other graphs used up its {_MOST_SECONDS:.0f} s")
    number = sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes)
    started = time.perf_counter()
    try:
        return reporting(compile_with_inductor(module, name.direction), GraphSummary(str(name), 0, number, []))
    finally:
        Placement.seconds_of_inductor += time.perf_counter() - started


def _copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with its own nodes; attributes and fake tensors are shared."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    assert output is not None
    results, original = output
    graph.output(results).meta = dict(original.meta)
    return fx.GraphModule(module, graph)


def describe_frame(module: fx.GraphModule, arguments: Sequence[object]) -> str:
    """Identifies one of Dynamo's graphs for timing: by its code, the types of its arguments, and autocasting."""
    code = [part.code for part in module.modules() if isinstance(part, fx.GraphModule)]
    return "\n".join([*code, str(autocast_dtypes()), *map(_describe_argument, arguments)])


def _describe_argument(arg: object) -> str:
    if not isinstance(arg, torch.Tensor):
        return str(type(arg))
    strides = [str(stride) for stride in arg.stride()] if arg.layout is torch.strided else arg.layout
    return f"{arg.dtype} {arg.device} {[str(size) for size in arg.shape]} {strides} {arg.requires_grad}"


def may_run_twice(module: fx.GraphModule) -> bool:
    """Whether a graph has no side effects but writes to arguments and random numbers of the CPU, whose generator the
    autotuner restores. Operators of unknown libraries may have some: they may count calls, or draw numbers."""
    return all(map(_may_run_twice, module.graph.nodes))


def _may_run_twice(node: fx.Node) -> bool:
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if is_collective(node.target) or (may_draw(node) and not _is_known_generator(node)):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or is_write_back(node):
        return True
    return node.target.namespace in _KNOWN_LIBRARIES and not node.is_impure(impure_random=False)


def _is_known_generator(node: fx.Node) -> bool:
    """Whether ``RandomState`` has the state of a node's generator."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return all(leaf.device.type in ("cpu", "cuda") for leaf in leaves if isinstance(leaf, torch.Tensor))
