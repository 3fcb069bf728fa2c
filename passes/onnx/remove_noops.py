"""Removes nodes that return their input.

Rule: the result of a node is its first input, value for value, where the node is

1. ``Identity``; ``Concat``, ``Max``, ``Min``, ``Sum`` or ``Mean`` of one input; ``Cast`` to the dtype there is;
2. ``Transpose`` that leaves each dimension in place; ``Reshape``, ``Expand``, ``Squeeze``, ``Unsqueeze`` and
   ``Flatten`` to the shape there is, symbolic dimensions included; ``Pad`` by nothing; ``Slice`` that takes all,
   forwards;
3. ``Mul`` or ``Div`` by one, ``Sub`` of zero, ``Add`` of an integer zero or of -0.0 (adding 0.0 turns -0.0 into 0.0).

Before and after::

    v = Transpose <perm=[0, 1]> (x)          y = GatherND(x, i)
    g = GatherND(v, i)
    y = Transpose <perm=[0, 1]> (g)

It must not fire where the input is the model's own and the result an output of the model: the output has its own name,
and memory. Of two names for one value, an FX node's is kept.
"""

from __future__ import annotations

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import constant, integers, nodes_of, permutation, same_shape, use_existing
from ..engine.registry import Pass

_OF_ONE_INPUT = ("Concat", "Max", "Min", "Sum", "Mean")
_VIEWS = ("Reshape", "Expand", "Squeeze", "Unsqueeze", "Flatten")
_OPERATORS = (
    *("Identity", "Cast", "Transpose", "Slice", "Pad", "Mul", "Div", "Add", "Sub"),
    *_OF_ONE_INPUT,
    *_VIEWS,
)


def remove_noops(model: ir.Model, context: PassContext) -> int:
    """Removes nodes that return their input, in place; returns how many."""
    fired = 0
    for node in nodes_of(model, *_OPERATORS):
        value = _unchanged(node)
        if value is not None:
            fired += use_existing(node.outputs[0], value, context)
    return fired


def _unchanged(node: ir.Node) -> ir.Value | None:
    """The input that a node returns, or ``None`` if it may return something else."""
    value, result = node.inputs[0], node.outputs[0]
    if value is None:
        return None
    kind = node.op_type
    if kind in ("Mul", "Div", "Add", "Sub"):
        return _neutral(node)
    if kind == "Identity" or (kind in _OF_ONE_INPUT and len(node.inputs) == 1):
        return value
    if kind == "Cast":
        return value if value.dtype is not None and value.dtype == node.attributes["to"].as_int() else None
    if kind == "Transpose":
        order = permutation(node)
        return value if order is not None and order == sorted(order) else None
    if kind in _VIEWS:
        return value if same_shape(value, result) else None
    if kind == "Pad":
        pads = integers(node.inputs[1])
        return value if pads is not None and not any(pads) else None
    if kind == "Slice":
        steps = integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
        return value if steps is not None and min(steps, default=1) > 0 and same_shape(value, result) else None
    return None


def _neutral(node: ir.Node) -> ir.Value | None:
    """The other operand, if one is the neutral number and the other has the result's shape."""
    first, second = node.inputs
    kind = node.op_type
    pairs = [(first, second)] if kind in ("Div", "Sub") else [(first, second), (second, first)]
    for value, other in pairs:
        array = constant(other)
        if array is None or array.size != 1 or value is None or not same_shape(value, node.outputs[0]):
            continue
        item = array.reshape(-1)[0]
        if kind in ("Mul", "Div"):
            is_neutral = item == 1
        else:
            zero_of_any_sign = kind == "Sub" or array.dtype.kind in "iu"
            is_neutral = item == 0 and (zero_of_any_sign or str(item).startswith("-"))
            is_neutral = is_neutral and not (kind == "Sub" and str(item).startswith("-"))
        if is_neutral:
            return value
    return None


PASS = Pass("onnx.remove_noops", "Removes nodes that return their input.", remove_noops)
