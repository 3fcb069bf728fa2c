"""Scaled dot-product attention as PyTorch's CPU kernel computes it, forward and backward.

Follows ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``. The nodes are those ONNX Runtime fuses: the
transpose and the scale go into its ``FusedMatMul``.

Heads of the query that share a head of keys and values are rows of one product, so that these are not repeated::

    query [B, H, S, D] -> [B, K, H / K * S, D];    scores [B, K, H / K * S, T] -> [B, H, S, T] to add a mask
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import converter

aten = torch.ops.aten


@converter(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: ir.Value | None = None,
    scale: float | None = None,
) -> tuple[ir.Value, ir.Value]:
    """``softmax(q k^T * scale + mask) v`` and the logarithm of the softmax's denominator.

    query: [B, H, S, D]; key and value: [B, K, T, D], each of whose K heads H / K heads of the query share;
    attn_mask: float, [S, T] or broadcastable to [B, H, S, T]. Returns the output [B, H, S, D] and logsumexp
    [B, H, S], float32 for the half precisions. As in eager, a row that the mask hides altogether has output 0
    and logsumexp 0, and the causal mask starts at the top left.

    logsumexp is ``max(scores) - log(max(softmax))``, two passes less than summing the exponentials once more.
    """
    dtype = query.dtype
    computing = shapes.computing_dtype(query)
    factor = _scale(query, scale)
    sharing = _Sharing.of(query, key, is_causal, attn_mask)
    query, key, value = (shapes.cast(item, computing) for item in (query, key, value))
    scores, visible = _scores(query, key, factor, is_causal, attn_mask, sharing)
    probabilities = op.Softmax(scores, axis=-1)
    output = sharing.heads_apart(op.MatMul(sharing.for_product(probabilities), value))
    maximum = op.ReduceMax(scores, [-1], keepdims=0)
    logsumexp = sharing.of_rows(op.Sub(maximum, op.Log(op.ReduceMax(probabilities, [-1], keepdims=0))))
    if visible is not None:
        zero = shapes.constant(0.0, computing)
        output = op.Where(visible, output, zero)
        logsumexp = op.Where(op.Squeeze(visible, [-1]), logsumexp, zero)
    assert dtype is not None
    return shapes.cast(output, dtype), logsumexp


@converter(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    dropout_p: float,
    is_causal: bool,
    attn_mask: ir.Value | None = None,
    scale: float | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The gradients of query, key and value; shapes and dtypes as in ``flash_attention``.

    With P the probabilities: ``dv = P^T do``, ``dP = do v^T``, ``dS = P * (dP - sum(do * o))``, ``dq = scale
    * dS k``, ``dk = scale * dS^T q``. P comes from a softmax, one fused kernel, rather than from ``exp(scores
    - logsumexp)``.
    """
    dtype = query.dtype
    assert dtype is not None
    computing, factor = shapes.computing_dtype(query), _scale(query, scale)
    sharing = _Sharing.of(query, key, is_causal, attn_mask)
    grad_out, query, key, value, out = (shapes.cast(item, computing) for item in (grad_out, query, key, value, out))
    scores, visible = _scores(query, key, factor, is_causal, attn_mask, sharing)
    if visible is not None:
        grad_out = op.Where(visible, grad_out, shapes.constant(0.0, computing))
    probabilities = sharing.for_product(op.Softmax(scores, axis=-1))
    query, grad_out, out = (sharing.rows_together(item) for item in (query, grad_out, out))
    grad_value = op.MatMul(_transposed(probabilities), grad_out)
    grad_probabilities = op.MatMul(grad_out, _transposed(value))
    row_sums = op.ReduceSum(op.Mul(grad_out, out), [-1], keepdims=1)
    grad_scores = op.Mul(probabilities, op.Sub(grad_probabilities, row_sums))
    grad_query = sharing.heads_apart(op.Mul(op.MatMul(grad_scores, key), factor))
    grad_key = op.Mul(op.MatMul(_transposed(grad_scores), query), factor)
    return shapes.cast(grad_query, dtype), shapes.cast(grad_key, dtype), shapes.cast(grad_value, dtype)


@converter(aten._safe_softmax.default)
def safe_softmax(input: ir.Value, dim: int, dtype: ir.DataType | None = None) -> ir.Value:
    """Softmax over ``dim``, and 0 where all of it is -inf."""
    if dtype is not None and dtype != -1:
        input = shapes.cast(input, dtype)
    assert input.dtype is not None
    largest = op.ReduceMax(input, [dim], keepdims=1)
    visible = op.Not(op.Equal(largest, shapes.constant(-math.inf, input.dtype)))
    return op.Where(visible, op.Softmax(input, axis=dim), shapes.constant(0.0, input.dtype))


def _scale(query: ir.Value, scale: float | None) -> ir.Value:
    """The factor of the scores, by default ``1 / sqrt(D)``, in the dtype the scores are computed in.

    A scalar, which ONNX Runtime makes the ``alpha`` of its ``FusedMatMul``. That is a float32 also in a
    product of float64 matrices (1.31), so that float64 gets one factor for each feature of the query.
    """
    dtype = shapes.computing_dtype(query)
    features = shapes.size(query, -1)
    if scale is None and not isinstance(features, int):
        return op.Reciprocal(op.Sqrt(op.Cast(features, to=dtype)))
    number = scale if scale is not None else 1.0 / math.sqrt(features)
    if dtype == ir.DataType.DOUBLE and isinstance(features, int):
        return op.Constant(value=ir.tensor(np.full(features, number)))
    return shapes.constant(number, dtype)


