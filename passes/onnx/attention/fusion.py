"""Replaces such an attention by ONNX's ``Attention``, by head or by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from ...engine.onnx.editing import Builder, MatchError, only_user, operand, permutation, sizes
from .finding import SWAPS_HEADS, Attention, Heads
from .masks import ReadyMask, ready_mask

_SWAP = ir.AttrInt64s("perm", SWAPS_HEADS)


class Fusion:
    """Replaces one attention."""

    def __init__(self, builder: Builder, found: Attention) -> None:
        self._builder = builder
        self._found = found
        self._result = found.result if found.guard is None else found.guard.outputs[0]

    def run(self) -> bool:
        """Whether it was replaced. Raises ``MatchError``."""
        found = self._found
        result = self._by_group() if found.query.length == 1 and found.query.heads > found.key.heads else None
        if result is None:
            ready = ready_mask(self._builder, found.mask, found.query, found.key)
            back = only_user(self._result, "Transpose")
            is_back = back is not None and permutation(back) == SWAPS_HEADS
            inputs = (found.query, found.key, found.value)
            if back is not None and is_back and all(item.by_position is not None for item in inputs):
                result = self._by_position(ready, back.outputs[0])
            else:
                output = self._attention([self._by_head(item) for item in inputs], ready)
                self._with_hidden_rows(output, self._visible(ready))
                result = self._result
        return self._builder.substitute([result])

    def _by_group(self) -> ir.Value | None:
        """For one position, attention on [batch, heads of keys, queries that share them, features]: the kernel reads
        keys and values once for each of its heads. ``None`` if the mask differs between these queries.
        """
        found = self._found
        key, heads, groups = found.key, found.query.heads, found.query.heads // found.key.heads
        query = Heads(None, None, found.query.batch, key.heads, groups, found.query.features)
        try:
            ready = ready_mask(self._builder, found.mask, query, key)
        except MatchError:
            return None
        if ready.is_causal:
            return None
        value = found.query.by_position or found.query.by_head
        assert value is not None
        rows = self._reshaped(value, "grouped", [0, key.heads, groups, query.features])
        output = self._attention([rows, self._by_head(key), self._by_head(found.value)], ready)
        output = self._with_hidden_rows(output, self._visible(ready))
        self._reshaped(output, "heads_of_queries", [0, heads, 1, found.value.features])
        return self._result

    def _by_position(self, ready: ReadyMask, result: ir.Value) -> ir.Value:
        """Attention on [batch, length, heads * features]; returns the value it replaces, ``result`` or its reshape."""
        found = self._found
        query, features = found.query, found.value.features
        inputs = [self._merged(item) for item in (query, found.key, found.value)]
        counts = [ir.AttrInt64("q_num_heads", query.heads), ir.AttrInt64("kv_num_heads", found.key.heads)]
        output = self._attention(inputs, ready, *counts)
        merged = only_user(result, "Reshape")
        together = None if merged is None else merged.outputs[0]
        if ready.visible is None and sizes(together) == [query.batch, query.length, query.heads * features]:
            assert together is not None
            return together
        split = self._reshaped(output, "heads_apart", [0, 0, query.heads, features])
        visible = self._visible(ready)
        self._with_hidden_rows(split, None if visible is None else self._visible_by_position(visible))
        return result

    def _attention(self, inputs: list[ir.Value], ready: ReadyMask, *attributes: ir.Attr) -> ir.Value:
        attributes = (*attributes, ir.AttrFloat32("scale", self._found.scale))
        if ready.is_causal:
            attributes = (*attributes, ir.AttrInt64("is_causal", 1))
        masks = [] if ready.value is None else [ready.value]
        return self._add("Attention", [*inputs, *masks], *attributes)

    def _visible(self, ready: ReadyMask) -> ir.Value | None:
        """Which rows are visible: booleans, or 1 and 0 if hidden rows are multiplied with 0, which keeps NaN."""
        if ready.visible is None or math.isnan(self._found.hidden):
            return ready.visible
        to = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        return self._builder.shared(ready.visible, "Cast", [ready.visible], to)

    def _with_hidden_rows(self, output: ir.Value, visible: ir.Value | None) -> ir.Value:
        """The output, with eager's values in rows that are fully hidden; ``visible`` is from ``_visible``."""
        if visible is None:
            return output
        if math.isnan(self._found.hidden):
            return self._add("Where", [visible, output, self._builder.constant("fill", math.nan)])
        return self._add("Mul", [output, visible])

    def _by_head(self, of: Heads) -> ir.Value:
        if of.by_head is not None:
            return of.by_head
        assert of.by_position is not None
        return self._add("Transpose", [of.by_position], _SWAP)

    def _merged(self, of: Heads) -> ir.Value:
        """[batch, length, heads * features], often an existing value."""
        value, merged = of.by_position, of.heads * of.features
        assert value is not None
        source = operand(value, "Reshape")
        if source is not None and sizes(source) == [of.batch, of.length, merged]:
            return source
        return self._reshaped(value, "heads_together", [0, 0, merged])

    def _visible_by_position(self, visible: ir.Value) -> ir.Value:
        """Transposes [..., heads, length, 1] to [..., length, heads, 1]."""
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
