"""The verdict is ``ok`` where rounding errors are large.

``test_large_values.py`` has similar values that are wrong.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from test_large_values import HALF, IMAGE, LINEAR, LOWEST, MORE, NORM, OUTLIER, ROWS, causal, run, some
from torch import nn


def attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x.sin(), x.cos(), x, attn_mask=mask)


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.5, 3, 0, 15)


def one_key(x: torch.Tensor, y: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
    heads = [f(z).view(2, -1, 4, 8).transpose(1, 2) for f, z in zip(layers, (x, y, y), strict=True)]
    return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)


def dense(x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
    return nn.Sequential(*layers)(x)


def autocast(x: torch.Tensor, *layers: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return dense(x, *layers).softmax(-1).float().log()


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 9}
    model = tf.LlamaModel(tf.LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    model.embed_tokens.weight.data[:, 3] *= 1e4  # as trained ones have
    return model


HALVES, BATCH_NORM = some(6, 8, size=2.0), partial(nn.BatchNorm2d, 3)
RIGHT_IN_EACH_DTYPE: dict[str, tuple[Any, ...]] = {
    "argmax": (lambda x, w: (x @ w, x.round().argmax(-1), x.round().argmin(0)), HALVES, MORE),
    "topk": (lambda x, w: (x @ w, x.round().topk(3)), HALVES, MORE),
    "sort": (lambda x, w: (x @ w, x.round().sort(stable=True)), HALVES, MORE),
    "max": (lambda x, w: (x @ w, x.round().max(0), x.round().min(1), x.amax(1)), HALVES, MORE),
    "max pool": (lambda x, w: (x @ w, F.max_pool1d(x.round(), 2), F.max_pool1d(x.sin(), 3, 1)), HALVES, MORE),
    "round": (lambda x, w: (x @ w, ((x * 2).round() / 2).round()), HALVES, MORE),
    "ceil, floor": (lambda x, w: (x @ w, x.round().ceil(), x.round().floor(), (x * 2).trunc()), HALVES, MORE),
    "compare": (lambda x, w: (x @ w, x.round() >= 1, x.round() == 0, (x * 0.1).sign()), HALVES, MORE),
    "quantized": (lambda x, w: (x @ w, quantized((x * 4).round() / 4)), HALVES, MORE),
    "cancels": (lambda x, w: (x @ w, (x + 1e4) - 1e4, 1 - x.cos(), (1 + x * 1e-3).log()), HALVES, MORE),
    "centered": (lambda x, w: (x @ w, (x + 300) - (x + 300).mean(-1, True), (x + 300).var(-1)), HALVES, MORE),
    "gelu": (lambda x, w: (x @ w, F.gelu(x * 9), F.gelu(x * 5, approximate="tanh")), HALVES, MORE),
    "silu": (lambda x, w: (x @ w, (x * 9).sigmoid(), F.silu(x * 9), F.mish(x * 9), F.elu(x * 0.1)), HALVES, MORE),
    "quick gelu": (lambda x, w: (x @ w, x * (1.702 * x).sigmoid(), x * x.sigmoid()), some(6, 8, size=9), some(8, 8)),
    "overflow": (lambda x, w: (x @ w, (x * 5).sinh() * x.sin() * 1e-3, 1 / x.square().square()), HALVES, MORE),
    "softmax": (lambda x, w: ((x @ w) * 1e3).softmax(-1) + ((x @ w) * 1e3).log_softmax(-1), HALVES, MORE),
    "exp": (lambda x, w: (x @ w, (x * 40).exp(), (x * 40).expm1(), (x * 1e-3).expm1()), HALVES, MORE),
    "outlier": (lambda x, f, g: f(g(x.T)), some(8, 6, last=1e3, size=5), LINEAR, NORM),
}  # fmt: skip

RIGHT: dict[str, tuple[Any, ...]] = {
    "one minus cosine": (lambda x: 1 - (x * 1e-3).cos(), ROWS),
    "nearly constant rows": (lambda x: (x.var(-1), x.std(-1), F.layer_norm(x, (8,))), some(4, 8, size=1e-4, offset=10)),
    "constant channel": (lambda x, f: f(x * torch.tensor([[[0.0]], [[1.0]], [[1e-4]]]) + 7), IMAGE, BATCH_NORM),
    "one key": (one_key, some(2, 5, 32), some(2, 1, 32), *[partial(nn.Linear, 32, 32)] * 3),
    "causal -inf": (attention, some(2, 8, 8), causal(-torch.inf)),
    "causal -1e9": (attention, some(2, 8, 8), causal(-1e9)),
    "causal lowest": (attention, some(2, 8, 8), causal(LOWEST)),
    "masked rows": (attention, some(2, 8, 8), causal(-torch.inf).flip(0)),
    "masked rows lowest": (attention, some(2, 8, 8), torch.full((8, 8), LOWEST)),
    "explicit mask": (lambda x, m: (x @ x.mT + m).softmax(-1) @ x, some(2, 8, 8), causal(-1e9)),
    "is_causal": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), some(2, 3, 8, 8)),
    "outlier channel": (lambda x, f, g, h: h(g(f(x.T))), some(8, 4, last=1e4), NORM, LINEAR, partial(nn.RMSNorm, 8)),
    "outlier in RMSNorm": (lambda x, f, g: f(g(x.T)), some(8, 4, last=1e4), LINEAR, partial(nn.RMSNorm, 8)),
    "softmax of 1e3": (lambda x: (x * 1e3).softmax(-1), ROWS),
    "logsumexp": (lambda x: (x * 1e4).logsumexp(-1), ROWS),
    "denormals": (lambda x: (x * 1e-39, x * 1e-39 + 1e-38, (x * 1e-30).square()), ROWS),
    "overflow": (lambda x: ((x * 200).exp(), (x * 1e30).square(), 1 / (x * 0)), ROWS),
    "put twice": (lambda x, y: x.sin().index_put((torch.tensor([1, 1, 2, 2]),), y), ROWS, ROWS),
    "scatter": (lambda x, i: x.sin().scatter_add(0, i.expand(4, 8), x), ROWS, torch.tensor([[0], [1], [1], [0]])),
    "vanish": (lambda x: x.tanh().mul(30).sigmoid().pow(8), some(4, 8, size=8)),
    "norm of zero": (lambda x: ((x * 0).norm(dim=-1), F.normalize(x * 1e-20), x.abs().clamp(1e-6).sqrt()), ROWS),
    "long sum": (lambda x: (x.sum(-1), x.mean(-1), (x + 100).sum(-1), x.square().sum().sqrt()), some(2, 100_000)),
    "long cumsum": (lambda x: (x.cumsum(-1), (x + 1).cumsum(-1)), some(2, 10_000)),
    "wide conv": (lambda x, f: f(x).relu(), some(1, 512, 4, 4), partial(nn.Conv2d, 512, 8, 3)),
    "group norm": (lambda x, f: f(x + 50), some(2, 4, 5, 5), partial(nn.GroupNorm, 2, 4)),
    "instance norm": (lambda x, f: f(x * 100), some(2, 4, 5, 5), partial(nn.InstanceNorm2d, 4, affine=True)),
    "batch norm": (lambda x, f: f(x + 30), IMAGE, BATCH_NORM),
    "cross entropy": (lambda x, y: F.cross_entropy(x * 50, y), some(4, 8), torch.tensor([1, -100, 7, 2])),
    "losses": (lambda x, y: F.mse_loss(x, y) + F.huber_loss(x, y) + F.l1_loss(x, y), ROWS, ROWS),
    "divergence": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), ROWS, ROWS),
    "bce": (lambda x, y: F.binary_cross_entropy_with_logits(x * 30, y.sigmoid()), ROWS, ROWS),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, (9, 4), mode="bicubic"), IMAGE),
    "grid sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGE, some(2, 3, 3, 2)),
    "embedding bag": (lambda i, f: f(i), torch.tensor([[1, 2, 2], [4, 0, 4]]), partial(nn.EmbeddingBag, 9, 4)),
    "dropout": (lambda x, f: F.dropout(f(x), 0.4) * F.dropout(x, 0.2), ROWS, LINEAR),
    "autocast": (autocast, ROWS, LINEAR, nn.GELU, LINEAR),
    "dense": (dense, OUTLIER, LINEAR, nn.GELU, NORM, LINEAR, partial(nn.Softmax, -1)),
    "batch of one": (lambda x, f, g: g(f(x).relu()), some(1, 8), LINEAR, NORM),
    "ties": (lambda x: torch.where((x / 24).acos() > 1.5, x, x.sign()), torch.linspace(-9, 9, 2048)),
    "empty": (lambda x, f: f(x[:0]).sum(0) + x.sum(0), ROWS, LINEAR),
}  # fmt: skip

RIGHT_FORWARD: dict[str, tuple[Any, ...]] = {
    "integers": (lambda i: (i // 2, i % 3, i * i - 1, i << 1, i.cumsum(0), i.sort()[0]), torch.randint(-9, 9, (30,))),
    "booleans": (lambda x: ((x > 0) & (x < 1), (x > 0).any(-1), ~(x > 0), (x > 0).sum(-1), x.isnan()), ROWS),
    "complex": (lambda x, y: torch.view_as_real(torch.polar(x.abs(), y) * torch.complex(y, x)), ROWS, ROWS),
    "fft": (lambda x: torch.fft.rfft(x).abs(), ROWS),
    "lstm": (lambda x, f: f(x[0], f(x[1])), some(5, 2, 8), partial(nn.LSTMCell, 8, 6)),
    "gru": (lambda x, f: f(x[0], f(x[1])), some(5, 2, 8), partial(nn.GRUCell, 8, 6)),
    "bitwise": (lambda i: (i & 5, i | 8, i ^ 3, ~i), torch.randint(-9, 9, (30,))),
    "llama": (lambda i, f: f(i).last_hidden_state, torch.tensor([[1, 2, 3, 4, 5, 6]]), llama),
}  # fmt: skip


def assert_right(graphs: list[Any]) -> None:
    assert graphs and [(graph.verdict, graph.entry.unchecked) for graph in graphs] == [("ok", [])] * len(graphs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", RIGHT_IN_EACH_DTYPE)
def test_what_is_right_in_each_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_right(run(tmp_path, *RIGHT_IN_EACH_DTYPE[name], dtype=dtype, seeds=3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RIGHT | RIGHT_FORWARD)
def test_what_is_right(name: str, tmp_path: Path) -> None:
    assert_right(run(tmp_path, *(RIGHT | RIGHT_FORWARD)[name], seeds=3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_in_training(name: str, tmp_path: Path) -> None:
    assert_right(run(tmp_path, *RIGHT[name], training=True, seeds=3))


@pytest.mark.parametrize("name", ["vanish", "dense", "group norm"])
def test_what_is_right_in_float64(name: str, tmp_path: Path) -> None:
    assert_right(run(tmp_path, *RIGHT[name], dtype=torch.float64, training=True, seeds=3))


@pytest.mark.parametrize("name", ["dense", "group norm", "outlier channel", "cross entropy"])
def test_what_is_right_with_dynamic_sizes(name: str, tmp_path: Path) -> None:
    assert_right(run(tmp_path, *RIGHT[name], training=True, seeds=3, dynamic=True))
