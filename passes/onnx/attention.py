"""Computes attention by one operator, ONNX's ``Attention`` of opset 23.

Rule: ``MatMul(Softmax(scores), v)`` with ``scores = MatMul(q, k^T)`` becomes one ``Attention``, where

1. q, k and v have four dimensions, [batch, heads, length, features], and known numbers of heads and features;
2. constant positive numbers that scale q, k or the product become the attribute ``scale``;
3. one mask may be added to the scaled product, or hide scores by a ``Where`` with a very low number;
4. keys and values that ``Expand`` repeats for groups of queries are read unrepeated;
5. where q, k and v are transposed from [batch, length, heads, features] and the result is transposed back, the
   operator does that too: it reads and writes [batch, length, heads * features].

Before and after, for two heads of eight features::

    q = Transpose <perm=[0, 2, 1, 3]> (Reshape(x, [0, 0, 2, 8]))    y = Attention <q_num_heads=2, kv_num_heads=2,
    k = Transpose <perm=[0, 2, 3, 1]> (Reshape(z, [0, 0, 2, 8]))               scale=0.3535> (x, z, w, mask)
    v = Transpose <perm=[0, 2, 1, 3]> (Reshape(w, [0, 0, 2, 8]))
    s = Softmax(Add(Mul(MatMul(q, k), 0.3535), mask))
    y = Reshape(Transpose <perm=[0, 2, 1, 3]> (MatMul(s, v)), [0, 0, 16])

Rows that the mask hides altogether: eager's ``scaled_dot_product_attention`` gives 0 (the translation has a ``Where``
for it), a written-out softmax gives the mean of v for a mask of finite numbers and NaN for one of -inf. ONNX Runtime's
kernel gives 0 for -inf *and for the lowest float32*, the number most masks are made of. So the mask is raised to
-3e38 and a ``Where`` puts 0 or NaN into such rows; neither is done where constants show that there is no such row.

It must not fire

- where the scores or probabilities have other users, as in the forward graphs of training;
- where the mask has no row for each query (one such is expanded if the sizes are known), or two masks are added;
- with fewer heads than threads: the kernel gives each thread whole heads, the separate products share them finer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import torch

from ..context import PassContext
from ..onnx_graph import (
    constant,
    erase_unused,
    integers,
    is_only_used_by,
    new_constant,
    nodes_of,
    number,
    permutation,
    producer,
    sizes,
    substitute,
)
from ..registry import Pass

_FIRST_OPSET = 23
_LOWEST = float(np.finfo(np.float32).min)
_LOW = -3e38
"""Hides a score as well as the lowest float32 does: any score added to it is lost."""

_SWAPS_HEADS = [0, 2, 1, 3]
_SWAPS_LAST = [0, 1, 3, 2]
_NODES = 4  # product, mask or scale, softmax, product: what a near miss is counted in

_STEPS = ("MatMul", "Reshape", "Mul", "Div", "Add", "Where")
"""What lies between the product of q and k and the softmax."""

_SIZES = list[int | str]


class _NotAttention(Exception):
    """Why a product of a softmax is no attention this pass can make one operator of."""

    def __init__(self, reason: str, matched: int) -> None:
        super().__init__(reason)
        self.matched = matched


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Queries, keys or values.

    Attributes:
        by_head: [batch, heads, length, features], if such a value is there.
        by_position: [batch, length, heads, features], if ``by_head`` is its transpose.
    """

    by_head: ir.Value | None
    by_position: ir.Value | None
    batch: int | str
    heads: int
    length: int | str
    features: int


