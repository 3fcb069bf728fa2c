"""The passes of the stage ``onnx``, except attention: each fires on its form only, and keeps the results.

Forms are written in ONNX's text format; ``rewrite`` runs passes on one and compares the results in ONNX Runtime::

    after = rewrite("agraph (float[2,3] x) => (float[2,3] y) { y = Identity(x) }", "onnx.gelu", fires=0)
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, counted
from torch import nn
from torch._dynamo.utils import counters

from dynamo_backends.options import Options
from dynamo_backends.partition.regions import Support
from dynamo_backends.pipeline.pass_target import pass_target
from passes.engine.manager import PassManager, Switches, mark_weight

OPTIONS = Options()
TARGET = pass_target(OPTIONS, Support(OPTIONS.opset, OPTIONS.providers))


def rewrite(
    graph: str, *names: str, fires: int, opset: int = 20, tolerance: float = 1e-6, weights: Collection[str] = ()
) -> ir.Model:
    """Runs the passes, in their order, on a graph; asserts how often the last named one fired and equal results."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n{graph}'
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))
    before = ir.to_proto(model)
    for value in (value for value in model.graph.inputs if value.name in weights):
        mark_weight(value)
    switches = Switches(disable=("*",), enable=("onnx.lift_constants", *names))
    results = PassManager(switches, TARGET).run("onnx", model)
    assert {result.name: result.fired for result in results}[names[-1]] == fires
    assert not any(result.undone for result in results)
    after = ir.to_proto(model)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    for ours, original in zip(results_of(after, before), results_of(before, before), strict=True):
        assert ours.dtype == original.dtype and ours.shape == original.shape
        # float32 by another kernel, a few units in the last place; tests of half precisions and integers give theirs
        relative = tolerance if ours.dtype.kind == "f" else 0
        np.testing.assert_allclose(ours, original, rtol=relative, atol=tolerance)
    return model


