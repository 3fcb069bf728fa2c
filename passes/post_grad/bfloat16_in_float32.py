"""Computes bfloat16 in float32 where the provider has no bfloat16 kernel.

Rule: an operator with bfloat16 arguments or results that the provider refuses becomes the operator in float32 between
casts. Each result is rounded to bfloat16, as in eager, so that errors do not differ from eager's::

    y: bf16 = addmm(b, x, w)

    b_f32 = _to_copy(b, dtype=float32); x_f32 = ...; w_f32 = ...
    y_in_float32: f32 = addmm(b_f32, x_f32, w_f32)
    y: bf16 = _to_copy(y_in_float32, dtype=bfloat16)

Each value is cast once, however many read it. Eager's CPU kernels compute that way themselves (``at::opmath_type``).

Not if

1. the provider refuses the operator in float32 too, or its results would have other dtypes or shapes;
2. the operator sees the bits or the limits of its dtype (``view.dtype``, ``nextafter``, ``nan_to_num``), draws random
   numbers or changes an argument;
3. the result is a view of memory that is returned: a cast would take it out of there;
4. PyTorch is faster: it multiplies bfloat16 by matrix units (``Target.multiplies_bfloat16``), or the graph has no
   product and no convolution, and nothing but casts would be gained;
5. the operator compares or jumps at a number that is none in bfloat16: eager rounds that number first. Comparisons
   (results of type bool) are given the rounded number instead.

Needed: ONNX Runtime has next to no kernels for bfloat16 on the CPU, so that without it such a model runs in PyTorch:
1.6 to 7 times slower where the processor has no units for bfloat16 (``docs/limits.md``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import (
    NotComputable,
    call,
    changes_memory,
    erase_unused,
    is_needed,
    known_equal,
    origin,
    replace_all,
    same_sizes,
    take_name,
    value_of,
)
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
_VIEWS = {
    *(aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
}
"""Views that any tensor has, however it lies in memory, and that are no larger before than after."""

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
"""Elementwise operators that take numbers and do not jump at them: eager keeps them in float32
(``binary_kernel_reduced_floating_vec_opmath_support``), or the result is rounded to what eager makes of them."""


def bfloat16_in_float32(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites operators in place; returns how many."""
    nodes = [node for node in module.graph.nodes if _has_bfloat16(node)]
    if context.target.multiplies_bfloat16 or not any(_is_product(node) for node in nodes):
        return 0
    wide: dict[fx.Node, fx.Node] = {}
    fired = 0
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if context.target.refuses_operator(node) is None:
            continue
        reason = _reason_against(node)
        if reason is None:
            reason = _Rewrite(node, wide, context).run()
        if reason is None:
            fired += 1
        elif reason:
            context.refuse(node, reason, matched=1, of=2)
    if fired:
        erase_unused([node for node in nodes if node.target in _VIEWS and not node._erased])
    return fired


def _has_bfloat16(node: fx.Node) -> bool:
    return any(
        _is_bfloat16(item) for source in (node, *node.all_input_nodes) for item in _items(source.meta.get("val"))
    )


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _PRODUCTS


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16


def _reason_against(node: fx.Node) -> str | None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target in _SEES_DTYPE:
        return "it depends on its dtype's bits or limits"
    if changes_memory(node):
        return "it changes an argument in place"
    if is_needed(node) and any(result.alias_info is not None for result in target._schema.returns):
        return "it is a view of memory that is returned"
    if any(isinstance(item, torch.Tensor) and item.layout is not torch.strided for item in _items(node.meta["val"])):
        return "its result is not strided"
    smooth = target.overloadpacket in _SMOOTH and target._overloadname not in ("Tensor_mode", "Scalar_mode")
    if torch.Tag.pointwise in target.tags and not smooth and not _is_comparison(node):
        for number in node.args:
            if _is_number(number) and number == number and _rounded(number) != number:
                return f"eager may round {number} to bfloat16 first, and the operator may jump there"
    return None


