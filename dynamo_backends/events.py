"""Counts events under ``torch._dynamo.utils.counters["dynamo_backends"]``, and logs warnings.

During a call of a compiled model, its statistics get each event too (``common.call_statistics``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol

from torch._dynamo.utils import counters

from .common import session_events

EVENTS = {
    "graphs": "graphs of Dynamo that were compiled; with onnx_compiler, graphs from AOTAutograd",
    "recompiles": "graphs of code that the same result of torch.compile had compiled before",
    "regions": "regions on ONNX Runtime",
    "nodes_on_onnx": "operators in regions",
    "nodes_in_pytorch": "operators that run in PyTorch, including graphs that are faster there",
    "fallback OPERATOR": "nodes of this operator that run in PyTorch: no correct translation or kernel exists",
    "rejected_regions": "regions ONNX Runtime rejected; the node it named runs in PyTorch, the graph is split again",
    "rejected_by_provider": "regions that an execution provider rejected; the next provider runs them",
    "wrong_on_provider NAME": "regions whose first results on this provider were wrong; the next provider runs them",
    "failed_on_provider NAME": "calls that failed on this provider; the next one ran them, it is tried again",
    "answers_out_of_memory": "questions to ONNX Runtime about a node for which memory ran out; they are asked again",
    "runtime_failures": "calls of a region that failed on ONNX Runtime; PyTorch computed them",
    "repeated_runs": "runs of a region that failed with memory for the results, and succeeded without it",
    "wrong_results": "calls of a region whose results had a wrong shape or dtype; PyTorch computed them",
    "calls_after_failures": "calls of a region that PyTorch ran since it failed before; it is tried again later",
    "recovered_regions": "how often a region ran on ONNX Runtime again after failures with the same sizes",
    "internal_failures": "exceptions in this package that the safety net caught; PyTorch ran instead",
    "not_compiled_at_a_call": "graphs that PyTorch runs because a compile at a call would need new guards on sizes",
    "calls_without_graph": "calls in which no compiled graph ran; counted if metrics or warm_up observe the model",
    "calls_inside_forward_ad": "calls of a region in forward-mode AD; PyTorch computed them",
    "autotuning_calls": "calls of graphs in which autotuning tried an engine",
    "autotuned DIRECTION ENGINE": "graphs for which autotuning chose this engine",
    "autotuned forward-only ENGINE": "forwards for which autotuning chose this engine, until a backward follows",
    "autotune_rejected ENGINE": "graphs that this engine could not compile or run, or computed wrongly",
    "pass NAME": "how often the pass fired",
    "undone pass NAME": "how often the pass was undone: it failed, made an invalid graph, or changed results",
    "graphs_not_verified": "graphs that verify_passes cannot check: with collectives, or with opaque arguments",
    "constant_weights": "weights that are constants of a session",
    "weights_left_inputs": "weights that are inputs at first: too little memory, ONNX Runtime rejected constants, or a "
    "saved graph was loaded with weights whose changes cannot be noticed",
    "weight_refreshes": "sessions that were replaced because a weight changed",
    "weights_written_unseen": "changes of large weights that PyTorch's version counter missed, found in memory",
    "weights_made_inputs": "weights that became inputs, because building their session took longer than it ran",
    "weights_made_constants": "weights that became constants, because they stayed the same for long enough",
    "weight_sets": "additional sets of weights of a graph, each with its own session",
    "weight_sets_full": "graphs whose further sets of weights are inputs: too many sessions or threads, or no memory",
    "replaced_sessions_freed": "sessions that were freed because a graph for symbolic sizes replaced theirs",
    "cache_hits": "compiled graphs found on disk",
    "cache_misses": "graphs not found on disk, and compiled",
    "cache_stored": "compiled graphs written to disk",
    "cache_entries_removed": "entries of the cache that were damaged or not valid; a miss",
    "cache_waits": "graphs for which this process waited while another one compiled them",
    "cache_locks_ignored": "graphs compiled without waiting (longer): another process is suspended, or took too long",
    "not_cached": "graphs that cannot be stored on disk",
    "not_cached: REASON": "of these, those with this reason",
    "graphs_loaded": "graphs that PyTorch had saved, loaded at their first call",
    "not_loaded": "of graphs that PyTorch had saved, those that ONNX Runtime rejected; PyTorch runs them",
    "not_saved: REASON": "graphs that cannot be saved by PyTorch, with this reason",
    "sessions_without_arena": "sessions with intermediate values of their own, because the shared memory failed",
    "memory_kept": "how often the memory of intermediate values was not returned to the system, because that failed",
    "strides_probed": "operators that were run once on dummy data to learn the strides of their results",
    "strides_not_known": "operators for which that failed; their results get the strides of PyTorch's fake tensors",
    "choices_without_weights": "kernels that ONNX Runtime would choose by weights, which are inputs: float32 is used",
    "choices_not_known": "regions of which the report cannot tell the kernels: ONNX Runtime rejected a condition",
    "compared_runs": "runs that onnx_debug compared",
    "unchecked_sources": "modules without a source when a saved graph was loaded, so that a change is not seen",
    "unchecked_values": "values that could not be compared, or only with eager",
}
"""Every event and what it counts; a word in capitals stands for a name."""

_collected: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar("collected", default=None)

logged: dict[Hashable, object] = {}
"""What ``is_new`` was asked in this process."""


@contextlib.contextmanager
def candidate_run(warnings: list[Callable[[], None]]) -> Iterator[None]:
    """Marks what is compiled or run inside as a candidate of the autotuner, which may still be rejected.

    Args:
        warnings: collects functions that log the warnings of ``warn``, for a candidate that is chosen.
    """
    token = _collected.set(warnings)
    try:
        yield
    finally:
        _collected.reset(token)


def is_candidate_run() -> bool:
    """Whether a candidate is compiled or run: failures are raised instead of falling back to PyTorch."""
    return _collected.get() is not None


def is_new(cause: Hashable) -> bool:
    """Whether this is the first call with this cause in the process: what has the same cause is logged once."""
    mine = object()
    return logged.setdefault(cause, mine) is mine  # also if several threads ask at once


def warn(logger: logging.Logger, text: str, causes: Mapping[Hashable, str] | None = None) -> None:
    """Logs a warning; inside ``candidate_run``, collects it instead.

    Args:
        logger: of the caller's module.
        text: the message, or its start.
        causes: texts that follow it, by cause. Those whose cause is not new are counted; without a new one, nothing is
            logged.
    """

    def log() -> None:
        new = [part for cause, part in (causes or {}).items() if is_new(cause)]
        known = len(causes or ()) - len(new)
        if new or causes is None:
            logger.warning("%s", text + "; ".join([*new, *([f"and {known} that were logged before"] if known else [])]))

    warnings = _collected.get()
    if warnings is None:
        log()
    else:
        warnings.append(log)


@dataclasses.dataclass(frozen=True)
class FallbackCount:
    """Operators of a graph that run in PyTorch although they should run on ONNX Runtime.

    Attributes:
        operator: ``aten.sort.default``, or ``all operators``.
        reason: why.
        number: of operators.
    """

    operator: str
    reason: str
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class GraphSummary:
    """A summary of a compiled graph, for the statistics of calls in which it runs.

    Attributes:
        name: ``graph 0 inference``.
        on_onnx, in_pytorch: the number of operators in each.
        fallbacks: those in PyTorch that should not be there.
    """

    name: str
    on_onnx: int
    in_pytorch: int
    fallbacks: Sequence[FallbackCount]


class Listener(Protocol):
    """Receives the events and the graphs of the current calls of compiled models; see ``common.call_statistics``."""

    def add(self, event: str, number: int, reason: str) -> None:
        """Called with an event, and a reason or an empty text."""
        ...

    def graph_called(self, graph: GraphSummary) -> None:
        """Called with a graph that is called."""
        ...


listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("listeners", default=())
"""Those of the current thread's calls: one compiled model may call another."""


def count(event: str, number: int = 1, reason: str = "") -> None:
    """Counts one of ``EVENTS`` under ``torch._dynamo.utils.counters["dynamo_backends"]``, and tells the
    listeners, which also get the reason."""
    counters["dynamo_backends"][event] += number
    for listener in listeners.get():
        listener.add(event, number, reason)


session_events.receivers.append(count)
