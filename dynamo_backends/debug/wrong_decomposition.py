"""Finds the decomposition that computes something else than its operator, on the values of a run.

The captured graph runs in float64, forward and backward. Each operator that AOTAutograd decomposes is computed on the
same inputs by the operator and by its decomposition. The culprit is the first that differs by more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.engine.origins import written_at

from ..common.random_state import RandomState
from ..dumps.blame import Cause, CauseKind
from ..graphs.locations import Place, place_of
from ..numerics.function_runs import narrowed
from ..numerics.operator_facts import terms_of
from ..numerics.randomness import is_random
from ..numerics.verdicts import Verdict
from .call_runs import CallInterpreter, CallMode, differing, rounding_of
from .rows import Blame

Table = Mapping[object, Callable[..., Any]]


class DecompositionCheck(TorchDispatchMode):
    """Checks each call during a run of ``tracker``; ``culprit`` is the first wrong decomposition of the table."""

    supports_higher_order_operators = True

    def __init__(self, table: Table, tracker: NodeTracker, state: RandomState) -> None:
        super().__init__()
        self._table, self._tracker, self._state = table, tracker, state
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
        native = pytree.tree_leaves(operator(*args, **kwargs))

        def again(seed: int) -> dict[int, object]:
            mode = CallMode(self._state, seed, otherwise=torch.float64)
            with mode.alone():
                return dict(enumerate(pytree.tree_leaves(operator(*args, **kwargs))))

        def rounding() -> dict[int, torch.Tensor]:
            narrow = operator(*pytree.tree_map(narrowed, args), **pytree.tree_map(narrowed, kwargs))
            return rounding_of(dict(enumerate(native)), dict(enumerate(pytree.tree_leaves(narrow))))

        # an operator may return ``None`` for a result that is not needed, which its decomposition computes
        pairs = enumerate(zip(native, pytree.tree_leaves(result), strict=False))
        leaves = {i: pair for i, pair in pairs if pair[0] is not None}
        with _disable_current_modes():
            for found in differing(leaves, again, rounding, terms_of(operator, args, native[0])).values():
                self._blame(operator, found)
                break

    def _blame(self, operator: Any, found: Verdict) -> None:
        name, source, module = self._tracker.current()
        self.culprit = Blame(
            name or str(operator),
            Cause(CauseKind.DECOMPOSITION, str(operator)),
            source=source,
            module=module,
            code=written_at(self._table[operator]),
            difference=found,
        )


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


class NodeTracker(CallInterpreter):
    """Runs a captured graph, and knows which node its forward or backward is computing."""

    def __init__(self, module: fx.GraphModule, mode: CallMode) -> None:
        super().__init__(module, mode)
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
