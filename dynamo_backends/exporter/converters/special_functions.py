"""Special functions: gamma, zeta, Bessel, Airy, the normal distribution.

They follow ``ATen/native/Math.h`` in formula and dtype, so that they are as near to eager as its compiler's choices
allow: all branches are computed, and ``Where`` chooses. Those that PyTorch takes from a C library (``lgamma``,
``erfinv``) are computed in float64, and not translated for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import special_coefficients as of
from .elementwise import in_double
from .registry import NotTranslatable, converter
from .shapes import cast, computing_dtype, constant

aten = torch.ops.aten

_DOUBLE = ir.DataType.DOUBLE


def _in(x: ir.Value) -> Callable[[float], ir.Value]:
    """A function that makes constants of the dtype of ``x``."""
    dtype = x.dtype
    assert dtype is not None
    return lambda number: constant(number, dtype)


def _computed(function: Callable[[ir.Value], ir.Value]) -> Callable[[ir.Value], ir.Value]:
    """A translation by a function of a float32 or float64 value; half precision is cast."""

    def translation(x: ir.Value) -> ir.Value:
        if x.dtype is None or not x.dtype.is_floating_point():
            raise NotTranslatable("its translation is for floating point")
        return cast(function(cast(x, computing_dtype(x))), x.dtype)

    return translation


def _polynomial(x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Horner's rule, the highest power first."""
    number = _in(x)
    result = number(coefficients[0])
    for coefficient in coefficients[1:]:
        result = op.Add(op.Mul(result, x), number(coefficient))
    return result


def _ratio(x: ir.Value, above: Sequence[float], below: Sequence[float]) -> ir.Value:
    return op.Div(_polynomial(x, above), _polynomial(x, below))