@dataclasses.dataclass(frozen=True)
class _Mask:
    """What is added to the scores, as it stands in the graph.

    Attributes:
        value: the mask, or with ``low`` the condition.
        low: what a ``Where`` puts in place of hidden scores.
        keep: whether the scores are kept where the condition holds, rather than hidden.
    """

    value: ir.Value
    low: float | None = None
    keep: bool = True


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One attention as it is written out."""

    query: _Heads
    key: _Heads
    value: _Heads
    scale: float
    mask: _Mask | None
    guard: ir.Node | None
    """``Where(visible, result, 0)`` around the result."""
    result: ir.Value


def fuse_attention(model: ir.Model, context: PassContext) -> int:
    """Replaces written-out attention in place; returns how often."""
    fired = 0
    masks = _Masks(model, context)
    for node in nodes_of(model, "MatMul"):
        softmax = producer(_batches_apart(node.inputs[0]), "Softmax")
        if softmax is None or node.graph is not model.graph:
            continue
        if model.opset_imports.get("", 1) < _FIRST_OPSET:
            context.refuse(node, f"ONNX has Attention from opset {_FIRST_OPSET} on", matched=_NODES, of=_NODES)
            continue
        try:
            found = _find(node, softmax)
            fired += _Fusion(model, context, masks, found).run()
        except _NotAttention as no:
            context.refuse(node, str(no), matched=no.matched, of=_NODES)
    return fired


def _find(product: ir.Node, softmax: ir.Node) -> _Attention:
    """What the product of a softmax and v computes. Raises ``_NotAttention``."""
    flat = product.inputs[0]
    user = product if flat is None or flat is softmax.outputs[0] else flat.producer()
    assert flat is not None and user is not None
    if not is_only_used_by(flat, product) or not is_only_used_by(softmax.outputs[0], user):
        raise _NotAttention("the probabilities are needed elsewhere", 2)
    axis = softmax.attributes.get_int("axis", -1)
    if axis not in (-1, 3):
        raise _NotAttention(f"the softmax is over dimension {axis}", 2)
    scores, scale, mask = _find_scores(softmax)
    query_value, by_query = _unscaled(_batches_apart(scores.inputs[0]))
    transposed, by_key = _unscaled(_batches_apart(scores.inputs[1]))
    if _dtype(query_value) != ir.DataType.FLOAT:
        raise _NotAttention(f"the scores are {_dtype(query_value)}", 3)
    query = _heads(query_value, "q")
    key, value, by_inner = _keys_and_values(transposed, product.inputs[1], query.heads)
    scale *= by_query * by_key * by_inner
    if not (scale > 0 and math.isfinite(scale)):
        raise _NotAttention(f"the scores are scaled by {scale}", 3)
    if query.features != key.features or key.length != value.length or key.heads != value.heads:
        raise _NotAttention("the sizes of q, k and v do not go together", 3)
    if not query.batch == key.batch == value.batch:
        raise _NotAttention("q, k and v have different batch sizes", 3)
    if query.heads % key.heads:
        raise _NotAttention(f"{query.heads} heads of queries cannot share {key.heads} heads of keys", 3)
    if 0 in (query.batch, query.length, key.length, query.features, value.features):
        raise _NotAttention("there is nothing to attend to", 3)
    least = query.heads * (query.batch if isinstance(query.batch, int) else 1)
    if least < torch.get_num_threads():
        raise _NotAttention(f"{least} heads are fewer than {torch.get_num_threads()} threads", _NODES)
    result: ir.Value = product.outputs[0]
    if flat is not softmax.outputs[0]:
        users = result.consumers()
        if len(users) != 1 or result.is_graph_output() or _batches_apart_by(users[0]) is not result:
            raise _NotAttention("the result is not taken apart into batches and heads", 3)
        result = users[0].outputs[0]
    if sizes(result) not in (None, [query.batch, query.heads, query.length, value.features]):
        raise _NotAttention(f"the result is {sizes(result)}", 3)
    guard, mask = _find_guard(result, mask)
    return _Attention(query, key, value, scale, mask, guard, result)


def _batches_apart(value: ir.Value | None) -> ir.Value | None:
    """[B, H, X, Y] of which ``value`` is the reshape to [B * H, X, Y], as ``torch.matmul`` makes it; else ``value``."""
    node = producer(value, "Reshape")
    if node is None or value is None:
        return value
    before, after = sizes(node.inputs[0]), sizes(value)
    if before is None or after is None or len(before) != 4 or len(after) != 3 or before[2:] != after[1:]:
        return value
    return node.inputs[0]


def _batches_apart_by(node: ir.Node) -> ir.Value | None:
    """[B * H, X, Y] that ``node`` reshapes to [B, H, X, Y]."""
    if node.op_type != "Reshape":
        return None
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after is None or len(before) != 3 or len(after) != 4 or before[1:] != after[2:]:
        return None
    return node.inputs[0]


def _find_scores(softmax: ir.Node) -> tuple[ir.Node, float, _Mask | None]:
    """The product of q and k^T, the number it is scaled by, and the mask."""
    scale, mask = 1.0, None
    user, value = softmax, softmax.inputs[0]
    while True:
        node = producer(value, *_STEPS)
        if value is None or node is None:
            inner = None if value is None else value.producer()
            raise _NotAttention(f"{'a value' if inner is None else inner.op_type} is no product of q and k", 1)
        if not is_only_used_by(value, user):
            raise _NotAttention(f"the scores {value.name} are needed elsewhere", 2)
        user = node
        if node.op_type == "MatMul":
            return node, scale, mask
        if node.op_type == "Reshape":
            value = _batches_apart_by(node)
            if value is None or producer(value, "MatMul") is None:
                raise _NotAttention(f"the scores are reshaped to {sizes(node.outputs[0])}", 2)
            continue
        if node.op_type in ("Mul", "Div"):
            value, factor = _unscaled(value)
            if value is node.outputs[0]:
                raise _NotAttention(f"the scores {node.outputs[0].name} are multiplied by no constant number", 2)
            scale *= factor
            continue
        if scale != 1.0:
            raise _NotAttention("the mask is scaled with the scores", 2)
        if mask is not None:
            raise _NotAttention("two masks are added to the scores", 2)
        value, mask = _unmasked(node)


def _unmasked(node: ir.Node) -> tuple[ir.Value, _Mask]:
    """The scores an ``Add`` or ``Where`` masks, and the mask."""
    inputs = [item for item in node.inputs if item is not None]
    if node.op_type == "Add":
        scores, other = inputs if _leads_to_product(inputs[0]) else reversed(inputs)
        return scores, _Mask(other)
    for scores, other in ((inputs[1], inputs[2]), (inputs[2], inputs[1])):
        low = number(other)
        if low is not None:
            if low > -1e30:
                raise _NotAttention(f"hidden scores are {low}, which a mask cannot add up to", 2)
            return scores, _Mask(inputs[0], low, keep=scores is inputs[1])
    raise _NotAttention("a Where chooses among scores", 2)


def _leads_to_product(value: ir.Value | None, depth: int = 5) -> bool:
    node = producer(value, *_STEPS)
    if node is None or depth == 0:
        return False
    return node.op_type == "MatMul" or any(_leads_to_product(item, depth - 1) for item in node.inputs)


def _raised(mask: ir.Value) -> ir.Value:
    """A mask before it was raised to the lowest finite number, by the translation."""
    node = producer(mask, "Max")
    if node is None or len(node.inputs) != 2 or node.inputs[0] is None:
        return mask
    return node.inputs[0] if number(node.inputs[1]) == _LOWEST else mask


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


def _heads(value: ir.Value | None, what: str) -> _Heads:
    if value is None:
        raise _NotAttention(f"{what} is missing", 3)
    shape = _known_sizes(value)
    if shape is None or len(shape) != 4:
        raise _NotAttention(f"{what} is {'of unknown shape' if shape is None else shape}, not of four dimensions", 3)
    batch, heads, length, features = shape
    if not isinstance(heads, int) or not isinstance(features, int):
        raise _NotAttention(f"the heads and features of {what} are not known: {shape}", 3)
    by_position = next((source for source, order in _transposed_from(value) if order == _SWAPS_HEADS), None)
    return _Heads(value, by_position, batch, heads, length, features)


def _transposed_from(value: ir.Value) -> Iterator[tuple[ir.Value, list[int]]]:
    """The values that ``value`` is a transpose of, nearest first, and how.

    ``Reshape`` to [B * H, X, Y], ``Transpose`` of X and Y, and ``Reshape`` back count as a transpose.
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
                step, inner = _SWAPS_LAST, _batches_apart(inner)
        else:
            turn = producer(_batches_apart_by(node), "Transpose")
            if turn is not None and permutation(turn) == [0, 2, 1]:
                step, inner = _SWAPS_LAST, _batches_apart(turn.inputs[0])
        if inner is None or step is None or len(step) != 4:
            return
        value, order = inner, [step[i] for i in order]
        yield value, order


