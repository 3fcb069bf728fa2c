"""Interpolation stays one node, runs on ONNX Runtime where that agrees with PyTorch, and has eager's gradients."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_as_eager, compiled, counted
from torch.autograd import forward_ad

from dynamo_backends import export
from dynamo_backends.exporter.converters.interpolation import nearest_indices
from passes import order

SHAPES = {1: (2, 3, 10), 2: (2, 3, 7, 9), 3: (1, 2, 5, 6, 7)}
MODES = {
    1: ("linear", "nearest", "nearest-exact"),
    2: ("bilinear", "nearest", "nearest-exact"),
    3: ("trilinear", "nearest", "nearest-exact"),
}
SIZES: dict[str, Any] = {
    "twice": {"scale_factor": 2},
    "half": {"scale_factor": 0.5},
    "1.7 times": {"scale_factor": 1.7},
    "1.7 times, recomputed": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "a size": {"size": 13},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dimensions", "mode"), [(n, mode) for n in MODES for mode in MODES[n]])
def test_values_strides_and_gradients(dimensions: int, mode: str, size: str) -> None:
    x = torch.randn(SHAPES[dimensions], requires_grad=True)
    for aligned in (None, True) if mode.endswith("linear") else (None,):
        torch._dynamo.reset()
        assert_same_as_eager(
            lambda x, aligned=aligned: F.interpolate(x.sin(), mode=mode, align_corners=aligned, **SIZES[size]), x
        )
        assert counted("pass pre_grad.interpolate") >= 1


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_it_runs_on_onnx_runtime(mode: str) -> None:
    x = torch.randn(1, 4, 16, 16)
    settings = {"options": {"fallback": "error"}}
    assert_same_as_eager(lambda x: F.interpolate(x.cos(), scale_factor=2, mode=mode), x, settings=settings)
    assert_same_as_eager(lambda x: F.interpolate(x.cos(), size=(9, 40), mode=mode), x, settings=settings)


def test_an_image_in_channels_last_stays_so() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_same_as_eager(lambda x: F.interpolate(x * 2, scale_factor=2, mode="bilinear"), x)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_between_transpositions_it_runs_on_onnx_runtime(mode: str, is_dynamic: bool) -> None:
    """ONNX Runtime moves transpositions through a Resize, and must know what its sizes are then."""

    def function(x: torch.Tensor) -> torch.Tensor:
        image = x.sin().permute(0, 3, 1, 2)
        return F.interpolate(image, size=(14, 16), mode=mode).permute(0, 2, 3, 1).cos()

    run = compiled(function, options={"fallback": "error"})
    for images in (3, 2) if is_dynamic else (3,):
        x = torch.randn(images, 7, 8, 4)
        if is_dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), function(x))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sizes", itertools.product((5, 7, 49, 224), (3, 12, 49, 98, 341)))
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_pixel_is_the_one_that_pytorch_chooses(sizes: tuple[int, int], mode: str) -> None:
    old, new = sizes
    line = torch.arange(old, dtype=torch.float32).reshape(1, 1, old)
    assert F.interpolate(line, size=new, mode=mode).flatten().tolist() == nearest_indices(
        old, new, None, mode == "nearest-exact"
    )
    by = new / old
    expected = F.interpolate(line, scale_factor=by, mode=mode).flatten().tolist()
    assert expected == nearest_indices(old, len(expected), by, mode == "nearest-exact")


def refused(function: Any, *args: torch.Tensor, **settings: Any) -> bool:
    """Whether the result is eager's, and the pass kept no interpolation."""
    assert_same_as_eager(function, *args, settings=settings or None)
    return counted("pass pre_grad.interpolate") == 0


def test_what_is_not_kept_is_right() -> None:
    image = torch.randn(2, 3, 8, 8)
    assert refused(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), image)
    torch._dynamo.reset()
    assert refused(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), image)
    torch._dynamo.reset()
    assert refused(lambda x: F.interpolate(x, scale_factor=2), image.double())
    torch._dynamo.reset()
    assert refused(torch.vmap(lambda x: F.interpolate(x[None], scale_factor=2)[0]), image)
    torch._dynamo.reset()
    assert refused(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image, dynamic=True)


def test_a_batch_of_any_size() -> None:
    function = compiled(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))
    for batch in (2, 5, 3):
        x = torch.randn(batch, 3, 8, 8)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(function(x), F.interpolate(x, scale_factor=2, mode="bilinear"))
    assert counted("pass pre_grad.interpolate") >= 1


def test_its_tangent_is_pytorchs() -> None:
    x, tangent = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    fast = compiled(function)
    for which in (function, fast):
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(which(forward_ad.make_dual(x, tangent)))
            torch.testing.assert_close(result.tangent, function(tangent))


def test_each_pass_on_torch_ir_says_what_it_looks_for() -> None:
    assert {name for name in order.ORDER if name.startswith("pre_grad.")} == set(order.LOOKED_FOR)


def test_known_values_need_no_translation() -> None:
    """What depends on no argument does not split a graph, also where ONNX has no right translation of it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(12).reshape(3, 4).sum(0) % 4
        halves = torch.div(torch.arange(4.0), 2, rounding_mode="floor")
        return x[:, positions] * halves, halves

    x = torch.randn(2, 4)
    assert_same_as_eager(function, x)
    assert counted("nodes_in_pytorch") == 0
    assert_same_as_eager(function, x.clone().requires_grad_())
    fast = compiled(function)
    fast(x)[1].zero_()
    torch.testing.assert_close(fast(x), function(x))


def test_an_error_of_a_known_value_is_raised_in_the_call() -> None:
    function = compiled(lambda x: x + torch.arange(4).sum(0, dtype=torch.int64) // torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(torch.ones(2))


ANTIALIASED: dict[str, dict[str, Any]] = {
    "smaller and larger": {"size": (3, 20)},
    "one size stays": {"size": (9, 10)},
    "aligned": {"size": (5, 23), "align_corners": True},
    "factors that give no whole sizes": {"scale_factor": (0.7, 1.3)},
    "a factor that changes nothing": {"scale_factor": 1.05},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", ANTIALIASED)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_antialiased_in_a_file(case: str, mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Right with NaN and infinities too; in ``torch.compile``, PyTorch is faster, and runs it."""

    class Resized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, mode=mode, antialias=True, **ANTIALIASED[case])

    x = torch.randn(2, 3, 10, 10).to(dtype)
    special = x.clone()
    special[0, 0, 4, 4], special[1, 0, 0, 7] = torch.nan, torch.inf
    exported = export(Resized(), x, path=tmp_path / "m.onnx", dynamic_shapes={"x": {0: "batch"}}, check=True)
    assert exported.difference(special) == ""
    (actual,) = exported.run(special).values()
    torch.testing.assert_close(actual, Resized()(special), equal_nan=True)


def test_an_antialiased_weight_in_a_file(tmp_path: Path) -> None:
    """Position embeddings, resized for another image, with a dynamic batch."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = torch.nn.Parameter(torch.randn(1, 4, 7, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.interpolate(self.embeddings, size=x.shape[2:], mode="bicubic", antialias=True)

    export(Positions(), torch.randn(2, 4, 5, 9), path=tmp_path / "m.onnx", dynamic_shapes=({0: "batch"},), check=True)
