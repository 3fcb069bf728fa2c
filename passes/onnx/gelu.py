"""Recognizes GELU, quick GELU and SiLU written out in elementary operators.

Rule, for float32 and constants equal up to its rounding, factors and summands in any order::

    0.5 * x * (1 + erf(x / sqrt(2)))                              -> Gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))  -> Gelu <approximate="tanh"> (x)
    x * sigmoid(a * x), x * sigmoid(x)                            -> com.microsoft.QuickGelu <alpha=a> (x)

``sigmoid`` and ``tanh`` are matched as the exporter writes them (``exporter/converters/arithmetic.py``), SiLU also as
torchlib does.

Not for other dtypes, whose steps round differently, nor where an inner value has other users, as in training. ``Gelu``
needs opset 20.

At 2x64x1024 on one thread, ``Gelu`` takes 71 us instead of eight passes over the memory.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import number
from ..engine.onnx.patterns import OnnxPattern, onnx_pattern_pass

_SCALE = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _sigmoid(op: Any, x: Any) -> Any:
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))


def _tanh(op: Any, x: Any) -> Any:
    return op.Where(op.GreaterOrEqual(op.Abs(x), 2**-12), op.Tanh(x), x)


def _silu(op: Any, x: Any) -> Any:
    return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")


def _quick_gelu(op: Any, x: Any, factor: Any) -> Any:
    return op.QuickGelu(x, alpha=number(factor), _domain="com.microsoft")


def _erf_gelu(divides: bool, half_last: bool) -> OnnxPattern:
    def search(op: Any, x: Any) -> Any:
        factor = op.Add(op.Erf(op.Div(x, math.sqrt(2)) if divides else op.Mul(x, math.sqrt(0.5))), 1.0)
        return op.Mul(op.Mul(x, factor), 0.5) if half_last else op.Mul(op.Mul(x, 0.5), factor)

    name = f"GELU{'' if divides else ' by product'}{', half last' * half_last}"
    return OnnxPattern(name, search, lambda op, x: op.Gelu(x, approximate="none"), _check_gelu)


def _tanh_gelu(op: Any, x: Any) -> Any:
    argument = op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBE)), _SCALE)
    return op.Mul(op.Mul(x, 0.5), op.Add(_tanh(op, argument), 1.0))


def _factored_tanh_gelu(op: Any, x: Any) -> Any:
    """``gelu_fast`` of ``transformers``, in its order of factors; all orders would be hundreds of rules."""
    argument = op.Mul(op.Mul(x, _SCALE), op.Add(op.Mul(op.Mul(x, _CUBE), x), 1.0))
    return op.Mul(op.Mul(x, 0.5), op.Add(_tanh(op, argument), 1.0))


def _check_dtype(context: PassContext, x: ir.Value) -> str | None:
    return None if x.dtype == ir.DataType.FLOAT else f"it is of {x.dtype}, not float32"


def _check_gelu(context: PassContext, x: ir.Value) -> str | None:
    too_old = None if context.target.opset >= 20 else f"Gelu needs opset 20, this is {context.target.opset}"
    return _check_dtype(context, x) or too_old


def _check_quick_gelu(context: PassContext, x: ir.Value, factor: ir.Value) -> str | None:
    alpha = number(factor)
    if alpha is None or not math.isfinite(alpha) or len(factor.shape or ()) > len(x.shape or ()):
        return "the factor is no constant number"
    return _check_dtype(context, x)


def _patterns() -> list[OnnxPattern]:
    def quick_gelu(op: Any, x: Any, factor: Any) -> Any:
        return op.Mul(x, _sigmoid(op, op.Mul(x, factor)))

    def gelu(op: Any, x: Any) -> Any:
        return op.Gelu(x, approximate="tanh")

    return [
        OnnxPattern("SiLU of torchlib", lambda op, x: op.Mul(x, op.Sigmoid(x)), _silu, _check_dtype),
        OnnxPattern("SiLU", lambda op, x: op.Mul(x, _sigmoid(op, x)), _silu, _check_dtype),
        OnnxPattern("quick GELU", quick_gelu, _quick_gelu, _check_quick_gelu),
        *(_erf_gelu(divides, half_last) for divides in (True, False) for half_last in (False, True)),
        OnnxPattern("tanh GELU", _tanh_gelu, gelu, _check_gelu),
        OnnxPattern("tanh GELU, factored", _factored_tanh_gelu, gelu, _check_gelu, commute=False),
    ]


PASS = onnx_pattern_pass("onnx.gelu", "Recognizes GELU, quick GELU and SiLU written out.", _patterns)
