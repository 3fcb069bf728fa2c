"""Results of which nothing else is known: the whole computation is one segment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same_values
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.common.random_state import RandomState
from dynamo_backends.numerics.exact import widen
from dynamo_backends.numerics.function_runs import FunctionRun, Recording, Rerun, UnstableError
from dynamo_backends.numerics.whole_graph import FunctionCheck, difference_of_results, graph_check

aten = torch.ops.aten


def check_of(function: Callable[..., list[Any]], *arguments: object, **settings: Any) -> FunctionCheck:
    return FunctionCheck(function, arguments, RandomState.now(), **settings)


def test_the_float64_run_is_of_the_same_values() -> None:
    x = torch.rand(5)
    check = check_of(lambda x: [x / 3, x > 0.5, 7], x)
    assert_same_values(check.eager, {0: x / 3, 1: x > 0.5, 2: 7})
    assert_same_values(check.exact, {0: x.double() / 3, 1: x > 0.5, 2: 7})
    assert not check.inexact


DISCRETE = {
    "a comparison that float64 turns": lambda x: [torch.where((x + 1) - 1 == x, x, -x)],
    "an index": lambda x: [x[(((x + 1) - 1) - x).abs().argmax()]],
    "a number of the tensor": lambda x: [x * bool(((x[0] + 1) - 1 == x[0]).item())],
    "a rounded integer": lambda x: [(x * 16777217).long() * 1.0],
    "bits": lambda x: [x.view(torch.int32) & 7],
    "random numbers": lambda x: [torch.rand_like(x) + torch.randn(5)],
    "random numbers in place": lambda x: [torch.empty_like(x).uniform_() * x],
    "dropout": lambda x: [torch.nn.functional.dropout(x, 0.5)],
    "dropout of all": lambda x: [*aten.native_dropout.default(x, 1.0, True)],
}


@pytest.mark.parametrize("name", DISCRETE)
def test_float64_does_not_decide_what_is_not_continuous(name: str) -> None:
    x = torch.tensor([0.1, 0.3, 0.7, 0.9, 0.33])
    state = torch.get_rng_state()
    check = check_of(DISCRETE[name], x)
    exact, eager = ({key: widen(value) for key, value in values.items()} for values in (check.exact, check.eager))
    assert_same_values(exact, eager, rtol=1e-6, atol=1e-7)  # eager's rounding; another decision changes elements
    assert torch.equal(torch.get_rng_state(), state), "random numbers leave no trace"


class RejectedError(Exception):
    """Of a user's own."""


@pytest.mark.parametrize("error", [RuntimeError, RejectedError])
def test_an_operator_that_float64_does_not_have(error: type[Exception]) -> None:
    name = f"single_{error.__name__.lower()}"

    @torch.library.custom_op(f"test_whole_graph::{name}", mutates_args=())
    def single(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise error("float32 only\nand more")
        return x * 2

    check = check_of(lambda x: [single(x) / 3], torch.rand(3))
    assert check.exact[0].dtype is torch.float64
    assert check.inexact == {f"test_whole_graph.{name}.default": f"no float64: {error.__name__}: float32 only"}


@pytest.fixture
def unstable() -> Iterator[Callable[..., Any]]:
    """Makes a custom operator that adds to its argument what a function returns, which sees how often it was called."""
    with torch.library._scoped_library("test_whole_graph", "FRAGMENT") as library:

        def make(added: Callable[[int], float], name: str = "unstable") -> Any:
            calls = itertools.count()
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + added(next(calls)), "CPU")
            return getattr(torch.ops.test_whole_graph, name)

        yield make


@pytest.mark.parametrize("is_wide", [True, False], ids=["float64", "only eager"])
@pytest.mark.parametrize(
    "added", [lambda i: i * 0.1, lambda i: float(i == 3), lambda i: i % 7], ids=["always", "once", "rarely"]
)
def test_what_is_not_the_same_in_each_run_excuses_nothing(
    unstable: Callable[..., Any], added: Callable[[int], float], is_wide: bool
) -> None:
    """An operator that draws numbers by itself, or has a race: perturbed runs contain its noise."""
    operator, x = unstable(added), torch.rand(4)
    check = check_of(lambda x: [operator(x), x.exp()], x, is_wide=is_wide)
    with pytest.raises(UnstableError):
        check.judge(0, check.eager[0] + 0.5)
    assert check.judge(1, x.exp() * (1 + 1e-7)).is_wrong is False
    assert check.judge(1, x.exp() * 1.001).is_wrong, "another result is judged"


def test_an_operator_that_returns_other_numbers_is_named(unstable: Callable[..., Any]) -> None:
    operator, steady, x = unstable(float), unstable(lambda i: 1.0, "steady"), torch.rand(4)
    wrong = [x + 0.5]
    message = difference_of_results([x], wrong, lambda: check_of(lambda x: [steady(operator(x.sin()))], x))
    assert "test_whole_graph.unstable.default" in message and "steady" not in message


