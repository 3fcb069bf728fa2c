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

from ..dumps.schema import Cost
from ..graphs.artifacts import CompiledGraph, CompiledRegion, RunnableRegion
from ..numerics.program_execution import written_by
from ..partition.program import Loaded
from ..partition.regions import ORIGINAL
from ..runtime.binding import BoundSession
from .interpreter import Interpreter
from .repeated_runs import RepeatedRegion, repeat_region


@dataclasses.dataclass
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

    results: Sequence[object] = ()
    values: dict[fx.Node, object] = dataclasses.field(default_factory=dict)
    sessions: dict[int, BoundSession] = dataclasses.field(default_factory=dict)
    repeated: dict[int, RepeatedRegion] = dataclasses.field(default_factory=dict)
    rescued: dict[int, str] = dataclasses.field(default_factory=dict)
    cost: Cost = dataclasses.field(default_factory=Cost)
    failure: Exception | None = None

    def session_of(self, region: CompiledRegion) -> BoundSession:
        """The session of a region that ran; one of it where PyTorch did."""
        return self.sessions.get(region.region.index, region.bound)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What is done inside is no part of the run: an exception is kept, and does not end it."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error


def watch(graph: CompiledGraph, loaded: Loaded, args: list[object]) -> WatchedRun:
    """Runs a graph on its arguments, a list that is emptied."""
    interpreter = _RecordingInterpreter(loaded.module)
    watched = interpreter.watched
    watched.results = interpreter.run(*args, enable_io_processing=False)
    args.clear()
    with watched.watching():
        _measure_crossing(graph, watched)
    return watched


def are_plain(args: Sequence[object]) -> bool:
    """Whether values are what their memory holds: no tangents of forward-mode AD, no batches of ``vmap``, no zeros of
    autograd without memory. Anything else is not compared."""
    if forward_ad._current_level >= 0:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return not any(
        is_batchedtensor(value) or is_legacy_batchedtensor(value) or value._is_zerotensor() for value in tensors
    )


def _measure_crossing(graph: CompiledGraph, run: WatchedRun) -> None:
    region_of = {node: region.region.index for region in graph.regions for node in region.region.nodes}
    for node, value in run.values.items():
        if node.op in ("placeholder", "get_attr") or not isinstance(value, torch.Tensor):
            continue
        if any(user.op != "output" and region_of.get(user) != region_of.get(node) for user in node.users):
            run.cost.crossing_tensors += 1
            run.cost.crossing_bytes += value.numel() * value.element_size()


class _RecordingInterpreter(Interpreter):
    """Runs a split graph, each region a few times.

    Keeps the values of the nodes of the graph before the split, the time each side takes, and what came of the further
    runs: they come at once, before the graph writes into the region's inputs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.watched = WatchedRun()

    def run_node(self, n: fx.Node) -> object:
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            with self.watched.watching():
                self._keep_what_is_overwritten(n)
        start = time.perf_counter()
        region = self.fetch_attr(n.target) if n.op == "call_module" else None
        if isinstance(region, RunnableRegion):
            args, _ = self.fetch_args_kwargs_from_env(n)
            value: object = self._run_region(region, args)
        else:
            value = super().run_node(n)
            self.watched.cost.pytorch_milliseconds += (time.perf_counter() - start) * 1e3
        original = n.meta.get(ORIGINAL)
        if original is not None:
            self.watched.values[original] = value
        return value

    def _run_region(self, region: RunnableRegion, args: Sequence[object]) -> Sequence[object]:
        watched, failures, start = self.watched, region.failures, time.perf_counter()
        results, bound = region.run_to_compare(args)
        watched.cost.region_milliseconds[region.index] = (time.perf_counter() - start) * 1e3
        if region.failures > failures:
            watched.rescued[region.index] = region.last_failure
        if bound is not None:
            watched.sessions[region.index] = bound
            with watched.watching():
                watched.repeated[region.index] = repeat_region(bound, args, results)
        return results

    def _keep_what_is_overwritten(self, node: fx.Node) -> None:
        """Copies the kept values in whose memory a node will write."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        leaves = pytree.tree_leaves(written_by(node.target, args, kwargs))
        memories = {_memory(leaf) for leaf in leaves} - {None}

        def copy(value: object) -> object:
            return value.detach().clone() if isinstance(value, torch.Tensor) and _memory(value) in memories else value

        self.watched.values = {key: pytree.tree_map(copy, value) for key, value in self.watched.values.items()}


def _memory(value: object) -> int | None:
    """The address of a tensor's memory; ``None`` for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return None
    return value.untyped_storage().data_ptr()
