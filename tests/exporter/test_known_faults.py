"""Known faults of torchlib's converters and of ONNX Runtime's kernels: our backends return eager's result.

A case fails if its entry in ``exporter/upstream_faults.py`` or its converter is removed. The last tests run ONNX
Runtime alone, and fail when it is fixed: then the entry or the workaround can be removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled
from onnx import TensorProto, helper
from operators import difference
from packaging.version import Version

from dynamo_backends.common.upstream_faults import installed_version
from dynamo_backends.exporter.decompositions import decomposition_table

nan, inf = float("nan"), float("inf")
SPECIAL = torch.tensor([nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 3e38, -100.0])
PAIRS = (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))
TABLE = torch.tensor([[1.0, nan, 3.0, 3.0], [nan, nan, 0.0, inf], [2.0, 2.0, 1.0, -inf]])
LARGE = torch.tensor([2**31, -(2**31) - 1, 2**53 + 1, -(2**53) - 1, 2**62, 7, -7, 0, 2**63 - 1])
SMALL = torch.tensor([1e-8, -1e-8, 1e-5, 0.5, -0.999, 1e10, inf, -1.0, nan])

CASES: dict[str, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    "antialiased interpolation by factors that make no whole sizes": (
        lambda x: torch.nn.functional.interpolate(x, scale_factor=(0.5, 0.7), mode="bilinear", antialias=True),
        [torch.linspace(-1, 1, 35).square().reshape(1, 1, 5, 7)],
    ),
    "angle of NaN": (torch.angle, [SPECIAL]),
    "atan2 of NaN": (torch.atan2, PAIRS),
    "clamp keeps infinities": (lambda x: (x.clamp(min=0), x.clamp(max=0)), [SPECIAL]),
    "clamp by NaN": (lambda x: x.clamp(min=nan), [SPECIAL]),
    "integers clamped by numbers that are not finite": (
        lambda *given: [(x.clamp_min(inf), x.clamp_min(nan), x.clamp_max(nan), x.clamp_min(2.5)) for x in given],
        [torch.tensor([0, 1, 100], dtype=torch.int8), torch.tensor([0, 1]), torch.tensor([False, True])],
    ),
    "products with an infinite factor": (
        lambda x, a, b: (torch.addmm(x, a, b, alpha=inf), torch.addbmm(x, a[None], b[None], alpha=-inf)),
        [torch.ones(2, 2), torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.tensor([[1.0, 2.0], [0.5, 0.0]])],
    ),
    "activations with a number that is not finite": (
        lambda x: [
            (
                torch.ops.aten.elu(x, 1.0, 1.0, number),
                *(function(x, number) for function in (torch.celu, torch.nn.functional.leaky_relu)),
                torch.nn.functional.hardtanh(x, 0.0, number) if number != -inf else x,
            )
            for number in (inf, -inf, nan)
        ],
        [SPECIAL],
    ),
    "a line to infinity": (lambda x: x + torch.linspace(0.0, inf, 3), [torch.ones(3)]),
    "clamp of a large integer": (
        lambda x: (x.clamp(min=0), x.clamp(max=3), x.clamp(-(2**40), 2**40)),
        [LARGE],
    ),
    "hardtanh of a large integer": (torch.nn.functional.relu6, [LARGE]),
    "maximum of large integers": (
        lambda x: (torch.maximum(x, x.flip(0)), torch.minimum(x, x.flip(0))),
        [LARGE],
    ),
    "sign of a large integer": (torch.sign, [LARGE]),
    "sign of NaN": (torch.sign, [SPECIAL]),
    "celu of the largest double": (
        torch.nn.functional.celu,
        [torch.tensor([1.7976931348623157e308, -1.0], dtype=torch.float64)],
    ),
    "copysign": (torch.copysign, PAIRS),
    "signbit of a negative zero": (torch.signbit, [SPECIAL]),
    "division of integers": (lambda x: x / 3, [torch.tensor([7, -7, 1])]),
    "floor division of floats": (lambda x, y: torch.div(x, y, rounding_mode="floor"), PAIRS),
    "floor division of integers": (lambda x: (x // 3, x // -2, x // 2**40), [LARGE]),
    "truncated division of integers": (lambda x: torch.div(x, -3, rounding_mode="trunc"), [LARGE]),
    "remainder of integers": (lambda x: (x % 3, x % -3, torch.fmod(x, 3), torch.fmod(x, -3)), [LARGE]),
    "remainder by an infinity": (
        lambda x: (x % inf, x % -inf, 1.5 % x),
        [torch.tensor([1.0, -1.0, inf, 0.3])],
    ),
    "a number that does not fit": (
        lambda x: torch.div(x, -2, rounding_mode="floor"),
        [torch.tensor([255, 3], dtype=torch.uint8)],
    ),
    "erfc of large numbers": (lambda x: torch.erfc(x).log(), [torch.tensor([-2.0, 0.5, 3.0, 6.0])]),
    "gate far below zero": (
        lambda x: (torch.nn.functional.glu(x, 0).log(), torch.sigmoid(x).log()),
        [torch.tensor([1.0, 2.0, 1.0, -15.0, -19.0, -30.0])],
    ),
    "logit of NaN": (lambda x: torch.logit(x, 1e-3), [torch.tensor([nan, 0.5, 0.0, 1.0])]),
    "erfcx overflows": (torch.special.erfcx, [torch.tensor([-2.0, 0.5, 3.0, 20.0])]),
    "log_ndtr far from zero": (torch.special.log_ndtr, [torch.tensor([-100.0, -10.0, 0.0, 10.0, 100.0])]),
    "heaviside of NaN": (torch.heaviside, PAIRS),
    "logaddexp of infinities": (lambda x, y: (torch.logaddexp(x, y), torch.logaddexp2(x, y)), PAIRS),
    "logcumsumexp of infinities": (lambda x: torch.logcumsumexp(x, 0), [TABLE]),
    "xlogy of zero and NaN": (torch.xlogy, PAIRS),
    "infinities of doubles": (
        lambda x: (x.isinf(), x.isposinf(), x.isneginf()),
        [torch.tensor([1e300, -1e300, inf, -inf], dtype=torch.float64)],
    ),
    "extrema of NaN": (lambda x: (x.amax(0), x.amin(0), x.max(0), x.min(1), x.max(), x.min()), [TABLE]),
    "extrema of large integers": (
        lambda x: (x.amax(1), x.max(), x.argmin(0)),
        [torch.stack([LARGE, LARGE.flip(0)])],
    ),
    "mean of scattered integers": (
        lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), torch.tensor([2, -4, 3]), "mean"),
        [torch.tensor([-5, 2, 3])],
    ),
    "mean of scattered floats": (
        lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), torch.tensor([2.0, -4.0, 3.0]), "mean"),
        [torch.tensor([-5.0, 2.0, 3.0])],
    ),
    "extrema of scattered infinities": (
        lambda x: x.scatter_reduce(
            0, torch.tensor([0, 0, 1]), torch.tensor([1.0, -2.0, inf]), "amin", include_self=False
        ),
        [torch.zeros(2)],
    ),
    "extrema of scattered NaN": (
        lambda x: x.scatter_reduce(0, torch.tensor([0, 1]), torch.tensor([nan, 2.0]), "amax"),
        [torch.tensor([1.0, nan, 3.0])],
    ),
    "added to a matrix by vector": (
        lambda x, a, b: torch.addmv(x, a.t(), b),
        [torch.ones(3), torch.eye(4, 3), SPECIAL[3:7]],
    ),
    "baddbmm with beta=0 and NaN": (
        lambda x, a: torch.baddbmm(x, a, a, beta=0),
        [torch.full((1, 2, 2), nan), torch.ones(1, 2, 2)],
    ),
    "addmm of empty matrices with beta": (
        lambda x, a, b: (torch.addmm(x, a, b, beta=0.2), torch.addmm(x, a, b)),
        [torch.full((3, 3), 2.0), torch.zeros(3, 0), torch.zeros(0, 3)],
    ),
    "antialiased interpolation with aligned corners": (
        lambda x: (
            torch.nn.functional.interpolate(x, size=(9, 3), mode="bilinear", antialias=True, align_corners=True),
            torch.nn.functional.interpolate(x, size=(3, 9), mode="bicubic", antialias=True, align_corners=True),
        ),
        [torch.linspace(0, 1, 36).view(1, 1, 6, 6)],
    ),
    "interpolation of bytes": (
        lambda x: torch.nn.functional.interpolate(x, size=(3, 7), mode="bilinear", antialias=True),
        [torch.arange(16, dtype=torch.uint8).mul(15).view(1, 1, 4, 4)],
    ),
    "index of NaN": (lambda x: (x.argmax(0), x.argmin(1), x.argmax(), x.argmin()), [TABLE]),
    "sort of NaN": (lambda x: x.sort(0), [TABLE]),
    "topk of equal elements": (lambda x: x.topk(2), [torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])]),
    "product of large integers": (lambda x: x.prod(), [torch.tensor([2**53 + 1, 3, 5])]),
    "power of integers": (lambda x: (x**3, 3 ** x.abs().clamp(max=50)), [LARGE]),
    "average of integers": (lambda x: torch.nn.functional.avg_pool2d(x, 2), [torch.arange(16).view(1, 4, 4)]),
    "variance of a scalar": (lambda x: x.std(0), [torch.tensor(3.0)]),
    "matrix by vector, transposed": (lambda a, b: torch.mv(a.t(), b), [torch.randn(4, 3), torch.randn(4)]),
    "a scatter into a diagonal": (lambda x: x.diagonal_scatter(torch.ones(3)), [torch.zeros(3, 3)]),
    "a scatter as strided": (lambda x: x.as_strided_scatter(torch.ones(2), (2,), (3,)), [torch.zeros(3, 3)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    function, arguments = CASES[name]
    expected = function(*arguments)
    actual = compiled(function, dynamic=False)(*arguments)
    assert difference(actual, expected) is None


@pytest.mark.parametrize("function", [torch.log1p, torch.expm1], ids=["log1p", "expm1"])
def test_small_numbers_keep_their_digits(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compared relatively: the default absolute tolerance hides what torchlib's translations lose."""
    actual = compiled(function, dynamic=False)(SMALL)
    torch.testing.assert_close(actual, function(SMALL), rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_are_divided_on_onnx(dtype: torch.dtype) -> None:
    """ONNX Runtime crashes when it divides the smallest integer by -1, as eager's truncated division does."""
    smallest, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([smallest, smallest + 1, -7, -1, 0, 1, 7, largest], dtype=dtype)
    y = torch.tensor([smallest, -3, -2, -1, 1, 2, 3, largest], dtype=dtype)
    assert_same_as_eager(lambda x, y: (x[:, None] // y, x[:, None] % y, x // -1, x % -1, -7 // y), x, y)
    truncated = functools.partial(torch.div, rounding_mode="trunc")
    assert_same_as_eager(lambda x, y: (truncated(x[1:, None], y), truncated(x[1:], -1)), x, y)
    assert compiled(lambda x: truncated(x, -1))(x)[0] == smallest
    assert_on_onnx()


@pytest.mark.parametrize("divide", [lambda x, y: x // y, lambda x, y: x % y, lambda x, y: x // 0])
def test_integer_division_by_zero_raises_as_eager(divide: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(divide, dynamic=False)(torch.tensor([1, 2]), torch.tensor([1, 0]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_sums_of_integers_wrap_on_onnx(dynamic: bool) -> None:
    """ONNX Runtime's product with ones wraps as eager; its ``ReduceSum`` saturates."""

    def sums(x: torch.Tensor, *narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row, wide = x.flatten(), x[:, None]
        return (
            *(x.sum(), x.sum(-1), x.sum(0, keepdim=True), x.sum(1), x.sum((0, 1)), torch.sum(x, dim=[])),
            *(x.sum((0, -1)), wide.sum((0, 2)), wide.sum((1, 3), keepdim=True), x.mT.sum(-1), x[..., ::2].sum((1, 2))),
            *(row.sum(), row.sum(0, keepdim=True), x.sum().sum(), x.sum().sum(-1, keepdim=True)),
            *(x.sum(1, dtype=torch.int32), *(item.sum(1) for item in narrow)),
        )

    for shape in [(3, 4, 5), (2, 1, 0), (0, 2, 3)]:
        x = torch.randint(-(2**63), 2**63 - 1, shape)
        arguments = x, x.int(), x.short(), x.to(torch.int8), x.to(torch.uint8), x > 0
        assert_same_as_eager(sums, *arguments, settings={"dynamic": dynamic})
    assert_on_onnx()


def test_decompositions_change_no_argument() -> None:
    """AOTAutograd wants a functional graph; a decomposition through ``prims.copy_to`` leaves the process
    broken."""
    assert torch.ops.aten.as_strided_scatter.default not in decomposition_table()
    for target in decomposition_table():
        assert not target._schema.is_mutable  # type: ignore[attr-defined]


def run_in_runtime(
    op_type: str, inputs: Sequence[np.ndarray], shape: Sequence[int] | None = None, **attributes: object
) -> np.ndarray:
    """One int64 ONNX node in ONNX Runtime."""
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.INT64, x.shape) for name, x in zip(names, inputs, strict=True)
    ]
    result = helper.make_tensor_value_info("y", TensorProto.INT64, shape)
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "upstream", infos, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, inputs, strict=True)))[0]


# Eight elements: Max, Min and Sign were wrong in the vectorized loop only.
UPSTREAM: dict[str, tuple[str, list[list[int]], dict[str, object], list[int]]] = {
    "Max compares 32 bits": ("Max", [[0] * 8, [2**31] * 8], {}, [2**31] * 8),
    "Min compares 32 bits": ("Min", [[0] * 8, [2**31] * 8], {}, [0] * 8),
    "Sign looks at 32 bits": ("Sign", [[2**31] * 8], {}, [1] * 8),
    "ReduceSum in double precision": ("ReduceSum", [[2**53 + 1, 0]], {"keepdims": 1}, [2**53 + 1]),
    "ReduceProd in double precision": ("ReduceProd", [[2**53 + 1, 1]], {"keepdims": 1}, [2**53 + 1]),
    "Mod with fmod in double precision": ("Mod", [[2**53 + 1], [3]], {"fmod": 1}, [0]),
    "Pow in double precision": ("Pow", [[3], [39]], {}, [3**39]),
}


MENDED_IN_1_32 = {
    "Max compares 32 bits",
    "Min compares 32 bits",
    "Sign looks at 32 bits",
    "Mod with fmod in double precision",
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_onnxruntime_is_wrong_in_the_versions_that_are_known(name: str) -> None:
    """On int64. When one fails, the runtime is mended; its rule can go when no version that is supported needs it."""
    op_type, inputs, attributes, right = UPSTREAM[name]
    result = run_in_runtime(op_type, [np.array(x, dtype=np.int64) for x in inputs], [len(right)], **attributes)
    is_mended = name in MENDED_IN_1_32 and installed_version("onnxruntime") >= Version("1.32")
    assert (result.tolist() == right) == is_mended


@pytest.mark.parametrize("index", [[0, -1], [0, 7], [0, -9]])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: torch.index_select(x, 0, i),
        lambda x, i: torch.gather(x, 0, i[:, None]),
        lambda x, i: torch.scatter(x, 0, i[:, None], 1.0),
        lambda x, i: torch.scatter_add(x, 0, i[:, None], x[:2, :1]),
    ],
    ids=["embedding", "index_select", "gather", "scatter", "scatter_add"],
)
def test_an_index_that_eager_refuses_is_refused(function: object, index: list[int]) -> None:
    """ONNX counts a negative index from the end and returns a value; eager raises, and so do we, its own error."""
    arguments = torch.randn(4, 5), torch.tensor(index)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(*arguments)  # type: ignore[operator]
    with pytest.raises(type(eager.value)):
        compiled(function)(*arguments)  # type: ignore[arg-type]


def test_an_index_of_advanced_indexing_counts_from_the_end() -> None:
    x, index = torch.randn(4, 5), torch.tensor([0, -1])
    torch.testing.assert_close(compiled(lambda x, i: x[i])(x, index), x[index])


def test_signed_zeros() -> None:
    """PyTorch's recorder takes -0.0 for 0.0 among constants, ONNX Runtime's NoopElimination x + 0 for x."""
    assert_same_as_eager(lambda x: (x / 0.0, x / -0.0, 1 / (x * -0.0), 1 / (-(x - x) + 0), 1 / -(x - x)), torch.ones(3))
    assert_on_onnx()


def test_running_products_of_many_numbers() -> None:
    """PyTorch's decomposition multiplies a square of them: 10 GB here."""
    assert_same_as_eager(lambda x: x.cumprod(0), torch.rand(50_000))
