"""Sums of many numbers, taken in two stages.

ONNX Runtime's CPU kernels of ``ReduceSum`` and its kind add one number after the other (1.31). The error grows with
their number: the mean of a million equal float32 is off by 6e-4, of ten million by 1.6 %, where PyTorch, which adds up
parts and then the parts' sums, is off by 1e-7. So in what is made a session of, each long sum becomes a sum of parts,
and a sum of these in float64, of which there are few::

    y = ReduceSum(x: [4096, 512], axes=[0])

    parts = ReduceSum(Reshape(x, [32, 128, 512]), axes=[1])
    y = Cast(ReduceSum(Cast(parts, to=double), axes=[0]), to=float)

Where no part divides the number, or it is known only at the call, zeros are added to the end, which copies the tensor.
It is by the kernel, not by the ATen operator: losses, variances and the gradients of biases are such sums too.

A running sum (``CumSum``) is taken in float64, as PyTorch's kernel does. ``LayerNormalization`` and
``InstanceNormalization`` of very many numbers add in the same way inside, and become their formulas first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from .building import Axis, Replacement, sizes_of


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A reduction: what reduces its parts, what these, and what is left to do.

    ``neutral`` is what may be added to a part without changing it.
    """

    parts: str
    whole: str = "ReduceSum"
    divides: bool = False
    neutral: float = 0.0


_KINDS = {
    "ReduceSum": _Kind("ReduceSum"),
    "ReduceMean": _Kind("ReduceSum", divides=True),
    "ReduceL1": _Kind("ReduceL1"),
    "ReduceL2": _Kind("ReduceL2", "ReduceL2"),
    "ReduceSumSquare": _Kind("ReduceSumSquare"),
    "ReduceProd": _Kind("ReduceProd", "ReduceProd", neutral=1.0),
}

_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """How many numbers a kernel may add one after the other, and how many make a part."""

    most: int
    smallest_part: int
    largest_part: int

    def part(self, number: Axis) -> int:
        """The size of the parts of ``number``: its largest suitable divisor, or a power of two where it has none."""
        if number is not None:
            for size in range(self.largest_part, self.smallest_part - 1, -1):
                if number % size == 0:
                    return size
        return 2 ** int(math.log2(math.sqrt(self.smallest_part * self.largest_part)))


_ROWS = _Lengths(most=512, smallest_part=16, largest_part=128)
"""Of numbers that lie apart in memory: a row is added to the sum of the rows before. 512 equal numbers are off by 7e-6,
what ``is_explained`` calls rounding."""

_NEIGHBOURS = _Lengths(most=8192, smallest_part=128, largest_part=1024)
"""Of neighbours in memory: the kernel adds in some 32 lanes."""

_MOST_NORMALIZED = 16_384
"""Numbers that a normalization's kernel may add. Hidden sizes are not beyond; images normalized as a whole are."""


def with_accurate_sums(model: ir.Model) -> ir.Model:
    """The model with its long sums in stages: a copy, or the model itself if it has none."""
    candidates = {*_KINDS, "CumSum", "LayerNormalization", "InstanceNormalization"}
    if not any(node.op_type in candidates for graph in model.graphs() for node in graph):
        return model
    model = model.clone()
    _infer_shapes(model)
    for node in _nodes(model, ("LayerNormalization", "InstanceNormalization")):
        _take_apart(node)
    for node in _nodes(model, ("CumSum",)):
        _widen(node)
    for node in _nodes(model, tuple(_KINDS)):
        _reduce_in_stages(node)
    return model


def _nodes(model: ir.Model, operators: Sequence[str]) -> list[ir.Node]:
    return [
        node
        for graph in model.graphs()
        for node in graph
        if node.domain in ("", "ai.onnx") and node.op_type in operators
    ]


