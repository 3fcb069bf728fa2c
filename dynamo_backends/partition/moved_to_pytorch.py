"""Which nodes a graph is split again without: those that ONNX Runtime rejects, and those that are faster in PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

import torch
from torch import fx

from ..errors import KernelFaultError, Kind, Reason, SessionError, TranslationError
from ..events import warn
from ..exporter.converters.mixture_of_experts import GROUPED_PRODUCT
from ..exporter.registration import described, registered_converter
from ..graphs.artifacts import Region, Split
from ..graphs.in_place import PartialWrite
from ..graphs.layout import memory_extent
from ..graphs.locations import where
from ..runtime.binding import OutputSpec
from ..weights.selection import is_of_a_weight
from .regions import Support, producer_of

logger = logging.getLogger(__name__)

_WORTH_A_CALL = 2**20
"""Bytes of an argument that are worth another call of a session if they are not copied twice: that takes 0.04 ms, a
call 0.02 (one thread, AMD EPYC)."""


def rejected_nodes(region: Region, error: SessionError | TranslationError, support: Support) -> dict[fx.Node, Reason]:
    """The nodes because of which a region was rejected, with reasons: the one that the error names, else those that are
    rejected alone."""
    named = [node for node in region.nodes if node.name == error.node]
    if named or isinstance(error, KernelFaultError):
        return {producer_of(node): error.reason for node in named or region.nodes}
    reasons = {node: support.probe(node) for node in region.operators}
    return {node: reason for node, reason in reasons.items() if reason is not None}


def all_nodes(region: Region, error: SessionError | TranslationError) -> dict[fx.Node, Reason]:
    """All nodes of a region that was rejected, for a reason that is not known."""
    return dict.fromkeys(region.nodes, Reason(error.reason.kind, f"rejected with its region: {error.reason}"))


def products_of_experts(graph: fx.Graph, weights: Container[fx.Node]) -> dict[fx.Node, Reason]:
    """The products of experts whose weights are no constants."""
    reason = Reason(Kind.FASTER_IN_PYTORCH, "a session would copy the weights of all experts")
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    products = [node for node in calls if node.target.name() == GROUPED_PRODUCT]
    return {node: reason for node in products if not is_of_a_weight(node.args[1], weights)}


def copied_writes(
    writes: Sequence[PartialWrite], regions: Sequence[tuple[Region, Sequence[OutputSpec]]]
) -> dict[fx.Node, Reason]:
    """The writes into parts of large arguments for which a session would copy the rest."""
    reason = Reason(Kind.FASTER_IN_PYTORCH, "it writes into a part of an argument, of which a session would copy all")
    results: Mapping[fx.Node, OutputSpec] = {
        item.node: spec for region, outputs in regions for item, spec in zip(region.outputs, outputs, strict=True)
    }
    on_onnx = {node for region, _ in regions for node in region.nodes}
    copied: dict[fx.Node, Reason] = {}
    for write in writes:
        is_in_place = write.writes[-1] in results and results[write.writes[-1]].written is not None
        if not is_in_place and _size(write.argument) >= _WORTH_A_CALL and not on_onnx.isdisjoint(write.writes):
            copied.update(dict.fromkeys(write.writes, reason))
    return copied


def _size(argument: fx.Node) -> int:
    """The bytes of a tensor's memory; symbolic sizes count as their hints."""
    value = argument.meta["val"]
    return int(memory_extent(value) * value.itemsize)


def warn_of_unused_converters(split: Split) -> None:
    """Logs each operator whose registered converter is not used, with the user's line and the reason."""
    for node, reason in split.coverage.in_pytorch.items():
        converter = registered_converter(node.target)
        if converter is not None and not reason.by_design:
            line = where(node) or "an unknown line"
            text = f"the converter {described(converter)} of {node.target} at {line} is not used: {reason}"
            warn(logger, "", {text: text})