def results_of(model: onnx.ModelProto, feeds_of: onnx.ModelProto) -> list[np.ndarray]:
    """What ONNX Runtime computes, not optimized, from random numbers; symbolic sizes are 2."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feeds = {}
    for value in feeds_of.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or 2 for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        limits = np.iinfo(dtype) if np.dtype(dtype).itemsize == 1 and np.dtype(dtype).kind in "iu" else None
        low, high = (0, 2) if limits is None else (limits.min, limits.max + 1)
        numbers = random.standard_normal(shape) if np.dtype(dtype).kind == "f" else random.integers(low, high, shape)
        feeds[value.name] = np.asarray(numbers).astype(dtype)
    return session.run(None, feeds)


def operators(model: ir.Model) -> dict[str, int]:
    return dict(collections.Counter(node.op_type for node in model.graph))


def only(*names: str) -> dict[str, object]:
    """``torch.compile`` with these passes and no other."""
    return {"options": {"passes": {"disable": ["*"], "enable": ["onnx.lift_constants", *names]}}}


# Constants


def test_equal_constants_become_one_initializer() -> None:
    model = rewrite(
        """agraph (float[6] x) => (float[2,3] y, float[2,3] z) {
            a = Constant <value_ints = [2, 3]> ()
            y = Reshape(x, a)
            b = Constant <value_ints = [2, 3]> ()
            c = Relu(x)
            z = Reshape(c, b)
        }""",
        "onnx.lift_constants",
        fires=2,
    )
    assert len(model.graph.initializers) == 1


def test_a_constant_that_is_an_output_stays_a_node() -> None:
    rewrite(
        "agraph (float[2] x) => (float[2] y, int64[2] a) { a = Constant <value_ints = [2, 3]> () y = Relu(x) }",
        "onnx.lift_constants",
        fires=0,
    )


# Products


LINEAR = ("onnx.transposed_products", "onnx.linear")
"""Products of matrices, and the pass that has them read their weights as they lie."""

STATIC = """agraph (float[2,3,4] x, float[6,4] w, float[6] b) => (float[2,3,6] y{outputs}) {{
    flat = Constant <value_ints = [6, 4]> ()
    f = Reshape(x, flat)
    {form}
    full = Constant <value_ints = [2, 3, 6]> ()
    y = Reshape(g, full)
}}"""

LAYERS = {
    "Gemm of a transposed weight": "t = Transpose <perm = [1, 0]> (w) g = Gemm(f, t, b)",
    "Gemm that transposes": "g = Gemm <transB = 1> (f, w, b)",
    "MatMul": "t = Transpose <perm = [1, 0]> (w) g = MatMul(f, t)",
}


@pytest.mark.parametrize("form", LAYERS.values(), ids=LAYERS)
def test_a_linear_layer_is_computed_without_flattening(form: str) -> None:
    model = rewrite(STATIC.format(form=form, outputs=""), *LINEAR, fires=1)
    assert operators(model) == ({"FusedMatMul": 1, "Add": 1} if "Gemm" in form else {"FusedMatMul": 1})


@pytest.mark.parametrize(
    ("form", "outputs"),
    [
        ("t = Transpose <perm = [1, 0]> (w) g = Gemm(f, t, b)", ", float[6,6] g"),
        ("t = Transpose <perm = [1, 0]> (w) g = Gemm <alpha = 0.5> (f, t, b)", ""),
        ("t = Transpose <perm = [1, 0]> (w) c = Expand(b, sizes) g = Gemm(f, t, c)", ""),
        ("u = Transpose <perm = [1, 0]> (f) t = Transpose <perm = [1, 0]> (w) g = Gemm <transA = 1> (u, t, b)", ""),
    ],
    ids=["the matrix is an output", "scaled", "plus a matrix", "of a transposed input"],
)
def test_other_products_of_matrices_stay(form: str, outputs: str) -> None:
    form = "sizes = Constant <value_ints = [6, 6]> () " + form
    rewrite(STATIC.format(form=form, outputs=outputs), "onnx.linear", fires=0)


def test_a_tensor_with_other_last_dimensions_is_given_those_of_the_result() -> None:
    model = rewrite(
        """agraph (float[2,3,2,2] x, float[6,4] w, float[6] b) => (float[2,3,6] y) {
            flat = Constant <value_ints = [6, 4]> () f = Reshape(x, flat)
            t = Transpose <perm = [1, 0]> (w) g = Gemm(f, t, b)
            full = Constant <value_ints = [2, 3, 6]> () v = Reshape(g, full) y = Gelu(v)
        }""",
        *LINEAR,
        fires=1,
    )
    assert operators(model) == {"Reshape": 1, "FusedMatMul": 1, "Add": 1, "Gelu": 1}


@pytest.mark.parametrize(
    ("form", "shape"),
    [("y = Reshape(g, full)", "2,3,2,2"), ("r = Reshape(g, full) y = Relu(r)", "2,3,2,2")],
    ids=["an output", "followed by no sum"],
)
def test_a_bias_is_not_taken_apart_where_that_saves_no_node(form: str, shape: str) -> None:
    rewrite(
        f"""agraph (float[{shape}] x, float[6,4] w, float[6] b) => (float[2,3,6] y) {{
            flat = Constant <value_ints = [6, 4]> () f = Reshape(x, flat)
            t = Transpose <perm = [1, 0]> (w) g = Gemm(f, t, b)
            full = Constant <value_ints = [2, 3, 6]> () {form}
        }}""",
        "onnx.linear",
        fires=0,
    )


@pytest.mark.parametrize(("rows", "fires"), [(64, 1), (256, 0)])
def test_a_bias_is_not_taken_apart_for_many_rows_of_few_columns(rows: int, fires: int) -> None:
    rewrite(
        f"""agraph (float[2,{rows},4] x, float[6,4] w, float[6] b) => (float[2,{rows},6] y) {{
            flat = Constant <value_ints = [{2 * rows}, 4]> () f = Reshape(x, flat)
            t = Transpose <perm = [1, 0]> (w) g = Gemm(f, t, b)
            full = Constant <value_ints = [2, {rows}, 6]> () y = Reshape(g, full)
        }}""",
        "onnx.linear",
        fires=fires,
    )


def test_heads_that_are_split_and_joined_again_are_not_in_the_way() -> None:
    form = """t = Transpose <perm = [1, 0]> (w) p = Gemm(f, t, b)
              heads = Constant <value_ints = [2, 3, 2, 3]> () g = Reshape(p, heads)"""
    model = rewrite(STATIC.format(form=form, outputs=""), *LINEAR, fires=1)
    assert operators(model) == {"FusedMatMul": 1, "Add": 1}


def test_a_matrix_whose_rows_are_not_split_is_no_linear_layer() -> None:
    rewrite(
        """agraph (float[2,3,4] x, float[12,6] w) => (float[2,6] y) {
            flat = Constant <value_ints = [2, 12]> () f = Reshape(x, flat)
            g = MatMul(f, w) full = Constant <value_ints = [2, 6]> () y = Reshape(g, full)
        }""",
        "onnx.linear",
        fires=0,
    )


def test_heads_are_split_off_the_tensor_instead_of_the_matrix() -> None:
    model = rewrite(
        """agraph (float[2,3,4] x, float[6,4] w) => (float[2,3,2,3] y) {
            flat = Constant <value_ints = [6, 4]> () f = Reshape(x, flat)
            t = Transpose <perm = [1, 0]> (w) g = MatMul(f, t)
            heads = Constant <value_ints = [2, 3, 2, 3]> () y = Reshape(g, heads)
        }""",
        *LINEAR,
        fires=1,
    )
    assert operators(model) == {"FusedMatMul": 1, "Reshape": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_linear_layers_of_torch(dtype: torch.dtype, dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False)).to(dtype).eval()
    settings = only("onnx.linear") | {"dynamic": dynamic}
    with torch.no_grad():
        assert_same_as_eager(model, torch.randn(2, 3, 4, dtype=dtype), settings=settings)
    assert counted("pass onnx.linear") == 2
    assert_on_onnx()


def test_products_read_transposed_operands_and_scale() -> None:
    model = rewrite(
        """agraph (float[2,3,4,5] q, float[2,3,4,5] k) => (float[2,3,4,4] y) {
            t = Transpose <perm = [0, 1, 3, 2]> (k) p = MatMul(q, t)
            scale = Constant <value_float = 0.3> () y = Mul(scale, p)
        }""",
        "onnx.transposed_products",
        fires=2,
    )
    assert operators(model) == {"FusedMatMul": 1}


def test_gemm_reads_its_weight_transposed() -> None:
    model = rewrite(
        """agraph (double[3,4] x, double[6,4] w, double[6] b) => (double[3,6] y) {
            t = Transpose <perm = [1, 0]> (w) y = Gemm(x, t, b)
        }""",
        "onnx.transposed_products",
        fires=1,
    )
    assert operators(model) == {"Gemm": 1}


@pytest.mark.parametrize(
    "graph",
    [
        """agraph (float[3,4] x, float[6,4] w) => (float[3,6] y, float[4,6] t) {
            t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)
        }""",
        """agraph (float[2,3,4] x, float[4,2,6] w) => (float[2,3,6] y) {
            t = Transpose <perm = [1, 0, 2]> (w) y = MatMul(x, t)
        }""",
        """agraph (float[3,4] x, float[4,6] w) => (float[3,6] y) {
            p = MatMul(x, w) s = Constant <value_float = 0.0> () y = Mul(p, s)
        }""",
        """agraph (float[3,4] x, float[4,6] w) => (float[3,6] y) {
            p = MatMul(x, w) s = Constant <value_float = 3.0> () y = Div(p, s)
        }""",
        """agraph (double[3,4] x, double[4,6] w) => (double[3,6] y) {
            p = MatMul(x, w) s = Constant <value = double {0.3}> () y = Mul(p, s)
        }""",
        """agraph (float[3,4] x, float[4,6] w) => (float[3,6] y, float[3,6] z) {
            p = MatMul(x, w) s = Constant <value_float = 0.5> () y = Mul(p, s) z = Relu(p)
        }""",
    ],
    ids=["is an output", "other dimensions", "times zero", "divided by three", "float64 factor", "product is used"],
)
def test_transposes_and_factors_that_stay(graph: str) -> None:
    rewrite(graph, "onnx.transposed_products", fires=0)


def test_the_scale_keeps_nan_and_infinities() -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b.transpose(-1, -2)) * 0.125

    a = torch.randn(2, 3, 4)
    a[0, 0, 0], a[1, 1, 1] = torch.inf, torch.nan
    assert_same_as_eager(scaled, a, torch.randn(2, 3, 4), settings=only("onnx.transposed_products"))
    assert counted("pass onnx.transposed_products") == 2


# Normalization


RMS = {
    "as in Llama": "p = Pow(x, two) m = ReduceMean(p, last) a = Add(m, eps) q = Sqrt(a) r = Reciprocal(q) n = Mul(x,r)",
    "other orders": "p = Mul(x, x) m = ReduceMean(p, two_) a = Add(eps, m) q = Sqrt(a) r = Reciprocal(q) n = Mul(r, x)",
    "divided": "p = Mul(x, x) m = ReduceMean(p, last) a = Add(m, eps) q = Sqrt(a) n = Div(x, q)",
}

NORM = """agraph ({dtype}[2,3,4] x, {dtype}[4] w, {dtype}[4] b) => ({dtype}[2,3,4] y{outputs}) {{
    two = Constant <value = {dtype} {{2.0}}> () eps = Constant <value = {dtype} {{0.001}}> ()
    last = Constant <value_ints = [-1]> () two_ = Constant <value_ints = [2]> () middle = Constant <value_ints = [1]> ()
    {form}
}}"""


@pytest.mark.parametrize("end", ["y = Mul(w, n)", "y = Relu(n)"], ids=["weighted", "plain"])
@pytest.mark.parametrize("form", RMS.values(), ids=RMS)
def test_rms_normalization_is_recognized(form: str, end: str) -> None:
    model = rewrite(NORM.format(dtype="float", outputs="", form=f"{form} {end}"), "onnx.layer_norm", fires=1)
    assert operators(model).get("SimplifiedLayerNormalization") == 1
    assert len(model.graph) == 1 + ("Relu" in end)


def test_layer_normalization_is_recognized() -> None:
    form = """mean = ReduceMean(x, last) d = Sub(x, mean) p = Pow(d, two) m = ReduceMean(p, last) a = Add(m, eps)
              q = Sqrt(a) n = Div(d, q) v = Mul(n, w) y = Add(v, b)"""
    model = rewrite(NORM.format(dtype="float", outputs="", form=form), "onnx.layer_norm", fires=1, tolerance=1e-5)
    assert operators(model) == {"LayerNormalization": 1}


@pytest.mark.parametrize(
    ("dtype", "form", "outputs"),
    [
        ("double", RMS["divided"] + " y = Mul(n, w)", ""),
        ("float", RMS["divided"] + " y = Mul(n, w)", ", float[2,3,1] q"),
        ("float", RMS["divided"].replace("last", "middle") + " y = Mul(n, w)", ""),
        ("float", "o = Abs(x) " + RMS["divided"].replace("Mul(x, x)", "Pow(o, three)") + " y = Mul(n, w)", ""),
        ("float", RMS["divided"].replace("Mul(x, x)", "Mul(x, w)") + " y = Mul(n, w)", ""),
    ],
    ids=["float64", "the deviation is an output", "another dimension", "another power", "no square"],
)
def test_other_normalizations_stay_written_out(dtype: str, form: str, outputs: str) -> None:
    form = f"three = Constant <value_float = 3.0> () {form}"
    rewrite(NORM.format(dtype=dtype, outputs=outputs, form=form), "onnx.layer_norm", fires=0)


class RmsNorm(nn.Module):
    """As transformers writes it: computed in float32 whatever the dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rms_normalization_of_torch(dynamic: bool) -> None:
    with torch.no_grad():
        settings = only("onnx.layer_norm") | {"dynamic": dynamic}
        assert_same_as_eager(RmsNorm(8), torch.randn(2, 3, 8) * 5, settings=settings)
    assert counted("pass onnx.layer_norm") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rms_normalization_of_other_dtypes_is_right(dtype: torch.dtype) -> None:
    with torch.no_grad():
        assert_same_as_eager(RmsNorm(8).to(dtype), torch.randn(2, 3, 8, dtype=dtype))


