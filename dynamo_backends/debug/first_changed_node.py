"""Finds the first node whose value changed when a pass changed the graph.

The graphs before and after the pass run in step on the same arguments. Nodes of the same name are compared as soon as
both are computed. There are two comparisons:

- In eager: the error of the later value may be as large as the earlier value's error and rounding explain. This misses
  what rounding could also do: a comparison or an index with another result, in half precision an error of one or two
  percent, and a fault that a later layer norm damps.
- In float64 alone: a right pass changes no comparison there, and only constants that it rounded to the graph's dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..exporter.upstream_faults import is_uninitialized
from ..graphs.locations import changed_nodes, operands, place_of
from ..numerics.exact import KERNEL_ERRORS, attribute
from ..numerics.graph_execution import FxExecution, PerturbedExecution
from ..numerics.measure import Beyond
from ..numerics.randomness import PERTURBATIONS
from ..numerics.reference_runs import copies
from ..numerics.tensor_measure import as_array, dense, measure_tensor, ordinary
from ..numerics.verdicts import RIGHT, Verdict, index_of, is_discrete, verdict
from ..numerics.wrong_elements import wrong_elements
from .interpreter import flat

_UNITS = 4.0
_UNITS_OF_HALF = 0.5
"""A constant that a pass computes may change a value in float64 by so many units of the graph's dtype."""

_NOISE = 1e-12
"""The relative error in float64 of values that cancel."""

_TIES = 0.01
"""The share of comparisons and indices that may differ in float64, because values tie."""


class WrongNode(NamedTuple):
    """A node that differs: its ``Place``, and the difference."""

    name: str
    source: str
    difference: Verdict
    module: str


_Difference = Callable[[fx.Node, fx.Node], Verdict]


def first_wrong_node(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> WrongNode | None:
    """The first node of ``after`` whose value differs from that of the same name in ``before``, in eager.

    If that node reads one that the pass added, the added node is returned, see ``changed_nodes``. The graphs have the
    same placeholders, with values ``arguments``; ``state`` is of the CPU's random numbers.
    """
    uncompared = _common_names(before, after)
    old = FxExecution(before, copies(arguments), state, compared=uncompared)
    new = FxExecution(after, copies(arguments), state, compared=uncompared, exact=False)
    perturbed: list[FxExecution] | None = None  # made when eager's error does not explain a difference

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
                PerturbedExecution(before, copies(arguments), state, seed, recorded=old.drawn, compared=set(uncompared))
                for seed in range(PERTURBATIONS)
            ]
        for item in list(perturbed):
            try:
                item.reach(theirs)
            except (*KERNEL_ERRORS, IndexError):  # a shape depends on a comparison with another result
                perturbed.remove(item)
        return _difference(*values, [item.exact_of(theirs) for item in perturbed])

    def compared(theirs: fx.Node) -> None:
        uncompared.discard(theirs.name)
        for item in perturbed or ():
            item.release(theirs)

    def describe(theirs: fx.Node, ours: fx.Node) -> Verdict:
        return _difference(old.eager.get(theirs), old.exact.get(theirs), new.eager.get(ours))

    return _first(old, new, before, after, difference, describe, compared)


