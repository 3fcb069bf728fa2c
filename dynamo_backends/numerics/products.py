"""Large products in float64 that are computed once for several graphs of one call.

The captured graph, the joint graph and the forward mostly multiply the same matrices, and that is what most of their
float64 takes. A product is taken from another graph where its factors are the same but for float64's rounding.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .distance import is_same_in_float64

aten = torch.ops.aten

_MATRICES = {aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default}
_FILTERS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""The position of the weight among the factors."""

_WORTH = 100
"""Multiplications for each element: for fewer, to look takes as long as to multiply once more, and memory besides."""

_PROBE = 1e-6
"""By how much a row of another factor differs, relative to its largest value: a first look, at a row only."""


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product as it was computed, with the versions of what took part, which change when something writes into it.

    The tensors are those of the call: below autograd, a detached one has a version of its own.
    """

    factors: list[torch.Tensor]
    results: object
    versions: list[int]
    round: int

    def is_as_it_was(self) -> bool:
        return self.versions == _versions(self.factors, self.results)


class Products:
    """The products of one call that wait to be taken; each is taken once."""

    def __init__(self) -> None:
        self._waiting: collections.defaultdict[object, list[_Product]] = collections.defaultdict(list)
        self._round = 0
        self.taken = 0

    def take(self, key: object, factors: list[torch.Tensor]) -> object | None:
        """A product of the same factors; ``None`` if none is known."""
        waiting = self._waiting.get(key, [])
        for i, product in enumerate(waiting):
            pairs = list(zip(product.factors, factors, strict=True))
            if (
                product.is_as_it_was()
                and all(_may_be_same(*pair) for pair in pairs)
                and all(is_same_in_float64(*pair) for pair in pairs)
            ):
                del waiting[i]
                self.taken += 1
                return product.results
        return None

    def add(self, key: object, factors: list[torch.Tensor], results: object) -> None:
        self._waiting[key].append(_Product(factors, results, _versions(factors, results), self._round))

    def next_round(self) -> None:
        """What is added from now on outlives ``drop_earlier``."""
        self._round += 1

    def drop_earlier(self) -> None:
        """Lets go of what was added before this round."""
        for key, waiting in self._waiting.items():
            self._waiting[key] = [product for product in waiting if product.round == self._round]

    def clear(self) -> None:
        self._waiting.clear()


class SharedProducts(TorchDispatchMode):
    """Inside, large products of float64 are taken from others.

    Args:
        products: the others.
        adds: whether what is computed is added to them, and what is taken has memory of its own. Otherwise nothing may
            write into a product.
    """

    supports_higher_order_operators = True

    def __init__(self, products: Products, *, adds: bool) -> None:
        super().__init__()
        self._products = products
        self._adds = adds

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func not in _MATRICES and func not in _FILTERS:
            return func(*args, **kwargs)
        factors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(map(_is_plain_float64, factors)) or _multiplications_for_each(func, factors) < _WORTH:
            return func(*args, **kwargs)
        key = func, repr(pytree.tree_map(_shape, (args, kwargs)))
        found = self._products.take(key, factors)
        if not self._adds and found is not None:
            return pytree.tree_map(_detached, found)
        result = func(*args, **kwargs) if found is None else pytree.tree_map(_copied, found)
        if self._adds:
            self._products.add(key, factors, result)
        return result


def _multiplications_for_each(func: object, factors: list[torch.Tensor]) -> float:
    """Multiplications for each element of factors and product; of a convolution half of those for each result."""
    if func in _FILTERS:
        weight = factors[_FILTERS[func]]
        return weight.numel() / max(weight.shape[0], 1) / 2
    first, second = factors[-2:]
    count, inner, others = first.numel() / max(first.shape[-1], 1), first.shape[-1], second.shape[-1]
    elements = first.numel() + second.numel() + count * others
    return count * inner * others / max(elements, 1)


def _is_plain_float64(value: torch.Tensor) -> bool:
    return value.dtype is torch.float64 and value.layout is torch.strided and not value.is_inference()


def _shape(value: object) -> object:
    return ("tensor", tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _versions(*values: object) -> list[int]:
    return [leaf._version for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _may_be_same(first: torch.Tensor, other: torch.Tensor) -> bool:
    """A look at one row."""
    first, other = (item[-1] if item.dim() > 1 else item for item in (first, other))
    return bool((first - other).abs().max() <= _PROBE * first.abs().max()) if first.numel() else True
