"""Symbolic sizes: one ONNX model for each graph serves all sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import nn

from dynamo_backends.runtime.expected_shapes import differs

BATCHES = [2, 3, 5, 7, 8, 16, 21, 33, 64, 100]


def attention_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(dim=-1))


def test_one_model_for_ten_batch_sizes() -> None:
    model = attention_block()
    function = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 8)
            assert_same_values(function(x), model(x))
    assert counted("graphs") == 1
    assert counted("regions") == 1
    assert_on_onnx()


def test_one_model_each_way_in_training() -> None:
    eager = attention_block()
    actual = copy.deepcopy(eager)
    function = compiled(actual, dynamic=True)
    for batch in BATCHES:
        x = torch.randn(batch, 8)
        eager(x).square().sum().backward()
        function(x).square().sum().backward()
        for ours, eagers in zip(actual.parameters(), eager.parameters(), strict=True):
            # Sums over up to a hundred rows, accumulated: of the order of the largest gradient.
            scale = float(eagers.grad.abs().max())
            torch.testing.assert_close(ours.grad, eagers.grad, rtol=1e-4, atol=1e-5 * scale)
    assert counted("graphs") == 1
    assert counted("regions") == 2
    assert_on_onnx()


def test_the_second_size_makes_the_graph_dynamic() -> None:
    """``dynamic=None``, the default: the first graph is static, the second serves all other sizes."""
    function = compiled(lambda x: (x * 2).relu())
    for batch in BATCHES:
        x = torch.randn(batch, 3)
        assert_same_values(function(x), (x * 2).relu())
    assert counted("graphs") == 2


def test_mark_dynamic() -> None:
    function = compiled(lambda x: (x.t() @ x).softmax(-1))
    for batch in BATCHES:
        x = torch.randn(batch, 3)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_values(function(x), (x.t() @ x).softmax(-1))
    assert counted("graphs") == 1


def test_static_recompiles() -> None:
    function = compiled(lambda x: x + 1, dynamic=False)
    for batch in (2, 3, 4):
        assert function(torch.zeros(batch)).shape == (batch,)
    assert counted("graphs") == 3


def test_batch_sizes_zero_and_one() -> None:
    function = compiled(lambda x: (x + 1).sum(-1), dynamic=True)
    for batch in (5, 1, 0, 9):
        assert_same_values(function(torch.ones(batch, 3)), torch.full((batch,), 6.0))


FUNCTIONS: dict[str, Callable[..., object]] = {
    "sizes as results": lambda x: (x + 1, x.shape[0], x.shape[0] * 2, x.numel(), x.shape),
    "floor division": lambda x: (x[: x.shape[0] // 2] * 2, x.shape[0] // 2),
    "floor division of negative sizes": lambda x: (
        x * -(-x.shape[0] // 2),
        (x.shape[0] - 7) // x.shape[1],
        -9 // -x.shape[0],
    ),
    "power": lambda x: ((x.shape[0] + 2**20) ** 3, x * x.shape[0] ** 2, 3 ** x.shape[1] + x),
    "modulo": lambda x: x + x.shape[0] % 3,
    "slices by sizes": lambda x: x[x.shape[0] // 2 :, 1 : x.shape[1] - 1].exp(),
    "view of computed size": lambda x: x.reshape(x.shape[0] * x.shape[1]).relu(),
    "view in halves": lambda x: x.view(x.shape[0], 2, x.shape[1] // 2).transpose(1, 2) * 1.5,
    "flatten": lambda x: x.flatten().softmax(0),
    "scaled by a size": lambda x: x * x.shape[0] + x / x.shape[1] - x.shape[0] ** 0.5,
    "scaled by a ratio of sizes": lambda x: (
        x * (x.shape[0] / x.shape[1]),
        x * x.shape[1] ** -0.5,
        x @ x.t() / math.sqrt(x.shape[1]),
        torch.zeros(int(x.shape[1] * 0.5)) + x.shape[0] / 3,
        x > x.shape[0] / x.shape[1],
    ),
    "statistics": lambda x: [
        *torch.var_mean(x, 0),
        *torch.std_mean(x, correction=2, keepdim=True),
        nn.functional.instance_norm(x[None]),
        nn.functional.group_norm(x[None], 1),
    ],
    "rounded quotients": lambda x: (torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, 0.3, rounding_mode="trunc")),
    "factories": lambda x: (torch.arange(x.shape[0]) * 2, torch.zeros(x.shape[0], 3) + 1, torch.ones_like(x)),
    "full of a size": lambda x: torch.full((x.shape[1],), x.shape[0]) + x,
    "concatenated": lambda x: torch.cat([x, x * 2]).sum(0),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1) * 2,
    "transposed result": lambda x: (x * 2).t(),
    "channels moved": lambda x: (x[None] + 1).permute(2, 0, 1).exp(),
    "padded": lambda x: nn.functional.pad(x, (1, 2, 0, x.shape[0])),
    "split": lambda x: [part * 2 for part in x.split(2, dim=1)],
    "causal mask": lambda x: (x @ x.t()).masked_fill(torch.ones(x.shape[0], x.shape[0]).triu(1).bool(), -1e9),
    "indexed": lambda x: x[torch.arange(x.shape[0]).flip(0)] + 1,
    "mean and variance": lambda x: (x - x.mean(0)) / x.var(0, unbiased=False).add(1).sqrt(),
    "as_strided": lambda x: x.contiguous().as_strided((x.shape[0], 2), (x.shape[1], 1)) + 1,
    "branch on a size": lambda x: x + 1 if x.shape[0] > 2 else x - 1,
    "bool of a size": lambda x: (x * (x.shape[0] > 100), x.shape[0] > 100),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_symbolic_integers(name: str, requires_grad: bool) -> None:
    function = FUNCTIONS[name]
    dynamic = compiled(function, dynamic=True)
    for rows, columns in [(4, 6), (5, 8), (9, 10)]:
        x = torch.randn(rows, columns, requires_grad=requires_grad)
        ours = x.detach().clone().requires_grad_(requires_grad)
        expected, actual = function(x), dynamic(ours)
        assert_same_values(actual, expected)
        if differentiable(expected):
            # Without their strides: AOTAutograd gives a dynamic graph's tangents other strides than eager.
            eager_gradient = torch.autograd.grad(sum_of_squares(expected), x)
            gradient = torch.autograd.grad(sum_of_squares(actual), ours)
            torch.testing.assert_close(gradient, eager_gradient)
    assert counted("runtime_failures") == 0


def differentiable(results: object) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def sum_of_squares(results: object) -> torch.Tensor:
    return torch.stack([tensor.square().sum() for tensor in differentiable(results)]).sum()


def test_python_integers_as_arguments() -> None:
    def call(x: torch.Tensor, n: int) -> tuple[object, ...]:
        return x * n, n * 2, x[: n // 2] + n, n / 3, torch.zeros(n) + 1

    function = compiled(call, dynamic=True)
    for n in (4, 5, 8, 7):  # n // 2 == 1 is a graph of its own
        x = torch.randn(9, 2)
        assert_same_values(function(x, n), call(x, n))
    assert counted("graphs") == 1


def test_python_floats_as_arguments() -> None:
    function = compiled(lambda x, f: (x * f, f * 2), dynamic=True)
    for f in (0.5, 1 / 3, -2.0):
        assert_same_values(function(torch.ones(3), f), (torch.ones(3) * f, f * 2))


def test_convolution_with_symbolic_image_sizes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    function = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch, height, width in [(2, 8, 10), (3, 11, 9), (5, 16, 16)]:
            x = torch.randn(batch, 3, height, width)
            assert_same_values(function(x), model(x))
    assert counted("graphs") == 1


@pytest.fixture
def data_dependent_sizes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.mark.usefixtures("data_dependent_sizes")
def test_sizes_that_depend_on_values() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = x[x > 0]
        return chosen * 2, x.nonzero() + 1, chosen.sum()

    assert_same_as_eager(call, torch.randn(4, 6), settings={"fullgraph": True})
    # No element is chosen: the mean of nothing is NaN.
    assert_same_as_eager(lambda x: x[x > 9].mean(), torch.randn(4, 6), settings={"fullgraph": True})


@pytest.mark.usefixtures("data_dependent_sizes")
def test_items() -> None:
    def call(x: torch.Tensor, n: torch.Tensor) -> tuple[object, ...]:
        count = n.item()
        return x * count, count * 2, n.sum().item() + 1, x * x[0, 0].item()

    assert_same_as_eager(call, torch.randn(4, 6), torch.tensor(3), settings={"fullgraph": True})


def test_a_refusal_asks_nothing_of_sizes_that_depend_on_values(caplog: pytest.LogCaptureFixture) -> None:
    """A pass that leaves a view alone describes it; asking whether it is contiguous would be a guard on its size."""
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = compiled(lambda x: x.nonzero().view(-1, 1, 2) + 1, fullgraph=True)
        assert torch.equal(function(torch.eye(3)), torch.eye(3).nonzero().view(-1, 1, 2) + 1)
    assert "failed on" not in caplog.text


@pytest.mark.parametrize("size", ["math.trunc(1.5*torch.sym_float(s0))", "int(s0 / 2)", "max(1, s0 // 3)"])
def test_a_size_is_computed_as_pytorch_writes_it(size: str) -> None:
    expected = {"math.trunc(1.5*torch.sym_float(s0))": 10, "int(s0 / 2)": 3, "max(1, s0 // 3)": 2}[size]
    assert not differs([expected], [size], {"s0": 7})
    assert differs([expected + 1], [size], {"s0": 7})


@pytest.mark.parametrize(
    ("mode", "dimensions"),
    [
        ("linear", 1),
        ("bilinear", 2),
        ("trilinear", 3),
        ("nearest", 1),
        ("nearest", 2),
        ("nearest-exact", 3),
        ("bicubic", 2),
    ],
)
def test_an_interpolation_is_trained_with_a_batch_that_changes(mode: str, dimensions: int) -> None:
    """Of the second size the batch alone is symbolic."""
    layer = torch.nn.Conv2d(1, 1, 1) if dimensions == 2 else torch.nn.Identity()
    function = compiled(lambda x: torch.nn.functional.interpolate(layer(x), scale_factor=2.0, mode=mode))
    for batch in (4, 3, 5):
        x = torch.randn(batch, 1, *(4,) * dimensions, requires_grad=True)
        function(x).square().sum().backward()
        ours, x.grad = x.grad, None
        torch.nn.functional.interpolate(layer(x), scale_factor=2.0, mode=mode).square().sum().backward()
        assert_same_values(ours, x.grad)


FORMULAS_WITH_A_NUMBER: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "layer norm": lambda x, e: (x - x.mean(-1, True)) / torch.sqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + e),
    "RMS norm": lambda x, e: x * torch.rsqrt(x.pow(2).mean(-1, True) + e),
    "GELU": lambda x, e: x * e * (1 + torch.erf(x / 1.4142135)),
    "quick GELU": lambda x, e: x * torch.sigmoid(e * x),
    "scaled product": lambda x, e: (x @ x.transpose(-1, -2)) * e,
    "clamp": lambda x, e: x.relu().clamp(-e, e),
    "attention": lambda x, e: torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=e),
}


@pytest.mark.parametrize("name", FORMULAS_WITH_A_NUMBER)
def test_a_number_of_a_module_that_changes(name: str) -> None:
    """It becomes symbolic, and a formula that is recognized by a constant in its place must not be."""

    class Module(torch.nn.Module):
        number = 0.5

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return FORMULAS_WITH_A_NUMBER[name](x, self.number) * w + w

    module, x, w = Module(), torch.randn(2, 3, 8), torch.rand(3 if "product" in name else 8)
    function = compiled(module)
    with torch.no_grad():
        for number in (0.5, 0.37, 0.2):
            module.number = number
            assert_same_values(function(x, w), module(x, w))
    assert counted("nodes_in_pytorch") == 0
