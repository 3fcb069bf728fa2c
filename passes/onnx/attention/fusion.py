"""Puts ONNX's ``Attention`` where attention is written out, reading and writing by head or by position."""

from __future__ import annotations

import math

import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import permutation, producer, sizes, substitute
from .finding import Attention, Heads, NotAttention
from .masks import Masks, ReadyMask

_SWAPS_HEADS = [0, 2, 1, 3]
_SIZES = list[int | str]


class Fusion:
    """Puts one operator where an attention is written out."""

    def __init__(self, model: ir.Model, context: PassContext, masks: Masks, found: Attention) -> None:
        self._model = model
        self._context = context
        self._masks = masks
        self._found = found
        self._new: list[ir.Node] = []

    def run(self) -> bool:
        """Whether it did."""
        found = self._found
        if found.query.length == 1 and found.query.heads > found.key.heads:
            done = self._by_group()
            if done is not None:
                return done
        ready = ReadyMask(None) if found.mask is None else self._masks.ready(found.mask, found.query, found.key)
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

    def _by_group(self) -> bool | None:
        """One operator on [batch, heads of keys, queries that share them, features], for one position: the kernel
        reads keys and values once for each of its heads. ``None``: the mask is not one for all of them.
        """
        found = self._found
        key, heads, groups = found.key, found.query.heads, found.query.heads // found.key.heads
        query = Heads(None, None, found.query.batch, key.heads, groups, found.query.features)
        try:
            ready = ReadyMask(None) if found.mask is None else self._masks.ready(found.mask, query, key)
        except NotAttention:
            return None
        if ready.is_causal:
            return None
        value = found.query.by_position or found.query.by_head
        assert value is not None
        target = self._masks.constant("heads_grouped", [0, key.heads, groups, query.features])
        rows = self._add("Reshape", [value, target], "grouped", [query.batch, key.heads, groups, query.features])
        shape: _SIZES = [query.batch, key.heads, groups, found.value.features]
        output = self._attention([rows, self._value_by_head(key), self._value_by_head(found.value)], ready, shape)
        if ready.visible is not None:
            fill = math.nan if found.guard is None else 0.0
            output = self._add("Where", [ready.visible, output, self._masks.constant("fill", fill)], "shown", shape)
        apart = self._masks.constant("heads_of_queries", [0, heads, 1, found.value.features])
        self._add("Reshape", [output, apart], "apart", [query.batch, heads, 1, found.value.features])
        result = found.result if found.guard is None else found.guard.outputs[0]
        done = substitute(self._model, self._context, [result], self._new)
        if not done:
            self._masks.erase_unused()
        return done

    def _transposed_back(self, result: ir.Value) -> ir.Node | None:
        """The one node that reads the result, if that transposes it to [batch, length, heads, features]."""
        users = result.consumers()
        if len(users) != 1 or result.is_graph_output() or users[0].op_type != "Transpose":
            return None
        return users[0] if permutation(users[0]) == _SWAPS_HEADS else None

    def _by_head(self, ready: ReadyMask, result: ir.Value, fill: float) -> bool:
        """One operator on [batch, heads, length, features]."""
        found = self._found
        shape: _SIZES = [found.query.batch, found.query.heads, found.query.length, found.value.features]
        inputs = [self._value_by_head(operand) for operand in (found.query, found.key, found.value)]
        output = self._attention(inputs, ready, shape)
        if ready.visible is not None:
            self._add("Where", [ready.visible, output, self._masks.constant("fill", fill)], "shown", shape)
        return substitute(self._model, self._context, [result], self._new)

    def _by_position(self, ready: ReadyMask, back: ir.Node, fill: float) -> bool:
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

    def _attention(self, inputs: list[ir.Value], ready: ReadyMask, shape: _SIZES, *attributes: ir.Attr) -> ir.Value:
        attributes = (*attributes, ir.AttrFloat32("scale", self._found.scale))
        if ready.is_causal:
            attributes = (*attributes, ir.AttrInt64("is_causal", 1))
        masks = [] if ready.value is None else [ready.value]
        return self._add("Attention", [*inputs, *masks], "attention", shape, *attributes)

    def _value_by_head(self, operand: Heads) -> ir.Value:
        if operand.by_head is not None:
            return operand.by_head
        assert operand.by_position is not None
        shape: _SIZES = [operand.batch, operand.heads, operand.length, operand.features]
        order = ir.AttrInt64s("perm", _SWAPS_HEADS)
        return self._add("Transpose", [operand.by_position], "by_head", shape, order, of=operand.by_position)

    def _value_by_position(self, operand: Heads) -> ir.Value:
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
