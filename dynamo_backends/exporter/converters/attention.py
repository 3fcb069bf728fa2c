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

from passes import operators

from ..known_wrong import RANDOM
from . import shapes
from .registry import NotTranslatable, converter

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
    _check_dropout(dropout_p)
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
    _check_dropout(dropout_p)
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


@converter(operators.attention)
def written_out_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    bias: ir.Value | None = None,
    hidden: ir.Value | None = None,
    kept: ir.Value | None = None,
    scale: float = 1.0,
    fill: float = 0.0,
    kept_scale: float = 1.0,
    upcast: bool = False,
    fill_first: bool = False,
    safe: bool = False,
) -> ir.Value:
    """Attention as a model writes it out; see ``passes.operators``."""
    probabilities = _written_out_probabilities(query, key, bias, hidden, scale, fill, upcast, fill_first, safe)
    return op.MatMul(_dropped(probabilities, kept, kept_scale), value)


@converter(operators.attention_backward)
def written_out_attention_backward(
    grad: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    bias: ir.Value | None = None,
    hidden: ir.Value | None = None,
    kept: ir.Value | None = None,
    scale: float = 1.0,
    fill: float = 0.0,
    kept_scale: float = 1.0,
    upcast: bool = False,
    fill_first: bool = False,
    safe: bool = False,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Its gradients; see ``passes.operators``. The sums over rows are of ``grad * output``, as in ``flash_attention``,
    where no dropout is between.
    """
    dtype = query.dtype
    assert dtype is not None
    probabilities = _written_out_probabilities(query, key, bias, hidden, scale, fill, upcast, fill_first, safe)
    rank = len(shapes.sizes(query))
    grad_value = op.MatMul(_swapped(_dropped(probabilities, kept, kept_scale), rank), grad)
    products = op.Mul(_dropped(op.MatMul(grad, _swapped(value, rank)), kept, kept_scale), probabilities)
    grad_scores = op.Sub(products, op.Mul(probabilities, op.ReduceSum(products, [-1], keepdims=1)))
    if hidden is not None:
        grad_scores = op.Where(hidden, shapes.constant(0.0, dtype), grad_scores)
    grad_query = _scaled(op.MatMul(grad_scores, key), scale)
    grad_key = _scaled(op.MatMul(_swapped(grad_scores, rank), query), scale)
    return grad_query, grad_key, grad_value, op.Identity(grad_scores)


def _written_out_probabilities(
    query: ir.Value,
    key: ir.Value,
    bias: ir.Value | None,
    hidden: ir.Value | None,
    scale: float,
    fill: float,
    upcast: bool,
    fill_first: bool,
    safe: bool,
) -> ir.Value:
    dtype = query.dtype
    assert dtype is not None
    scores = _scaled(op.MatMul(query, _swapped(key, len(shapes.sizes(key)))), scale)
    if upcast and (bias is None or bias.dtype == ir.DataType.FLOAT):
        scores = shapes.cast(scores, ir.DataType.FLOAT)
    if hidden is not None and fill_first:
        scores = _filled(scores, hidden, fill)
    if bias is not None:
        scores = op.Add(scores, bias)
    if hidden is not None and not fill_first:
        scores = _filled(scores, hidden, fill)
    if upcast:
        scores = shapes.cast(scores, ir.DataType.FLOAT)
    probabilities = safe_softmax(scores, -1) if safe else op.Softmax(scores, axis=-1)
    return shapes.cast(probabilities, dtype)


def _filled(scores: ir.Value, hidden: ir.Value, fill: float) -> ir.Value:
    assert scores.dtype is not None
    return op.Where(hidden, shapes.constant(fill, scores.dtype), scores)


@converter(aten._safe_softmax.default)
def safe_softmax(input: ir.Value, dim: int, dtype: ir.DataType | None = None) -> ir.Value:
    """Softmax over ``dim``, and 0 where all of it is -inf."""
    if dtype is not None and dtype != -1:
        input = shapes.cast(input, dtype)
    assert input.dtype is not None
    largest = op.ReduceMax(input, [dim], keepdims=1)
    visible = op.Not(op.Equal(largest, shapes.constant(-math.inf, input.dtype)))
    return op.Where(visible, op.Softmax(input, axis=dim), shapes.constant(0.0, input.dtype))


def _scaled(value: ir.Value, scale: float) -> ir.Value:
    assert value.dtype is not None
    return value if scale == 1.0 else op.Mul(value, shapes.constant(scale, value.dtype))


def _dropped(probabilities: ir.Value, kept: ir.Value | None, kept_scale: float) -> ir.Value:
    if kept is None:
        return probabilities
    assert probabilities.dtype is not None
    return _scaled(op.Mul(probabilities, op.Cast(kept, to=probabilities.dtype)), kept_scale)


def _swapped(value: ir.Value, rank: int) -> ir.Value:
    """The last two of ``rank`` dimensions swapped."""
    return op.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _check_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise NotTranslatable(RANDOM)


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
