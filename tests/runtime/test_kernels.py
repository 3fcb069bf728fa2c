"""Kernels with known faults do not run, whether a converter, a pass or a function wrote the node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from onnxscript import opset18 as op

from dynamo_backends import SessionError
from dynamo_backends.errors import KernelFaultError
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.pipeline import product_kernels as kernels
from dynamo_backends.pipeline.product_kernels import product_kernels
from dynamo_backends.runtime import kernel_faults
from dynamo_backends.runtime.integer_kernels import PRODUCTS
from dynamo_backends.runtime.kernel_faults import fault_in, reason_against_model
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings
from passes import Pass, PassContext, register, unregister
from passes.engine.choices import OTHERWISE
from passes.engine.onnx.inference import infer_types

aten = torch.ops.aten
CPU = ("CPUExecutionProvider",)
LOSES_SUMS = "ScatterND with a reduction"


def model_of(text: str) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 18, "local" : 1, "com.microsoft" : 1]>\n{text}')


SIGNATURE = "g (float[4] d, int64[3,1] i, float[3] u) => (float[4] y)"
RACING = {
    "add": SIGNATURE + ' { y = ScatterND<reduction="add">(d, i, u) }',
    "mul": SIGNATURE + ' { y = ScatterND<reduction="mul">(d, i, u) }',
    "in a branch": """g (float[4] d, int64[3,1] i, float[3] u, bool c) => (float[4] y) {
        y = If(c) <then_branch = t () => (float[4] a) { a = ScatterND<reduction="max">(d, i, u) },
                   else_branch = e () => (float[4] b) { b = Identity(d) }>
    }""",
    "in a function": SIGNATURE
    + """ { y = local.add(d, i, u) }
    <domain: "local", opset_import: ["" : 18]>
    add (d, i, u) => (y) { y = ScatterND<reduction="add">(d, i, u) }""",
    "as the caller says": SIGNATURE
    + """ { y = local.add<how="add">(d, i, u) }
    <domain: "local", opset_import: ["" : 18]>
    add <how> (d, i, u) => (y) { y = ScatterND<reduction: string = @how>(d, i, u) }""",
}


@pytest.mark.parametrize("text", RACING.values(), ids=RACING)
def test_a_model_with_a_racing_kernel_is_not_run(text: str) -> None:
    with pytest.raises(KernelFaultError, match=LOSES_SUMS):
        Session(model_of(text), SessionSettings(CPU))
    assert LOSES_SUMS in str(reason_against_model(model_of(text), CPU))


def test_a_logarithm_of_sums_that_underflows_is_not_run() -> None:
    text = "g (float[2,2] x) => (float[2,1] y) { a = Constant<value_ints=[1]>() y = ReduceLogSumExp(x, a) }"
    with pytest.raises(KernelFaultError, match="where -inf comes first"):
        Session(model_of(text), SessionSettings(CPU))


@pytest.mark.parametrize(
    "text",
    [
        SIGNATURE + " { y = ScatterND(d, i, u) }",
        SIGNATURE + ' { y = ScatterND<reduction="none">(d, i, u) }',
        'g (float[4] d, int64[3] i, float[3] u) => (float[4] y) { y = ScatterElements<reduction="add">(d, i, u) }',
    ],
)
def test_other_scatters_run(text: str) -> None:
    assert fault_in(model_of(text), CPU) is None
    assert reason_against_model(model_of(text), CPU) is None


@pytest.fixture
def translation(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, Callable[..., object]], None]:
    """Replaces a converter of ours or torchlib's."""

    def add(target: object, function: Callable[..., object]) -> None:
        monkeypatch.setitem(CONVERTERS, target, function)

    return add


def doubling_by_a_race(x: ir.Value) -> object:
    """``x + x`` of [3], right on one thread."""
    index = op.Constant(value_ints=[0, 1, 2])
    return op.ScatterND(x, op.Unsqueeze(index, [1]), x, reduction="add")


