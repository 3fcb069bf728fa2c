"""Runs a compiled graph node by node, and records its values, sessions and times for the comparison.

The session of a region is repeated on the arguments of its call, to find results that are not the same each time.
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

from passes.engine.fx.editing import written_by

from ..dumps.schema import Cost
from ..numerics.arrays import same_elements
from ..partition.program import LoadedProgram
from ..partition.regions import ORIGINAL
from ..partition.runnable_region import RunnableRegion
from ..pipeline.stage_data import CompiledGraph, CompiledRegion
from ..runtime.session import Session
from .interpreter import Interpreter, flat

REPEATS = 2
"""Runs after the real one. A race shows in one of two to four runs, more rarely if other work is done in between; the
command ``compare --runs`` makes more runs."""


@dataclasses.dataclass(frozen=True)
class RepeatedRegion:
    """The further runs of a region."""

    others: dict[int, list[torch.Tensor]]  # by position of the output, those that differ in a bit from the first run's
    failure: str = ""  # why the region could not be repeated


@dataclasses.dataclass
class RecordedRun:
    """One run of a graph. Integer keys are region indices.

    ``values`` has those of the graph before the split, copied before the graph overwrites them. ``sessions`` are those
    that ran: another thread may use some with other weights.
    """

    results: Sequence[object] = ()  # what the graph returned
    computed: Sequence[object] = ()  # the values of the nodes that it should return
    values: dict[fx.Node, object] = dataclasses.field(default_factory=dict)
    sessions: dict[int, Session] = dataclasses.field(default_factory=dict)
    repeated: dict[int, RepeatedRegion] = dataclasses.field(default_factory=dict)  # what further runs gave
    rescued: dict[int, str] = dataclasses.field(default_factory=dict)  # errors of sessions that PyTorch replaced
    cost: Cost = dataclasses.field(default_factory=Cost)
    failure: Exception | None = None  # the first exception while recording; then the record is incomplete

    def session_of(self, region: CompiledRegion) -> Session:
        """The session that ran a region, or the region's first session if PyTorch ran it."""
        return self.sessions.get(region.region.index, region.bound)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Stores an exception of the block as ``failure``, so that the user's run goes on."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error


def record_run(graph: CompiledGraph, loaded: LoadedProgram, args: list[object]) -> RecordedRun:
    """Runs a graph on its arguments, a list that is emptied."""
    interpreter = _RecordingInterpreter(loaded.module)
    recorded = interpreter.recorded
    recorded.results = interpreter.run(*args, enable_io_processing=False)
    args.clear()
    with recorded.recording():
        nodes = flat(graph.module.graph.output_node().args[0])
        recorded.computed = [interpreter.current.get(node) if isinstance(node, fx.Node) else node for node in nodes]
        _count_crossing_tensors(graph, recorded)
    return recorded


def can_be_compared(args: Sequence[object]) -> bool:
    """Whether no value is a forward-mode AD dual, a ``vmap`` batch, or an autograd zero without memory.

    Runs with such values are not compared.
    """
    if forward_ad._current_level >= 0:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return not any(
        is_batchedtensor(value) or is_legacy_batchedtensor(value) or value._is_zerotensor() for value in tensors
    )


def repeat_region(bound: Session, args: Sequence[object], outputs: Sequence[object]) -> RepeatedRegion:
    """Repeats a region's session on the unchanged arguments of its call, which returned ``outputs``."""
    others: dict[int, list[torch.Tensor]] = {}
    try:
        with torch.no_grad():
            for _ in range(REPEATS):
                for i, value in bitwise_differing(outputs, bound(args)):
                    others.setdefault(i, []).append(value)
    except Exception as error:  # ``unchecked`` says so, and the user's run goes on
        return RepeatedRegion(others, f"{type(error).__name__}: {error}")
    return RepeatedRegion(others)


def bitwise_differing(first: Sequence[object], second: Sequence[object]) -> list[tuple[int, torch.Tensor]]:
    """The tensors of ``second`` that differ in a bit from those of ``first``, with their positions."""
    return [
        (i, after)
        for i, (before, after) in enumerate(zip(first, second, strict=True))
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and not same_elements(before, after)
    ]


def _count_crossing_tensors(graph: CompiledGraph, run: RecordedRun) -> None:
    region_of = {node: region.region.index for region in graph.regions for node in region.region.nodes}
    for node, value in run.values.items():
        if node.op in ("placeholder", "get_attr") or not isinstance(value, torch.Tensor):
            continue
        if any(user.op != "output" and region_of.get(user) != region_of.get(node) for user in node.users):
            run.cost.crossing_tensors += 1
            run.cost.crossing_bytes += value.numel() * value.element_size()


class _RecordingInterpreter(Interpreter):
    """Runs a split graph; each region is one call.

    A region is repeated right after its call, before the graph writes into the region's inputs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recorded = RecordedRun()
        self.current: dict[fx.Node, object] = {}  # as ``RecordedRun.values``, also after the graph overwrites them

    def run_node(self, n: fx.Node) -> object:
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            with self.recorded.recording():
                self._copy_overwritten_values(n)
        start = time.perf_counter()
        region = self.fetch_attr(n.target) if n.op == "call_module" else None
        if isinstance(region, RunnableRegion):
            args, _ = self.fetch_args_kwargs_from_env(n)
            value: object = self._run_region(region, args)
        else:
            value = super().run_node(n)
            self.recorded.cost.pytorch_milliseconds += (time.perf_counter() - start) * 1e3
        original = n.meta.get(ORIGINAL)
        if original is not None:
            self.recorded.values[original] = self.current[original] = value
        return value

    def _run_region(self, region: RunnableRegion, args: Sequence[object]) -> Sequence[object]:
        recorded, failures = self.recorded, region.failures
        with recorded.recording():
            self._copy_values_in([args[i] for i in region.session.bound.written])
        start = time.perf_counter()
        results, bound = region.run_to_compare(args)
        recorded.cost.region_milliseconds[region.index] = (time.perf_counter() - start) * 1e3
        if region.failures > failures:
            recorded.rescued[region.index] = region.last_failure
        if bound is not None:
            recorded.sessions[region.index] = bound
            with recorded.recording():
                recorded.repeated[region.index] = repeat_region(bound, args, results)
        return results

    def _copy_overwritten_values(self, node: fx.Node) -> None:
        """Copies the recorded values whose memory a node is about to write."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        self._copy_values_in(pytree.tree_leaves(written_by(node.target, args, kwargs)))

    def _copy_values_in(self, memories: Sequence[object]) -> None:
        """Copies the recorded values that share memory with tensors."""
        addresses = {_address(memory) for memory in memories} - {None}
        if not addresses:
            return

        def copy(value: object) -> object:
            return value.detach().clone() if isinstance(value, torch.Tensor) and _address(value) in addresses else value

        self.recorded.values = {key: pytree.tree_map(copy, value) for key, value in self.recorded.values.items()}


def _address(value: object) -> int | None:
    """The address of a tensor's memory, if it has any."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return None
    return value.untyped_storage().data_ptr()
