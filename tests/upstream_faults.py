"""Demonstrations of the known upstream faults: small programs whose result is right once the fault is fixed.

``DEMONSTRATIONS`` has one for each entry of the tables (``exporter/upstream_faults.py``, ``runtime/kernel_faults.py``),
by the entry's ``shown_by``. It runs with the entry removed from the tables, and returns whether the fault is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
from conftest import compiled
from onnx import TensorProto, helper
from operators import difference
from torch._dynamo.utils import counters
from torch.nn.functional import gelu, interpolate

import dynamo_backends
from dynamo_backends.common.upstream_faults import Fault
from dynamo_backends.exporter import upstream_faults
from dynamo_backends.runtime import kernel_faults, node_support
from dynamo_backends.runtime.messages import ORT_ERRORS

aten = torch.ops.aten
nan, inf = float("nan"), float("inf")
SPECIAL = torch.tensor([nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 3e38, -100.0])
PAIRS = (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))
TABLE = torch.tensor([[1.0, nan, 3.0, 3.0], [nan, nan, 0.0, inf], [2.0, 2.0, 1.0, -inf]])
LARGE = torch.tensor([2**31, -(2**31) - 1, 2**53 + 1, -(2**53) - 1, 2**62, 7, -7, 0, 2**63 - 1])

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PAGE = Path(__file__).parent.parent / "docs" / "upstream.md"


def faults() -> list[Fault]:
    """All entries of both tables."""
    return [*upstream_faults.FAULTS, *kernel_faults.FAULTS, *kernel_faults.OPTIMIZER_FAULTS]


@contextlib.contextmanager
def unknown(name: str) -> Iterator[None]:
    """Removes the entries that a demonstration shows from the tables, and clears the caches of their answers."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (upstream_faults, kernel_faults):
            patch.setattr(module, "FAULTS", tuple(fault for fault in module.FAULTS if fault.shown_by != name))
        patch.setattr(node_support.ANSWERS, "known", {})
        yield


