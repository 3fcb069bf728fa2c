"""Sums of many numbers, taken in two stages.

ONNX Runtime's CPU kernels of ``ReduceSum`` and its kind add one number after the other (1.31). The error grows with
their number: the mean of a million equal float32 is off by 6e-4, of ten million by 1.6 %, where PyTorch, which adds up
parts and then the parts' sums, is off by 1e-7. So after translation each long sum becomes a sum of parts, and a sum of
these in float64, of which there are few::

    y = ReduceSum(x: [4096, 512], axes=[0])

    parts = ReduceSum(Reshape(x, [32, 128, 512]), axes=[1])
    y = Cast(ReduceSum(Cast(parts, to=double), axes=[0]), to=float)

It takes no more time: 0.2 ms before and after in this example (AMD EPYC, 2 threads). Where no part divides the number,
or it is known only at the call, zeros are added to the end. It is by the kernel, not by the ATen operator: losses,
variances and the gradients of biases are such sums too.

A running sum (``CumSum``) is taken in float64, as PyTorch's kernel does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

Axis: TypeAlias = "int | None"
"""A size; ``None`` if it is known only at the call."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A reduction: what reduces its parts, what these, and what is left to do.

    ``neutral`` is what may be added to a part without changing it.
    """

    parts: str
    whole: str = "ReduceSum"
    divides: bool = False
    takes_root: bool = False
    neutral: float = 0.0


_KINDS = {
    "ReduceSum": _Kind("ReduceSum"),
    "ReduceMean": _Kind("ReduceSum", divides=True),
    "ReduceL1": _Kind("ReduceL1"),
    "ReduceL2": _Kind("ReduceSumSquare", takes_root=True),
    "ReduceSumSquare": _Kind("ReduceSumSquare"),
    "ReduceLogSumExp": _Kind("ReduceLogSumExp", "ReduceLogSumExp", neutral=-math.inf),
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
"""Of neighbours in memory: the kernel adds in some 32 lanes. Hidden sizes are not beyond, so that normalizations stay
what the passes know them by."""


def take_long_sums_in_stages(model: ir.Model) -> None:
    """Rewrites the long sums of a model in place; its constants have been folded."""
    sums = [
        node
        for graph in model.graphs()
        for node in graph
        if node.domain == "" and (node.op_type in _KINDS or node.op_type == "CumSum")
    ]
    if any(value is not None and value.shape is None for node in sums for value in node.inputs[:1]):
        ShapeInferencePass()(model)  # values between the nodes of one translation
    for node in sums:
        assert isinstance(node.graph, ir.Graph)
        if node.op_type == "CumSum":
            _widen(node.graph, node)
        else:
            _rewrite(node.graph, node)


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    """Lets a running sum of more than a few numbers run in float64."""
    value, axis = node.inputs
    assert value is not None and axis is not None
    if value.dtype not in _DTYPES:
        return
    constant = ir.convenience.get_const_tensor(axis)
    if constant is not None and value.shape is not None:
        size = value.shape[int(constant.numpy().reshape(-1)[0])]
        if isinstance(size, int) and size <= _ROWS.largest_part:
            return
    wide = ir.node("Cast", [value], {"to": ir.DataType.DOUBLE}, name=f"{node.name}__wide")
    running = ir.node("CumSum", [wide.outputs[0], axis], node.attributes, name=f"{node.name}__sum")
    back = ir.node("Cast", [running.outputs[0]], {"to": value.dtype}, name=f"{node.name}__back")
    for new in (wide, running, back):
        new.metadata_props.update(node.metadata_props)
        new.outputs[0].name = new.name
        new.outputs[0].dtype = value.dtype if new is back else ir.DataType.DOUBLE
    ir.convenience.replace_nodes_and_values(graph, node, [node], [wide, running, back], node.outputs, back.outputs)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    value = node.inputs[0]
    axes = _axes(node)
    if value is None or axes is None or value.dtype not in _DTYPES:
        return
    assert value.shape is not None
    sizes: list[Axis] = [size if isinstance(size, int) else None for size in value.shape]
    if 0 in sizes or not any(_is_long(sizes, group) for group in _neighbouring(axes)):
        return
    stages = _Stages(node, value, sizes, _KINDS[node.op_type])
    result = stages.reduce(axes)
    ir.convenience.replace_nodes_and_values(graph, node, [node], stages.nodes, node.outputs, [result])


def _axes(node: ir.Node) -> list[int] | None:
    """The axes a node reduces, in ascending order; ``None`` if they are not known or none."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    rank = len(value.shape)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        is_noop = node.attributes.get_int("noop_with_empty_axes", 0)
        return None if is_noop else list(range(rank))
    constant = ir.convenience.get_const_tensor(given)
    if constant is None or not constant.size:
        return None
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


