"""No converter, ours or a user's, and no session returns another shape, dtype or number of results than eager."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from onnxscript import opset18 as op
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.errors import SessionError, TranslationError, WrongResultError
from dynamo_backends.exporter import results
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.exporter.translate import RegionInput, RegionOutput, translate
from dynamo_backends.partition import regions
from dynamo_backends.runtime import session as session_module
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.expected_shapes import SymbolicSizes
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings

aten = torch.ops.aten

Plant = Callable[[object, Callable[..., object]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Registers a function as the converter of an operator."""
    return lambda target, function: monkeypatch.setitem(CONVERTERS, target, function)


# Broadcasting


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (3,), (1, 3), (2, 1), (1,), ()], ids=str)
def test_copying_into_a_tensor_keeps_its_shape_and_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, dynamic: bool
) -> None:
    def copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        result.copy_(y)
        return result

    y = torch.arange(6.0)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    assert_same_as_eager(copy, torch.randn(2, 3), y, settings={"dynamic": dynamic})
    assert_on_onnx()
    if dtype.is_floating_point:
        requires_grad = torch.randn(2, 3, requires_grad=True), y.clone().requires_grad_()
        assert_same_as_eager(copy, *requires_grad, settings={"dynamic": dynamic})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batch_normalization_in_evaluation_saves_no_statistics(dtype: torch.dtype) -> None:
    """Torchlib returns the running statistics, of shape [3], where eager's are empty."""
    normalize = aten._native_batch_norm_legit_no_training.default
    x, statistics = torch.randn(2, 3, 4).to(dtype), [torch.rand(3).to(dtype) for _ in range(4)]
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else None  # rounded at other places
    assert_same_as_eager(lambda x, *rest: normalize(x, *rest, 0.1, 1e-5), x, *statistics, tolerance=close)
    assert_on_onnx()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).eval()], ids=str
)
def test_half_precision_with_float32_weights(norm: torch.nn.Module, dtype: torch.dtype) -> None:
    """The fake tensors of the statistics have another dtype than eager's."""
    x = torch.randn(2, 3, 4).to(dtype).requires_grad_()
    close = {"rtol": 2e-2, "atol": 2e-2}  # the gradients are computed from rounded statistics
    assert_same_as_eager(norm, x, tolerance=close)
    assert counted("wrong_results") == 0


# A translation that inference sees through

WRONG = {
    "shape": (lambda x: op.Reshape(x, [-1, 2]), r"\(3, 2\) .*\(2, 3\)"),
    "rank": (lambda x: op.Unsqueeze(x, [0]), r"\(1, 2, 3\) .*\(2, 3\)"),
    "computed shape": (
        lambda x: op.Reshape(x, op.Concat(op.Shape(x, start=1, end=2), op.Shape(x, start=0, end=1), axis=0)),
        r"\(3, 2\) .*\(2, 3\)",
    ),
    "scalar": (lambda x: op.ReduceSum(x, keepdims=0), r"\(\) .*\(2, 3\)"),
    "integers": (lambda x: op.Cast(x, to=7), "INT64 .*FLOAT"),
    "double": (lambda x: op.Cast(x, to=11), "DOUBLE .*FLOAT"),
    "two results": (lambda x: (x, x), "2 results"),
    "a Python number": (lambda x: 3.0, r"3\.0 "),
    "nothing": (lambda x: None, "None "),
}


