"""Writes attention that ``forms.py`` found as one operator: its operands, and what reads its result."""

from __future__ import annotations

import torch
from torch import fx

from ...engine.fx.editing import call, is_row_major, same_sizes, value_of
from .forms import Forward

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def softmaxes(module: fx.GraphModule) -> list[fx.Node]:
    """All softmaxes of a graph, those that are 0 where all scores are -inf included."""
    targets = (aten._softmax.default, aten._safe_softmax.default)
    return [node for target in targets for node in module.graph.find_nodes(op="call_function", target=target)]


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
    source = node.args[0] if node.target in _RESHAPES else None
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


def places_of(product: fx.Node, result: fx.Node, sizes: list[object]) -> list[tuple[fx.Node, fx.Node]]:
    """What must be replaced, and by what, so that the users of a product read the operator's result.

    Views of the product that have the result's shape are the result; other users read it viewed as the product was.

    Args:
        product: the product that goes.
        result: the operator's result.
        sizes: the product's, as arguments for ``view``.

    Raises:
        NotComputable: the result cannot be viewed that way.
    """
    wanted, value = value_of(result), value_of(product)
    assert wanted is not None and value is not None
    users = list(product.users)
    if not is_row_major(wanted) and is_row_major(value):
        result = call(product, aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
    views = [user for user in users if user.target in _RESHAPES and _has_shape(user, wanted)]
    pairs = [(view, result) for view in views]
    if len(views) < len(users):
        same = value.ndim == wanted.ndim
        pairs.append((product, result if same else call(product, aten.view.default, (result, sizes))))
    return pairs


def _has_shape(node: fx.Node, wanted: torch.Tensor) -> bool:
    value = value_of(node)
    return value is not None and same_sizes(value.shape, wanted.shape)
