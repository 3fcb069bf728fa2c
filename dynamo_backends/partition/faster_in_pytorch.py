"""Which nodes run in PyTorch because it is faster, though ONNX Runtime could run them; with a measurement of each.

Kernels that are slow because a faster one is wrong are in ``exporter/upstream_faults.py``; the engine of whole graphs
is chosen by ``placement``.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence

import torch
from torch import fx

from passes.engine.fx.editing import is_view

from ..errors import Kind, Reason
from ..exporter.converters.mixture_of_experts import GROUPED_PRODUCT
from ..graphs.artifacts import Region
from ..graphs.in_place import PartialWrite
from ..graphs.layout import memory_extent
from ..runtime.binding import OutputSpec
from ..weights.selection import is_of_a_weight

VIEWS_ONLY = Reason(Kind.FASTER_IN_PYTORCH, "views and shapes alone cost less in PyTorch than the call of a session")
"""A call of a session of one ``Reshape`` takes 80 times as long as ``view`` in PyTorch (one thread, AMD EPYC)."""

_EXPERTS = Reason(Kind.FASTER_IN_PYTORCH, "a session would copy the weights of all experts")
"""8 rows and 8 experts of 1024 x 1024 take 8.6 ms in a session that is given the weights, and 3.6 ms in PyTorch; with
weights that are constants, ONNX Runtime is not slower (one thread, AMD EPYC)."""

_COPIED_WRITE = Reason(
    Kind.FASTER_IN_PYTORCH, "it writes into a part of an argument, of which a session would copy all"
)
_WORTH_A_CALL = 2**20
"""Bytes of an argument that are worth another call of a session if they are not copied twice: that takes 0.04 ms, a
call 0.02 (one thread, AMD EPYC)."""

_SHAPE_OPERATORS = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_storage_offset.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
}


def views_of_arguments(calls: Sequence[fx.Node], in_pytorch: Container[fx.Node]) -> set[fx.Node]:
    """Views of the graph's arguments that only PyTorch reads: a session would copy them, the weights of a model too."""
    views: set[fx.Node] = set()
    for node in calls:
        if node not in in_pytorch and is_view(node.target):
            sources = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
            if all(arg.op in ("placeholder", "get_attr") or arg in views for arg in sources):
                views.add(node)
    for node in reversed(calls):
        if node in views and not all(user in in_pytorch or user in views for user in node.users):
            views.discard(node)
    return views


def is_shape_operator(node: fx.Node) -> bool:
    """Whether a node returns a view, or numbers."""
    if node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor):
        return not isinstance(node.meta.get("val"), (tuple, list))
    return node.target in _SHAPE_OPERATORS or is_view(node.target)


def products_of_experts(graph: fx.Graph, weights: Container[fx.Node]) -> dict[fx.Node, Reason]:
    """The products of experts whose weights are no constants."""
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    products = [node for node in calls if node.target.name() == GROUPED_PRODUCT]
    return {node: _EXPERTS for node in products if not is_of_a_weight(node.args[1], weights)}


def copied_writes(
    writes: Sequence[PartialWrite], regions: Sequence[tuple[Region, Sequence[OutputSpec]]]
) -> dict[fx.Node, Reason]:
    """The writes into parts of large arguments for which a session would copy the rest."""
    results: Mapping[fx.Node, OutputSpec] = {
        item.node: spec for region, outputs in regions for item, spec in zip(region.outputs, outputs, strict=True)
    }
    on_onnx = {node for region, _ in regions for node in region.nodes}
    copied: dict[fx.Node, Reason] = {}
    for write in writes:
        is_in_place = write.writes[-1] in results and results[write.writes[-1]].written is not None
        if not is_in_place and _size(write.argument) >= _WORTH_A_CALL and not on_onnx.isdisjoint(write.writes):
            copied.update(dict.fromkeys(write.writes, _COPIED_WRITE))
    return copied


def _size(argument: fx.Node) -> int:
    """The bytes of a tensor's memory; symbolic sizes count as their hints."""
    value = argument.meta["val"]
    return int(memory_extent(value) * value.itemsize)
