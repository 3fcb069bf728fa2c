"""Results that PyTorch leaves undefined: what is written to one place more than once, without being added.

Which of the values stays is not said, and with several threads it is another one each time: so a difference there, and
all that is computed of it, is no fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import fx

from ..exporter.locations import source_line
from ..numerics.exact import run_eager
from .rows import OK, GraphComparison


def without_undefined(
    comparison: GraphComparison, module: fx.GraphModule, values: Mapping[fx.Node, object]
) -> GraphComparison:
    """A verdict that names no value which PyTorch leaves undefined.

    A graph that diverges at such a node of the run or behind it is not comparable; what was said of it is in the note.

    Args:
        comparison: of the run.
        module: the graph.
        values: of its nodes, as far as they are known; the others are computed where they are needed.
    """
    if comparison.verdict == OK or not any(node.target in _WRITES for node in module.graph.nodes):
        return comparison
    known = dict(values)
    for node in module.graph.nodes:
        is_undefined = _is_undefined(node, known)
        if not is_undefined and comparison.blame is not None and node.name == comparison.blame.value.split("__")[0]:
            return comparison  # nothing undefined comes before it
        if is_undefined:
            where = source_line(node) or "no source line"
            verdict = (
                f"not comparable: {node.name} ({where}) writes several values to one place; PyTorch does not say which "
                "of them stays"
            )
            note = "; ".join(filter(None, [f"else it {comparison.verdict}", comparison.note]))
            return dataclasses.replace(comparison, verdict=verdict, note=note, blame=None)
    return comparison


def _is_undefined(node: fx.Node, known: dict[fx.Node, object]) -> bool:
    repeats = _WRITES.get(node.target)
    if repeats is None:
        return False
    args = fx.map_arg(node.args, lambda item: _value(item, known))
    return not node.kwargs.get("accumulate", False) and repeats(*args)


def _value(node: fx.Node, known: dict[fx.Node, object]) -> object:
    """The value of a node; one inside a region is computed by PyTorch of those that are known."""
    waiting = [node]
    while waiting:
        unknown = [item for item in waiting[-1].all_input_nodes if item not in known]
        if waiting[-1] in known:
            waiting.pop()
        elif unknown:
            waiting += unknown
        else:
            last = waiting.pop()
            known[last] = run_eager(last, known)
    return known[node]


def _index_put(
    into: torch.Tensor, indices: list[torch.Tensor | None], source: torch.Tensor, accumulate: bool = False
) -> bool:
    given = [(index, size) for index, size in zip(indices, into.shape, strict=False) if index is not None]
    if accumulate or source.numel() == 1 or any(index.dtype in (torch.bool, torch.uint8) for index, _ in given):
        return False  # a mask names each place once
    places = torch.zeros((), dtype=torch.int64)
    for index, size in given:
        places = places * size + index % size
    return _repeats(places)


def _put(into: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> bool:
    return not accumulate and _repeats(index % into.numel())


def _index_copy(into: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> bool:
    return _repeats(index)


def _scatter(into: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> bool:
    if index.dim() == 0 or not index.numel():
        return False
    ordered = index.sort(dim).values
    return bool((ordered.diff(dim=dim) == 0).any())


def _repeats(places: torch.Tensor) -> bool:
    return places.unique().numel() < places.numel()


_aten = torch.ops.aten
_WRITES: Mapping[object, Callable[..., bool]] = {
    _aten.index_put.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
    _aten.put.default: _put,
    _aten.index_copy.default: _index_copy,
    _aten.scatter.src: _scatter,
}
"""Operators that write, and whether they write to one place more than once."""
