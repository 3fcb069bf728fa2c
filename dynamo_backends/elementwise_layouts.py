"""The order of memory in which eager's kernels of two tensors return their result, where fake tensors have another.

Kernels computed element by element return their result in the order of their arguments (``TensorIterator``). Of some,
PyTorch's fake tensors (2.13) have it row-major, or in the order of the second argument instead of the first:
``floor_divide`` of a transposed matrix, for instance. What is compiled by its fake tensors would return that. So a
compiler is given such an operator with arguments in the order of the result, which computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .layout import ROW_MAJOR, layout_of

aten = torch.ops.aten

_IN_THE_ORDER_OF_BOTH = (
    aten.copysign.Tensor,
    aten.copysign.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.heaviside.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)
_IN_THE_ORDER_OF_THE_FIRST = (aten.binary_cross_entropy.default,)
_AS_IF_THE_SECOND_WERE_ROW_MAJOR = (aten.float_power.Scalar, aten.pow.Scalar, aten.ldexp.Tensor)


def as_kernels_order(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions, and those of operators whose results fake tensors have in another order than the kernels.

    Args:
        table: from an operator to a function of its arguments, which may return ``NotImplemented``: it stays.
    """
    ours = dict(table)
    for rule, targets in (
        (_of_both, _IN_THE_ORDER_OF_BOTH),
        (_of_the_first, _IN_THE_ORDER_OF_THE_FIRST),
        (_of_a_row_major_second, _AS_IF_THE_SECOND_WERE_ROW_MAJOR),
    ):
        ours |= {target: functools.partial(rule, target, table.get(target)) for target in targets}
    return ours


def _of_both(
    target: Callable[..., Any], decomposition: Callable[..., Any] | None, x: torch.Tensor, y: Any, **named: Any
) -> Any:
    tensors = [value for value in (x, y) if isinstance(value, torch.Tensor)]
    if all(layout_of(tensor) == ROW_MAJOR for tensor in tensors) or any(
        tensor.is_complex() or _is_cast_first(tensor) for tensor in tensors
    ):
        return NotImplemented if decomposition is None else decomposition(x, y, **named)
    kernels = x * y  # its fake tensor is in the order of the kernels; nothing reads it, so it leaves no node
    order = layout_of(kernels).permutation or range(kernels.ndim)
    return target(*(_row_major(value, order) for value in (x, y)), **named).permute(_inverse(order))


def _of_the_first(
    target: Callable[..., Any],
    decomposition: Callable[..., Any] | None,
    x: torch.Tensor,
    y: torch.Tensor,
    *others: Any,
    **named: Any,
) -> Any:
    layout = layout_of(torch.empty_like(x))  # which leaves no node
    if layout == layout_of(x) == layout_of(y) or layout.is_symbolic:
        return NotImplemented if decomposition is None else decomposition(x, y, *others, **named)
    order = layout.permutation or range(x.ndim)
    ordered = (_row_major(value, order).permute(_inverse(order)) for value in (x, y))
    return target(*ordered, *others, **named)


def _of_a_row_major_second(
    target: Callable[..., Any], decomposition: Callable[..., Any] | None, base: Any, exponent: torch.Tensor
) -> Any:
    row_major = exponent.contiguous()
    is_scalar_tensor = isinstance(base, torch.Tensor) and base.ndim == 0  # ldexp of one resizes its result
    if row_major is not exponent and not is_scalar_tensor:
        return target(base, row_major)
    return NotImplemented if decomposition is None else decomposition(base, exponent)


def _is_cast_first(tensor: torch.Tensor) -> bool:
    """Whether elements share memory in a dtype that kernels may compute in another: then the result is in an order
    that a product's fake tensor does not tell."""
    is_expanded = any(stride == 0 and size != 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_expanded and tensor.dtype not in (torch.float32, torch.float64)


def _row_major(value: Any, order: Sequence[int]) -> Any:
    """A tensor with its dimensions in another order, and row-major in that; a number, and what has none, stays."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return value.reshape([1] * (len(order) - value.ndim) + list(value.shape)).permute(list(order)).contiguous()


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(i) for i in range(len(order))]
