"""Normalizations whose fake tensors have the wrong dtype (PyTorch 2.13).

The kernels save statistics for the gradients. Of a half input with float32 weights, as autocasting leaves them, the
kernels' statistics are float32, the fake tensors' are half. So a compiler is given the normalization of a float32 input
between casts, which computes the same; and graphs that PyTorch may run are told the dtype of their statistics.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_NORMALIZATIONS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)
"""They return the result, two statistics of the input, and some new running statistics."""

_STATISTICS = (1, 2)
_SAME = (aten.detach.default, aten.alias.default)
"""What autograd puts between the statistics and where they are saved."""
_HALF = (torch.float16, torch.bfloat16)

Table = Mapping[Any, Callable[..., Any]]


def as_kernels_normalize(table: Table) -> dict[Any, Callable[..., Any]]:
    """Decompositions, and those of normalizations whose fake tensors are not what the kernels return.

    Args:
        table: from an operator to a function of its arguments, which may return ``NotImplemented``: it stays.
    """
    ours = {target: functools.partial(_normalized, target, table.get(target)) for target in _NORMALIZATIONS}
    return {**table, **ours}


def _normalized(
    target: Callable[..., Any], decomposition: Callable[..., Any] | None, input: torch.Tensor, *args: Any
) -> Any:
    if not _is_mixed(input, args):
        return NotImplemented if decomposition is None else decomposition(input, *args)
    result, *statistics = target(input.float(), *args)
    return (result.to(input.dtype), *statistics)


def _is_mixed(input: torch.Tensor, others: Iterable[object]) -> bool:
    """Whether a normalization computes its statistics in another dtype than its input's (``is_mixed_type`` of
    ``aten/src/ATen/native/cpu/mixed_data_type.h``)."""
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return input.dtype in _HALF and any(other.dtype == torch.float32 for other in tensors)


def tell_statistics(module: fx.GraphModule) -> None:
    """Gives the statistics in a graph in which normalizations are whole, a joint one for instance, the dtype that they
    have; ``meta["val"]`` of what is not computed from them stays."""
    for node in module.graph.nodes:
        if node.target in _NORMALIZATIONS:
            input, *others = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            if _is_mixed(input, others):
                node.meta["val"] = tuple(
                    _as_float32(value) if i in _STATISTICS else value for i, value in enumerate(node.meta["val"])
                )
        elif node.target is operator.getitem and node.args[0].target in _NORMALIZATIONS:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif node.target in _SAME and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            node.meta["val"] = _as_float32(node.meta["val"])


def _as_float32(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return value.to(torch.float32)