def differs(function: Callable[..., object], *args: torch.Tensor, by: float | None = None) -> Callable[[], bool]:
    """A demonstration: compiled, entirely on ONNX Runtime, the function returns another result than eager's.

    Args:
        function: what is compiled.
        args: its arguments.
        by: the error that counts, if the default tolerances are too large.
    """

    def run() -> bool:
        torch._dynamo.reset()
        counters.clear()
        expected = function(*args)
        actual = compiled(function, dynamic=False)(*args)
        fallbacks = [event for event in counters["dynamo_backends"] if event.startswith("fallback")]
        assert not fallbacks, f"the demonstration does not reach ONNX Runtime: {fallbacks}"
        if by is not None:
            return bool((actual - expected).abs().max() > by)  # type: ignore[operator]
        return difference(actual, expected) is not None

    return run


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    """The output of a Python program."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)


_DIVIDES = """
import numpy as np, onnxruntime
from onnx import TensorProto, helper
infos = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in "xyz"]
graph = helper.make_graph([helper.make_node("Div", ["x", "y"], ["z"])], "divide", infos[:2], infos[2:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
try:
    session.run(None, {"x": np.array([DIVIDEND]), "y": np.array([DIVISOR])})
except Exception:
    pass
print("survived")
"""


def _division_ends_the_process(dividend: int, divisor: int) -> Callable[[], bool]:
    script = _DIVIDES.replace("DIVIDEND", str(dividend)).replace("DIVISOR", str(divisor))
    return lambda: "survived" not in in_a_process(script).stdout


def _scatter_loses_sums() -> bool:
    """The script of ``docs/upstream.md``."""
    if CORES < 2:
        pytest.skip("two threads race only where there are two cores")
    [script] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    run = in_a_process(script)
    assert run.returncode == 0, run.stderr
    wrong = {int(threads): int(runs) for threads, runs in re.findall(r"threads (\d+): (\d+) of", run.stdout)}
    assert wrong.keys() == {1, 2, 4}, run.stdout
    assert wrong[1] == 0, run.stdout
    return wrong[2] + wrong[4] > 0  # where the cores are busy, a tenth of the runs


def _scatter_writes_in_any_order() -> bool:
    """The last of repeated indices should be written last; with several threads it is not always."""
    if CORES < 2:
        pytest.skip("two threads race only where there are two cores")
    rows, width = 200_000, 16
    infos = [
        helper.make_tensor_value_info("data", TensorProto.FLOAT, [1, width]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, [rows, 1]),
        helper.make_tensor_value_info("updates", TensorProto.FLOAT, [rows, width]),
    ]
    written = helper.make_tensor_value_info("written", TensorProto.FLOAT, [1, width])
    node = helper.make_node("ScatterND", ["data", "indices", "updates"], ["written"])
    graph = helper.make_graph([node], "scatter", infos, [written])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        "data": np.zeros((1, width), np.float32),
        "indices": np.zeros((rows, 1), np.int64),
        "updates": np.arange(rows, dtype=np.float32).repeat(width).reshape(rows, width),
    }
    return any((session.run(None, feeds)[0] != rows - 1).any() for _ in range(100))


def _sum_of_exponentials_underflows() -> bool:
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    node = helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=0)
    graph = helper.make_graph([node], "sum", infos, [result], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [result] = session.run(None, {"x": np.array([[-np.inf, -200], [-np.inf, -200]], np.float32)})
    return not np.allclose(result, -200)


def _product_saturates() -> bool:
    """Of the largest uint8 and int8; with VNNI it does not."""
    if any(has for name, has in torch.cpu.get_capabilities().items() if "vnni" in name or name == "amx_int8"):
        pytest.skip("the kernels for processors with VNNI do not saturate")
    text = "g (uint8[1,64] x, int8[64,64] w) => (int32[1,64] y) { y = MatMulInteger(x, w) }"
    result = _run_optimized(text, x=np.full((1, 64), 255, np.uint8), w=np.full((64, 64), 127, np.int8))
    return bool((result != 64 * 255 * 127).any())


def _run_optimized(text: str, opset: int = 18, **feeds: np.ndarray) -> np.ndarray:
    """What ONNX Runtime's own settings make of an ONNX graph."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [result] = session.run(None, feeds)
    return result


def _minus_zero_stays() -> bool:
    text = "g (float[2] x) => (float[2] y) <float zero = {0.0}> { a = Neg(x) b = Add(a, zero) y = Reciprocal(b) }"
    return bool((_run_optimized(text, x=np.zeros(2, np.float32)) < 0).any())


def _scale_is_rounded() -> bool:
    text = "g (double[2,2] x) => (double[2,2] y) <double scale = {0.1}> { a = MatMul(x, x) y = Mul(a, scale) }"
    return bool(abs(_run_optimized(text, x=np.eye(2)) - np.eye(2) * 0.1).max() > 1e-12)


def _where_loses_a_sign() -> bool:
    text = """g (bool[2] c, float[2] x, float[2] y) => (float[2] z)
        { n = Not(c) a = Where(n, x, y) z = Reciprocal(a) }"""
    zeros = np.array([-0.0, -0.0], np.float32)
    return bool((_run_optimized(text, c=np.array([True, True]), x=zeros + 1, y=zeros) > 0).any())


def _exported_bag(dtype: torch.dtype) -> tuple[onnx.ModelProto, str]:
    """The file of a bag of embeddings, and how its results differ from eager's."""
    bag, args = torch.nn.EmbeddingBag(5, 4, mode="mean", dtype=dtype), (torch.tensor([1, 2, 4]), torch.tensor([0, 2]))
    with tempfile.TemporaryDirectory() as folder:
        exported = dynamo_backends.export(bag, *args, path=Path(folder, "bag.onnx"))
        return onnx.load(exported.path), exported.difference(*args)


def _bag_is_a_loop() -> bool:
    return any(node.op_type == "Loop" for node in _exported_bag(torch.float32)[0].graph.node)


def _bag_rounds_to_float32() -> bool:
    return bool(_exported_bag(torch.float64)[1])


def _samples_at_infinity() -> bool:
    text = """g (float[1,1,2,2] x, float[1,1,1,2] at) => (float[1,1,1,1] y)
        { y = GridSample<mode = "nearest">(x, at) }"""
    image, at = np.ones((1, 1, 2, 2), np.float32), np.array([np.inf, 0.0], np.float32)
    return bool(_run_optimized(text, x=image, at=at.reshape(1, 1, 1, 2)) != 0)


def _smaller_images_have_other_weights() -> bool:
    text = """g (float[1,1,6,8] x, int64[4] size) => (float[1,1,3,4] y)
        { y = Resize<mode = "linear", antialias = 1>(x, , , size) }"""
    image = torch.linspace(0, 1, 48).sqrt().view(1, 1, 6, 8)
    expected = interpolate(image, size=(3, 4), mode="bilinear", antialias=True).numpy()
    actual = _run_optimized(text, x=image.numpy(), size=np.array([1, 1, 3, 4]))
    return not np.allclose(actual, expected, rtol=1e-3)


def _epsilon_loses_its_rank() -> bool:
    text = """<ir_version: 10, opset_import: ["" : 20]>
        m (float[2,4,8] x) => (float[1,2,4,8] z)
        <int64[1] last = {-1}, float two = {2.0}, float[1,1,1,1] e = {0.001}, float[8] w = {1,1,1,1,1,1,1,1}> {
            m = ReduceMean(x, last)  d = Sub(x, m)  p = Pow(d, two)  v = ReduceMean(p, last)
            a = Add(v, e)  s = Sqrt(a)  q = Div(d, s)  y = Mul(q, w)  z = Identity(y)
        }"""
    model = onnx.parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones((2, 4, 8), np.float32)})
    return result.shape == (2, 4, 8)


