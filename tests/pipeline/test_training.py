"""Backward passes, optimizers, dropout, checkpointing, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


class Dropouts(nn.Module):
    """Three dropouts with different probabilities, with layers between them or without."""

    def __init__(self, layers: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6) if layers else nn.Identity()
        self.b = nn.Linear(6, 6) if layers else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(F.dropout(x, 0.3, self.training)))
        return F.dropout(self.b(F.dropout(x, 0.5, self.training)), 0.1, self.training)


class Attention(nn.Module):
    """Causal attention with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(2, 5, 8))


def test_gradients_of_inputs_and_parameters() -> None:
    assert_same_as_eager(mlp(), torch.randn(5, 6, requires_grad=True), calls=2)
    assert_on_onnx()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_twenty_steps_track_eagers_loss(optimizer: type[torch.optim.Optimizer]) -> None:
    x, y = torch.randn(32, 6), torch.randn(32, 4)
    model = mlp()

    def losses(model: nn.Module, forward: Callable[..., torch.Tensor]) -> list[float]:
        steps = optimizer(model.parameters(), lr=0.01)
        result = []
        for _ in range(20):
            loss = F.mse_loss(forward(x), y)
            steps.zero_grad()
            loss.backward()
            steps.step()
            result.append(loss.item())
        return result

    twin = copy.deepcopy(model)
    expected, actual = losses(model, model), losses(twin, compiled(twin))
    assert expected[-1] < 0.95 * expected[0]
    assert actual == pytest.approx(expected, rel=1e-5)
    assert counted("graphs") == 1


def test_the_loss_is_part_of_the_graph() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x), labels)

    assert_same_as_eager(WithLoss(), torch.randn(5, 6), torch.tensor([0, 1, 3, -100, 2]))


@pytest.mark.parametrize("layers", [True, False])
def test_dropout_drops_what_eager_drops(layers: bool) -> None:
    assert_same_as_eager(Dropouts(layers), torch.randn(4, 6, requires_grad=True), calls=2)
    assert_same_as_eager(Dropouts(layers), torch.randn(6, 4).t(), calls=2)
    assert_same_as_eager(Dropouts(layers).eval(), torch.randn(4, 6), calls=2)


def test_attention_dropout() -> None:
    assert_same_as_eager(Attention(), torch.randn(2, 5, 8, requires_grad=True))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert_same_as_eager(layer, torch.randn(2, 5, 8))


def test_dropout_among_other_random_operators() -> None:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.randn_like(x)
        y = F.dropout(x + noise, 0.4)
        return (
            y,
            torch.bernoulli(y.sigmoid()),
            torch.rand(3) * 2,
            torch.randint(0, 9, (4,)),
            torch.randperm(5),
        )

    assert_same_as_eager(draw, torch.randn(4, 6), calls=2)
    assert_same_as_eager(draw, torch.randn(4, 6, requires_grad=True))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Dropouts(), Dropouts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, x * 2, use_reentrant=False) + x


def test_activation_checkpointing_recomputes_the_same_dropout() -> None:
    assert_same_as_eager(Checkpointed(), torch.randn(4, 6, requires_grad=True), calls=2)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


BFLOAT16 = {"rtol": 2**-6, "atol": 2**-6}
"""Two roundings of eight bits: float32 next to them ends on the other side of one."""


def test_autocast() -> None:
    with torch.no_grad():
        assert_same_as_eager(Autocast(), torch.randn(5, 6), tolerance=BFLOAT16)
    assert_same_as_eager(Autocast(), torch.randn(5, 6), tolerance=BFLOAT16)


def test_autocast_around_the_compiled_module() -> None:
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_same_values(compiled(model)(x := torch.randn(5, 6)), model(x), **BFLOAT16)


def test_some_parameters_are_frozen() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    assert_same_as_eager(model, torch.randn(5, 6))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).tanh())


def test_tied_weights() -> None:
    assert_same_as_eager(Tied(), torch.tensor([[1, 2, 3], [3, 3, 10]]), calls=2)


def test_an_unused_parameter_has_no_gradient() -> None:
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    assert_same_as_eager(model, torch.randn(5, 6))


def test_gradients_accumulate() -> None:
    eager, x = mlp(), torch.randn(5, 6)
    actual = copy.deepcopy(eager)
    function = compiled(actual)
    for part in x.split(2):
        eager(part).sum().backward()
        function(part).sum().backward()
    gradients = [parameter.grad for parameter in eager.parameters()]
    assert_same_values([parameter.grad for parameter in actual.parameters()], gradients)


def test_backward_twice_through_a_retained_graph() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    y = compiled(lambda x: x.sin() * x)(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    second = torch.autograd.grad(y.sum(), x)
    assert_same_values(second, first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_the_gradient_of_a_gradient_is_refused_as_by_aot_autograd() -> None:
    """AOTAutograd has no double backward: an error, not a wrong gradient."""
    for backend in ("aot_eager", "onnxrt"):
        torch._dynamo.reset()
        x = torch.randn(3, requires_grad=True)
        y = torch.compile(lambda x: x.sin() * x, backend=backend)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()


def test_some_results_get_no_gradient() -> None:
    def two(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w, (x * 2).exp()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    _, second = compiled(two)(x, w)
    second.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() * 2).exp())
    assert w.grad is None or not w.grad.any()


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity times seven."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


def test_autograd_function() -> None:
    assert_same_as_eager(lambda x: Straight.apply(x * 3) * 2, torch.randn(4, 6, requires_grad=True))
    assert_on_onnx()


def test_convolutional_training() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    # Batch statistics of 128 values cancel in the gradient: a few hundred roundings.
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_same_as_eager(model, torch.randn(2, 3, 8, 8, requires_grad=True), calls=2, tolerance=tolerance)


@pytest.mark.parametrize("kind", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrizations(kind: Callable[[nn.Module], nn.Module]) -> None:
    assert_same_as_eager(nn.Sequential(kind(nn.Linear(6, 4))), torch.randn(3, 6), calls=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_normalizations_under_autocast(dtype: torch.dtype) -> None:
    """PyTorch's kernels save them in float32, its fake tensors say half precision."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.GroupNorm(2, 8), torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    fast = compiled(copy.deepcopy(model))

    def gradients(module: torch.nn.Module, kind: torch.dtype) -> list[torch.Tensor]:
        with torch.autocast("cpu", kind, enabled=kind is not torch.float64):
            result = module(x.to(kind) if kind is torch.float64 else x)
        (result.double() ** 2).mean().backward()
        found = [parameter.grad.double() for parameter in module.parameters()]
        module.zero_grad()
        return found

    exact = gradients(copy.deepcopy(model).double(), torch.float64)
    for _ in range(2):
        for ours, theirs, true in zip(gradients(fast, dtype), gradients(model, dtype), exact, strict=True):
            assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-3 * true.abs().max()
    assert counted("runtime_failures") == 0
