"""Writes the stages to PyTorch's logs and structured trace.

``TORCH_LOGS="dynamo_backends"`` logs a line for each stage, ``TORCH_LOGS="+dynamo_backends"`` also its graph::

    graph 0 inference, stage onnx, region 0: 3 nodes
    input x: f32[3, 4]
    relu: f32[3, 4] = Relu(x)  # model.py:4
    ...

``TORCH_TRACE=folder`` adds to PyTorch's graphs our last FX graph, the split, the ONNX models as text and the comparison
of ``onnx_debug``; ``tlparse`` shows them. If both are off, no text is made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from torch import fx
from torch._guards import CompileContext, compile_context
from torch._logging import trace_structured

from ..graphs.artifacts import GraphName, Split
from ..graphs.graph_text import model_text
from ..pipeline.stage_data import CompiledRegion

logger = logging.getLogger(__name__)

_TRACED = ("post_grad", "regions", "onnx", "onnx_optimized")
"""PyTorch traces the earlier stages itself; the text of ``session`` would need a second session."""


def stage_reached(stage: str, graph: GraphName, artifact: object) -> None:
    """Logs and traces a stage; the arguments are those of ``Observer.stage``."""
    region = f", region {artifact.region.index}" if isinstance(artifact, CompiledRegion) else ""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s, stage %s%s: %s", graph, stage, region, _size(stage, artifact))
        if logger.isEnabledFor(logging.DEBUG) and stage != "session":
            logger.debug("%s, stage %s%s:\n%s", graph, stage, region, _text(stage, artifact))
    if stage in _TRACED:
        trace(graph, f"{stage}{region}", lambda: _text(stage, artifact))


def cached_model(graph: GraphName, region: int, model: Callable[[], bytes]) -> None:
    """Logs and traces the model of a region from the cache, whose graph skipped the stages.

    ``model`` returns it, serialized, with all its inputs.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s, from the cache, region %d:\n%s", graph, region, _text_of_bytes(model()))
    trace(graph, f"onnx_optimized, region {region}", lambda: _text_of_bytes(model()))


def trace(graph: GraphName, what: str, text: Callable[[], str], context: CompileContext | None = None) -> None:
    """Adds a text to PyTorch's structured trace, if it is on.

    Args:
        graph, what: of the title; ``what`` is for example ``onnx, region 0``.
        text: returns the text.
        context: Dynamo's compile that it belongs to; by default the current one.
    """
    name = f"dynamo_backends {graph} {what}".replace(",", "").replace(" ", "_")  # tlparse uses it as a file name
    with compile_context(context) if context is not None else contextlib.nullcontext():
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=text,
            expect_trace_id=False,
        )


def _size(stage: str, artifact: object) -> str:
    if isinstance(artifact, fx.GraphModule):
        nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in artifact.graph.nodes)
    elif isinstance(artifact, Split):
        operators = f"{artifact.coverage.on_onnx} of {artifact.coverage.total} operators on ONNX Runtime"
        return f"{len(artifact.regions)} region{'s' * (len(artifact.regions) != 1)}, {operators}"
    elif isinstance(artifact, CompiledRegion):
        if stage == "session":
            return "created"
        nodes = len((artifact.model if stage == "onnx" else artifact.optimized_model).graph)
    else:
        return ""
    return f"{nodes} node{'s' * (nodes != 1)}"


def _text(stage: str, artifact: object) -> str:
    if isinstance(artifact, fx.GraphModule):
        return artifact.print_readable(print_output=False, include_stride=True, expanded_def=True)
    if isinstance(artifact, Split):
        lines = [f"region {item.index}: {', '.join(node.name for node in item.nodes)}" for item in artifact.regions]
        in_pytorch = artifact.coverage.in_pytorch.items()
        lines += [f"in PyTorch: {node.name} = {node.target}: {reason}" for node, reason in in_pytorch]
        return "\n".join(lines)
    if isinstance(artifact, CompiledRegion):
        return model_text(artifact.model if stage == "onnx" else artifact.optimized_model)
    return ""


def _text_of_bytes(model: bytes) -> str:
    import onnx
    import onnx_ir as ir

    return model_text(ir.from_proto(onnx.load_model_from_string(model)))