def test_a_translation_with_a_racing_kernel_runs_in_pytorch(
    translation: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    translation(aten.sinh.default, doubling_by_a_race)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(lambda x: x.sinh().exp(), torch.randn(3))
    assert counted("fallback aten.sinh.default") == 1
    assert counted("nodes_on_onnx") == 1
    assert LOSES_SUMS in caplog.text


def test_a_translation_with_a_racing_kernel_is_an_error_when_fallback_is(translation: Callable[..., None]) -> None:
    translation(aten.sinh.default, doubling_by_a_race)
    with pytest.raises(Exception, match=rf"'sinh'.*test_kernels.py:\d+ .*{LOSES_SUMS}"):
        compiled(lambda x: x.sinh().exp(), options={"fallback": "error"})(torch.randn(3))


@pytest.fixture(params=[True, False], ids=["counted", "not counted"])
def racing_pass(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A pass that replaces every ``Neg`` by a scatter, and half of the time does not report that it fired."""
    says_so = request.param

    def scatter(model: ir.Model, context: PassContext) -> int:
        fired = 0
        for node in list(model.graph):
            if node.op_type == "Neg":
                (x,) = node.inputs
                index = ir.node("Constant", [], {"value": ir.tensor([[0], [1], [2]])})
                racing = ir.node("ScatterND", [x, index.outputs[0], x], {"reduction": "add"}, name="planted")
                ir.convenience.replace_nodes_and_values(
                    model.graph, node, [node], [index, racing], node.outputs, racing.outputs
                )
                fired += 1
        return fired if says_so else 0

    register(Pass("onnx.scatter", "Planted by a test.", scatter))
    yield says_so
    unregister("onnx.scatter")


def test_a_pass_cannot_bring_a_racing_kernel_back(racing_pass: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert_same_as_eager(lambda x: -x.exp(), torch.randn(3))
    assert LOSES_SUMS in caplog.text
    if racing_pass:
        assert "pass 'onnx.scatter' failed" in caplog.text
        assert_on_onnx()


def test_a_pass_with_a_racing_kernel_is_an_error_when_fallback_is(racing_pass: bool) -> None:
    with pytest.raises((RuntimeError, SessionError), match=LOSES_SUMS):
        compiled(lambda x: -x.exp(), options={"fallback": "error"})(torch.randn(3))


SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x, padding_idx=1),
    "embedding by frequency": lambda x, i: F.embedding(i, x, scale_grad_by_freq=True),
    "indexing": lambda x, i: x[i],
    "indexing twice": lambda x, i: x[i, i % 3],
    "index_select": lambda x, i: x.index_select(1, i % 3),
    "index_add": lambda x, i: x.index_add(0, i, x[i] * 2, alpha=3),
    "index_put": lambda x, i: x.index_put((i,), x[i].exp(), accumulate=True),
    "unfold": lambda x, i: x.unfold(0, 3, 1),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, x[i, 0], accumulate=True),
}


@pytest.mark.parametrize("function", SUMS.values(), ids=SUMS)
def test_sums_at_repeated_indices_run_in_pytorch_without_a_warning(
    function: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """By design: neither warned of, nor an error. The rest of the graph stays on ONNX Runtime."""
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(
            lambda x, i: function(x.exp(), i).sin(),
            torch.randn(6, 4, requires_grad=True),
            torch.tensor([0, 1, 1, 5, 0]),
        )
    assert not caplog.records
    assert counted("nodes_on_onnx") > 0


def test_repeated_writes_are_in_order_where_pytorch_promises_it() -> None:
    """``index_put`` without ``accumulate`` takes the last of repeated indices in deterministic mode."""
    index, rows = torch.zeros(4096, dtype=torch.int64), torch.randn(4096, 64)
    torch.use_deterministic_algorithms(True)
    try:
        put = compiled(lambda x, i, y: x.index_put((i,), y) * 2)
        for _ in range(5):
            assert torch.equal(put(torch.zeros(3, 64), index, rows)[0], rows[-1] * 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counted("fallback aten.index_put.default") == 1
    put(torch.zeros(3, 64), index, rows)
    assert counted("fallback aten.index_put.default") == 1, "the answer of the deterministic mode was kept"


PRODUCTS_OF_BYTES = {
    "MatMulInteger": "int32[2,8] y) { y = MatMulInteger(x, w) }",
    "ConvInteger": "int32[1,8,1] y) { t = Constant<value_ints=[1, 8, 8]>() c = Reshape(x, t) d = Reshape(w, t)"
    " y = ConvInteger(c, d) }",
    "QLinearMatMul": "uint8[2,8] y) { y = QLinearMatMul(x, s, z, w, s, zw, s, z) }",
    "QLinearConv": "uint8[1,8,1] y) { t = Constant<value_ints=[1, 8, 8]>() c = Reshape(x, t) d = Reshape(w, t)"
    " y = QLinearConv(c, s, z, d, s, zw, s, z) }",
    "MatMulIntegerToFloat": "float[2,8] y) { y = com.microsoft.MatMulIntegerToFloat(x, w, s, s) }",
    "DynamicQuantizeMatMul": "float[2,8] y) { f = Cast<to=1>(x) y = com.microsoft.DynamicQuantizeMatMul(f, w, s) }",
    "QGemm": "float[2,8] y) { y = com.microsoft.QGemm(x, s, z, w, s, zw) }",
    "QAttention": "float[2,2] y) { y = com.microsoft.QAttention<num_heads=1>(x, w, b, s, s) }",
}


@pytest.mark.parametrize("operator", PRODUCTS)
def test_products_of_uint8_with_int8_do_not_run_where_they_saturate(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_faults, "mixed_signs_are_exact", lambda: False)
    for dtype in ("int8", "uint8"):
        text = f"g (uint8[8,8] x, {dtype}[8,8] w, float s, uint8 z, {dtype} zw, float[8] b) => ("
        model = model_of(text + PRODUCTS_OF_BYTES[operator])
        infer_types(model.graph, 18)
        found = fault_in(model, CPU)
        assert (found is not None and found[0].op_type == operator) == (dtype == "int8")


def test_the_products_of_a_long_chain_of_weights() -> None:
    chain = " ".join(f"w{i + 1} = MatMul(w{i}, w{i})" for i in range(2000))
    model = model_of(
        f"g (float[2,4] x, int8[4,4] q) => (float[2,4] y) {{ w0 = Cast<to=1>(q) {chain} y = MatMul(x, w2000) }}"
    )
    infer_types(model.graph, 18)
    *_, last = product_kernels(model, {"q": torch.zeros(4, 4, dtype=torch.int8)})
    assert (last.node, last.bits) == ("y", "float32 x float32 (from 8 bits)")


def test_the_products_of_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session decides by weights, also of bfloat16. A description that fails is no error."""
    model = model_of(
        """g (float[2,4] x, bfloat16 s, int8[4,4] q) => (float[2,4] y) {
            f = Cast<to=1>(s) i = Cast<to=7>(f) c = Cast<to=9>(i)
            y = If(c) <then_branch = t () => (float[2,4] a) { a = com.microsoft.DynamicQuantizeMatMul(x, q, f) },
                       else_branch = e () => (float[2,4] b) { w = Cast<to=1>(q) b = MatMul(x, w) }>
        }"""
    )
    for graph in model.graphs():
        infer_types(graph, 18)
    model.graph[-1].metadata_props[OTHERWISE] = "the scale is small"

    def products(scale: float, *constants: str) -> list[tuple[str, str, str]]:
        weights = {"s": torch.tensor(scale, dtype=torch.bfloat16), "q": torch.ones(4, 4, dtype=torch.int8)}
        found = product_kernels(model, {name: weights[name] for name in constants})
        return [(item.kernel, item.bits, item.why) for item in found]

    integers = ("DynamicQuantizeMatMul", "float32 x 8 bits")
    floats = ("MatMul", "float32 x float32 (from 8 bits)")
    assert products(2.0, "s", "q") == [(*integers, "")]
    assert products(0.5, "s", "q") == [(*floats, "the scale is small")]
    assert products(0.5, "q") == [(*integers, "each call decides"), (*floats, "each call decides")]

    def fails(*args: object, **kwargs: object) -> None:
        raise SessionError("planted")

    monkeypatch.setattr(kernels, "Session", fails)
    assert products(0.5, "s", "q") == [(*integers, "unknown"), (*floats, "unknown")]
