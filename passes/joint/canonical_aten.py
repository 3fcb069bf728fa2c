"""Writes alike operators in one way, so that later passes and patterns need to know one spelling.

Rule::

    t(x), transpose(x, 0, 1)             permute(x, [1, 0])
    _unsafe_view(x, s), reshape(x, s)    view(x, s)
    unsqueeze(x, -1)                     unsqueeze(x, 1)               # x: f32[4]
    mul.Scalar(x, 2), add, sub, div      mul.Tensor(x, 2)
    convert_element_type(x, dtype)       _to_copy(x, dtype=dtype)
    zeros(s), ones(s)                    full(s, 0), full(s, 1)

Each pair runs the same kernel on the same memory: ``mul.Scalar`` wraps its number for ``mul.Tensor`` in eager too, and
min-cut partitioning knows ``permute`` and ``view`` as views that are cheap to compute again.

Not if the result would have another dtype or strides, such as that of a ``reshape`` that copies. Off by default: our
own passes know the spellings, and alone it makes no graph smaller; it is for patterns that other packages bring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import call, fake_result, replace, same_tensor, value_of
from ..engine.registry import Pass

aten = torch.ops.aten
prims = torch.ops.prims

Spelling = tuple[Any, tuple, dict[str, Any]]
"""An operator, its arguments and its keyword arguments."""


def canonical_aten(module: fx.GraphModule, context: PassContext) -> int:
    """Respells operators in place; returns how many."""
    fired = 0
    for node in list(module.graph.nodes):
        respell = _RULES.get(node.target) if node.op == "call_function" else None
        spelling = None if respell is None or value_of(node) is None else respell(node)
        if spelling is None:
            continue
        target, args, kwargs = spelling
        if (target, args, kwargs) == (node.target, node.args, node.kwargs):
            continue
        try:
            value = fake_result(target, args, kwargs) if node.target in _MAY_DIFFER else node.meta["val"]
        except (RuntimeError, ValueError) as error:
            context.refuse(node, f"{target} cannot do it: {error}", matched=1, of=1)
            continue
        if not same_tensor(value, node):
            context.refuse(node, "its result would have another dtype or strides", matched=1, of=1)
        else:
            fired += replace(node, call(node, target, args, kwargs, value=value), context)
    return fired


def _t(node: fx.Node) -> Spelling:
    value = value_of(node)
    assert value is not None
    return aten.permute.default, (node.args[0], list(reversed(range(value.ndim)))), {}


def _transpose(node: fx.Node) -> Spelling | None:
    value = value_of(node)
    first, second = node.args[1:3]
    if value is None or value.ndim == 0 or not isinstance(first, int) or not isinstance(second, int):
        return None
    order = list(range(value.ndim))
    first, second = first % value.ndim, second % value.ndim
    order[first], order[second] = order[second], order[first]
    return aten.permute.default, (node.args[0], order), {}


def _permute(node: fx.Node) -> Spelling | None:
    dims = node.args[1]
    if not isinstance(dims, (list, tuple)) or all(isinstance(dim, int) and dim >= 0 for dim in dims):
        return None
    return node.target, (node.args[0], [dim % len(dims) for dim in dims]), {}


def _view(node: fx.Node) -> Spelling:
    return aten.view.default, node.args, {}


def _unsqueeze(node: fx.Node) -> Spelling | None:
    value, dim = value_of(node), node.args[1]
    if value is None or not isinstance(dim, int) or dim >= 0:
        return None
    return node.target, (node.args[0], dim % value.ndim), {}


def _with_tensor(target: Any) -> Callable[[fx.Node], Spelling | None]:
    def respell(node: fx.Node) -> Spelling | None:
        if len(node.args) > 2 or "alpha" in node.kwargs:  # its translation of a number times alpha is float32
            return None
        return target, node.args, {}

    return respell


def _to_copy(node: fx.Node) -> Spelling:
    return aten._to_copy.default, node.args[:1], {"dtype": node.args[1]}


def _full_of(number: int) -> Callable[[fx.Node], Spelling]:
    def respell(node: fx.Node) -> Spelling:
        value = value_of(node)
        assert value is not None
        kwargs = {**node.kwargs, "dtype": value.dtype}
        filled = bool(number) if value.dtype is torch.bool else number
        return aten.full.default, (node.args[0], filled), kwargs

    return respell


_RULES: dict[object, Callable[[fx.Node], Spelling | None]] = {
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.add.Scalar: _with_tensor(aten.add.Tensor),
    aten.sub.Scalar: _with_tensor(aten.sub.Tensor),
    aten.mul.Scalar: _with_tensor(aten.mul.Tensor),
    aten.div.Scalar: _with_tensor(aten.div.Tensor),
    prims.convert_element_type.default: _to_copy,
    aten.zeros.default: _full_of(0),
    aten.ones.default: _full_of(1),
}

_MAY_DIFFER = {aten.reshape.default, prims.convert_element_type.default}
"""Operators whose other spelling need not fit the argument, or lie in memory as they do; the others are the same."""


PASS = Pass(
    "joint.canonical_aten",
    "Writes alike operators in one way: t and transpose as permute.",
    canonical_aten,
    default=False,
)
