"""Removes operators that return their argument as it is.

Rule: ``y = f(x)`` becomes ``y = x`` where both have one dtype, device, shape and strides, and ``f`` is

1. a mark for autograd or a constant (``detach``, ``alias``, ``lift_fresh``), or a view that changes nothing (``view``
   to the same shape, a whole ``slice``, ``permute`` in order, ``expand``, ``squeeze``);
2. a copy: ``clone``, ``_to_copy``, ``copy``, ``cat`` of one tensor, ``repeat`` once, ``constant_pad_nd`` by nothing,
   ``slice_scatter`` of the whole, rounding of integers;
3. arithmetic with a neutral number, or a tensor full of it: ``x * 1``, ``x / 1``, ``x ** 1``, ``x - 0``; ``x + 0`` of
   integers, and of floating-point numbers ``x + -0.0`` only, as ``-0.0 + 0`` is ``0.0``.

For example::

    scaled: f32[4, 6] = mul(scores, 1.0); same: f32[4, 6] = view(scaled, [4, 6]); y = softmax(same, -1)
    y = softmax(scores, -1)

Not if ``y`` is a result of the graph: AOTAutograd counts on that being another tensor than ``x``. A copy (2, 3) also
stays where its memory matters, as ``fx_editing.replace`` says:

- it or a view of it is returned, read by ``as_strided`` or written;
- ``x`` is written in the graph; or, while forward and backward are together, lies in the memory of an input or a
  result, which the user may change before the backward reads it.

Needed: passes and patterns look for an operator behind its operands, which a ``clone`` or ``* 1`` would hide; and ONNX
Runtime's own removal is switched off, as it makes ``x`` of ``x + 0``.

PyTorch's ``remove_noop_ops`` (``torch/_inductor/fx_passes/post_grad.py``) differs in the last point, removes copies
whose strides differ, and asks nobody for leave; its ``remove_no_ops`` turns ``-0.0 + 0`` into ``-0.0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import known_equal, replace, value_of
from ..engine.registry import Pass

aten = torch.ops.aten
prims = torch.ops.prims


def remove_noops(module: fx.GraphModule, context: PassContext) -> int:
    """Removes no-ops in place; returns how many."""
    fired = 0
    for node in list(module.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        argument = None if rule is None else rule(node)
        if argument is not None:
            fired += replace(node, argument, context)
    return fired


Rule = Callable[[fx.Node], "fx.Node | None"]
"""What a node returns if it is a no-op but for dtype, shape, strides and memory."""


def _first(node: fx.Node) -> fx.Node | None:
    argument = node.args[0]
    return argument if isinstance(argument, fx.Node) else None


def _first_if(condition: Callable[[fx.Node], bool]) -> Rule:
    return lambda node: _first(node) if condition(node) else None


def _is_in_order(node: fx.Node) -> bool:
    dims = node.args[1]
    return isinstance(dims, (list, tuple)) and list(dims) == list(range(len(dims)))


def _swaps_nothing(node: fx.Node) -> bool:
    value = value_of(node)
    first, second = node.args[1:3]
    if value is None or not isinstance(first, int) or not isinstance(second, int):
        return False
    return value.ndim == 0 or first % value.ndim == second % value.ndim


def _has_no_matrix(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.ndim < 2


def _steps_by_one(node: fx.Node) -> bool:
    return len(node.args) < 5 or node.args[4] == 1


def _stays_where_it_is(node: fx.Node) -> bool:
    return not node.kwargs.get("pin_memory")


def _is_of_integers(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and not value.is_floating_point() and not value.is_complex()


def _pads_nothing(node: fx.Node) -> bool:
    padding = node.args[1]
    return isinstance(padding, (list, tuple)) and all(type(item) is int and item == 0 for item in padding)


def _copied(node: fx.Node) -> fx.Node | None:
    """``copy(x, y)`` returns ``y``, laid out as ``x``."""
    source = node.args[1]
    return source if isinstance(source, fx.Node) else None


def _scattered(node: fx.Node) -> fx.Node | None:
    """``slice_scatter(x, y)`` returns ``y`` if ``y`` covers ``x``."""
    dim = node.args[2] if len(node.args) > 2 else 0
    whole, part = value_of(node), value_of(node.args[1])
    if whole is None or part is None or not isinstance(dim, int) or (len(node.args) > 5 and node.args[5] != 1):
        return None
    return _copied(node) if known_equal(whole.shape[dim], part.shape[dim]) else None


def _only_one(node: fx.Node) -> fx.Node | None:
    joined = node.args[0]
    if isinstance(joined, (list, tuple)) and len(joined) == 1 and isinstance(joined[0], fx.Node):
        return joined[0]
    return None


def uniform_number(argument: object) -> int | float | None:
    """The number an argument is, or is full of, ``None`` if that is not known."""
    value = value_of(argument)
    if isinstance(argument, fx.Node) and argument.op == "call_function":
        if argument.target is aten.full.default and len(argument.args) > 1:
            argument = argument.args[1]
        elif argument.target is aten.scalar_tensor.default:
            argument = argument.args[0]
        elif argument.target in _ONES:
            argument = 1
        elif argument.target in _ZEROS:
            argument = 0
    if not isinstance(argument, (int, float)):
        return None
    return argument if value is None or value.is_floating_point() or math.isnan(argument) else int(argument)


_ONES = {aten.ones.default, aten.ones_like.default, aten.new_ones.default}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def _is_complex(node: fx.Node) -> bool:
    value = value_of(node)
    return value is None or value.is_complex()


def _times_one(node: fx.Node) -> fx.Node | None:
    for argument, number in (node.args[:2], node.args[1::-1]):
        if isinstance(argument, fx.Node) and uniform_number(number) == 1 and not _is_complex(node):
            return argument
    return None


def _by_one(node: fx.Node) -> fx.Node | None:
    """``x / 1`` and ``x ** 1``."""
    return _first(node) if uniform_number(node.args[1]) == 1 and not _is_complex(node) else None


def _minus_zero(node: fx.Node) -> fx.Node | None:
    return _first(node) if _is_zero(node.args[1], node, sign=1.0) else None


def _plus_zero(node: fx.Node) -> fx.Node | None:
    for argument, number in (node.args[:2], node.args[1::-1]):
        if isinstance(argument, fx.Node) and _is_zero(number, node, sign=-1.0):
            return argument
    return None


def _is_zero(argument: object, node: fx.Node, sign: float) -> bool:
    """Whether an argument is zero, and if ``node`` is of floating-point numbers, the zero of this sign."""
    number = uniform_number(argument)
    if number != 0 or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or _is_complex(node):
        return False
    return _is_of_integers(node) or math.copysign(1.0, number) == sign


_MARKS: dict[object, Rule] = {
    aten.detach.default: _first,
    aten.alias.default: _first,
    aten.lift_fresh.default: _first,
}

_VIEWS: dict[object, Rule] = {
    aten.view.default: _first,
    aten._unsafe_view.default: _first,
    aten.reshape.default: _first,
    aten.expand.default: _first,
    aten.squeeze.default: _first,
    aten.squeeze.dim: _first,
    aten.squeeze.dims: _first,
    aten.permute.default: _first_if(_is_in_order),
    aten.transpose.int: _first_if(_swaps_nothing),
    aten.t.default: _first_if(_has_no_matrix),
    aten.slice.Tensor: _first_if(_steps_by_one),
}

_COPIES: dict[object, Rule] = {
    aten.clone.default: _first,
    aten.contiguous.default: _first,
    aten._to_copy.default: _first_if(_stays_where_it_is),
    prims.convert_element_type.default: _first,
    aten.copy.default: _copied,
    aten.cat.default: _only_one,
    aten.repeat.default: _first,
    aten.constant_pad_nd.default: _first_if(_pads_nothing),
    aten.slice_scatter.default: _scattered,
    aten.ceil.default: _first_if(_is_of_integers),
    aten.floor.default: _first_if(_is_of_integers),
    aten.round.default: _first_if(_is_of_integers),
    aten.trunc.default: _first_if(_is_of_integers),
    aten.mul.Tensor: _times_one,
    aten.mul.Scalar: _times_one,
    aten.div.Tensor: _by_one,
    aten.div.Scalar: _by_one,
    aten.pow.Tensor_Scalar: _by_one,
    aten.sub.Tensor: _minus_zero,
    aten.sub.Scalar: _minus_zero,
    aten.add.Tensor: _plus_zero,
    aten.add.Scalar: _plus_zero,
}

_RULES: dict[object, Rule] = {**_MARKS, **_VIEWS, **_COPIES}


PASS = Pass("joint.remove_noops", "Removes operators that return their argument, such as x * 1.", remove_noops)
