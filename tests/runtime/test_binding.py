"""The inputs and results of a session, and what happens if a session fails."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted, runnable_region
from onnxruntime.capi import _pybind_state
from onnxscript import opset18 as op
from torch.autograd import forward_ad

from dynamo_backends.errors import SessionError, WrongResultError
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.runtime import ort_internals
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings
from dynamo_backends.runtime.tensors import memory_from_ort, to_ort

FLOAT = torch.float32


def session_of(text: str, inputs: list[InputSpec], outputs: list[OutputSpec], threads: int | None = 1) -> Session:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    return Session(model, SessionSettings(("CPUExecutionProvider",), threads=threads), inputs, outputs)


# Versions of ONNX Runtime


class NoSuchName:
    """A library in which a name is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            raise AttributeError(name)
        return getattr(_pybind_state, name)


class OtherValue:
    """An ``OrtValue`` whose private functions take other arguments."""

    from_dlpack = staticmethod(lambda data, stream: data)


@pytest.mark.parametrize("lost", ["OrtValueVector", "OrtValue", "OrtDevice", "from_dlpack", "the module"])
def test_a_version_without_private_parts_is_called_by_its_public_ones(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ort_internals.choose().is_private, "of this version they are known"
    if lost == "from_dlpack":
        monkeypatch.setattr(_pybind_state, "OrtValue", OtherValue)
    else:
        module = None if lost == "the module" else NoSuchName(lost)
        monkeypatch.setitem(sys.modules, "onnxruntime.capi._pybind_state", module)
        monkeypatch.setattr(onnxruntime.capi, "_pybind_state", module)
    assert not ort_internals.choose().is_private


PUBLIC = """
from onnxruntime.capi import _pybind_state
del _pybind_state.InferenceSession.run_with_ortvaluevector
import torch
from torch.testing import assert_close
from dynamo_backends.runtime.ort_internals import CALLS
assert not CALLS.is_private

def compute(x, n):
    half = x.to(torch.bfloat16)
    return x.tanh() + n, x > 0, (x > 0) & (x < 1), half * 2, x.sum().long(), x[:0] + 1, x.t() * 2, x.shape[0] + 1

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
for dynamic in (False, True):
    torch._dynamo.reset()
    options = {"cache": False, "placement": "onnx"}
    compiled = torch.compile(compute, backend="onnxrt", options=options, dynamic=dynamic)
    x = torch.randn(3, 4)
    for _ in range(3):  # the first call judges the results, the others have memory for them
        assert_close(compiled(x, 3), compute(x, 3))
    trained = torch.compile(model, backend="onnxrt", options=options, dynamic=dynamic)
    for _ in range(2):
        with torch.no_grad():
            assert_close(trained(x), model(x))
        loss, expected = trained(x).sum(), model(x).sum()
        ours = torch.autograd.grad(loss, list(model.parameters()))
        assert_close(ours, torch.autograd.grad(expected, list(model.parameters())))
counters = torch._dynamo.utils.counters["dynamo_backends"]
assert counters["nodes_on_onnx"] and not counters["runtime_failures"] and not counters["wrong_results"], counters
"""


def test_the_public_interface_computes_the_same() -> None:
    ran = subprocess.run([sys.executable, "-c", PUBLIC], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("public interface") == 1, "one warning"


# Arguments


@pytest.mark.parametrize(
    "argument",
    [
        torch._neg_view(torch.randn(3, 4)),
        torch._neg_view(torch.randn(3, 4)).t(),
        torch.randn(1, dtype=torch.complex64).conj().imag,
        torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    ],
    ids=["contiguous", "transposed", "one element", "of complex numbers"],
)
def test_an_argument_with_the_negative_bit_is_negated(argument: torch.Tensor) -> None:
    """Its memory holds the number with the other sign."""
    assert argument.is_neg()
    torch.testing.assert_close(memory_from_ort(to_ort(argument)), argument.resolve_neg())
    assert_same_as_eager(lambda x: (x.exp(), x * 2), argument)
    assert_on_onnx()


def test_arguments_in_any_memory_order_go_in_as_they_read() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    text = "g (float[a,b,c] x__memory) => (float[d,e,f] y) { y = Identity(x__memory) }"
    for permutation in [(0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)]:
        inverse = [permutation.index(i) for i in range(3)]
        argument = x.permute(permutation).contiguous().permute(inverse)  # x in the memory order of the permutation
        session = session_of(text, [InputSpec("x__memory", FLOAT, permutation)], [OutputSpec("y", FLOAT)])
        assert torch.equal(session([argument])[0], x.permute(permutation))
        outputs = [OutputSpec("y", FLOAT, permutation=permutation)]
        (result,) = session_of(text, [InputSpec("x__memory", FLOAT, permutation)], outputs)([argument])
        assert torch.equal(result, x)
        assert result.stride() == argument.stride()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64], ids=str)
