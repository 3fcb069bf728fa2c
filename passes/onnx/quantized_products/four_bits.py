"""Rule 4 of ``onnx.quantized_products``: 4-bit weights stored as int8, as by torchao's ``IntxWeightOnlyConfig``."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import onnx_ir as ir

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, is_known, is_weight, operand, permutation, producer, require, sizes
from .operands import FLOAT, INT8, INT32, UINT8, is_plain, to

_BLOCKS = (256, 128, 64, 32, 16)
"""Sizes of the groups of weights that ``MatMulNBits`` has kernels for."""

_LOWEST, _HIGHEST = -8, 7


@dataclasses.dataclass(frozen=True)
class _Groups:
    """``(integers - zero) * scale`` with a scale and zero point for each group of a row.

    Attributes:
        integers: int8, [rows, columns], a weight.
        scale, zero: float32 and int8, of rows * (number of groups in a row) elements; ``zero`` is ``None`` for 0.
        shape: rows, columns, and columns in a group.
        grouped: the shape in which the integers are scaled.
    """

    integers: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    shape: tuple[int, int, int]
    grouped: list[int]


def pack_weights(builder: Builder, context: PassContext, node: ir.Node) -> bool:
    """Replaces a ``MatMul`` or ``Gemm`` with grouped int8 weights by an ``If`` with ``MatMulNBits``, for 4 bits."""
    groups = _groups(node)
    if groups is None:
        return False
    result, bias = node.outputs[0], (*node.inputs, None)[2]
    block = next((size for size in _BLOCKS if groups.shape[2] % size == 0), 0)
    require(is_plain(node), "its alpha or beta is not 1, or it transposes its first operand", 4)
    require(block > 0, f"groups of {groups.shape[2]} weights have no kernel", 4)
    require(bias is None or (bias.shape is not None and len(bias.shape) == 1), "its bias is not a vector", 4)
    weights = groups.integers
    condition = _has_four_bits(builder, weights)
    if groups.zero is not None:
        condition = builder.add(result, "And", [condition, _has_four_bits(builder, groups.zero)])

    def packed() -> None:
        rows, columns, group = groups.shape
        blocks = columns // block
        reshaped = functools.partial(_reshaped, builder, weights)
        integers = reshaped(_packed(builder, weights, weights, rows * columns // 2), [rows, blocks, block // 2])

        def for_blocks(values: ir.Value) -> ir.Value:
            """Values of groups, repeated for each block of a group: [rows, blocks]."""
            if group != block:
                values = reshaped(values, [rows, columns // group, 1])
                repeated = builder.constant("shape", [rows, columns // group, group // block])
                values = builder.add(weights, "Expand", [values, repeated])
            return reshaped(values, [rows, blocks])

        inputs = [node.inputs[0], integers, for_blocks(groups.scale)]
        if groups.zero is not None:
            zeros = builder.add(weights, "Cast", [for_blocks(groups.zero)], to(INT32))
            if blocks % 2:
                zeros = builder.add(weights, "Pad", [zeros, builder.constant("pads", [0, 0, 0, 1])])
            inputs.append(_packed(builder, weights, zeros, rows * ((blocks + 1) // 2)))
        attributes = {"K": columns, "N": rows, "bits": 4, "block_size": block, "accuracy_level": 1}
        numbers = [ir.AttrInt64(name, value) for name, value in attributes.items()]
        product = builder.add(result, "MatMulNBits", inputs, *numbers, domain="com.microsoft")
        if bias is not None:
            builder.add(result, "Add", [product, bias])

    def dequantized() -> None:
        rows, columns, _ = groups.shape
        numbers = builder.add(weights, "Cast", [_reshaped(builder, weights, weights, groups.grouped)], to(FLOAT))
        if groups.zero is not None:
            numbers = builder.add(weights, "Sub", [numbers, builder.add(weights, "Cast", [groups.zero], to(FLOAT))])
        numbers = builder.add(weights, "Mul", [numbers, groups.scale])
        numbers = _reshaped(builder, weights, numbers, [rows, columns])
        if not node.attributes.get_int("transB", 0):
            numbers = builder.add(weights, "Transpose", [numbers], ir.AttrInt64s("perm", [1, 0]))
        builder.add(result, node.op_type, [node.inputs[0], numbers, *node.inputs[2:]], *node.attributes.values())

    builder.choose(result, condition, packed, dequantized, "its weights have more than 4 bits")
    return builder.substitute([result])


def _groups(node: ir.Node) -> _Groups | None:
    """The grouped weights by which a node multiplies float32 numbers, or ``None``."""
    weight = node.inputs[1]
    if not node.attributes.get_int("transB", 0):
        transpose = producer(weight, "Transpose")
        weight = transpose.inputs[0] if transpose is not None and permutation(transpose) == [1, 0] else None
    shape = sizes(weight)
    scaled = producer(operand(weight, "Reshape") or weight, "Mul")
    if scaled is None or shape is None or len(shape) != 2 or scaled.outputs[0].dtype != FLOAT:
        return None
    difference = producer(scaled.inputs[0], "Sub")
    integers = operand(scaled.inputs[0] if difference is None else difference.inputs[0], "Cast")
    zero = None if difference is None else operand(difference.inputs[1], "Cast")
    grouped, scale = sizes(integers), scaled.inputs[1]
    source = operand(integers, "Reshape") or integers
    if source is None or not is_weight(source) or source.dtype != INT8 or grouped is None or sizes(source) != shape:
        return None
    if difference is not None and (zero is None or zero.dtype != INT8 or sizes(zero) != sizes(scale)):
        return None
    if (
        sizes(scale) != [*grouped[:-1], 1]
        or scale is None
        or not all(isinstance(size, int) and size > 0 for size in grouped)
    ):
        return None
    if not is_known(scale, zero):
        return None
    rows, columns, group = int(shape[0]), int(shape[1]), int(grouped[-1])
    return _Groups(source, scale, zero, (rows, columns, group), [*map(int, grouped)]) if columns % group == 0 else None


def _has_four_bits(builder: Builder, integers: ir.Value) -> ir.Value:
    """Whether all numbers are in the range of 4 bits."""
    keeps = ir.AttrInt64("keepdims", 0)
    low, high = (
        builder.add(integers, "Cast", [builder.add(integers, operator, [integers], keeps)], to(INT32))
        for operator in ("ReduceMin", "ReduceMax")
    )
    limits = [builder.constant("limit", np.array(limit, np.int32)) for limit in (_LOWEST, _HIGHEST)]
    ends = [
        builder.add(integers, operator, [value, limit])
        for operator, value, limit in zip(("GreaterOrEqual", "LessOrEqual"), (low, high), limits, strict=True)
    ]
    return builder.add(integers, "And", ends)


def _packed(builder: Builder, of: ir.Value, integers: ir.Value, pairs: int) -> ir.Value:
    """Pairs of numbers plus 8 in bytes, the first in the lower half: uint8 [pairs].

    Computed in uint8 to save memory: ONNX Runtime keeps these tensors of all weights until the session is made.
    """
    ones, eight, four = (builder.constant("bits", np.array(number, np.uint8)) for number in (15, 8, 4))
    low = builder.add(of, "BitwiseAnd", [builder.add(of, "Cast", [integers], to(UINT8)), ones])
    positive = _reshaped(builder, of, builder.add(of, "BitwiseXor", [low, eight]), [pairs, 2])
    first, second = (
        builder.add(of, "Gather", [positive, builder.constant("index", np.array(i, np.int64))], ir.AttrInt64("axis", 1))
        for i in (0, 1)
    )
    shifted = builder.add(of, "BitShift", [second, four], ir.AttrString("direction", "LEFT"))
    return builder.add(of, "BitwiseOr", [first, shifted])


def _reshaped(builder: Builder, of: ir.Value, value: ir.Value, shape: list[int]) -> ir.Value:
    return builder.add(of, "Reshape", [value, builder.constant("shape", shape)])