def test_an_integer_that_is_not_the_same_in_each_run(unstable: Callable[..., Any]) -> None:
    operator, x = unstable(float), torch.rand(4)
    with pytest.raises(UnstableError):
        check_of(lambda x: [operator(x).long()], x).judge(0, torch.full((4,), 3))


def test_what_was_not_recorded_is_rounded_as_it_is_told() -> None:
    """A function inside of another may have no call in the recorded run; in float64, it is rounded as float64 is."""
    x = torch.rand(50, dtype=torch.float64)
    exact = Rerun(Recording(), seed=1, otherwise=torch.float64)
    with exact:
        changed = torch.sigmoid(x)
    assert float((changed - x.sigmoid()).abs().max()) < 1e-14


def test_terms_that_cancel() -> None:
    """An error that eager, by chance, does not make; of gradients too."""
    x = torch.ones(4, requires_grad=True)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [((x + 1e4) - 1e4).detach(), y * 2, (x * 1e4 - x * 1e4 + x).sum() + y.sum()]

    def gradients(run: FunctionRun) -> dict[object, object]:
        return dict(enumerate(run.gradients([run.returned[2]], [torch.ones(())], run.leaves)))  # type: ignore[arg-type]

    for check in (check_of(function, x, x), check_of(function, x, x, values_of=gradients)):
        right = [check.eager[i].detach() for i in (0, 1)]  # type: ignore[attr-defined]
        wrong = {error: [check.judge(i, right[i] + error).is_wrong for i in (0, 1)] for error in (0, 1e-3, 0.1)}
        assert wrong == {0: [False, False], 1e-3: [False, True], 0.1: [True, True]}
        assert check.judge(0, right[0][:2]).is_wrong


def test_a_shape_may_depend_on_a_comparison() -> None:
    check = check_of(lambda x: [x * 2, x[x * 3 > 1].view(0, 7)], torch.ones(50) / 3)
    assert check.judge(0, torch.ones(50)).is_wrong


def test_a_comparison_near_a_tie() -> None:
    x = torch.tensor([1 / 3, 0.1, 0.9])
    check = check_of(lambda x: [x * 3 > 1], x)
    tie = check.eager[0].clone()  # type: ignore[attr-defined]
    tie[0] = ~tie[0]
    assert not check.judge(0, tie).is_wrong
    tie[1] = True
    assert check.judge(0, tie).is_wrong
    whole = check_of(lambda x: [x == 2], torch.tensor([2.0, 3.0]))
    assert whole.judge(0, torch.tensor([False, False])).is_wrong, "whole numbers that are compared are exact"


FAULTS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "scaled": lambda y, size: y * (1 + size),
    "one element": lambda y, size: torch.cat([y[:1] * (1 + size), y[1:]]),
    "columns beside an outlier": lambda y, size: torch.cat([y[:, :-1] * (1 + size), y[:, -1:]], 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_graph(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    b[:, -1] *= 1e5 if dtype is torch.float32 else 10

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b) + 1

    given = a.to(dtype), b.to(dtype)
    module, state = make_fx(function)(*given), RandomState.now()
    check = graph_check(module, given, state)
    in_another_order = function(*(item.double() for item in given)).to(dtype)
    assert not check.judge(0, in_another_order).is_wrong
    expected, size = function(*given), 200 * torch.finfo(dtype).eps
    wrong = FAULTS[name](expected.double(), size).to(dtype)
    assert difference_of_results([expected], [wrong], lambda: check) == "result 0 has other values"


def test_what_is_not_initialized_may_have_any_value() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.empty_like(x)
        y[0] = x[0]
        return [y, y + x]

    check = check_of(function, torch.ones(3, 4))
    for i, number in ((0, 1.0), (1, 2.0)):
        value = torch.full((3, 4), 1e20)
        value[0] = number
        assert not check.judge(i, value).is_wrong
        value[0, 1] = number * 1.001
        assert check.judge(i, value).is_wrong


def test_what_rounding_changes_beyond_recognition_is_not_called_right() -> None:
    def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = 4 * x * (1 - x)  # doubles an error
        return x

    torch.manual_seed(0)
    x, other = torch.rand(64), torch.rand(64)

    def difference(actual: torch.Tensor, times: int) -> str:
        module, state = make_fx(lambda x: [repeated(x, times)])(x), RandomState.now()
        return difference_of_results([repeated(x, times)], [actual], lambda: graph_check(module, (x,), state))

    assert difference(repeated(x.double(), 10).float(), 10) == ""
    assert difference(other, 10) == "result 0 has other values"
    assert "beyond recognition" in difference(other, 100)


def test_a_result_that_is_nothing_but_rounding_does_not_count_if_others_can_be_told() -> None:
    x = torch.rand(64)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + 1) - 1 - x, x * 2, x * 3]

    module, state = make_fx(function)(x), RandomState.now()
    expected = function(x)
    assert (
        difference_of_results(expected, [-expected[0], *expected[1:]], lambda: graph_check(module, (x,), state)) == ""
    )
