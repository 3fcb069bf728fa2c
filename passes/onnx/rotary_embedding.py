"""Replaces rotary embeddings written out by one operator, ONNX's ``RotaryEmbedding`` of opset 23.

Rule: ``x * cos + rotated(x) * sin`` becomes one ``RotaryEmbedding``, where

1. ``rotated(x)`` is ``Concat(-x[..., n / 2:], x[..., :n / 2])``, as in Llama, or the pairs ``(-x[1], x[0], -x[3], x[2],
   ...)``, as in GPT-J (``interleaved``);
2. x is [batch, heads, length, n] or [batch, length, heads, n] with known heads and features, and cos and sin are the
   same for all heads;
3. cos and sin provably have equal numbers for the two elements that are rotated together, of which the operator takes
   one: by ``Concat(f, f)``, also through elementwise operators and views, or by a constant;
4. features after the first n, which a ``Concat`` appends again, go through the operator (``rotary_embedding_dim``).

Before and after (x: [batch, length, 2 * 8], f: [1, length, 4])::

    q = Transpose <perm=[0, 2, 1, 3]> (Reshape(x, [0, 0, 2, 8]))
    c = Unsqueeze(Cos(Concat(f, f)), 1)
    s = Unsqueeze(Sin(Concat(f, f)), 1)
    r = Concat(Neg(Slice(q, 4, 8)), Slice(q, 0, 4))
    y = Add(Mul(q, c), Mul(r, s))

    h = RotaryEmbedding <num_heads=2> (x, Cos(f), Sin(f))
    y = Transpose <perm=[0, 2, 1, 3]> (Reshape(h, [0, 0, 2, 8]))

``onnx.attention``, which runs later, reads ``h`` directly.

Not if the products have other users, as in training; nor for other dtypes than float32 (eager rounds each product to
half precision, the kernel does not), or if the halves of cos and sin may differ.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    Builder,
    MatchError,
    constant,
    integers,
    is_only_used_by,
    new_constant,
    nodes_of,
    number,
    only_user,
    operand,
    permutation,
    producer,
    require,
    rewrite_each,
    sizes,
)
from ..engine.registry import Pass

_FIRST_OPSET = 23
_NODES = 4  # for near misses: sum, two products, the rotated value
_ELEMENTWISE = ("Cos", "Sin", "Neg", "Identity", "Cast", "Mul", "Add")

_SIZES = list[int | str]


def fuse_rotary_embedding(model: ir.Model, context: PassContext) -> int:
    """Replaces rotary embeddings in place; returns how often."""
    fusion = _Fusion(model, context)

    def rewrite(node: ir.Node) -> bool:
        products = [producer(value, "Mul") for value in node.inputs]
        if None in products or node.graph is not model.graph:
            return False
        parts = _parts(products[0], products[1]) or _parts(products[1], products[0])
        if parts is None:
            return False
        is_there = model.opset_imports.get("", 1) >= _FIRST_OPSET
        require(is_there, f"RotaryEmbedding needs opset {_FIRST_OPSET}", _NODES)
        return fusion.run(node, *parts)

    fired = rewrite_each(context, nodes_of(model, "Add"), _NODES, rewrite)
    fusion.builder.erase_unused()
    return fired


def _parts(by_cos: ir.Node | None, by_sin: ir.Node | None) -> tuple[ir.Value, ir.Value, ir.Value, bool] | None:
    """x, cos, sin, and whether it is interleaved, of the products ``x * cos`` and ``rotated(x) * sin``."""
    assert by_cos is not None and by_sin is not None
    for i in (0, 1):
        for j in (0, 1):
            x, cos, sin = by_cos.inputs[i], by_cos.inputs[1 - i], by_sin.inputs[1 - j]
            interleaved = _rotation_of(by_sin.inputs[j], x)
            if interleaved is not None and x is not None and cos is not None and sin is not None:
                return x, cos, sin, interleaved
    return None


def _rotation_of(value: ir.Value | None, x: ir.Value | None) -> bool | None:
    """Whether ``value`` is x with rotated pairs (``True``) or halves (``False``); ``None`` if neither."""
    shape = sizes(x)
    if x is None or not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    features, rank = shape[-1], len(shape)
    paired = producer(value, "Reshape")
    are_pairs = paired is not None and sizes(paired.outputs[0]) == shape
    joined = producer(paired.inputs[0] if paired is not None and are_pairs else value, "Concat")
    axes = (-1, rank if are_pairs else rank - 1)
    if joined is None or len(joined.inputs) != 2 or joined.attributes.get_int("axis", 0) not in axes:
        return None
    second, first = joined.inputs
    half = features // 2
    ends = ((half, features, 1), (0, half, 1))
    if are_pairs:
        unsqueezed = [producer(item, "Unsqueeze") for item in joined.inputs]
        if any(part is None or integers(part.inputs[1]) not in ([-1], [rank]) for part in unsqueezed):
            return None
        second, first = (None if part is None else part.inputs[0] for part in unsqueezed)
        ends = ((1, features, 2), (0, features, 2))
    negated = producer(second, "Neg")
    if negated is None or (_slice_of(negated.inputs[0], x), _slice_of(first, x)) != ends:
        return None
    return are_pairs


def _slice_of(value: ir.Value | None, x: ir.Value) -> tuple[int, int, int] | None:
    """Start, end and step along the last dimension, if ``value`` is such a slice of x."""
    shape = sizes(x)
    if not shape or not isinstance(shape[-1], int):
        return None
    size, rank = shape[-1], len(shape)
    node = producer(value, "Slice", "Split")
    if node is None or node.inputs[0] is not x:
        return None
    if node.op_type == "Split":
        parts = [sizes(output) for output in node.outputs]
        if node.attributes.get_int("axis", 0) not in (-1, rank - 1) or None in parts:
            return None
        lengths = [part[-1] if part else 0 for part in parts]
        if value is None or not all(isinstance(length, int) for length in lengths):
            return None
        start = sum(int(length) for length in lengths[: value.index()])
        return start, start + int(lengths[value.index() or 0]), 1
    bounds = [integers(item) for item in node.inputs[1:]]
    if len(bounds) < 3 or any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    start, end, axis, step = [bound[0] for bound in bounds if bound is not None] + [1] * (4 - len(bounds))
    if axis not in (-1, rank - 1) or step < 1:
        return None
    start, end, _ = slice(start, end).indices(size)
    return start, end, step


def _is_by_position(angle: ir.Value, shape: _SIZES) -> bool:
    """Whether x, of this shape, is [batch, length, heads, n], by the shape of cos or sin."""
    here = sizes(angle) or []
    if len(here) == 2 and here == shape[2:]:
        return False
    if len(here) == 4 and here[0] in (1, shape[0]) and here[3] == shape[3]:
        if here[1:3] == [1, shape[2]]:
            return False
        if here[1:3] == [shape[1], 1]:
            return True
    raise MatchError(f"{angle.name} of {here or 'unknown shape'} is not the same for all heads of {shape}", _NODES)


def _with_all_features(result: ir.Value, x: ir.Value, rotated: int | str) -> tuple[ir.Value, ir.Value]:
    """x and the result with the features that are not rotated, if these are appended again; else both unchanged."""
    whole, join = operand(x, "Slice", "Split"), only_user(result, "Concat")
    full = sizes(whole)
    if whole is None or full is None or join is None or len(join.inputs) != 2 or join.inputs[0] is not result:
        return x, result
    ends = _slice_of(x, whole), _slice_of(join.inputs[1], whole)
    if ends != ((0, rotated, 1), (rotated, full[-1], 1)) or join.attributes.get_int("axis", 0) not in (-1, 3):
        return x, result
    return whole, join.outputs[0]


class _Fusion:
    """Replaces rotary embeddings, which share the new cos and sin."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self.builder = Builder(model, context)
        self._halves: dict[tuple[ir.Value, bool], ir.Value] = {}

    def run(self, add: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> bool:
        """Replaces ``add``; returns whether it did. Raises ``MatchError``."""
        for value in add.inputs:
            assert value is not None
            require(is_only_used_by(value, add), f"{value.name} has other users", _NODES)
        shape = sizes(x) or []
        require(x.dtype == ir.DataType.FLOAT, f"{x.name} is {x.dtype}", _NODES)
        is_known = len(shape) == 4 and sizes(add.outputs[0]) == shape
        require(is_known, f"{x.name} is {shape or 'of unknown shape'}, not of four dimensions", _NODES)
        by_position, other = (_is_by_position(value, shape) for value in (cos, sin))
        require(by_position == other, "cos and sin have different layouts", _NODES)
        rotated = shape[3]
        x, result = _with_all_features(add.outputs[0], x, rotated)
        batch, *middle, features = sizes(x) or []
        length, heads = middle if by_position else middle[::-1]
        if not isinstance(heads, int) or not isinstance(features, int) or not isinstance(rotated, int):
            raise MatchError(f"the heads and features of {x.name} are not known: {shape}", _NODES)
        angles = [self._angle(value, interleaved, by_position, length) for value in (cos, sin)]
        inputs = [self._for_batch(angle, x, batch, result) for angle in angles]
        attributes = [ir.AttrInt64("interleaved", 1)] if interleaved else []
        if rotated != features:
            attributes.append(ir.AttrInt64("rotary_embedding_dim", rotated))
        transpose = producer(x, "Transpose")
        swapped = transpose is not None and permutation(transpose) == [0, 2, 1, 3]
        if not by_position and not swapped:
            self.builder.add(result, "RotaryEmbedding", [x, *inputs], *attributes)
            return self.builder.substitute([result])
        source = x if by_position or transpose is None else transpose.inputs[0]
        merged = operand(source, "Reshape")
        if merged is not None and sizes(merged) == [batch, length, heads * features]:
            source = merged
        else:
            source = self.builder.add(
                result, "Reshape", [source, self.builder.constant("heads_together", [0, 0, heads * features])]
            )
        turned = self.builder.add(
            result, "RotaryEmbedding", [source, *inputs], *attributes, ir.AttrInt64("num_heads", heads)
        )
        value = self.builder.add(
            result, "Reshape", [turned, self.builder.constant("heads_apart", [0, 0, heads, features])]
        )
        if not by_position:
            self.builder.add(result, "Transpose", [value], ir.AttrInt64s("perm", [0, 2, 1, 3]))
        return self.builder.substitute([result])

    def _angle(self, value: ir.Value, interleaved: bool, by_position: bool, length: int | str) -> ir.Value:
        """cos or sin, [batch or 1, length, n / 2]."""
        half = self._half(value, interleaved)
        shape = sizes(half)
        assert shape is not None
        before = _before_views(half, [shape[0] if len(shape) == 4 else 1, length, shape[-1]])
        if before is not None:
            return before
        axis = 0 if len(shape) == 2 else 2 if by_position else 1
        operator = "Unsqueeze" if len(shape) == 2 else "Squeeze"
        return self.builder.shared(half, operator, [half, self.builder.constant("axis", [axis])])

    def _for_batch(self, angle: ir.Value, x: ir.Value, batch: int | str, result: ir.Value) -> ir.Value:
        """[batch, length, n / 2]."""
        shape = sizes(angle)
        assert shape is not None
        if shape[0] == batch:
            return angle
        if isinstance(batch, int):
            return self.builder.shared(angle, "Expand", [angle, self.builder.constant("batches", [batch, 1, 1])])
        first = self.builder.add(result, "Shape", [x], ir.AttrInt64("start", 0), ir.AttrInt64("end", 1))
        ones = self.builder.constant("ones", [1, 1])
        target = self.builder.add(result, "Concat", [first, ones], ir.AttrInt64("axis", 0))
        return self.builder.add(result, "Expand", [angle, target])

    def _half(self, value: ir.Value, interleaved: bool) -> ir.Value:
        """A value whose last dimension has each number twice, with each number once."""
        key = (value, interleaved)
        if key not in self._halves:
            self._halves[key] = self._make_half(value, interleaved)
        return self._halves[key]

    def _make_half(self, value: ir.Value, interleaved: bool) -> ir.Value:
        array, shape, node = constant(value), sizes(value), value.producer()
        if not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
            raise MatchError(f"the shape of {value.name} is not known: {shape}", _NODES)
        if array is not None:
            first, second = (array[..., ::2], array[..., 1::2]) if interleaved else np.split(array, 2, axis=-1)
            if not np.array_equal(first, second, equal_nan=True):
                raise MatchError(f"{value.name} has different numbers for elements that are rotated together", _NODES)
            return new_constant(self._model, f"{value.name}__once", np.ascontiguousarray(first))
        last = len(shape) - 1
        doubled = _doubled(value, interleaved)
        if doubled is not None:
            inner, is_apart = doubled
            axis = self.builder.constant("axis", [last + 1])
            return self.builder.shared(inner, "Squeeze", [inner, axis]) if is_apart else inner
        if node is None or node.domain:
            raise MatchError(f"{value.name} is not known to have each number twice", _NODES)
        if node.op_type == "Unsqueeze" and {last, -1}.isdisjoint(integers(node.inputs[1]) or [-1]):
            assert node.inputs[0] is not None
            return self.builder.shared(value, "Unsqueeze", [self._half(node.inputs[0], interleaved), node.inputs[1]])
        if node.op_type not in _ELEMENTWISE:
            raise MatchError(f"{value.name} is not known to have each number twice: it is a {node.op_type}", _NODES)
        parts = [
            item if item is None or _is_same_for_all(item) else self._half(item, interleaved) for item in node.inputs
        ]
        return self.builder.shared(value, node.op_type, parts, *node.attributes.values())


def _is_same_for_all(value: ir.Value) -> bool:
    """Whether a value is one number for all features."""
    shape = sizes(value)
    return number(value) is not None or (shape is not None and shape[-1:] in ([], [1]))


def _doubled(value: ir.Value, interleaved: bool) -> tuple[ir.Value, bool] | None:
    """What ``value`` has twice, by ``Concat`` with itself or by ``Expand`` of each number, and whether that has a last
    dimension of size 1."""
    shape = sizes(value)
    assert shape is not None
    if not interleaved:
        joined, half = producer(value, "Concat"), operand(value, "Concat")
        if joined is None or half is None or list(joined.inputs) != [half, half]:
            return None
        return (half, False) if joined.attributes.get_int("axis", 0) in (-1, len(shape) - 1) else None
    pairs = operand(value, "Reshape")
    single = operand(pairs, "Expand")
    once = [*shape[:-1], int(shape[-1]) // 2]
    if single is None or sizes(single) != [*once, 1] or sizes(pairs) != [*once, 2]:
        return None
    before = _before_views(single, once)
    return (single, True) if before is None else (before, False)


def _before_views(value: ir.Value | None, wanted: _SIZES) -> ir.Value | None:
    """``value`` or the value it is a view of that has the shape ``wanted``, or ``None``."""
    while value is not None and sizes(value) != wanted:
        value = operand(value, "Reshape", "Squeeze", "Unsqueeze")
    return value


PASS = Pass(
    "onnx.rotary_embedding",
    "Replaces rotary embeddings by one operator, ONNX's RotaryEmbedding of opset 23.",
    fuse_rotary_embedding,
)
