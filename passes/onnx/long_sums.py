"""Computes sums of many numbers in two stages, for accuracy.

ONNX Runtime's CPU kernels of ``ReduceSum`` and similar operators (1.31) add one number after another. The error grows
with their count: the mean of a million equal float32 is off by 6e-4, of ten million by 1.6 %. PyTorch adds partial sums
and is off by 1e-7.

Rule: a long sum becomes a sum of parts, and a float64 sum of their results. If no part size divides the length, or the
length is known only at run time, the tensor is padded with zeros, which copies it; products are computed in float64
instead. A running sum (``CumSum``) is computed in float64, as in PyTorch. ``LayerNormalization`` and
``InstanceNormalization`` of very many numbers have the same problem, and are decomposed first.

Before and after::

    y = ReduceSum(x: [4096, 512], axes=[0])

    parts = ReduceSum(Reshape(x, [32, 128, 512]), axes=[1])
    y = Cast(ReduceSum(Cast(parts, to=double), axes=[0]), to=float)

Needed: results would be inaccurate. It works on ONNX nodes because losses, variances and gradients of biases are such
sums too, and runs after all other passes because they would not recognize its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.building import Axis, Replacement, sizes_of
from ..engine.onnx.editing import nodes_of
from ..engine.onnx.inference import infer_types
from ..engine.registry import Pass

_WHOLE = {
    "ReduceSum": "ReduceSum",
    "ReduceMean": "ReduceSum",
    "ReduceL1": "ReduceSum",
    "ReduceL2": "ReduceL2",
    "ReduceSumSquare": "ReduceSum",
    "ReduceProd": "ReduceProd",
}
"""By reduction, the one that combines the results of its parts; a mean is divided at the end."""

_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """How many numbers a kernel may add sequentially, and the sizes of parts."""

    most: int
    smallest_part: int
    usual_part: int
    largest_part: int

    def part(self, number: Axis) -> int | None:
        """The largest divisor of ``number`` that is a suitable part size, or ``None``."""
        sizes = range(self.largest_part, self.smallest_part - 1, -1)
        return None if number is None else next((size for size in sizes if number % size == 0), None)


_ONE_BY_ONE = _Lengths(most=96, smallest_part=16, usual_part=32, largest_part=64)
"""For what is added one after another: strided numbers, squares and magnitudes. The sum of 96 equal numbers is off by
up to 8 units in the last place, of 128 squares by 13, of 512 by 43."""

_IN_LANES = _Lengths(most=1024, smallest_part=64, usual_part=128, largest_part=256)
"""For contiguous numbers, which are added in eight lanes: 1,024 equal ones are off by up to 11 units, 2,048 by 21."""

_MOST_NORMALIZED = 16_384
"""How many numbers a normalization's kernel may add: more than hidden sizes, fewer than whole images."""

_NORMALIZATIONS = ("LayerNormalization", "InstanceNormalization")


def long_sums(model: ir.Model, context: PassContext) -> int:
    """Rewrites long sums in place; returns how many."""
    candidates = list(nodes_of(model, *_WHOLE, *_NORMALIZATIONS, "CumSum"))
    if not candidates:
        return 0
    _infer_shapes(model, candidates)
    fired = sum(_decompose(node) for node in nodes_of(model, *_NORMALIZATIONS))
    fired += sum(_widen(node) for node in nodes_of(model, "CumSum"))
    return fired + sum(_reduce_in_stages(node) for node in nodes_of(model, *_WHOLE))


