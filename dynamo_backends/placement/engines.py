"""What runs the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime or Inductor.

PyTorch runs a graph as it is, without our stages: our passes are for ONNX. Where there are passes of others, these run.
An observer that watches sees the graphs on ONNX Runtime, and nothing is tuned.
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
from ..errors import CandidateError
from ..graphs.aot import NO_WEIGHTS, StaticInput
from ..graphs.artifacts import GraphName, Runner
from ..graphs.late_compile import at_a_call
from ..graphs.pytorch_runner import boxed_code
from ..graphs.size_assumptions import Assumptions
from .autotuner import Autotuner, TunedGraph
from .graph_facts import copy_of, describe_frame, may_run_twice, written_arguments
from .outcomes import Outcomes

if TYPE_CHECKING:
    from ..pipeline.runners import Runners

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"
"""The engines."""

_MOST_SECONDS = 300.0
"""After how long, in all, this process compiles no further graph with Inductor to try it."""

_MARGIN = 0.95
"""The share of PyTorch's time that a winner takes at most."""


@dataclasses.dataclass
class Budget:
    """The seconds that are left for Inductor. Engines compile in one thread at a time."""

    left: float = _MOST_SECONDS


budget = Budget()

Engine = Callable[[fx.GraphModule], Runner]
"""Makes a runner of a graph, which it may change."""


class Placement:
    """Makes runners of the graphs of a frame. AOTAutograd leaves their operators whole.

    Args:
        runners: make what runs on ONNX Runtime, of a graph whose operators were decomposed.
        frame: what tells the frame from others, see ``describe_frame``.
    """

    def __init__(self, runners: Runners, frame: str) -> None:
        self._runners = runners
        self._options = runners.options
        self._frame = frame
        self._engines = (PYTORCH, ONNX, INDUCTOR) if self._options.placement == "fastest" else (PYTORCH, ONNX)
        self._assumptions: Assumptions | None = None

    @property
    def is_plain(self) -> bool:
        """Whether no pass is to be run that we do not know."""
        return are_only_built_in()

    @functools.cached_property
    def _training(self) -> Autotuner:
        return self._autotuner("forward", "backward")

    @functools.cached_property
    def _inference(self) -> Autotuner:
        return self._autotuner("inference")

    def _autotuner(self, *directions: str) -> Autotuner:
        kept = cached_graphs(self._options) if self._options.cache else None
        outcomes = Outcomes(kept, self._frame, directions, self._engines) if kept is not None else None
        return Autotuner(self._engines, directions, margin=_MARGIN, outcomes=outcomes, foreign=(INDUCTOR,))

    def runner(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, StaticInput] = NO_WEIGHTS
    ) -> Runner:
        """What runs one graph: the engine that is, or will be found, fastest.

        Where a clock may not decide, or a graph may not run twice or writes to what is no argument of its, inference
        runs on ONNX Runtime, training in PyTorch.

        Args:
            name: which graph.
            module: the graph of the stage ``aten``; it stays as it is.
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
        return TunedGraph(name, module, builders, self._inference if is_inference else self._training)

    def decompose(self, module: fx.GraphModule) -> None:
        """Decomposes the operators of a graph, as ONNX needs it."""
        from ..exporter.decompose import decompose  # not before a graph is to be compiled

        decompose(module, self._runners.decompositions())

    def _build(self, name: GraphName, engine: str, make: Engine, module: fx.GraphModule) -> Runner:
        """What an engine makes of a copy of a graph, at a call.

        The graphs of a frame have their symbols together, and what one engine assumed the next finds as a fact: so none
        but PyTorch, which reads sizes as it runs, compiles after something was assumed since the frame's first call.

        Raises:
            CandidateError: Inductor has had its time, or the runner would hold for some sizes only.
        """
        now = Assumptions(module)
        if self._assumptions is None:
            self._assumptions = now
        if engine == INDUCTOR and budget.left < 0:
            raise CandidateError(f"{_MOST_SECONDS:.0f} s were spent on it for other graphs")
        started = time.perf_counter()
        try:
            with at_a_call(name, now if engine == PYTORCH else self._assumptions):
                return make(copy_of(module))
        finally:
            if engine == INDUCTOR:
                budget.left -= time.perf_counter() - started

    def _in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        return boxed_code(module) if self.is_plain else self._runners.in_pytorch(name, module)

    def _on_onnx(
        self, name: GraphName, module: fx.GraphModule, *, is_joint: bool, weights: Mapping[int, StaticInput]
    ) -> Runner:
        self.decompose(module)
        return self._runners.on_onnx(name, module, is_joint=is_joint, weights=weights)


def placement_of(runners: Runners, module: fx.GraphModule, arguments: Sequence[object]) -> Placement | None:
    """The placement of a frame's graphs; ``None`` if all are to run on ONNX Runtime.

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

    return compile_with_inductor(module, name.direction)


def _is_trained(arguments: Sequence[object]) -> bool:
    """Whether AOTAutograd will look for gradients."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in arguments)
