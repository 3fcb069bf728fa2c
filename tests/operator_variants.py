"""Samples of PyTorch's operator database with other values or other memory, for ``operators.py``.

Each variant maps the tensors of a sample to others: special values instead of all numbers, or the same values in
another layout. A variant that eager rejects is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.utils import _pytree as pytree

Change = Callable[[torch.Tensor], torch.Tensor]
"""Another tensor for one of a sample; raises ``NotApplicable`` for one that it is not for."""


class NotApplicable(Exception):
    """A variant cannot be applied to a tensor."""


def _special(tensor: torch.Tensor, kinds: str) -> torch.Tensor:
    """A tensor of the same shape and dtype that holds special values in turn, between its own."""
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        raise NotApplicable
    values = _special_values(tensor.dtype, kinds)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = result.view(-1)
    taken = flat[::2]
    turns = torch.tensor(values, dtype=tensor.dtype).repeat(math.ceil(taken.numel() / len(values)))
    taken.copy_(turns[: taken.numel()])
    return result


def _special_values(dtype: torch.dtype, kinds: str) -> list[float] | list[int] | list[complex]:
    if dtype.is_complex:
        parts = _special_values(dtype.to_real(), kinds)
        return [complex(real, imaginary) for real, imaginary in zip(parts, reversed(parts), strict=True)]
    if not dtype.is_floating_point:
        if kinds != "extreme":
            raise NotApplicable
        bounds = torch.iinfo(dtype)
        return [bounds.max, bounds.min, 0, 1]
    finfo = torch.finfo(dtype)
    return {
        "zeros": [0.0, -0.0, 1.0, -1.0],
        "infinite": [math.inf, -math.inf, 1.5, -0.5],
        "nan": [math.nan, 1.0, -2.0, 0.25],
        "extreme": [finfo.max, finfo.min, finfo.tiny, -finfo.tiny],
        "denormal": [finfo.smallest_normal / 2, -finfo.smallest_normal / 4, 1.0],
        "large": [80.0, -80.0, 12.5, -12.5],
    }[kinds]


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger tensor, behind an offset."""
    if tensor.ndim == 0:
        raise NotApplicable
    memory = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    view = memory[..., 1::2]
    view.copy_(tensor)
    return view


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 2:
        raise NotApplicable
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """One row for all, without memory for each."""
    if tensor.ndim == 0 or tensor.shape[0] < 2:
        raise NotApplicable
    return tensor[:1].expand(tensor.shape)


def _leading(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(2, *tensor.shape).clone()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0:
        raise NotApplicable
    return tensor[:0]


def _one(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        raise NotApplicable
    return tensor.flatten()[:1].reshape((1,) * tensor.ndim)


def _negative_bit(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise NotApplicable
    return torch._neg_view(tensor.neg())


def _conjugate_bit(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_complex():
        raise NotApplicable
    return tensor.conj().resolve_conj().conj()


VALUES: Mapping[str, Change] = {
    kinds: (lambda tensor, kinds=kinds: _special(tensor, kinds))
    for kinds in ("zeros", "infinite", "nan", "extreme", "denormal", "large")
}
LAYOUTS: Mapping[str, Change] = {
    "strided": _strided,
    "transposed": _transposed,
    "expanded": _expanded,
    "one more dimension": _leading,
    "empty": _empty,
    "one element": _one,
    "negative bit": _negative_bit,
    "conjugate bit": _conjugate_bit,
}


def varied(arguments: object, change: Change) -> object | None:
    """The arguments with each tensor changed by the variant if it applies; ``None`` if it applies to none."""
    changed = 0

    def one(leaf: object) -> object:
        nonlocal changed
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        try:
            result = change(leaf.detach())
        except NotApplicable:
            return leaf
        changed += 1
        return result.requires_grad_(leaf.requires_grad)

    result = pytree.tree_map(one, arguments)
    return result if changed else None