def _dtype(value: ir.Value) -> ir.DataType | None:
    cast = producer(value, "Cast")
    return value.dtype if cast is None else ir.DataType(cast.attributes.get_int("to"))


def _known_sizes(value: ir.Value) -> _SIZES | None:
    """A value's shape, if need be from before a ``Cast`` inside a translation."""
    node = producer(value, "Cast", "Identity")
    shape = sizes(value)
    if shape is None and node is not None and node.inputs[0] is not None:
        return _known_sizes(node.inputs[0])
    return shape


def _keys_and_values(transposed: ir.Value, values: ir.Value | None, heads: int) -> tuple[_Heads, _Heads, float]:
    """k and v, unrepeated if they are repeated for ``heads`` heads of queries, and the number k is scaled by."""
    sources = list(_transposed_from(transposed))
    keys = next((source for source, order in sources if order == _SWAPS_LAST), None)
    apart = next((source for source, order in sources if order == [0, 2, 3, 1]), None)
    scale = 1.0
    if keys is not None:
        keys, scale = _unscaled(keys)
        fewer_keys, fewer_values = _unrepeated(keys, heads), _unrepeated(values, heads)
        if fewer_keys is not None and fewer_values is not None:
            return _heads(fewer_keys, "k"), _heads(fewer_values, "v"), scale
    value = _heads(_batches_apart(values), "v")
    if keys is not None:
        return _heads(keys, "k"), value, scale
    if apart is None:
        raise _NotAttention(f"{transposed.name} is no transposed k", 2)
    shape = _known_sizes(apart)
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int) or not isinstance(shape[3], int):
        raise _NotAttention(f"the shape of k is not known: {shape}", 3)
    return _Heads(None, apart, shape[0], shape[2], shape[1], shape[3]), value, 1.0


