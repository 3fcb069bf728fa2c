"""Puts ONNX's ``Attention`` where attention is written out, reading and writing by head or by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from ...engine.onnx.editing import Builder, NearMiss, permutation, producer, sizes
from .finding import SWAPS_HEADS, Attention, Heads
from .masks import ReadyMask, ready_mask

_SWAP = ir.AttrInt64s("perm", SWAPS_HEADS)


class Fusion:
    """Puts one operator where an attention is written out."""

    def __init__(self, builder: Builder, found: Attention) -> None:
        self._builder = builder
        self._found = found
        self._fill = math.nan if found.guard is None else 0.0
        self._result = found.result if found.guard is None else found.guard.outputs[0]

    def run(self) -> bool:
        """Whether it did. Raises ``NearMiss``."""
        found = self._found
        result = self._by_group() if found.query.length == 1 and found.query.heads > found.key.heads else None
        if result is None:
            ready = ready_mask(self._builder, found.mask, found.query, found.key)
            back = _only_user(self._result, "Transpose")
            is_back = back is not None and permutation(back) == SWAPS_HEADS
            operands = (found.query, found.key, found.value)
            if back is not None and is_back and all(operand.by_position is not None for operand in operands):
                result = self._by_position(ready, back.outputs[0])
            else:
                output = self._attention([self._by_head(operand) for operand in operands], ready)
                self._shown(output, ready.visible)
                result = self._result
        return self._builder.substitute([result])

    def _by_group(self) -> ir.Value | None:
        """One operator on [batch, heads of keys, queries that share them, features], for one position: the kernel
        reads keys and values once for each of its heads. ``None``: the mask is not one for all of them.
        """
        found = self._found
        key, heads, groups = found.key, found.query.heads, found.query.heads // found.key.heads
        query = Heads(None, None, found.query.batch, key.heads, groups, found.query.features)
        try:
            ready = ready_mask(self._builder, found.mask, query, key)
        except NearMiss:
            return None
        if ready.is_causal:
            return None
        value = found.query.by_position or found.query.by_head
        assert value is not None
        rows = self._reshaped(value, "grouped", [0, key.heads, groups, query.features])
        output = self._attention([rows, self._by_head(key), self._by_head(found.value)], ready)
        output = self._shown(output, ready.visible)
        self._reshaped(output, "heads_of_queries", [0, heads, 1, found.value.features])
        return self._result

    def _by_position(self, ready: ReadyMask, result: ir.Value) -> ir.Value:
        """One operator on [batch, length, heads * features]; what of ``result``, or behind it, that computes."""
        found = self._found
        query, features = found.query, found.value.features
        inputs = [self._together(operand) for operand in (query, found.key, found.value)]
        counts = [ir.AttrInt64("q_num_heads", query.heads), ir.AttrInt64("kv_num_heads", found.key.heads)]
        output = self._attention(inputs, ready, *counts)
        merged = _only_user(result, "Reshape")
        together = None if merged is None else merged.outputs[0]
        if ready.visible is None and sizes(together) == [query.batch, query.length, query.heads * features]:
            assert together is not None
            return together
        apart = self._reshaped(output, "heads_apart", [0, 0, query.heads, features])
        self._shown(apart, None if ready.visible is None else self._visible_by_position(ready.visible))
        return result

    def _attention(self, inputs: list[ir.Value], ready: ReadyMask, *attributes: ir.Attr) -> ir.Value:
        attributes = (*attributes, ir.AttrFloat32("scale", self._found.scale))
        if ready.is_causal:
            attributes = (*attributes, ir.AttrInt64("is_causal", 1))
        masks = [] if ready.value is None else [ready.value]
        return self._add("Attention", [*inputs, *masks], *attributes)

    def _shown(self, output: ir.Value, visible: ir.Value | None) -> ir.Value:
        """The output, with what eager gives in rows that are hidden altogether."""
        if visible is None:
            return output
        return self._add("Where", [visible, output, self._builder.constant("fill", self._fill)])

    def _by_head(self, operand: Heads) -> ir.Value:
        if operand.by_head is not None:
            return operand.by_head
        assert operand.by_position is not None
        return self._add("Transpose", [operand.by_position], _SWAP)

    def _together(self, operand: Heads) -> ir.Value:
        """[batch, length, heads * features], which is often there already."""
        value, merged = operand.by_position, operand.heads * operand.features
        assert value is not None
        reshape = producer(value, "Reshape")
        if reshape is not None and sizes(reshape.inputs[0]) == [operand.batch, operand.length, merged]:
            assert reshape.inputs[0] is not None
            return reshape.inputs[0]
        return self._reshaped(value, "heads_together", [0, 0, merged])

    def _visible_by_position(self, visible: ir.Value) -> ir.Value:
        """[..., length, heads, 1] of [..., heads, length, 1]."""
        shape = sizes(visible)
        assert shape is not None
        if len(shape) == 2:
            return self._add("Unsqueeze", [visible, self._builder.constant("axis_of_heads", [1])])
        order = _SWAP if len(shape) == 4 else ir.AttrInt64s("perm", [1, 0, 2])
        return self._add("Transpose", [visible], order)

    def _reshaped(self, value: ir.Value, what: str, target: list[int]) -> ir.Value:
        return self._add("Reshape", [value, self._builder.constant(what, target)])

    def _add(self, operator: str, inputs: Sequence[ir.Value], *attributes: ir.Attr) -> ir.Value:
        return self._builder.add(self._found.result, operator, inputs, *attributes)


def _only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The node of this operator that alone needs a value."""
    users = value.consumers()
    is_it = len(users) == 1 and not value.is_graph_output() and users[0].op_type == operator
    return users[0] if is_it else None
