"""The pass ``pre_grad.activations``: which formulas it replaces by an activation, and which it leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from transformers.activations import ACT2FN

Function = Callable[[torch.Tensor], torch.Tensor]


def root_of_half(x: torch.Tensor) -> torch.Tensor:
    return x / math.sqrt(2.0)


FORMULAS: dict[str, Function] = {
    "gelu_new": ACT2FN["gelu_new"],
    "gelu_fast": ACT2FN["gelu_fast"],
    "gelu_python": ACT2FN["gelu_python"],
    "cube as a product": lambda x: x * 0.5 * (torch.tanh((x * x * x * 0.044715 + x) * 0.79788456) + 1),
    "cube by **": lambda x: (x + x * (0.7978845608028654 * (x + 0.044715 * x**3)).tanh()) / 2,
    "square": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * torch.square(x)))),
    "erf times half": lambda x: 0.5 * (x * (1.0 + torch.erf(x * 0.7071067811865476))),
    "erf, methods": lambda x: x.div(math.sqrt(2)).erf().add(1).mul(x).mul(0.5),
    "swish": lambda x: x * torch.sigmoid(x),
    "swish, method": lambda x: x.sigmoid() * x,
}

OTHERS: dict[str, Function] = {
    "quick_gelu": ACT2FN["quick_gelu"],
    "other factor": lambda x: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x**3))),
    "other power": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**4))),
    "other half": lambda x: 0.25 * x * (1 + torch.erf(root_of_half(x))),
    "of another tensor": lambda x: x[:1] * torch.sigmoid(x[1:]),
    "squared": lambda x: x * x * torch.sigmoid(x),
    "complement": lambda x: x * (1 - torch.sigmoid(x)),
    "gate": lambda x: x.chunk(2)[0] * torch.sigmoid(x.chunk(2)[1]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_of_activations(name: str) -> None:
    function = FORMULAS[name]
    x = torch.randn(5, 8)
    assert_same_as_eager(lambda x: function(x.cos() * 3), x)  # what comes before is arithmetic, too
    assert counted("pass pre_grad.activations") >= 1
    assert_same_as_eager(lambda x: function(x + 1), x.clone().requires_grad_())
    assert counted("pass pre_grad.activations") >= 2
    assert_same_as_eager(function, x.double())
    assert_same_as_eager(function, x, settings={"dynamic": True})


@pytest.mark.parametrize("name", OTHERS)
def test_formulas_of_others(name: str) -> None:
    assert_same_as_eager(OTHERS[name], torch.randn(4, 8).requires_grad_())
    assert counted("pass pre_grad.activations") == 0


def _read_in_between(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate = torch.sigmoid(x)
    return x * gate, gate


def _changed_in_between(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    gate = torch.sigmoid(x)
    x.add_(1)
    return x * gate


def _integers(x: torch.Tensor) -> torch.Tensor:
    x = (x * 4).int()
    return x * torch.sigmoid(x)


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x.double() * 1.0)


@pytest.mark.parametrize("function", [_read_in_between, _changed_in_between, _integers, _other_dtype])
def test_what_stays_as_it_was_written(function: Function) -> None:
    assert_same_as_eager(function, torch.randn(4, 8))
    assert counted("pass pre_grad.activations") == 0


def test_low_precision_and_transforms() -> None:
    swish, gelu = FORMULAS["swish"], FORMULAS["gelu_new"]
    x = torch.randn(4, 8)
    for dtype in (torch.bfloat16, torch.float16):
        result = compiled(lambda x: gelu(x))(x.to(dtype))
        # float64 beside it: bfloat16 has eight bits, of which some roundings take two
        torch.testing.assert_close(result.double(), gelu(x.to(dtype).double()), atol=2e-2, rtol=2e-2)
        assert result.dtype is dtype
    assert_same_as_eager(torch.vmap(swish), x)
    assert_same_as_eager(torch.func.grad(lambda x: gelu(x).sum()), x)
    assert_same_as_eager(lambda x: gelu(x.t()), x)


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return FORMULAS["gelu_fast"](x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * FORMULAS["swish"](ctx.saved_tensors[0])


@pytest.mark.parametrize("function", [FORMULAS["erf, methods"], Activation.apply], ids=["methods", "autograd.Function"])
def test_nothing_is_left_of_what_was_written_out(function: Function, tmp_path: Path) -> None:
    """Before AOTAutograd, and in the bodies of a function of the user's."""
    graph = compiled(lambda x: function(x) * 2, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    x = torch.randn(4, 8).requires_grad_()
    result = graph(x)
    result.sum().backward()
    torch.testing.assert_close(result, function(x) * 2)
    (file,) = (tmp_path / "latest").glob("graph_*/pre_grad.py")
    code = "\n".join(line.partition("#")[0] for line in file.read_text().splitlines())
    assert "gelu(" in code and not re.search(r"tanh\(|erf\(|sigmoid\(|\*\* 3|\.add\(|\.mul\(| \+ ", code), code


def test_gradients_of_gradients_are_refused_or_right() -> None:
    x = torch.randn(4, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(FORMULAS["gelu_new"])(x).sum(), x)
    (expected,) = torch.autograd.grad(FORMULAS["gelu_new"](x).sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x**2 * torch.sigmoid(x) / x,
        lambda x: x**2 * torch.sigmoid(x) * x**-1,
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x**2 + 0.044715 * x**4) / x)),
    ],
)
def test_a_quotient_that_is_an_activation_but_for_its_poles_stays(function: Callable[..., torch.Tensor]) -> None:
    assert_same_as_eager(function, torch.tensor([0.0, 1.0, -2.0, 1e20]))
