"""LSTM and GRU as single operators in exported programs.

PyTorch copies a recurrent layer's cell for each time step while it traces, which fixes the length. ONNX Runtime has the
layers as operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import _decomp, fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from ..common.autocast import autocast_dtypes
from ..graphs.late_compile import dynamo_compile_lock

aten = torch.ops.aten

RECURRENT = {aten.lstm.input, aten.gru.input}
"""Recurrent layers that have a converter."""


def kept_layers(program: fx.GraphModule) -> set[torch._ops.OpOverload]:
    """The operators of ``RECURRENT`` that a program keeps, because ONNX Runtime has all of its layers of that kind.

    Raises:
        ValueError: the length of another layer is symbolic.
    """
    layers = [node for node in program.graph.nodes if node.target in RECURRENT]
    kept = RECURRENT - {node.target for node in layers if not _is_in_runtime(node)}
    for node in layers:
        length = node.args[0].meta["val"].shape[int(node.args[-1])]  # the last argument is batch_first
        if node.target not in kept and isinstance(length, torch.SymInt):
            raise ValueError(f"{node.name} has projections or is not float32, and its length is dynamic")
    return kept


def _is_in_runtime(layer: fx.Node) -> bool:
    """Whether ONNX Runtime has a recurrent layer: not with projections, in float64 or in bfloat16."""
    states = [state.meta["val"] for state in pytree.tree_leaves(layer.args[1])]
    return states[0].shape[-1] == states[-1].shape[-1] and states[0].dtype in (torch.float32, torch.float16)


def _results(
    layer: torch._ops.OpOverload, input: torch.Tensor, states: Any, params: Any, has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Tensors of the shapes, dtypes and strides of a layer's results, without values.

    Another thread may run the layer meanwhile: its tensors are real, and so are its results.

    Raises:
        ValueError: autocast is enabled.
    """
    if not isinstance(input, FakeTensor) and not torch._is_functional_tensor(input):
        run = getattr(torch._VF, layer.overloadpacket.__name__)
        return run(input, states, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if autocast_dtypes():
        raise ValueError(f"torch.export loses autocast in {layer}: disable it there")
    length, batch = input.shape[int(batch_first)], input.shape[int(not batch_first)]
    states = pytree.tree_leaves(states)
    output = input.new_empty([length, batch, states[0].shape[-1] * (1 + bidirectional)])
    return output.transpose(0, 1) if batch_first else output, *[state.new_empty(state.shape) for state in states]


@contextlib.contextmanager
def recurrent_layers_as_one() -> Iterator[None]:
    """A context in which ``torch.export`` traces a recurrent layer as one operator; else its length becomes a constant.

    ``run_decompositions`` still applies a table that was made outside. No other thread compiles meanwhile: it would use
    the same tables of PyTorch.
    """
    kernels = {layer: functools.partial(_results, layer) for layer in RECURRENT}
    with dynamo_compile_lock(), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(_decomp.decomposition_table, kernels))  # for symbolic sizes
        for layer, kernel in kernels.items():
            composite = {torch._C.DispatchKey.CompositeImplicitAutograd: kernel}
            stack.callback(layer._dispatch_cache.clear)  # of the kernels that PyTorch found
            stack.enter_context(mock.patch.dict(layer.py_kernels, composite))
            layer._dispatch_cache.clear()
        yield