def _infer_shapes(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Infers missing shapes, which values inside the translation of one operator do not have yet."""
    inputs = [node.inputs[0] for node in nodes]
    if any(value is not None and value.shape is None for value in inputs):
        infer_types(ir.traversal.RecursiveGraphIterator(model.graph), model.opset_imports.get("", 1))


def _decompose(node: ir.Node) -> bool:
    """Decomposes a normalization of very many numbers, whose means are then computed in stages."""
    value, scale, *rest = node.inputs
    bias = rest[0] if rest else None
    assert value is not None and scale is not None
    sizes = sizes_of(value)
    if sizes is None or value.dtype not in _DTYPES:
        return False
    is_layer = node.op_type == "LayerNormalization"
    first = node.attributes.get_int("axis", -1) % len(sizes) if is_layer else 2
    axes = list(range(first, len(sizes)))
    number = _product(sizes[first:])
    if 0 in sizes or (number is not None and number <= _MOST_NORMALIZED):
        return False
    new = Replacement(node)
    wide = new.cast(value, ir.DataType.FLOAT)
    mean = new.op("ReduceMean", [wide, new.vector(axes)])
    centered = new.op("Sub", [wide, mean])
    squares = new.op("Mul", [centered, centered])
    squares.shape = wide.shape = value.shape
    epsilon = new.constant(np.array(node.attributes.get_float("epsilon", 1e-5), np.float32))
    inverse = new.op(
        "Reciprocal", [new.op("Sqrt", [new.op("Add", [new.op("ReduceMean", [squares, new.vector(axes)]), epsilon])])]
    )
    result = new.cast(new.op("Mul", [centered, inverse]), value.dtype)
    for operator, factor in (("Mul", scale), ("Add", bias)):
        if factor is not None:
            if not is_layer and len(axes) > 0:
                factor = new.op("Unsqueeze", [factor, new.vector([axis - 1 for axis in axes])])
            result = new.op(operator, [result, factor])
    new.put([result, mean, inverse])
    return True


def _widen(node: ir.Node) -> bool:
    """Computes a running sum of more than a few numbers in float64."""
    value, axis = node.inputs
    assert value is not None and axis is not None
    if value.dtype not in _DTYPES:
        return False
    constant, sizes = ir.convenience.get_const_tensor(axis), sizes_of(value)
    if constant is not None and sizes:
        size = sizes[int(constant.numpy().reshape(-1)[0])]
        if size is not None and size <= _ONE_BY_ONE.most:
            return False
    new = Replacement(node)
    running = new.op("CumSum", [new.cast(value, ir.DataType.DOUBLE), axis], **node.attributes)
    new.put([new.cast(running, value.dtype)])
    return True


def _reduce_in_stages(node: ir.Node) -> bool:
    """Reduces runs of adjacent axes, the last first; a long run in parts, then in float64."""
    value, axes = node.inputs[0], _axes(node)
    if value is None or axes is None or value.dtype not in _DTYPES:
        return False
    sizes = sizes_of(value)
    assert sizes is not None
    new, is_mean = Replacement(node), node.op_type == "ReduceMean"
    operator = "ReduceSum" if is_mean else node.op_type
    if 0 in sizes or not _is_long(sizes, axes, operator):
        return False
    current = new.cast(value, ir.DataType.FLOAT)
    for run in reversed(_runs_of(axes)):
        if _is_long(sizes, run, operator):
            lengths, number = _lengths(sizes, run, operator), _product([sizes[axis] for axis in run])
            part = lengths.part(number)
            if part is None and operator != "ReduceProd":
                part = lengths.usual_part
                current = _reshaped(new, current, sizes, run, [-1])
                current = _padded(new, current, run.start, part)
                sizes[run.start : run.stop] = [None]
                run = range(run.start, run.start + 1)
            if part is not None:
                current = _reshaped(new, current, sizes, run, [-1, part])
                current = new.op(operator, [current, new.vector([run.start + 1])], keepdims=0)
                sizes[run.start : run.stop] = [None]
                run, operator = range(run.start, run.start + 1), _WHOLE[node.op_type]
            current = new.cast(current, ir.DataType.DOUBLE)
        current = new.op(operator, [current, new.vector(run)], keepdims=0)
        del sizes[run.start : run.stop]
        operator = _WHOLE[node.op_type]
    if is_mean:
        counts = new.op("Gather", [new.op("Shape", [value]), new.vector(axes)])
        count = new.cast(new.op("ReduceProd", [counts], keepdims=0), ir.DataType.DOUBLE)
        current = new.op("Div", [new.cast(current, ir.DataType.DOUBLE), count])
    current = new.cast(current, value.dtype)
    if node.attributes.get_int("keepdims", 1):
        current = new.op("Unsqueeze", [current, new.vector(axes)])
    new.put([current])
    return True


def _reshaped(new: Replacement, value: ir.Value, sizes: list[Axis], run: range, by: Sequence[int]) -> ir.Value:
    """``value``, of ``sizes``, with a run of axes reshaped to the sizes ``by``."""
    shape = [new.vector(by)]
    for side, start, stop in ((0, 0, run.start), (len(sizes), run.stop, len(sizes))):
        known = [size for size in sizes[start:stop] if size is not None]
        if len(known) < stop - start:
            shape.insert(side, new.op("Shape", [value], start=start, end=stop))
        elif known:
            shape.insert(side, new.vector(known))
    return new.op("Reshape", [value, new.op("Concat", shape, axis=0)])


def _padded(new: Replacement, value: ir.Value, axis: int, part: int) -> ir.Value:
    """``value`` padded with zeros at the end of an axis, so that ``part`` divides its size."""
    parts, zero = new.vector([part]), new.constant(np.zeros((), np.float32))
    length = new.op("Shape", [value], start=axis, end=axis + 1)
    missing = new.op("Mod", [new.op("Sub", [parts, new.op("Mod", [length, parts])]), parts])
    pads = new.op("Concat", [new.vector([0]), missing], axis=0)
    return new.op("Pad", [value, pads, new.cast(zero, value.dtype or ir.DataType.FLOAT), new.vector([axis])])


def _axes(node: ir.Node) -> list[int] | None:
    """The axes a node reduces, in ascending order; ``None`` if unknown or none."""
    value = node.inputs[0]
    if value is None or value.shape is None or len(value.shape) == 0:
        return None
    rank = len(value.shape)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        return None if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    constant = ir.convenience.get_const_tensor(given)
    if constant is None:
        return None
    if not constant.size:
        return None if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(int(axis) % rank for axis in constant.numpy().reshape(-1))


def _runs_of(axes: Sequence[int]) -> list[range]:
    """The runs of adjacent axes, each of which can be reduced as one axis."""
    runs: list[range] = []
    for axis in axes:
        if runs and runs[-1].stop == axis:
            runs[-1] = range(runs[-1].start, axis + 1)
        else:
            runs.append(range(axis, axis + 1))
    return runs


def _lengths(sizes: Sequence[Axis], group: range, operator: str) -> _Lengths:
    are_neighbours = all(size == 1 for size in sizes[group.stop :])
    return _IN_LANES if are_neighbours and operator == "ReduceSum" else _ONE_BY_ONE


def _product(sizes: Sequence[Axis]) -> Axis:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _is_long(sizes: Sequence[Axis], axes: Sequence[int], operator: str) -> bool:
    """Whether the kernel would add too many numbers sequentially; it does so with all of several runs of axes."""
    number = _product([sizes[axis] for axis in axes])
    groups = _runs_of(axes)
    most = _ONE_BY_ONE.most if len(groups) > 1 else _lengths(sizes, groups[0], operator).most
    return number is None or number > most


PASS = Pass("onnx.long_sums", "Computes sums of many numbers in two stages.", long_sums, cleans_up=True, is_needed=True)
