"""By how much rounding may move what a model computes, measured: the model runs again on inputs moved by one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx

from .differences import Difference, OnnxValue, difference, epsilon, kind_of
from .models import OnnxModel

_LARGEST_MOVED = 2**28
"""Bytes of weights that are moved by rounding at most; those of larger models in part."""


def movements(
    model: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    run: Callable[[OnnxModel, Mapping[str, OnnxValue]], Mapping[str, OnnxValue]],
    before: Mapping[str, OnnxValue],
    unit: float,
    seed: int = 0,
) -> dict[str, Difference]:
    """By how much each value moves when all floating-point inputs and weights move by one unit of rounding.

    Args:
        model: the model.
        feeds: its inputs.
        run: runs a model on inputs; its values by name.
        before: the values that it has without being moved.
        unit: of rounding, see ``coarsest_unit``.
        seed: of the directions.
    """
    after = run(*_moved(model, feeds, unit, seed))
    return {name: difference(value, before[name]) for name, value in after.items() if name in before}


def coarsest_unit(values: Iterable[OnnxValue]) -> float:
    """The largest epsilon of floating-point values, but of those of eight bits, which are stored and not computed."""
    dtypes = {value.dtype for value in values if isinstance(value, np.ndarray)}
    return max((epsilon(dtype) for dtype in dtypes if kind_of(dtype) == "float" and dtype.itemsize > 1), default=0.0)


def _moved(
    model: OnnxModel, feeds: Mapping[str, OnnxValue], unit: float, seed: int
) -> tuple[OnnxModel, dict[str, OnnxValue]]:
    """A model and its inputs, all floating-point values larger or smaller by one unit of rounding.

    The unit is relative; that of a value's own dtype if that is larger. Weights in files are read if they are not too
    large together.
    """
    generator = np.random.default_rng(seed)

    def moved(value: np.ndarray) -> np.ndarray:
        relative = max(unit, epsilon(value.dtype))
        signs = generator.integers(0, 2, value.shape) * 2 - 1
        with np.errstate(all="ignore"):
            shifted = (value.astype(np.float64) * (1 + relative * signs)).astype(value.dtype)
            return np.where(np.isfinite(shifted.astype(np.float64)), shifted, value)

    changed = model.copy()
    room = _LARGEST_MOVED
    for item in changed.proto.graph.initializer:
        value = model.initializers[item.name]
        if kind_of(value.dtype) == "float" and value.nbytes <= room:
            room -= value.nbytes
            item.CopyFrom(onnx.numpy_helper.from_array(moved(value), item.name))
    return changed, {
        name: moved(value) if isinstance(value, np.ndarray) and kind_of(value.dtype) == "float" else value
        for name, value in feeds.items()
    }
