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
    for (_, fake), part in zip(inputs, dims, strict=True):
        for i, name in _names(part):
            size = sizes_of(fake)[i]
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and name not in found.values():
                found.setdefault(size.node.expr, name)  # sizes that may differ must not have one name
    for name, fake in inputs:
        for i, size in enumerate(sizes_of(fake)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                own = f"{name}_dim_{i}" if isinstance(fake, torch.Tensor) else name
                while size.node.expr not in found and own in found.values():  # the user's name of another size
                    own += "_"
                found.setdefault(size.node.expr, own)
                examples[size.node.expr] = size.node.hint
    known = program.range_constraints
    return {
        symbol: Size(name, max(int(known[symbol].lower), 1), limit_of(known[symbol]), examples[symbol])
        for symbol, name in found.items()
    }


def limit_of(known: Any) -> int | None:
    """The upper end of a value range of sympy; ``None`` if it is infinite."""
    return int(known.upper) if known.upper.is_Integer and known.upper < 2**62 else None


def _names(part: Any) -> Iterator[tuple[int, str]]:
    """The dimensions of a tensor that its part of ``dynamic_shapes`` names."""
    dims = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, (list, tuple)) else ()
    for i, dim in dims:
        name = dim if isinstance(dim, str) else getattr(dim, "__name__", "")
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