def _is_number(argument: object) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def _is_comparison(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def _rounded(number: float) -> float:
    return torch.tensor(number, dtype=torch.bfloat16).item()


class _Rewrite:
    """The rewrite of one node."""

    def __init__(self, node: fx.Node, wide: dict[fx.Node, fx.Node], context: PassContext) -> None:
        self.node = node
        self.wide = wide
        self.context = context
        self.made: list[fx.Node] = []

    def run(self) -> str | None:
        """Rewrites the node; or leaves the graph as it was and says why, with nothing if the bisector said no."""
        node = self.node
        if _is_comparison(node) and self._compares_unrounded():
            return "eager rounds a float32 scalar to bfloat16 before it compares"
        args, kwargs = (self._in_float32(item) for item in (node.args, node.kwargs))
        if _is_comparison(node):
            args = tuple(_rounded(item) if _is_number(item) else item for item in args)
        try:
            candidate = call(node, node.target, args, kwargs)
        except NotComputable as error:
            return self._undo(f"in float32 it fails: {error}")
        self.made.append(candidate)
        reason = self._differs(candidate) or self.context.target.refuses_operator(candidate)
        if reason is not None:
            return self._undo(f"in float32 too: {reason}")
        places = self._places(candidate)
        if places is None:
            return self._undo("all its results are read together")
        if not replace_all(places, self.context, at=node, strides=False):
            return self._undo("")
        self._name(candidate, places)
        return None

    def _compares_unrounded(self) -> bool:
        values = [value_of(item) for item in self.node.all_input_nodes]
        return any(item is not None and item.is_floating_point() and not _is_bfloat16(item) for item in values)

    def _in_float32(self, argument: Any) -> Any:
        if argument is torch.bfloat16:
            return torch.float32
        if isinstance(argument, dict):
            return {key: self._in_float32(item) for key, item in argument.items()}
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._in_float32(item) for item in argument)
        if isinstance(argument, fx.Node) and _is_bfloat16(argument.meta.get("val")):
            return self._widened(argument)
        return argument

    def _widened(self, value: fx.Node) -> fx.Node:
        """``value`` in float32: one cast for all who read it, as early as it can be.

        What is cast is what ``value`` is a view of, so that a transposition stays next to the product that reads it.
        """
        if value not in self.wide:
            following = value.next
            while following.op == "placeholder":
                following = following.next
            source = value.args[0] if value.op == "call_function" and value.target in _VIEWS else None
            if isinstance(source, fx.Node):
                args: tuple = (self._widened(source), *value.args[1:])
                new = call(following, value.target, args, dict(value.kwargs))
            else:
                new = call(following, aten._to_copy.default, (value,), {"dtype": torch.float32})
            new.meta = {**origin(value), "val": new.meta["val"]}
            new._rename(f"{value.name}_in_float32")
            self.wide[value] = new
            self.made.append(new)
        return self.wide[value]

    def _differs(self, candidate: fx.Node) -> str | None:
        before, after = _items(self.node.meta["val"]), _items(candidate.meta["val"])
        if len(before) != len(after):
            return "it has another number of results"
        for old, new in zip(before, after, strict=True):
            if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
                if (old is None) != (new is None):
                    return "it has other results"
                continue
            if not same_sizes(old.shape, new.shape):
                return "its result has another shape"
            if new.dtype != (torch.float32 if _is_bfloat16(old) else old.dtype):
                return f"its result is {new.dtype} instead of {old.dtype}"
            strides = zip(old.shape, old.stride(), new.stride(), strict=True)
            if not all(known_equal(a, b) for size, a, b in strides if not known_equal(size, 1)):
                return "its result lies otherwise in memory"
        return None

    def _places(self, candidate: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
        """What is replaced by what: the node, or each of its results. ``None`` if results are not taken one by one."""
        if not isinstance(self.node.meta["val"], (tuple, list)):
            return [(self.node, self._narrowed(candidate, self.node))]
        if any(user.target is not operator.getitem for user in self.node.users):
            return None
        return [
            (user, self._narrowed(call(user, operator.getitem, (candidate, user.args[1])), user))
            for user in self.node.users
        ]

    def _name(self, candidate: fx.Node, places: list[tuple[fx.Node, fx.Node]]) -> None:
        """Names what is float32 after what it was, and keeps what was known of it in float32."""
        for old, new in places:
            if old in self.wide:
                self.wide[new] = self.wide.pop(old)
            if new is not candidate and new.target is not operator.getitem:  # a cast
                new.all_input_nodes[0]._rename(f"{new.name}_in_float32")
        if not self.node._erased:  # its results were replaced one by one
            take_name(candidate, self.node)

    def _narrowed(self, wide: fx.Node, like: fx.Node) -> fx.Node:
        """A cast of ``wide`` to the dtype of ``like``, or ``wide`` itself."""
        value, wanted = wide.meta["val"], like.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dtype == wanted.dtype:
            return wide
        narrow = call(like, aten._to_copy.default, (wide,), {"dtype": wanted.dtype})
        self.made.append(narrow)
        return narrow

    def _undo(self, reason: str) -> str:
        erase_unused(self.made)
        for value, cast in list(self.wide.items()):
            if cast in self.made and not cast.users:
                del self.wide[value]
        return reason


PASS = Pass(
    "post_grad.bfloat16_in_float32",
    "Computes bfloat16 in float32 between casts where the provider has no bfloat16 kernel.",
    bfloat16_in_float32,
)