def first_wrong_node_in_float64(
    before: fx.GraphModule, after: fx.GraphModule, arguments: Sequence[object], state: torch.Tensor
) -> WrongNode | None:
    """The same with both graphs in float64 alone.

    Raises:
        KERNEL_ERRORS: PyTorch has no float64 of one of the operators.
    """
    fakes = [leaf for node in before.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    floats = [item for item in (*fakes, *arguments) if isinstance(item, torch.Tensor) and item.is_floating_point()]
    unit = max((torch.finfo(item.dtype).eps for item in floats), default=0.0)
    common = _common_names(before, after)
    old, new = (
        FxExecution(module, copies(arguments), state, compared=common, eager=False) for module in (before, after)
    )

    def difference(theirs: fx.Node, ours: fx.Node) -> Verdict:
        return difference_in_float64(old.exact_of(theirs), new.exact_of(ours), unit)

    def describe(theirs: fx.Node, ours: fx.Node) -> Verdict:
        return difference_in_float64(old.exact.get(theirs), new.exact.get(ours), unit)

    return _first(old, new, before, after, difference, describe)


def _common_names(before: fx.GraphModule, after: fx.GraphModule) -> set[str]:
    return {node.name for node in before.graph.nodes} & {node.name for node in after.graph.nodes}


def _first(
    old: FxExecution,
    new: FxExecution,
    before: fx.GraphModule,
    after: fx.GraphModule,
    difference: _Difference,
    describe: _Difference,
    compared: Callable[[fx.Node], None] = lambda node: None,
) -> WrongNode | None:
    """The first wrong node of ``after``.

    ``describe`` compares what a pass replaced with what it added; ``compared`` is called with each node of ``before``
    that is right.
    """
    before_by_name = {node.name: node for node in before.graph.nodes}

    def run(theirs: fx.Node, ours: fx.Node) -> Verdict:
        new.reach(ours)
        old.reach(theirs)
        return difference(theirs, ours)

    for node in after.graph.nodes:
        same = before_by_name.get(node.name)
        if same is None or node.op == "output" or is_uninitialized(node):
            continue
        if node.op == "get_attr" and isinstance(attribute(after, str(node.target)), torch.nn.Module):
            continue  # a subgraph of a higher-order operator, whose results are compared
        replaced, new_node = changed_nodes(same, node, before_by_name)
        old.hold(replaced)
        new.hold(new_node)
        found = run(same, node)
        if found.is_wrong:
            if new_node is not node:  # its own difference, if it has the shape of what it replaces
                of_new = describe(replaced, new_node)
                found = dataclasses.replace(found, elements=None) if of_new.elements is None else of_new
            place = place_of(new_node, replaced)
            return WrongNode(place.name, place.source, found, place.module)
        old.release(same, replaced)
        new.release(node, new_node)
        compared(same)
    for theirs, ours in zip(operands(before.graph.output_node()), operands(after.graph.output_node()), strict=False):
        found = run(theirs, ours)
        if found.is_wrong:
            place = place_of(ours, theirs)
            return WrongNode(place.name, place.source, found, place.module)
    return None


def _difference(before: object, exact: object, after: object, perturbed: Sequence[object] = ()) -> Verdict:
    olds, exacts, news, *others = map(flat, (before, exact, after, *perturbed))
    if len(olds) != len(news):
        return Verdict(f"{len(news)} results instead of {len(olds)}")
    more = zip(*others, strict=True) if others else [()] * len(olds)
    found = zip(news, olds, exacts, more, strict=True)
    verdicts = (verdict(*values) for values in found if any(map(_is_compared, values[:2])))
    return next((item for item in verdicts if item.is_wrong), RIGHT)


def _is_compared(value: object) -> bool:
    """Not an object of another kind, such as the context of ``_enter_autocast``, which each run makes anew."""
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, complex))


def difference_in_float64(before: object, after: object, unit: float) -> Verdict:
    """How two float64 results differ.

    Floating-point elements may differ by some ``unit`` of the model's dtype, relative to themselves and to ordinary
    elements; discrete ones in the share ``_TIES``.
    """
    tolerance = unit * (_UNITS_OF_HALF if unit >= torch.finfo(torch.float16).eps else _UNITS)
    for old, new in zip(flat(before), flat(after), strict=False):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.shape != new.shape:
            continue  # the comparison in eager found these
        old, new = dense(old), dense(new)
        found = measure_tensor(new, old)
        if is_discrete(old):
            if found.max_ulp > _TIES * old.numel():
                return Verdict(f"{found.max_ulp:.0f} of {old.numel()} elements differ")
            continue
        if found.nonfinite:
            return Verdict("", dataclasses.replace(found, share=math.inf), index=index_of(found, old))
        if not found.max_abs:
            continue
        usual = ordinary(old)
        limit = tolerance * old.abs().clamp(min=usual) + _NOISE * usual
        error = (new - old).abs()
        shares = (error / limit).nan_to_num(0.0).reshape(-1)
        at = int(shares.argmax())
        worst, most = float(error.reshape(-1)[at]), float(limit.reshape(-1)[at])
        if worst > most:
            found = dataclasses.replace(found, share=worst / most, position=at, error=worst, limit=most)
            positions = (shares > 1.0).nonzero().reshape(-1)
            beyond = Beyond(positions.numpy(), shares[positions].numpy())
            elements = wrong_elements(as_array(new), as_array(old), beyond)
            return Verdict("", found, index=index_of(found, old), elements=elements)
    return RIGHT
