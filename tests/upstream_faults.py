"""What shows each known fault upstream: a small program that is right once the fault is mended.

``DEMONSTRATIONS`` has one for each entry of the tables of faults (``exporter/known_wrong.py``, ``runtime/kernels.py``),
by the entry's ``shown_by``. It is run with the entry taken out of the tables, and says whether the fault is there.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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

from dynamo_backends.exporter import known_wrong
from dynamo_backends.faults import Fault
from dynamo_backends.runtime import kernels, oracle

nan, inf = float("nan"), float("inf")
SPECIAL = torch.tensor([nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 3e38, -100.0])
PAIRS = (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))
TABLE = torch.tensor([[1.0, nan, 3.0, 3.0], [nan, nan, 0.0, inf], [2.0, 2.0, 1.0, -inf]])
LARGE = torch.tensor([2**31, -(2**31) - 1, 2**53 + 1, -(2**53) - 1, 2**62, 7, -7, 0, 2**63 - 1])

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PAGE = Path(__file__).parent.parent / "docs" / "upstream.md"


def faults() -> list[Fault]:
    """All entries of both tables."""
    return [*known_wrong.FAULTS, *kernels.FAULTS, *kernels.OPTIMIZER_FAULTS]


@contextlib.contextmanager
def unknown(name: str) -> Iterator[None]:
    """The tables without the entries that a demonstration shows, and nothing remembered of what they say."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (known_wrong, kernels):
            patch.setattr(module, "FAULTS", tuple(fault for fault in module.FAULTS if fault.shown_by != name))
        patch.setattr(oracle.ORACLE, "_known", collections.OrderedDict())
        yield


def differs(function: Callable[..., object], *args: torch.Tensor, by: float | None = None) -> Callable[[], bool]:
    """A demonstration: compiled, all of it on ONNX Runtime, the function returns another result than eager's.

    Args:
        function: what is compiled.
        args: its arguments.
        by: the error that counts, where the default tolerances are too wide.
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


def _in_a_process(script: str) -> subprocess.CompletedProcess[str]:
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
    return lambda: "survived" not in _in_a_process(script).stdout


def _scatter_loses_sums() -> bool:
    """The script of ``docs/upstream.md``."""
    if CORES < 2:
        pytest.skip("two threads race only where there are two cores")
    [script] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    run = _in_a_process(script)
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


def _run_optimized(text: str, **feeds: np.ndarray) -> np.ndarray:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
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


DEMONSTRATIONS: dict[str, Callable[[], bool]] = {
    "gelu by tanh in double precision": differs(
        lambda x: gelu(x, approximate="tanh"), torch.linspace(-3, 3, 50, dtype=torch.float64), by=1e-12
    ),
    "integer division by zero": _division_ends_the_process(1, 0),
    "the smallest integer divided by -1": _division_ends_the_process(-(2**63), -1),
    "a sum at repeated indices loses updates": _scatter_loses_sums,
    "product added to NaN without weight": differs(
        lambda x, a: torch.baddbmm(x, a, a, beta=0), torch.full((1, 2, 2), nan), torch.ones(1, 2, 2)
    ),
    "mean of scattered numbers": differs(
        lambda x, i, y: x.scatter_reduce(0, i, y, "mean"),
        torch.tensor([-5.0, 2.0, 3.0]),
        torch.tensor([0, 0, 1]),
        torch.tensor([2.0, -4.0, 3.0]),
    ),
    "extrema of scattered infinities": differs(
        lambda x, i, y: x.scatter_reduce(0, i, y, "amin", include_self=False),
        torch.zeros(2),
        torch.tensor([0, 0, 1]),
        torch.tensor([1.0, -2.0, torch.inf]),
    ),
    "sort of NaN": differs(lambda x: x.sort(0), TABLE),
    "topk of equal numbers": differs(lambda x: x.topk(2), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])),
    "power of integers": differs(lambda x: 3**x, torch.tensor([39, 40])),
    "antialiased interpolation with aligned corners": differs(
        lambda x: interpolate(x, size=(40, 23), mode="bilinear", antialias=True, align_corners=True),
        torch.linspace(0, 1, 256).view(1, 1, 16, 16),
    ),
    "antialiased interpolation by factors that make no whole sizes": differs(
        lambda x: interpolate(x, scale_factor=0.7, mode="bilinear", antialias=True),
        torch.linspace(0, 1, 256).view(1, 1, 16, 16).sin(),
    ),
    "interpolation of bytes": differs(
        lambda x: interpolate(x, size=(40, 23), mode="bilinear", antialias=True),
        torch.arange(256, dtype=torch.uint8).mul(37).view(1, 1, 16, 16),
    ),
    "clip of large integers": differs(torch.nn.functional.relu6, LARGE),
    "sum and product of large integers": differs(lambda x: x.sum(), torch.tensor([2**53 + 1, 0])),
    "reductions of nothing": differs(lambda x: (x.mean(), x.sum(1)), torch.zeros(0, 3)),
    "product of empty matrices added with a weight": differs(
        lambda x, a, b: torch.addmm(x, a, b, beta=0.2), torch.full((3, 3), 2.0), torch.zeros(3, 0), torch.zeros(0, 3)
    ),
    "the logarithm of a sum of exponentials underflows": _sum_of_exponentials_underflows,
    "the sum of -0 and 0": _minus_zero_stays,
    "a scaled product in double precision": _scale_is_rounded,
    "an epsilon of a higher rank than what is normalized": _epsilon_loses_its_rank,
    "a choice between zeros by a negated condition": _where_loses_a_sign,
    "an epsilon that is computed": _epsilon_is_taken_for_another,
    "repeated indices are written in any order": _scatter_writes_in_any_order,
}
