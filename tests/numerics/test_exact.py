"""The float64 run: what it computes in float64, and that it does not affect other threads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_values, compiled, counted
from torch import fx

from dynamo_backends.common.random_state import RandomState
from dynamo_backends.numerics.exact import run_only_exact, widen
from dynamo_backends.numerics.randomness import PrivateRandomness

aten = torch.ops.aten

INTEGERS = torch.tensor([[3, 7, 1], [2, 5, 11]])
BOOLEANS = torch.tensor([True, False, True])

OF_THE_DEFAULT_DTYPE = {
    "a quotient of integers": (aten.div.Tensor, INTEGERS, INTEGERS + 1),
    "an integer by a number": (aten.div.Tensor, INTEGERS, 7),
    "a quotient of torch IR": (operator.truediv, INTEGERS, 7),
    "integers by a float": (aten.mul.Tensor, INTEGERS, 0.1),
    "booleans by a float": (aten.mul.Tensor, BOOLEANS, 0.1),
    "a float of torch IR": (operator.add, BOOLEANS, 0.1),
    "a function of integers": (aten.sin.default, INTEGERS),
    "a function of booleans": (torch.exp, BOOLEANS),
    "a root": (aten.pow.Tensor_Scalar, INTEGERS, 0.5),
    "integers by a complex number": (aten.mul.Tensor, INTEGERS, 0.1j),
    "numbers chosen": (torch.where, BOOLEANS, 0.1, 0.7),
    "numbers chosen in ATen": (aten.where.Scalar, BOOLEANS, 0.1, 0.7),
    "a number": (aten.scalar_tensor.default, 0.1),
    "a full tensor": (aten.full.default, [2, 3], 0.1),
    "a full tensor of torch IR": (torch.full, (2, 3), 0.1),
    "a range": (aten.arange.start_step, 0.1, 0.9, 0.1),
    "points of torch IR": (torch.linspace, 0.0, 1.0, 7),
    "a tensor of torch IR": (torch.tensor, [0.1, 0.7]),
    "ones": (torch.ones, 3),
    "a mean of numbers": (aten.mean.default, widen(INTEGERS.to(torch.float32) / 7)),
    "a window": (torch.hann_window, 6),
}


def call(target: Callable[..., object], *args: object) -> tuple[fx.Node, dict[fx.Node, object]]:
    """A node that calls ``target``, and the values of the nodes it reads."""
    graph = fx.Graph()
    values: dict[fx.Node, object] = {}

    def node_of(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(values)}")
        values[node] = value
        return node

    arguments = tuple(node_of(value) for value in args)
    return graph.call_function(target, arguments), values


@pytest.mark.parametrize("name", OF_THE_DEFAULT_DTYPE)
def test_a_result_of_the_default_dtype_is_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, *args = OF_THE_DEFAULT_DTYPE[name]
    torch.set_default_dtype(torch.float64)
    try:
        expected = target(*args)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch, "set_default_dtype", None)
    node, values = call(target, *args)
    exact = run_only_exact(node, values)
    assert isinstance(exact, torch.Tensor)
    assert exact.dtype in (torch.float64, torch.complex128)
    assert_same_values(exact, expected, rtol=1e-15, atol=0.0)


def test_a_function_of_the_users_own_is_called_once() -> None:
    """What it returns is all there is to know of it; a second call may do something a second time."""
    calls = []

    @torch.library.custom_op("test_exact::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * 0.5

    node, values = call(torch.ops.test_exact.half.default, INTEGERS)
    assert_same_values(run_only_exact(node, values), INTEGERS.double() * 0.5)
    assert len(calls) == 1


def test_results_of_which_some_have_no_floats() -> None:
    x = torch.tensor([2.0, 1.0]) / 3
    node, values = call(aten.sort.default, x)
    (given,) = values
    exact = torch.tensor([2.0, 1.0], dtype=torch.float64) / 3
    found = run_only_exact(node, {given: exact})
    assert_same_values(found, (exact.flip(0), torch.tensor([1, 0])), rtol=0.0, atol=0.0)
    node, values = call(operator.getitem, x, (None, slice(1, None)))
    assert_same_values(run_only_exact(node, values), x[None, 1:].double())
    method = node.graph.call_method("to", (next(iter(values)), torch.float16))
    assert_same_values(run_only_exact(method, dict.fromkeys(values, exact)), exact, rtol=0.0, atol=0.0)
    node, values = call(aten.sym_size.int, x, 0)
    assert run_only_exact(node, values) == 2


@pytest.mark.parametrize("options", [{}, {"verify_passes": True}], ids=str)
def test_a_comparison_leaves_what_other_threads_see(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default dtype and the number of threads are the process's: they are not even changed for a moment."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[0]) / 7 + x * torch.tensor(0.1)

    debug = compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path), **options})
    for name in ("default_dtype", "num_threads"):
        now = getattr(torch, f"get_{name}")()

        def check(new: object, now: object = now) -> None:
            assert new == now  # Dynamo sets what is set

        monkeypatch.setattr(torch, f"set_{name}", check)
    x = torch.randn(5)
    assert_same_values(debug(x), function(x))
    assert counted("compared_runs") == 1


def test_random_numbers_are_drawn_apart() -> None:
    """With the numbers that the process's generator would give, which stays as it is, also for other threads."""
    draws: list[Callable[[], torch.Tensor]] = [
        lambda: F.dropout(torch.ones(64), 0.3),
        lambda: F.dropout(torch.ones(64, dtype=torch.float16), 0.3),
        lambda: torch.rand(5),
        lambda: torch.randn_like(torch.ones(3)),
        lambda: torch.randint(0, 9, (4,)),
        lambda: torch.randperm(9),
        lambda: torch.ones(4).exponential_(),
        lambda: F.rrelu(-torch.ones(4), training=True),
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4)] * 3, dropout_p=0.5),
    ]
    for draw in draws:
        state = torch.manual_seed(5).get_state()
        expected, after = draw(), torch.get_rng_state()
        before = torch.manual_seed(7).get_state()
        with PrivateRandomness(RandomState(state)):
            assert torch.equal(draw(), expected)
            following = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(after)
        assert torch.equal(following, torch.rand(3))