@pytest.mark.parametrize(("function", "datum"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_translation_that_returns_something_else_is_not_used(
    function: Callable[..., object], datum: str, requires_grad: bool, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    plant(aten.sinh.default, function)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(lambda x: x.exp().sinh().sin(), torch.randn(2, 3, requires_grad=requires_grad))
    assert counted("fallback aten.sinh.default") == 1 + requires_grad  # the backward computes it anew
    assert counted("runtime_failures") == counted("wrong_results") == 0
    assert re.search(datum, caplog.text)
    with pytest.raises(Exception, match=rf"'sinh'.* .*test_results.py:\d+ .*{datum}"):
        compiled(lambda x: x.exp().sinh().sin(), options={"fallback": "error"})(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("function", "datum"),
    [
        (lambda x, dim: op.ReduceMax(x, [dim], keepdims=0), "single .* 2 results"),
        (lambda x, dim: (op.ReduceMax(x, [dim], keepdims=0),), "1 result .* 2 results"),
        (lambda x, dim: (x, op.Shape(x), x), "3 results .* 2 results"),
        (
            lambda x, dim: (op.ReduceMax(x, [dim], keepdims=0), op.ArgMax(x, axis=dim, keepdims=1)),
            r"\(2, 1\) .*result 1 .*\(2,\)",
        ),
        (
            lambda x, dim: (op.ArgMax(x, axis=dim, keepdims=0), op.ArgMax(x, axis=dim, keepdims=0)),
            "INT64 .*result 0 .*FLOAT",
        ),
    ],
)
def test_several_results(function: Callable[..., object], datum: str, plant: Plant) -> None:
    plant(aten.max.dim, function)
    assert_same_as_eager(lambda x: x.exp().max(1), torch.randn(2, 3))
    assert counted("fallback aten.max.dim") == 1
    with pytest.raises(Exception, match=datum):
        compiled(lambda x: x.exp().max(1), options={"fallback": "error"})(torch.randn(2, 3))


def test_a_symbolic_size_is_no_constant(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    """Right for the first call alone."""
    plant(aten.sinh.default, lambda x: op.Reshape(x, [4, 3]))
    function = compiled(lambda x: x.sinh() * 2, dynamic=True)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for length in (4, 5):
            x = torch.randn(length, 3)
            torch.testing.assert_close(function(x), x.sinh() * 2)
    assert re.search(r"\(4, 3\) .*\(s\d+, s?\d+\)", caplog.text)


def captured(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_every_node_of_a_region_is_checked(plant: Plant) -> None:
    """Also those whose result is not the model's."""
    graph = captured(lambda x: x.exp().sinh().sum(), torch.randn(2, 3)).graph
    x, *nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    for _ in range(2):  # the second answer is remembered
        translate(nodes, [RegionInput(x)], [RegionOutput(nodes[-1])], opset=23)
        plant(aten.sinh.default, lambda x: op.Transpose(x, perm=[1, 0]))
        for _ in range(2):
            with pytest.raises(TranslationError, match=r"sinh .*\(3, 2\) .*\(2, 3\)"):
                translate(nodes, [RegionInput(x)], [RegionOutput(nodes[-1])], opset=23)
        plant(aten.sinh.default, lambda x: op.Sinh(x))


def test_an_argument_that_is_read_after_a_result_of_the_translation_is_known(plant: Plant) -> None:
    """Its shape decides what comes out."""
    graph = captured(torch.atan2, torch.randn(3), torch.randn(2, 3)).graph
    x, y, node = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    plant(aten.atan2.default, lambda x, y: op.Unsqueeze(op.Add(op.Sin(x), y), [0]))
    with pytest.raises(TranslationError, match=r"\(1, 2, 3\) .*\(2, 3\)"):
        translate([node], [RegionInput(x), RegionInput(y)], [RegionOutput(node)], opset=23)


def test_computed_shapes_are_followed(plant: Plant) -> None:
    graph = captured(torch.sinh, torch.randn(2, 3)).graph
    x, node = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    plant(aten.sinh.default, WRONG["computed shape"][0])
    with pytest.raises(TranslationError, match=WRONG["computed shape"][1]):
        translate([node], [RegionInput(x)], [RegionOutput(node)], opset=23)


def test_what_is_remembered_of_translations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAXIMUM_COMPARISONS", 3)
    monkeypatch.setattr(results, "comparisons", {})
    for size in range(1, 8):
        graph = captured(torch.sinh, torch.randn(size)).graph
        x, node = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
        translate([node], [RegionInput(x)], [RegionOutput(node)], opset=23)
        assert 0 < len(results.comparisons) <= 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_inference_knows_is_not_tried(dynamic: bool, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes a session and PyTorch's result."""

    def fail(*_: object) -> object:
        raise AssertionError

    monkeypatch.setattr(regions, "wrong_result", fail)
    plant(aten.sinh.default, lambda x: op.Sinh(x))  # a new function, which nobody has asked about
    assert_same_as_eager(lambda x: x.sinh() * 2, torch.randn(2, 3), settings={"dynamic": dynamic})
    assert_on_onnx()


def test_a_translation_registered_later_is_used(plant: Plant) -> None:
    """What is remembered of an operator's translation says nothing of another's."""
    x = torch.randn(2, 3)
    plant(aten.sinh.default, lambda x: op.Unsqueeze(x, [0]))
    compiled(lambda x: x.sinh() * 2)(x)
    assert counted("fallback aten.sinh.default") == 1
    plant(aten.sinh.default, lambda x: op.Sinh(x))
    compiled(lambda x: x.sinh() * 3)(x)
    assert counted("fallback aten.sinh.default") == 1


# A session whose results inference did not foresee


def shape_from_data(x: object, *sizes: int) -> object:
    """The sizes as a vector that shape inference does not know, since it is computed from ``x``."""
    zero = op.Cast(op.Mul(op.ReduceSum(op.Abs(x), keepdims=0), 0.0), to=7)
    return op.Add(op.Reshape(zero, [1]), list(sizes))


def flattened(x: object) -> object:
    return op.Reshape(op.Sinh(x), shape_from_data(x, -1))


def transposed(x: object) -> object:
    return op.Reshape(op.Sinh(x), shape_from_data(x, -1, 2))


def only_the_first_row(x: object) -> object:
    return op.Slice(op.Sinh(x), [0], shape_from_data(x, 1), [0])


@pytest.mark.parametrize("wrong", [flattened, transposed, only_the_first_row])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_result_of_another_shape_is_not_returned(
    wrong: Callable[..., object], dynamic: bool, requires_grad: bool, plant: Plant
) -> None:
    plant(aten.sinh.default, wrong)
    x = torch.randn(4, 3, requires_grad=requires_grad)
    assert_same_as_eager(lambda x: x.exp().sinh().t().sin(), x, calls=3, settings={"dynamic": dynamic})


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_node_of_which_nothing_is_inferred_is_tried_alone(
    dynamic: bool, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    """The shape of the sum is right whatever the shape of what is summed up."""
    plant(aten.sinh.default, lambda x: op.Compress(op.Sinh(x), op.Less(op.ReduceMax(x, [1], keepdims=0), -1.0), axis=0))
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(lambda x: x.sinh().sum() * 2, torch.randn(4, 3), settings={"dynamic": dynamic})
    assert counted("fallback aten.sinh.default") == 1
    assert re.search(r"\(0, 3\) .*\(4, 3\)", caplog.text)


def test_a_node_is_tried_with_valid_indices(plant: Plant) -> None:
    """A dimension of size one has no index but 0."""

    def no_rows(x: object, dim: int, index: object) -> object:
        rows = op.Gather(x, index, axis=dim)
        return op.Compress(rows, op.Less(op.ReduceMax(rows, [1], keepdims=0), -1.0), axis=0)

    plant(aten.index_select.default, no_rows)
    index = torch.tensor([0, 0])
    assert_same_as_eager(lambda x: x.index_select(0, index.to(x.device)).sin(), torch.rand(1, 3))
    assert counted("fallback aten.index_select.default") == 1


def rows_that_are_positive(x: object) -> object:
    """The number of rows depends on the data, so shape inference does not know it."""
    return op.Compress(op.Sinh(x), op.Greater(op.ReduceMax(x, [1], keepdims=0), 0.0), axis=0)


def some_positive(*shape: int) -> torch.Tensor:
    """Rows of which the first has no positive element."""
    x = torch.rand(shape)
    x[0] = -1.0
    return x


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_result_of_another_shape_is_computed_by_pytorch(
    requires_grad: bool, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    plant(aten.sinh.default, rows_that_are_positive)
    x = some_positive(4, 3).requires_grad_(requires_grad)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(lambda x: (x.sinh() * 2, x + 1), x, calls=3, settings={"dynamic": False})
    assert counted("wrong_results") == 2 and counted("calls_after_failures") == 1
    assert counted("runtime_failures") == 0
    assert counted("regions") == 1 + requires_grad
    (record,) = caplog.records
    assert re.search(r"region 0: .*\(3, 3\) .*\(4, 3\)", record.getMessage())


def test_a_size_that_only_a_number_tells_is_compared(plant: Plant) -> None:
    """No argument of the region has rows."""
    plant(aten.sinh.default, rows_that_are_positive)
    assert_same_as_eager(lambda n: torch.zeros(n, 3).sinh() * 2, 4, settings={"dynamic": True})
    assert counted("wrong_results") == 1


def test_each_shape_is_judged_by_itself(plant: Plant) -> None:
    """One that comes out right stays on ONNX Runtime; one that does not is tried there less and less."""
    plant(aten.sinh.default, rows_that_are_positive)
    function = compiled(lambda x: x.sinh() * 2, dynamic=True)
    wrong, right = some_positive(4, 3), torch.rand(5, 3)
    for _ in range(3):
        for x in (wrong, right):
            torch.testing.assert_close(function(x), x.sinh() * 2)
    assert counted("graphs") == 1
    assert counted("wrong_results") == 2 and counted("calls_after_failures") == 2  # one of other sizes
    function(torch.rand(4, 3))  # right for these values, but of sizes that were wrong before
    assert counted("wrong_results") == 2 and counted("calls_after_failures") == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_of_another_shape_is_an_error_when_fallback_is(dynamic: bool, plant: Plant) -> None:
    plant(aten.sinh.default, rows_that_are_positive)
    function = compiled(lambda x: x.sinh() * 2, dynamic=dynamic, options={"fallback": "error"})
    data = r"graph \d+ inference region 0: .*\(3, 3\) .*\((s\d+=)?4, (s\d+=)?3\).*fallback"
    for _ in range(2):
        with pytest.raises(SessionError, match=data):
            function(some_positive(4, 3))
    assert counted("wrong_results") == 2


def test_a_result_in_other_memory_order_is_checked_too(plant: Plant) -> None:
    """Checked as eager's user sees it, before the permutation is applied."""
    plant(aten.sinh.default, rows_that_are_positive)
    x = some_positive(4, 3)
    assert_same_as_eager(lambda x: x.sinh().t(), x, settings={"dynamic": False})
    assert_same_as_eager(lambda x: x.sinh() * 2, some_positive(4, 3).t().contiguous().t())
    assert counted("wrong_results") == 2


# The check itself, on sessions of models written down


def session_of(text: str, inputs: list[InputSpec], outputs: list[OutputSpec]) -> Session:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    return Session(model, SessionSettings(("CPUExecutionProvider",), threads=1), inputs, outputs)


FLOAT, LONG = torch.float32, torch.int64


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((2, 3), None),
        (("s0", "s1"), None),
        (("s0", "2*s1 - s0 - 1"), None),
        (("max(s0, 1)", "(s0 + 5)//2"), None),
        (("u0", "u1"), None),
        (("u0", "u0"), r"\(2, 3\) where eager returns \(u0=2, u0=2\)"),
        (("s1", "s0"), r"\(2, 3\) where eager returns \(s1=3, s0=2\)"),
        (("s0", "s0 + 2"), r"\(2, 3\) where eager returns \(s0=2, s0 \+ 2=4\)"),
        ((3, 2), r"\(2, 3\) where eager returns \(3, 2\)"),
        ((2, 3, 1), r"\(2, 3\) where eager returns \(2, 3, 1\)"),
        ((3,), r"\(2, 3\) where eager returns \(3,\)"),
        ((), r"\(2, 3\) where eager returns \(\)"),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_arguments(sizes: tuple[int | str, ...], reason: str | None) -> None:
    """``s0`` is a number among the arguments, ``s1`` the size of one of them, and nothing says what ``u0`` is."""
    inputs = [InputSpec("n", None, sizes=("s0",)), InputSpec("x", FLOAT, sizes=(2, "s1"))]
    text = "g (int64 n, float[r,c] x) => (float[p,q] y) { y = Exp(x) }"
    session = session_of(text, inputs, [OutputSpec("y", FLOAT, sizes=sizes)])
    x = torch.randn(2, 3)
    for _ in range(2):
        if reason is None:
            torch.testing.assert_close(session([2, x]), [x.exp()])
        else:
            with pytest.raises(WrongResultError, match=f"^y has shape {reason}$"):
                session([2, x])


@pytest.mark.parametrize(
    ("dtype", "actual"), [(torch.float64, "float32"), (torch.int64, "float32"), (torch.bool, "float32")], ids=str
)
def test_dtypes_are_compared(dtype: torch.dtype, actual: str) -> None:
    text = "g (float[2] x) => (float[2] y) { y = Exp(x) }"
    session = session_of(text, [InputSpec("x", FLOAT, sizes=(2,))], [OutputSpec("y", dtype, sizes=(2,))])
    with pytest.raises(WrongResultError, match=f"^y .*torch.{actual} .*{dtype}$"):
        session([torch.randn(2)])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_result_is_compared(wrong: int) -> None:
    text = "g (float[r,c] x) => (float[a,b] y0, float[c,d] y1, float[e,f] y2) { y0 = Exp(x) y1 = Neg(x) y2 = Sin(x) }"
    outputs = [OutputSpec(f"y{i}", FLOAT, sizes=(3, 2) if i == wrong else (2, 3)) for i in range(3)]
    session = session_of(text, [InputSpec("x", FLOAT, sizes=(2, 3))], outputs)
    with pytest.raises(WrongResultError, match=rf"^y{wrong} has shape \(2, 3\)"):
        session([torch.randn(2, 3)])


def test_bytes_are_not_booleans() -> None:
    text = "g (float[2] x) => (uint8[2] y) { y = Cast<to=2>(x) }"
    session = session_of(text, [InputSpec("x", FLOAT, sizes=(2,))], [OutputSpec("y", torch.bool, sizes=(2,))])
    with pytest.raises(WrongResultError, match="^y .*torch.uint8 .*torch.bool$"):
        session([torch.ones(2)])


def test_a_number_is_a_scalar() -> None:
    text = "g (float[a,b] x) => (int64[1] y) { y = Shape<start=0,end=1>(x) }"
    outputs = [OutputSpec("y", LONG, is_number=True, sizes=())]
    session = session_of(text, [InputSpec("x", FLOAT, sizes=("s0", "s1"))], outputs)
    with pytest.raises(WrongResultError, match=r"^y .*\(1,\) .*\(\)$"):
        session([torch.ones(2, 3)])


def test_a_permuted_result_is_compared_as_eager_presents_it() -> None:
    text = "g (float[2,3] x) => (float[3,2] y__memory) { y__memory = Transpose(x) }"
    inputs = [InputSpec("x", FLOAT, sizes=(2, 3))]
    x = torch.randn(2, 3)
    (result,) = session_of(text, inputs, [OutputSpec("y__memory", FLOAT, permutation=(1, 0), sizes=(2, 3))])([x])
    assert torch.equal(result, x) and result.stride() == (1, 2)
    for permutation, sizes, said in [((1, 0), (3, 2), r"\(2, 3\)"), ((0, 2, 1), (1, 2, 3), r"\(3, 2\)")]:
        session = session_of(text, inputs, [OutputSpec("y__memory", FLOAT, permutation=permutation, sizes=sizes)])
        with pytest.raises(WrongResultError, match=f"has shape {said} where"):
            session([x])


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ("y = Exp(x)", ("s1", "s0")),
        ("y = Exp(x)", ("s0*s1",)),
        ("y = Exp(x)", ("s0", "s1", 1)),
        ("y = Identity(x)", ("s1", "s0")),
        ("y = Transpose(x)", ("s0", "s1")),
        ("y = Reshape(x, two)", ("s0", "s1")),
        ("y = Identity(k)", ("s0", "s1")),
        ("c = ReduceMax<keepdims=0>(x) b = Less(c, c) y = If(b) <then_branch = g1 () => (float[e,f] w) { w = Neg(x) }, "
         "else_branch = g2 () => (float[e,f] w) { w = Exp(x) }>", ("s1", "s0")),
        ("y = ReduceSum<keepdims=0>(x)", (1,)),
        ("y = ReduceSum<keepdims=1>(x)", ("s0 - 1",)),
        ("y = ReduceSum<keepdims=1>(x)", ()),
    ],
)  # fmt: skip
def test_no_result_is_written_into_memory_of_another_shape(body: str, sizes: tuple[int | str, ...]) -> None:
    """Its memory is allocated before the call, from the sizes of the arguments; here with as many elements."""
    dims = ",".join("abcd"[: 2 if "keepdims=0" not in body else 0])
    text = (
        f"g (float[r,c] x) => (float[{dims}] y) <int64[2] two = {{3, 2}}, float[3,2] k = {{1,2,3,4,5,6}}> {{ {body} }}"
    )
    session = session_of(text, [InputSpec("x", FLOAT, sizes=("s0", "s1"))], [OutputSpec("y", FLOAT, sizes=sizes)])
    for _ in range(2):
        with pytest.raises(WrongResultError, match="^y has shape"):
            session([torch.randn(2, 3)])


def test_sizes_that_depend_on_data_are_compared_in_each_call() -> None:
    text = (
        "g (float[r] x) => (float[a] y, float[b] z) <float[1] zero = {0}, float[1] one = {1}> "
        "{ p = Greater(x, zero) y = Compress(x, p) q = Greater(x, one) z = Compress(x, q) }"
    )
    outputs = [OutputSpec(name, FLOAT, sizes=("u0",)) for name in "yz"]
    session = session_of(text, [InputSpec("x", FLOAT, sizes=("s0",))], outputs)
    x = torch.tensor([2.0, 3.0])
    torch.testing.assert_close(session([x]), [x, x])
    with pytest.raises(WrongResultError, match=r"^z has shape \(1,\) where eager returns \(u0=2,\)$"):
        session([torch.tensor([2.0, 0.5])])


def test_results_of_new_sizes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in generated text, where the cache of keys and values has another size in each call."""
    copied: list[object] = []
    monkeypatch.setattr(session_module, "memory_from_ort", lambda value, **given: copied.append(value))
    text = (
        "g (float[a,3] x, float[b,3] y, int64 n) => (float[c,3] z, float[3,d] w) "
        "{ z = Concat<axis=0>(x, y) w = Transpose(z) }"
    )
    inputs = [
        InputSpec("x", FLOAT, sizes=("s0", 3)),
        InputSpec("y", FLOAT, sizes=("2*s1", 3)),  # a size of an argument may be an expression
        InputSpec("n", None, sizes=("s1",)),
    ]
    outputs = [
        OutputSpec("z", FLOAT, sizes=("s0 + 2*s1", 3)),
        OutputSpec("w", FLOAT, permutation=(1, 0), sizes=("s0 + 2*s1", 3)),
    ]
    session = session_of(text, inputs, outputs)
    for size in range(1, 20):
        x, y = torch.randn(size, 3), torch.randn(2 * size, 3)
        torch.testing.assert_close(session([x, y, size]), [torch.cat([x, y])] * 2)
    assert not copied


@pytest.mark.parametrize(
    ("arguments", "results", "shapes"),
    [
        ([("s0", 4), ("s1",)], [("s0 + s1", 4), (), (7,)], ((5, 4), (), (7,))),
        ([("s0",), ("s1",)], [("max(s0, s1)//2", "torch.sym_max(s0, 5)")], ((1, 5),)),
        ([("2*s0",), ("s1",)], [("2*s0", "math.floor(s1/2)")], ((2, 1),)),
        ([("s0",), ("s1",)], [("int(torch.sym_float(s1))",)], ((3,),)),
        ([("2*s0",), ("s1",)], [("s0",)], None),
        ([("s0",), ("s1",)], [("s0",), ("u0",)], None),
        ([("s0",), None], [("s0",)], ((2,),)),
        ([("s0",)], [("s0",), None], None),
    ],
)
def test_shapes_are_computed_from_the_arguments(
    arguments: list[tuple[int | str, ...] | None],
    results: list[tuple[int | str, ...] | None],
    shapes: tuple[tuple[int, ...], ...] | None,
) -> None:
    sizes = SymbolicSizes(arguments)
    of_values = sizes.shapes(results)
    if of_values is None:
        assert shapes is None
    else:
        assert of_values(sizes.of([torch.ones(2, 4), torch.ones(3)])) == shapes


def test_the_wrong_results_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_MAXIMUM_WRONG", 3)
    text = "g (float[a] x) => (float[b] y) { y = Exp(x) }"
    outputs = [OutputSpec("y", FLOAT, sizes=("s0 + 1",))]
    session = session_of(text, [InputSpec("x", FLOAT, sizes=("s0",))], outputs)
    for size in range(10):
        with pytest.raises(WrongResultError):
            session([torch.ones(size)])
        assert 0 < len(session.wrong) <= 3
