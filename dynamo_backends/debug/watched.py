"""Runs a compiled graph as it runs, and keeps what a comparison needs of it.

The graph is interpreted node by node, each region still one call, so that the values between regions can be kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..artifacts import CompiledGraph, RunnableRegion
from ..regions import ORIGINAL
from ..runtime.binding import BoundSession
from .interpreter import Interpreter
from .repeat import RepeatedRegion, repeat_region


@dataclasses.dataclass(frozen=True)
class Cost:
    """Where one run spent its time, and what crossed between ONNX Runtime and PyTorch.

    Attributes:
        region_milliseconds: wall time of each region's call, by its index.
        pytorch_milliseconds: wall time of all nodes in PyTorch.
        crossing_tensors: values that one region computes and another or PyTorch reads, or the reverse.
        crossing_bytes: their size.
    """

    region_milliseconds: dict[int, float]
    pytorch_milliseconds: float
    crossing_tensors: int
    crossing_bytes: int


@dataclasses.dataclass(frozen=True)
class WatchedRun:
    """One run of a graph.

    Attributes:
        results: what it returned.
        values: by node of the graph before the split, its value, as it was before the graph wrote into it.
        sessions: by index of a region, the session that ran; that of other weights may run in another thread.
        repeated: by index of a region, what came of running it again.
        rescued: by index of a region that PyTorch ran because its session failed, what ONNX Runtime said.
        cost: where the time went.
        failure: an exception of what watched the run, if there was one; then the rest is not complete.
    """

    results: Sequence[object]
    values: dict[fx.Node, object]
    sessions: dict[int, BoundSession]
    repeated: dict[int, RepeatedRegion]
    rescued: dict[int, str]
    cost: Cost
    failure: Exception | None = None


def watch(graph: CompiledGraph, args: list[object]) -> WatchedRun:
    """Runs a graph.

    Args:
        graph: the graph.
        args: its arguments, boxed; the list is emptied.
    """
    interpreter = _RecordingInterpreter(graph.assembled)
    results = interpreter.run(*args, enable_io_processing=False)
    args.clear()
    cost = Cost({}, 0.0, 0, 0)
    with interpreter.watching():
        cost = _measure_cost(graph, interpreter)
    return WatchedRun(
        results,
        interpreter.values,
        interpreter.sessions,
        interpreter.repeated,
        interpreter.rescued,
        cost,
        interpreter.failure,
    )


def are_plain(args: Sequence[object]) -> bool:
    """Whether values are what their memory holds: no tangents of forward-mode AD, no batches of ``vmap``, no zeros of
    autograd without memory. Anything else is not compared."""
    if forward_ad._current_level >= 0:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return not any(
        is_batchedtensor(value) or is_legacy_batchedtensor(value) or value._is_zerotensor() for value in tensors
    )


def _measure_cost(graph: CompiledGraph, interpreter: _RecordingInterpreter) -> Cost:
    """What the run that was interpreted spent in regions and in PyTorch, and what went between them."""
    region_of = {node: region.region.index for region in graph.regions for node in region.region.nodes}
    tensors = size = 0
    for node, value in interpreter.values.items():
        if node.op in ("placeholder", "get_attr") or not isinstance(value, torch.Tensor):
            continue
        home = region_of.get(node)
        if any(user.op != "output" and region_of.get(user) != home for user in node.users):
            tensors += 1
            size += value.numel() * value.element_size()
    return Cost(interpreter.region_milliseconds, interpreter.pytorch_milliseconds, tensors, size)


class _RecordingInterpreter(Interpreter):
    """Runs a split graph, each region a few times.

    Keeps the values of the nodes of the graph before the split, the time each side takes, and what came of the further
    runs: they come at once, before the graph writes into the region's inputs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, object] = {}
        self.sessions: dict[int, BoundSession] = {}
        self.repeated: dict[int, RepeatedRegion] = {}
        self.rescued: dict[int, str] = {}
        self.region_milliseconds: dict[int, float] = {}
        self.pytorch_milliseconds = 0.0
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What is done inside is no part of the run: an exception is kept, and does not end it."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error

    def run_node(self, n: fx.Node) -> object:
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            with self.watching():
                self._keep_what_is_overwritten(n)
        start = time.perf_counter()
        if isinstance(n.target, RunnableRegion):
            args, _ = self.fetch_args_kwargs_from_env(n)
            value: object = self._run_region(n.target, args)
        else:
            value = super().run_node(n)
            self.pytorch_milliseconds += (time.perf_counter() - start) * 1e3
        original = n.meta.get(ORIGINAL)
        if original is not None:
            self.values[original] = value
        return value

    def _run_region(self, region: RunnableRegion, args: Sequence[object]) -> Sequence[object]:
        failures, start = region.failures, time.perf_counter()
        results, bound = region.run_to_compare(args)
        self.region_milliseconds[region.index] = (time.perf_counter() - start) * 1e3
        if region.failures > failures:
            self.rescued[region.index] = region.last_failure
        if bound is not None:
            self.sessions[region.index] = bound
            with self.watching():
                self.repeated[region.index] = repeat_region(region, bound, args, results)
        return results

    def _keep_what_is_overwritten(self, node: fx.Node) -> None:
        """Copies the kept values in whose memory a node will write."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        given = [*args, *(kwargs.get(item.name) for item in node.target._schema.arguments[len(args) :])]
        written = {
            _memory(leaf)
            for item, value in zip(node.target._schema.arguments, given, strict=True)
            if item.alias_info is not None and item.alias_info.is_write
            for leaf in pytree.tree_leaves(value)
        } - {None}

        def copy(value: object) -> object:
            return value.detach().clone() if isinstance(value, torch.Tensor) and _memory(value) in written else value

        self.values = {key: pytree.tree_map(copy, value) for key, value in self.values.items()}


def _memory(value: object) -> int | None:
    """The address of a tensor's memory; ``None`` for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return None
    return value.untyped_storage().data_ptr()
