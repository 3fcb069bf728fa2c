"""Embeddings: their gradients."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter

aten = torch.ops.aten


@converter(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: ir.Value,
    indices: ir.Value,
    num_weights: int | ir.Value,
    padding_idx: int | ir.Value,
    scale_grad_by_freq: bool,
) -> ir.Value:
    """The gradient of each row, added up over the places that looked it up; the row ``padding_idx`` gets
    none.

    grad_output: [..., features]; indices: [...]. The indices were good in the forward, so that the checks of
    PyTorch's decomposition are left out.
    """
    if scale_grad_by_freq or not isinstance(padding_idx, int):
        raise NotTranslatable("gradients by frequency, or a symbolic padding index")
    dtype = shapes.computing_dtype(grad_output)  # ONNX Runtime's ScatterND adds no half precision
    table = shapes.zeros([shapes.as_size(num_weights), shapes.size(grad_output, -1)], dtype)
    grad_output = shapes.cast(grad_output, dtype)
    places = op.Unsqueeze(indices, [-1])
    if padding_idx >= 0:
        padded = op.Equal(places, padding_idx)
        grad_output = op.Where(padded, shapes.constant(0.0, dtype), grad_output)
    return op.ScatterND(table, op.Cast(places, to=ir.DataType.INT64), grad_output, reduction="add")


@converter(aten._embedding_bag.default)
def embedding_bag(*args: object, **kwargs: object) -> ir.Value:
    """Torchlib translates the first result; the others, which the gradient needs, are made up."""
    raise NotTranslatable("what its gradient needs has no translation")
