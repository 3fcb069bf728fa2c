"""``convolution_backward``: the gradients of convolutions in one, two and three dimensions.

Follows ``aten/src/ATen/native/Convolution.cpp``. Shapes: input [N, C, *inner], grad [N, O, *outer], weight
[O, C/groups, *kernel]. Times are in ms with 2 threads, with PyTorch's in brackets.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset18 as op

from . import shapes
from .registry import NotTranslatable, converter
from .shapes import Size

_MAXIMUM_TAPS = 27
"""The largest kernel, in elements (taps), for the weight gradient by windows: 5x5 and 3x3x3 but not 7x7."""


@converter(torch.ops.aten.convolution_backward.default)
def convolution_backward(
    grad_output: ir.Value,
    input: ir.Value,
    weight: ir.Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """The gradients of input, weight and bias, each ``None`` if ``output_mask`` is false.

    The input gradient of a convolution is the transposed convolution of ``grad_output``, and vice versa. The weight
    gradient of a transposed convolution is that of a convolution with input and ``grad_output`` swapped.
    """
    arguments = (*stride, *padding, *dilation, *output_padding, groups)
    if not all(isinstance(item, int) for item in arguments):
        raise NotTranslatable("stride, padding, dilation and groups are attributes in ONNX and cannot be symbolic")
    dims = shapes.rank(weight) - 2
    window = _Window(
        kernel=[shapes.static_size(weight, dim) for dim in range(2, 2 + dims)],
        stride=shapes.for_each(stride, dims),
        padding=shapes.for_each(padding, dims),
        dilation=shapes.for_each(dilation, dims),
        groups=groups,
    )
    grad_input = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        if any(map(operator.ge, shapes.for_each(output_padding, dims), window.stride)):
            raise NotTranslatable("its translation needs an output_padding smaller than the stride")
        grad_input = window.convolve(grad_output, weight)
    elif output_mask[0]:
        grad_input = window.input_gradient(grad_output, weight, input)
    if output_mask[1]:
        grad_weight = window.weight_gradient(*((input, grad_output) if transposed else (grad_output, input)))
    if output_mask[2]:
        grad_bias = op.ReduceSum(grad_output, [0, *window.spatial], keepdims=0)
    return grad_input, grad_weight, grad_bias


@dataclasses.dataclass(frozen=True)
class _Window:
    """The attributes of a convolution, with one number for each spatial dimension."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def spatial(self) -> list[int]:
        return list(range(2, 2 + self.dims))

    def convolve(self, input: ir.Value, weight: ir.Value) -> ir.Value:
        """The convolution, which is also the input gradient of the transposed convolution."""
        attributes = {"strides": self.stride, "pads": self.padding * 2, "dilations": self.dilation}
        return op.Conv(input, weight, **attributes, group=self.groups)

    def input_gradient(self, grad: ir.Value, weight: ir.Value, input: ir.Value) -> ir.Value:
        """The gradient of the input.

        With stride 1, a convolution with the mirrored kernel, which is faster than ``ConvTranspose`` (8x64x56x56, 3x3:
        51 instead of 66 (114)). Otherwise a ``ConvTranspose`` (stride 2: 26 (73)).
        """
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        pads = [r - p for r, p in zip(reach, self.padding, strict=True)]
        if all(s == 1 for s in self.stride) and min(pads) >= 0:
            return op.Conv(grad, self._mirrored(weight), pads=pads * 2, dilations=self.dilation, group=self.groups)
        uncovered = []  # the number of elements at the end of the input that no window covers
        for i, dim in enumerate(self.spatial):
            inner, outer = shapes.static_size(input, dim), shapes.static_size(grad, dim)
            uncovered.append(inner + 2 * self.padding[i] - ((outer - 1) * self.stride[i] + reach[i] + 1))
        return op.ConvTranspose(
            grad,
            weight,
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            output_padding=uncovered,
            group=self.groups,
        )

    def _mirrored(self, weight: ir.Value) -> ir.Value:
        """[O, C/groups, *kernel] to [C, O/groups, *kernel], with each kernel mirrored in all spatial dimensions."""
        outer, inner = shapes.static_size(weight, 0), shapes.static_size(weight, 1)
        if any(k > 1 for k in self.kernel):
            back = [-1] * self.dims
            weight = op.Slice(weight, back, [-(2**62)] * self.dims, self.spatial, back)
        if self.groups == 1:
            return op.Transpose(weight, perm=[1, 0, *self.spatial])
        grouped = shapes.reshape(weight, [self.groups, outer // self.groups, inner, *self.kernel])
        swapped = op.Transpose(grouped, perm=[0, 2, 1, *(dim + 1 for dim in self.spatial)])
        return shapes.reshape(swapped, [self.groups * inner, outer // self.groups, *self.kernel])

    def weight_gradient(self, grad: ir.Value, input: ir.Value) -> ir.Value:
        """The gradient of the weight, by the fastest of three methods:

        - by windows, for small kernels: the windows of all kernel elements, concatenated, in one batched matrix product
          with ``grad``. 8x64x56x56, 3x3: 61 (110); 1x1 to 256 channels: 17 (42); by channels 113 and 100.
        - by channels, for large kernels: a convolution of the input with ``grad`` as its kernel, batch and channels
          swapped. The 7x7 of a stem: 2.5 (24); 16x16 patches: 0.4 (16); by windows 3.1 and 3.7.
        - depthwise: by channels for each image, then summed. 8x96x28x28, 3x3, stride 2: 1.4 (42); by channels 3.3.
        """
        channels, outer = shapes.static_size(input, 1), shapes.static_size(grad, 1)
        is_depthwise = self.groups > 1 and self.groups == channels
        if is_depthwise and isinstance(images := shapes.size(input, 0), int):  # a factor of Conv's group
            return self._weight_gradient_depthwise(grad, input, images, outer // channels)
        if not is_depthwise and math.prod(self.kernel) <= _MAXIMUM_TAPS:
            return self._weight_gradient_by_windows(grad, input)
        return self._weight_gradient_by_channels(grad, input)

    def _weight_gradient_by_windows(self, grad: ir.Value, input: ir.Value) -> ir.Value:
        images, outer = shapes.size(input, 0), shapes.sizes(grad)[2:]
        channels = shapes.static_size(input, 1) // self.groups
        results = shapes.static_size(grad, 1) // self.groups
        windows = self._windows(input, outer)
        taps, positions = len(windows), shapes.product(outer)
        columns = windows[0] if taps == 1 else op.Concat(*windows, axis=2)
        columns = shapes.reshape(columns, [images, self.groups, taps * channels, positions])
        grad = shapes.reshape(grad, [images, self.groups, results, positions])
        by_image = op.MatMul(grad, op.Transpose(columns, perm=[0, 1, 3, 2]))
        total = op.ReduceSum(by_image, [0], keepdims=0)
        if taps > 1:
            total = shapes.reshape(total, [self.groups * results, taps, channels])
            total = op.Transpose(total, perm=[0, 2, 1])
        return shapes.reshape(total, [self.groups * results, channels, *self.kernel])

    def _windows(self, input: ir.Value, outer: Sequence[Size]) -> list[ir.Value]:
        """For each kernel element, the input elements it is multiplied with, [N, groups, C/groups, *outer]."""
        images, channels = shapes.size(input, 0), shapes.static_size(input, 1)
        inner = [shapes.affine(n, 1, 2 * p) for n, p in zip(shapes.sizes(input)[2:], self.padding, strict=True)]
        if any(self.padding):
            input = op.Pad(input, [0, 0, *self.padding] * 2)
        input = shapes.reshape(input, [images, self.groups, channels // self.groups, *inner])
        if all(k == 1 and s == 1 for k, s in zip(self.kernel, self.stride, strict=True)):
            return [input]
        windows = []
        for tap in itertools.product(*map(range, self.kernel)):
            starts = [t * d for t, d in zip(tap, self.dilation, strict=True)]
            ends = [shapes.affine(n, s, start - s + 1) for n, s, start in zip(outer, self.stride, starts, strict=True)]
            axes = [dim + 1 for dim in self.spatial]
            windows.append(op.Slice(input, starts, shapes.vector(ends), axes, self.stride))
        return windows

    def _weight_gradient_by_channels(self, grad: ir.Value, input: ir.Value) -> ir.Value:
        images, channels = shapes.size(input, 0), shapes.static_size(input, 1) // self.groups
        swap = [1, 0, *self.spatial]
        if self.groups == 1:
            swapped = op.Transpose(input, perm=swap)
        else:
            inner = shapes.sizes(input)[2:]
            grouped = shapes.reshape(input, [images, self.groups, channels, *inner])
            by_channel = op.Transpose(grouped, perm=[2, 1, 0, *(dim + 1 for dim in self.spatial)])
            swapped = shapes.reshape(by_channel, [channels, shapes.product([images, self.groups]), *inner])
        return op.Transpose(self._correlate(swapped, op.Transpose(grad, perm=swap), self.groups), perm=swap)

    def _weight_gradient_depthwise(self, grad: ir.Value, input: ir.Value, images: int, multiplier: int) -> ir.Value:
        planes = images * self.groups
        joined = shapes.reshape(input, [1, planes, *shapes.sizes(input)[2:]])
        kernels = shapes.reshape(grad, [planes * multiplier, 1, *shapes.sizes(grad)[2:]])
        by_image = self._correlate(joined, kernels, planes)
        by_image = shapes.reshape(by_image, [images, self.groups * multiplier, 1, *self.kernel])
        return op.ReduceSum(by_image, [0], keepdims=0)

    def _correlate(self, input: ir.Value, kernels: ir.Value, groups: int) -> ir.Value:
        """A convolution whose kernel is a gradient: stride and dilation swap, and the result is cut to kernel size."""
        attributes = {"strides": self.dilation, "dilations": self.stride, "pads": self.padding * 2}
        result = op.Conv(input, kernels, **attributes, group=groups)
        return op.Slice(result, [0] * self.dims, self.kernel, self.spatial)
