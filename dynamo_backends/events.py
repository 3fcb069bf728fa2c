"""What happened, counted: ``torch._dynamo.utils.counters["dynamo_backends"]``."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from torch._dynamo.utils import counters

EVENTS = {
    "graphs": "Dynamo's graphs that were compiled; under onnx_compiler the graphs that AOTAutograd handed over",
    "recompiles": "graphs of code that had been compiled before",
    "regions": "regions on ONNX Runtime",
    "nodes_on_onnx": "operators in regions",
    "nodes_in_pytorch": "operators that run in PyTorch, also those of graphs that are faster there",
    "nodes_by_inductor": "of these, those that Inductor compiled, with fallback='inductor'",
    "fallback OPERATOR": "nodes of this operator that run in PyTorch for want of a translation or kernel that is right",
    "refused_regions": "regions that ONNX Runtime refused; what it named went to PyTorch, the graph was split again",
    "refused_by_provider": "regions that an execution provider refused as a whole; the next one runs them",
    "wrong_on_provider NAME": "regions whose first results on that provider were wrong; the next one runs them",
    "runtime_failures": "calls of a region that failed on ONNX Runtime, and were computed by PyTorch",
    "wrong_results": "calls of a region whose results had another shape or dtype, and were computed by PyTorch",
    "internal_failures": "failures of our own code that the safety net caught; PyTorch ran instead",
    "not_compiled_at_a_call": "graphs that PyTorch runs, as what is compiled at a first call would hold for some sizes",
    "inductor_failures": "parts that Inductor could not compile or run; PyTorch runs them node by node",
    "calls_inside_forward_ad": "calls of a region inside forward-mode AD, which PyTorch computed",
    "autotuned DIRECTION ENGINE": "graphs that were tried with each engine, and were fastest with this one",
    "autotune_rejected ENGINE": "graphs that an engine could not compile or run, or computed something else of",
    "pass NAME": "how often the pass fired",
    "undone pass NAME": "how often the pass was undone: it failed, spoiled the graph, or changed the results",
    "unused_converter OPERATOR": "graphs of which passes took all nodes that a registered converter would translate",
    "graphs_not_verified": "graphs with collectives, on which verify_passes checks nothing",
    "constant_weights": "weights that are constants of a session",
    "weights_left_inputs": "weights that stayed inputs, for want of memory or because ONNX Runtime refused the model",
    "weight_refreshes": "sessions that were made anew because a weight had changed",
    "weights_written_unseen": "large weights that were written to without PyTorch counting it, and found in the memory",
    "weights_made_inputs": "weights that changed again and again, and became inputs",
    "weight_sets": "further sets of weights of a compiled graph that got a session of their own",
    "cache_hits": "compiled graphs that were found on disk",
    "cache_misses": "graphs that were looked for on disk, and compiled",
    "cache_stored": "compiled graphs that were written to disk",
    "not_cached": "graphs that are not kept on disk",
    "not_cached: REASON": "of these, those with this reason",
    "strides_asked": "operators that were run once, without values, to know the strides of their results",
    "strides_not_known": "operators that could not be run so; their results have the strides of PyTorch's fake tensors",
    "compared_runs": "runs that onnx_debug compared",
    "unchecked_values": "values that could not be compared, or only with eager",
}
"""Every event and what is counted; a word in capitals stands for a name."""

_tried: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("tried", default=None)


@contextlib.contextmanager
def trying(told: list[str]) -> Iterator[None]:
    """What is compiled or run inside is tried, and may never be used.

    Args:
        told: takes what ``tell`` would warn of.
    """
    token = _tried.set(told)
    try:
        yield
    finally:
        _tried.reset(token)


def is_tried() -> bool:
    """Whether what runs is only tried: it fails rather than let PyTorch help out."""
    return _tried.get() is not None


def tell(logger: logging.Logger, text: str) -> None:
    """Warns of something, of what is only tried not before it is used."""
    told = _tried.get()
    if told is None:
        logger.warning("%s", text, stacklevel=2)
    else:
        told.append(text)


def count(event: str, number: int = 1) -> None:
    """Counts one of ``EVENTS`` under ``torch._dynamo.utils.counters["dynamo_backends"]``."""
    counters["dynamo_backends"][event] += number
