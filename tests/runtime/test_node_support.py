"""Whether ONNX Runtime can run a node: asked once for all threads, bounded, and dependent on the node only."""

from __future__ import annotations

import threading
from collections.abc import Callable

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_same_values, compiled, counted
from onnxscript import opset18 as op

from dynamo_backends.errors import Kind, Reason
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.runtime import node_support
from dynamo_backends.runtime.kernel_faults import reason_against_node
from dynamo_backends.runtime.node_support import AnswerCache
from dynamo_backends.runtime.opsets import maximum_opset

NO_MEMORY = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 7"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_support.ANSWERS, "known", {})


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The models of the sessions created from now on."""
    maximum_opset()  # it makes sessions the first time, as does the arena
    compiled(torch.cosh, dynamic=False)(torch.ones(1))
    torch._dynamo.reset()
    node_support.ANSWERS.known.clear()
    models: list[bytes] = []
    create = onnxruntime.InferenceSession

    def record(model: bytes, *args: object, **kwargs: object) -> object:
        models.append(model)
        return create(model, *args, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", record)
    return models


def test_answers_are_bounded_and_the_oldest_goes_first() -> None:
    asked: list[int] = []
    small = AnswerCache(most=3)

    def ask(number: int) -> Reason | None:
        return small.get(number, lambda: asked.append(number) or Reason(Kind.REJECTED, str(number)))

    for number in (1, 2, 3, 1, 4, 3, 4, 1):
        answer = ask(number)
        assert answer is not None and answer.text == str(number)
    assert asked == [1, 2, 3, 4, 1]
    assert len(small) == 3


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), None])
def test_what_was_not_about_the_node_is_asked_again(error: Exception | None) -> None:
    answers = iter([Reason(Kind.OUT_OF_MEMORY, "no memory"), None, Reason(Kind.REJECTED, "never asked")])

    def find_out() -> Reason | None:
        answer = next(answers)
        if error is not None and answer is not None:
            raise error
        return answer

    several = AnswerCache()
    first = several.get("question", find_out)
    assert first is not None and first.kind is Kind.OUT_OF_MEMORY
    assert counted("answers_out_of_memory") == 1
    assert several.get("question", find_out) is None
    assert several.get("question", find_out) is None


def test_many_threads_ask_at_once() -> None:
    shared, wrong = AnswerCache(most=5), []

    def ask(start: int) -> None:
        for number in range(start, start + 3000):
            question = number % 11
            answer = shared.get(question, lambda question=question: Reason(Kind.REJECTED, str(question)))
            if answer is None or answer.text != str(question):
                wrong.append(question)

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(shared) == 5


def test_alike_nodes_are_asked_of_once(sessions: list[bytes]) -> None:
    x = torch.randn(3)
    compiled(lambda x: x.sin().sin().sin(), dynamic=False)(x)
    first = len(sessions)
    assert first == 2  # the question, and the region
    torch._dynamo.reset()
    compiled(lambda x: x.sin().sin(), dynamic=False)(x)
    assert len(sessions) == first + 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x, y, wide, double: x.sin(), lambda x, y, wide, double: wide.sin()),
        (lambda x, y, wide, double: x.sin(), lambda x, y, wide, double: double.sin()),
        (lambda x, y, wide, double: x + 1, lambda x, y, wide, double: x + 2),
        (lambda x, y, wide, double: x.amax([0]), lambda x, y, wide, double: x.amax([1])),
        (lambda x, y, wide, double: x.add(y, alpha=2), lambda x, y, wide, double: x.add(y, alpha=3)),
        (lambda x, y, wide, double: x - y, lambda x, y, wide, double: x - x),
        (lambda x, y, wide, double: torch.cat([x, y]), lambda x, y, wide, double: torch.cat([x, x])),
        (lambda x, y, wide, double: x.sin(), lambda x, y, wide, double: x.cos()),
    ],
    ids=["shape", "dtype", "number", "list of numbers", "keyword", "argument", "list of arguments", "operator"],
)
def test_nodes_that_differ_in_one_thing_are_asked_of_one_by_one(
    first: Callable[..., object], second: Callable[..., object]
) -> None:
    """The runtime may run one and not the other."""
    arguments = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 4), torch.randn(3, 3).double()
    for questions, function in [(1, first), (2, second)]:
        torch._dynamo.reset()
        compiled(function, dynamic=False)(*arguments)
        assert len(node_support.ANSWERS) == questions


def test_an_allocation_that_failed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph runs all the same, and the next one is asked anew."""
    create = onnxruntime.InferenceSession

    def fail(*args: object, **kwargs: object) -> object:
        raise RuntimeError(NO_MEMORY)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = torch.randn(3)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    assert_same_values(compiled(function, dynamic=False)(x), function(x))
    assert counted("nodes_on_onnx") == 0
    monkeypatch.setattr(onnxruntime, "InferenceSession", create)
    torch._dynamo.reset()
    assert_same_values(compiled(function, dynamic=False)(x), function(x))
    assert counted("nodes_on_onnx") == 2


def test_a_translation_without_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def exhausted(x: ir.Value) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError
        return op.Sin(x)

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sin.default, exhausted)
    compiled(lambda x: x.sin() * 2, dynamic=False)(torch.randn(3))
    assert counted("fallback aten.sin.default") == 1
    torch._dynamo.reset()
    compiled(lambda x: x.sin() * 2, dynamic=False)(torch.randn(3))
    assert counted("fallback aten.sin.default") == 1, "it is asked again"


def test_another_translation_is_another_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that is registered after a first compile is asked for itself."""

    def refuse(x: ir.Value) -> object:
        raise ValueError("not this one")

    function: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.sin() * 2  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setitem(CONVERTERS, torch.ops.aten.sin.default, refuse)
        compiled(function, dynamic=False)(torch.randn(3))
    assert counted("fallback aten.sin.default") == 1
    torch._dynamo.reset()
    compiled(function, dynamic=False)(torch.randn(3))
    assert counted("fallback aten.sin.default") == 1


def test_passes_ask_the_same_cache(sessions: list[bytes]) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape([4]))
    for _ in range(2):
        refused = reason_against_node(ir.node("Erf", [value]), ("CPUExecutionProvider",), 18)
        assert refused is not None and refused.kind is Kind.REJECTED
        assert reason_against_node(ir.node("Neg", [value]), ("CPUExecutionProvider",), 18) is None
    assert len(sessions) == 2
    assert len(node_support.ANSWERS) == 2
