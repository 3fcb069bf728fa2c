"""Passes for quantized models: integer kernels compute what the dequantized numbers do, and nothing else."""

from __future__ import annotations

import collections

import onnx_ir as ir
import pytest
from test_onnx_passes import rewrite

from passes.engine.onnx.editing import producer

PASS = "onnx.quantized_products"
CONVOLUTIONS = "onnx.quantized_convolutions"
A_STEP = 1
"""Of a quantized result: rounding before a tie may decide."""


def operators(model: ir.Model) -> dict[str, int]:
    """Of the graph and its subgraphs."""
    return dict(collections.Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)))


@pytest.mark.parametrize("zeros", ["", ", zero", ", zero, zero"])
def test_products_of_int8_become_unsigned(zeros: str) -> None:
    model = rewrite(
        f"""agraph (int8[5,300] a, int8[300,7] b) => (int32[5,7] y)
        <int8 zero = {{3}}> {{ y = MatMulInteger(a, b{zeros}) }}""",
        PASS,
        fires=1,
    )
    [product] = [node for node in model.graph if node.op_type == "MatMulInteger"]
    assert product.inputs[0] is not None and product.inputs[0].dtype == ir.DataType.UINT8


@pytest.mark.parametrize("rounding", ["Round(s)", "Identity(s)"])
def test_a_written_out_quantization_is_made_unsigned_once(rounding: str) -> None:
    """For two products. A ``Cast`` without rounding truncates."""
    model = rewrite(
        """agraph (float[4,64] x, int8[64,8] w) => (int32[4,8] y, int32[4,8] z)
        <float low = {-128.0}, float high = {127.0}, float scale = {40.5}, int64[2] rows = {4, 64}> {
            s = Mul(x, scale)
            r = ROUNDING
            c = Clip(r, low, high)
            q = Cast <to = 3> (c)
            v = Reshape(q, rows)
            y = MatMulInteger(v, w)
            z = MatMulInteger(v, w)
        }""".replace("ROUNDING", rounding),
        PASS,
        fires=2,
    )
    products = [node for node in model.graph if node.op_type == "MatMulInteger"]
    assert len({producer(producer(node.inputs[0], "Reshape").inputs[0], "BitwiseXor") for node in products}) == 1


def test_other_bits_are_no_sign() -> None:
    rewrite(
        """agraph (int32[4,64] x, int8[64,8] w) => (int32[4,8] y) <int32 sign = {128}> {
            b = BitwiseXor(x, sign)
            q = Cast <to = 3> (b)
            y = MatMulInteger(q, w)
        }""",
        PASS,
        fires=1,
    )


def quantized_product(product: str, weight: str = "int8[6,64] w", scales: str = "float[6] s", more: str = "") -> str:
    return f"""agraph (uint8[5,64] x, {weight}, {scales}, float[6] b) => (float[5,6] y)
        <float sx = {{0.02}}, uint8 zx = {{119}}{more}> {{
            d = DequantizeLinear(x, sx, zx)
            v = DequantizeLinear <axis = 0> (w, s)
            {product}
        }}"""


@pytest.mark.parametrize(
    "product",
    [
        "y = Gemm <transB = 1> (d, v, b)",
        "y = Gemm <transB = 1> (d, v)",
        "t = Transpose <perm = [1, 0]> (v) y = MatMul(d, t)",
        "t = Transpose <perm = [1, 0]> (v) m = MatMul(d, t) y = Add(m, b)",
    ],
)
def test_products_of_dequantized_operands(product: str) -> None:
    assert operators(rewrite(quantized_product(product), PASS, fires=1, tolerance=2e-4))["MatMulIntegerToFloat"] == 1


@pytest.mark.parametrize(
    ("product", "weight", "scales"),
    [
        ("y = Gemm <transB = 1, alpha = 0.5> (d, v, b)", "int8[6,64] w", "float[6] s"),
        ("one = ReduceMax <keepdims = 0> (b) y = Gemm <transB = 1> (d, v, one)", "int8[6,64] w", "float[6] s"),
        ("y = Gemm <transB = 1> (d, v, d2) d2 = Mul(b, b)", "int8[6,64] w", "float[64] s"),  # scales of the sum
    ],
)
def test_other_products_stay(product: str, weight: str, scales: str) -> None:
    graph = quantized_product(product, weight, scales)
    if "d2" in product:
        graph = graph.replace("axis = 0", "axis = 1").replace(", d2) d2 = Mul(b, b)", ")")
    rewrite(graph, PASS, fires=0)


