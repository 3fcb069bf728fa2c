"""Finds results that PyTorch leaves undefined: operators that write several values to one place without adding them.

Which value stays is not specified and may change from run to run with several threads. So a difference in such a
result, or in what depends on it, is not a fault.
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
    """The nodes whose values are undefined or depend on such values: the reason by node name.

    ``values`` are known values of nodes; others are computed if needed.
    """
    known = dict(values)
    reasons: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.target in _SOURCES and _overwrites(node, fx.map_arg(node.args, lambda item: value_of(item, known))):
            why = "writes several values to one place; PyTorch does not say which of them stays"
            reasons[node.name] = f"{node.name} ({source_line(node) or 'no source line'}) {why}"
        reason = next((reasons[arg.name] for arg in node.all_input_nodes if arg.name in reasons), None)
        if reason is not None and node.op != "output":
            reasons.setdefault(node.name, reason)
    return reasons


def without_undefined(
    comparison: GraphComparison, module: fx.GraphModule, values: Mapping[fx.Node, object]
) -> GraphComparison:
    """Turns a verdict that blames an undefined value into ``not comparable``; the note keeps the old verdict.

    It is not known which nodes a result that is not a node of the graph depends on: any undefined result of the graph
    counts. ``values`` as of ``undefined_values``.
    """
    undefined = undefined_values(module, values) if comparison.blame is not None else {}
    if comparison.blame is None or not undefined:
        return comparison
    name = comparison.blame.value.split("__")[0]
    results = [node.name for node in module.graph.output_node().all_input_nodes]
    candidates = [name] if any(node.name == name for node in module.graph.nodes) else results
    reason = next((undefined[item] for item in candidates if item in undefined), None)
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
"""Operators that write into their first argument, and the position of the argument with the new values."""


def _overwrites(node: fx.Node, args: Sequence[Any]) -> bool:
    """Whether an operator overwrites a value it wrote: run on a source of distinct numbers, some are missing."""
    if node.kwargs.get("accumulate", args[3] if len(args) > 3 else False) is True:
        return False
    position = _SOURCES[node.target]
    source = args[position]
    if node.target is _aten.scatter.src:  # it reads only as much as the index has
        source = source[tuple(slice(size) for size in args[2].shape)]
    numbered = list(args)
    numbered[0] = torch.full(args[0].shape, -1)
    numbered[position] = torch.arange(source.numel()).view(source.shape)
    written = node.target(*numbered)
    return written[written >= 0].unique().numel() < source.numel()
