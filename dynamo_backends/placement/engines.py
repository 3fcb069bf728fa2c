"""What runs the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime or Inductor.

PyTorch runs a graph as it is, without our stages: our passes are for ONNX. Where there are passes of others, these run.
An observer that watches sees the graphs on ONNX Runtime, and nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.registry import are_only_built_in

from .. import aot
from ..aot import StaticInput
from ..artifacts import GraphName, Runner, is_operator, without_graph
from ..cache.graphs import cached_graphs
from ..errors import CandidateError
from ..events import count
from ..exporter.decompositions import Decompositions
from ..observer import Observer
from ..options import Options
from ..safety_net import caught
from .autotuner import Autotuner, TunedGraph
from .graph_facts import copy_of, describe_frame, may_run_twice, written_arguments
from .outcomes import Outcomes

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"
"""The engines."""

_MOST_SECONDS = 300.0
"""After how long, in all, this process compiles no further graph with Inductor to try it."""

_MARGIN = 0.95
"""The share of PyTorch's time that a winner takes at most."""

_NO_WEIGHTS: Mapping[int, StaticInput] = MappingProxyType({})

aten = torch.ops.aten

_CALLED_FASTER = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
}
"""Functions that call the same operators on the same arguments, and read these faster: 1.2 microseconds instead of 2.2
(PyTorch 2.13). They are half to three quarters of the nodes of a training step: 540 of 705 of a BERT of 4 layers."""


def boxed_code(module: fx.GraphModule) -> Runner:
    """A graph as PyTorch runs it, one operator after the other; it takes its arguments boxed."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            node.target = _CALLED_FASTER.get(node.target, node.target)
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    count("nodes_in_pytorch", sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes))
    return without_graph(module)


@dataclasses.dataclass
class _Budget:
    """The seconds that are left for Inductor. Engines compile in one thread at a time."""

    left: float = _MOST_SECONDS


_budget = _Budget()

Engine = Callable[[fx.GraphModule], Runner]
"""Makes a runner of a graph, which it may change."""


class Placement:
    """Makes runners of the graphs of a frame. AOTAutograd leaves their operators whole.

    Args:
        options: of the backend.
        observer: is told of the stages.
        frame: what tells the frame from others, see ``describe_frame``.
        on_onnx: the stages from ``aten`` on, on a graph whose operators were decomposed.
        decompositions: what decomposes them.
    """

    def __init__(
        self,
        options: Options,
        observer: Observer,
        frame: str,
        on_onnx: Callable[..., Runner],
        decompositions: Callable[[], Decompositions],
    ) -> None:
        self._options = options
        self._observer = observer
        self._frame = frame
        self._compile_on_onnx = on_onnx
        self._decompositions = decompositions
        self._engines = (PYTORCH, ONNX, INDUCTOR) if options.placement == "fastest" else (PYTORCH, ONNX)
        self._symbols: dict[str, object] | None = None

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
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, StaticInput] = _NO_WEIGHTS
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
        builders = {name: functools.partial(self._build, name, engines[name], module) for name in self._engines}
        return TunedGraph(name, module, builders, self._inference if is_inference else self._training)

    def decompose(self, module: fx.GraphModule) -> None:
        """Decomposes the operators of a graph, as ONNX needs it."""
        from ..exporter.decompose import decompose  # not before a graph is to be compiled

        decompose(module, self._decompositions())

    def _build(self, engine: str, make: Engine, module: fx.GraphModule) -> Runner:
        """What an engine makes of a copy of a graph, at a call, as Dynamo compiles: FX traces for one thread at a time.

        Raises:
            CandidateError: Inductor has had its time, or the runner would hold for some sizes only.
        """
        with aot.as_dynamo_compiles():
            if engine != INDUCTOR:
                return self._holding_for_all_sizes(engine, make, module)
            if _budget.left < 0:
                raise CandidateError(f"{_MOST_SECONDS:.0f} s were spent on it for other graphs")
            started = time.perf_counter()
            try:
                return self._holding_for_all_sizes(engine, make, module)
            finally:
                _budget.left -= time.perf_counter() - started

    def _holding_for_all_sizes(self, engine: str, make: Engine, module: fx.GraphModule) -> Runner:
        """What ``make`` makes, if it assumed nothing on symbolic sizes: Dynamo has its guards by now.

        The graphs of a frame have their symbols together, and what one engine assumed the next finds as a fact: so none
        but PyTorch, which reads sizes as it runs, compiles after something was assumed since the frame's first call.

        Raises:
            CandidateError: something was.
        """
        from ..cache.description import describe_symbols, shape_environment

        symbols = shape_environment(module)
        if symbols is None:
            return make(copy_of(module))
        before = describe_symbols(symbols)
        if self._symbols is None:
            self._symbols = before
        made = make(copy_of(module))
        if describe_symbols(symbols) != (before if engine == PYTORCH else self._symbols):
            raise CandidateError("it would hold for some sizes only")
        return made

    def _in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        if self.is_plain:
            return boxed_code(module)
        from ..compiling import Compiler  # not before a graph is to be compiled

        try:
            compiler = Compiler(self._options, self._observer, None, in_pytorch="its engine is PyTorch")
            with _disable_current_modes():
                return compiler.aten(name, copy_of(module), None, {}, is_joint=False)
        except Exception as error:
            caught(f"the compile of {name}", error, "PyTorch runs the graph as it was")
            return boxed_code(module)

    def _on_onnx(
        self, name: GraphName, module: fx.GraphModule, *, is_joint: bool, weights: Mapping[int, StaticInput]
    ) -> Runner:
        self.decompose(module)
        return self._compile_on_onnx(name, module, is_joint=is_joint, weights=weights)


def placement_of(
    options: Options,
    observer: Observer,
    module: fx.GraphModule,
    arguments: Sequence[object],
    on_onnx: Callable[..., Runner],
    decompositions: Callable[[], Decompositions],
) -> Placement | None:
    """The placement of a frame's graphs; ``None`` if all are to run on ONNX Runtime.

    Args:
        options: of the backend.
        observer: is told of the stages.
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
        on_onnx: see ``Placement``.
        decompositions: see ``Placement``.
    """
    must_run_on_onnx = options.placement == "onnx" or options.fallback == "error" or options.verify_passes
    if must_run_on_onnx or observer.watches or not (options.placement == "fastest" or _is_trained(arguments)):
        return None
    return Placement(options, observer, describe_frame(module, arguments), on_onnx, decompositions)


def _by_inductor(name: GraphName, module: fx.GraphModule) -> Runner:
    from ..inductor import compile_with_inductor

    return compile_with_inductor(module, name.direction)


def _is_trained(arguments: Sequence[object]) -> bool:
    """Whether AOTAutograd will look for gradients."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in arguments)
