"""Arithmetic of symbolic numbers, such as sizes: operators of Python that torchlib (onnxscript 0.7) converts wrongly.

A symbolic integer is a scalar of int64, and a symbolic float one of float64, which computes as Python does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import TypeAlias

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import cast, constant

Number: TypeAlias = "ir.Value | float"

IS_NONNEGATIVE = "is_nonnegative"
"""Key in the ``meta`` of the ONNX value of a symbolic integer: whether it is known to be 0 or more."""

_LARGEST_EXPONENT = 8


def _is_float(number: Number) -> bool:
    return number.dtype == ir.DataType.DOUBLE if isinstance(number, ir.Value) else isinstance(number, float)


def _as_float(number: Number) -> ir.Value:
    """A scalar of float64."""
    if isinstance(number, ir.Value):
        return cast(number, ir.DataType.DOUBLE)
    return constant(float(number), ir.DataType.DOUBLE)


@converter(torch.sym_float)
def sym_float(x: ir.Value) -> ir.Value:
    """``float(x)``."""
    return _as_float(x)


@converter(operator.truediv)
def true_division(x: Number, divisor: Number) -> ir.Value:
    """``x / divisor``, which torchlib divides as integers."""
    return op.Div(_as_float(x), _as_float(divisor))


def _arithmetic(x: Number, y: Number, *, emit: Callable[[Number, Number], ir.Value]) -> ir.Value:
    """A sum, difference or product; of float64 if one of the two is a float."""
    return emit(_as_float(x), _as_float(y)) if _is_float(x) or _is_float(y) else emit(x, y)


converter(operator.add)(functools.partial(_arithmetic, emit=lambda x, y: op.Add(x, y)))
converter(operator.sub)(functools.partial(_arithmetic, emit=lambda x, y: op.Sub(x, y)))
converter(operator.mul)(functools.partial(_arithmetic, emit=lambda x, y: op.Mul(x, y)))


@converter(torch._sym_sqrt)
def square_root(x: ir.Value) -> ir.Value:
    """``math.sqrt(x)``."""
    return op.Sqrt(_as_float(x))


def _rounded(x: ir.Value, *, emit: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """An integer from a float."""
    return op.Cast(emit(x), to=ir.DataType.INT64) if _is_float(x) else op.Identity(x)


converter(math.floor)(functools.partial(_rounded, emit=lambda x: op.Floor(x)))
converter(math.ceil)(functools.partial(_rounded, emit=lambda x: op.Ceil(x)))
converter(math.trunc)(functools.partial(_rounded, emit=lambda x: x))  # the cast truncates


@converter(operator.floordiv)
def floor_division(x: ir.Value | int, divisor: ir.Value | int) -> ir.Value:
    """``x // divisor``, rounded down; torchlib emits only ONNX's ``Div``, which truncates."""
    if _is_float(x) or _is_float(divisor):
        raise NotTranslatable("its translation supports integers only")
    if _is_nonnegative(x) and _is_nonnegative(divisor):
        return op.Div(x, divisor)
    return op.Div(op.Sub(x, op.Mod(x, divisor)), divisor)  # the remainder has the sign of the divisor


def _is_nonnegative(number: ir.Value | int) -> bool:
    return number >= 0 if isinstance(number, int) else bool(number.meta.get(IS_NONNEGATIVE))


@converter(operator.pow)
def power(x: Number, exponent: Number) -> ir.Value:
    """``x ** exponent``; of integers as products, as ONNX Runtime's ``Pow`` (1.31) rounds them to double precision."""
    if _is_float(x) or _is_float(exponent):
        return op.Pow(_as_float(x), _as_float(exponent))
    if not isinstance(exponent, int) or not 0 < exponent <= _LARGEST_EXPONENT:
        raise NotTranslatable(f"its translation supports constant exponents from 1 to {_LARGEST_EXPONENT} only")
    return functools.reduce(op.Mul, [x] * exponent)