def test_arguments_with_gaps_in_memory_are_copied(dtype: torch.dtype) -> None:
    for view in (lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x.t(), lambda x: x[:, :1].expand(4, 6)):
        argument = view((torch.randn(4, 6) * 3).to(dtype))
        assert torch.equal(memory_from_ort(to_ort(argument)).view(dtype), argument)
        assert_same_as_eager(lambda x: x | x if x.dtype is torch.bool else x * x, argument)
    assert_on_onnx()


def test_arguments_are_not_copied() -> None:
    for x in [torch.randn(3, 4), torch.randn(3, 4) > 0]:
        assert to_ort(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_zeros_without_memory_get_some(dtype: torch.dtype) -> None:
    """Autograd passes them on; ONNX Runtime would read from address 0."""
    zeros = torch._efficientzerotensor(3, dtype=dtype)
    assert zeros._is_zerotensor()
    assert torch.equal(memory_from_ort(to_ort(zeros)).view(dtype), torch.zeros(3, dtype=dtype))


def test_too_few_arguments_are_an_error() -> None:
    text = "g (float[a] x, float[a] z) => (float[a] y) { y = Add(x, z) }"
    session = session_of(text, [InputSpec("x", FLOAT), InputSpec("z", FLOAT)], [OutputSpec("y", FLOAT)])
    with pytest.raises(ValueError, match="1 .* 2$"):
        session([torch.ones(2)])


@pytest.mark.parametrize(("number", "dtype"), [(7, torch.int64), (-(2**40), torch.int64), (True, torch.bool)])
def test_numbers_go_in_and_come_out(number: int | bool, dtype: torch.dtype) -> None:
    kind = "bool" if dtype is torch.bool else "int64"
    text = f"g ({kind} n) => ({kind} y) {{ y = Identity(n) }}"
    session = session_of(text, [InputSpec("n", None)], [OutputSpec("y", dtype, is_number=True)])
    (result,) = session([number])
    assert result == number and type(result) is type(number)


def test_the_default_device_is_not_where_arguments_and_results_are() -> None:
    """``torch.device("meta")`` stands for the GPU of somebody's ``set_default_device``."""
    text = """g (int64 n, bool b, float[1] x) => (int64 m, bool c, float[3] y) {
        m = Identity(n) c = Not(b) s = Constant<value_ints=[3]>() y = Expand(x, s) }"""
    inputs = [InputSpec("n", None), InputSpec("b", None), InputSpec("x", FLOAT)]
    numbers = [OutputSpec("m", torch.int64, is_number=True), OutputSpec("c", torch.bool, is_number=True)]
    session = session_of(text, inputs, [*numbers, OutputSpec("y", FLOAT, strides=(0,))])
    x = torch.ones(1)
    with torch.device("meta"):
        number, truth, result = session([5, False, x])
    assert (number, truth) == (5, True)
    assert isinstance(result, torch.Tensor) and result.device == x.device
    assert torch.equal(result, torch.ones(3))


# Results

EXPANDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "rows": (lambda x: (x * 2).expand(5, 3), (0, 1)),
    "columns": (lambda x: (x * 2)[:, None].expand(3, 5), (1, 0)),
    "scalar": (lambda x: x.sum().expand(4, 5), (0, 0)),
    "in the middle": (lambda x: (x[:, None, None] * x).expand(3, 6, 3), (3, 0, 1)),
}


