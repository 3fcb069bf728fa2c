"""Which way the graphs of one of Dynamo's frames run, and the ways there are: PyTorch, ONNX Runtime, Inductor.

PyTorch runs a graph as it is, without our stages, if nobody looks: our passes are for ONNX. Where somebody does, all
stages are shown; and an observer that watches sees a graph where it was found to be fastest before, else on ONNX
Runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.registry import are_only_built_in

from .aot import StaticInput
from .artifacts import GraphName, Runner
from .cache.graphs import cached_graphs
from .exporter.decompositions import Decompositions
from .observer import Observer
from .options import Options
from .placing import INDUCTOR, ONNX, PYTORCH, Placing, Way, boxed_code, describe_frame

_NO_WEIGHTS: Mapping[int, StaticInput] = MappingProxyType({})


class Ways:
    """Makes runners of the graphs of a frame. AOTAutograd leaves their operators whole.

    Args:
        options: of the backend.
        observer: is told of the stages.
        placing: finds out where a graph is fastest.
        names: the ways there are; the first runs a graph until that is known.
        on_onnx: the stages from ``aten`` on, on a graph whose operators were taken apart.
        decompositions: what takes them apart.
    """

    def __init__(
        self,
        options: Options,
        observer: Observer,
        placing: Placing,
        names: Sequence[str],
        on_onnx: Callable[..., Runner],
        decompositions: Callable[[], Decompositions],
    ) -> None:
        self._options = options
        self._observer = observer
        self._placing = placing
        self._names = names
        self._compile_on_onnx = on_onnx
        self._decompositions = decompositions

    @property
    def is_plain(self) -> bool:
        """Whether nobody is to see the stages, and no pass is to be run that we do not know."""
        return not self._observer.watches and are_only_built_in()

    def runner(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, StaticInput] = _NO_WEIGHTS
    ) -> Runner:
        """What runs one graph.

        Args:
            name: which graph.
            module: the graph of the stage ``aten``.
            weights: the arguments that are parameters or buffers, by position.
        """
        if self._observer.watches:
            outcome = self._placing.known(name.direction, self._names)
            if outcome is not None and outcome.winner != ONNX:
                return self._in_pytorch(name, f"the graph is fastest by {outcome.winner}: {outcome}", module)
            return self._on_onnx(name, module, is_joint=name.direction == "inference", weights=weights)
        ways: dict[str, Way] = {
            PYTORCH: boxed_code
            if self.is_plain
            else functools.partial(self._in_pytorch, name, "it is tried, or is fastest, here"),
            ONNX: functools.partial(
                self._on_onnx, name, is_joint=self.is_plain or name.direction == "inference", weights=weights
            ),
            INDUCTOR: functools.partial(_by_inductor, name),
        }
        return self._placing.place(name, module, {way: ways[way] for way in self._names})

    def decompose(self, module: fx.GraphModule) -> None:
        """Takes the operators of a graph apart, as ONNX needs it."""
        from .exporter.decompose import decompose  # not before a graph is to be compiled

        decompose(module, self._decompositions())

    def _in_pytorch(self, name: GraphName, why: str, module: fx.GraphModule) -> Runner:
        from .compiling import Compiler  # not before a graph is to be compiled

        compiler = Compiler(self._options, self._observer, None, in_pytorch=why)
        with _disable_current_modes():
            return compiler.aten(name, module, None, {}, is_joint=False)

    def _on_onnx(
        self, name: GraphName, module: fx.GraphModule, *, is_joint: bool, weights: Mapping[int, StaticInput]
    ) -> Runner:
        self.decompose(module)
        return self._compile_on_onnx(name, module, is_joint=is_joint, weights=weights)


def ways_of(
    options: Options,
    observer: Observer,
    module: fx.GraphModule,
    arguments: Sequence[object],
    on_onnx: Callable[..., Runner],
    decompositions: Callable[[], Decompositions],
) -> Ways | None:
    """The ways of a frame's graphs; ``None`` if all are to run on ONNX Runtime.

    Args:
        options: of the backend.
        observer: is told of the stages.
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
        on_onnx: see ``Ways``.
        decompositions: see ``Ways``.
    """
    tries_all = options.placement == "fastest"
    must_run_on_onnx = options.placement == "onnx" or options.fallback == "error" or options.verify_passes
    if must_run_on_onnx or not (tries_all or _is_trained(arguments)):
        return None
    names = (PYTORCH, ONNX, INDUCTOR) if tries_all else (PYTORCH, ONNX)
    placing = Placing(describe_frame(module, arguments), cached_graphs(options) if options.cache else None)
    if observer.watches and all(
        outcome is None or outcome.winner == ONNX
        for outcome in (placing.known(direction, names) for direction in ("forward", "backward", "inference"))
    ):
        return None
    return Ways(options, observer, placing, names, on_onnx, decompositions)


def _by_inductor(name: GraphName, module: fx.GraphModule) -> Runner:
    from .inductor import compile_with_inductor

    return compile_with_inductor(module, name.direction)


def _is_trained(arguments: Sequence[object]) -> bool:
    """Whether AOTAutograd will look for gradients."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in arguments)
