"""Finds attention that is written out in an ONNX graph: its operands, scale, mask and guard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ...engine.onnx.editing import (
    MatchError,
    constant,
    integers,
    is_only_used_by,
    number,
    only_user,
    operand,
    permutation,
    producer,
    require,
    sizes,
)
from ...engine.onnx.inference import dims_of

LOWEST = float(np.finfo(np.float32).min)
SWAPS_HEADS = [0, 2, 1, 3]
_SWAPS_LAST = [0, 1, 3, 2]
NODES = 4
"""Nodes of an attention, for near misses: product, mask or scale, softmax, product."""
_STEPS = ("MatMul", "Reshape", "Mul", "Div", "Add", "Where")
"""Operators from the product of q and k to the softmax."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Queries, keys or values.

    Attributes:
        by_head: [batch, heads, length, features], if there is such a value.
        by_position: [batch, length, heads, features], if ``by_head`` is its transpose.
    """

    by_head: ir.Value | None
    by_position: ir.Value | None
    batch: int | str
    heads: int
    length: int | str
    features: int


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask that is added to the scores, or with ``low`` the condition of a ``Where``.

    Attributes:
        value: the mask or condition.
        low: the number that replaces hidden scores.
        keep: whether scores are kept where the condition holds, rather than hidden.
    """

    value: ir.Value
    low: float | None = None
    keep: bool = True


@dataclasses.dataclass(frozen=True)
class Attention:
    """The parts of an attention that is written out."""

    query: Heads
    key: Heads
    value: Heads
    scale: float
    mask: Mask | None
    guard: ir.Node | None
    """``Mul(result, Cast(visible))`` around the result."""
    hidden: float
    """The result in rows that are fully hidden, 0 or NaN."""
    result: ir.Value


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """A softmax of scores.

    Attributes:
        value: the result, with zeros in rows that are -inf if it is a ``_safe_softmax``.
        softmax: the node.
        reductions: in a ``_safe_softmax``, the nodes that read the scores, too.
    """

    value: ir.Value
    softmax: ir.Node
    reductions: tuple[ir.Node, ...] = ()


def find_probabilities(value: ir.Value | None) -> Probabilities | None:
    """The softmax that a value is, or a ``_safe_softmax``: ``Where(visible rows of the scores, softmax, 0)``; ``None``
    if it is neither."""
    softmax = producer(value, "Softmax")
    if value is not None and softmax is not None:
        return Probabilities(value, softmax)
    chosen = producer(value, "Where")
    if value is None or chosen is None or number(chosen.inputs[2]) != 0.0:
        return None
    softmax = producer(chosen.inputs[1], "Softmax")
    reductions = reductions_of_visible_rows(chosen.inputs[0])
    if softmax is None or not reductions or reductions[0].inputs[0] is not softmax.inputs[0]:
        return None
    return Probabilities(value, softmax, reductions)


def reductions_of_visible_rows(value: ir.Value | None) -> tuple[ir.Node, ...]:
    """The ``ReduceMax`` and ``ReduceSum`` of a tensor if a value says which of its rows have an element other than
    -inf, else ``()``::

    Not(And(Equal(ReduceMax(x), -inf), Equal(ReduceSum(x), -inf)))
    """
    both = producer(operand(value, "Not"), "And")
    if both is None:
        return ()
    found = []
    for side, operator in zip(both.inputs, ("ReduceMax", "ReduceSum"), strict=True):
        reduction = producer(operand(side, "Equal"), operator)
        if reduction is None or number(operand(side, "Equal", index=1)) != -math.inf:
            return ()
        if integers(reduction.inputs[1]) not in ([-1], [3]) or not reduction.attributes.get_int("keepdims", 1):
            return ()
        found.append(reduction)
    return tuple(found) if found[0].inputs[0] is found[1].inputs[0] else ()


