"""Counts events under ``torch._dynamo.utils.counters["dynamo_backends"]``, and logs warnings."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from torch._dynamo.utils import counters

EVENTS = {
    "graphs": "graphs of Dynamo that were compiled; with onnx_compiler, graphs from AOTAutograd",
    "recompiles": "graphs of code that was compiled before",
    "regions": "regions on ONNX Runtime",
    "nodes_on_onnx": "operators in regions",
    "nodes_in_pytorch": "operators that run in PyTorch, including graphs that are faster there",
    "nodes_by_inductor": "of these, operators that Inductor compiled (fallback='inductor')",
    "fallback OPERATOR": "nodes of this operator that run in PyTorch: no correct translation or kernel exists",
    "rejected_regions": "regions ONNX Runtime rejected; the node it named runs in PyTorch, the graph is split again",
    "rejected_by_provider": "regions that an execution provider rejected; the next provider runs them",
    "wrong_on_provider NAME": "regions whose first results on this provider were wrong; the next provider runs them",
    "runtime_failures": "calls of a region that failed on ONNX Runtime; PyTorch computed them",
    "wrong_results": "calls of a region whose results had a wrong shape or dtype; PyTorch computed them",
    "internal_failures": "exceptions in this package that the safety net caught; PyTorch ran instead",
    "not_compiled_at_a_call": "graphs that PyTorch runs because a compile at a call would need new guards on sizes",
    "inductor_failures": "groups of operators that Inductor could not compile or run; PyTorch runs them",
    "calls_inside_forward_ad": "calls of a region in forward-mode AD; PyTorch computed them",
    "autotuned DIRECTION ENGINE": "graphs for which autotuning chose this engine",
    "autotune_rejected ENGINE": "graphs that this engine could not compile or run, or computed wrongly",
    "pass NAME": "how often the pass fired",
    "undone pass NAME": "how often the pass was undone: it failed, made an invalid graph, or changed results",
    "unused_converter OPERATOR": "graphs whose passes removed every node that a registered converter would translate",
    "graphs_not_verified": "graphs with collectives, which verify_passes cannot check",
    "constant_weights": "weights that are constants of a session",
    "weights_left_inputs": "weights that stayed inputs: too little memory, or ONNX Runtime rejected the model",
    "weight_refreshes": "sessions that were rebuilt because a weight changed",
    "weights_written_unseen": "changes of large weights that PyTorch's version counter missed, found in memory",
    "weights_made_inputs": "weights that kept changing and became inputs",
    "weight_sets": "additional sets of weights of a graph, each with its own session",
    "cache_hits": "compiled graphs found on disk",
    "cache_misses": "graphs not found on disk, and compiled",
    "cache_stored": "compiled graphs written to disk",
    "not_cached": "graphs that cannot be stored on disk",
    "not_cached: REASON": "of these, those with this reason",
    "graphs_loaded": "graphs that PyTorch had saved, loaded at their first call",
    "not_loaded": "of graphs that PyTorch had saved, those that ONNX Runtime rejected; PyTorch runs them",
    "not_saved: REASON": "graphs that cannot be saved by PyTorch, with this reason",
    "strides_probed": "operators that were run once on dummy data to learn the strides of their results",
    "strides_not_known": "operators for which that failed; their results get the strides of PyTorch's fake tensors",
    "choices_without_weights": "kernels that ONNX Runtime would choose by weights, which are inputs: float32 is used",
    "choices_not_known": "regions of which the report cannot tell the kernels: ONNX Runtime rejected a condition",
    "compared_runs": "runs that onnx_debug compared",
    "unchecked_sources": "modules without a source when a saved graph was loaded, so that a change is not seen",
    "unchecked_values": "values that could not be compared, or only with eager",
}
"""Every event and what it counts; a word in capitals stands for a name."""

_collected: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("collected", default=None)


@contextlib.contextmanager
def candidate_run(warnings: list[str]) -> Iterator[None]:
    """Marks what is compiled or run inside as a candidate of the autotuner, which may still be rejected.

    Args:
        warnings: collects the warnings of ``warn``, which are not logged.
    """
    token = _collected.set(warnings)
    try:
        yield
    finally:
        _collected.reset(token)


def is_candidate_run() -> bool:
    """Whether a candidate is compiled or run: failures are raised instead of falling back to PyTorch."""
    return _collected.get() is not None


def warn(logger: logging.Logger, text: str) -> None:
    """Logs a warning; inside ``candidate_run``, collects it instead."""
    warnings = _collected.get()
    if warnings is None:
        logger.warning("%s", text, stacklevel=2)
    else:
        warnings.append(text)


def count(event: str, number: int = 1) -> None:
    """Counts one of ``EVENTS`` under ``torch._dynamo.utils.counters["dynamo_backends"]``."""
    counters["dynamo_backends"][event] += number
