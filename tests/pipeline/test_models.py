"""Real architectures with random weights: a forward and a training step."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import assert_same_values, compiled, counted
from torch.utils._pytree import tree_map
from zoo import ZOO, scalar

ROUNDINGS = 64
"""Two float32 computations of these depths are this many roundings of the largest value apart."""

MULTIPLE = 8
"""Of eager's own error, which in a small tensor may be small by chance."""


def model_and_inputs(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    entry = ZOO[name]
    return entry.build(), entry.inputs()


def in_double(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value


def assert_as_exact_as_eager(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Asserts that ``actual`` is about as near to float64 as eager, relative to the tensor's scale."""
    assert actual.dtype == eager.dtype
    assert actual.shape == eager.shape
    scale = exact.abs().max()
    allowed = MULTIPLE * (eager - exact).abs().max() + ROUNDINGS * torch.finfo(eager.dtype).eps * scale
    error = (actual - exact).abs().max()
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}, largest value {scale:.3g}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ZOO)
def test_inference(name: str) -> None:
    model, inputs = model_and_inputs(name)
    model.eval()
    exact_model = copy.deepcopy(model).double()
    with torch.no_grad():
        eager = model(**inputs).to_tuple()
        exact = exact_model(**tree_map(in_double, inputs)).to_tuple()
        actual = compiled(model)(**inputs)
    assert type(actual) is type(model(**inputs))
    assert_results_as_exact(actual.to_tuple(), eager, exact)
    assert counted("runtime_failures") == 0
    assert counted("nodes_on_onnx") > 0.9 * (counted("nodes_on_onnx") + counted("nodes_in_pytorch"))


def assert_results_as_exact(actual: tuple, eager: tuple, exact: tuple) -> None:
    pairs = zip(flat(actual), flat(eager), flat(exact), strict=True)
    for i, (ours, eagers, exacts) in enumerate(pairs):
        if eagers.is_floating_point():
            assert_as_exact_as_eager(ours, eagers, exacts, f"result {i}")
        else:
            assert_same_values(ours, eagers)


def flat(results: object) -> list[torch.Tensor]:
    """The tensors of a model's result; an output object of a submodule in it is opened."""
    if isinstance(results, torch.Tensor):
        return [results]
    if hasattr(results, "to_tuple"):
        results = results.to_tuple()
    return [tensor for item in results for tensor in flat(item)] if isinstance(results, (tuple, list)) else []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("mistral", "qwen", "clip")])
def test_training_step(name: str) -> None:
    """Without dropout, which in float64 draws other numbers; with it, see ``test_training_with_dropout``."""
    model, inputs = model_and_inputs(name)
    model.train()
    without_dropout(model)
    exact_model, compiled_model = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact_loss = scalar(exact_model(**tree_map(in_double, inputs)))
    exact_loss.backward()
    loss = scalar(model(**inputs))
    loss.backward()
    actual_loss = scalar(compiled(compiled_model)(**inputs))
    actual_loss.backward()

    assert_as_exact_as_eager(actual_loss, loss, exact_loss, "loss")
    exact_parameters, eager_parameters = dict(exact_model.named_parameters()), dict(model.named_parameters())
    for path, parameter in compiled_model.named_parameters():
        eager = eager_parameters[path].grad
        if eager is None:
            assert parameter.grad is None, f"{path} has a gradient, in eager it has none"
            continue
        assert parameter.grad is not None, f"{path} has no gradient"
        assert_as_exact_as_eager(parameter.grad, eager, exact_parameters[path].grad, path)  # type: ignore[arg-type]
    for path, buffer in compiled_model.named_buffers():
        torch.testing.assert_close(buffer, dict(model.named_buffers())[path], msg=f"buffer {path}")
    assert counted("runtime_failures") == 0


def without_dropout(model: torch.nn.Module) -> None:
    """Sets dropout and stochastic depth to 0, including probabilities that modules hold as numbers."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob", "activation_dropout", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_training_with_dropout(name: str) -> None:
    """Dropout after embeddings, in attention and between layers drops what eager drops."""
    model, inputs = model_and_inputs(name)
    model.train()
    compiled_model = copy.deepcopy(model)
    torch.manual_seed(7)
    loss = scalar(model(**inputs))
    loss.backward()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    actual_loss = scalar(compiled(compiled_model)(**inputs))
    actual_loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual_loss, loss)
    for (path, parameter), eager in zip(compiled_model.named_parameters(), model.parameters(), strict=True):
        if eager.grad is None:
            assert parameter.grad is None
            continue
        difference = (parameter.grad - eager.grad).abs().max()  # type: ignore[operator]
        assert difference <= 1e-5 * eager.grad.abs().max() + 1e-8, path
