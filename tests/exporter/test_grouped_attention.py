"""Grouped-query attention: several heads of the query share a head of keys and values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from conftest import assert_same_as_eager, compiled, counted
from torch.nn.functional import scaled_dot_product_attention
from zoo import SMALL, tokens

ALL_ON_ONNX = {"options": {"fallback": "error"}}
BATCH, HEADS, FEATURES = 2, 6, 8
HALF = {"rtol": 1e-2, "atol": 1e-3}  # eager rounds the probabilities to half precision


def grouped(**settings: object) -> Callable[..., torch.Tensor]:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **settings)  # type: ignore[arg-type]

    return attention


def tensors(
    heads: int = HEADS,
    shared: int = 2,
    length: int = 5,
    keys: int = 7,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
) -> list[torch.Tensor]:
    """A query, and keys and values of fewer heads."""
    return [
        torch.randn(BATCH, number, size, FEATURES, dtype=dtype).requires_grad_(requires_grad)
        for number, size in ((heads, length), (shared, keys), (shared, keys))
    ]


def masks(length: int, keys: int) -> dict[str, torch.Tensor]:
    """Boolean masks; in the second batch the last row is fully masked."""
    seen = torch.rand(BATCH, HEADS, length, keys) < 0.6
    seen[..., 0] = True
    seen[1, :, -1] = False
    return {
        "of rows": seen[1, 0],
        "of keys": seen[0, 0, :1],
        "of batches": seen[:, :1],
        "of padding": seen[:, :1, :1],
        "of heads": seen[0],
        "of all": seen,
    }


# Values and gradients


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("shared", [1, 2, 3, 6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_backward(dtype: torch.dtype, shared: int, is_causal: bool) -> None:
    tolerance = HALF if dtype is torch.float16 else None
    function = grouped(is_causal=is_causal, scale=0.3)
    assert_same_as_eager(function, *tensors(shared=shared, dtype=dtype), settings=ALL_ON_ONNX, tolerance=tolerance)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("kind", masks(1, 1))
def test_masks(kind: str, length: int, is_float: bool) -> None:
    mask = masks(length, 7)[kind]
    if is_float:
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
    assert_same_as_eager(grouped(attn_mask=mask), *tensors(length=length), settings=ALL_ON_ONNX)


@pytest.mark.parametrize("length", [1, 5])
def test_in_inference(length: int) -> None:
    with torch.no_grad():
        assert_same_as_eager(grouped(), *tensors(length=length), settings=ALL_ON_ONNX)
    assert counted("regions") == 1


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"attn_mask": torch.tensor([[0.0, 0, 0, -math.inf]])}])
def test_logsumexp(length: int, settings: dict[str, object]) -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    inputs = tensors(length=length, keys=4, requires_grad=False)
    assert_same_as_eager(lambda q, k, v: flash(q, k, v, **settings), *inputs, settings=ALL_ON_ONNX)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_symbolic_batch_and_lengths(is_causal: bool, requires_grad: bool) -> None:
    """One graph for all sizes."""
    attention = grouped(is_causal=is_causal)
    function = compiled(attention, **ALL_ON_ONNX)
    for batch, length, keys in ((2, 5, 7), (3, 4, 9)):
        inputs = [
            torch.randn(batch, number, size, FEATURES, requires_grad=requires_grad)
            for number, size in ((HEADS, length), (2, keys), (2, keys))
        ]
        for item in inputs:
            torch._dynamo.mark_dynamic(item, 0)
            torch._dynamo.mark_dynamic(item, 2)
        results, expected = function(*inputs), attention(*inputs)
        torch.testing.assert_close(results, expected)
        if requires_grad:
            grad = torch.randn_like(expected)
            ours, eagers = (torch.autograd.grad(result, inputs, grad) for result in (results, expected))
            torch.testing.assert_close(ours, eagers)
    assert counted("recompiles") == 0


def test_a_mask_of_symbolic_sizes() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    function = compiled(attention, **ALL_ON_ONNX)
    with torch.no_grad():
        for length, keys in ((5, 7), (6, 8)):
            inputs = [*tensors(length=length, keys=keys), masks(length, keys)["of batches"]]
            for item in inputs:
                torch._dynamo.mark_dynamic(item, 2)
            torch._dynamo.mark_dynamic(inputs[-1], 3)
            torch.testing.assert_close(function(*inputs), attention(*inputs))
    assert counted("recompiles") == 0


def test_symbolic_heads_stay_in_pytorch() -> None:
    with torch.no_grad():
        assert_same_as_eager(grouped(), *tensors(), settings={"dynamic": True})
    assert counted("fallback aten._scaled_dot_product_flash_attention_for_cpu.default") == 1


# What ATen takes apart before we see it


def test_values_of_other_features() -> None:
    query, key, _ = tensors()
    value = torch.randn(BATCH, 2, 7, 3, requires_grad=True)
    assert_same_as_eager(grouped(), query, key, value, settings=ALL_ON_ONNX)


def test_other_heads_of_values_than_of_keys() -> None:
    query, key, _ = tensors()
    value = torch.randn(BATCH, 3, 7, FEATURES, requires_grad=True)
    assert_same_as_eager(grouped(), query, key, value, settings=ALL_ON_ONNX)


def test_a_mask_that_has_a_gradient() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    mask = torch.randn(1, HEADS, 5, 7, requires_grad=True)
    assert_same_as_eager(attention, *tensors(), mask, settings=ALL_ON_ONNX)


def test_dropout() -> None:
    assert_same_as_eager(grouped(dropout_p=0.3), *tensors())


def test_without_batches() -> None:
    inputs = [item[0].detach().requires_grad_() for item in tensors()]
    assert_same_as_eager(grouped(), *inputs, settings=ALL_ON_ONNX)


@pytest.mark.parametrize("empty", [{"length": 0}, {"keys": 0}])
def test_nothing_to_attend_to(empty: dict[str, int]) -> None:
    assert_same_as_eager(grouped(), *tensors(**empty))


def test_an_empty_batch() -> None:
    assert_same_as_eager(grouped(), *(item[:0].detach().requires_grad_() for item in tensors()))


@pytest.mark.parametrize(("heads", "shared"), [(6, 4), (2, 4)])
def test_heads_that_cannot_be_shared_are_eagers_error(heads: int, shared: int) -> None:
    inputs = tensors(heads, shared)
    with pytest.raises(RuntimeError) as eager:
        grouped()(*inputs)
    with pytest.raises(Exception, match=re.escape(str(eager.value).splitlines()[0])):
        compiled(grouped())(*inputs)


# Models


@pytest.mark.parametrize("length", [1, 9])
def test_the_debug_backend_finds_nothing(length: int, tmp_path: Path) -> None:
    model = torch.compile(grouped(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    model(*tensors(length=length)).sum().backward()
    [graph, backward] = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert (graph["verdict"], backward["verdict"]) == ("ok", "ok")


MODELS = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
}


def model_of(name: str, **settings: object) -> torch.nn.Module:
    config, model = MODELS[name]
    return model(config(**{**SMALL, "num_key_value_heads": 2, **settings})).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_region(name: str) -> None:
    model = model_of(name, use_cache=False)
    ids = tokens()["input_ids"]
    with torch.no_grad():
        assert_same_as_eager(model, input_ids=ids, settings=ALL_ON_ONNX)
    assert counted("regions") == counted("graphs") == 1
    torch._dynamo.reset()
    sums = {"rtol": 1e-4, "atol": 1e-5}  # float32 gradients, summed in another order
    assert_same_as_eager(model.train(), input_ids=ids, labels=ids, settings=ALL_ON_ONNX, tolerance=sums)


def decoded(call: Callable[..., object], cache: object, tokens: int = 4) -> list[torch.Tensor]:
    """The scores of a prompt and of some tokens behind it, one at a time."""
    torch.manual_seed(0)
    ids, start, results = torch.randint(3, SMALL["vocab_size"], (2, 9 + tokens)), 0, []
    for length in (9, *[1] * tokens):
        places = torch.arange(start, start + length)
        inputs = {"input_ids": ids[:, places], "position_ids": places[None], "past_key_values": cache}
        results.append(call(**inputs, use_cache=True).logits)  # type: ignore[attr-defined]
        start += length
    return results


def cache_of(kind: str, model: torch.nn.Module) -> object:
    return tf.DynamicCache() if kind == "dynamic" else tf.StaticCache(config=model.config, max_cache_len=16)


@pytest.mark.parametrize(
    ("name", "kind", "attention"),
    [("llama", "dynamic", "sdpa"), ("llama", "static", "sdpa"), ("qwen2", "dynamic", "eager")],
)
def test_decoding(name: str, kind: str, attention: str) -> None:
    """Each graph is one region with an ``Attention``, and Dynamo makes no more graphs than for eager's kernels;
    the caches end with eager's values."""
    model = model_of(name, attn_implementation=attention, num_hidden_layers=1)
    with torch.no_grad():
        theirs, ours, unused = (cache_of(kind, model) for _ in range(3))
        expected = decoded(model, theirs)
        decoded(torch.compile(model, backend="aot_eager"), unused)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.testing.assert_close(decoded(compiled(model, **ALL_ON_ONNX), ours), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == counted("graphs") == counted("regions")
    assert counted("pass onnx.attention") == graphs
    for layer, eagers in zip(ours.layers, theirs.layers, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close((layer.keys, layer.values), (eagers.keys, eagers.values))
