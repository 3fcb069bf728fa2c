"""Recognizes attention that a model writes out, in ATen graphs: the forward by its meaning, not by one traced form.

From a softmax the scores are followed up to the product of query and key, and the probabilities down to the product
with the value. On the way up, in the order they are applied::

    scores = bmm(query, key^T)                     mm for matrices; the operands in any layout
    scores = scores * c, scores / c                at most one, c a number
    scores = scores + bias                         any number of them
    scores = masked_fill(scores, hidden, fill)     or where; at most one, fill a number

and on the way down dropout as our decomposition writes it, ``probabilities * kept * c``. Views and copies that change
no element's place may stand anywhere between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...engine.fx.editing import known_equal, same_sizes, value_of

aten = torch.ops.aten

PARTS = 4
"""The parts of attention to be found: softmax, product with the value, product of query and key, what is between."""

_TRANSPARENT = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_PRODUCTS = {aten.bmm.default, aten.mm.default}
_HALVES = (torch.float16, torch.bfloat16)


class NotAttention(Exception):
    """What was found is no attention we know: where, why, and how many parts had been found."""

    def __init__(self, node: fx.Node, reason: str, matched: int) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason
        self.matched = matched


@dataclasses.dataclass
class Forward:
    """One attention.

    Attributes:
        softmax: the node of the probabilities.
        scores_product: ``bmm(query, key_transposed)``, or ``mm``.
        value_product: ``bmm(probabilities, value)``, or ``mm``.
        dropped: the probabilities after dropout, before any view; ``softmax`` without dropout.
        sizes: the sizes of the scores where something is added or masked, else where the softmax is, as arguments for
            ``view``.
        biases: what is added to the scores, in order.
        scale: what they are multiplied by.
        hidden: a boolean node, which scores are filled; ``is_shown`` if it says which are not.
        fill: with what.
        kept: what dropout multiplies by, a boolean node, and by which number.
        upcast: whether the softmax of half precisions is computed in float32.
        fill_first: whether scores are filled before something is added.
        safe: whether the softmax gives 0 for a row of -inf alone.
    """

    softmax: fx.Node
    scores_product: fx.Node
    value_product: fx.Node
    dropped: fx.Node
    sizes: list[object]
    biases: list[fx.Node] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    hidden: fx.Node | None = None
    is_shown: bool = False
    fill: float = 0.0
    kept: fx.Node | None = None
    kept_scale: float = 1.0
    upcast: bool = False
    fill_first: bool = False
    safe: bool = False
    chain: list[fx.Node] = dataclasses.field(default_factory=list)
    """The nodes between the two products, in no order."""

    @property
    def query(self) -> fx.Node:
        """[N, S, D], or [S, D]."""
        return self.scores_product.args[0]

    @property
    def key_transposed(self) -> fx.Node:
        """[N, D, T], or [D, T]."""
        return self.scores_product.args[1]

    @property
    def value(self) -> fx.Node:
        """[N, T, E], or [T, E]."""
        return self.value_product.args[1]


def find_forward(softmax: fx.Node) -> Forward:
    """The attention around a softmax.

    Raises:
        NotAttention: there is none, or one that cannot be written as the operator.
    """
    probabilities = value_of(softmax)
    scores, dim = softmax.args[:2]
    if probabilities is None or not isinstance(scores, fx.Node):
        raise NotAttention(softmax, "its shape is not known", 0)
    value_product, dropped, kept, kept_scale, below = _down(softmax)
    if dim not in (-1, probabilities.ndim - 1):
        raise NotAttention(softmax, "the softmax is not over the last dimension", 2)
    found = Forward(softmax, softmax, value_product, dropped, [], kept=kept, kept_scale=kept_scale, chain=below)
    found.safe = softmax.target is aten._safe_softmax.default
    found.upcast = not found.safe and bool(softmax.args[2])
    _up(found, scores)
    value = value_of(found.value)
    if found.upcast and (value is None or value.dtype not in _HALVES or probabilities.dtype is not torch.float32):
        raise NotAttention(softmax, "the casts around the softmax are not from and to a half precision", PARTS - 1)
    dtype = value.dtype if found.upcast and value is not None else probabilities.dtype
    for name, node in (("query", found.query), ("key", found.key_transposed), ("value", found.value)):
        operand = value_of(node)
        if operand is None or operand.dtype is not dtype:
            raise NotAttention(node, f"the {name} is of another dtype than the probabilities", PARTS - 1)
    return found


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and isinstance(node.args[0], fx.Node)


def _down(softmax: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float, list[fx.Node]]:
    """From the probabilities to the product with the value: the product, and dropout on the way."""
    probabilities = value_of(softmax)
    assert probabilities is not None
    node, dropped, chain = softmax, softmax, [softmax]
    kept: fx.Node | None = None
    kept_scale = 1.0
    while True:
        step = _next_step(node, kept is not None)
        if step is None:
            raise NotAttention(softmax, "its result is not multiplied with a value", 1)
        if step.target in _PRODUCTS:
            return step, dropped, kept, kept_scale, chain
        chain.append(step)
        if step.target in _TRANSPARENT:
            _check_view(step, node)
        if step.target is aten.mul.Tensor:
            other = _other(step, node)
            if isinstance(other, fx.Node):
                kept = other
            else:
                assert isinstance(other, (int, float))
                kept_scale *= other
            dropped = step
        node = step


def _next_step(node: fx.Node, has_mask: bool) -> fx.Node | None:
    """The user of the probabilities that goes on towards the value: a product first, then dropout, then views."""
    users = list(node.users)
    for user in users:
        if user.target in _PRODUCTS and user.args[0] is node and user.args[1] is not node:
            return user
    for user in users:
        if user.target is aten.mul.Tensor and _is_dropout_step(user, node, has_mask):
            return user
    for user in users:
        if (user.target in _TRANSPARENT or _is_cast(user)) and _reaches_product(user):
            return user
    return None


def _reaches_product(node: fx.Node) -> bool:
    """Whether, through views alone, a node is the left factor of a product."""
    for user in node.users:
        if user.target in _PRODUCTS and user.args[0] is node:
            return True
        if (user.target in _TRANSPARENT or _is_cast(user)) and _reaches_product(user):
            return True
        if user.target is aten.mul.Tensor and isinstance(_other(user, node), fx.Node) and _reaches_dropped(user):
            return True
    return False


def _reaches_dropped(node: fx.Node) -> bool:
    """Whether what is multiplied with a mask goes on, multiplied with a number, to a product."""
    return any(
        user.target is aten.mul.Tensor and isinstance(_other(user, node), (int, float)) and _reaches_product(user)
        for user in node.users
    )


def _is_dropout_step(user: fx.Node, node: fx.Node, has_mask: bool) -> bool:
    """Whether a product multiplies with dropout's boolean mask, or after that with its number."""
    other = _other(user, node)
    if isinstance(other, fx.Node):
        mask, value = value_of(other), value_of(node)
        if has_mask or mask is None or value is None:
            return False
        return mask.dtype is torch.bool and same_sizes(mask.shape, value.shape)
    return has_mask and isinstance(other, (int, float))