def _infer_shapes(model: ir.Model) -> None:
    """Values between the nodes of one translation have no shape yet."""
    operators = (*_KINDS, "CumSum", "LayerNormalization", "InstanceNormalization")
    inputs = [node.inputs[0] for node in _nodes(model, operators)]
    if any(value is not None and value.shape is None for value in inputs):
        ShapeInferencePass()(model)


def _take_apart(node: ir.Node) -> None:
    """Makes a normalization of very many numbers its formula, whose means are then taken in stages."""
    value, scale, *rest = node.inputs
    bias = rest[0] if rest else None
    assert value is not None and scale is not None
    sizes = sizes_of(value)
    if sizes is None or value.dtype not in _DTYPES:
        return
    is_layer = node.op_type == "LayerNormalization"
    first = node.attributes.get_int("axis", -1) % len(sizes) if is_layer else 2
    axes = list(range(first, len(sizes)))
    number = _product(sizes[first:])
    if 0 in sizes or (number is not None and number <= _MOST_NORMALIZED):
        return
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


def _widen(node: ir.Node) -> None:
    """Lets a running sum of more than a few numbers run in float64."""
    value, axis = node.inputs
    assert value is not None and axis is not None
    if value.dtype not in _DTYPES:
        return
    constant, sizes = ir.convenience.get_const_tensor(axis), sizes_of(value)
    if constant is not None and sizes:
        size = sizes[int(constant.numpy().reshape(-1)[0])]
        if size is not None and size <= _ROWS.largest_part:
            return
    new = Replacement(node)
    running = new.op("CumSum", [new.cast(value, ir.DataType.DOUBLE), axis], **node.attributes)
    new.put([new.cast(running, value.dtype)])


def _reduce_in_stages(node: ir.Node) -> None:
    value, axes = node.inputs[0], _axes(node)
    if value is None or axes is None or value.dtype not in _DTYPES:
        return
    sizes = sizes_of(value)
    assert sizes is not None
    if 0 not in sizes and _is_long(sizes, axes):
        stages = _Stages(node, value, sizes, _KINDS[node.op_type])
        stages.put([stages.reduce(axes)])


def _axes(node: ir.Node) -> list[int] | None:
    """The axes a node reduces, in ascending order; ``None`` if they are not known or none."""
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


def _neighbouring(axes: Sequence[int]) -> list[range]:
    """The axes in runs of neighbours, which can be reduced as one."""
    runs: list[range] = []
    for axis in axes:
        if runs and runs[-1].stop == axis:
            runs[-1] = range(runs[-1].start, axis + 1)
        else:
            runs.append(range(axis, axis + 1))
    return runs


def _lengths(sizes: Sequence[Axis], group: range) -> _Lengths:
    are_neighbours = all(size == 1 for size in sizes[group.stop :])
    return _NEIGHBOURS if are_neighbours else _ROWS


def _product(sizes: Sequence[Axis]) -> Axis:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _is_long(sizes: Sequence[Axis], axes: Sequence[int]) -> bool:
    """Whether the kernel would add too many numbers one after the other; of axes that lie apart it adds all so."""
    number = _product([sizes[axis] for axis in axes])
    groups = _neighbouring(axes)
    most = _ROWS.most if len(groups) > 1 else _lengths(sizes, groups[0]).most
    return number is None or number > most


