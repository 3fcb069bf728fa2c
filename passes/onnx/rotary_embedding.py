"""Rotates positions into queries and keys by one operator, ONNX's ``RotaryEmbedding`` of opset 23.

Rule: ``x * cos + rotated(x) * sin`` becomes one ``RotaryEmbedding``, where

1. ``rotated(x)`` is ``Concat(-x[..., n / 2:], x[..., :n / 2])``, as in Llama, or the pairs ``(-x[1], x[0], -x[3], x[2],
   ...)``, as in GPT-J (``interleaved``);
2. x has four dimensions, [batch, heads, length, n] or [batch, length, heads, n], with known heads and features, and cos
   and sin are the same for all heads;
3. each number of cos and sin provably stands there twice, for both elements that are rotated together: the operator
   takes it once. ``Concat(f, f)`` shows it, also through elementwise operators and views, or a constant does;
4. features behind the first n, put back by a ``Concat``, go through the operator too (``rotary_embedding_dim``).

Before and after (x: [batch, length, 2 * 8], f: [1, length, 4])::

    q = Transpose <perm=[0, 2, 1, 3]> (Reshape(x, [0, 0, 2, 8]))
    c = Unsqueeze(Cos(Concat(f, f)), 1)
    s = Unsqueeze(Sin(Concat(f, f)), 1)
    r = Concat(Neg(Slice(q, 4, 8)), Slice(q, 0, 4))
    y = Add(Mul(q, c), Mul(r, s))

    h = RotaryEmbedding <num_heads=2> (x, Cos(f), Sin(f))
    y = Transpose <perm=[0, 2, 1, 3]> (Reshape(h, [0, 0, 2, 8]))

``onnx.attention``, which follows, reads ``h`` itself.

It must not fire where the products are needed elsewhere, as the backward of training may, in dtypes other than float32
(eager rounds each product to half precision, the kernel does not), or where the halves of cos and sin may differ.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    constant,
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
from ..engine.registry import Pass

_FIRST_OPSET = 23
_NODES = 4  # sum, two products, the rotated value: what a near miss is counted in
_ELEMENTWISE = ("Cos", "Sin", "Neg", "Identity", "Cast", "Mul", "Add")

_SIZES = list[int | str]


class _NotRotary(Exception):
    """Why a sum of products is no rotary embedding this pass can make one operator of."""


@dataclasses.dataclass(frozen=True)
class _Rotary:
    """One rotary embedding as it is written out.

    Attributes:
        x: [batch, heads, length, features], or with ``by_position`` [batch, length, heads, features].
        rotated: how many of the features are rotated.
        interleaved: whether neighbours are rotated together, rather than halves.
        cos, sin: [batch or 1, length, rotated], or [length, rotated].
        result: like x.
    """

    x: ir.Value
    by_position: bool
    rotated: int
    interleaved: bool
    cos: ir.Value
    sin: ir.Value
    result: ir.Value


def fuse_rotary_embedding(model: ir.Model, context: PassContext) -> int:
    """Replaces written-out rotary embeddings in place; returns how often."""
    fired = 0
    fusion = _Fusion(model, context)
    for node in nodes_of(model, "Add"):
        products = [producer(value, "Mul") for value in node.inputs]
        if None in products or node.graph is not model.graph:
            continue
        parts = _parts(products[0], products[1]) or _parts(products[1], products[0])
        if parts is None:
            continue
        if model.opset_imports.get("", 1) < _FIRST_OPSET:
            reason = f"ONNX has RotaryEmbedding from opset {_FIRST_OPSET} on"
            context.refuse(node, reason, matched=_NODES, of=_NODES)
            continue
        try:
            fired += fusion.run(_find(node, *parts))
        except _NotRotary as no:
            context.refuse(node, str(no), matched=_NODES, of=_NODES)
    fusion.erase_unused()
    return fired


def _parts(straight: ir.Node | None, turned: ir.Node | None) -> tuple[ir.Value, ir.Value, ir.Value, bool] | None:
    """x, cos, sin, and whether neighbours are rotated, of ``x * cos`` and ``rotated(x) * sin``."""
    assert straight is not None and turned is not None
    for i in (0, 1):
        for j in (0, 1):
            x, cos, sin = straight.inputs[i], straight.inputs[1 - i], turned.inputs[1 - j]
            interleaved = _rotation_of(turned.inputs[j], x)
            if interleaved is not None and x is not None and cos is not None and sin is not None:
                return x, cos, sin, interleaved
    return None


def _rotation_of(value: ir.Value | None, x: ir.Value | None) -> bool | None:
    """Whether ``value`` is x with neighbours rotated (``True``) or halves (``False``); ``None`` if neither."""
    shape = sizes(x)
    if x is None or not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    features, rank = shape[-1], len(shape)
    paired = producer(value, "Reshape")
    if paired is not None and sizes(paired.outputs[0]) == shape:
        stacked = producer(paired.inputs[0], "Concat")
        if stacked is None or len(stacked.inputs) != 2 or stacked.attributes.get_int("axis", 0) not in (-1, rank):
            return None
        parts = [producer(item, "Unsqueeze") for item in stacked.inputs]
        if any(part is None or integers(part.inputs[1]) not in ([-1], [rank]) for part in parts):
            return None
        second, first = (None if part is None else part.inputs[0] for part in parts)
        negated = producer(second, "Neg")
        if negated is None:
            return None
        odd, even = _slice_of(negated.inputs[0], x), _slice_of(first, x)
        return True if (odd, even) == ((1, features, 2), (0, features, 2)) else None
    joined = producer(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    negated = producer(joined.inputs[0], "Neg")
    if negated is None:
        return None
    later, earlier = _slice_of(negated.inputs[0], x), _slice_of(joined.inputs[1], x)
    half = features // 2
    return False if (later, earlier) == ((half, features, 1), (0, half, 1)) else None


def _slice_of(value: ir.Value | None, x: ir.Value) -> tuple[int, int, int] | None:
    """Start, end and step along the last dimension, if ``value`` is such a part of x."""
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


def _find(add: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: bool) -> _Rotary:
    """What the sum computes. Raises ``_NotRotary``."""
    for value in add.inputs:
        assert value is not None
        if not is_only_used_by(value, add):
            raise _NotRotary(f"{value.name} is needed elsewhere")
    shape = sizes(x)
    if x.dtype != ir.DataType.FLOAT:
        raise _NotRotary(f"{x.name} is {x.dtype}")
    if shape is None or len(shape) != 4 or sizes(add.outputs[0]) != shape:
        raise _NotRotary(f"{x.name} is {'of unknown shape' if shape is None else shape}, not of four dimensions")
    angles, by_position = [], []
    for value in (cos, sin):
        angle, place = _for_all_heads(value, shape)
        angles.append(angle)
        by_position.append(place)
    if by_position[0] != by_position[1]:
        raise _NotRotary("cos and sin go along different dimensions")
    heads, rotated = shape[2 if by_position[0] else 1], shape[3]
    if not isinstance(heads, int) or not isinstance(rotated, int):
        raise _NotRotary(f"the heads and features of {x.name} are not known: {shape}")
    whole, result = _with_the_rest(add.outputs[0], x, rotated)
    return _Rotary(whole, by_position[0], rotated, interleaved, angles[0], angles[1], result)


def _for_all_heads(angle: ir.Value, shape: _SIZES) -> tuple[ir.Value, bool]:
    """cos or sin without the dimension of heads, and whether x is [batch, length, heads, n]."""
    here = sizes(angle)
    if here is None or len(here) not in (2, 4) or here[-1] != shape[-1]:
        raise _NotRotary(f"{angle.name} is {'of unknown shape' if here is None else here}")
    if len(here) == 2:
        if here[0] != shape[2]:
            raise _NotRotary(f"{angle.name} of {here} is not one for each position")
        return angle, False
    if here[0] not in (1, shape[0]):
        raise _NotRotary(f"{angle.name} of {here} does not fit {shape}")
    by_head = here[1] == 1 and here[2] == shape[2]
    if not by_head and not (here[2] == 1 and here[1] == shape[1]):
        raise _NotRotary(f"{angle.name} of {here} is not the same for all heads of {shape}")
    return angle, not by_head


def _with_the_rest(result: ir.Value, x: ir.Value, rotated: int) -> tuple[ir.Value, ir.Value]:
    """x and the result together with the features that are not rotated, if these are put back behind."""
    users = result.consumers()
    part = producer(x, "Slice", "Split")
    if part is None or part.inputs[0] is None or len(users) != 1 or result.is_graph_output():
        return x, result
    whole, join = part.inputs[0], users[0]
    full = sizes(whole)
    if full is None or join.op_type != "Concat" or len(join.inputs) != 2 or join.inputs[0] is not result:
        return x, result
    ends = _slice_of(x, whole), _slice_of(join.inputs[1], whole)
    if ends != ((0, rotated, 1), (rotated, full[-1], 1)) or join.attributes.get_int("axis", 0) not in (-1, 3):
        return x, result
    return whole, join.outputs[0]


class _Fusion:
    """Puts one operator where a rotary embedding is written out; shares what cos and sin become."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self._context = context
        self._once: dict[tuple[ir.Value, bool], ir.Value] = {}
        self._ready: dict[object, ir.Value] = {}
        self._made: list[ir.Value] = []
        self._new: list[ir.Node] = []

    def run(self, found: _Rotary) -> bool:
        """Whether it did. Raises ``_NotRotary``."""
        shape = sizes(found.x)
        assert shape is not None
        batch = shape[0]
        heads, features = shape[2 if found.by_position else 1], shape[3]
        length = shape[1 if found.by_position else 2]
        assert isinstance(heads, int) and isinstance(features, int)
        angles = [self._angle(value, found, batch, length) for value in (found.cos, found.sin)]
        self._new = []
        inputs = [
            self._for_batch(angle, found.x, batch, what) for angle, what in zip(angles, ("cos", "sin"), strict=True)
        ]
        attributes = [ir.AttrInt64("interleaved", 1)] if found.interleaved else []
        if found.rotated != features:
            attributes.append(ir.AttrInt64("rotary_embedding_dim", found.rotated))
        transpose = producer(found.x, "Transpose")
        swapped = transpose is not None and permutation(transpose) == [0, 2, 1, 3]
        if not found.by_position and not swapped:
            self._add("RotaryEmbedding", [found.x, *inputs], found.result, "rotated", shape, *attributes)
            return substitute(self._model, self._context, [found.result], self._new)
        apart = found.x if found.by_position or transpose is None else transpose.inputs[0]
        assert apart is not None
        together: _SIZES = [batch, length, heads * features]
        x = self._together(apart, together)
        attributes.append(ir.AttrInt64("num_heads", heads))
        turned = self._add("RotaryEmbedding", [x, *inputs], found.result, "rotated", together, *attributes)
        target = self._constant("heads_apart", [0, 0, heads, features])
        value = self._add("Reshape", [turned, target], found.result, "apart", [batch, length, heads, features])
        if not found.by_position:
            self._add("Transpose", [value], found.result, "by_head", shape, ir.AttrInt64s("perm", [0, 2, 1, 3]))
        return substitute(self._model, self._context, [found.result], self._new)

    def erase_unused(self) -> None:
        """Takes back what was made of cos and sin for embeddings that stay as they are."""
        for value in reversed(self._made):
            node = value.producer()
            if node is not None and node.graph is not None and not value.uses():
                node.graph.remove(node, safe=True)

    def _together(self, apart: ir.Value, shape: _SIZES) -> ir.Value:
        """[batch, length, heads * features], which is often there already."""
        reshape = producer(apart, "Reshape")
        if reshape is not None and reshape.inputs[0] is not None and sizes(reshape.inputs[0]) == shape:
            return reshape.inputs[0]
        target = self._constant("heads_together", [0, 0, int(shape[2])])
        return self._add("Reshape", [apart, target], apart, "heads_together", shape)

    def _angle(self, value: ir.Value, found: _Rotary, batch: int | str, length: int | str) -> ir.Value:
        """cos or sin, [batch or 1, length, n / 2]."""
        once = self._half(value, found.interleaved)
        shape = sizes(once)
        assert shape is not None
        squeezed: _SIZES = [shape[0] if len(shape) == 4 else 1, length, shape[-1]]
        before = _before_views(once, squeezed)
        if before is not None:
            return before
        key = (once, "squeezed")
        if key not in self._ready:
            axis = 0 if len(shape) == 2 else 2 if found.by_position else 1
            operator = "Unsqueeze" if len(shape) == 2 else "Squeeze"
            self._ready[key] = self._behind(once, operator, [once, self._constant("axis", [axis])], squeezed)
        return self._ready[key]

    def _for_batch(self, angle: ir.Value, x: ir.Value, batch: int | str, what: str) -> ir.Value:
        """[batch, length, n / 2]."""
        shape = sizes(angle)
        assert shape is not None
        if shape[0] == batch:
            return angle
        full: _SIZES = [batch, *shape[1:]]
        if isinstance(batch, int):
            key = (angle, batch)
            if key not in self._ready:
                self._ready[key] = self._behind(
                    angle, "Expand", [angle, self._constant("batches", [batch, 1, 1])], full
                )
            return self._ready[key]
        first = self._add("Shape", [x], x, f"batch_of_{what}", [1], ir.AttrInt64("start", 0), ir.AttrInt64("end", 1))
        target = self._add(
            "Concat", [first, self._constant("ones", [1, 1])], x, f"sizes_of_{what}", [3], ir.AttrInt64("axis", 0)
        )
        for value in (first, target):
            value.type = ir.TensorType(ir.DataType.INT64)
        return self._add("Expand", [angle, target], x, what, full)

    def _half(self, value: ir.Value, interleaved: bool) -> ir.Value:
        """Of a value whose last dimension holds each number twice, that with each number once."""
        key = (value, interleaved)
        if key not in self._once:
            self._once[key] = self._make_half(value, interleaved)
        return self._once[key]

    def _make_half(self, value: ir.Value, interleaved: bool) -> ir.Value:
        array = constant(value)
        shape = sizes(value)
        if not shape or not isinstance(shape[-1], int) or shape[-1] % 2:
            raise _NotRotary(f"the shape of {value.name} is not known: {shape}")
        half = shape[-1] // 2
        if array is not None:
            first, second = (array[..., ::2], array[..., 1::2]) if interleaved else np.split(array, 2, axis=-1)
            if not np.array_equal(first, second, equal_nan=True):
                raise _NotRotary(f"the two elements rotated together have different numbers in {value.name}")
            return new_constant(self._model, f"{value.name}__once", np.ascontiguousarray(first))
        node = value.producer()
        rank = len(shape)
        once: _SIZES = [*shape[:-1], half]
        doubled = _doubled(value, interleaved)
        if doubled is not None and doubled[1]:
            return self._behind(doubled[0], "Squeeze", [doubled[0], self._constant("axis", [rank])], once)
        if doubled is not None:
            return doubled[0]
        if node is None or node.domain:
            raise _NotRotary(f"{value.name} is not known to hold each number twice")
        if (
            node.op_type == "Unsqueeze"
            and rank - 1 not in (axes := integers(node.inputs[1]) or [-1])
            and -1 not in axes
        ):
            assert node.inputs[0] is not None
            inputs = [self._half(node.inputs[0], interleaved), node.inputs[1]]
            return self._behind(value, "Unsqueeze", inputs, once)
        if node.op_type not in _ELEMENTWISE:
            raise _NotRotary(f"{value.name} is not known to hold each number twice: it is a {node.op_type}")
        parts = []
        for item in node.inputs:
            dims = sizes(item)
            same = number(item) is not None or (dims is not None and (not dims or dims[-1] == 1))
            parts.append(item if same or item is None else self._half(item, interleaved))
        return self._behind(value, node.op_type, parts, once, *node.attributes.values())

    def _behind(
        self, value: ir.Value, operator: str, inputs: list[ir.Value | None], shape: _SIZES, *attributes: ir.Attr
    ) -> ir.Value:
        """A node right behind the one of ``value``, for all embeddings that follow."""
        result = ir.Value(name=f"{value.name}__{operator.lower()}", type=value.type, shape=ir.Shape(shape))
        node = ir.Node("", operator, inputs, attributes, outputs=[result], name=f"node_{result.name}")
        place = value.producer()
        if place is None:
            self._model.graph.insert_before(self._model.graph[0], node)
        else:
            node.metadata_props.update(place.metadata_props)
            assert place.graph is not None
            place.graph.insert_after(place, node)
        self._made.append(result)
        return result

    def _constant(self, name: str, values: list[int]) -> ir.Value:
        key = (name, tuple(values))
        if key not in self._ready:
            self._ready[key] = new_constant(self._model, name, np.array(values, np.int64))
        return self._ready[key]

    def _add(
        self, operator: str, inputs: list[ir.Value], of: ir.Value, what: str, shape: _SIZES, *attributes: ir.Attr
    ) -> ir.Value:
        result = ir.Value(name=f"{of.name}__{what}", type=of.type, shape=ir.Shape(shape))
        self._new.append(ir.Node("", operator, inputs, attributes, outputs=[result]))
        return result