def find_attention(product: ir.Node, probabilities: Probabilities, threads: int) -> Attention:
    """The attention that ends in the product of a softmax and v. Raises ``MatchError``."""
    flat, softmax = product.inputs[0], probabilities.softmax
    user = product if flat is None or flat is probabilities.value else flat.producer()
    assert flat is not None and user is not None
    is_private = is_only_used_by(flat, product) and is_only_used_by(probabilities.value, user)
    if probabilities.reductions:
        is_private = is_private and len(softmax.outputs[0].uses()) == 1
    require(is_private, "the probabilities have other users", 2)
    axis = softmax.attributes.get_int("axis", -1)
    require(axis in (-1, 3), f"the softmax is over dimension {axis}, not the last", 2)
    groups = merged_groups(flat.producer())
    scores, scale, mask = _find_scores(softmax, groups, probabilities.reductions)
    query_value, query_factor = _unscaled(_query_of(scores, groups))
    transposed, key_factor = _unscaled(unmerged_batches(scores.inputs[1]))
    require(query_value.dtype == ir.DataType.FLOAT, f"q is {query_value.dtype}, not FLOAT", 3)
    query = _heads(query_value, "q")
    key, value, inner_factor = _keys_and_values(transposed, product.inputs[1], query.heads)
    scale *= query_factor * key_factor * inner_factor
    require(scale > 0 and math.isfinite(scale), f"the scores are scaled by {scale}", 3)
    is_one_length = key.length == value.length or isinstance(key.length, str) or isinstance(value.length, str)
    fit = query.features == key.features and is_one_length and key.heads == value.heads
    require(fit, "the sizes of q, k and v do not fit", 3)
    require(query.batch == key.batch == value.batch, "q, k and v have different batch sizes", 3)
    shared = query.heads % key.heads == 0
    require(shared, f"{query.heads} heads of queries cannot share {key.heads} heads of keys", 3)
    is_empty = 0 in (query.batch, query.length, key.length, query.features, value.features)
    require(not is_empty, "a size is 0", 3)
    least = query.heads * (query.batch if isinstance(query.batch, int) else 1)
    require(least >= threads, f"{least} heads are fewer than {threads} threads", NODES)
    result: ir.Value = product.outputs[0]
    if flat is not probabilities.value:
        split = only_user(result, "Reshape")
        if split is None or not (_split_groups(split) == groups > 1 or _batches_split_by(split) is result):
            raise MatchError("the result is not split into batches and heads", 3)
        result = split.outputs[0]
    is_known = sizes(result) in (None, [query.batch, query.heads, query.length, value.features])
    require(is_known, f"the result is {sizes(result)}", 3)
    guard, mask = _find_guard(result, mask)
    hidden = math.nan if guard is None and not probabilities.reductions else 0.0
    return Attention(query, key, value, scale, mask, guard, hidden, result)


def merged_groups(node: ir.Node | None) -> int:
    """Heads of queries per head of keys, if a node reshapes [B, H, S, X] to [B, K, H / K * S, X]; else 1."""
    return 1 if node is None or node.op_type != "Reshape" else _groups(node.outputs[0], node.inputs[0])


def _groups(few: ir.Value | None, many: ir.Value | None) -> int:
    shapes = [[] if value is None or value.shape is None else dims_of(value.shape) for value in (few, many)]
    if any(len(shape) != 4 or None in (shape[0], shape[3]) for shape in shapes):
        return 1
    (batch, fewer, _, features), (other_batch, more, _, other_features) = shapes
    if (batch, features) != (other_batch, other_features) or not isinstance(fewer, int) or not isinstance(more, int):
        return 1
    return 1 if fewer == 0 or more % fewer else more // fewer


def _split_groups(node: ir.Node) -> int:
    """As ``merged_groups``, for the reverse reshape."""
    return 1 if node.op_type != "Reshape" else _groups(node.inputs[0], node.outputs[0])


def _query_of(scores: ir.Node, groups: int) -> ir.Value | None:
    """The query of a product with k, before batches and heads, or groups of heads, are merged."""
    if groups == 1:
        return unmerged_batches(scores.inputs[0])
    rows = producer(scores.inputs[0], "Reshape")
    if rows is None or merged_groups(rows) != groups:
        raise MatchError("the heads of q are not merged as those of the probabilities", 3)
    return rows.inputs[0]


def unmerged_batches(value: ir.Value | None) -> ir.Value | None:
    """[B, H, X, Y] if ``value`` is its reshape to [B * H, X, Y], as in ``torch.matmul``; else ``value``."""
    source = operand(value, "Reshape")
    return source if _are_merged(source, value) else value


