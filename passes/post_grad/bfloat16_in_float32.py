"""Computes bfloat16 in float32 if the provider has no bfloat16 kernel.

Rule: an operator with bfloat16 arguments or results that the provider rejects becomes the same operator in float32
between casts. Each result is rounded to bfloat16, as in eager, so that errors are eager's::

    y: bf16 = addmm(b, x, w)

    b_f32 = _to_copy(b, dtype=float32); x_f32 = ...; w_f32 = ...
    y_in_float32: f32 = addmm(b_f32, x_f32, w_f32)
    y: bf16 = _to_copy(y_in_float32, dtype=bfloat16)

Each value is cast once for all users. Eager's CPU kernels compute the same way (``at::opmath_type``).

Not if

1. the provider rejects the operator in float32 too, or its results would have other dtypes or shapes;
2. the operator depends on the bits or limits of its dtype (``view.dtype``, ``nextafter``, ``nan_to_num``), draws random
   numbers or changes an argument;
3. the result is a view of memory that is returned: a cast would be a copy;
4. PyTorch is faster: it has bfloat16 matrix units (``Target.multiplies_bfloat16``), or the graph has no matrix product
   or convolution;
5. the operator has a discontinuity at a number that bfloat16 cannot represent: eager rounds that number first.
   Comparisons (results of type bool) get the rounded number instead.

ONNX Runtime has few bfloat16 kernels on the CPU. Without this pass such a model runs in PyTorch, 1.6 to 7 times
slower if the processor has no bfloat16 units (``docs/limits.md``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree

from ..engine.context import PassContext
from ..engine.fx.editing import NotComputable, call, drop, is_functional, is_needed, origin, replace_all, value_of
from ..engine.registry import Pass

aten = torch.ops.aten

_SEES_DTYPE = {
    aten.view.dtype,
    aten.nextafter.default,
    aten.nan_to_num.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.logspace.default,
}
_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default}
"""Views that exist for all strides."""

_PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot, aten.convolution, aten.convolution_backward),
    *(aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu),
    *(aten._scaled_dot_product_flash_attention_for_cpu_backward, aten.linear, aten.matmul),
}

_SMOOTH = {
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.addcmul, aten.addcdiv, aten.lerp),
    *(aten.leaky_relu, aten.elu, aten.celu, aten.softplus, aten.logit),
    *(aten.where, aten.masked_fill, aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh),
}
"""Elementwise operators that are continuous in their number arguments: eager computes with these in float32
(``binary_kernel_reduced_floating_vec_opmath_support``), or rounding the result gives eager's."""


def bfloat16_in_float32(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites operators in place; returns how many."""
    nodes = [node for node in module.graph.nodes if _has_bfloat16(node)]
    if context.target.multiplies_bfloat16 or not any(_is_product(node) for node in nodes):
        return 0
    wide: dict[fx.Node, fx.Node] = {}
    fired = 0
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or context.target.rejects_operator(node) is None:
            continue
        reason = _reason_against(node) or _rewrite(node, wide, context)
        if reason is None:
            fired += 1
            continue
        wide = {value: cast for value, cast in wide.items() if not cast._erased}
        if reason:
            context.record_near_miss(node, reason, matched=1, of=2)
    return fired


def _has_bfloat16(node: fx.Node) -> bool:
    return any(map(_is_bfloat16, _pytree.tree_leaves([item.meta.get("val") for item in (node, *node.all_input_nodes)])))


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _PRODUCTS


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def _reason_against(node: fx.Node) -> str | None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target in _SEES_DTYPE:
        return "it depends on the bits or limits of its dtype"
    if not is_functional(node):
        return "it draws random numbers, or changes an argument in place"
    if is_needed(node) and any(result.alias_info is not None for result in target._schema.returns):
        return "it is a view of memory that is returned"
    smooth = target.overloadpacket in _SMOOTH and target._overloadname not in ("Tensor_mode", "Scalar_mode")
    if torch.Tag.pointwise in target.tags and not smooth and not _is_comparison(node):
        for number in node.args:
            if _is_number(number) and number == number and _rounded(number) != number:
                return f"eager may round {number} to bfloat16 first, and the operator may be discontinuous there"
    return None


def _is_number(argument: object) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def _is_comparison(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def _rounded(number: float) -> float:
    return torch.tensor(number, dtype=torch.bfloat16).item()


def _rewrite(node: fx.Node, wide: dict[fx.Node, fx.Node], context: PassContext) -> str | None:
    """Rewrites a node; returns why it did not (``""`` if ``context`` recorded that), or ``None``.

    Args:
        node: the node.
        wide: by bfloat16 value its cast to float32.
        context: allows the change.
    """
    is_comparison = _is_comparison(node)
    inputs = [value for item in node.all_input_nodes if (value := value_of(item)) is not None]
    if is_comparison and any(item.is_floating_point() and not _is_bfloat16(item) for item in inputs):
        return "eager rounds a float32 scalar to bfloat16 before it compares"

    def in_float32(argument: Any) -> Any:
        if isinstance(argument, fx.Node) and _is_bfloat16(argument.meta.get("val")):
            return _widened(argument, wide)
        if is_comparison and _is_number(argument):
            return _rounded(argument)
        return torch.float32 if argument is torch.bfloat16 else argument

    try:
        candidate = call(node, node.target, *map_aggregate((node.args, node.kwargs), in_float32))
    except NotComputable as error:
        drop(wide.values())
        return f"in float32 it fails: {error}"
    candidate._rename(f"{node.name}_in_float32")
    reason = context.target.rejects_operator(candidate)
    if reason is not None:
        drop([candidate])
        return f"in float32 too: {reason}"
    pairs = [(node, candidate)]
    if isinstance(node.meta["val"], (tuple, list)):
        if any(user.target is not operator.getitem for user in node.users):
            drop([candidate])
            return "all its results are read together"
        pairs = [(user, call(user, operator.getitem, (candidate, user.args[1]))) for user in node.users]
    pairs = [(old, _narrowed(new, old)) for old, new in pairs]
    if not replace_all(pairs, context, at=node, strides=False):
        drop([candidate])
        return ""
    return None


def _widened(value: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node:
    """``value`` in float32, cast as early as possible, so that a transposition stays next to its product."""
    if value not in wide:
        following = value.next
        while following.op == "placeholder":
            following = following.next
        if value.target in _VIEWS:
            assert isinstance(value.args[0], fx.Node)
            cast = call(following, value.target, (_widened(value.args[0], wide), *value.args[1:]))
        else:
            cast = call(following, aten._to_copy.default, (value,), {"dtype": torch.float32})
        cast.meta = {**origin(value), "val": cast.meta["val"]}
        cast._rename(f"{value.name}_in_float32")
        wide[value] = cast
    return wide[value]


def _narrowed(wide: fx.Node, like: fx.Node) -> fx.Node:
    """A cast of ``wide`` to the dtype of ``like``, or ``wide`` itself."""
    value, wanted = wide.meta["val"], like.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype == wanted.dtype:
        return wide
    return call(like, aten._to_copy.default, (wide,), {"dtype": wanted.dtype})


PASS = Pass(
    "post_grad.bfloat16_in_float32",
    "Computes bfloat16 in float32 between casts where the provider has no bfloat16 kernel.",
    bfloat16_in_float32,
)