def _other(step: fx.Node, node: fx.Node) -> object:
    first, second = step.args[:2]
    return second if first is node else first


def _up(found: Forward, node: fx.Node) -> None:
    """From the softmax's argument to the product of query and key; fills in what is on the way."""
    scores = value_of(node)
    assert scores is not None
    found.sizes = list(scores.shape)
    fixed_shape: Sequence[object] | None = None
    is_scaled = False
    while node.target not in _PRODUCTS:
        if node.op != "call_function":
            raise NotAttention(found.softmax, f"its argument {node.name} is an input", 2)
        found.chain.append(node)
        value = value_of(node)
        if value is None:
            raise NotAttention(node, "its shape is not known", 2)
        if node.target in _TRANSPARENT:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            _check_view(node, source)
            if fixed_shape is None and node.target in _VIEWS:
                found.sizes = list(node.args[1])
            node = source
            continue
        if _is_cast(node):
            found.upcast, node = True, node.args[0]
            continue
        if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            if is_scaled:
                raise NotAttention(node, "the scores are scaled twice", 2)
            node, is_scaled = _take_scale(found, node), True
            continue
        is_mask = node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self)
        if not is_mask and node.target is not aten.add.Tensor:
            raise NotAttention(node, f"{node.name} is {node.target}, which attention has no place for", 2)
        if is_scaled:
            raise NotAttention(node, "the scores are scaled after something is added or masked", 2)
        if fixed_shape is not None and not same_sizes(value.shape, fixed_shape):
            raise NotAttention(node, "what is added or masked is of several shapes", 2)
        if fixed_shape is None:
            fixed_shape = value.shape
            if not same_sizes(found.sizes, value.shape) and not all(isinstance(size, fx.Node) for size in found.sizes):
                found.sizes = list(value.shape)
        node = _take_mask(found, node) if is_mask else _take_bias(found, node)
    found.scores_product = node
    if not all(isinstance(size, (int, fx.Node)) for size in found.sizes):
        _name_sizes(found)


def _name_sizes(found: Forward) -> None:
    """Symbolic sizes as nodes: those of the view that makes a batch of products the scores."""
    for node in found.chain:
        value = value_of(node)
        if node.target in _VIEWS and value is not None and same_sizes(value.shape, found.sizes):
            found.sizes = list(node.args[1])
            return
    raise NotAttention(found.softmax, "its sizes are not known before the call", PARTS - 1)


