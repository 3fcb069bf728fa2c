"""Finds the results of a region that its session may write into the memory of an argument; see ``graphs.in_place``."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from passes.engine.fx.editing import owner

from ..graphs.artifacts import Region
from ..graphs.in_place import PartialWrite

_SCATTERS = ("ScatterND", "ScatterElements")
"""Operators that copy their first input and write a part. ONNX Runtime's kernels for the CPU may work in place
(``MayInplace``): they do not copy if both are the same memory."""

_OF_METADATA = ("Shape", "Size")


def in_place_results(region: Region, model: ir.Model, writes: Iterable[PartialWrite]) -> dict[int, int]:
    """The results that are written in place: position among the region's outputs -> position among its inputs.

    The model must read the argument only where it computes the result, and no view of it, because ONNX Runtime does not
    know that they have the same memory. Running it again on the written argument gives the same result.

    Args:
        region: the region.
        model: its model, after all passes.
        writes: those of the graph.
    """
    inputs = {item.node: i for i, item in enumerate(region.inputs)}
    outputs = {item.node: i for i, item in enumerate(region.outputs)}
    found = {}
    for item in writes:
        to, at = inputs.get(item.argument), outputs.get(item.writes[0])
        if len(item.writes) > 1 or to is None or at is None:
            continue
        if any(owner(node) is item.argument for node in inputs if node is not item.argument):  # views by PyTorch
            continue
        if region.inputs[to].permutation == region.outputs[at].permutation and _may_write(
            model.graph.outputs[at], model.graph.inputs[to]
        ):
            found[at] = to
    return found


def _may_write(result: ir.Value, argument: ir.Value) -> bool:
    scatter = result.producer()
    if scatter is None or scatter.domain not in ("", "ai.onnx") or scatter.op_type not in _SCATTERS:
        return False
    reduction = scatter.attributes.get("reduction")
    if (reduction is not None and reduction.as_string() != "none") or scatter.inputs[0] is not argument:
        return False
    return all(use.node is scatter or use.node.op_type in _OF_METADATA for use in argument.uses())