def _chebyshev(x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Half of ``sum(c[k] * T_k(x / 2))`` by Clenshaw's rule, the highest order first, as ``chbevl``."""
    number = _in(x)
    before: ir.Value = number(0.0)
    last: ir.Value = number(0.0)
    current: ir.Value = number(coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, current
        current = op.Add(op.Sub(op.Mul(x, last), before), number(coefficient))
    return op.Mul(number(0.5), op.Sub(current, before))


def _infinite(x: ir.Value) -> ir.Value:
    number = _in(x)
    return op.Equal(op.Abs(x), number(math.inf))


# Modified Bessel functions


def _scaled_i(x: ir.Value, order: int) -> ir.Value:
    """``exp(-|x|) * I(x)`` of order 0 or 1, even in ``x``."""
    number = _in(x)
    size = op.Abs(x)
    near, far = (of.I0_A, of.I0_B) if order == 0 else (of.I1_A, of.I1_B)
    inside = _chebyshev(op.Sub(op.Div(size, number(2.0)), number(2.0)), near)
    if order == 1:
        inside = op.Mul(inside, size)
    outside = op.Div(_chebyshev(op.Sub(op.Div(number(32.0), size), number(2.0)), far), op.Sqrt(size))
    return op.Where(op.LessOrEqual(size, number(8.0)), inside, outside)


def _odd(x: ir.Value, result: ir.Value) -> ir.Value:
    """``result`` with the sign of ``x``, which a zero has too."""
    number = _in(x)
    is_negative = op.Or(op.Less(x, number(0.0)), op.Less(op.Reciprocal(x), number(0.0)))  # of -0 it is -infinity
    return op.Mul(result, op.Where(is_negative, number(-1.0), number(1.0)))


def _i0(x: ir.Value) -> ir.Value:
    return op.Mul(op.Exp(op.Abs(x)), _scaled_i(x, 0))


def _i1(x: ir.Value) -> ir.Value:
    return _odd(x, op.Mul(op.Exp(op.Abs(x)), _scaled_i(x, 1)))


def _scaled_k(x: ir.Value, order: int, *, scaled: bool) -> ir.Value:
    """``K(x)`` of order 0 or 1, times ``exp(x)`` if ``scaled``."""
    number = _in(x)
    near, far = (of.K0_A, of.K0_B) if order == 0 else (of.K1_A, of.K1_B)
    series = _chebyshev(op.Sub(op.Mul(x, x), number(2.0)), near)
    if order == 0 and not scaled:  # eager halves in float64
        logarithm = cast(op.Log(op.Mul(constant(0.5, _DOUBLE), cast(x, _DOUBLE))), series.dtype)
    else:
        logarithm = op.Log(op.Mul(number(0.5), x))
    if order == 0:
        inside = op.Sub(series, op.Mul(logarithm, _i0(x)))
    else:
        inside = op.Add(op.Mul(logarithm, _i1(x)), op.Div(series, x))
    outside = _chebyshev(op.Sub(op.Div(number(8.0), x), number(2.0)), far)
    if scaled:
        inside = op.Mul(inside, op.Exp(x))
    else:
        outside = op.Mul(op.Exp(op.Neg(x)), outside)
    result = op.Where(op.LessOrEqual(x, number(2.0)), inside, op.Div(outside, op.Sqrt(x)))
    result = op.Where(op.Less(x, number(0.0)), number(math.nan), result)
    return op.Where(op.Equal(x, number(0.0)), number(math.inf), result)


# Bessel functions


def _waves(x: ir.Value, order: int) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """What the expansions of J and Y for large ``x`` share: two amplitudes, and the cosine and sine of the phase."""
    number = _in(x)
    fifth = op.Div(number(5.0), x)
    y = op.Div(number(25.0), op.Mul(x, x)) if order == 0 else op.Mul(fifth, fifth)
    tables = (
        (of.BESSEL0_PP, of.BESSEL0_PQ, of.BESSEL0_QP, of.BESSEL0_QQ)
        if order == 0
        else (of.BESSEL1_PP, of.BESSEL1_PQ, of.BESSEL1_QP, of.BESSEL1_QQ)
    )
    phase = op.Sub(x, number(math.pi / 4 if order == 0 else 3 * math.pi / 4))
    return (
        _ratio(y, tables[0], tables[1]),
        op.Mul(fifth, _ratio(y, tables[2], tables[3])),
        op.Cos(phase),
        op.Sin(phase),
    )


def _amplitude(x: ir.Value, result: ir.Value) -> ir.Value:
    number = _in(x)
    return op.Div(op.Mul(result, number(math.sqrt(2 / math.pi))), op.Sqrt(x))


def _j0(x: ir.Value) -> ir.Value:
    number = _in(x)
    x = op.Abs(x)
    square = op.Mul(x, x)
    zeros = op.Mul(op.Sub(square, number(5.78318596294678452118)), op.Sub(square, number(30.4712623436620863991)))
    inside = op.Div(op.Mul(zeros, _polynomial(square, of.BESSEL0_RP)), _polynomial(square, of.BESSEL0_RQ))
    p, q, cosine, sine = _waves(x, 0)
    outside = _amplitude(x, op.Sub(op.Mul(p, cosine), op.Mul(q, sine)))
    result = op.Where(op.LessOrEqual(x, number(5.0)), inside, outside)
    tiny = op.Sub(number(1.0), op.Div(square, number(4.0)))
    return op.Where(op.Less(x, number(0.00001)), tiny, result)


def _j1(x: ir.Value) -> ir.Value:
    number = _in(x)
    size = op.Abs(x)
    square = op.Mul(size, size)
    inside = op.Mul(_ratio(square, of.BESSEL1_RP, of.BESSEL1_RQ), size)
    inside = op.Mul(inside, op.Sub(square, number(14.6819706421238932572)))
    inside = op.Mul(inside, op.Sub(square, number(49.2184563216946036703)))
    p, q, cosine, sine = _waves(size, 1)
    outside = _amplitude(size, op.Sub(op.Mul(p, cosine), op.Mul(q, sine)))
    return _odd(x, op.Where(op.LessOrEqual(size, number(5.0)), inside, outside))


def _y(x: ir.Value, order: int) -> ir.Value:
    number = _in(x)
    square = op.Mul(x, x)
    logarithm = op.Log(x)
    if order == 0:
        inside = _ratio(square, of.BESSEL0_YP, of.BESSEL0_YQ)
        inside = op.Add(inside, op.Mul(op.Mul(number(2 / math.pi), logarithm), _j0(x)))
    else:
        inside = op.Mul(x, _ratio(square, of.BESSEL1_YP, of.BESSEL1_YQ))
        rest = op.Sub(op.Mul(_j1(x), logarithm), op.Div(number(1.0), x))
        inside = op.Add(inside, op.Mul(number(2 / math.pi), rest))
    p, q, cosine, sine = _waves(x, order)
    outside = _amplitude(x, op.Add(op.Mul(p, sine), op.Mul(q, cosine)))
    result = op.Where(op.LessOrEqual(x, number(5.0)), inside, outside)
    result = op.Where(op.Less(x, number(0.0)), number(math.nan), result)
    return op.Where(op.Equal(x, number(0.0)), number(-math.inf), result)


def _spherical_j0(x: ir.Value) -> ir.Value:
    number = _in(x)
    factorials = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = op.Less(op.Abs(x), number(0.5))
    result = op.Where(near, _polynomial(op.Mul(x, x), factorials), op.Div(op.Sin(x), x))
    return op.Where(_infinite(x), number(0.0), result)


_TERMS_OF_AIRY = 16
"""For |x| <= 2.09 those after are below the last digit of float64."""


def _airy(x: ir.Value) -> ir.Value:
    number = _in(x)
    size = op.Abs(x)
    root = op.Sqrt(size)
    amplitude = number(1 / math.sqrt(math.pi))

    zeta = op.Div(op.Mul(op.Mul(number(2.0), size), root), number(3.0))
    z = op.Div(number(1.0), zeta)
    square = op.Mul(z, z)
    phase = op.Add(zeta, number(math.pi / 4))
    cosine = op.Mul(z, _ratio(square, of.AIRY_AGN, of.AIRY_AGD))
    sine = op.Add(number(1.0), op.Mul(square, _ratio(square, of.AIRY_AFN, of.AIRY_AFD)))
    below = op.Sub(op.Mul(op.Sin(phase), sine), op.Mul(op.Cos(phase), cosine))
    below = op.Mul(op.Div(amplitude, op.Sqrt(root)), below)

    above = op.Mul(amplitude, _ratio(z, of.AIRY_AN, of.AIRY_AD))
    above = op.Div(above, op.Mul(op.Mul(number(2.0), op.Sqrt(root)), op.Exp(zeta)))

    cube = op.Mul(op.Mul(x, x), x)
    even = [1.0]
    odd = [1.0]
    for k in range(_TERMS_OF_AIRY):
        even.append(even[-1] / ((3 * k + 2) * (3 * k + 3)))
        odd.append(odd[-1] / ((3 * k + 3) * (3 * k + 4)))
    first = op.Mul(number(0.355028053887817239260), _polynomial(cube, even[::-1]))
    second = op.Mul(number(0.258819403792806798405), op.Mul(x, _polynomial(cube, odd[::-1])))
    middle = op.Sub(first, second)

    result = op.Where(op.Less(x, number(-2.09)), below, middle)
    result = op.Where(op.GreaterOrEqual(x, number(2.09)), above, result)
    result = op.Where(op.Greater(x, number(103.892)), number(0.0), result)
    return op.Where(_infinite(x), number(math.nan), result)


# The normal distribution


def _erfcx_of_positive(size: ir.Value) -> ir.Value:
    """``exp(size * size) * erfc(size)`` of float64 values."""
    wide = _in(size)
    u = op.Sub(op.Div(wide(8.0), op.Add(wide(4.0), size)), wide(1.0))
    near = _chebyshev(op.Mul(wide(2.0), u), of.ERFCX[::-1])
    square = op.Mul(size, size)
    above = op.Add(op.Mul(square, op.Add(square, wide(4.5))), wide(2.0))
    below = op.Mul(size, op.Add(op.Mul(square, op.Add(square, wide(5.0))), wide(3.75)))
    far = op.Mul(wide(1 / math.sqrt(math.pi)), op.Div(above, below))
    far = op.Where(op.Greater(size, wide(5e7)), op.Div(wide(1 / math.sqrt(math.pi)), size), far)
    return op.Where(op.Greater(size, wide(50.0)), far, near)


def _erfcx(x: ir.Value) -> ir.Value:
    """``exp(x * x) * erfc(x)``. The exponential of a negative number's square is eager's, in its dtype."""
    number = _in(x)
    dtype = x.dtype
    assert dtype is not None
    positive = cast(_erfcx_of_positive(cast(op.Abs(x), _DOUBLE)), dtype)
    double = op.Mul(number(2.0), op.Exp(op.Mul(x, x)))
    negative = op.Where(op.Less(x, number(-6.1)), double, op.Sub(double, positive))
    negative = op.Where(op.Less(x, number(-26.7)), number(math.inf), negative)
    result = op.Where(op.Less(x, number(0.0)), negative, positive)
    return op.Where(op.IsNaN(x), x, result)


def _erfc(x: ir.Value) -> ir.Value:
    """In float64, as ``exp(-x * x) * erfcx(x)``: of torchlib's ``1 - erf(x)`` no digit is left above 4."""
    dtype = x.dtype
    assert dtype is not None
    wide = cast(x, _DOUBLE)
    number = _in(wide)
    size = op.Abs(wide)
    size = op.Min(size, number(30.0))  # beyond it is 0 in float64 too
    positive = op.Mul(op.Exp(op.Neg(op.Mul(size, size))), _erfcx_of_positive(size))
    result = op.Where(op.Less(wide, number(0.0)), op.Sub(number(2.0), positive), positive)
    return cast(op.Where(op.IsNaN(wide), wide, result), dtype)


_TAIL = math.exp(-2)
"""The probability below which the inverse of the normal distribution is computed by its logarithm."""


def _central_quantile(y: ir.Value) -> ir.Value:
    """The quantile of ``y + 0.5``."""
    number = _in(y)
    square = op.Mul(y, y)
    ratio = op.Div(op.Mul(square, _polynomial(square, of.NORMAL_P0)), _polynomial(square, of.NORMAL_Q0))
    return op.Mul(op.Add(y, op.Mul(y, ratio)), number(math.sqrt(2 * math.pi)))


def _tail_quantile(y: ir.Value) -> ir.Value:
    """The negative quantile of ``y``, below exp(-2)."""
    number = _in(y)
    x = op.Sqrt(op.Mul(number(-2.0), op.Log(y)))
    z = op.Div(number(1.0), x)
    near = op.Div(op.Mul(z, _polynomial(z, of.NORMAL_P1)), _polynomial(z, of.NORMAL_Q1))
    far = op.Div(op.Mul(z, _polynomial(z, of.NORMAL_P2)), _polynomial(z, of.NORMAL_Q2))
    return op.Sub(op.Sub(x, op.Div(op.Log(x), x)), op.Where(op.Less(x, number(8.0)), near, far))


def _ndtri(y: ir.Value) -> ir.Value:
    number = _in(y)
    zero, one = number(0.0), number(1.0)
    is_upper = op.Greater(y, number(1.0 - _TAIL))
    tail = op.Where(is_upper, op.Sub(one, y), y)
    outer = op.Mul(_tail_quantile(tail), op.Where(is_upper, one, number(-1.0)))
    result = op.Where(op.Greater(tail, number(_TAIL)), _central_quantile(op.Sub(y, number(0.5))), outer)
    result = op.Where(op.Or(op.Less(y, zero), op.Greater(y, one)), number(math.nan), result)
    result = op.Where(op.Equal(y, zero), number(-math.inf), result)
    return op.Where(op.Equal(y, one), number(math.inf), result)


@converter(aten.erfinv.default)
def erfinv(x: ir.Value) -> ir.Value:
    """The normal distribution's quantile of ``(1 + x) / 2``, divided by the square root of 2, in float64: no digit of a
    number near 0 or 1 is lost."""
    dtype = x.dtype
    y = in_double(x)
    number = _in(y)
    size = op.Abs(y)
    tail = _tail_quantile(op.Mul(op.Sub(number(1.0), size), number(0.5)))
    is_central = op.LessOrEqual(size, number(1.0 - 2 * _TAIL))
    central = _central_quantile(op.Mul(size, number(0.5)))
    result = op.Div(op.Where(is_central, central, tail), number(math.sqrt(2.0)))
    result = op.Where(op.Equal(size, number(1.0)), number(math.inf), result)
    result = op.Where(op.Greater(size, number(1.0)), number(math.nan), result)
    return op.Cast(_odd(y, op.Where(op.IsNaN(y), y, result)), to=dtype)


# Gamma functions


@converter(aten.digamma.default, aten.special_digamma.default)
def digamma(x: ir.Value) -> ir.Value:
    """The recurrence to 10 and the asymptotic series of ``calc_digamma``, in float64."""
    dtype = x.dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    wide = cast(x, _DOUBLE)
    number = _in(wide)
    zero, one, ten = number(0.0), number(1.0), number(10.0)
    is_negative = op.Less(wide, zero)
    y = op.Where(is_negative, op.Sub(one, wide), wide)
    total: ir.Value = zero
    for _ in range(10):
        is_small = op.Less(y, ten)
        total = op.Sub(total, op.Where(is_small, op.Div(one, y), zero))
        y = op.Add(y, op.Cast(is_small, to=_DOUBLE))
    square = op.Div(one, op.Mul(y, y))
    series = op.Mul(square, _polynomial(square, [1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12]))
    result = op.Sub(op.Sub(op.Add(total, op.Log(y)), op.Div(number(0.5), y)), series)
    # Of a negative number: minus pi / tan(pi * x), with its fraction in the place of x.
    fraction = op.Sub(wide, op.Neg(op.Floor(op.Neg(wide))))
    turn = op.Mul(number(math.pi), fraction)
    reflected = op.Sub(result, op.Div(number(math.pi), op.Div(op.Sin(turn), op.Cos(turn))))
    reflected = op.Where(op.Equal(fraction, zero), number(math.nan), reflected)
    reflected = op.Where(_infinite(wide), number(math.nan), reflected)
    result = op.Where(is_negative, reflected, result)
    return cast(op.Where(op.Equal(wide, zero), op.Neg(op.Reciprocal(wide)), result), dtype)


_STIRLING = (1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)


@converter(aten.lgamma.default)
def lgamma(x: ir.Value) -> ir.Value:
    """The recurrence to 8, Stirling's series, and the reflection of negative numbers, in float64."""
    dtype = x.dtype
    wide = in_double(x)
    number = _in(wide)
    zero, one = number(0.0), number(1.0)
    is_negative = op.Less(wide, zero)
    y = op.Where(is_negative, op.Sub(one, wide), wide)
    product: ir.Value = one
    for _ in range(8):
        is_small = op.Less(y, number(8.0))
        product = op.Mul(product, op.Where(is_small, y, one))
        y = op.Add(y, op.Cast(is_small, to=_DOUBLE))
    inverse = op.Div(one, y)
    series = op.Mul(inverse, _polynomial(op.Mul(inverse, inverse), _STIRLING))
    result = op.Sub(op.Mul(op.Sub(y, number(0.5)), op.Log(y)), y)
    result = op.Add(op.Add(result, number(0.5 * math.log(2 * math.pi))), series)
    result = op.Sub(result, op.Log(product))
    sine = op.Abs(op.Sin(op.Mul(number(math.pi), op.Sub(wide, op.Round(wide)))))
    reflected = op.Sub(op.Sub(number(math.log(math.pi)), op.Log(sine)), result)
    result = op.Where(is_negative, reflected, result)
    return op.Cast(op.Where(_infinite(wide), number(math.inf), result), to=dtype)


def _trigamma(x: ir.Value) -> ir.Value:
    number = _in(x)
    one = number(1.0)
    is_reflected = op.Less(x, number(0.5))
    sine = op.Sin(op.Mul(number(math.pi), x))
    total = op.Div(op.Mul(number(math.pi), number(math.pi)), op.Mul(sine, sine))
    total = op.Where(is_reflected, op.Neg(total), number(0.0))
    y = op.Where(is_reflected, op.Sub(one, x), x)
    for _ in range(6):
        total = op.Add(total, op.Div(one, op.Mul(y, y)))
        y = op.Add(y, one)
    square = op.Div(one, op.Mul(y, y))
    series = op.Mul(square, _polynomial(square, [1 / 42, -1 / 30, 1 / 6]))
    series = op.Add(op.Add(one, op.Div(one, op.Mul(number(2.0), y))), series)
    total = op.Add(total, op.Div(series, y))
    return op.Mul(total, op.Where(is_reflected, number(-1.0), one))


_ZETA = (
    12.0,
    -720.0,
    30240.0,
    -1209600.0,
    47900160.0,
    -1.8924375803183791606e9,
    7.47242496e10,
    -2.950130727918164224e12,
    1.1646782814350067249e14,
    -4.5979787224074726105e15,
    1.8152105401943546773e17,
    -7.1661652561756670113e18,
)
"""``(2 k)! / B(2 k)``, Bernoulli's numbers."""


def _zeta(x: ir.Value, q: ir.Value) -> ir.Value:
    """Hurwitz's zeta function of float64 values, as ``zeta``: powers up to a base above 9, then Euler and Maclaurin's
    series as far as it changes the sum."""
    number = _in(x)
    zero, one = number(0.0), number(1.0)
    is_pole = op.And(op.LessOrEqual(q, zero), op.Equal(q, op.Floor(q)))
    is_undefined = op.And(op.Less(q, zero), op.Not(op.Equal(x, op.Floor(x))))
    base = op.Where(op.Or(op.Or(is_pole, op.IsNaN(q)), _infinite(q)), one, q)
    steps = op.Where(op.Greater(base, zero), number(9.0), op.Add(op.Floor(op.Sub(number(9.0), base)), one))
    most = op.Add(op.ReduceMax(steps, keepdims=0), one)
    terms = op.Range(zero, most, one)
    last = op.Constant(value_ints=[-1])
    bases = op.Add(op.Unsqueeze(base, last), terms)
    is_needed = op.LessOrEqual(terms, op.Unsqueeze(steps, last))
    powers = op.Where(is_needed, op.Pow(bases, op.Neg(op.Unsqueeze(x, last))), zero)
    total = op.ReduceSum(powers, last, keepdims=0)

    epsilon = number(1.11022302462515654042e-16)
    w = op.Add(base, steps)
    b = op.Pow(w, op.Neg(x))
    is_done = op.Less(op.Abs(b), op.Mul(epsilon, total))
    tail = op.Sub(op.Div(op.Mul(b, w), op.Sub(x, one)), op.Mul(number(0.5), b))
    total = op.Add(total, op.Where(is_done, zero, tail))
    factor: ir.Value = one
    for i, coefficient in enumerate(_ZETA):
        factor = op.Mul(factor, op.Add(x, number(2.0 * i)))
        b = op.Div(b, w)
        term = op.Div(op.Mul(factor, b), number(coefficient))
        total = op.Add(total, op.Where(is_done, zero, term))
        is_done = op.Or(is_done, op.Less(op.Abs(op.Div(term, total)), epsilon))
        factor = op.Mul(factor, op.Add(x, number(2.0 * i + 1.0)))
        b = op.Div(b, w)
    total = op.Where(op.Or(op.IsNaN(q), _infinite(q)), number(math.nan), total)  # such a base was not added up
    total = op.Where(is_undefined, number(math.nan), total)
    total = op.Where(is_pole, number(math.inf), total)
    total = op.Where(op.Less(x, one), number(math.nan), total)
    return op.Where(op.Equal(x, one), number(math.inf), total)


@converter(aten.special_zeta.default, aten.special_zeta.self_scalar, aten.special_zeta.other_scalar)
def zeta(x: ir.Value | float, q: ir.Value | float) -> ir.Value:
    """Hurwitz's zeta function, in float64."""
    given = [item for item in (x, q) if isinstance(item, ir.Value)]
    dtype = given[0].dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    wide = [cast(item, _DOUBLE) if isinstance(item, ir.Value) else constant(item, _DOUBLE) for item in (x, q)]
    return cast(_zeta(*wide), dtype)


@converter(aten.polygamma.default)
def polygamma(n: int, x: ir.Value) -> ir.Value:
    """The derivative number ``n`` of ``digamma``: from the second on a multiple of ``zeta(n + 1, x)``."""
    dtype = x.dtype
    if dtype is None or not dtype.is_floating_point():
        raise NotTranslatable("its translation is for floating point")
    if n == 0:
        return digamma(x)
    computed = computing_dtype(x)
    if n == 1:
        if dtype == _DOUBLE:
            raise NotTranslatable(
                "it divides by the square of a sine, which near multiples of pi is another in ONNX Runtime"
            )
        return cast(_trigamma(cast(x, computed)), dtype)
    factorial = np.exp(computed.numpy().type(math.lgamma(n + 1)))  # as eager rounds it
    values = cast(_zeta(constant(n + 1.0, _DOUBLE), cast(x, _DOUBLE)), computed)
    return cast(op.Mul(constant(float(factorial) * (1 if n % 2 else -1), computed), values), dtype)


_FUNCTIONS: dict[object, Callable[[ir.Value], ir.Value]] = {
    aten.i0.default: _i0,
    aten.special_i0e.default: lambda x: _scaled_i(x, 0),
    aten.special_i1.default: _i1,
    aten.special_i1e.default: lambda x: _odd(x, _scaled_i(x, 1)),
    aten.special_modified_bessel_k0.default: lambda x: _scaled_k(x, 0, scaled=False),
    aten.special_modified_bessel_k1.default: lambda x: _scaled_k(x, 1, scaled=False),
    aten.special_scaled_modified_bessel_k0.default: lambda x: _scaled_k(x, 0, scaled=True),
    aten.special_scaled_modified_bessel_k1.default: lambda x: _scaled_k(x, 1, scaled=True),
    aten.special_bessel_j0.default: _j0,
    aten.special_bessel_j1.default: _j1,
    aten.special_bessel_y0.default: lambda x: _y(x, 0),
    aten.special_bessel_y1.default: lambda x: _y(x, 1),
    aten.special_spherical_bessel_j0.default: _spherical_j0,
    aten.special_airy_ai.default: _airy,
    aten.erfc.default: _erfc,
    aten.special_erfcx.default: _erfcx,
    aten.special_ndtri.default: _ndtri,
}

_OTHER_NAMES = {
    aten.i0.default: aten.special_modified_bessel_i0.default,
    aten.special_i1.default: aten.special_modified_bessel_i1.default,
}

for _target, _function in _FUNCTIONS.items():
    converter(*filter(None, (_target, _OTHER_NAMES.get(_target))))(_computed(_function))
