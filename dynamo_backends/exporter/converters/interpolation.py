"""Interpolation, as ``aten/src/ATen/native/UpSample.h`` says which pixels a pixel is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnxscript.onnx_opset import opset18 as op

from passes import operators

from . import shapes
from .registry import NotTranslatable, converter


@converter(operators.interpolate)
def interpolate(
    input: ir.Value,
    size: Sequence[int] | None = None,
    scale_factor: Sequence[float] | None = None,
    *,
    mode: str = "nearest",
    align_corners: bool = False,
) -> ir.Value:
    """``torch.nn.functional.interpolate`` of [N, C, ...] to sizes or by factors that are numbers.

    The nearest modes read one pixel, which is chosen here, as PyTorch's rounding chooses it.
    """
    old = [shapes.static_size(input, dim) for dim in range(2, shapes.rank(input))]
    new = list(size) if size is not None else [int(one * by) for one, by in zip(old, scale_factor or (), strict=True)]
    factors: Sequence[float | None] = scale_factor or [None] * len(old)
    if mode.startswith("nearest"):
        chosen = [nearest_indices(*sizes, mode == "nearest-exact") for sizes in zip(old, new, factors, strict=True)]
        return _pixels(input, old, new, chosen)
    is_whole = all(by is None or int(one * by) == one * by for one, by in zip(old, factors, strict=True))
    if not is_whole and not align_corners:
        raise NotTranslatable("its factors make no whole sizes, and ONNX Runtime would round elsewhere")
    return _linear(input, shapes.sizes(input)[:2], new, align_corners)


def _linear(input: ir.Value, outer: list[shapes.Size], new: list[int], align_corners: bool) -> ir.Value:
    """``outer`` are the sizes of the first two dimensions."""
    if len(new) == 1:  # ONNX Runtime takes one dimension for the innermost of three
        return op.Squeeze(_linear(op.Unsqueeze(input, [2]), outer, [1, *new], align_corners), [2])
    places = "align_corners" if align_corners else "half_pixel"
    return _resize(input, outer, new, mode="linear", coordinate_transformation_mode=places)


def _resize(input: ir.Value, outer: list[shapes.Size], new: list[int], **attributes: str) -> ir.Value:
    """All dimensions but the first two.

    These are among the sizes all the same: between two ``Transpose``, as an image in channels-last has them, ONNX
    Runtime (1.31) takes the sizes for those of all dimensions, whatever ``axes`` says, and refuses the model.
    """
    return op.Resize(input, None, None, shapes.vector([*outer, *new]), **attributes)


def nearest_indices(old: int, new: int, factor: float | None, is_exact: bool) -> list[int]:
    """Which of ``old`` pixels each of ``new`` is, by PyTorch's arithmetic in float32."""
    scale = np.float32(1.0 / factor) if factor is not None and factor > 0 else np.float32(old) / np.float32(new)
    places = np.arange(new, dtype=np.float32) + np.float32(0.5 if is_exact else 0.0)
    return np.minimum(np.floor(places * scale).astype(np.int64), old - 1).tolist()


def _pixels(input: ir.Value, old: list[int], new: list[int], chosen: list[list[int]]) -> ir.Value:
    """The pixels of each dimension that are ``chosen``: a Resize where each is repeated as often, else a Gather."""
    repeats = [math.ceil(after / before) for before, after in zip(old, new, strict=True)]
    is_repeated = [
        after == before * times and pixels == [i // times for i in range(after)]
        for before, after, times, pixels in zip(old, new, repeats, chosen, strict=True)
    ]
    if all(is_repeated):
        outer = shapes.sizes(input)[:2]
        return _resize(
            input, outer, new, mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"
        )
    for dim, pixels in enumerate(chosen, start=2):
        if pixels != list(range(old[dim - 2])):
            input = op.Gather(input, shapes.vector(pixels), axis=dim)
    return input
