"""Results that PyTorch leaves undefined: what is written to one place more than once, without being added.

Which of the values stays is not said, and with several threads it is another one each time: so a difference there, and
all that is computed of it, is no fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graphs.locations import source_line
from ..numerics.graph_execution import value_of
from .rows import GraphComparison


def undefined_values(module: fx.GraphModule, values: Mapping[fx.Node, object]) -> dict[str, str]:
    """By name, the nodes whose values PyTorch leaves undefined, and all that read them; with the reason.

    Args:
        module: the graph that ran.
        values: those of the nodes that are known; the others are computed where they are needed.
    """
    known = dict(values)
    found: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.target in _SOURCES and _is_undefined(node, fx.map_arg(node.args, lambda item: value_of(item, known))):
            why = "writes several values to one place; PyTorch does not say which of them stays"
            found[node.name] = f"{node.name} ({source_line(node) or 'no source line'}) {why}"
        reason = next((found[arg.name] for arg in node.all_input_nodes if arg.name in found), None)
        if reason is not None and node.op != "output":
            found.setdefault(node.name, reason)
    return found


def without_undefined(
    comparison: GraphComparison, module: fx.GraphModule, values: Mapping[fx.Node, object]
) -> GraphComparison:
    """A verdict that names no value which PyTorch leaves undefined.

    A graph that diverges at such a value is not comparable; what was said of it is in the note. Of a result that is no
    node of the graph, it is not told what it depends on: any undefined result of the graph may explain it.
    ``values`` as of ``undefined_values``.
    """
    undefined = undefined_values(module, values) if comparison.blame is not None else {}
    if comparison.blame is None or not undefined:
        return comparison
    name = comparison.blame.value.split("__")[0]
    names = [node.name for node in module.graph.nodes]
    results = [node.name for node in module.graph.output_node().all_input_nodes]
    reason = (
        undefined.get(name) if name in names else next((undefined[item] for item in results if item in undefined), None)
    )
    if reason is None:
        return comparison
    note = "; ".join(filter(None, [f"else it {comparison.verdict}", comparison.note]))
    return dataclasses.replace(comparison, not_comparable=reason, note=note, blame=None)


_aten = torch.ops.aten
_SOURCES = {
    _aten.index_put.default: 2,
    _aten._unsafe_index_put.default: 2,
    _aten.put.default: 2,
    _aten.index_copy.default: 3,
    _aten.scatter.src: 3,
}
"""Operators that write into their first argument, and the position of what they write."""


def _is_undefined(node: fx.Node, args: Sequence[Any]) -> bool:
    """Whether an operator writes over what it wrote: of different numbers in its source, not all are there then."""
    if node.kwargs.get("accumulate", args[3] if len(args) > 3 else False) is True:
        return False
    position = _SOURCES[node.target]
    source = args[position]
    if node.target is _aten.scatter.src:  # it reads no more than the index says
        source = source[tuple(slice(size) for size in args[2].shape)]
    numbered = list(args)
    numbered[0] = torch.full(args[0].shape, -1)
    numbered[position] = torch.arange(source.numel()).view(source.shape)
    written = node.target(*numbered)
    return written[written >= 0].unique().numel() < source.numel()
