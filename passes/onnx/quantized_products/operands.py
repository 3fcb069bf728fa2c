"""Finds quantized operands of products, and converts them to uint8."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, constant, number, operand, permutation, producer

INT8, UINT8, INT32, FLOAT = ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.FLOAT
_VIEWS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
SHIFT = 128
"""From int8 to uint8."""

_MOST_TERMS = (2**31 - 1) // 255**2
"""Terms of a sum that never exceeds int32."""


def to(dtype: ir.DataType) -> ir.Attr:
    return ir.AttrInt64("to", dtype)


@dataclasses.dataclass(frozen=True)
class Operand:
    """``(integers - zero) * scale``, after views.

    Attributes:
        integers: int8 or uint8.
        scale: float32, a scalar or a vector.
        zero: the zero point, of the dtype of the integers and the shape of the scale; ``None`` is 0.
        axis: the dimension that has one scale for each index, after the views; ``None`` for a single scale.
        views: nodes between the ``DequantizeLinear`` and the operand, in execution order.
    """

    integers: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    axis: int | None = None
    views: tuple[ir.Node, ...] = ()


def operand_of(value: ir.Value | None) -> Operand | None:
    """How a float32 value was dequantized, or ``None`` if it was not."""
    if value is None:
        return None
    source, views = source_and_views(value)
    node = producer(source, "DequantizeLinear")
    if node is None or node.attributes.get_int("block_size", 0) or value.dtype != FLOAT:
        return None
    integers, scale, zero = (*node.inputs, None)[:3]
    if integers is None or scale is None or integers.dtype not in (INT8, UINT8) or scale.shape is None:
        return None
    if integers.shape is None or len(scale.shape) > 1:
        return None
    axis = None if len(scale.shape) == 0 else node.attributes.get_int("axis", 1) % len(integers.shape)
    for view in views if axis is not None else ():
        order = permutation(view) if view.op_type == "Transpose" else None
        if order is None or axis is None:
            return None
        axis = order.index(axis)
    return Operand(integers, scale, zero, axis, views)


def is_ordinary(scale: ir.Value) -> bool:
    """Whether a scale is far from overflow and underflow; true for one that is not a constant."""
    known = constant(scale)
    return known is None or bool(((abs(known) > 1e-12) & (abs(known) < 1e12)).all())


def source_and_views(value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The tensor of which a value is a view, and the nodes between, in execution order."""
    view = producer(value, *_VIEWS)
    if view is None or view.inputs[0] is None:
        return value, ()
    source, views = source_and_views(view.inputs[0])
    return source, (*views, view)


def is_plain(node: ir.Node) -> bool:
    """Whether a ``MatMul`` or ``Gemm`` has no factors and does not transpose its first operand."""
    usual = {"alpha": 1, "beta": 1, "transA": 0}
    return all(item.value == usual.get(item.name, item.value) for item in node.attributes.values())


def fits(terms: object, times: int = 1) -> bool:
    """Whether ``times`` times a sum of ``terms`` products of 8-bit integers fits in int32."""
    return isinstance(terms, int) and terms * times <= _MOST_TERMS


def with_views(builder: Builder, of: ir.Value, integers: ir.Value, views: Sequence[ir.Node]) -> ir.Value:
    """The views on integers; new nodes named after a value."""
    for view in views:
        integers = builder.add(of, view.op_type, [integers, *view.inputs[1:]], *view.attributes.values())
    return integers


def unsigned(builder: Builder, integers: ir.Value, zero: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """The same numbers as uint8, before views, and their zero point."""
    if integers.dtype == UINT8:
        return integers, zero or builder.constant("zero_point", np.array(0, np.uint8))
    return _unsigned_integers(builder, integers), _unsigned_zero(builder, zero)


def _unsigned_zero(builder: Builder, zero: ir.Value | None) -> ir.Value:
    known = np.int8(0) if zero is None else constant(zero)
    if known is None:
        assert zero is not None
        return _shifted(builder, zero)
    return builder.constant("zero_point", (np.asarray(known, np.int32) + SHIFT).astype(np.uint8))


def _unsigned_integers(builder: Builder, integers: ir.Value) -> ir.Value:
    """The same integers as uint8: by ``QuantizeLinear`` to uint8 if one computes them, else by flipping the sign bit.

    A quantization that the model writes out is not replaced by ``QuantizeLinear``, which was not faster (a Llama, 1 and
    128 tokens).
    """
    quantize = producer(integers, "QuantizeLinear")
    if quantize is not None:
        factor, zero = quantize.inputs[1], (*quantize.inputs, None)[2]
        inputs = [quantize.inputs[0], factor, _unsigned_zero(builder, zero)]
        return builder.shared(integers, "QuantizeLinear", inputs, *quantize.attributes.values())
    was_unsigned = _before_signed(integers)
    if was_unsigned is not None:
        return was_unsigned
    return _shifted(builder, integers)


def _shifted(builder: Builder, integers: ir.Value) -> ir.Value:
    """int8 plus 128, as uint8, by flipping the sign bit."""
    bits = builder.shared(integers, "Cast", [integers], to(UINT8))
    return builder.shared(bits, "BitwiseXor", [bits, builder.constant("sign", np.array(SHIFT, np.uint8))])


def signed(builder: Builder, of: ir.Value, integers: ir.Value) -> ir.Value:
    """Numbers of uint8 minus 128, as int8; new nodes named after a value."""
    bits = builder.add(of, "BitwiseXor", [integers, builder.constant("sign", np.array(SHIFT, np.uint8))])
    return builder.add(of, "Cast", [bits], to(INT8))


def _before_signed(integers: ir.Value) -> ir.Value | None:
    """The numbers of uint8 from which ``signed`` made int8, or ``None``."""
    bits = operand(integers, "Cast")
    source = operand(bits, "BitwiseXor") if number(operand(bits, "BitwiseXor", index=1)) == SHIFT else None
    return source if source is not None and source.dtype == UINT8 else None


def second_operand(
    builder: Builder, context: PassContext, integers: ir.Value, zero: ir.Value | None
) -> tuple[ir.Value, ir.Value | None]:
    """The second operand of a product with uint8, and its zero point: int8 if this is exact on the processor."""
    if integers.dtype == INT8 and context.target.multiplies_mixed_signs():
        return integers, zero
    return unsigned(builder, integers, zero)