def test_long_sums_of_integers_stay() -> None:
    rewrite(
        """agraph (uint8[1,33026] x, int8[33026,2] w) => (float[1,2] y) <float s = {0.01}> {
            d = DequantizeLinear(x, s)
            v = DequantizeLinear(w, s)
            y = MatMul(d, v)
        }""",
        PASS,
        fires=0,
    )


CONVOLUTION = """agraph (uint8[2,3,8,8] x, int8[4,3,3,3] w) => (DTYPE[2,4,6,6] y)
    <float sx = {0.02}, uint8 zx = {119}, float[4] s = {SCALES}, int8[4] zw = {ZEROS},
     float[4] b = {0.5, -1.0, 0.01, 2.0}, float sy = {0.1}, DTYPE zy = {ZERO}, float low = {-1.0}, float high = {3.0}> {
        d = DequantizeLinear(x, sx, zx)
        v = DequantizeLinear <axis = 0> (w, s, zw)
        c = Conv(d, v, b)
        a = ACTIVATION
        y = QuantizeLinear(a, sy, zy)
    }"""


@pytest.mark.parametrize("activation", ["Identity(c)", "Relu(c)", "Clip(c, low, high)", "Clip(c, , high)"])
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", "0"), ("uint8", "100"), ("int8", "-5")])
@pytest.mark.parametrize(
    ("scales", "zeros"),
    [
        ("0.01, 0.02, 0.03, 0.005", "0, 0, 0, 0"),
        ("0.01, 0.02, 0.03, 0.005", "2, 2, 2, 2"),
        ("0.01, 0.02, 0.03, 0.005", "1, 2, 3, -4"),  # QLinearConv would fail
        ("10.0, 0.02, 0.03, 0.005", "0, 0, 0, 0"),  # a bias in multiples of 0.2
        ("0.0, 0.02, 0.03, 1e-20", "0, 0, 0, 0"),
    ],
)
def test_convolutions(activation: str, dtype: str, zero: str, scales: str, zeros: str) -> None:
    graph = CONVOLUTION.replace("DTYPE", dtype).replace("ZEROS", zeros).replace("ZERO", zero)
    graph = graph.replace("SCALES", scales).replace("ACTIVATION", activation)
    fires = 0 if activation == "Identity(c)" else 1
    if fires == 0:
        graph, fires = graph.replace("a = Identity(c)", "").replace("(a, sy", "(c, sy"), 1
    assert operators(rewrite(graph, CONVOLUTIONS, fires=fires, tolerance=A_STEP))["QLinearConv"] == 1


def test_a_convolution_that_is_used_unquantized_stays() -> None:
    graph = CONVOLUTION.replace("DTYPE", "uint8").replace("ZEROS", "0, 0, 0, 0").replace("ZERO", "0")
    graph = graph.replace("SCALES", "0.01, 0.01, 0.01, 0.01").replace("ACTIVATION", "Relu(c)")
    rewrite(graph.replace("[2,4,6,6] y)", "[2,4,6,6] y, float[2,4,6,6] a)"), CONVOLUTIONS, fires=0)


def test_the_largest_of_numbers_with_a_negative_scale_is_no_largest_integer() -> None:
    rewrite(
        """agraph (uint8[2,3,8,8] x) => (uint8[2,3,4,4] y) <float s = {-0.02}, uint8 z = {11}> {
            a = DequantizeLinear(x, s, z)
            b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
            y = QuantizeLinear(b, s, z)
        }""",
        PASS,
        fires=0,
    )


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_moved_numbers_are_not_dequantized(dtype: str) -> None:
    model = rewrite(
        f"""agraph ({dtype}[2,3,8,8] x) => ({dtype}[2,48] y)
        <float s = {{0.02}}, {dtype} z = {{11}}, int64[2] shape = {{2, 48}}> {{
            a = DequantizeLinear(x, s, z)
            b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
            c = QuantizeLinear(b, s, z)
            d = DequantizeLinear(c, s, z)
            e = Reshape(d, shape)
            f = QuantizeLinear(e, s, z)
            g = DequantizeLinear(f, s, z)
            y = QuantizeLinear(g, s, z)
        }}""",
        PASS,
        fires=3,
    )
    assert operators(model) == {"MaxPool": 1, "Reshape": 1}


