"""The first node of a graph whose value is not what it was before a pass changed the graph.

Both graphs run side by side, node by node, on the same arguments. Nodes of the same name are compared as soon as both
are computed.

There are two measures. In eager, the later value may be as far from float64 as the earlier one and rounding explain.
That lets pass what rounding may do: a comparison or an index of floating-point values that comes out otherwise, in half
precision an error of one or two percent, and a fault that a layer norm behind it damps. So both graphs run in float64
alone too: there a right pass turns no comparison, and changes nothing but constants that it rounded to the graph's
dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.upstream_faults import is_uninitialized
from ..graphs.locations import where
from ..numerics.distance import dense, distance, ordinary
from ..numerics.exact import REFUSALS, attribute
from ..numerics.graph_execution import FxExecution, PerturbedExecution
from ..numerics.program_execution import copies
from ..numerics.randomness import PERTURBATIONS
from ..numerics.verdicts import RIGHT, Verdict, index_of, is_discrete, verdict

_UNITS = 4.0
_UNITS_OF_HALF = 0.5
"""By how many units of its dtype a constant that a pass computes once and for all may change a value in float64."""

_NOISE = 1e-12
"""What is left in float64 of values that cancel."""

_TIES = 0.01
"""The share of comparisons and indices that may come out otherwise in float64, where two values are equal."""

_Difference = Callable[[fx.Node, fx.Node], Verdict]


def first_wrong_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> tuple[str, str, Verdict] | None:
    """The first node of ``after`` whose value is not that of its namesake: name, line, by how much.

    A node that the pass made has no namesake. Where one is what the found node reads, it is named, with the line of
    what was read before.

    Args:
        before, after: graphs of any stage, with the same placeholders.
        arguments: a value for each placeholder.
        state: of the CPU's random numbers at the start.
    """
    left = _common_names(before, after)
    old = FxExecution(before, copies(arguments), state, compared=left)
    new = FxExecution(after, copies(arguments), state, compared=left, exact=False)
    perturbed: list[FxExecution] | None = None

    def difference(theirs: fx.Node, ours: fx.Node) -> Verdict:
        nonlocal perturbed
        if ours in new.decisions:
            return RIGHT
        values = old.eager[theirs], old.exact_of(theirs), new.eager[ours]
        found = _difference(*values)
        if not found.is_wrong:
            return found
        if perturbed is None:
            perturbed = [
                PerturbedExecution(before, copies(arguments), state, seed, recorded=old.drawn, compared=set(left))
                for seed in range(PERTURBATIONS)
            ]
        for item in list(perturbed):
            try:
                item.reach(theirs)
            except (*REFUSALS, IndexError):  # a shape depends on a comparison that turned
                perturbed.remove(item)
        return _difference(*values, [item.exact[theirs] for item in perturbed])

    def compared(theirs: fx.Node) -> None:
        left.discard(theirs.name)
        for item in perturbed or ():
            item.release(theirs)

    return _first(old, new, before, after, difference, compared)


def first_wrong_node_in_float64(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> tuple[str, str, Verdict] | None:
    """The same where both graphs compute in float64 alone.

    Raises:
        REFUSALS: PyTorch has no float64 of one of the operators.
    """
    fakes = [leaf for node in before.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    floats = [item for item in (*fakes, *arguments) if isinstance(item, torch.Tensor) and item.is_floating_point()]
    unit = max((torch.finfo(item.dtype).eps for item in floats), default=0.0)
    allowed = unit * (_UNITS_OF_HALF if unit >= torch.finfo(torch.float16).eps else _UNITS)
    common = _common_names(before, after)
    old, new = (
        FxExecution(module, copies(arguments), state, compared=common, eager=False) for module in (before, after)
    )

    def difference(theirs: fx.Node, ours: fx.Node) -> Verdict:
        return _difference_in_float64(old.exact[theirs], new.exact[ours], allowed)

    return _first(old, new, before, after, difference)


def _common_names(before: fx.GraphModule, after: fx.GraphModule) -> set[str]:
    return {node.name for node in before.graph.nodes} & {node.name for node in after.graph.nodes}


def _first(
    old: FxExecution,
    new: FxExecution,
    before: fx.GraphModule,
    after: fx.GraphModule,
    difference: _Difference,
    release: Callable[[fx.Node], None] = lambda node: None,
) -> tuple[str, str, Verdict] | None:
    namesakes = {node.name: node for node in before.graph.nodes}

    def judged(theirs: fx.Node, ours: fx.Node) -> Verdict:
        new.reach(ours)
        old.reach(theirs)
        return difference(theirs, ours)

    for node in after.graph.nodes:
        same = namesakes.get(node.name)
        if same is None or node.op == "output" or is_uninitialized(node) or _is_subgraph(after, node):
            continue
        said = judged(same, node)
        if said.is_wrong:
            for theirs, ours in zip(_read(same), _read(node), strict=False):
                if ours.name not in namesakes:
                    return ours.name, where(ours) or where(theirs), said
            return node.name, where(node) or where(same), said
        old.release(same)
        new.release(node)
        release(same)
    for theirs, ours in zip(_read(before.graph.output_node()), _read(after.graph.output_node()), strict=False):
        said = judged(theirs, ours)
        if said.is_wrong:
            return ours.name, where(ours) or where(theirs), said
    return None


def _is_subgraph(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node reads the graph of a higher-order operator, whose results tell what a pass made of it."""
    return node.op == "get_attr" and isinstance(attribute(module, str(node.target)), torch.nn.Module)


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes a node reads, in the order of its arguments, repeated ones too."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


def _leaves(*values: object) -> list[list[object]]:
    return [pytree.tree_leaves(item, is_leaf=lambda x: x is None) for item in values]


def _difference(before: object, exact: object, after: object, perturbed: Sequence[object] = ()) -> Verdict:
    olds, exacts, news, *others = _leaves(before, exact, after, *perturbed)
    if len(olds) != len(news):
        return Verdict(f"{len(news)} results instead of {len(olds)}")
    more = zip(*others, strict=True) if others else [()] * len(olds)
    verdicts = (verdict(*values) for values in zip(news, olds, exacts, more, strict=True))
    return next((item for item in verdicts if item.is_wrong), RIGHT)


def _difference_in_float64(before: object, after: object, allowed: float) -> Verdict:
    """How two results of float64 differ.

    Floating-point values: if, at one element, by more than ``allowed`` of it and of the ordinary elements. Others: if
    more elements do than chance lets happen where two values tie.
    """
    for old, new in zip(*_leaves(before, after), strict=True):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.shape != new.shape:
            continue  # eager's values have told
        old, new = dense(old), dense(new)
        found = distance(new, old)
        if is_discrete(old):
            if found.max_ulp > _TIES * old.numel():
                return Verdict(f"{found.max_ulp:.0f} of {old.numel()} elements differ")
            continue
        if not found.max_abs and not found.nonfinite:
            continue
        usual = ordinary(old)
        limit = allowed * old.abs().clamp(min=usual) + _NOISE * usual
        error = (new - old).abs()
        if found.nonfinite:
            return Verdict("", dataclasses.replace(found, share=math.inf), index=index_of(found, old))
        at = int((error / limit).nan_to_num(0.0).argmax())
        worst, most = float(error.reshape(-1)[at]), float(limit.reshape(-1)[at])
        if worst > most:
            found = dataclasses.replace(found, share=worst / most, position=at, error=worst, limit=most)
            return Verdict("", found, index=index_of(found, old))
    return RIGHT