def _epsilon_is_taken_for_another() -> bool:
    text = """g (float[2,8] x, float e) => (float[2,8] y)
        <int64[1] last = {-1}, float two = {2.0}, float[8] w = {1,1,1,1,1,1,1,1}, float[8] b = {0,0,0,0,0,0,0,0}> {
            m = ReduceMean(x, last)  d = Sub(x, m)  p = Pow(d, two)  v = ReduceMean(p, last)
            a = Add(v, e)  s = Sqrt(a)  q = Div(d, s)  n = Mul(q, w)  y = Add(n, b)
        }"""
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    return bool(abs(_run_optimized(text, x=x, e=np.array(1e6, np.float32))).max() > 0.1)


ROWS = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
INTEGERS = ", ".join(str(number) for number in (np.arange(16 * 8) * 37 % 255 - 127).tolist())
FLOATS = ", ".join(str(number / 255) for number in (np.arange(16 * 8) * 37 % 255 - 127).tolist())


def _weights_are_multiplied_in_int8() -> bool:
    product = _run_optimized(
        f"""g (float[4,16] x) => (float[4,8] y)
            <int8[16,8] q = {{{INTEGERS}}}, float s = {{0.01}}, int8 z = {{3}}> {{
                w = DequantizeLinear(q, s, z)  y = MatMul(x, w)
            }}""",
        x=ROWS,
    )
    weights = (np.array(INTEGERS.split(", "), np.float64).reshape(16, 8) - 3) * 0.01
    return bool(abs(product - ROWS @ weights).max() > 1e-3)


def _float32_weights_are_quantized() -> bool:
    """What is returned is quantized in steps of 1e-3, the weights would be in steps of 4e-3."""
    product = _run_optimized(
        f"""g (uint8[4,16] x) => (float[4,8] y)
            <float[16,8] w = {{{FLOATS}}}, float a = {{0.01}}, uint8 b = {{120}}, float c = {{0.001}},
             int16 d = {{0}}> {{
                f = DequantizeLinear(x, a, b)  p = Gemm(f, w)  q = QuantizeLinear(p, c, d)
                y = DequantizeLinear(q, c, d)
            }}""",
        opset=21,
        x=(np.arange(64, dtype=np.uint8) * 37).reshape(4, 16),
    )
    rows = ((np.arange(64, dtype=np.uint8) * 37).reshape(4, 16).astype(np.float64) - 120) * 0.01
    weights = np.array(FLOATS.split(", "), np.float64).reshape(16, 8)
    return bool(abs(product - rows @ weights).max() > 2e-3)


def _two_quantizations_become_one() -> bool:
    text = """g (float[5] x) => (float[5] y)
        <float a = {0.5}, float b = {0.75}, int8 c = {0}, int8 d = {1}> {
            p = QuantizeLinear(x, a, c)  q = DequantizeLinear(p, a, c)
            r = QuantizeLinear(q, b, d)  y = DequantizeLinear(r, b, d)
        }"""
    result = _run_optimized(text, x=np.array([1, 1.3, 2.5, 4.2, 100], np.float32))
    return result.tolist() != [0.75, 1.5, 2.25, 3.75, 63.75]