def _unrepeated(value: ir.Value | None, heads: int) -> ir.Value | None:
    """[B, heads / n, L, D] of ``Reshape(Expand([B, heads / n, 1, L, D]))``, which repeats each head n times."""
    value = _batches_apart(value)
    reshape = producer(value, "Reshape")
    expand = None if reshape is None else producer(reshape.inputs[0], "Expand")
    single = None if expand is None else producer(expand.inputs[0], "Unsqueeze", "Reshape")
    if value is None or expand is None or single is None or single.inputs[0] is None:
        return None
    inner = single.inputs[0]
    shape, after, before = _known_sizes(inner), sizes(expand.outputs[0]), sizes(single.outputs[0])
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


def _find_guard(result: ir.Value, mask: _Mask | None) -> tuple[ir.Node | None, _Mask | None]:
    """The ``Where`` around the result that sets rows to 0 which the mask hides altogether, and the mask before the
    translation raised it; without one, ``None`` and the mask as it is."""
    users = result.consumers()
    if mask is None or mask.low is not None or len(users) != 1 or result.is_graph_output():
        return None, mask
    where = users[0]
    if where.op_type != "Where" or where.inputs[1] is not result or number(where.inputs[2]) != 0:
        return None, mask
    always = constant(where.inputs[0])
    if always is not None and always.all():
        return where, mask
    greater = producer(where.inputs[0], "Greater")
    highest = None if greater is None else producer(greater.inputs[0], "ReduceMax")
    if greater is None or highest is None or number(greater.inputs[1]) != -math.inf:
        return None, mask
    seen = _raised(mask.value)
    if highest.inputs[0] is not seen or integers(highest.inputs[1]) != [-1]:
        return None, mask
    return where, _Mask(seen)


@dataclasses.dataclass(frozen=True)
class _ReadyMask:
    """A mask as the operator takes it.

    Attributes:
        value: [S, T] or broadcastable to [B, H, S, T] in the first dimensions; ``None`` with ``is_causal``.
        visible: where the mask lets a row see anything, [..., S, 1]; ``None`` if no row can be hidden altogether.
    """

    value: ir.Value | None
    visible: ir.Value | None = None
    is_causal: bool = False


