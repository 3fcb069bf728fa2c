"""Finds attention that a model writes out in a training step, and writes forward and backward as one operator each.

Rule: ``joint.attention``'s, in a joint graph. The backward that autograd made of it is followed from the gradient of
the result: the products that give the gradients of value and probabilities, dropout, the softmax's derivative, the
mask, the scale, and the products that give the gradients of query and key. All of it becomes
``dynamo_backends.attention_backward``, which computes the probabilities once more: the [S, T] matrices are no longer
handed from forward to backward.

Not if a node of either half has a user elsewhere, but for the gradient of what is added to the scores; not if the
backward is another than autograd's (a hook on the scores, for instance); not in half precisions.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import NotComputable, call, replace_all, same_sizes, value_of
from ..engine.registry import Pass
from ..operators import attention, attention_backward
from .attention.forms import PARTS, Forward, NotAttention, constant_of, find_forward
from .attention.writing import operands, places_of, product_sizes, shaped, size_of, softmaxes, transposed

aten = torch.ops.aten

_PRODUCTS = (aten.bmm.default, aten.mm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_FACTORS = (aten.mul.Tensor, aten.mul.Scalar)


@dataclasses.dataclass
class _Backward:
    """The nodes of the backward that hold gradients.

    Attributes:
        grad: of the result, [N, S, E] or [S, E].
        of_value, of_query: the products that give the gradients of value and query.
        of_key: the product that gives the gradient of the transposed key.
        of_scores: the gradient of the masked scores, before the scale, [..., S, T].
        inside: all nodes that go.
    """

    grad: fx.Node
    of_value: fx.Node
    of_query: fx.Node
    of_key: fx.Node
    of_scores: fx.Node
    inside: set[fx.Node]


def find_attention_in_training(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces attention with its backward; returns how many."""
    fired = 0
    for softmax in softmaxes(module):
        try:
            forward = find_forward(softmax)
            if all(user in forward.chain for user in softmax.users):
                continue  # no backward: joint.attention's
            backward = _find_backward(forward)
        except NotAttention as error:
            context.refuse(error.node, error.reason, matched=error.matched, of=PARTS)
            continue
        try:
            places = _places(forward, backward)
        except NotComputable as error:
            context.refuse(forward.value_product, f"its operands do not fit: {error}", matched=PARTS, of=PARTS)
            continue
        fired += replace_all(places, context, at=forward.value_product)
    return fired


def _stop(node: fx.Node, reason: str) -> NotAttention:
    return NotAttention(node, f"the backward is not attention's: {reason}", PARTS - 1)


def _find_backward(forward: Forward) -> _Backward:
    if forward.upcast:
        raise NotAttention(forward.softmax, "in half precisions training is left as it is written", PARTS - 1)
    probabilities = forward.value_product.args[0]
    assert isinstance(probabilities, fx.Node)
    of_value = _product_with(_transposition_of(probabilities, "the probabilities"), left=True)
    grad = of_value.args[1]
    assert isinstance(grad, fx.Node)
    of_probabilities = _product_of(grad, forward.value)
    inside = {of_value, of_probabilities, of_value.args[0], of_probabilities.args[1]}
    node = _after_views(of_probabilities, inside)
    if forward.kept is not None:
        node = _after_dropout(forward, node, inside)
    node = _after_softmax(forward, node, inside)
    if forward.fill_first:
        _expect_one_user(node, "the gradient of what is added is read before the mask")
    if forward.hidden is not None:
        node = _after_mask(forward, node, inside)
    of_scores = node
    of_query, of_key, scaled = _last_products(forward, node, inside)
    inside.update((of_query, of_key, scaled, of_query.args[1], of_key.args[0]))
    backward = _Backward(grad, of_value, of_query, of_key, of_scores, inside)
    _check_users(forward, backward)
    return backward


def _transposition_of(node: fx.Node, what: str) -> fx.Node:
    for user in node.users:
        if _is_transposition(user):
            return user
    raise _stop(node, f"{what} are not transposed")


def _is_transposition(node: object) -> bool:
    """Whether a node swaps the last two dimensions of its argument."""
    if not isinstance(node, fx.Node) or (value := value_of(node)) is None:
        return False
    rank = value.ndim
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        order = [dim % rank for dim in node.args[1]]
        return order == [*range(rank - 2), rank - 1, rank - 2]
    if node.target is aten.transpose.int:
        return {dim % rank for dim in node.args[1:]} == {rank - 2, rank - 1}
    return False


