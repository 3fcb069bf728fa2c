"""Computes tensors that are full of one number before they are made.

Rule: a tensor known to be full of one number, computed from others such, becomes one ``full``::

    zero: f32[] = scalar_tensor(0.0); zeros: f32[4, 1] = full([4, 1], 0.0)
    one: f32[4, 1] = add(zeros, 1); mask: f32[4, 6] = expand(one, [4, 6])
    mask: f32[4, 6] = full([4, 6], 1.0)

Known are ``full``, ``zeros``, ``ones`` and their like; views, copies and casts of a known tensor; and elementwise
operators whose tensors are all known, which are computed by PyTorch itself on tensors of one element. Nodes that
nobody reads any more go.

Not if

1. the result is a view whose memory is returned or read as memory, is not row-major, is complex, or has symbolic sizes;
2. the number comes only out of an argument, as in ``x * 0``, which is NaN where ``x`` is.

Off by default: no graph of seven model families had any, and constants are folded once more in ONNX. PyTorch's
``constant_fold_uniform_value`` (``torch/_inductor/fx_passes/joint_graph.py``) makes zero of ``x * 0``.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..engine.context import PassContext
from ..engine.fx.editing import call, erase_unused, is_pure, replace, value_of
from ..engine.registry import Pass

aten = torch.ops.aten
prims = torch.ops.prims

_VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default),
    *(aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default),
}
_COPIES = {aten.clone.default, aten._to_copy.default, prims.convert_element_type.default, aten.repeat.default}
_FULL = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.fill.Scalar: 1,
    aten.scalar_tensor.default: 0,
}
"""Operators that fill a tensor, and which argument is the number."""

_NUMBER_OF = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
}


def fold_uniform_constants(module: fx.GraphModule, context: PassContext) -> int:
    """Folds in place; returns how many nodes became one ``full``."""
    known: dict[fx.Node, torch.Tensor] = {}
    computed: dict[fx.Node, bool | int | float] = {}
    with _disable_current_modes():  # AOTAutograd's fake mode, in which no number can be computed
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            number, was_made = _number(node, known)
            if number is not None:
                known[node] = number
                if not was_made:
                    computed[node] = number.item()
    fired = 0
    for node, filled in reversed(computed.items()):
        if not node.users:
            node.graph.erase_node(node)  # what was computed from it is folded
        elif any(user not in known for user in node.users) and _fold(node, filled, context):
            fired += 1
    if fired:
        erase_unused([node for node in known if not node._erased and node not in computed])
    return fired


def _number(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> tuple[torch.Tensor | None, bool]:
    """One element of what a node returns, if that is full of it, with as many dimensions; and whether it is made."""
    value = value_of(node)
    is_source = node.target in _FULL or node.target in _NUMBER_OF
    if not is_source and not (node.all_input_nodes and all(item in known for item in node.all_input_nodes)):
        return None, False
    if value is None or value.is_complex() or value.layout is not torch.strided or not is_pure(node):
        return None, False
    position = _FULL.get(node.target)
    filled: object = _NUMBER_OF.get(node.target)
    if position is not None and position < len(node.args):
        filled = node.args[position]
    if isinstance(filled, (bool, int, float)):
        return torch.full([1] * value.ndim, filled, dtype=value.dtype), True
    sources = [known[item] for item in node.all_input_nodes if item in known]
    if not sources or len(sources) < len(node.all_input_nodes):
        return None, False
    if node.target in _VIEWS or node.target in _COPIES:
        return (sources[0].reshape([1] * value.ndim).to(value.dtype) if len(sources) == 1 else None), False
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None, False
    if {"device", "memory_format"} & set(node.kwargs):
        return None, False
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    try:
        result = node.target(*args, **kwargs)
    except (RuntimeError, ZeroDivisionError):  # an integer division by zero, which is the call's to raise
        return None, False
    if not isinstance(result, torch.Tensor) or result.dtype != value.dtype or result.ndim != value.ndim:
        return None, False
    return result, False


def _fold(node: fx.Node, number: bool | int | float, context: PassContext) -> bool:
    value = value_of(node)
    assert value is not None
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        context.refuse(node, "its sizes are symbolic", matched=1, of=1)
        return False
    keywords = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return replace(node, call(node, aten.full.default, (list(value.shape), number), keywords), context)


PASS = Pass(
    "joint.fold_uniform_constants",
    "Makes one full of what is full of one number.",
    fold_uniform_constants,
    default=False,
)