def _is_long(sizes: Sequence[Axis], group: range) -> bool:
    number = _product(sizes[group.start : group.stop])
    return number is None or number > _lengths(sizes, group).most


class _Stages:
    """The nodes that take the place of one reduction. ``current`` is what is reduced so far, of ``sizes``."""

    def __init__(self, node: ir.Node, value: ir.Value, sizes: list[Axis], kind: _Kind) -> None:
        self.nodes: list[ir.Node] = []
        self._node = node
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
            self._current = self._op("Div", [self._current, self._count(axes)])
        if self._kind.takes_root:
            self._current = self._op("Sqrt", [self._current])
        assert self._dtype is not None
        self._cast(self._dtype)
        if self._node.attributes.get_int("keepdims", 1):
            self._current = self._op("Unsqueeze", [self._current, self._vector(axes)])
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
        self._current = self._op(self._operator, [self._current, self._vector(axes)], keepdims=0)
        self._sizes = [size for axis, size in enumerate(self._sizes) if axis not in axes]
        self._operator = self._kind.whole

    def _reshape(self, group: range, sizes: Sequence[Axis]) -> None:
        """Puts ``sizes`` in the place of the group's; at most one of them is not known."""
        before, after = self._sizes[: group.start], self._sizes[group.stop :]
        inferred: list[int] = [-1 if size is None else size for size in sizes]
        shape = self._concat(
            self._shape_of(0, group.start), self._vector(inferred), self._shape_of(group.stop, len(self._sizes))
        )
        self._current = self._op("Reshape", [self._current, shape])
        self._sizes = [*before, *sizes, *after]

    def _fill_up(self, axis: int, number: Axis, part: int) -> None:
        """Adds neutral numbers to the end of an axis, so that ``part`` divides it."""
        if number is not None:
            missing = self._vector([-number % part])
        else:
            length = self._op("Shape", [self._current], start=axis, end=axis + 1)
            over = self._op("Mod", [length, self._vector([part])])
            missing = self._op("Mod", [self._op("Sub", [self._vector([part]), over]), self._vector([part])])
        neutral = self._constant(np.array(self._kind.neutral, np.float32))
        pads = self._concat(self._vector([0]), missing)
        if self._current.dtype == ir.DataType.DOUBLE:
            neutral = self._op("Cast", [neutral], to=ir.DataType.DOUBLE)
        self._current = self._op("Pad", [self._current, pads, neutral, self._vector([axis])])

    def _count(self, axes: Sequence[int]) -> ir.Value:
        """How many numbers are reduced, in the dtype of what they are reduced to."""
        assert self._input.shape is not None
        number = _product([size if isinstance((size := self._input.shape[axis]), int) else None for axis in axes])
        if number is not None:
            return self._constant(np.array(number, np.float64))
        shape = self._op("Gather", [self._op("Shape", [self._input]), self._vector(axes)])
        return self._op("Cast", [self._op("ReduceProd", [shape], keepdims=0)], to=ir.DataType.DOUBLE)

    def _shape_of(self, start: int, end: int) -> ir.Value | None:
        sizes = self._sizes[start:end]
        if not sizes:
            return None
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            return self._vector(known)
        return self._op("Shape", [self._current], start=start, end=end)

    def _cast(self, dtype: ir.DataType) -> None:
        if self._current.dtype != dtype:
            self._current = self._op("Cast", [self._current], to=dtype)

    def _concat(self, *vectors: ir.Value | None) -> ir.Value:
        given = [vector for vector in vectors if vector is not None]
        return given[0] if len(given) == 1 else self._op("Concat", given, axis=0)

    def _vector(self, numbers: Sequence[int]) -> ir.Value:
        return self._constant(np.array(numbers, np.int64))

    def _constant(self, array: np.ndarray) -> ir.Value:
        result = self._op("Constant", [], value=ir.tensor(array))
        result.dtype = ir.DataType.from_numpy(array.dtype)
        return result

    def _op(self, operator: str, inputs: Sequence[ir.Value], **attributes: Any) -> ir.Value:
        name = f"{self._node.name}__stage{len(self.nodes)}"
        node = ir.node(operator, inputs, attributes, name=name)
        node.metadata_props.update(self._node.metadata_props)
        (result,) = node.outputs
        result.name = name
        if operator == "Shape":
            result.dtype = ir.DataType.INT64
        elif operator != "Constant":
            result.dtype = ir.DataType(attributes["to"]) if operator == "Cast" else inputs[0].dtype
        self.nodes.append(node)
        return result