def _float64_is_normalized_in_float32() -> bool:
    text = """g (float[4,16] x) => (float[4,16] y)
        <int64[1] last = {-1}, float two = {2.0}, float e = {0.00001},
         float[16] w = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}, float[16] b = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}> {
            f = Cast <to = 11> (x)  t = Cast <to = 11> (two)  g = Cast <to = 11> (e)
            m = ReduceMean(f, last)  d = Sub(f, m)  p = Pow(d, t)  v = ReduceMean(p, last)
            a = Add(v, g)  s = Sqrt(a)  q = Div(d, s)  n = Cast <to = 1> (q)  k = Mul(n, w)  y = Add(k, b)
        }"""
    x = ROWS + 1000
    centered = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    exact = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return bool(abs(_run_optimized(text, x=x) - exact).max() > 1e-6)


def _exponent_is_taken_for_two() -> bool:
    """Of the negative numbers there is no such power."""
    text = """g (float[4,16] x) => (float[4,16] y)
        <int64[1] last = {-1}, float exponent = {2.00001}, float e = {0.00001},
         float[16] w = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}, float[16] b = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}> {
            m = ReduceMean(x, last)  d = Sub(x, m)  p = Pow(d, exponent)  v = ReduceMean(p, last)
            a = Add(v, e)  s = Sqrt(a)  q = Div(d, s)  k = Mul(q, w)  y = Add(k, b)
        }"""
    return not np.isnan(_run_optimized(text, x=ROWS)).all()


def _factor_is_taken_for_half() -> bool:
    text = """g (float[4,16] x) => (float[4,16] y) <float root = {1.4142135}, float one = {1.0}, float h = {0.500004}> {
            a = Div(x, root)  b = Erf(a)  c = Add(b, one)  d = Mul(x, c)  y = Mul(d, h)
        }"""
    exact = gelu(torch.from_numpy(ROWS).double()).numpy() * (0.500004 / 0.5)
    return bool(abs(_run_optimized(text, x=ROWS) - exact).max() > 2e-6)


def _padding_takes_no_part() -> bool:
    text = """g (float[1,1,2,2] x) => (float[1,1,2,2] y) <int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}> {
            p = Pad(x, pads)  y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (p)
        }"""
    return bool((_run_optimized(text, x=np.full((1, 1, 2, 2), -1, np.float32)) != 0).any())


def _relu_and_clip_fail() -> bool:
    text = """g (double[2] x) => (double[2] y) <double low = {-1.0}, double high = {6.0}> {
            r = Relu(x)  y = Clip(r, low, high)
        }"""
    try:
        _run_optimized(text, x=np.zeros(2))
    except ORT_ERRORS:
        return True
    return False


def _unique_loses_nan() -> bool:
    text = "g (float[4] x) => (float[N] y) { y = Unique(x) }"
    return len(_run_optimized(text, x=np.array([1, nan, nan, 1], np.float32))) != 3


def _closed_gate_is_inexact() -> bool:
    text = """g (float[1,1,1] x) => (float[1,1,1,1] y) <float[1,3,1] w = {16, -16, 1}, float[1,3,1] r = {0, 0, 0}>
        { y, h = GRU <hidden_size = 1> (x, w, r) }"""
    result = _run_optimized(text, x=np.ones((1, 1, 1), np.float32)).item()
    return result < 0.9 * np.tanh(1) / (1 + np.exp(16))


def _bias_loses_nan() -> bool:
    text = """g (float[1,1,1] x) => (float[1,1,1,1] y)
        <float[1,3,1] w = {1, 1, 1}, float[1,3,1] r = {0, 0, 0}, float[1,6] b = {0, 0, 0, 0, 0, 0}>
        { y, h = GRU <hidden_size = 1> (x, w, r, b) }"""
    return not np.isnan(_run_optimized(text, x=np.full((1, 1, 1), nan, np.float32))).any()


def cast_is_dropped() -> bool:
    """Of two casts the first, with all optimizations off too; the pass ``onnx.kept_casts`` keeps it."""
    text = "g (float[1] x) => (int8[1] y) { h = Cast <to = 10> (x) y = Cast <to = 3> (h) }"
    return _run_optimized(text, x=np.array([1.9999], np.float32)).tolist() != [2]