class _Masks:
    """Makes masks ready, each once for all attentions that use it."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self._context = context
        self._ready: dict[object, _ReadyMask] = {}
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def constant(self, name: str, values: float | list[int]) -> ir.Value:
        """A constant for all attentions: a float32 number or a list of int64."""
        array = np.array(values, np.float32 if isinstance(values, float) else np.int64)
        key = (name, array.tobytes())
        if key not in self._constants:
            self._constants[key] = new_constant(self._model, name, array)
        return self._constants[key]

    def ready(self, mask: _Mask, query: _Heads, key: _Heads) -> _ReadyMask:
        """The mask as the operator takes it for these queries and keys; new nodes go behind the mask's. Raises
        ``_NotAttention``."""
        tag = (mask, query.batch, query.heads, query.length, key.length)
        if tag not in self._ready:
            if mask.low is None and _is_causal(mask.value):
                return _ReadyMask(None, is_causal=True)
            new: list[ir.Node] = []
            try:
                self._ready[tag] = self._make(mask, query, key, new)
            except _NotAttention:
                for node in reversed(new):
                    for i in range(len(node.inputs)):
                        node.replace_input_with(i, None)
                raise
            place = mask.value.producer()
            if place is None:
                self._model.graph.insert_before(self._model.graph[0], new)
            else:
                self._model.graph.insert_after(place, new)
        return self._ready[tag]

    def erase_unused(self) -> None:
        """Takes back masks that were made ready for an attention that stays as it is."""
        for tag, ready in list(self._ready.items()):
            for value in (ready.value, ready.visible):
                if value is not None and value.producer() is not None and not value.uses():
                    del self._ready[tag]
                    erase_unused([ready.value, ready.visible])
                    break

    def _make(self, mask: _Mask, query: _Heads, key: _Heads, new: list[ir.Node]) -> _ReadyMask:
        def add(operator: str, inputs: list[ir.Value], what: str, shape: _SIZES, *attributes: ir.Attr) -> ir.Value:
            result = ir.Value(name=f"{mask.value.name}__{what}", shape=ir.Shape(shape))
            result.type = ir.TensorType(ir.DataType.BOOL if operator == "Greater" else ir.DataType.FLOAT)
            node = ir.Node("", operator, inputs, attributes, outputs=[result], name=f"node_{result.name}")
            origin = mask.value.producer()
            node.metadata_props.update({} if origin is None else origin.metadata_props)
            new.append(node)
            return result

        shape = sizes(mask.value)
        if shape is None or not 1 <= len(shape) <= 4:
            raise _NotAttention(f"the mask is {'of unknown shape' if shape is None else shape}", 3)
        value = mask.value
        if mask.low is not None:
            low = max(mask.low, _LOW) if math.isfinite(mask.low) else -math.inf
            choices = [
                self.constant("zero", 0.0),
                self.constant("low", low),
            ]
            value = add("Where", [value, *(choices if mask.keep else choices[::-1])], "added", shape)
        elif value.dtype != ir.DataType.FLOAT:
            raise _NotAttention(f"the mask is {value.dtype}", 3)
        allowed: list[_SIZES] = [[1, query.batch], [1, query.heads]]
        if any(dim not in fitting for dim, fitting in zip(shape[-4:-2], allowed[4 - len(shape) :], strict=False)):
            raise _NotAttention(f"the mask of {shape} does not fit {query.batch} batches of {query.heads} heads", 3)
        raised, hides = _what_it_hides(value)
        visible = None
        if hides:
            axis = self.constant("last_axis", [-1])
            seen = [*shape[:-1], 1]
            highest = add("ReduceMax", [value, axis], "highest", seen, ir.AttrInt64("keepdims", 1))
            visible = add("Greater", [highest, self.constant("minus_infinity", -math.inf)], "visible", seen)
        if raised:
            value = add("Max", [value, self.constant("low", _LOW)], "raised", shape)
        rows = [query.length, key.length]
        if shape[-2:] != rows:
            if not all(isinstance(size, int) for size in rows) or any(
                dim not in (1, size) for dim, size in zip(shape[::-1], rows[::-1], strict=False)
            ):
                raise _NotAttention(f"the mask of {shape} has no {rows[0]} rows for {rows[1]} keys", 3)
            full = [1] * (len(shape) - 2) + rows
            target = self.constant("mask_sizes", [int(size) for size in full])
            value = add("Expand", [value, target], "expanded", [*shape[:-2], *rows])
        return _ReadyMask(value, visible)


def _what_it_hides(mask: ir.Value) -> tuple[bool, bool]:
    """Whether a mask must be raised for the kernel, and whether it may hide a row altogether by -inf."""
    array = constant(mask)
    if array is not None and array.size and not np.isnan(array).any():
        highest = array.max(axis=-1)
        if (highest > _LOWEST).all():
            return False, False
    bounds = _bounds(mask)
    if bounds is None:
        return True, True
    return bounds[0] <= _LOWEST, bounds[0] == -math.inf


def _bounds(value: ir.Value | None, depth: int = 12) -> tuple[float, float] | None:
    """Numbers between which all elements of a value lie, none of them NaN; ``None`` if that is not known."""
    array = constant(value)
    if array is not None:
        if array.size == 0 or array.dtype.kind not in "fiub" or np.isnan(array.astype(np.float64)).any():
            return None
        return float(array.min()), float(array.max())
    node = None if value is None else value.producer()
    if node is None or node.domain or depth == 0:
        return None
    inputs = list(node.inputs)
    if node.op_type == "Cast" and inputs[0] is not None and inputs[0].dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    if node.op_type in ("Identity", "Cast", "Expand", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Slice"):
        return _bounds(inputs[0], depth - 1)
    if node.op_type not in ("Where", "Concat", "Add", "Sub", "Mul", "Neg"):
        return None
    known = [_bounds(item, depth - 1) for item in inputs[node.op_type == "Where" :]]
    parts = [part for part in known if part is not None]
    if len(parts) != len(known):
        return None
    if node.op_type in ("Where", "Concat"):
        return min(low for low, _ in parts), max(high for _, high in parts)
    if node.op_type == "Neg":
        return -parts[0][1], -parts[0][0]
    operation = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}[node.op_type]
    with np.errstate(all="ignore"):
        corners = [float(operation(np.float32(a), np.float32(b))) for a in parts[0] for b in parts[1]]
    return None if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _is_causal(mask: ir.Value) -> bool:
    """Whether a mask hides the keys behind each query, counted from the first: the translation's ``is_causal``."""
    where = producer(mask, "Where")
    if where is None or number(where.inputs[1]) != -math.inf or number(where.inputs[2]) != 0:
        return False
    greater = producer(where.inputs[0], "Greater")
    if greater is None:
        return False
    columns, rows = (producer(item, "Unsqueeze") for item in greater.inputs)
    if columns is None or rows is None or integers(columns.inputs[1]) != [0] or integers(rows.inputs[1]) != [1]:
        return False
    ranges = [producer(item.inputs[0], "Range") for item in (columns, rows)]
    return all(item is not None and number(item.inputs[0]) == 0 and number(item.inputs[2]) == 1 for item in ranges)


