"""Dynamic sizes of an exported model: the user's names for them, their limits, and calls with other sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Min

from ..graphs.size_assumptions import as_text, is_certain, root_of
from .arguments import Call


@dataclasses.dataclass(frozen=True)
class Size:
    """A symbolic size.

    Attributes:
        name: the user's, else ``input_ids_dim_0``.
        smallest, largest: between which ``torch.export`` found the captured program to be the same; without a limit,
            ``largest`` is ``None``.
        example: the number in the example.
    """

    name: str
    smallest: int
    largest: int | None
    example: int

    def within(self, number: int) -> int:
        """The nearest number within the limits."""
        return max(min(number, number if self.largest is None else self.largest), self.smallest)

    @property
    def limits(self) -> str:
        """``2 to 512``, or ``from 1``."""
        return f"{self.smallest} to {self.largest}" if self.largest is not None else f"from {self.smallest}"


def sizes_of(fake: Any) -> Sequence[Any]:
    """The sizes of a fake tensor, or a number itself."""
    return fake.shape if isinstance(fake, torch.Tensor) else [fake]


def narrowed(
    sizes: Mapping[sympy.Symbol, Size], conditions: Sequence[sympy.Basic]
) -> tuple[dict[sympy.Symbol, Size], list[str]]:
    """The sizes within their conditions, and as text the conditions that are no limits of one size.

    ``batch != 1`` is a limit if the smallest number is 1, and then ``from 2``.
    """
    found, rest, seen = dict(sizes), list(map(_with_limits, conditions)), None
    while rest != seen:  # a limit may make another condition a limit too
        seen = rest
        for condition in seen:
            symbol, limits = _limits(condition, found)
            if symbol is not None:
                found[symbol] = dataclasses.replace(found[symbol], smallest=limits[0], largest=limits[1])
        bounds = {symbol: (size.smallest, size.largest) for symbol, size in found.items()}
        rest = [condition for condition in seen if not is_certain(condition, bounds)]
    names = {symbol: size.name for symbol, size in found.items()}
    return found, list(dict.fromkeys(as_text(condition, names) for condition in rest))


def _with_limits(condition: sympy.Basic) -> sympy.Basic:
    """A condition with ``size <= n`` for ``min(n, size) == size``, as a model with ``n`` positions has."""
    plain = {}
    for equality in condition.atoms(sympy.Eq):
        for one, other in (equality.args, equality.args[::-1]):
            if isinstance(one, Min) and other in one.args:
                plain[equality] = sympy.And(*(sympy.Le(other, item) for item in one.args if item != other))
    return condition.xreplace(plain)


def _limits(
    condition: sympy.Basic, sizes: Mapping[sympy.Symbol, Size]
) -> tuple[sympy.Symbol | None, tuple[int, int | None]]:
    """The symbol of a linear condition, and its limits within it; ``None`` if the condition is something else."""
    root = root_of(condition.lhs - condition.rhs) if isinstance(condition, sympy.core.relational.Relational) else None
    if root is None:
        return None, (0, None)
    symbol, border = root
    low, high = sizes[symbol].smallest, sizes[symbol].largest
    if isinstance(condition, sympy.Ne):
        return symbol, (low + (border == low), high if high is None else high - (border == high))
    if isinstance(condition, sympy.Eq):
        return None, (0, None)
    is_allowed_at = condition.subs(symbol, border) is sympy.true
    if condition.subs(symbol, border + 1) is sympy.true:  # a lower limit
        return symbol, (max(low, int(sympy.ceiling(border)) if is_allowed_at else int(sympy.floor(border)) + 1), high)
    upper = int(sympy.floor(border)) if is_allowed_at else int(sympy.ceiling(border)) - 1
    return symbol, (low, upper if high is None else min(high, upper))


def named_sizes(
    program: ExportedProgram, inputs: Sequence[tuple[str, Any]], dims: Sequence[Any]
) -> dict[sympy.Symbol, Size]:
    """The symbols in the sizes of inputs.

    Args:
        program: what ``torch.export`` captured.
        inputs: the name and the fake value of each input.
        dims: for each input, its part of ``dynamic_shapes``.

    Raises:
        ValueError: a name is no identifier.
    """
    found: dict[sympy.Symbol, str] = {}
    examples: dict[sympy.Symbol, int] = {}
    smallest: dict[sympy.Symbol, int] = {}
    for (_, fake), part in zip(inputs, dims, strict=True):
        for i, name in _names(part):
            size = sizes_of(fake)[i]
            root = root_of(size.node.expr) if isinstance(size, torch.SymInt) else None
            if root is not None and name not in found.values():
                found.setdefault(root[0], name)  # sizes that may differ must not have one name
    sizes = [
        (size, f"{name}_dim_{i}" if isinstance(fake, torch.Tensor) else name)
        for name, fake in inputs
        for i, size in enumerate(sizes_of(fake))
        if isinstance(size, torch.SymInt)
    ]
    for size, own in sorted(sizes, key=lambda item: not item[0].node.expr.is_Symbol):
        root = root_of(size.node.expr)
        if root is None:
            continue
        symbol, zero = root
        if not size.node.expr.is_Symbol:
            own += "_root"
        while symbol not in found and own in found.values():  # the user's name of another size
            own += "_"
        found.setdefault(symbol, own)
        of_example = root_of(size.node.expr - size.node.hint)
        assert of_example is not None
        examples[symbol] = int(of_example[1])
        smallest[symbol] = max(smallest.get(symbol, 1), int(sympy.floor(zero)) + 1)  # a size of 0 is not allowed
    known = program.range_constraints
    return {
        symbol: Size(name, max(int(known[symbol].lower), smallest[symbol]), limit_of(known[symbol]), examples[symbol])
        for symbol, name in found.items()
    }


def limit_of(known: Any) -> int | None:
    """The upper end of a value range of sympy; ``None`` if it is infinite."""
    return int(known.upper) if known.upper.is_Integer and known.upper < 2**62 else None


def _names(part: Any) -> Iterator[tuple[int, str]]:
    """The dimensions of a tensor that its part of ``dynamic_shapes`` names; of ``2 * Dim("h")``, the name is ``h``."""
    dims = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, (list, tuple)) else ()
    for i, dim in dims:
        name = dim if isinstance(dim, str) else getattr(getattr(dim, "root", dim), "__name__", "")
        if isinstance(dim, str) and not name.isidentifier():
            raise ValueError(f"dynamic_shapes: {name!r} is no name for a size: it must be an identifier")
        if name.isidentifier():
            yield i, name


def dims_of_leaves(value: Any, dims: Any) -> list[Any]:
    """For each leaf of a value, its part of ``dynamic_shapes``; ``None`` where there is none.

    Raises:
        ValueError: a tensor has no such dimension.
    """
    children, structure = pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    if structure.is_leaf():
        keys = dims if isinstance(dims, Mapping) and isinstance(value, torch.Tensor) else ()
        if wrong := [key for key in keys if key not in range(value.dim())]:
            raise ValueError(f"dynamic_shapes: a tensor of shape {tuple(value.shape)} has no dimension {wrong[0]!r}")
        return [dims]
    if isinstance(value, dict) and isinstance(dims, Mapping):
        parts = [dims.get(key) for key in value]
    else:
        parts, _ = pytree.tree_flatten(dims, is_leaf=lambda item: item is not dims) if dims is not None else ([], None)
    return [
        leaf
        for child, part in itertools.zip_longest(children, parts[: len(children)])
        for leaf in dims_of_leaves(child, part)
    ]


_OTHERS: Sequence[Sequence[Callable[[int, int], int]]] = (
    (lambda i, size: size + 1 + i, lambda i, size: size + 1, lambda i, size: 2 * size),
    (lambda i, size: 1, lambda i, size: size // 2, lambda i, size: size - 1),
)
"""Larger and smaller sizes than the i-th size in the example, the preferred ones first."""


def other_sizes(sizes: Mapping[sympy.Symbol, Size]) -> Iterator[list[dict[sympy.Symbol, int]]]:
    """Several choices of larger sizes than the example's, then of smaller ones, each within the limits."""
    examples = {symbol: size.example for symbol, size in sizes.items()}
    for ways in _OTHERS:
        choices = [
            {symbol: size.within(way(i, size.example)) for i, (symbol, size) in enumerate(sizes.items())}
            for way in ways
        ]
        yield [choice for choice in choices if choice != examples]


def resized(inputs: Sequence[tuple[int, Any]], call: Call, symbols: Mapping[sympy.Symbol, int]) -> Call:
    """The call with other sizes, where values are repeated or cut off.

    ``inputs`` are for each input its position among the leaves of the call, and its fake value.
    """
    leaves, structure = pytree.tree_flatten(call)
    for i, fake in inputs:
        leaves[i] = _resized(leaves[i], fake, symbols)
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result


def _resized(value: Any, fake: Any, symbols: Mapping[sympy.Symbol, int]) -> Any:
    """A value with other sizes; ``symbols`` are the numbers of a fake value's symbols."""
    for dim, size in enumerate(sizes_of(fake)):
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols <= symbols.keys():
            number = int(size.node.expr.subs(symbols))
            if not isinstance(value, torch.Tensor):
                return number
            value = value.index_select(dim, torch.arange(number) % max(value.shape[dim], 1))
    return value