@pytest.mark.parametrize(("function", "strides"), EXPANDED.values(), ids=EXPANDED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_expanded_result_keeps_its_strides_and_its_little_memory(
    function: Callable[[torch.Tensor], torch.Tensor], strides: tuple[int, ...], requires_grad: bool
) -> None:
    x = torch.randn(3, requires_grad=requires_grad)
    assert_same_as_eager(function, x)
    result = compiled(function)(x)
    assert isinstance(result, torch.Tensor)
    assert result.stride() == function(x).stride() == strides
    assert result.untyped_storage().nbytes() == function(x).untyped_storage().nbytes()


@pytest.mark.parametrize(("kind", "dtype"), [("float", torch.float32), ("int64", torch.int64), ("bool", torch.bool)])
def test_a_session_presents_expanded_results(kind: str, dtype: torch.dtype) -> None:
    text = f"g ({kind}[2,3] x) => ({kind}[2,3] y) {{ y = Identity(x) }}"
    x = torch.tensor([3, 0, -1]).to(dtype).expand(2, 3)
    (result,) = session_of(text, [InputSpec("x", dtype)], [OutputSpec("y", dtype, strides=(0, 1))])([x])
    assert (result.dtype, result.stride()) == (dtype, (0, 1))
    assert torch.equal(result, x)


# Threads


def test_each_number_of_threads_has_its_session() -> None:
    text = "g (float[a] x) => (float[a] y) { y = Exp(x) }"
    follows = session_of(text, [InputSpec("x", FLOAT)], [OutputSpec("y", FLOAT)], threads=None)
    fixed = session_of(text, [InputSpec("x", FLOAT)], [OutputSpec("y", FLOAT)], threads=2)
    assert fixed.threads == 2
    assert fixed.variant(threads=3).threads == follows.variant(threads=3).threads == 3
    assert fixed.threads == 2, "the other one is a session of its own"
    assert follows.threads == torch.get_num_threads()
    torch.set_num_threads(follows.threads + 1)
    assert follows.threads == torch.get_num_threads()
    follows([torch.ones(2)])
    assert follows.ort_session(follows.threads).get_session_options().intra_op_num_threads == follows.threads


# Failures


def fails_for_large_values(x: object) -> object:
    """Fails at run time if the largest value is 1 or more, by an index out of range."""
    index = op.Cast(op.Floor(op.ReduceMax(x, keepdims=0)), to=7)
    return op.Add(op.Sinh(x), op.Gather(op.Constant(value_floats=[0.0]), index))


@pytest.mark.parametrize("dynamic", [False, True])
def test_pytorch_makes_good_for_a_failure_and_it_is_counted(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sinh.default, fails_for_large_values)
    function = compiled(lambda x: x.sinh() * 2, dynamic=dynamic)
    fails, works = torch.rand(2, 3) + 1, torch.rand(2, 3)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for number, x in enumerate([works, fails, works, fails]):
            torch.testing.assert_close(function(x), x.sinh() * 2)
            assert counted("runtime_failures") == (number + 1) // 2
    assert counted("wrong_results") == 0
    (record,) = caplog.records
    assert "region 0" in record.getMessage()


def test_a_failure_is_an_error_and_counted_when_fallback_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sinh.default, fails_for_large_values)
    function = compiled(lambda x: x.sinh() * 2, options={"fallback": "error"})
    torch.testing.assert_close(function(torch.zeros(2, 3)), torch.zeros(2, 3))
    for number in (1, 2):
        with pytest.raises(SessionError, match=r"inference region 0: .*fallback"):
            function(torch.ones(2, 3))
        assert counted("runtime_failures") == number


def test_a_run_that_is_repeated_is_counted_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails with memory for the results, and ONNX Runtime allocates them in the second run."""
    calls = ort_internals.CALLS
    run = calls.run

    def without_memory(*args: object) -> object:
        if args[4]:
            raise RuntimeError("no such memory")
        return run(*args)

    monkeypatch.setattr(calls, "run", without_memory)
    function, x = compiled(lambda x: x.sinh() * 2), torch.rand(2, 3)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for number in (1, 2):
            torch.testing.assert_close(function(x), x.sinh() * 2)
            assert counted("repeated_runs") == number
    assert counted("runtime_failures") == 0
    (record,) = caplog.records
    assert "no such memory" in record.getMessage()


def fails(args: object) -> list[object]:
    raise SessionError("no such index\nand more lines")


def test_a_region_tells_of_its_first_failure_and_remembers_the_last(caplog: pytest.LogCaptureFixture) -> None:
    region = runnable_region(fails, lambda x: [x + 1], GraphName(7, "forward"), 2)  # type: ignore[operator]
    assert (region.failures, region.last_failure) == (0, "")
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for number in (1, 2, 3):
            assert region(number) == [number + 1]
            assert region.failures == number and region.last_failure.endswith(": no such index")
            (record,) = caplog.records
    assert record.getMessage().startswith("graph 7 forward region 2: ") and "no such index" in record.getMessage()


def test_a_region_tells_once_that_pytorch_computes_tangents(caplog: pytest.LogCaptureFixture) -> None:
    region = runnable_region(fails, lambda x: [x + 1], GraphName(7), 2)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "dynamo_backends"), forward_ad.dual_level():
        for number in (1, 2):
            assert region(number) == [number + 1]
            (record,) = caplog.records
    assert record.getMessage().startswith("graph 7 region 2: ") and "forward-mode AD" in record.getMessage()
    assert (counted("calls_inside_forward_ad"), region.failures) == (2, 0)
    region.must_run_on_onnx = True
    with forward_ad.dual_level(), pytest.raises(SessionError, match="forward-mode AD.*fallback"):
        region(1)


def test_a_wrong_result_keeps_no_arguments_alive() -> None:
    """Its error is remembered; one with a traceback would keep the batch."""
    text = "agraph (float[n] x) => (float[m] y) { y = Concat<axis = 0>(x, x) }"
    sizes = ("n",)
    session = session_of(text, [InputSpec("x", FLOAT, sizes=sizes)], [OutputSpec("y", FLOAT, sizes=sizes)])

    def call() -> weakref.ref[torch.Tensor]:
        x = torch.ones(3)
        with pytest.raises(WrongResultError, match="shape"):
            session([x])
        return weakref.ref(x)

    batches = [call(), call()]
    gc.collect()
    assert [batch() for batch in batches] == [None, None]
