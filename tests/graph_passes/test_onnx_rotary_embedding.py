"""Rotary embeddings written out in ONNX become one operator if cos and sin provably have the required form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import transformers as tf
from conftest import assert_on_onnx, assert_same_as_eager, counted

ALONE = {
    "disable": ["*"],
    "enable": ["onnx.rotary_embedding", "onnx.lift_constants"],
}
SETTINGS: dict[str, object] = {"options": {"opset": 23, "passes": ALONE}}
B, H, S, D = 2, 3, 5, 8


def fired() -> int:
    return counted("pass onnx.rotary_embedding")


def check(
    function: Callable[..., object],
    *args: object,
    times: int = 1,
    settings: Mapping[str, object] = SETTINGS,
    tolerance: Mapping[str, float] | None = None,
) -> None:
    """Asserts how often the pass fires, and that the results are eager's."""
    with torch.no_grad():
        assert_same_as_eager(function, *args, settings=settings, tolerance=tolerance)
    assert fired() == times


def frequencies(batch: int = 1, length: int = S, features: int = D) -> torch.Tensor:
    return torch.rand(batch, length, features // 2)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def doubled(f: torch.Tensor) -> torch.Tensor:
    return torch.cat((f, f), dim=-1)


def llama(x: torch.Tensor, f: torch.Tensor, heads: int = 1) -> torch.Tensor:
    """As in Llama: x is [batch, heads, length, features], or for ``heads=2`` [batch, length, heads, features]."""
    angles = doubled(f)
    cos, sin = (angles.cos() * 0.9).unsqueeze(heads), (angles.sin() * 0.9).unsqueeze(heads)
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize("batch_of_angles", [1, B])
def test_halves_of_each_head(batch_of_angles: int) -> None:
    check(llama, torch.randn(B, H, S, D), frequencies(batch_of_angles))


def test_heads_after_positions() -> None:
    check(lambda x, f: llama(x, f, heads=2), torch.randn(B, S, H, D), frequencies())


def test_heads_taken_apart_from_one_projection() -> None:
    check(lambda x, f: llama(x.unflatten(-1, (H, D)).transpose(1, 2), f), torch.randn(B, S, H * D), frequencies())


def test_operands_in_any_order() -> None:
    def rotated(x, f):
        angles = doubled(f)[:, None]
        return angles.sin() * rotate_half(x) + angles.cos() * x

    check(rotated, torch.randn(B, H, S, D), frequencies())


def test_halves_by_chunk() -> None:
    def rotated(x, f):
        first, second = x.chunk(2, dim=-1)
        angles = doubled(f)[:, None]
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    check(rotated, torch.randn(B, H, S, D), frequencies())


def test_pairs() -> None:
    def rotated(x, f):
        angles = f.repeat_interleave(2, dim=-1)[:, None]
        return x * angles.cos() + rotate_pairs(x) * angles.sin()

    check(rotated, torch.randn(B, H, S, D), frequencies())


@pytest.mark.parametrize("length", [1, S])
def test_a_part_of_the_features(length: int) -> None:
    def rotated(x, f):
        return torch.cat((llama(x[..., :4], f), x[..., 4:]), dim=-1)

    check(rotated, torch.randn(B, H, length, D), frequencies(length=length, features=4))


def test_constant_angles() -> None:
    class Rotary(torch.nn.Module):
        def forward(self, x):
            angles = torch.outer(torch.arange(S, dtype=torch.float32), 10.0 ** -torch.arange(D // 2))
            return llama(x, angles[None])

    check(Rotary(), torch.randn(B, H, S, D))


def test_dynamic_batch_and_length() -> None:
    def rotated(x, f):
        return llama(x.unflatten(-1, (H, D)).transpose(1, 2), f)

    with torch.no_grad():
        compiled = assert_same_as_eager(
            rotated, torch.randn(2, 5, H * D), frequencies(), settings={**SETTINGS, "dynamic": True}
        )
        assert fired() == 1
        x, f = torch.randn(4, 7, H * D), frequencies(length=7)
        torch.testing.assert_close(compiled(x, f), rotated(x, f))
    assert counted("graphs") == 1


def test_infinities_and_nans_stay() -> None:
    x = torch.randn(B, H, S, D)
    x[0, 0, 0, 0], x[1, 2, 3, 4] = math.inf, math.nan
    check(llama, x, frequencies())


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def models() -> dict[str, Callable[[], torch.nn.Module]]:
    settings = {**SMALL, "vocab_size": 99, "use_cache": False}
    return {
        "llama": lambda: tf.LlamaModel(tf.LlamaConfig(**settings, num_key_value_heads=2)),
        "qwen2": lambda: tf.Qwen2Model(tf.Qwen2Config(**settings, num_key_value_heads=2)),
        "gpt_neox": lambda: tf.GPTNeoXModel(tf.GPTNeoXConfig(**settings)),
        "gptj": lambda: tf.GPTJModel(
            tf.GPTJConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, use_cache=False)
        ),
    }


@pytest.mark.parametrize("name", models())
def test_models_of_every_form(name: str) -> None:
    """With all passes: the queries and keys of both layers, and their attention."""
    torch.set_num_threads(1)
    model = models()[name]().eval()
    ids = torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[-1, 9:] = 0
    with torch.no_grad():
        close = {"rtol": 1e-4, "atol": 1e-5}  # two layers of rounding
        assert_same_as_eager(
            lambda i, m: model(input_ids=i, attention_mask=m).last_hidden_state,
            *(ids, mask),
            settings={"options": {"opset": 23}},
            tolerance=close,
        )
    assert_on_onnx()
    assert (fired(), counted("pass onnx.attention")) == (4, 2)


# Where it must not fire


def test_not_with_two_halves_that_differ() -> None:
    def rotated(x, f, g):
        angles = torch.cat((f, g), dim=-1)[:, None]
        return x * angles.cos() + rotate_half(x) * angles.sin()

    check(rotated, torch.randn(B, H, S, D), frequencies(), frequencies(), times=0)


def test_not_with_angles_from_outside() -> None:
    def rotated(x, cos, sin):
        return x * cos[:, None] + rotate_half(x) * sin[:, None]

    check(rotated, torch.randn(B, H, S, D), torch.rand(1, S, D), torch.rand(1, S, D), times=0)


def test_not_with_pairs_of_angles_for_halves() -> None:
    def rotated(x, f):
        angles = f.repeat_interleave(2, dim=-1)[:, None]
        return x * angles.cos() + rotate_half(x) * angles.sin()

    check(rotated, torch.randn(B, H, S, D), frequencies(), times=0)


def test_not_with_angles_of_each_head() -> None:
    def rotated(x, f):
        angles = doubled(f)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    check(rotated, torch.randn(B, H, S, D), torch.rand(B, H, S, D // 2), times=0)


def test_not_where_the_turn_goes_the_other_way() -> None:
    def rotated(x, f):
        angles = doubled(f)[:, None]
        turned = torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1)
        return x * angles.cos() + turned * angles.sin()

    check(rotated, torch.randn(B, H, S, D), frequencies(), times=0)


def test_not_where_a_product_is_returned() -> None:
    def rotated(x, f):
        angles = doubled(f)[:, None]
        straight = x * angles.cos()
        return straight + rotate_half(x) * angles.sin(), straight

    check(rotated, torch.randn(B, H, S, D), frequencies(), times=0)


def test_not_of_scalars() -> None:
    def sums(x, y):
        return x * y + torch.cat((-x[None], x[None])) * y

    check(sums, torch.tensor(2.0), torch.tensor(3.0), times=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_not_in_other_dtypes(dtype: torch.dtype) -> None:
    x, f = torch.randn(B, H, S, D).to(dtype), frequencies().to(dtype)
    rounding = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.float16 else None  # ONNX Runtime rounds once at the end
    check(llama, x, f, times=0, tolerance=rounding)


def test_not_before_opset_23() -> None:
    check(llama, torch.randn(B, H, S, D), frequencies(), times=0, settings={"options": {"opset": 22, "passes": ALONE}})
