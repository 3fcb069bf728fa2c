"""The results of a compiled function: structure, aliases, constants, Python values."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable

import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from transformers.modeling_outputs import BaseModelOutput

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def test_several_outputs() -> None:
    assert_same_as_eager(lambda x: (x + 1, x * 2, x.sum()), x())
    assert_on_onnx()


def test_nested_outputs_with_none_and_python_values() -> None:
    assert_same_as_eager(lambda x: ((x + 1, (x * 2, None)), {"a": [x.sum(), 3, "text", 2.5, True]}), x())
    assert_on_onnx()


def test_named_tuple_and_ordered_dict() -> None:
    assert_same_as_eager(lambda x: (Point(x + 1, x - 1), OrderedDict(b=x * 2, a=x * 3)), x())
    assert_on_onnx()


def test_dataclass() -> None:
    pair = compiled(lambda x: Pair(x + 1, x.exp()))(torch.ones(3))
    assert isinstance(pair, Pair)
    torch.testing.assert_close(pair.first, torch.full((3,), 2.0))
    torch.testing.assert_close(pair.second, torch.ones(3).exp())
    assert_on_onnx()


def test_model_output_of_transformers() -> None:
    def forward(x: torch.Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=x.tanh(), hidden_states=(x + 1, x + 2))

    output = compiled(forward)(torch.ones(3))
    assert isinstance(output, BaseModelOutput)
    assert list(output.keys()) == ["last_hidden_state", "hidden_states"]
    torch.testing.assert_close(output.hidden_states[1], torch.full((3,), 3.0))
    assert_on_onnx()


def test_no_output() -> None:
    assert_same_as_eager(lambda x: None, x())
    assert_same_as_eager(lambda x: (x + 1).sum() and None, x())


def test_output_that_is_an_input() -> None:
    assert_same_as_eager(lambda x: x, x())
    assert_same_as_eager(lambda x: (x, x + 1, x), x())


def test_equal_outputs_do_not_share_memory() -> None:
    """Computed once or twice, in eager these are different tensors."""
    assert_same_as_eager(lambda x: (x * 2, x * 2, x * 2 + 0), x())
    assert_on_onnx()


def test_one_result_returned_twice_is_one_tensor() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y

    first, second = compiled(twice)(x())
    assert first is second


def test_copies_do_not_share_memory_with_the_input() -> None:
    assert_same_as_eager(lambda x: (x.clone(), x + 0, x.to(torch.float32, copy=True), x.contiguous()), x())


def test_views_of_an_input_are_views_of_it() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1), x.t(), x[1:], x.view(-1)[2:], x.unsqueeze(0), x.expand(2, 4, 6), *x.split(2)

    assert_same_as_eager(views, x())
    assert_same_as_eager(lambda x: (x + 1, *views(x), x * 2), x())


def test_views_of_a_result_are_views_of_it() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.t(), y[1:], y.view(-1), y.t()[2:], *y.chunk(2)

    assert_same_as_eager(views, x())
    assert_same_as_eager(views, x().requires_grad_())


@pytest.mark.parametrize("function", [lambda x: x > 0, lambda x: x.t() + 1, lambda x: x.t() > 0])
def test_a_result_that_is_no_view_has_no_base(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Dynamo guards the sizes of a base: what reads the result would be compiled more often than under eager."""
    with torch.no_grad():
        found = compiled(function, options={"placement": "onnx"})(torch.randn(2, 3))
    assert counted("regions") == 1 and found._base is None


def test_views_used_inside_and_returned() -> None:
    """The region keeps its own view; the returned one is taken outside."""

    def compute(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        t = y.t()
        return y, t, (t @ x).relu(), t[1:] * 2, t[1:]

    assert_same_as_eager(compute, x(), torch.randn(6, 5))
    assert counted("regions") == 1


def test_constants_are_new_in_each_call() -> None:
    """Who changes a constant result in place must not find it changed in the next call."""

    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, torch.ones(3), torch.tensor([1.0, 2.0]), torch.arange(4), torch.tensor(7)

    function = assert_same_as_eager(constants, x())
    with torch.no_grad():
        for result in function(torch.zeros(4, 6)):
            result.zero_()
        torch.testing.assert_close(function(torch.zeros(4, 6)), constants(torch.zeros(4, 6)))


def test_only_constants() -> None:
    assert_same_as_eager(lambda x: (torch.ones(2, 3), torch.arange(5) * 2), x())


def test_results_outlive_the_next_call_and_the_compiled_function() -> None:
    function = compiled(lambda x: (x * 3).relu())
    first = function(torch.ones(1000))
    function(torch.zeros(1000))
    del function
    torch._dynamo.reset()
    torch.testing.assert_close(first, torch.full((1000,), 3.0))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad_of_the_results_is_eagers(requires_grad: bool) -> None:
    def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * w, x + 1, (x > 0), x.argmax(), (x * w).detach()

    assert_same_as_eager(mixed, x(), torch.randn(6, requires_grad=requires_grad))


def test_python_arguments_of_every_kind() -> None:
    def call(x: torch.Tensor, n: int, f: float, flag: bool, text: str, scale: float = 1, **rest: int) -> object:
        y = x * n + f if flag and text == "plus" else x - n
        return y * scale + rest["extra"], n * 2, f / 2

    assert_same_as_eager(call, x(), 3, 2.5, True, "plus", scale=0.5, extra=7)
    assert_same_as_eager(call, x(), 3, 2.5, False, "plus", extra=7)


def test_nested_arguments() -> None:
    def call(batch: dict[str, object]) -> torch.Tensor:
        first, (second, third) = batch["pair"]  # type: ignore[misc]
        return first + second * third + batch["x"]

    assert_same_as_eager(call, {"pair": (x(), [x(), x()]), "x": x()})
    assert_on_onnx()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_without_work_makes_no_session(dynamic: bool) -> None:
    """Views alone, and the arithmetic of their sizes."""
    assert_same_as_eager(lambda x: x.view(x.shape[0] * 3, x.shape[1] // 3), x(), settings={"dynamic": dynamic})
    assert counted("graphs") == 1
    assert counted("regions") == 0
