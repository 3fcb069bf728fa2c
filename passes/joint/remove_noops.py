"""Removes operators that return their argument unchanged.

Rule: ``y = f(x)`` becomes ``y = x`` if both have equal dtype, device, shape and strides, and ``f`` is

1. ``detach``, ``alias`` or ``lift_fresh``, or a view that changes nothing (``view`` to the same shape, a whole
   ``slice``, ``permute`` in order, ``expand``, ``squeeze``);
2. a copy: ``clone``, ``_to_copy``, ``copy``, ``cat`` of one tensor, ``repeat`` once, ``constant_pad_nd`` by 0, rounding
   of integers;
3. arithmetic with a neutral number, or a tensor full of it: ``x * 1``, ``x / 1``, ``x ** 1``, ``x - 0``; ``x + 0`` of
   integers, but only ``x + -0.0`` of floating-point numbers, as ``-0.0 + 0`` is ``0.0``.

``_assert_tensor_metadata`` (of ``torch.export``) is removed if it asserts the dtype, device and layout that the traced
tensor has.

For example::

    scaled: f32[4, 6] = mul(scores, 1.0); same: f32[4, 6] = view(scaled, [4, 6]); y = softmax(same, -1)
    y = softmax(scores, -1)

Not if ``y`` is a result of the graph, which AOTAutograd expects to be another tensor than ``x``. A copy (2, 3) also
stays if its memory matters, see ``fx_editing.replace``:

- it or a view of it is returned, read by ``as_strided`` or written;
- ``x`` is written in the graph, or in the stage ``joint`` shares memory with an input or a result, which the user may
  change before the backward.

Other passes look for an operator next to its operands, which a ``clone`` or ``* 1`` would hide; and ONNX Runtime's own
removal is turned off, because it replaces ``x + 0`` by ``x``.

PyTorch's ``remove_noop_ops`` (``torch/_inductor/fx_passes/post_grad.py``) ignores the last point, removes copies with
other strides, and cannot be bisected; its ``remove_no_ops`` turns ``-0.0 + 0`` into ``-0.0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import replace, value_of
from ..engine.registry import Pass

aten = torch.ops.aten
prims = torch.ops.prims

_Argument = Callable[[fx.Node], object]
"""The argument a node returns if dtype, shape, strides and memory agree; anything but a node if it is no no-op."""


def remove_noops(module: fx.GraphModule, context: PassContext) -> int:
    """Removes no-ops in place; returns how many."""
    fired = 0
    for node in list(module.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            fired += _remove_assertion(node, context)
            continue
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        argument = None if rule is None else rule(node)
        if isinstance(argument, fx.Node):
            fired += replace(node, argument, context)
    return fired


def _remove_assertion(node: fx.Node, context: PassContext) -> bool:
    """Removes an assertion of what is known; a size or stride may be another in a later call."""
    value = value_of(node.args[0])
    sizes = (*node.args[1:3], node.kwargs.get("size"), node.kwargs.get("stride"))
    expected = {"dtype": node.args[3] if len(node.args) > 3 else None, **node.kwargs}
    known = value is not None and all(
        expected.get(name) in (None, getattr(value, name)) for name in ("dtype", "device", "layout")
    )
    if not known or any(item is not None for item in sizes) or not context.allows(node):
        return False
    node.graph.erase_node(node)
    return True


def _first(node: fx.Node) -> object:
    return node.args[0]


def _first_if(condition: Callable[[fx.Node], bool]) -> _Argument:
    return lambda node: node.args[0] if condition(node) else None


def _is_in_order(node: fx.Node) -> bool:
    dims = node.args[1]
    return isinstance(dims, (list, tuple)) and list(dims) == list(range(len(dims)))


def _swaps_nothing(node: fx.Node) -> bool:
    value = value_of(node)
    first, second = node.args[1:3]
    if value is None or not isinstance(first, int) or not isinstance(second, int):
        return False
    return value.ndim == 0 or first % value.ndim == second % value.ndim


def _pads_nothing(node: fx.Node) -> bool:
    padding = node.args[1]
    return isinstance(padding, (list, tuple)) and all(type(item) is int and item == 0 for item in padding)


def _only_one(node: fx.Node) -> object:
    joined = node.args[0]
    return joined[0] if isinstance(joined, (list, tuple)) and len(joined) == 1 else None


def _is_of_integers(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and not value.is_floating_point() and not value.is_complex()


def _operand_if(is_neutral: Callable[[int | float, fx.Node], bool], *, commutes: bool) -> _Argument:
    """The other operand, if one is a neutral number."""

    def rule(node: fx.Node) -> object:
        value = value_of(node)
        if value is None or value.is_complex() or len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
            return None
        for operand, other in (node.args, node.args[::-1]) if commutes else (node.args,):
            number = _uniform_number(other)
            if isinstance(operand, fx.Node) and number is not None and is_neutral(number, node):
                return operand
        return None

    return rule


def _uniform_number(argument: object) -> int | float | None:
    """The number that an argument is or is full of, ``None`` if not known."""
    value = value_of(argument)
    if isinstance(argument, fx.Node) and argument.op == "call_function":
        if argument.target is aten.full.default and len(argument.args) > 1:
            argument = argument.args[1]
        elif argument.target is aten.scalar_tensor.default:
            argument = argument.args[0]
        else:
            argument = _FULL_OF.get(argument.target)
    if not isinstance(argument, (int, float)):
        return None
    return argument if value is None or value.is_floating_point() or math.isnan(argument) else int(argument)


def _is_one(number: int | float, node: fx.Node) -> bool:
    return number == 1


def _is_zero(number: int | float, node: fx.Node) -> bool:
    """``x - 0`` is ``x``, ``x - -0.0`` is not."""
    return number == 0 and (_is_of_integers(node) or math.copysign(1.0, number) > 0)


def _is_negative_zero(number: int | float, node: fx.Node) -> bool:
    return number == 0 and (_is_of_integers(node) or math.copysign(1.0, number) < 0)


_FULL_OF: Mapping[object, int] = {
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
}

_MARKS = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_VIEWS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
_COPIES = (
    *(aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.repeat.default),
    prims.convert_element_type.default,
)
_ROUNDINGS = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)

_RULES: Mapping[object, _Argument] = {
    **dict.fromkeys((*_MARKS, *_VIEWS, *_COPIES), _first),
    **dict.fromkeys(_ROUNDINGS, _first_if(_is_of_integers)),
    aten.permute.default: _first_if(_is_in_order),
    aten.transpose.int: _first_if(_swaps_nothing),
    aten.slice.Tensor: _first_if(lambda node: len(node.args) < 5 or node.args[4] == 1),
    aten.constant_pad_nd.default: _first_if(_pads_nothing),
    aten.copy.default: lambda node: node.args[1],
    aten.cat.default: _only_one,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _operand_if(_is_one, commutes=True)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar), _operand_if(_is_one, commutes=False)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _operand_if(_is_zero, commutes=False)),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _operand_if(_is_negative_zero, commutes=True)),
}


PASS = Pass("joint.remove_noops", "Removes operators that return their argument, such as x * 1.", remove_noops)
