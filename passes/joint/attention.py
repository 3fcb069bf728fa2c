"""Finds attention that a model writes out, and writes it as one operator.

Rule: what ``passes.attention_forms`` recognizes becomes ``dynamo_backends.attention(query, key, value, bias, hidden,
kept)``, which means what was written: also for a row that is masked altogether. Query, key and value keep their leading
dimensions; heads that share keys stay expanded before it.

Not if a value between the two products has a user outside, as in a training step, where the backward reads the
probabilities (``joint.attention_in_training``).

Before::

    bmm = aten.bmm.default(q, k_transposed);  scores = aten.view.default(bmm, [2, 4, 8, 8])
    masked = aten.add.Tensor(aten.div.Tensor(scores, 4.0), mask)
    p = aten.view.default(aten._softmax.default(masked, -1, False), [8, 8, 8])
    result = aten.view.default(aten.bmm.default(p, v), [2, 4, 8, 16])

After::

    result = dynamo_backends.attention.default(q, k, v, mask, None, None, scale = 0.25)
"""

from __future__ import annotations

import torch
from torch import fx

from ..attention_forms import PARTS, Forward, NotAttention, find_forward
from ..context import PassContext
from ..editing import call, erase_unused, same_sizes, value_of
from ..operators import attention
from ..registry import Pass

aten = torch.ops.aten


def find_attention(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces attention that only a forward uses; returns how many."""
    fired = 0
    for softmax in softmaxes(module):
        try:
            found = find_forward(softmax)
            _check_users(found)
        except NotAttention as error:
            context.refuse(error.node, error.reason, matched=error.matched, of=PARTS)
            continue
        if context.allows(found.value_product):
            result = call(found.value_product, attention, *operands(found, found.value_product))
            put_in_place(found.value_product, result, product_sizes(found))
            fired += 1
    if fired:
        module.graph.eliminate_dead_code()
        module.recompile()
    return fired


def softmaxes(module: fx.GraphModule) -> list[fx.Node]:
    """All softmaxes of a graph, those that are 0 where all scores are -inf included."""
    targets = (aten._softmax.default, aten._safe_softmax.default)
    return [node for target in targets for node in module.graph.find_nodes(op="call_function", target=target)]


def _check_users(found: Forward) -> None:
    inside = {*found.chain, found.value_product, found.scores_product}
    for node in (*found.chain, found.scores_product):
        if any(user not in inside for user in node.users):
            raise NotAttention(node, "the graph needs a value between the two products, as a backward does", PARTS)


def operands(found: Forward, before: fx.Node) -> tuple[tuple[fx.Node | None, ...], dict[str, float]]:
    """The operator's arguments, tensors and numbers: operands with the leading dimensions of the scores."""
    *leading, rows, columns = found.sizes
    query = shaped(found.query, [*leading, rows, size_of(found.query, -1, before)], before)
    key = transposed(found.key_transposed, before)
    key = shaped(key, [*leading, columns, size_of(found.query, -1, before)], before)
    value = shaped(found.value, [*leading, columns, size_of(found.value, -1, before)], before)
    bias: fx.Node | None = None
    for item in found.biases:
        bias = item if bias is None else call(before, aten.add.Tensor, (bias, item))
    hidden = found.hidden
    if hidden is not None and found.is_shown:
        hidden = call(before, aten.logical_not.default, (hidden,))
    kept = None if found.kept is None else shaped(found.kept, [*leading, rows, columns], before)
    numbers = {
        "scale": found.scale,
        "fill": found.fill,
        "kept_scale": found.kept_scale,
        "upcast": found.upcast,
        "fill_first": found.fill_first,
        "safe": found.safe,
    }
    defaults = {"scale": 1.0, "fill": 0.0, "kept_scale": 1.0, "upcast": False, "fill_first": False, "safe": False}
    given = {name: number for name, number in numbers.items() if number != defaults[name]}
    return (query, key, value, bias, hidden, kept), given


def product_sizes(found: Forward) -> list[object]:
    """The sizes of the product with the value, as arguments for ``view``, of nodes that stay."""
    value, before = found.value, found.value_product
    tensor = value_of(value)
    assert tensor is not None
    batch = [size_of(value, dim, before) for dim in range(tensor.ndim - 2)]
    return [*batch, found.sizes[-2], size_of(value, -1, before)]


def size_of(node: fx.Node, dim: int, before: fx.Node) -> object:
    """A size of a tensor, as an argument: a number, or a node that computes it."""
    value = value_of(node)
    assert value is not None
    size = value.shape[dim]
    return size if isinstance(size, int) else call(before, aten.sym_size.int, (node, dim % value.ndim), value=size)


def shaped(node: fx.Node, sizes: list[object], before: fx.Node) -> fx.Node:
    """A node viewed with these sizes: what it is a view of, where that has them."""
    value = value_of(node)
    assert value is not None
    if len(sizes) == value.ndim:
        return node
    view = call(before, aten.view.default, (node, sizes))
    source = node.args[0] if node.target in (aten.view.default, aten._unsafe_view.default) else None
    if isinstance(source, fx.Node):
        known, wanted = value_of(source), value_of(view)
        if known is not None and wanted is not None and same_sizes(known.shape, wanted.shape):
            view.graph.erase_node(view)
            return source
    return view


def transposed(node: fx.Node, before: fx.Node) -> fx.Node:
    """A matrix, or a batch of them, transposed."""
    value = value_of(node)
    assert value is not None
    order = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    return call(before, aten.permute.default, (node, order))


def put_in_place(product: fx.Node, result: fx.Node, sizes: list[object]) -> None:
    """Lets the users of a product read the operator's result, through a view where they do not view it that way.

    Args:
        product: the product that goes.
        result: the operator's result.
        sizes: the product's, as arguments for ``view``.
    """
    wanted, value = value_of(result), value_of(product)
    assert wanted is not None and value is not None
    views = []
    for user in list(product.users):
        viewed = value_of(user)
        is_view = user.target in (aten.view.default, aten._unsafe_view.default)
        if is_view and viewed is not None and same_sizes(viewed.shape, wanted.shape):
            user.replace_all_uses_with(result)
            views.append(user)
    erase_unused(views)
    if product.users:
        if value.ndim != wanted.ndim:
            result = call(product, aten.view.default, (result, sizes))
        product.replace_all_uses_with(result)


PASS = Pass("joint.attention", "Writes attention that is written out as one operator.", find_attention)
