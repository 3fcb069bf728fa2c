"""LSTM, which files keep as one operator a layer (``exporter/recurrent_layers.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from .registry import NotTranslatable, converter
from .shapes import constant, static_size

aten = torch.ops.aten


@converter(aten.lstm.input)
def lstm(
    x: ir.Value, states: Sequence[ir.Value], params: Sequence[ir.Value], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[ir.Value, ...]:  # fmt: skip
    """An ``LSTM`` for each layer. The bias is the weight of an input that is 1: ONNX Runtime loses NaN if it adds one.

    Args:
        x: [length, batch, inputs], or [batch, length, inputs] with ``batch_first``.
        states: the first hidden and cell states, [layers * directions, batch, hidden].
        params: for each layer and direction, the weights of inputs and states, and two biases with ``has_biases``.
    """
    assert x.dtype is not None
    if train and dropout and num_layers > 1:
        raise NotTranslatable("its dropout draws random numbers")
    directions, number = 1 + bidirectional, 4 if has_biases else 2
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    last = []
    for first in range(0, num_layers * directions, directions):
        weights = []
        for i in range(first, first + directions):
            of_inputs, of_states, *biases = params[i * number : (i + 1) * number]
            if biases:
                of_inputs = op.Concat(of_inputs, op.Unsqueeze(op.Add(*biases), [1]), axis=1)
            weights.append([_gates(of_inputs), _gates(of_states)])
        initial = [op.Slice(state, [first], [first + directions], [0]) for state in states]
        results = op.LSTM(
            op.Pad(x, [0, 1], constant(1, x.dtype), [2]) if has_biases else x,
            *(op.Concat(*items, axis=0) for items in zip(*weights, strict=True)),
            None,
            None,
            *initial,
            direction="bidirectional" if bidirectional else "forward",
            hidden_size=static_size(states[0], 2),
        )
        x = op.Reshape(op.Transpose(results[0], perm=[0, 2, 1, 3]), [0, 0, -1])
        last.append(results[1:])
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return x, *(op.Concat(*items, axis=0) for items in zip(*last, strict=True))


def _gates(weight: ir.Value) -> ir.Value:
    """PyTorch's order is input, forget, cell, output; ONNX's is input, output, forget, cell."""
    i, f, c, o = op.Split(weight, axis=0, num_outputs=4)
    return op.Unsqueeze(op.Concat(i, o, f, c, axis=0), [0])
