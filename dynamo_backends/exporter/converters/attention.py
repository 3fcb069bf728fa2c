"""Scaled dot-product attention and its gradient, as PyTorch's kernels compute them.

Follows ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``. For a GPU PyTorch has an operator for each of its
kernels, with more arguments and results: seeds of dropout, and lengths of padded sequences, which are not used here.
ONNX Runtime fuses transpose and scale into ``FusedMatMul``.

In grouped-query attention H query heads share K heads of keys and values. The query heads of a group become rows of one
matrix product, so that keys and values are not repeated::

    query [B, H, S, D] -> [B, K, H / K * S, D];    scores [B, K, H / K * S, T] -> [B, H, S, T] to add a mask
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

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
    """``softmax(q k^T * scale + mask) v``, and the log of the softmax's denominator.

    query: [B, H, S, D]; key and value: [B, K, T, D]; attn_mask: float, broadcastable to [B, H, S, T]. Returns output
    [B, H, S, D] and logsumexp [B, H, S], float32 for half precision. As in eager, a fully masked row has output 0 and
    logsumexp 0, and the causal mask is aligned to the top left.

    logsumexp is computed as ``max(scores) - log(max(softmax))``, two passes fewer than summing exponentials.
    """
    dtype, computing = query.dtype, shapes.computing_dtype(query)
    assert dtype is not None
    factor, groups = _scale(query, scale), _Groups.of(query, key, is_causal, attn_mask)
    query, key, value = shapes.cast_all(computing, query, key, value)
    scores, visible = _scores(query, key, factor, is_causal, attn_mask, groups)
    probabilities = op.Softmax(scores, axis=-1)
    output = groups.split(op.MatMul(groups.merge_scores(probabilities), value))
    maximum = op.ReduceMax(scores, [-1], keepdims=0)
    logsumexp = groups.split_rows(op.Sub(maximum, op.Log(op.ReduceMax(probabilities, [-1], keepdims=0))))
    if visible is not None:
        output = op.Mul(output, op.Cast(visible, to=computing))  # NaN in a hidden row stays, as in eager
        logsumexp = op.Where(op.Squeeze(visible, [-1]), logsumexp, shapes.constant(0.0, computing))
    return shapes.cast(output, dtype), logsumexp


@converter(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[ir.Value, ...]:
    """As ``flash_attention``; also returns the seeds of dropout. logsumexp has rows up to a multiple of 32."""
    output, logsumexp = _without_dropout(query, key, value, dropout_p, is_causal, attn_bias, scale)
    before = op.Constant(value=ir.tensor(np.zeros(5, dtype=np.int64)))
    after = op.Mod(op.Neg(op.Shape(query, start=2, end=3)), op.Constant(value=ir.tensor(np.array([32]))))
    padding = op.Concat(before, after, axis=0)
    infinite = shapes.constant(math.inf, shapes.computing_dtype(query))
    return output, op.Pad(logsumexp, padding, infinite), _no_seed(), _no_seed()


@converter(aten._scaled_dot_product_flash_attention.default)
def flash_attention_on_gpu(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """As ``flash_attention``; its other results are never read but by its gradient, which needs none of them."""
    output, logsumexp = _without_dropout(query, key, value, dropout_p, is_causal, None, scale)
    return output, logsumexp, None, None, None, None, None, None, None


@converter(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """As ``flash_attention_on_gpu``; logsumexp has a last dimension of size one."""
    output, logsumexp = _without_dropout(query, key, value, dropout_p, is_causal, attn_bias, scale)
    return output, op.Unsqueeze(logsumexp, [-1]), None, None, None, None, _no_seed(), _no_seed(), None


def _without_dropout(
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    dropout_p: float,
    is_causal: bool,
    attn_mask: ir.Value | None,
    scale: float | None,
) -> tuple[ir.Value, ir.Value]:
    if dropout_p:
        raise NotTranslatable("its dropout draws random numbers")
    return flash_attention(query, key, value, dropout_p, is_causal, attn_mask, scale)


def _no_seed() -> ir.Value:
    return shapes.constant(0, ir.DataType.INT64)


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
) -> tuple[ir.Value, ...]:
    """The gradients of query, key and value; shapes and dtypes as in ``flash_attention``.

    With P the probabilities: ``dv = P^T do``, ``dP = do v^T``, ``dS = P * (dP - sum(do * o))``, ``dq = scale * dS k``,
    ``dk = scale * dS^T q``. P is a softmax, which is one fused kernel, instead of ``exp(scores - logsumexp)``.
    """
    return _gradients(grad_out, query, key, value, out, is_causal, attn_mask, scale)[:3]


@converter(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_bias: ir.Value | None,
    out: ir.Value,
    logsumexp: ir.Value,
    philox_seed: ir.Value,
    philox_offset: ir.Value,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[ir.Value | None, ...]:
    """As ``flash_attention_backward``; also the gradient of the mask, if it is as large as the scores."""
    if dropout_p:
        raise NotTranslatable("its dropout draws random numbers")
    *gradients, of_scores = _gradients(grad_out, query, key, value, out, is_causal, attn_bias, scale)
    needs_mask = attn_bias is not None and grad_input_mask[3]
    if needs_mask and list(shapes.sizes(attn_bias)) != [*shapes.sizes(query)[:3], shapes.sizes(key)[2]]:
        raise NotTranslatable("the gradient of a mask that is broadcast")
    return (*gradients, of_scores if needs_mask else None)


@converter(aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_on_gpu_backward(
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    cum_seq_q: ir.Value | None,
    cum_seq_k: ir.Value | None,
    max_q: object,
    max_k: object,
    dropout_p: float,
    is_causal: bool,
    philox_seed: ir.Value,
    philox_offset: ir.Value,
    scale: float | None = None,
) -> tuple[ir.Value, ...]:
    """As ``flash_attention_backward``."""
    if dropout_p:
        raise NotTranslatable("its dropout draws random numbers")
    return _gradients(grad_out, query, key, value, out, is_causal, None, scale)[:3]


@converter(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_attention_backward(
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    logsumexp: ir.Value,
    philox_seed: ir.Value,
    philox_offset: ir.Value,
    attn_bias: ir.Value | None,
    cum_seq_q: ir.Value | None,
    cum_seq_k: ir.Value | None,
    max_q: object,
    max_k: object,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[ir.Value, ...]:
    """As ``flash_attention_backward``."""
    if dropout_p:
        raise NotTranslatable("its dropout draws random numbers")
    return _gradients(grad_out, query, key, value, out, is_causal, attn_bias, scale)[:3]


def _gradients(
    grad_out: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    out: ir.Value,
    is_causal: bool,
    attn_mask: ir.Value | None,
    scale: float | None,
) -> tuple[ir.Value, ...]:
    """The gradients of query, key, value and the masked scores, see ``flash_attention_backward``."""
    dtype, computing = query.dtype, shapes.computing_dtype(query)
    assert dtype is not None
    factor, groups = _scale(query, scale), _Groups.of(query, key, is_causal, attn_mask)
    grad_out, query, key, value, out = shapes.cast_all(computing, grad_out, query, key, value, out)
    scores, visible = _scores(query, key, factor, is_causal, attn_mask, groups)
    if visible is not None:
        grad_out = op.Where(visible, grad_out, shapes.constant(0.0, computing))
    probabilities = groups.merge_scores(op.Softmax(scores, axis=-1))
    query, grad_out, out = map(groups.merge, (query, grad_out, out))
    grad_value = op.MatMul(_transposed(probabilities), grad_out)
    grad_probabilities = op.MatMul(grad_out, _transposed(value))
    row_sums = op.ReduceSum(op.Mul(grad_out, out), [-1], keepdims=1)
    grad_scores = op.Mul(probabilities, op.Sub(grad_probabilities, row_sums))
    grad_query = groups.split(op.Mul(op.MatMul(grad_scores, key), factor))
    grad_key = op.Mul(op.MatMul(_transposed(grad_scores), query), factor)
    return shapes.cast_all(dtype, grad_query, grad_key, grad_value, groups.split_scores(grad_scores))


@converter(aten._safe_softmax.default)
def safe_softmax(input: ir.Value, dim: int, dtype: ir.DataType | None = None) -> ir.Value:
    """Softmax over ``dim``; 0 if all elements are -inf."""
    if dtype is not None and dtype != -1:
        input = shapes.cast(input, dtype)
    assert input.dtype is not None
    visible = _visible(input, input.dtype, dim)
    return op.Where(visible, op.Softmax(input, axis=dim), shapes.constant(0.0, input.dtype))


def _scale(query: ir.Value, scale: float | None) -> ir.Value:
    """The factor of the scores, by default ``1 / sqrt(D)``, in the dtype in which they are computed.

    ONNX Runtime makes a scalar the ``alpha`` of ``FusedMatMul``, which is float32 (1.31). In float64 the factor is a
    vector of D equal numbers, which prevents that.
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
class _Groups:
    """How query heads share the heads of keys and values.

    Attributes:
        sizes: the query's shape, [B, H, S, D].
        heads: the number of heads of keys and values, K. If it is H, ``None``: the methods return their argument.
        keys: the number of keys, T.
        splits_scores: whether the mask differs within a group or its rows, and needs scores of shape [B, H, S, T].
    """

    sizes: list[shapes.Size]
    heads: int | None
    keys: shapes.Size
    splits_scores: bool

    @staticmethod
    def of(query: ir.Value, key: ir.Value, is_causal: bool, attn_mask: ir.Value | None) -> _Groups:
        """The groups of a call; raises ``NotTranslatable`` if a number of heads is symbolic."""
        assert query.shape is not None and key.shape is not None
        if query.shape[1] == key.shape[1]:
            return _Groups([], None, 0, splits_scores=False)
        sizes = shapes.sizes(query)
        sizes[1] = shapes.static_size(query, 1)
        has_head_masks = attn_mask is not None and shapes.rank(attn_mask) > 2 and shapes.size(attn_mask, -3) != 1
        splits_scores = has_head_masks or (sizes[2] != 1 and (is_causal or attn_mask is not None))
        return _Groups(sizes, shapes.static_size(key, 1), shapes.size(key, 2), splits_scores)

    def merge(self, value: ir.Value) -> ir.Value:
        """[B, H, S, D] to [B, K, H / K * S, D]."""
        return value if self.heads is None else shapes.reshape(value, [*self._merged_sizes(), self.sizes[3]])

    def split(self, value: ir.Value) -> ir.Value:
        """[B, K, H / K * S, D] to [B, H, S, D]."""
        return value if self.heads is None else shapes.reshape(value, self.sizes)

    def split_scores(self, scores: ir.Value) -> ir.Value:
        """[B, K, H / K * S, T] to [B, H, S, T] if ``splits_scores``."""
        return shapes.reshape(scores, [*self.sizes[:3], self.keys]) if self.splits_scores else scores

    def merge_scores(self, probabilities: ir.Value) -> ir.Value:
        """The reverse of ``split_scores``."""
        return (
            shapes.reshape(probabilities, [*self._merged_sizes(), self.keys]) if self.splits_scores else probabilities
        )

    def split_rows(self, numbers: ir.Value) -> ir.Value:
        """A number for each row of the scores, to [B, H, S]."""
        is_split = self.heads is None or self.splits_scores
        return numbers if is_split else shapes.reshape(numbers, self.sizes[:3])

    def _merged_sizes(self) -> list[shapes.Size]:
        batch, heads, rows, _ = self.sizes
        assert isinstance(heads, int) and self.heads is not None
        return [batch, self.heads, shapes.affine(rows, heads // self.heads, 0)]


def _scores(
    query: ir.Value, key: ir.Value, factor: ir.Value, is_causal: bool, attn_mask: ir.Value | None, groups: _Groups
) -> tuple[ir.Value, ir.Value | None]:
    """The scaled and masked scores; and if there is a mask, whether each row sees any key, [..., S, 1].

    -inf in the mask is replaced by the lowest finite number, so that a fully masked row is not NaN. Such rows are found
    in the mask, which is smaller than the scores.
    """
    dtype = query.dtype
    assert dtype is not None
    rows = groups.merge(query)
    if dtype == ir.DataType.DOUBLE:
        scores = op.MatMul(op.Mul(rows, factor), _transposed(key))
    else:
        scores = op.Mul(op.MatMul(rows, _transposed(key)), factor)
    scores = groups.split_scores(scores)
    if is_causal:
        positions = op.Unsqueeze(_positions(query), [1])
        hidden = op.Greater(op.Unsqueeze(_positions(key), [0]), positions)
        mask = op.Where(hidden, shapes.constant(-math.inf, dtype), shapes.constant(0.0, dtype))
        return op.Add(scores, mask), None
    if attn_mask is None:
        return scores, None
    mask = shapes.cast(attn_mask, dtype)
    visible = _visible(mask, dtype)
    lowest = shapes.constant(float(dtype.min), dtype)
    return op.Add(scores, op.Max(mask, lowest)), visible


def _visible(value: ir.Value, dtype: ir.DataType, dim: int = -1) -> ir.Value:
    """Whether each row has an element other than -inf; ONNX Runtime's ``ReduceMax`` may overlook NaN (1.32)."""
    lowest = shapes.constant(-math.inf, dtype)
    are_lowest = (op.Equal(reduce(value, [dim], keepdims=1), lowest) for reduce in (op.ReduceMax, op.ReduceSum))
    return op.Not(op.And(*are_lowest))


def _positions(value: ir.Value) -> ir.Value:
    """0, 1, ... along dimension 2."""
    length = op.Squeeze(op.Shape(value, start=2, end=3), [0])
    return op.Range(shapes.constant(0, ir.DataType.INT64), length, shapes.constant(1, ir.DataType.INT64))