def test_another_step_is_quantized_again() -> None:
    rewrite(
        """agraph (uint8[4,6] x) => (uint8[4,6] y) <float s = {0.02}, float t = {0.03}, uint8 z = {11}> {
            a = DequantizeLinear(x, s, z)
            y = QuantizeLinear(a, t, z)
        }""",
        PASS,
        fires=0,
    )


def test_a_value_in_a_loop_is_made_unsigned_there() -> None:
    rewrite(
        """agraph (int8[3,5,64] a, int8[64,7] b) => (int32[3,5,7] y) {
            y = Scan <num_scan_inputs = 1, body = body (int8[5,64] c) => (int32[5,7] z) { z = MatMulInteger(c, b) }> (a)
        }""",
        PASS,
        fires=1,
    )


def test_both_passes_change_the_users_of_a_value() -> None:
    """A product and a convolution of one tensor."""
    rewrite(
        """agraph (float[2,3,8,8] x, int8[4,3,3,3] w, int8[8,6] v) => (int8[2,4,6,6] y, float[2,3,8,6] u)
        <float sx = {0.02}, int8 zx = {3}, float s = {0.005}, int8 z = {0}, float sy = {0.1}, int8 zy = {0}> {
            q = QuantizeLinear(x, sx, zx)
            d = DequantizeLinear(q, sx, zx)
            n = DequantizeLinear(w, s, z)
            m = DequantizeLinear(v, s, z)
            u = MatMul(d, m)
            c = Conv(d, n)
            y = QuantizeLinear(c, sy, zy)
        }""",
        PASS,
        CONVOLUTIONS,
        fires=1,
        tolerance=A_STEP,
    )


def test_a_convolution_that_is_quantized_to_16_bits_stays() -> None:
    graph = CONVOLUTION.replace("DTYPE", "int16").replace("ZEROS", "0, 0, 0, 0").replace("ZERO", "-5")
    graph = graph.replace("SCALES", "0.01, 0.02, 0.03, 0.005").replace("ACTIVATION", "Relu(c)")
    rewrite(graph, CONVOLUTIONS, fires=0, opset=21)


FOUR_BITS = """agraph (float[5,64] x, int8[8,64] w, SCALES) => (float[5,8] y)
    <int64[3] grouped = {8, 2, 32}, int64[2] shape = {8, 64}> {
        q = Reshape(w, grouped)
        c = Cast <to = 1> (q)
        STEPS
        m = Mul(c, s)
        v = Reshape(m, shape)
        t = Transpose <perm = [1, 0]> (v)
        y = MatMul(x, t)
    }"""


@pytest.mark.parametrize(
    ("scales", "steps", "fires"),
    [
        ("float[8,2,1] s", "", 1),
        ("float[8,2,2] p", "o, s = Split <axis = 2, num_outputs = 2> (p)", 1),
        ("float[8,2,1] s0", " ".join(f"s{i + 1} = Max(s{i}, s{i})" for i in range(40)) + " s = Max(s40, s40)", 1),
        ("float[8,2,1] call", "s = Abs(call)", 0),
    ],
)
def test_weights_of_four_bits(scales: str, steps: str, fires: int) -> None:
    """Random numbers have 8 bits, so the second branch runs. A scale of each call would be packed in each call."""
    graph = FOUR_BITS.replace("SCALES", scales).replace("STEPS", steps)
    weights = {"w", scales.split()[-1]} - {"call"}
    found = operators(rewrite(graph, PASS, fires=fires, tolerance=1e-3, weights=weights))
    assert found.get("MatMulNBits", 0) == fires