def _transposed(value: ir.Value) -> ir.Value:
    return op.Transpose(value, perm=[0, 1, 3, 2])


@dataclasses.dataclass(frozen=True)
class _Sharing:
    """How heads of the query share keys and values.

    Attributes:
        sizes: the query's, [B, H, S, D].
        heads: of keys and values, K; ``None`` if each head of the query has its own.
        columns: how many keys, T.
        is_masked_apart: whether the mask differs among the rows of a product.
    """

    sizes: list[shapes.Size]
    heads: int | None
    columns: shapes.Size
    is_masked_apart: bool

    @staticmethod
    def of(query: ir.Value, key: ir.Value, is_causal: bool, attn_mask: ir.Value | None) -> _Sharing:
        """Raises ``NotTranslatable`` where it depends on symbolic sizes whether heads share keys."""
        assert query.shape is not None and key.shape is not None
        if query.shape[1] == key.shape[1]:
            return _Sharing([], None, 0, is_masked_apart=False)
        sizes = shapes.sizes(query)
        sizes[1] = shapes.static_size(query, 1)
        is_of_heads = attn_mask is not None and shapes.rank(attn_mask) > 2 and shapes.size(attn_mask, -3) != 1
        is_masked_apart = is_of_heads or (sizes[2] != 1 and (is_causal or attn_mask is not None))
        return _Sharing(sizes, shapes.static_size(key, 1), shapes.size(key, 2), is_masked_apart)

    def rows_together(self, value: ir.Value) -> ir.Value:
        """[B, K, H / K * S, D] of [B, H, S, D]."""
        return value if self.heads is None else shapes.reshape(value, [*self._product_sizes(), self.sizes[3]])

    def heads_apart(self, value: ir.Value) -> ir.Value:
        """[B, H, S, D] of [B, K, H / K * S, D]."""
        return value if self.heads is None else shapes.reshape(value, self.sizes)

    def for_mask(self, scores: ir.Value) -> ir.Value:
        """The scores [B, K, H / K * S, T] as a mask is added to them: [B, H, S, T], if it needs that."""
        return shapes.reshape(scores, [*self.sizes[:3], self.columns]) if self.is_masked_apart else scores

    def for_product(self, probabilities: ir.Value) -> ir.Value:
        """The reverse of ``for_mask``."""
        if not self.is_masked_apart:
            return probabilities
        return shapes.reshape(probabilities, [*self._product_sizes(), self.columns])

    def of_rows(self, numbers: ir.Value) -> ir.Value:
        """[B, H, S], of one number for each row of what ``for_mask`` returns."""
        if self.heads is None or self.is_masked_apart:
            return numbers
        return shapes.reshape(numbers, self.sizes[:3])

    def _product_sizes(self) -> list[shapes.Size]:
        batch, heads, rows, _ = self.sizes
        assert isinstance(heads, int) and self.heads is not None
        return [batch, self.heads, shapes.affine(rows, heads // self.heads, 0)]


def _scores(
    query: ir.Value,
    key: ir.Value,
    factor: ir.Value,
    is_causal: bool,
    attn_mask: ir.Value | None,
    sharing: _Sharing,
) -> tuple[ir.Value, ir.Value | None]:
    """The scaled and masked scores, and where the mask lets a row see anything, [..., S, 1].

    The scores are [B, H, S, T], or [B, K, H / K * S, T] where that is as good for the mask. A mask of -inf is raised to
    the lowest finite number, so that a row it hides altogether is no NaN; such rows are found on the mask, which is
    smaller than the scores.
    """
    dtype = query.dtype
    assert dtype is not None
    rows = sharing.rows_together(query)
    if dtype == ir.DataType.DOUBLE:
        scores = op.MatMul(op.Mul(rows, factor), _transposed(key))
    else:
        scores = op.Mul(op.MatMul(rows, _transposed(key)), factor)
    scores = sharing.for_mask(scores)
    if is_causal:
        positions = op.Unsqueeze(_positions(query), [1])
        hidden = op.Greater(op.Unsqueeze(_positions(key), [0]), positions)
        mask = op.Where(hidden, shapes.constant(-math.inf, dtype), shapes.constant(0.0, dtype))
        return op.Add(scores, mask), None
    if attn_mask is None:
        return scores, None
    mask = shapes.cast(attn_mask, dtype)
    visible = op.Greater(op.ReduceMax(mask, [-1], keepdims=1), shapes.constant(-math.inf, dtype))
    lowest = shapes.constant(float(dtype.min), dtype)
    return op.Add(scores, op.Max(mask, lowest)), visible


def _positions(value: ir.Value) -> ir.Value:
    """0, 1, ... along dimension 2."""
    length = op.Squeeze(op.Shape(value, start=2, end=3), [0])
    return op.Range(shapes.constant(0, ir.DataType.INT64), length, shapes.constant(1, ir.DataType.INT64))
