"""Assumptions about symbolic sizes, such as ``s77 != 4``: detects those that a compile adds, and avoids them.

After Dynamo has written its guards, no guard checks a new assumption: the compiled graph may be wrong for other sizes.
A file has no guards at all, so an export lists them (``size_conditions``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


class Assumptions:
    """A snapshot of PyTorch's ``ShapeEnv``, which all graphs of a frame share.

    Args:
        module: a graph with ``meta["val"]``.

    Attributes:
        known: the snapshot as JSON; ``None`` if the graph has no symbols.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._environment = _environment(module)
        self.known = None if self._environment is None else _snapshot(self._environment)

    def growth(self) -> str:
        """One assumption added since the snapshot, ``guards: Ne(s77, 4)``; ``""`` if nothing changed."""
        if self._environment is None or self.known is None:
            return ""
        now = _snapshot(self._environment)
        new = (f"{kind}: {item}" for kind, items in now.items() for item in items if item not in self.known[kind])
        return "" if now == self.known else next(new, "an assumption was dropped")


def _environment(module: fx.GraphModule) -> ShapeEnv | None:
    """The ``ShapeEnv`` of a graph's symbols; ``None`` if it has none."""
    for node in module.graph.nodes:
        for number in _numbers(node.meta.get("val")):
            if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return number.node.shape_env
    return None


def _numbers(value: object) -> Iterator[object]:
    for item in pytree.tree_leaves(value):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield from (*item.shape, *item.stride(), item.storage_offset())
        else:
            yield item


def _snapshot(environment: ShapeEnv) -> dict[str, Any]:
    """All that a compile may read about symbols: ranges, equalities, divisibility, guards."""
    pairs: dict[str, Mapping[Any, Any]] = {
        "ranges": environment.var_to_range,
        "axioms": environment.axioms,
        "replacements": environment.replacements,
    }
    return {
        **{name: sorted([str(key), str(item)] for key, item in found.items()) for name, found in pairs.items()},
        "divisible": sorted(map(str, environment.divisible)),
        "sizes": sorted(map(str, environment.size_like)),
        "guards": sorted(str(guard.expr) for guard in environment.guards),
        "asserts": sorted(str(item.expr) for items in environment.deferred_runtime_asserts.values() for item in items),
    }


def sizes_may_be_one() -> contextlib.AbstractContextManager[object]:
    """A context in which ``torch.export`` assumes no relation of dynamic sizes to 0, 1 or other numbers.

    So does ``torch.onnx.export``. A slice ``x[:8]`` is then right for all sizes.
    """
    patched: contextlib.AbstractContextManager[object] = _config.patch(backed_size_oblivious=True)
    return patched


def assume_not_empty(module: fx.GraphModule) -> None:
    """Assumes that the sizes of a graph's inputs are not 0, so that its passes and translations need not handle 0."""
    environment = _environment(module)
    for node in module.graph.find_nodes(op="placeholder"):
        for number in _numbers(node.meta.get("val")):
            if environment is None or not isinstance(number, torch.SymInt):
                continue
            if (root := root_of(number.node.expr)) is not None:
                symbol, zero = root
                limits = environment.var_to_range[symbol]
                environment.constrain_symbol_range(symbol, max(limits.lower, sympy.floor(zero) + 1), limits.upper)


def root_of(size: sympy.Expr) -> tuple[sympy.Symbol, sympy.Rational] | None:
    """The symbol of a size that is a linear expression of one, ``h`` of ``2 * h + 1``; and for which number it is 0."""
    if len(size.free_symbols) != 1:
        return None
    (symbol,) = size.free_symbols
    if not size.is_polynomial(symbol) or sympy.degree(size, symbol) != 1:
        return None
    return symbol, sympy.Rational(-size.subs(symbol, 0), size.expand().coeff(symbol))


def size_conditions(module: fx.GraphModule, symbols: Collection[sympy.Symbol]) -> list[sympy.Basic]:
    """The assumptions about the sizes of a graph that do not follow from their ranges, ``Eq(Mod(s77, 2), 0)``.

    Args:
        module: a graph with ``meta["val"]``.
        symbols: of the graph. Assumptions about others are left out.
    """
    environment = _environment(module)
    if environment is None:
        return []
    found: dict[sympy.Basic, None] = {}
    for guard in environment.guards:
        condition = environment.replace(guard.expr)
        if not _is_certain(condition, environment.var_to_range) and condition.free_symbols <= set(symbols):
            found[condition] = None
    return list(found)


def is_certain(condition: sympy.Basic, limits: Mapping[sympy.Symbol, tuple[int, int | None]]) -> bool:
    """Whether a condition is true for all numbers within the limits of its symbols, of which the upper may be none."""
    return _is_certain(
        condition,
        {symbol: ValueRanges(low, int_oo if high is None else high) for symbol, (low, high) in limits.items()},
    )


def _is_certain(condition: sympy.Basic, ranges: Mapping[sympy.Symbol, Any]) -> bool:
    return condition is sympy.true or bound_sympy(condition, ranges).lower is sympy.true


def as_text(condition: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> str:
    """A condition in Python, ``batch % 2 == 0``, with names for its symbols."""
    symbols = {symbol: sympy.Symbol(name, integer=True) for symbol, name in names.items()}
    text: str = PythonPrinter().doprint(condition.xreplace(symbols))
    return text