class _Stages(Replacement):
    """The nodes that take the place of one reduction. ``_current`` is what is reduced so far, of ``_sizes``."""

    def __init__(self, node: ir.Node, value: ir.Value, sizes: list[Axis], kind: _Kind) -> None:
        super().__init__(node)
        self._input = value
        self._current = value
        self._sizes = sizes
        self._kind = kind
        self._operator = kind.parts  # what reduces next: once there are parts, it is what reduces these
        self._dtype = value.dtype

    def reduce(self, axes: Sequence[int]) -> ir.Value:
        """Reduces the axes, those that lie nearest in memory first; returns what the node returned."""
        self._cast(ir.DataType.FLOAT)
        for group in reversed(_neighbouring(axes)):
            if _is_long(self._sizes, group):
                self._make_parts(group)
            else:
                self._reduce(list(group))
        if self._kind.divides:
            count = self._count(axes)
            if self._current.dtype != ir.DataType.DOUBLE:  # no group of axes was long by itself
                count = self.cast(count, self._current.dtype)
            self._current = self.op("Div", [self._current, count])
        assert self._dtype is not None
        self._cast(self._dtype)
        if self._node.attributes.get_int("keepdims", 1):
            self._current = self.op("Unsqueeze", [self._current, self.vector(axes)])
        return self._current

    def _make_parts(self, group: range) -> None:
        """Makes the group's axes one, this one the parts and what is in each, and reduces both."""
        lengths = _lengths(self._sizes, group)
        number = _product(self._sizes[group.start : group.stop])
        part = lengths.part(number)
        axis = group.start
        if number is None or number % part:
            if len(group) > 1:
                self._reshape(group, [number])
            self._fill_up(axis, number, part)
            group = range(axis, axis + 1)
        self._reshape(group, [None if number is None else math.ceil(number / part), part])
        self._reduce([axis + 1])
        self._cast(ir.DataType.DOUBLE)
        self._reduce([axis])

    def _reduce(self, axes: Sequence[int]) -> None:
        self._current = self.op(self._operator, [self._current, self.vector(axes)], keepdims=0)
        self._sizes = [size for axis, size in enumerate(self._sizes) if axis not in axes]
        self._operator = self._kind.whole

    def _reshape(self, group: range, sizes: Sequence[Axis]) -> None:
        """Puts ``sizes`` in the place of the group's; at most one of them is not known."""
        before, after = self._sizes[: group.start], self._sizes[group.stop :]
        inferred: list[int] = [-1 if size is None else size for size in sizes]
        shape = self._concat(
            self._shape_of(0, group.start), self.vector(inferred), self._shape_of(group.stop, len(self._sizes))
        )
        self._current = self.op("Reshape", [self._current, shape])
        self._sizes = [*before, *sizes, *after]

    def _fill_up(self, axis: int, number: Axis, part: int) -> None:
        """Adds neutral numbers to the end of an axis, so that ``part`` divides it."""
        if number is not None:
            missing = self.vector([-number % part])
        else:
            length = self.op("Shape", [self._current], start=axis, end=axis + 1)
            over = self.op("Mod", [length, self.vector([part])])
            missing = self.op("Mod", [self.op("Sub", [self.vector([part]), over]), self.vector([part])])
        neutral = self.constant(np.array(self._kind.neutral, np.float32))
        pads = self._concat(self.vector([0]), missing)
        if self._current.dtype == ir.DataType.DOUBLE:
            neutral = self.op("Cast", [neutral], to=ir.DataType.DOUBLE)
        self._current = self.op("Pad", [self._current, pads, neutral, self.vector([axis])])

    def _count(self, axes: Sequence[int]) -> ir.Value:
        """How many numbers are reduced, in the dtype of what they are reduced to."""
        assert self._input.shape is not None
        number = _product([size if isinstance((size := self._input.shape[axis]), int) else None for axis in axes])
        if number is not None:
            return self.constant(np.array(number, np.float64))
        shape = self.op("Gather", [self.op("Shape", [self._input]), self.vector(axes)])
        return self.op("Cast", [self.op("ReduceProd", [shape], keepdims=0)], to=ir.DataType.DOUBLE)

    def _shape_of(self, start: int, end: int) -> ir.Value | None:
        sizes = self._sizes[start:end]
        if not sizes:
            return None
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            return self.vector(known)
        return self.op("Shape", [self._current], start=start, end=end)

    def _cast(self, dtype: ir.DataType) -> None:
        self._current = self.cast(self._current, dtype)

    def _concat(self, *vectors: ir.Value | None) -> ir.Value:
        given = [vector for vector in vectors if vector is not None]
        return given[0] if len(given) == 1 else self.op("Concat", given, axis=0)