def _batches_split_by(node: ir.Node) -> ir.Value | None:
    """[B * H, X, Y] that ``node`` reshapes to [B, H, X, Y]."""
    is_apart = node.op_type == "Reshape" and _are_merged(node.outputs[0], node.inputs[0])
    return node.inputs[0] if is_apart else None


def _are_merged(split: ir.Value | None, merged: ir.Value | None) -> bool:
    four, three = sizes(split) or [], sizes(merged) or []
    return len(four) == 4 and len(three) == 3 and four[2:] == three[1:]


def _find_scores(softmax: ir.Node, groups: int, reductions: tuple[ir.Node, ...]) -> tuple[ir.Node, float, Mask | None]:
    """The product of q and k^T, the scale, and the mask.

    Args:
        softmax: of the scores.
        groups: heads of queries per head of keys, if they are rows of one product and split later; else 1.
        reductions: other nodes that may read the scores.
    """
    is_split = groups == 1
    scale, mask = 1.0, None
    user, value = softmax, softmax.inputs[0]
    while True:
        node = producer(value, *_STEPS)
        if value is None or node is None:
            source = None if value is None else value.producer()
            raise MatchError(f"{'a value' if source is None else source.op_type} is no product of q and k", 1)
        is_private = is_only_used_by(value, user, *reductions)
        require(is_private, f"the scores {value.name} have other users", 2)
        user = node
        if node.op_type == "MatMul":
            require(is_split, "the heads of the scores are not split", 2)
            return node, scale, mask
        if node.op_type == "Reshape" and not is_split and _split_groups(node) == groups:
            value, is_split = node.inputs[0], True
            continue
        if node.op_type == "Reshape":
            value = _batches_split_by(node)
            if value is None or producer(value, "MatMul") is None:
                raise MatchError(f"the scores are reshaped to {sizes(node.outputs[0])}", 2)
            continue
        if node.op_type in ("Mul", "Div"):
            value, factor = _unscaled(value)
            is_scaled = value is not node.outputs[0]
            require(is_scaled, f"the scores {node.outputs[0].name} are not scaled by a constant number", 2)
            scale *= factor
            continue
        require(scale == 1.0, "the mask is scaled with the scores", 2)
        require(groups == 1 or not is_split, "a mask is added to the scores before the heads are split", 2)
        require(mask is None, "two masks are added to the scores", 2)
        value, mask = _unmasked(node)


def _unmasked(node: ir.Node) -> tuple[ir.Value, Mask]:
    """The scores that an ``Add`` or ``Where`` masks, and the mask."""
    inputs = [item for item in node.inputs if item is not None]
    if node.op_type == "Add":
        scores, other = inputs if _leads_to_product(inputs[0]) else reversed(inputs)
        return scores, Mask(other)
    for scores, other in ((inputs[1], inputs[2]), (inputs[2], inputs[1])):
        low = number(other)
        if low is not None:
            if low > -1e30:
                raise MatchError(f"hidden scores are {low}, which no mask can express", 2)
            return scores, Mask(inputs[0], low, keep=scores is inputs[1])
    raise MatchError("a Where chooses among scores", 2)


def _leads_to_product(value: ir.Value | None, depth: int = 5) -> bool:
    node = producer(value, *_STEPS)
    if node is None or depth == 0:
        return False
    return node.op_type == "MatMul" or any(_leads_to_product(item, depth - 1) for item in node.inputs)


def _unscaled(value: ir.Value | None) -> tuple[ir.Value, float]:
    """A value without the constant number it is multiplied by, and that number."""
    assert value is not None
    node = producer(value, "Mul", "Div")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return value, 1.0
    first, second = node.inputs[0], node.inputs[1]
    factor = number(second)
    if factor is not None:
        return first, factor if node.op_type == "Mul" else 1 / factor if factor else math.inf
    factor = number(first)
    if factor is not None and node.op_type == "Mul":
        return second, factor
    return value, 1.0


def _heads(value: ir.Value | None, what: str) -> Heads:
    if value is None:
        raise MatchError(f"{what} is missing", 3)
    shape = sizes(value)
    if shape is None or len(shape) != 4:
        raise MatchError(f"{what} is {'of unknown shape' if shape is None else shape}, not of four dimensions", 3)
    batch, heads, length, features = shape
    if not isinstance(heads, int) or not isinstance(features, int):
        raise MatchError(f"the heads and features of {what} are not known: {shape}", 3)
    by_position = next((source for source, order in _transposed_from(value) if order == SWAPS_HEADS), None)
    return Heads(value, by_position, batch, heads, length, features)


