"""Models that torchao quantized: integer products run on ONNX Runtime, and results are those of torchao in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import compiled, counted
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from dynamo_backends.numerics.verdicts import verdict

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)), torch.randn(5, 64)


def llama() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaModel(config), torch.randint(0, 100, (2, 12))


def bert() -> tuple[nn.Module, torch.Tensor]:
    return transformers.BertModel(transformers.BertConfig(**SIZES)), torch.randint(0, 100, (2, 12))


def vit() -> tuple[nn.Module, torch.Tensor]:
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8)), torch.randn(
        2, 3, 32, 32
    )


MODELS = {"perceptron": perceptron, "llama": llama, "bert": bert, "vit": vit}
CONFIGS = {"int8 weights": Int8WeightOnlyConfig, "int8 dynamic": Int8DynamicActivationInt8WeightConfig}


def result(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


def quantized(name: str, config: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model = model.eval()
    quantize_(model, CONFIGS[config]())
    return model, x


def exact_result(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In float64, with the dequantized weights."""
    exact = copy.deepcopy(model)
    for module in exact.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return result(exact.double()(x.double() if x.is_floating_point() else x))


def change_by_rounding(model: nn.Module, x: torch.Tensor) -> float:
    """How far eager's result moves if the input of each linear layer is another by a unit of rounding.

    The scale of a row is its extreme over 127.5, which is then a tie: rounding decides on 127 or 128.
    """

    def perturb(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value * (1 + (torch.rand_like(value) * 2 - 1) * 2**-23) for value in args)

    eager = result(model(x))
    hooks = [module.register_forward_pre_hook(perturb) for module in model.modules() if isinstance(module, nn.Linear)]
    moved = max(float((result(model(x)) - eager).abs().max()) for _ in range(8))
    for hook in hooks:
        hook.remove()
    return moved


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_forward(name: str, config: str) -> None:
    """At two sizes. Weights are constants, and noticed when they change."""
    model, x = quantized(name, config)
    call = compiled(model, dynamic=None if name == "vit" else True)
    other = x if name == "vit" else torch.cat([x, x[:1]])
    for inputs in (x, other):
        found, eager = result(call(inputs)), result(model(inputs))
        if config == "int8 weights":
            assert not str(verdict(found, eager, exact_result(model, inputs)))
        else:
            assert float((found - eager).abs().max()) <= 2 * change_by_rounding(model, inputs)
    assert not [key for key in counters["dynamo_backends"] if key.startswith("fallback ")], "all runs on ONNX Runtime"
    assert counted("constant_weights") >= 2
    next(module for module in model.modules() if isinstance(module, nn.Linear)).weight.qdata.zero_()
    assert float((result(call(x)) - result(model(x))).abs().max()) <= 2 * change_by_rounding(model, x) + 1e-5
    assert counted("weight_refreshes") >= 1


@torch.no_grad()
def test_parts_of_a_subclass_may_be_written() -> None:
    """A buffer of two tensors that the graph changes is no constant."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", TwoTensor(torch.zeros(4), torch.ones(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(1)
            return (self.total * x).a

    model, x = Counting(), torch.randn(4)
    call, other = compiled(model), copy.deepcopy(model)
    for _ in range(4):
        assert torch.equal(call(x), other(x))
    assert torch.equal(model.total.b, other.total.b)


@torch.no_grad()
def test_dynamic_quantization_of_a_perceptron_is_bit_for_bit() -> None:
    model, x = quantized("perceptron", "int8 dynamic")
    model[1] = nn.ReLU()
    assert torch.equal(compiled(model)(x), model(x))
