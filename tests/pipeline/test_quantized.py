"""Models that torchao quantized: integer products run on ONNX Runtime, and results are those of torchao in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import assert_same_values, compiled, counted
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from torchao.quantization.quant_primitives import MappingType

aten = torch.ops.aten

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


class Convolutions(nn.Module):
    """With batch norm, a pool, groups, a sum that is not quantized, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16), nn.ReLU6())
        self.third = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.relu(self.third(self.second(x)) + x)
        return self.last(x.mean((2, 3)))


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return Convolutions(), torch.randn(3, 3, 16, 16)


class Attention(nn.Module):
    """Projections of one input, as in attention, and products of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(64, 64, bias=i == 0) for i in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(self.norm(x)).unflatten(-1, (4, 16)).transpose(1, 2) for project in self.projections[:3])
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        result: torch.Tensor = x + self.projections[3](mixed.transpose(1, 2).flatten(2))
        return result


def attention() -> tuple[nn.Module, torch.Tensor]:
    return Attention(), torch.randn(2, 9, 64)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetModel(config), torch.randn(2, 3, 32, 32)


MODELS = {"perceptron": perceptron, "llama": llama, "bert": bert, "vit": vit}
EXPORTED = {"perceptron": perceptron, "attention": attention, "convolutions": convolutions, "resnet": resnet}
FOUR_BITS, ASYMMETRIC = PerGroup(32), MappingType.ASYMMETRIC
CONFIGS = {
    "int8 weights": Int8WeightOnlyConfig,
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig,
    "int4 weights": lambda: IntxWeightOnlyConfig(torch.int4, FOUR_BITS),
    "int4 weights, asymmetric": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(64), ASYMMETRIC),
    "int4 weights by rows": lambda: IntxWeightOnlyConfig(torch.int4, PerAxis(0)),
    "int8 weights by groups": lambda: IntxWeightOnlyConfig(torch.int8, FOUR_BITS),
    "int8 dynamic, int4 weights": lambda: Int8DynamicActivationIntxWeightConfig(torch.int4, FOUR_BITS),
}


def result(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


class Result(nn.Module):
    """A model that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return result(self.model(x))


