"""Lets a matrix product read transposed operands and scale its result.

Rule:

1. ``MatMul`` (as ``FusedMatMul``), ``FusedMatMul`` and ``Gemm`` read the input of a ``Transpose`` of the last two
   dimensions, if all users of the transposed value are such products;
2. ``Mul`` by a constant number, or ``Div`` by a power of two, of a float32 product without other users becomes the
   product's ``alpha``, if it has none.

Before and after (q, k: [B, H, S, D])::

    t = Transpose <perm=[0, 1, 3, 2]> (k)    y = com.microsoft.FusedMatMul <transB=1, alpha=0.125> (q, k)
    s = MatMul(q, t)
    y = Mul(s, 0.125)

Not for a factor of 0 (``0 * inf``) or one that is not finite, nor if the transposed value has other users. ``alpha`` is
float32, so other dtypes keep their ``Mul``. ONNX Runtime does both too, in fewer cases.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    is_only_used_by,
    nodes_of,
    number,
    permutation,
    producer,
    require,
    rewrite_each,
    substitute,
)
from ..engine.registry import Pass

_PRODUCTS = {("", "MatMul"), ("", "Gemm"), ("com.microsoft", "FusedMatMul")}
_FLAGS = ("transA", "transB")


def transposed_products(model: ir.Model, context: PassContext) -> int:
    """Moves transposes and factors into products, in place; returns how many."""
    fired = 0
    for domain, operator in sorted(_PRODUCTS):
        for node in nodes_of(model, operator, domain=domain):
            fired += _transposes(model, context, node)
    factors = nodes_of(model, "Mul", "Div")
    return fired + rewrite_each(context, factors, 2, lambda node: _factor(model, context, node))


def _transposes(model: ir.Model, context: PassContext, node: ir.Node) -> int:
    inputs, flags = list(node.inputs), {}
    for i, flag in enumerate(_FLAGS):
        transpose = producer(inputs[i], "Transpose")
        if transpose is None or not _swaps_last_two(transpose):
            continue
        if not _is_removable(transpose.outputs[0]):
            context.record_near_miss(node, f"{transpose.outputs[0].name} is needed elsewhere", matched=1, of=2)
            continue
        inputs[i] = transpose.inputs[0]
        flags[flag] = 1 - node.attributes.get_int(flag, 0)
    if not flags:
        return 0
    operator, domain = ("Gemm", "") if node.op_type == "Gemm" else ("FusedMatMul", "com.microsoft")
    attributes = {**node.attributes, **{flag: ir.AttrInt64(flag, to) for flag, to in flags.items()}}
    new = ir.Node(domain, operator, inputs, list(attributes.values()))
    return len(flags) if substitute(model, context, node.outputs[:1], [new]) else 0


def _swaps_last_two(transpose: ir.Node) -> bool:
    order = permutation(transpose)
    if order is None or len(order) < 2:
        return False
    last = len(order) - 1
    return order == [*range(last - 1), last, last - 1]


def _is_removable(value: ir.Value) -> bool:
    """Whether all users of a transposed value are products that can read the original."""
    return not value.is_graph_output() and all(
        (user.domain, user.op_type) in _PRODUCTS and (user.op_type != "Gemm" or position < 2)
        for user, position in value.uses()
    )


def _factor(model: ir.Model, context: PassContext, node: ir.Node) -> int:
    found = _product_and_factor(node)
    if found is None:
        return 0
    product, factor = found
    value = product.outputs[0]
    if "alpha" in product.attributes and product.attributes["alpha"].value != 1:
        return 0
    result = node.outputs[0]
    require(ir.DataType.FLOAT in (value.dtype, result.dtype), "alpha is float32, and the product is not", 1)
    require(math.isfinite(factor) and abs(factor) >= 2.0**-126, f"the factor is {factor}", 1)
    require(is_only_used_by(value, node), "the product is used without the factor too", 1)
    attributes = {**product.attributes, "alpha": ir.AttrFloat32("alpha", factor)}.values()
    new = ir.Node("com.microsoft", "FusedMatMul", product.inputs, list(attributes))
    new.metadata_props.update({**product.metadata_props, **node.metadata_props})
    return int(substitute(model, context, [result], [new]))


def _product_and_factor(node: ir.Node) -> tuple[ir.Node, float] | None:
    pairs = [(0, 1), (1, 0)] if node.op_type == "Mul" else [(0, 1)]
    for i, j in pairs:
        product = producer(node.inputs[i], "MatMul") or producer(node.inputs[i], "FusedMatMul", domain="com.microsoft")
        factor = number(node.inputs[j])
        if product is None or factor is None or _rank(node.inputs[j]) > _rank(node.outputs[0]):
            continue
        if node.op_type == "Div":
            if factor == 0 or math.frexp(factor)[0] not in (0.5, -0.5):
                continue
            factor = 1 / factor
        return product, factor
    return None


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)


PASS = Pass(
    "onnx.transposed_products",
    "Lets matrix products read transposed operands and scale their results.",
    transposed_products,
)
