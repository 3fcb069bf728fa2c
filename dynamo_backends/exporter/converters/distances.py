"""Distances between rows: ``cdist``, ``pdist``; and ``bilinear``.

They follow ``aten/src/ATen/native/cpu/DistanceOpsKernel.cpp``: the differences are made, as eager's kernels do, and all
at once, which they do not, so large ones stay in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter
from .shapes import constant

aten = torch.ops.aten

_LARGEST = 2**22
"""Elements of all differences: 16 MB of float32."""

_ROWS_OF_A_PRODUCT = 25
"""With more rows eager computes Euclid's distance by a matrix product, with other digits."""


def _norm(differences: ir.Value, p: float) -> ir.Value:
    """The norm of the last dimension."""
    dtype = differences.dtype
    assert dtype is not None
    axis = op.Constant(value_ints=[-1])
    size = op.Abs(differences)
    if p == 0:
        return op.ReduceSum(op.Min(op.Ceil(size), constant(1.0, dtype)), axis, keepdims=0)
    if p == 1:
        return op.ReduceSum(size, axis, keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(size, size), axis, keepdims=0))
    if math.isinf(p):
        raise NotTranslatable("whether a NaN is the largest difference depends on its place in eager's vectors")
    total = op.ReduceSum(op.Pow(size, constant(p, dtype)), axis, keepdims=0)
    return op.Pow(total, constant(1 / p, dtype))


def _check(*sizes: shapes.Size) -> None:
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes) or math.prod(known) > _LARGEST:
        raise NotTranslatable("its translation holds all differences at once, and they may be many")


@converter(aten._cdist_forward.default)
def cdist(x: ir.Value, y: ir.Value, p: float, compute_mode: int | None = None) -> ir.Value:
    """The distance of each row of ``x``, [..., P, M], to each of ``y``, [..., R, M]."""
    rows, others = shapes.static_size(x, -2), shapes.static_size(y, -2)
    by_product = compute_mode == 1 or (not compute_mode and max(rows, others) > _ROWS_OF_A_PRODUCT)
    if p == 2 and by_product:
        raise NotTranslatable("eager computes it by a matrix product, with other digits")
    _check(*shapes.sizes(x), others)
    return _norm(op.Sub(op.Unsqueeze(x, [-2]), op.Unsqueeze(y, [-3])), p)


@converter(aten._pdist_forward.default)
def pdist(x: ir.Value, p: float = 2) -> ir.Value:
    """The distance of each row of ``x``, [N, M], to each after it."""
    rows = shapes.static_size(x, 0)
    first, second = np.triu_indices(rows, 1)
    if not len(first):
        assert x.dtype is not None
        return shapes.zeros([0], x.dtype)
    _check(len(first), shapes.size(x, 1))
    return _norm(op.Sub(_rows(x, first), _rows(x, second)), p)


def _rows(x: ir.Value, which: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ir.Value:
    return op.Gather(x, op.Constant(value=ir.tensor(which.astype(np.int64))), axis=0)


@converter(aten._trilinear.default)
def trilinear(
    x: ir.Value,
    y: ir.Value,
    z: ir.Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> ir.Value:
    """The product of three tensors, each with dimensions of size 1 put in, summed over ``sumdim``."""
    factors = []
    sizes: list[shapes.Size] = []
    for factor, dims in ((x, expand1), (y, expand2), (z, expand3)):
        own = shapes.sizes(factor)
        for dim in sorted(dims):
            own.insert(dim, 1)
        sizes = [one if other == 1 else other for one, other in zip(own, sizes, strict=True)] if sizes else own
        factors.append(op.Unsqueeze(factor, op.Constant(value_ints=list(dims))) if dims else factor)
    _check(*sizes)
    product = op.Mul(op.Mul(factors[0], factors[1]), factors[2])
    return op.ReduceSum(product, op.Constant(value_ints=list(sumdim)), keepdims=0) if sumdim else product
