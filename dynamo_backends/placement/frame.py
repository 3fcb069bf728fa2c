"""A frame of Dynamo's as PyTorch runs it: with autograd's own backward, and nothing of AOTAutograd.

AOTAutograd's functional graphs, run operator by operator, cost more than what the user wrote. They are what other
engines are compared with; what runs a step if PyTorch is the fastest is Dynamo's graph, at the cost of eager.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..common.call_statistics import reporting
from ..common.operator_watchers import watchers_disabled
from ..common.safety_net import caught, net
from ..events import GraphSummary, count
from ..graphs.pytorch_runner import without_graph
from .autotuner import Autotuner
from .search import Search


class TunedFrame:
    """One of Dynamo's graphs, run by PyTorch or by the engines of the graphs that AOTAutograd made of it.

    Args:
        module: Dynamo's graph, before any pass.
        compiled: runs AOTAutograd's graphs, which are ``TunedGraph``.
        tuner: of the frame.
    """

    def __init__(self, module: fx.GraphModule, compiled: Callable[..., object], tuner: Autotuner) -> None:
        self._in_pytorch, self._compiled, self._tuner = in_pytorch(module), compiled, tuner
        self._settled: Search | None = None  # the search that PyTorch has won
        self._hooks: list[RemovableHandle] = []  # of the last call that was timed
        values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        self._symbolic = [
            i
            for i, value in enumerate(values)
            if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
        ]
        tuner.begins_in_frame = True

    def __call__(self, *args: object) -> object:
        search = self._tuner.search
        if self._settled is search:
            self._tuner.settled_call(0)
            return self._untimed(*args) if self._tuner.is_alone else self._in_pytorch(*args)
        if search.is_over and search.engine != self._tuner.engines[0]:
            return self._compiled(*args)  # which counts its calls
        if not self._tuner.lock.acquire(blocking=False):  # another thread's call is timed, or compiles
            return self._in_pytorch(*args)
        try:
            run = self._chosen()
        finally:
            self._tuner.lock.release()
        return run(*args)

    def _chosen(self) -> Callable[..., object]:
        """What runs this call."""
        tuner = self._tuner
        self._remove_hooks()
        try:
            if tuner.is_paused(0):
                return self._untimed
            if tuner.engine(0) != tuner.engines[0]:
                return self._compiled
            if tuner.search.is_over:
                for graph in tuner.graphs:
                    graph.settle()
                self._settled = tuner.search
                return self._in_pytorch
            count("autotuning_calls")
            return self._timed
        except Exception as error:  # raised by no engine
            caught("autotuning of a frame", error, "PyTorch runs the graph")
            tuner.give_up()
            return self._in_pytorch

    def _timed(self, *args: object) -> object:
        """PyTorch's forward, timed; its backward is timed when it runs."""
        search = self._tuner.search
        elements = sum(tensor.numel() for i in self._symbolic if isinstance(tensor := args[i], torch.Tensor))
        started = time.perf_counter()
        results = self._in_pytorch(*args)
        seconds = time.perf_counter() - started
        with net("the timing of a frame", "The graph runs"):
            search.ran(0, seconds * 1e3, max(elements, 1))
            self._time_backward(search, args, tree_leaves(results))
        return results

    def _untimed(self, *args: object) -> object:
        """An untimed forward; the tuner is told if a backward comes."""
        results = self._in_pytorch(*args)
        if differentiated := _differentiated(tree_leaves(results)):
            register_multi_grad_hook(differentiated, lambda _: self._backward_came(), mode="any")
        return results

    def _backward_came(self) -> None:
        self._in_turn(lambda: self._tuner.is_paused(1) or self._tuner.engine(1))

    def _time_backward(self, search: Search, inputs: Sequence[object], results: Sequence[object]) -> None:
        """Times the backward of a call: from the first gradient of a result to the last gradient of an input."""
        begin, end = list(map(_differentiated, (results, inputs)))
        if not begin or not end or len(self._tuner.directions) == 1:
            return
        started: list[float] = []

        def begins(gradient: torch.Tensor) -> None:
            started.append(time.perf_counter())

        def ends(gradients: Sequence[torch.Tensor | None]) -> None:
            if started:
                milliseconds = (time.perf_counter() - started[0]) * 1e3
                started.clear()
                self._in_turn(lambda: ran(milliseconds))

        def ran(milliseconds: float) -> None:
            if self._tuner.engine(1) == self._tuner.engines[0] and self._tuner.search is search:
                search.ran(1, milliseconds)

        with watchers_disabled():  # of a leaf's view
            self._hooks = [register_multi_grad_hook(begin, begins, mode="any"), register_multi_grad_hook(end, ends)]

    def _in_turn(self, tell: Callable[[], object]) -> None:
        """Tells the tuner something, unless another thread's call is timed, or compiles."""
        if self._tuner.lock.acquire(blocking=False):
            try:
                with net("autotuning of a frame", "The graph runs"):
                    tell()
            finally:
                self._tuner.lock.release()

    def _remove_hooks(self) -> None:
        """They keep the user's graph of gradients alive until its backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def in_pytorch(module: fx.GraphModule) -> Callable[..., object]:
    """Dynamo's graph as the backend ``eager`` runs it."""
    number = sum(node.op.startswith("call_") for node in module.graph.nodes)
    return reporting(without_graph(module), GraphSummary("a graph", 0, number, []))


def _differentiated(values: Sequence[object]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