def _doubled(value: ir.Value, interleaved: bool) -> tuple[ir.Value, bool] | None:
    """What ``value`` holds twice: by ``Concat`` with itself, or each number beside itself by ``Expand``.

    And whether that has still a last dimension of size 1.
    """
    shape = sizes(value)
    assert shape is not None
    if not interleaved:
        joined = producer(value, "Concat")
        if joined is None or len(joined.inputs) != 2 or joined.inputs[0] is None:
            return None
        if joined.inputs[0] is not joined.inputs[1] or joined.attributes.get_int("axis", 0) not in (-1, len(shape) - 1):
            return None
        return joined.inputs[0], False
    merged = producer(value, "Reshape")
    expand = None if merged is None else producer(merged.inputs[0], "Expand")
    if expand is None or expand.inputs[0] is None:
        return None
    inner = [*shape[:-1], int(shape[-1]) // 2]
    if sizes(expand.inputs[0]) != [*inner, 1] or sizes(expand.outputs[0]) != [*inner, 2]:
        return None
    before = _before_views(expand.inputs[0], inner)
    return (expand.inputs[0], True) if before is None else (before, False)


def _before_views(value: ir.Value | None, wanted: _SIZES) -> ir.Value | None:
    """``value`` or what it is a view of, whichever has the shape ``wanted``."""
    while value is not None and sizes(value) != wanted:
        node = producer(value, "Reshape", "Squeeze", "Unsqueeze")
        value = None if node is None else node.inputs[0]
    return value


PASS = Pass(
    "onnx.rotary_embedding",
    "Rotates positions into queries and keys by one operator, ONNX's RotaryEmbedding of opset 23.",
    fuse_rotary_embedding,
)
