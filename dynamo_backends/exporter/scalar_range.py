"""Finds numbers among an operator's arguments with which a translation or a decomposition may differ from eager.

1. The dtype that the operator computes in cannot hold the number. Eager's kernels raise an error for most of them
   (``alpha=1000`` in int8), and wrap others (-1 in uint8). ONNX has constants of the dtype alone.
2. The number is infinite or NaN and a coefficient, such as ``alpha``. The result then depends on the order of
   operations and on conditions, which decompositions and ONNX Runtime's kernels may have otherwise than eager's:
   ``0 > 0 ? 0 : inf * 0`` for ``0 < 0 ? inf * 0 : 0``.

Such an operator is neither decomposed nor translated, and PyTorch runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_NUMBERS = {"number", "Optional[number]", "List[number]"}
_OPERANDS = {"self", "other"}
"""Parameters for which eager makes a tensor of a number: it takes part in type promotion, and wraps in integers."""

_FILLS = {"fill_value", "s"}
"""Parameters of ``full`` and its like: eager converts the number, 2.5 to 2 in int64 and -1 to 255 in uint8."""

_NO_COEFFICIENTS = {*_OPERANDS, *_FILLS, "value", "ord", "p"}
"""Parameters for operands, for numbers that are written as they are, and for the order of a norm, whose infinity is a
formula of its own. A keyword, such as the ``value`` of ``addcmul``, is a coefficient."""


def number_out_of_range(target: object, args: Sequence[Any], kwargs: Mapping[str, Any], results: object = None) -> str:
    """Which number does not fit into which dtype; empty if all fit.

    Args:
        target: the operator.
        args, kwargs: its arguments, with fake tensors.
        results: its fake results, if they are known.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    numbers = [
        (parameter.name, number, is_tensor or parameter.name in _OPERANDS)
        for parameter, number in _numbers(target, args, kwargs)
        if (is_tensor := isinstance(parameter.type, torch.TensorType)) or str(parameter.type) in _NUMBERS
    ]
    for dtype in _computed_in(results, (args, kwargs)) if numbers else ():
        for name, number, is_operand in numbers:
            if not _fits(converted_fill(name, number, dtype), dtype, is_operand=is_operand):
                return f"{number} does not fit into {dtype}"
    return ""


def converted_fill(parameter: str, number: Any, dtype: torch.dtype) -> Any:
    """The number that eager fills a tensor of ``dtype`` with, if ``parameter`` is for that; else, or if eager raises an
    error, ``number``."""
    if parameter not in _FILLS or not isinstance(number, (int, float)) or dtype.is_floating_point or dtype.is_complex:
        return number
    try:
        with _disable_current_modes():
            return torch.full((), number, dtype=dtype).item()
    except RuntimeError:
        return number


def nonfinite_coefficient(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """A coefficient of an operator that is infinite or NaN; ``None`` if there is none."""
    for parameter, number in _numbers(target, args, kwargs) if isinstance(target, torch._ops.OpOverload) else ():
        is_coefficient = parameter.kwarg_only or parameter.name not in _NO_COEFFICIENTS
        if is_coefficient and isinstance(number, float) and not math.isfinite(number):
            return number
    return None


def _numbers(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Argument, Any]]:
    """The numbers among an operator's arguments, alone or in a list, each with its parameter."""
    parameters = target._schema.arguments
    given = [*zip(parameters, args, strict=False)]
    given += [(parameter, kwargs[parameter.name]) for parameter in parameters if parameter.name in kwargs]
    for parameter, value in given:
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
                yield parameter, number


def _computed_in(*values: object) -> set[torch.dtype]:
    """The dtypes of the most general kind, of the first of ``values`` that has any of it."""
    dtypes = [set(_dtypes(value)) for value in values]
    for is_of_kind in (lambda dtype: dtype.is_floating_point, lambda dtype: dtype is not torch.bool, lambda _: True):
        for found in dtypes:
            if any(map(is_of_kind, found)):
                return set(filter(is_of_kind, found))
    return set()


def _dtypes(value: object) -> Iterator[torch.dtype]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, (torch.Tensor, torch.dtype)):
            yield leaf.dtype if isinstance(leaf, torch.Tensor) else leaf


def _fits(number: Any, dtype: torch.dtype, *, is_operand: bool) -> bool:
    """Whether a dtype holds a number, perhaps rounded. An operand that is not an integer is promoted, or computed with
    in higher precision."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return is_operand or dtype is torch.int64 or dtype.is_floating_point
    if isinstance(number, bool) or dtype.is_complex:
        return True
    if is_operand and (isinstance(number, float) or dtype.is_floating_point or dtype is torch.bool):
        return True
    if dtype is torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and int(number) == number
