"""Arithmetic of symbolic integers, such as sizes: operators of Python that torchlib (onnxscript 0.7) converts wrongly.

Their arguments are scalars of int64 and Python integers.
"""

from __future__ import annotations

import functools
import operator

import onnx_ir as ir
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter

IS_NONNEGATIVE = "is_nonnegative"
"""Key in the ``meta`` of the ONNX value of a symbolic integer: whether it is known to be 0 or more."""

_LARGEST_EXPONENT = 8


@converter(operator.floordiv)
def floor_division(x: ir.Value | int, divisor: ir.Value | int) -> ir.Value:
    """``x // divisor``, rounded down; torchlib emits only ONNX's ``Div``, which truncates."""
    if _is_nonnegative(x) and _is_nonnegative(divisor):
        return op.Div(x, divisor)
    return op.Div(op.Sub(x, op.Mod(x, divisor)), divisor)  # the remainder has the sign of the divisor


def _is_nonnegative(number: ir.Value | int) -> bool:
    return number >= 0 if isinstance(number, int) else bool(number.meta.get(IS_NONNEGATIVE))


@converter(operator.pow)
def power(x: ir.Value | int, exponent: ir.Value | int) -> ir.Value:
    """``x ** exponent`` as products; ONNX Runtime's ``Pow`` (1.31) of integers rounds to double precision."""
    if not isinstance(exponent, int) or not 0 < exponent <= _LARGEST_EXPONENT:
        raise NotTranslatable(f"its translation supports constant exponents from 1 to {_LARGEST_EXPONENT} only")
    return functools.reduce(op.Mul, [x] * exponent)