def _check_view(node: fx.Node, source: fx.Node) -> None:
    """A view of the scores, or probabilities, may only split or merge the leading dimensions."""
    value, origin = value_of(node), value_of(source)
    if value is None or origin is None or value.ndim < 2 or origin.ndim < 2:
        raise NotAttention(node, "the scores or probabilities are viewed as something else", 2)
    if not same_sizes(value.shape[-2:], origin.shape[-2:]) or not known_equal(value.numel(), origin.numel()):
        raise NotAttention(node, "a view of the scores or probabilities mixes rows or columns", 2)


def _take_scale(found: Forward, node: fx.Node) -> fx.Node:
    source, number = node.args[:2]
    if not isinstance(source, fx.Node):
        source, number = number, source
    if isinstance(number, fx.Node):
        constant = constant_of(number)
        if constant is None:
            raise NotAttention(node, "the scale is a tensor, not a number", 2)
        number = constant
    if node.target in (aten.div.Tensor, aten.div.Scalar) and source is not node.args[0]:
        raise NotAttention(node, "a number is divided by the scores", 2)
    is_quotient = node.target in (aten.div.Tensor, aten.div.Scalar)
    if not isinstance(number, (int, float)) or number == 0 or not math.isfinite(number):
        raise NotAttention(node, f"the scale {number!r} is no number to multiply with", 2)
    found.scale = 1.0 / number if is_quotient else float(number)
    assert isinstance(source, fx.Node)
    return source


def _take_bias(found: Forward, node: fx.Node) -> fx.Node:
    first, second = node.args[:2]
    if found.hidden is not None and found.fill_first:
        raise NotAttention(node, "something is added both before and after the scores are masked", 2)
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        raise NotAttention(node, "a number is added to the scores", 2)
    if not _leads_to_product(first):
        first, second = second, first
    scores, bias = value_of(first), value_of(second)
    earlier = value_of(found.biases[0]) if found.biases else bias
    if scores is None or bias is None or earlier is None or earlier.dtype is not bias.dtype:
        raise NotAttention(node, "what is added to the scores is of another dtype", 2)
    sum_of_both = value_of(node)
    if sum_of_both is None or not same_sizes(sum_of_both.shape, scores.shape):
        raise NotAttention(node, "what is added to the scores makes them larger", 2)
    if scores.dtype is not bias.dtype:
        if scores.dtype not in _HALVES or bias.dtype is not torch.float32:
            raise NotAttention(node, "what is added to the scores is of another dtype", 2)
        found.upcast = True
    found.biases.insert(0, second)
    return first


def _take_mask(found: Forward, node: fx.Node) -> fx.Node:
    if found.hidden is not None:
        raise NotAttention(node, "the scores are masked twice", 2)
    found.fill_first = bool(found.biases)
    if node.target is aten.where.self:
        condition, first, second = node.args
        found.is_shown = isinstance(first, fx.Node) and _leads_to_product(first)
        source, filling = (first, second) if found.is_shown else (second, first)
    else:
        source, condition, filling = node.args[:3]
    number = filling if isinstance(filling, (int, float)) else constant_of(filling)
    if number is None:
        raise NotAttention(node, "what masked scores are filled with is not a known number", 2)
    assert isinstance(source, fx.Node) and isinstance(condition, fx.Node)
    value, result = value_of(source), value_of(node)
    if value is None or result is None or not same_sizes(value.shape, result.shape) or value.dtype is not result.dtype:
        raise NotAttention(node, "the mask changes the shape or dtype of the scores", 2)
    found.hidden, found.fill = condition, float(number)
    return source


def _leads_to_product(node: fx.Node, steps: int = 8) -> bool:
    """Whether a node is, a few steps up, a product of matrices: which of two operands are the scores."""
    while steps:
        if node.target in _PRODUCTS:
            return True
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        candidates = [arg for arg in node.args[:3] if isinstance(arg, fx.Node)]
        if node.target in (aten.add.Tensor, aten.where.self):
            return any(_leads_to_product(arg, steps - 1) for arg in candidates)
        if node.target not in _TRANSPARENT and node.target not in (
            aten.mul.Tensor,
            aten.div.Tensor,
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten._to_copy.default,
        ):
            return False
        node, steps = candidates[0], steps - 1
    return False


def constant_of(node: object) -> float | None:
    """The number a node holds as a tensor of one element, if the graph tells it."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.full.default and node.args[0] == []:
        number = node.args[1]
        return float(number) if isinstance(number, (int, float)) else None
    if node.target is aten.scalar_tensor.default and isinstance(node.args[0], (int, float)):
        return float(node.args[0])
    if node.target in (aten.lift_fresh_copy.default, aten.clone.default, aten.alias.default, aten._to_copy.default):
        return constant_of(node.args[0])
    if node.op == "get_attr":
        value: object = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not hasattr(value, "fake_mode"):
            with unset_fake_temporarily():  # a compile's fake mode reads no real number
                return float(value.item())
    return None