def quantized(name: str, config: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model = model.eval()
    quantize_(model, CONFIGS[config]())
    return model, x


def exported(name: str, *, dynamic: bool, sizes: bool) -> tuple[nn.Module, torch.Tensor]:
    """A model that pt2e quantized, with the ranges of one batch. ``sizes``: exported for any first size."""
    torch.manual_seed(0)
    model, x = EXPORTED[name]()
    shapes = ({0: torch.export.Dim("batch")},) if sizes else None
    graph = torch.export.export(Result(model.eval()), (x,), dynamic_shapes=shapes).module()
    config = get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
    prepared = prepare_pt2e(graph, X86InductorQuantizer().set_global(config))
    prepared(x)
    return convert_pt2e(prepared), x


def change_by_rounding(model: nn.Module, x: torch.Tensor) -> float:
    """How far eager's result moves if values before a quantization change by a unit of rounding, some runs' largest.

    The scale of a row is its extreme over 127.5, which is then a tie: rounding decides on 127 or 128.
    """
    torch.manual_seed(1)

    class Perturbed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func in PERTURBED and isinstance(found, torch.Tensor) and found.is_floating_point():
                found = found * (1 + (torch.rand_like(found) * 2 - 1) * 2 * torch.finfo(found.dtype).eps)
            return found

    eager, moved = result(model(x)), 0.0
    for _ in range(4):
        with Perturbed():
            other = result(model(x))
        moved = max(moved, float((other - eager).abs().max()))
    return moved


PERTURBED = {aten.mm.default, aten.addmm.default, aten.convolution.default, aten.mul.Tensor, aten.layer_norm.default}
PERTURBED |= {aten.native_layer_norm.default, aten.mean.dim, aten.linear.default, aten.add.Tensor, aten.bmm.default}


def assert_right(found: torch.Tensor, model: nn.Module, x: torch.Tensor) -> None:
    """By rounding, or by what rounding turns at ties."""
    eager = result(model(x))
    tolerance = 2 * change_by_rounding(model, x) + 4e-6 * float(eager.abs().max())
    assert float((found - eager).abs().max()) <= tolerance


def assert_on_onnx() -> None:
    assert not [key for key in counters["dynamo_backends"] if "fallback" in key]
    assert counted("nodes_in_pytorch") == 0 and counted("nodes_on_onnx") > 0


CASES = [
    *(("perceptron", config) for config in CONFIGS),
    *((name, config) for name in ("llama", "bert", "vit") for config in ("int8 dynamic", "int4 weights")),
]
"""``dynamo-backends bench MODEL --quantize SCHEME`` tries any pair."""


@pytest.mark.usefixtures("rebuilt_at_once")
@pytest.mark.parametrize(("name", "config"), CASES)
@torch.no_grad()
def test_forward(name: str, config: str) -> None:
    """At two sizes: PyTorch traces torchao's tensors of symbolic sizes slowly, so of a small model only. Weights are
    constants, and noticed when they change."""
    model, x = quantized(name, config)
    is_small = name == "perceptron"
    call = compiled(model, dynamic=True if is_small else None)
    for inputs in (x, torch.cat([x, x[:1]])) if is_small else (x,):
        assert_right(result(call(inputs)), model, inputs)
    assert_on_onnx()
    assert counted("constant_weights") >= 2
    weight = next(module for module in model.modules() if isinstance(module, nn.Linear)).weight
    for new in (0, 100):  # 100 needs more than 4 bits
        weight.qdata.fill_(new)
        assert_right(result(call(x)), model, x)
    assert counted("weight_refreshes") >= 2
    if config != "int8 weights":
        assert counted("pass onnx.quantized_products") >= 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_pt2e(name: str, dynamic: bool) -> None:
    """Static and dynamic quantization, at two sizes where the export allows."""
    sizes = name != "resnet"
    model, x = exported(name, dynamic=dynamic, sizes=sizes)
    call = compiled(model, dynamic=sizes)
    for inputs in (x, torch.cat([x, x]) if sizes else x + 1):
        assert_right(call(inputs), model, inputs)
    assert_on_onnx()
    if not (dynamic and name == "resnet"):  # which has no linear layer
        assert counted("pass onnx.quantized_products") >= 1


@torch.no_grad()
def test_convolutions_by_integers_on_request() -> None:
    """The bias is rounded: few results of a convolution are another step."""
    model, x = exported("convolutions", dynamic=False, sizes=False)
    call = compiled(model, options={"passes": {"enable": ["onnx.quantized_convolutions"]}})
    found, eager = call(x), model(x)
    assert counted("pass onnx.quantized_convolutions") >= 2
    assert float((found - eager).abs().max()) <= 0.05 * float(eager.abs().max())


@pytest.mark.parametrize("config", ["int8 dynamic", "int4 weights"])
@torch.no_grad()
def test_bfloat16(config: str) -> None:
    """Weights have the scales of eager; results are eager's up to the rounding of bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval().bfloat16()
    quantize_(model, CONFIGS[config]())
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert_right(compiled(model)(x), model, x)


@torch.no_grad()
def test_generation() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    quantize_(model, CONFIGS["int4 weights"]())
    prompt = torch.randint(0, 100, (1, 6))
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **settings)
    model.forward = compiled(model.forward, dynamic=True)
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert counted("pass onnx.quantized_products") >= 2


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


@torch.no_grad()
def test_weights_that_become_inputs_are_not_packed_in_each_call() -> None:
    model, x = quantized("perceptron", "int4 weights")
    call = compiled(model)
    for number in (*range(-8, -3), 100):
        model[0].weight.qdata.fill_(number)
        torch.testing.assert_close(call(x), model(x))
    assert counted("weights_made_inputs") > 0
    assert counted("choices_without_weights") == 2  # one for each layer


@torch.no_grad()
def test_a_table_that_is_read_at_an_index_of_each_call_is_no_constant() -> None:
    model, x = quantized("perceptron", "int4 weights by rows")
    table = nn.Embedding(32, 8)
    assert_same_values(compiled(lambda x: table(model(x).argmax(-1)))(x), table(model(x).argmax(-1)))
    assert counted("constant_weights") == 8  # integers, scale, zero point and bias of two layers
