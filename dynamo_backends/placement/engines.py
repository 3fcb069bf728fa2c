"""The engines that run the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime and Inductor.

PyTorch runs a graph without our passes, which are for ONNX; if users registered passes, all passes run. Nothing is
autotuned while an observer watches: it sees all graphs on ONNX Runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from passes.engine.registry import are_only_built_in

from ..cache.graphs import cached_graphs
from ..common.call_statistics import reporting
from ..errors import CandidateError
from ..events import GraphSummary
from ..graphs.artifacts import GraphName, Runner, is_operator
from ..graphs.late_compile import compile_after_guards
from ..graphs.pytorch_runner import boxed_code
from ..graphs.size_assumptions import Assumptions
from ..graphs.static_inputs import NO_WEIGHTS, StaticInput
from .autotuner import Autotuner, TunedGraph
from .graph_facts import copy_of, describe_frame, may_run_twice, written_arguments
from .outcomes import StoredOutcomes

if TYPE_CHECKING:
    from ..pipeline.runners import Runners

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"

_MOST_SECONDS = 300.0
"""Seconds, in all, for which this process tries Inductor."""

_MARGIN = 0.95
"""A winner must take at most this share of PyTorch's time."""


@dataclasses.dataclass
class Budget:
    """The seconds left for Inductor. Engines compile in one thread at a time."""

    left: float = _MOST_SECONDS


budget = Budget()

Engine = Callable[[fx.GraphModule], Runner]
"""Makes a runner of a graph, which it may change."""


class Placement:
    """Makes runners of the graphs of a frame, whose operators AOTAutograd did not decompose.

    Args:
        runners: make runners on ONNX Runtime, of decomposed graphs.
        frame: identifies the frame, see ``describe_frame``.
    """

    def __init__(self, runners: Runners, frame: str) -> None:
        self._runners = runners
        self._options = runners.options
        self._frame = frame
        self._engines = (PYTORCH, ONNX, INDUCTOR) if self._options.placement == "fastest" else (PYTORCH, ONNX)
        self._assumptions: Assumptions | None = None
        self._autotuners: dict[tuple[str, ...], Autotuner] = {}

    @property
    def is_plain(self) -> bool:
        """Whether users registered no passes."""
        return are_only_built_in()

    def _autotuner(self, *directions: str) -> Autotuner:
        """The autotuner of graphs with these directions, made at first use."""
        if directions not in self._autotuners:
            cache = cached_graphs(self._options) if self._options.cache else None
            outcomes = StoredOutcomes(cache, self._frame, directions, self._engines) if cache is not None else None
            self._autotuners[directions] = Autotuner(
                self._engines, directions, margin=_MARGIN, outcomes=outcomes, foreign=(INDUCTOR,)
            )
        return self._autotuners[directions]

    def runner(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, StaticInput] = NO_WEIGHTS
    ) -> Runner:
        """A runner of one graph, by the fastest engine.

        If results must not depend on timing, or the graph must not run twice, or it writes to something other than its
        arguments, inference runs on ONNX Runtime and training in PyTorch.

        Args:
            name: of the graph.
            module: the graph of the stage ``aten``; it is not changed.
            weights: the arguments that are parameters or buffers, by position.
        """
        is_inference = name.direction == "inference"
        engines: dict[str, Engine] = {
            PYTORCH: functools.partial(self._in_pytorch, name),
            ONNX: functools.partial(self._on_onnx, name, is_joint=self.is_plain or is_inference, weights=weights),
            INDUCTOR: functools.partial(_by_inductor, name),
        }
        is_tuned = written_arguments(module) is not None and may_run_twice(module)
        if torch.are_deterministic_algorithms_enabled() or not is_tuned:
            return engines[ONNX if is_inference else PYTORCH](copy_of(module))
        builders = {item: functools.partial(self._build, name, item, engines[item], module) for item in self._engines}
        directions = ("inference",) if is_inference else ("forward", "backward")
        return TunedGraph(name, module, builders, self._autotuner(*directions))

    def decompose(self, module: fx.GraphModule) -> None:
        """Decomposes the operators of a graph for ONNX, in place."""
        from ..exporter.decompose import decompose  # only when a graph is compiled

        decompose(module, self._runners.decompositions())

    def _build(self, name: GraphName, engine: str, make: Engine, module: fx.GraphModule) -> Runner:
        """An engine's runner of a copy of a graph, compiled at a call.

        The graphs of a frame share their symbols, so that an assumption of one engine would be a fact for the next. So
        no engine compiles if something was assumed since the frame's first call; except PyTorch, which reads sizes as
        it runs.

        Raises:
            CandidateError: Inductor's time is used up, or the runner would only be right for some sizes.
        """
        now = Assumptions(module)
        if self._assumptions is None:
            self._assumptions = now
        if engine == INDUCTOR and budget.left < 0:
            raise CandidateError(f"other graphs used up its {_MOST_SECONDS:.0f} s")
        started = time.perf_counter()
        try:
            with compile_after_guards(name, now if engine == PYTORCH else self._assumptions):
                return make(copy_of(module))
        finally:
            if engine == INDUCTOR:
                budget.left -= time.perf_counter() - started

    def _in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        return boxed_code(module, name) if self.is_plain else self._runners.in_pytorch(name, module)

    def _on_onnx(
        self, name: GraphName, module: fx.GraphModule, *, is_joint: bool, weights: Mapping[int, StaticInput]
    ) -> Runner:
        self.decompose(module)
        return self._runners.on_onnx(name, module, is_joint=is_joint, weights=weights)


def placement_of(runners: Runners, module: fx.GraphModule, arguments: Sequence[object]) -> Placement | None:
    """The placement of a frame's graphs; ``None`` if all must run on ONNX Runtime.

    Args:
        runners: of the backend.
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
    """
    options = runners.options
    must_run_on_onnx = options.placement == "onnx" or options.fallback == "error" or options.verify_passes
    if must_run_on_onnx or runners.observer.watches or not (options.placement == "fastest" or _is_trained(arguments)):
        return None
    return Placement(runners, describe_frame(module, arguments))


def _by_inductor(name: GraphName, module: fx.GraphModule) -> Runner:
    from ..graphs.inductor import compile_with_inductor

    number = sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes)
    return reporting(compile_with_inductor(module, name.direction), GraphSummary(str(name), 0, number, []))


def _is_trained(arguments: Sequence[object]) -> bool:
    """Whether AOTAutograd will make a backward graph."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in arguments)
