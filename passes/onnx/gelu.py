"""Recognizes GELU and its relatives written out in elementary operators.

Rule, for float32, with these constants within float32's rounding, factors and summands in any order::

    0.5 * x * (1 + erf(x / sqrt(2)))                              -> Gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))  -> Gelu <approximate="tanh"> (x)
    x * sigmoid(a * x), x * sigmoid(x)                            -> com.microsoft.QuickGelu <alpha=a> (x)

where ``sigmoid(x)`` is ``Sigmoid(x)`` or ``1 / (1 + exp(-x))``, and ``tanh(x)`` is ``Tanh(x)`` or that and ``x`` itself
near zero.

Needed: for the quick GELU of CLIP, whose call takes 3.0 ± 1.7 and 4.3 ± 2.0 % longer without it (two runs); the others
are written so by few models, and ``pre_grad.activations`` finds them in training.

It must not fire for other dtypes, whose steps are rounded otherwise, nor where a step is needed elsewhere, as by the
gradient; before opset 20 there is no ``Gelu``. Measured at 2x64x1024, one thread: ``Gelu`` 71 us instead of eight
passes over the memory; ``QuickGelu`` is as fast as what ONNX Runtime makes of the two nodes by itself.
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
_MICROSOFT = "com.microsoft"


def _silu(op: Any, x: Any) -> Any:
    return op.Mul(x, op.Sigmoid(x))


def _sigmoid(op: Any, x: Any) -> Any:
    """As the exporter writes it."""
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))


def _silu_written_out(op: Any, x: Any) -> Any:
    return op.Mul(x, _sigmoid(op, x))


def _quick_written_out(op: Any, x: Any, factor: Any) -> Any:
    return op.Mul(x, _sigmoid(op, op.Mul(x, factor)))


def _to_silu(op: Any, x: Any) -> Any:
    return op.QuickGelu(x, alpha=1.0, _domain=_MICROSOFT)


def _quick(op: Any, x: Any, factor: Any) -> Any:
    return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))


def _to_quick(op: Any, x: Any, factor: Any) -> Any:
    return op.QuickGelu(x, alpha=number(factor), _domain=_MICROSOFT)


def _erf(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0))


def _erf_of_product(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0))


def _erf_half_last(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0)), 0.5)


def _erf_of_product_half_last(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0)), 0.5)


def _to_gelu(op: Any, x: Any) -> Any:
    return op.Gelu(x, approximate="none")


def _exported_tanh(op: Any, x: Any) -> Any:
    """As the exporter writes it."""
    return op.Where(op.GreaterOrEqual(op.Abs(x), 2**-12), op.Tanh(x), x)


def _inner(op: Any, x: Any) -> Any:
    return op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBE)), _SCALE)


def _inner_factored(op: Any, x: Any) -> Any:
    """``gelu_fast`` of ``transformers``, in its order of factors; in all orders there would be hundreds."""
    return op.Mul(op.Mul(x, _SCALE), op.Add(op.Mul(op.Mul(x, _CUBE), x), 1.0))


def _tanh(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(_inner(op, x)), 1.0))


def _tanh_factored(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(_inner_factored(op, x)), 1.0))


def _tanh_written_out(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(_exported_tanh(op, _inner(op, x)), 1.0))


def _tanh_factored_written_out(op: Any, x: Any) -> Any:
    return op.Mul(op.Mul(x, 0.5), op.Add(_exported_tanh(op, _inner_factored(op, x)), 1.0))


def _to_tanh(op: Any, x: Any) -> Any:
    return op.Gelu(x, approximate="tanh")


def _check(context: PassContext, x: ir.Value) -> str | None:
    if x.dtype != ir.DataType.FLOAT:
        return f"it is of {x.dtype}, not float32"
    return None if context.target.opset >= 20 else f"Gelu came with opset 20, this is {context.target.opset}"


def _check_float(context: PassContext, x: ir.Value) -> str | None:
    return None if x.dtype == ir.DataType.FLOAT else f"it is of {x.dtype}, not float32"


def _check_quick(context: PassContext, x: ir.Value, factor: ir.Value) -> str | None:
    alpha = number(factor)
    if alpha is None or not math.isfinite(alpha) or len(factor.shape or ()) > len(x.shape or ()):
        return "the factor is no constant number"
    return _check_float(context, x)


def _patterns() -> list[OnnxPattern]:
    return [
        OnnxPattern("silu", _silu, _to_silu, _check_float),
        OnnxPattern("SiLU written out", _silu_written_out, _to_silu, _check_float),
        OnnxPattern("quick GELU", _quick, _to_quick, _check_quick),
        OnnxPattern("quick GELU written out", _quick_written_out, _to_quick, _check_quick),
        OnnxPattern("erf", _erf, _to_gelu, _check),
        OnnxPattern("erf of product", _erf_of_product, _to_gelu, _check),
        OnnxPattern("erf, half last", _erf_half_last, _to_gelu, _check),
        OnnxPattern("erf of product, half last", _erf_of_product_half_last, _to_gelu, _check),
        OnnxPattern("tanh", _tanh, _to_tanh, _check),
        OnnxPattern("tanh, factored", _tanh_factored, _to_tanh, _check, commute=False),
        OnnxPattern("tanh written out", _tanh_written_out, _to_tanh, _check),
        OnnxPattern("tanh, factored, written out", _tanh_factored_written_out, _to_tanh, _check, commute=False),
    ]


PASS = onnx_pattern_pass("onnx.gelu", "Recognizes GELU, quick GELU and SiLU written out.", _patterns)
