"""Finds the decomposition that computes something else than its operator, on the values of a run.

The captured graph runs in eager, forward and backward. Each operator that AOTAutograd decomposes is computed on the
same inputs by the operator, by the operator in float64, and by its decomposition. The culprit is the first whose
decomposition has a larger error than the operator's error and rounding explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.engine.origins import written_at

from ..dumps.blame import Cause, CauseKind
from ..graphs.locations import Place, place_of
from ..numerics.call_execution import as_float64
from ..numerics.exact import KERNEL_ERRORS, floats
from ..numerics.randomness import PERTURBATIONS, is_random, perturbed
from ..numerics.verdicts import Verdict, epsilon, verdict
from .first_changed_node import difference_in_float64
from .interpreter import Interpreter
from .rows import Blame

_Table = Mapping[object, Callable[..., Any]]


class DecompositionCheck(TorchDispatchMode):
    """Checks each call during a run of ``tracker``; ``culprit`` is the first wrong decomposition of the table."""

    supports_higher_order_operators = True

    def __init__(self, table: _Table, tracker: NodeTracker) -> None:
        super().__init__()
        self._table = table
        self._tracker = tracker
        self.culprit: Blame | None = None

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if self.culprit is None:
            operator = _functional(func)
            if operator in self._table and not is_random(operator):
                self._check(operator, *pytree.tree_map(_copy, (args, kwargs)))
        return func(*args, **kwargs)

    def _check(self, operator: Any, args: Any, kwargs: Any) -> None:
        with self:  # a decomposition may call decomposed operators: the innermost fault is the culprit
            result = self._table[operator](*args, **kwargs)
        if result is NotImplemented or self.culprit is not None:
            return
        try:
            exact = as_float64(operator, args, kwargs)
        except KERNEL_ERRORS:  # there is no float64 reference
            return
        native = operator(*args, **kwargs)
        leaves = list(zip(*(pytree.tree_leaves(item) for item in (result, native, exact)), strict=False))
        # an operator may return ``None`` for a result that is not needed, which its decomposition computes
        suspects = [i for i, item in enumerate(leaves) if item[1] is not None and verdict(*item).is_wrong]
        generator = torch.Generator().manual_seed(0)
        perturbed_calls = (
            pytree.tree_map(lambda value: perturbed(value, generator), (args, kwargs))
            for _ in range(PERTURBATIONS if suspects else 0)
        )
        others = [pytree.tree_leaves(as_float64(operator, *call)) for call in perturbed_calls]
        for i in suspects:
            actual, eager, exactly = leaves[i]
            found = verdict(actual, eager, exactly, [item[i] for item in others])
            if found.is_wrong:
                self._blame(operator, found)
                return
        self._check_in_float64(operator, exact, args, kwargs)

    def _check_in_float64(self, operator: Any, exact: object, args: Any, kwargs: Any) -> None:
        """In half precision, an error of a percent may be rounding; it is not in float64."""
        unit = max(map(epsilon, {item.dtype for item in floats((args, kwargs))}), default=0.0)
        if unit <= epsilon(torch.float32):
            return
        try:
            found = difference_in_float64(exact, as_float64(self._table[operator], args, kwargs), unit)
        except KERNEL_ERRORS:  # of the decomposition there is no float64
            return
        if found.is_wrong:
            self._blame(operator, found)

    def _blame(self, operator: Any, found: Verdict) -> None:
        name, source, module = self._tracker.current()
        cause, code = Cause(CauseKind.DECOMPOSITION, str(operator)), written_at(self._table[operator])
        self.culprit = Blame(name or str(operator), cause, source=source, module=module, code=code, difference=found)


def _functional(func: Any) -> Any:
    """The operator that AOTAutograd replaces an in-place one with: ``silu_`` becomes ``silu``."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return func
    name = func._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if func.namespace == "aten" else None
    overload = getattr(packet, func._overloadname, None) if name.endswith("_") else None
    return overload if overload is not None else func


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class NodeTracker(Interpreter):
    """Runs a captured graph, and knows which node its forward or backward is computing."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._node: fx.Node | None = None
        self._by_grad_fn: dict[object, fx.Node] = {}

    def run_node(self, n: fx.Node) -> object:
        self._node = n
        value = super().run_node(n)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self._remember(leaf.grad_fn, n)
        self._node = None
        return value

    def current(self) -> Place:
        """The place of the node that is being computed, or whose gradient is."""
        node = self._node or self._by_grad_fn.get(torch._C._current_autograd_node())
        return place_of(node) if node is not None else Place("", "", "")

    def _remember(self, grad_fn: Any, node: fx.Node) -> None:
        waiting = [grad_fn]
        while waiting:
            item = waiting.pop()
            if item is not None and item not in self._by_grad_fn:
                self._by_grad_fn[item] = node
                waiting += [following for following, _ in item.next_functions]
