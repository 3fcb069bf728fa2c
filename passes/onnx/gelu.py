"""Recognizes GELU and its relatives written out in elementary operators.

Rule, for float32, with these constants within float32's rounding, factors and summands in any order::

    0.5 * x * (1 + erf(x / sqrt(2)))                              -> Gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))  -> Gelu <approximate="tanh"> (x)
    x * sigmoid(a * x), x * sigmoid(x)                            -> com.microsoft.QuickGelu <alpha=a> (x)

where ``sigmoid(x)`` is ``Sigmoid(x)`` or ``1 / (1 + exp(-x))``, and ``tanh(x)`` is ``Tanh(x)`` or that and ``x`` itself
near zero: as the exporter writes them.

Needed: for the quick GELU of CLIP, whose call takes 3.0 ± 1.7 and 4.3 ± 2.0 % longer without it (two runs); the others
are written so by few models, and ``pre_grad.activations`` finds them in training.

It must not fire for other dtypes, whose steps are rounded otherwise, nor where a step is needed elsewhere, as by the
gradient; before opset 20 there is no ``Gelu``. Measured at 2x64x1024, one thread: ``Gelu`` 71 us instead of eight
passes over the memory; ``QuickGelu`` is as fast as what ONNX Runtime makes of the two nodes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import number
from ..engine.onnx.patterns import OnnxPattern, onnx_pattern_pass

_SCALE = math.sqrt(2 / math.pi)
_CUBE = 0.044715
_MICROSOFT = "com.microsoft"
_Function = Callable[[Any, Any], Any]


def _sigmoid(op: Any, x: Any) -> Any:
    return op.Sigmoid(x)


def _exported_sigmoid(op: Any, x: Any) -> Any:
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))


def _tanh(op: Any, x: Any) -> Any:
    return op.Tanh(x)


def _exported_tanh(op: Any, x: Any) -> Any:
    return op.Where(op.GreaterOrEqual(op.Abs(x), 2**-12), op.Tanh(x), x)


def _quotient(op: Any, x: Any) -> Any:
    return op.Div(x, math.sqrt(2))


def _product(op: Any, x: Any) -> Any:
    return op.Mul(x, math.sqrt(0.5))


def _inner(op: Any, x: Any) -> Any:
    return op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), _CUBE)), _SCALE)


def _inner_factored(op: Any, x: Any) -> Any:
    """``gelu_fast`` of ``transformers``, in its order of factors; in all orders there would be hundreds."""
    return op.Mul(op.Mul(x, _SCALE), op.Add(op.Mul(op.Mul(x, _CUBE), x), 1.0))


def _silu(sigmoid: _Function) -> OnnxPattern:
    return OnnxPattern(
        f"silu by {sigmoid.__name__}",
        lambda op, x: op.Mul(x, sigmoid(op, x)),
        lambda op, x: op.QuickGelu(x, alpha=1.0, _domain=_MICROSOFT),
        _check_dtype,
    )


def _quick(sigmoid: _Function) -> OnnxPattern:
    return OnnxPattern(
        f"quick GELU by {sigmoid.__name__}",
        lambda op, x, factor: op.Mul(x, sigmoid(op, op.Mul(x, factor))),
        lambda op, x, factor: op.QuickGelu(x, alpha=number(factor), _domain=_MICROSOFT),
        _check_quick,
    )


def _erf(argument: _Function, half_last: bool) -> OnnxPattern:
    def search(op: Any, x: Any) -> Any:
        factor = op.Add(op.Erf(argument(op, x)), 1.0)
        return op.Mul(op.Mul(x, factor), 0.5) if half_last else op.Mul(op.Mul(x, 0.5), factor)

    name = f"erf of {argument.__name__}{', half last' * half_last}"
    return OnnxPattern(name, search, lambda op, x: op.Gelu(x, approximate="none"), _check)


def _tanh_gelu(tanh: _Function, inner: _Function, commute: bool) -> OnnxPattern:
    def search(op: Any, x: Any) -> Any:
        return op.Mul(op.Mul(x, 0.5), op.Add(tanh(op, inner(op, x)), 1.0))

    name = f"{tanh.__name__} of {inner.__name__}"
    return OnnxPattern(name, search, lambda op, x: op.Gelu(x, approximate="tanh"), _check, commute)


def _check(context: PassContext, x: ir.Value) -> str | None:
    too_early = None if context.target.opset >= 20 else f"Gelu came with opset 20, this is {context.target.opset}"
    return _check_dtype(context, x) or too_early


def _check_dtype(context: PassContext, x: ir.Value) -> str | None:
    return None if x.dtype == ir.DataType.FLOAT else f"it is of {x.dtype}, not float32"


def _check_quick(context: PassContext, x: ir.Value, factor: ir.Value) -> str | None:
    alpha = number(factor)
    if alpha is None or not math.isfinite(alpha) or len(factor.shape or ()) > len(x.shape or ()):
        return "the factor is no constant number"
    return _check_dtype(context, x)


def _patterns() -> list[OnnxPattern]:
    patterns = []
    for sigmoid in (_sigmoid, _exported_sigmoid):
        patterns += [_silu(sigmoid), _quick(sigmoid)]
    for argument in (_quotient, _product):
        patterns += [_erf(argument, half_last=False), _erf(argument, half_last=True)]
    for tanh in (_tanh, _exported_tanh):
        patterns += [_tanh_gelu(tanh, _inner, commute=True), _tanh_gelu(tanh, _inner_factored, commute=False)]
    return patterns


PASS = onnx_pattern_pass("onnx.gelu", "Recognizes GELU, quick GELU and SiLU written out.", _patterns)