# GELU


GELUS = {
    "exact": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)),
    "exact, by product": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865475)),
    "half last": lambda x: (x * (1.0 + torch.erf(x / 1.4142135623730951))) * 0.5,
    "tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "tanh, factored": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: torch.sigmoid(x) * x,
}
SPECIAL = [0.0, -0.0, torch.inf, torch.nan, 1e-30, -20.0]


@pytest.mark.parametrize("gelu", GELUS.values(), ids=GELUS)
def test_gelu_is_recognized(gelu: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat([torch.randn(2, 506) * 3, torch.tensor(SPECIAL).expand(2, -1)], 1)
    assert_same_as_eager(gelu, x, settings=only("onnx.gelu"))
    assert counted("pass onnx.gelu") == 1


@pytest.mark.parametrize(
    "almost",
    [
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.5)),
        lambda x: x * 0.5 * (1.0 + torch.erf(x.double() / 2**0.5).float()),
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: (x + 1) * torch.sigmoid(x),
    ],
)
def test_what_is_almost_gelu_stays(almost: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert_same_as_eager(almost, torch.randn(2, 64), settings=only("onnx.gelu"))
    assert counted("pass onnx.gelu") == 0


def test_gelu_of_float64_stays_written_out() -> None:
    assert_same_as_eager(GELUS["exact"], torch.randn(2, 64, dtype=torch.float64), settings=only("onnx.gelu"))
    assert counted("pass onnx.gelu") == 0


# All together


class Block(nn.Module):
    """A transformer block without attention, in which all of the passes have something to do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(size), RmsNorm(size)
        self.up, self.down, self.gate = nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        x = x + nn.functional.silu(self.gate(self.rms(x)))
        return self.rms(x) + x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_passes_in_inference(dtype: torch.dtype, dynamic: bool) -> None:
    # float16: four products, rounded elsewhere; float64: RmsNorm computes in float32
    loose = {torch.float16: 2e-2, torch.float64: 1e-5}.get(dtype)
    tolerance = None if loose is None else {"rtol": loose, "atol": loose}
    with torch.no_grad():
        model = Block(16).to(dtype).eval()
        x = torch.randn(2, 5, 16, dtype=dtype)
        assert_same_as_eager(model, x, settings={"dynamic": dynamic}, tolerance=tolerance)
    if dtype is torch.float32:
        assert_on_onnx()
        for name in ("linear", "layer_norm", "gelu"):
            assert counted(f"pass onnx.{name}") > 0, name


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_passes_in_training(dynamic: bool) -> None:
    everything = {"options": {"passes": {"enable": ["onnx.*"]}}, "dynamic": dynamic}
    assert_same_as_eager(Block(16), torch.randn(2, 5, 16, requires_grad=True), calls=2, settings=everything)
    assert any(name.startswith("pass onnx.") for name in counters["dynamo_backends"])