WRONG_VALUES: dict[object, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    aten.angle.default: (torch.angle, [SPECIAL]),
    aten.atan2.default: (torch.atan2, PAIRS),
    aten.erfc.default: (lambda x: torch.erfc(x).log(), [torch.tensor([3.0, 6.0])]),
    aten.frac.default: (lambda x: 1 / torch.frac(x), [SPECIAL]),
    aten.log10.default: (lambda x: (torch.log10(x) - 3) * 1e9, [torch.tensor([1000.0], dtype=torch.float64)]),
    aten.log2.default: (lambda x: (torch.log2(x) - 10) * 1e9, [torch.tensor([1024.0], dtype=torch.float64)]),
    aten.trunc.default: (lambda x: 1 / torch.trunc(x), [SPECIAL]),
    aten.heaviside.default: (torch.heaviside, PAIRS),
    aten.logcumsumexp.default: (lambda x: torch.logcumsumexp(x, 0), [TABLE]),
    aten.signbit.default: (torch.signbit, [SPECIAL]),
    aten.special_erfcx.default: (torch.special.erfcx, [torch.tensor([-2.0, 0.5, 3.0, 20.0])]),
}
"""By operator what shows that torchlib's translation of it is wrong."""

DEMONSTRATIONS: dict[str, Callable[[], bool]] = {
    "gelu by tanh in double precision": differs(
        lambda x: gelu(x, approximate="tanh"), torch.linspace(-3, 3, 50, dtype=torch.float64), by=1e-12
    ),
    "the smallest integer divided by -1": _division_ends_the_process(-(2**63), -1),
    "a sum at repeated indices loses updates": _scatter_loses_sums,
    "special values of operators that models hardly use": lambda: all(
        differs(function, *args)() for function, args in WRONG_VALUES.values()
    ),
    "coefficients that are infinite or NaN": differs(
        lambda x: torch.nn.functional.leaky_relu(x, float("inf")), torch.zeros(1)
    ),
    "embedding_bag results that its gradient needs": differs(
        lambda i, w: torch.ops.aten._embedding_bag(w, i, torch.tensor([0, 4]), False, 2),
        torch.arange(8),
        torch.randn(9, 5),
    ),
    "embedding_bag as a loop": _bag_is_a_loop,
    "embedding_bag in double precision": _bag_rounds_to_float32,
    "baddbmm with beta=0 and NaN": differs(
        lambda x, a: torch.baddbmm(x, a, a, beta=0), torch.full((1, 2, 2), nan), torch.ones(1, 2, 2)
    ),
    "sort of equal numbers": differs(lambda x: x.sort(0), TABLE.repeat(16, 1)),
    "topk of equal numbers": differs(lambda x: x.topk(2), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])),
    "NaN among the elements of unique": _unique_loses_nan,
    "closed gates of recurrent layers": _closed_gate_is_inexact,
    "NaN in a recurrent layer with a bias": _bias_loses_nan,
    "power of integers": differs(lambda x: 3**x, torch.tensor([39, 40])),
    "antialiased interpolation to a smaller size": _smaller_images_have_other_weights,
    "clip of large integers": differs(torch.nn.functional.relu6, LARGE),
    "product of large integers": differs(torch.prod, torch.tensor([2**53 + 1, 1])),
    "samples at infinite coordinates": _samples_at_infinity,
    "reductions of empty tensors": differs(lambda x: (x.mean(), x.sum(1)), torch.zeros(0, 3)),
    "addmm of empty matrices with beta": differs(
        lambda x, a, b: torch.addmm(x, a, b, beta=0.2), torch.full((3, 3), 2.0), torch.zeros(3, 0), torch.zeros(0, 3)
    ),
    "the logarithm of a sum of exponentials underflows": _sum_of_exponentials_underflows,
    "a product of uint8 with int8 saturates": _product_saturates,
    "the sum of -0 and 0": _minus_zero_stays,
    "a scaled product in double precision": _scale_is_rounded,
    "an epsilon of a higher rank than what is normalized": _epsilon_loses_its_rank,
    "a choice between zeros by a negated condition": _where_loses_a_sign,
    "an epsilon that is computed": _epsilon_is_taken_for_another,
    "repeated indices are written in any order": _scatter_writes_in_any_order,
    "a product with dequantized weights": _weights_are_multiplied_in_int8,
    "float32 weights between quantized activations": _float32_weights_are_quantized,
    "two quantizations in a row": _two_quantizations_become_one,
    "a normalization in double precision": _float64_is_normalized_in_float32,
    "a power that is nearly a square": _exponent_is_taken_for_two,
    "constants that are nearly those of gelu": _factor_is_taken_for_half,
    "the largest of padded numbers": _padding_takes_no_part,
    "Relu and Clip in double precision": _relu_and_clip_fail,
}
