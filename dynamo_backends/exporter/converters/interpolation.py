"""``torch.nn.functional.interpolate``, with the coordinates of ``aten/src/ATen/native/UpSample.h``."""

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
    """``torch.nn.functional.interpolate`` of [N, C, ...] to static sizes or by static factors."""
    old = [shapes.static_size(input, dim) for dim in range(2, shapes.rank(input))]
    new = list(size) if size is not None else [int(n * by) for n, by in zip(old, scale_factor or (), strict=True)]
    factors: Sequence[float | None] = scale_factor or [None] * len(old)
    if mode.startswith("nearest"):
        indices = [nearest_indices(*sizes, mode == "nearest-exact") for sizes in zip(old, new, factors, strict=True)]
        return _nearest(input, old, new, indices)
    is_whole = all(by is None or int(n * by) == n * by for n, by in zip(old, factors, strict=True))
    if not is_whole and not align_corners:
        raise NotTranslatable("its scale factors give fractional sizes, which ONNX Runtime rounds differently")
    return _linear(input, shapes.sizes(input)[:2], new, align_corners)


def _linear(input: ir.Value, outer: list[shapes.Size], new: list[int], align_corners: bool) -> ir.Value:
    """Linear interpolation in the last ``len(new)`` dimensions; ``outer`` has the sizes of the first two."""
    if len(new) == 1:  # ONNX Runtime mistakes [N, C, length] for three spatial dimensions
        return op.Squeeze(_linear(op.Unsqueeze(input, [2]), outer, [1, *new], align_corners), [2])
    transformation = "align_corners" if align_corners else "half_pixel"
    return _resize(input, outer, new, mode="linear", coordinate_transformation_mode=transformation)


def _resize(input: ir.Value, outer: list[shapes.Size], new: list[int], **attributes: str) -> ir.Value:
    """``Resize`` with the sizes of all dimensions.

    With ``axes`` and the sizes of some dimensions, ONNX Runtime (1.31) rejects the model if the ``Resize`` is between
    two ``Transpose``, as for a channels-last image.
    """
    return op.Resize(input, None, None, shapes.vector([*outer, *new]), **attributes)


def nearest_indices(old: int, new: int, factor: float | None, is_exact: bool) -> list[int]:
    """For each of ``new`` pixels the index of its source among ``old`` pixels, computed in float32 as PyTorch does."""
    scale = np.float32(1.0 / factor) if factor is not None and factor > 0 else np.float32(old) / np.float32(new)
    coordinates = np.arange(new, dtype=np.float32) + np.float32(0.5 if is_exact else 0.0)
    return np.minimum(np.floor(coordinates * scale).astype(np.int64), old - 1).tolist()


def _nearest(input: ir.Value, old: list[int], new: list[int], indices: list[list[int]]) -> ir.Value:
    """A ``Resize`` if every pixel is repeated equally often, else a ``Gather`` for each dimension."""
    repeats = [math.ceil(after / before) for before, after in zip(old, new, strict=True)]
    if all(
        after == before * times and pixels == [i // times for i in range(after)]
        for before, after, times, pixels in zip(old, new, repeats, indices, strict=True)
    ):
        floor = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        return _resize(input, shapes.sizes(input)[:2], new, **floor)
    for dim, pixels in enumerate(indices, start=2):
        if pixels != list(range(old[dim - 2])):
            input = op.Gather(input, shapes.vector(pixels), axis=dim)
    return input