def _product_with(node: fx.Node, *, left: bool) -> fx.Node:
    products = [user for user in node.users if user.target in _PRODUCTS and user.args[0 if left else 1] is node]
    if len(products) != 1:
        raise _stop(node, f"{node.name} is multiplied {len(products)} times")
    return products[0]


def _product_of(left: fx.Node, of_transposed: fx.Node) -> fx.Node:
    """The product of a node with the transposition of another."""
    for user in left.users:
        if user.target in _PRODUCTS and user.args[0] is left and _undoes(user.args[1], of_transposed):
            return user
    raise _stop(left, f"no product of {left.name} with {of_transposed.name} transposed")


def _undoes(node: object, other: fx.Node) -> bool:
    """Whether a node is the transposition of another."""
    if not isinstance(node, fx.Node):
        return False
    return (_is_transposition(node) and node.args[0] is other) or (_is_transposition(other) and other.args[0] is node)


def _after_views(node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    while len(node.users) == 1 and next(iter(node.users)).target in (*_VIEWS, aten.clone.default):
        node = next(iter(node.users))
        inside.add(node)
    return node


def _only_user(node: fx.Node) -> fx.Node:
    _expect_one_user(node, f"{node.name} is read {len(node.users)} times")
    return next(iter(node.users))


def _expect_one_user(node: fx.Node, reason: str) -> None:
    if len(node.users) != 1:
        raise _stop(node, reason)


def _after_dropout(forward: Forward, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Past the products with dropout's mask and number, in either order, or with their product."""
    has_mask, scale = False, 1.0
    while not has_mask or scale != forward.kept_scale:
        user = _only_user(node)
        if user.target not in _FACTORS:
            raise _stop(user, "no product with dropout's mask")
        other = user.args[1] if user.args[0] is node else user.args[0]
        if isinstance(other, fx.Node):
            mask, number = _mask_and_number(forward, other)
            if mask is not forward.kept or has_mask:
                raise _stop(user, "another mask than dropout's")
            has_mask, scale = True, scale * number
        elif isinstance(other, (int, float)):
            scale *= other
        inside.add(user)
        node = user
    return _after_views(node, inside)


def _mask_and_number(forward: Forward, node: fx.Node) -> tuple[fx.Node, float]:
    number = 1.0
    while node is not forward.kept:
        first, second = (*node.args, None)[:2]
        if node.target in _FACTORS and isinstance(second, (int, float)):
            number *= second
        elif node.target is not aten._to_copy.default:
            raise _stop(node, "another mask than dropout's")
        assert isinstance(first, fx.Node)
        node = first
    return node, number


def _after_softmax(forward: Forward, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Past the softmax's derivative, whole or taken apart: g * p - p * sum(g * p)."""
    p = forward.softmax
    user = next(iter(node.users), None)
    if user is not None and user.target is aten._softmax_backward_data.default and user.args[:2] == (node, p):
        _expect_one_user(node, "the gradient of the probabilities is read elsewhere")
        inside.add(user)
        return _after_views(user, inside) if len(user.users) == 1 else user
    product = _only_user(node)
    if product.target is not aten.mul.Tensor or set(product.args) != {node, p}:
        raise _stop(product, "no derivative of the softmax")
    total = next((u for u in product.users if u.target is aten.sum.dim_IntList), None)
    probabilities = value_of(p)
    assert probabilities is not None
    rank = probabilities.ndim
    if total is None or [dim % rank for dim in total.args[1]] != [rank - 1] or total.args[2:] != (True,):
        raise _stop(product, "no sum over the rows")
    share = _only_user(total)
    if share.target is not aten.mul.Tensor or set(share.args) != {p, total}:
        raise _stop(share, "no derivative of the softmax")
    result = _only_user(share)
    if result.target is not aten.sub.Tensor or result.args[:2] != (product, share) or result.kwargs:
        raise _stop(result, "no derivative of the softmax")
    inside.update((product, total, share, result))
    if set(product.users) != {total, result}:
        raise _stop(product, "the gradient of the probabilities is read elsewhere")
    return result


def _after_mask(forward: Forward, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Past the mask, which lets no gradient through where scores were filled."""
    node = _after_views(node, inside)
    user = _only_user(node)
    if user.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        fits = user.args[0] is node and user.args[1] is forward.hidden and _is_zero(user.args[2])
    elif user.target is aten.where.self:
        condition, shown, other = user.args
        if not forward.is_shown:
            shown, other = other, shown
        fits = condition is forward.hidden and shown is node and _is_zero(other)
    else:
        fits = False
    if not fits:
        raise _stop(user, "the mask is not applied to the gradient")
    inside.add(user)
    return user


def _is_zero(value: object) -> bool:
    return value == 0 if isinstance(value, (int, float)) else constant_of(value) == 0


def _last_products(forward: Forward, node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The products of the gradient of the scores with key and query, and what they read; past the scale."""
    for start in list(node.users):
        seen: set[fx.Node] = set()
        scale, current = 1.0, start
        while current.target in (*_FACTORS, *_QUOTIENTS, *_VIEWS, aten.clone.default):
            seen.add(current)
            if current.target in (*_FACTORS, *_QUOTIENTS):
                number = current.args[1]
                if isinstance(number, fx.Node):
                    number = constant_of(number)
                if not isinstance(number, (int, float)) or number == 0:
                    break
                scale = scale / number if current.target in _QUOTIENTS else scale * number
            products = [user for user in current.users if user.target in _PRODUCTS]
            if products or len(current.users) != 1:
                break
            current = next(iter(current.users))
        if current.target in _PRODUCTS:  # matrices: there is no view in between
            current = node if start is current else current
            products = [user for user in current.users if user.target in _PRODUCTS]
        elif not seen:
            continue
        of_query = next((u for u in current.users if u.target in _PRODUCTS and u.args[0] is current), None)
        of_key = next((u for u in current.users if u.target in _PRODUCTS and u.args[1] is current), None)
        if of_query is None or of_key is None or set(current.users) - {of_query, of_key}:
            continue
        if not _undoes(of_query.args[1], forward.key_transposed) or not _undoes(of_key.args[0], forward.query):
            continue
        if abs(scale - forward.scale) > 1e-9 * abs(forward.scale):
            raise _stop(current, "the gradient is scaled otherwise than the scores")
        inside.update(seen)
        return of_query, of_key, current
    raise _stop(node, "no products that give the gradients of query and key")


def _check_users(forward: Forward, backward: _Backward) -> None:
    inside = {*forward.chain, forward.scores_product, forward.value_product, *backward.inside}
    results = {forward.value_product, backward.of_value, backward.of_query, backward.of_key}
    may_leave = {backward.of_scores} if forward.biases else set()
    shared = {node for node in inside if _is_transposition(node)}  # transposed inputs: others may read them too
    for node in inside - results - may_leave - shared:
        for user in node.users:
            if user not in inside:
                raise NotAttention(node, f"{user.name} needs {node.name}, which would be gone", PARTS)
    for node in (forward.value_product, backward.of_value, backward.of_query, backward.of_key):
        value = value_of(node)
        if value is None or not all(isinstance(size, int) for size in value.shape):
            raise NotAttention(node, "its sizes are not known before the call", PARTS)


def _places(forward: Forward, backward: _Backward) -> list[tuple[fx.Node, fx.Node]]:
    """What must be replaced in both halves, and by what. Raises ``NotComputable``."""
    tensors, numbers = operands(forward, forward.value_product)
    result = call(forward.value_product, attention, tensors, numbers)
    pairs = places_of(forward.value_product, result, product_sizes(forward))
    first = min(node for node in backward.inside if node.target in _PRODUCTS)
    *leading, rows, _ = forward.sizes
    grad = shaped(backward.grad, [*leading, rows, size_of(backward.grad, -1, first)], first)
    gradients = call(first, attention_backward, (grad, *tensors), numbers)
    query, key, value, scores = (
        call(first, operator.getitem, (gradients, i), value=item) for i, item in enumerate(gradients.meta["val"])
    )
    places = ((backward.of_value, value), (backward.of_query, query), (backward.of_key, transposed(key, first)))
    for product, gradient in places:
        pairs += places_of(product, gradient, _sizes(product))
    if any(user not in backward.inside for user in backward.of_scores.users):
        known, wanted = value_of(scores), value_of(backward.of_scores)
        assert known is not None and wanted is not None
        if not same_sizes(known.shape, wanted.shape):
            scores = call(first, aten.view.default, (scores, list(wanted.shape)))
        pairs.append((backward.of_scores, scores))
    return pairs


def _sizes(node: fx.Node) -> list[object]:
    value = value_of(node)
    assert value is not None
    return list(value.shape)


PASS = Pass(
    "joint.attention_in_training",
    "Writes attention that is written out, with its backward, as two operators.",
    find_attention_in_training,
)