def _transposed_from(value: ir.Value) -> Iterator[tuple[ir.Value, list[int]]]:
    """The values that ``value`` is a transpose of, nearest first, with the permutations.

    ``Reshape`` to [B * H, X, Y], ``Transpose`` of X and Y, and ``Reshape`` back are one transpose.
    """
    order = [0, 1, 2, 3]
    while True:
        node = producer(value, "Transpose", "Reshape")
        if node is None:
            return
        step: list[int] | None = None
        inner: ir.Value | None = None
        if node.op_type == "Transpose":
            step, inner = permutation(node), node.inputs[0]
            if step == [0, 2, 1]:
                step, inner = _SWAPS_LAST, unmerged_batches(inner)
        else:
            turn = producer(_batches_split_by(node), "Transpose")
            if turn is not None and permutation(turn) == [0, 2, 1]:
                step, inner = _SWAPS_LAST, unmerged_batches(turn.inputs[0])
        if inner is None or step is None or len(step) != 4:
            return
        value, order = inner, [step[i] for i in order]
        yield value, order


def _keys_and_values(transposed: ir.Value, values: ir.Value | None, heads: int) -> tuple[Heads, Heads, float]:
    """k and v, without their repetition for ``heads`` heads of queries, and the scale of k."""
    sources = list(_transposed_from(transposed))
    keys = next((source for source, order in sources if order == _SWAPS_LAST), None)
    by_position = next((source for source, order in sources if order == [0, 2, 3, 1]), None)
    scale = 1.0
    if keys is not None:
        keys, scale = _unscaled(keys)
        fewer_keys, fewer_values = _unrepeated(keys, heads), _unrepeated(values, heads)
        if fewer_keys is not None and fewer_values is not None:
            return _heads(fewer_keys, "k"), _heads(fewer_values, "v"), scale
    value = _heads(unmerged_batches(values), "v")
    if keys is not None:
        return _heads(keys, "k"), value, scale
    if by_position is None:
        raise MatchError(f"{transposed.name} is no transposed k", 2)
    shape = sizes(by_position)
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or not isinstance(shape[3], int):
        raise MatchError(f"the shape of k is not known: {shape}", 3)
    return Heads(None, by_position, shape[0], shape[2], shape[1], shape[3]), value, 1.0


def _unrepeated(value: ir.Value | None, heads: int) -> ir.Value | None:
    """[B, heads / n, L, D] if ``value`` is ``Reshape(Expand([B, heads / n, 1, L, D]))``, n times each head."""
    value = unmerged_batches(value)
    expanded = operand(value, "Reshape")
    single = operand(expanded, "Expand")
    inner = operand(single, "Unsqueeze", "Reshape")
    shape, before, after = sizes(inner), sizes(single), sizes(expanded)
    if shape is None or len(shape) != 4 or after is None or len(after) != 5:
        return None
    batch, fewer, length, features = shape
    repeats = after[2]
    if not isinstance(fewer, int) or not isinstance(repeats, int) or fewer * repeats != heads:
        return None
    if before != [batch, fewer, 1, length, features] or after != [batch, fewer, repeats, length, features]:
        return None
    result = sizes(value)
    is_flat = result is not None and len(result) == 3 and result[1:] == [length, features]
    return inner if is_flat or result == [batch, heads, length, features] else None


def _find_guard(result: ir.Value, mask: Mask | None) -> tuple[ir.Node | None, Mask | None]:
    """The ``Mul`` that makes fully hidden rows of the result 0, and the mask before the translation raised it; else
    ``None`` and the same mask."""
    factor = only_user(result, "Mul")
    if mask is None or mask.low is not None or factor is None or factor.inputs[0] is not result:
        return None, mask
    always = constant(factor.inputs[1])
    if always is not None and (always == 1).all():
        return factor, mask
    original = operand(mask.value, "Max")
    if original is None or number(operand(mask.value, "Max", index=1)) != LOWEST:
        original = mask.value
    reductions = reductions_of_visible_rows(operand(factor.inputs[1], "Cast"))
    return (factor, Mask(original)) if reductions and reductions[0].inputs[0] is original else (None, mask)