class _Fusion:
    """Puts one operator where an attention is written out."""

    def __init__(self, model: ir.Model, context: PassContext, masks: _Masks, found: _Attention) -> None:
        self._model = model
        self._context = context
        self._masks = masks
        self._found = found
        self._new: list[ir.Node] = []

    def run(self) -> bool:
        """Whether it did."""
        found = self._found
        ready = _ReadyMask(None) if found.mask is None else self._masks.ready(found.mask, found.query, found.key)
        result = found.result if found.guard is None else found.guard.outputs[0]
        fill = math.nan if found.guard is None else 0.0
        back = self._transposed_back(result)
        operands = (found.query, found.key, found.value)
        if back is not None and all(operand.by_position is not None for operand in operands):
            done = self._by_position(ready, back, fill)
        else:
            done = self._by_head(ready, result, fill)
        if not done:
            self._masks.erase_unused()
        return done

    def _transposed_back(self, result: ir.Value) -> ir.Node | None:
        """The one node that reads the result, if that transposes it to [batch, length, heads, features]."""
        users = result.consumers()
        if len(users) != 1 or result.is_graph_output() or users[0].op_type != "Transpose":
            return None
        return users[0] if permutation(users[0]) == _SWAPS_HEADS else None

    def _by_head(self, ready: _ReadyMask, result: ir.Value, fill: float) -> bool:
        """One operator on [batch, heads, length, features]."""
        found = self._found
        shape: _SIZES = [found.query.batch, found.query.heads, found.query.length, found.value.features]
        inputs = [self._value_by_head(operand) for operand in (found.query, found.key, found.value)]
        output = self._attention(inputs, ready, shape)
        if ready.visible is not None:
            self._add("Where", [ready.visible, output, self._masks.constant("fill", fill)], "shown", shape)
        return substitute(self._model, self._context, [result], self._new)

    def _by_position(self, ready: _ReadyMask, back: ir.Node, fill: float) -> bool:
        """One operator on [batch, length, heads * features]."""
        found = self._found
        batch, heads, length, features = (
            found.query.batch,
            found.query.heads,
            found.query.length,
            found.value.features,
        )
        heads_apart: _SIZES = [batch, length, heads, features]
        merged: _SIZES = [batch, length, heads * features]
        inputs = [self._value_by_position(operand) for operand in (found.query, found.key, found.value)]
        counts = [ir.AttrInt64("q_num_heads", heads), ir.AttrInt64("kv_num_heads", found.key.heads)]
        output = self._attention(inputs, ready, merged, *counts)
        result = back.outputs[0]
        together = self._put_together(result, merged)
        if ready.visible is None and together is not None:
            return substitute(self._model, self._context, [together], self._new)
        target = self._masks.constant("heads_apart", [0, 0, heads, features])
        apart = self._add("Reshape", [output, target], "heads_apart", heads_apart)
        if ready.visible is not None:
            visible = self._visible_by_position(ready.visible)
            self._add("Where", [visible, apart, self._masks.constant("fill", fill)], "shown", heads_apart)
        return substitute(self._model, self._context, [result], self._new)

    def _put_together(self, result: ir.Value, merged: _SIZES) -> ir.Value | None:
        """[batch, length, heads * features], if that is all that is made of the result."""
        users = result.consumers()
        if len(users) != 1 or result.is_graph_output() or users[0].op_type != "Reshape":
            return None
        return users[0].outputs[0] if sizes(users[0].outputs[0]) == merged else None

    def _attention(self, inputs: list[ir.Value], ready: _ReadyMask, shape: _SIZES, *attributes: ir.Attr) -> ir.Value:
        attributes = (*attributes, ir.AttrFloat32("scale", self._found.scale))
        if ready.is_causal:
            attributes = (*attributes, ir.AttrInt64("is_causal", 1))
        masks = [] if ready.value is None else [ready.value]
        return self._add("Attention", [*inputs, *masks], "attention", shape, *attributes)

    def _value_by_head(self, operand: _Heads) -> ir.Value:
        if operand.by_head is not None:
            return operand.by_head
        assert operand.by_position is not None
        shape: _SIZES = [operand.batch, operand.heads, operand.length, operand.features]
        order = ir.AttrInt64s("perm", _SWAPS_HEADS)
        return self._add("Transpose", [operand.by_position], "by_head", shape, order, of=operand.by_position)

    def _value_by_position(self, operand: _Heads) -> ir.Value:
        """[batch, length, heads * features], which is often there already."""
        value = operand.by_position
        assert value is not None
        shape: _SIZES = [operand.batch, operand.length, operand.heads * operand.features]
        reshape = producer(value, "Reshape")
        if reshape is not None and reshape.inputs[0] is not None and sizes(reshape.inputs[0]) == shape:
            return reshape.inputs[0]
        target = self._masks.constant("heads_together", [0, 0, operand.heads * operand.features])
        return self._add("Reshape", [value, target], "heads_together", shape, of=value)

    def _visible_by_position(self, visible: ir.Value) -> ir.Value:
        """[..., length, heads, 1] of [..., heads, length, 1]."""
        shape = sizes(visible)
        assert shape is not None
        if len(shape) == 2:
            axes = self._masks.constant("axis_of_heads", [1])
            return self._add("Unsqueeze", [visible, axes], "by_position", [shape[0], 1, 1], of=visible)
        order = _SWAPS_HEADS if len(shape) == 4 else [1, 0, 2]
        swapped = [shape[i] for i in order]
        return self._add("Transpose", [visible], "by_position", swapped, ir.AttrInt64s("perm", order), of=visible)

    def _add(
        self,
        operator: str,
        inputs: list[ir.Value],
        what: str,
        shape: _SIZES,
        *attributes: ir.Attr,
        of: ir.Value | None = None,
    ) -> ir.Value:
        number = f"_{len(self._new)}" if of is not None else ""  # an operand may be that of several attentions
        result = ir.Value(name=f"{self._found.result.name}__{what}{number}", shape=ir.Shape(shape))
        result.type = ir.TensorType(ir.DataType.FLOAT) if of is None or of.type is None else of.type
        self._new.append(ir.Node("", operator, inputs, attributes, outputs=[result]))
        return result


PASS = Pass("onnx.attention", "Computes attention by one operator, ONNX's Attention of opset 23.", fuse_attention)
