"""Nodes that run in PyTorch although a translation exists: what has no place in ONNX, and known faults upstream.

``reason_not_to_translate`` tells the first, by rules: random numbers, changes in place, complex tensors. ``FAULTS`` is
the table of the second: what torchlib's translations and ONNX Runtime's kernels compute otherwise than eager, as far as
an ATen operator tells. Faults that an ONNX node tells are in ``runtime/kernel_faults.py``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes.engine.fx.editing import UNINITIALIZED, is_view

from ..common.upstream_faults import Fault
from ..errors import Kind, Reason
from .decompositions import SUMS_AT_INDICES, overloads_of

aten = torch.ops.aten

RANDOM = Reason(Kind.RANDOM, "random numbers come from PyTorch's generator")


def reason_not_to_translate(node: fx.Node) -> Reason | None:
    """Why a node has no place in ONNX although a translation exists, or ``None``."""
    result, tensors = node.meta.get("val"), list(_tensors(node))
    if is_uninitialized(node):
        return Reason(Kind.UNINITIALIZED, "memory without values has no place in ONNX")
    if draws_random_numbers(node):
        return RANDOM
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return Reason(Kind.NOT_IN_ONNX, "it changes an argument in place")
    for tensor in tensors:
        if tensor.is_complex():
            return Reason(Kind.NOT_IN_ONNX, "ONNX Runtime has no complex tensors")
        if tensor.is_floating_point() and tensor.element_size() == 1:
            return Reason(Kind.NOT_IN_ONNX, "tensors of float8 do not get into ONNX Runtime, or out")
        if tensor.layout is not torch.strided:
            return Reason(Kind.NOT_IN_ONNX, f"{tensor.layout} tensors have no place in ONNX")
        if tensor.is_quantized:
            return Reason(Kind.NOT_IN_ONNX, "quantized tensors of PyTorch have no place in ONNX")
    if any(isinstance(value, (float, torch.SymFloat)) for value in (result, *_arguments(node))):
        return Reason(Kind.UNKNOWN_SHAPE, "a symbolic float has double precision, which its translation loses")
    return _number_out_of_range(node, tensors) or _written_number_does_not_fit(node)


def faults_of(node: fx.Node) -> Iterator[Fault[fx.Node]]:
    """The known faults that a node meets, of the versions that are installed."""
    for fault in FAULTS:
        if (not fault.operators or node.target in fault.operators) and fault.is_installed and fault.applies(node):
            yield fault


def _arguments(node: fx.Node) -> list[object]:
    return [arg.meta.get("val") for arg in node.all_input_nodes]


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors a node takes and returns."""
    for value in [*_arguments(node), node.meta.get("val")]:
        items = value if isinstance(value, (tuple, list)) else [value]
        yield from (item for item in items if isinstance(item, torch.Tensor))


_NOTHING_DRAWN = {"dropout_p": 0.0, "train": False, "training": False}
"""Arguments of random operators, and their values that say that nothing is drawn."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node takes numbers from PyTorch's generator: it is random, and no argument says that it draws
    nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = (parameter.name for parameter in node.target._schema.arguments)
    given = dict(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    for parameter in node.target._schema.arguments:
        if parameter.name in _NOTHING_DRAWN:
            value = given.get(parameter.name, parameter.default_value)
            if isinstance(value, (bool, int, float)) and value == _NOTHING_DRAWN[parameter.name]:
                return False
    return True


def _number_out_of_range(node: fx.Node, tensors: Iterable[torch.Tensor]) -> Reason | None:
    """Eager wraps a number around that does not fit the integer dtype an operator computes in (-1 in uint8 is
    255)."""
    result = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.dtype is torch.bool:
            continue
        if isinstance(result, torch.Tensor) and result.dtype not in (tensor.dtype, torch.bool):
            continue
        limits = torch.iinfo(tensor.dtype)
        for number in node.args:
            if isinstance(number, int) and not limits.min <= number <= limits.max:
                return Reason(Kind.NO_TRANSLATION, f"{number} does not fit into {tensor.dtype}")
    return None


_FILLED = {
    aten.constant_pad_nd.default: 2,
    aten.fill.Scalar: 1,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.masked_fill.Scalar: 2,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
    aten.scatter.value: 3,
}
"""Which argument of an operator is a number that is written into its result."""


def _written_number_does_not_fit(node: fx.Node) -> Reason | None:
    """Eager raises an error of a number that overflows the dtype it is written in; ONNX makes infinity of it, or
    another integer. And a translation makes 0, in a tensor of booleans ``False``, of a number below float32's.
    """
    place, result = _FILLED.get(node.target), node.meta.get("val")
    if place is None or not isinstance(result, torch.Tensor) or len(node.args) <= place:
        return None
    number = node.args[place]
    if isinstance(number, (int, float)) and _overflows(number, result.dtype):
        return Reason(Kind.NOT_IN_ONNX, f"{number} does not fit into {result.dtype}, of which eager raises an error")
    if result.dtype is torch.bool and isinstance(number, float) and 0 < abs(number) < torch.finfo(torch.float32).tiny:
        return Reason(Kind.NOT_IN_ONNX, f"{number} is not 0, and its translation makes 0 of it")
    return None


def _overflows(number: float, dtype: torch.dtype) -> bool:
    """As ``c10::overflows`` (``c10/util/overflows.h``): integers below zero wrap around in unsigned dtypes."""
    if dtype is torch.bool or dtype.is_complex:
        return False
    if dtype.is_floating_point:
        return math.isfinite(number) and abs(number) > torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    if isinstance(number, int) and limits.min == 0:
        return abs(number) > limits.max
    return not limits.min <= number <= limits.max


def is_uninitialized(node: fx.Node) -> bool:
    """Whether a node returns memory as it is, without values."""
    return node.target in UNINITIALIZED


_INTEGER_DIVISIONS = overloads_of(aten.div, aten.floor_divide, aten.remainder, aten.fmod) | {
    operator.floordiv,
    operator.mod,
}


def _may_divide_by(*numbers: int) -> Callable[[fx.Node], bool]:
    """Whether a node divides integers by one of these numbers, or by a tensor, which may hold them."""

    def applies(node: fx.Node) -> bool:
        divisor, result = node.args[1], node.meta.get("val")
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return False
        if isinstance(divisor, fx.Node):
            return isinstance(divisor.meta.get("val"), torch.Tensor)
        return divisor in numbers

    return applies


_PUTS = {aten.index_put.default, aten._unsafe_index_put.default, aten.put.default}


def _sums_at_indices(node: fx.Node) -> bool:
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    return node.target in SUMS_AT_INDICES or bool(accumulates)


_WRONG_VALUES = {
    aten.angle.default,  # loses NaN
    aten.atan2.default,  # NaN, signs of zeros
    aten.diagonal.default,  # multiplies the other elements by zero, infinities too
    aten.diagonal_copy.default,
    aten.erfc.default,  # 1 - erf(x): no digit is left above 4
    aten.frac.default,  # signs of zeros
    aten.heaviside.default,  # takes NaN for a positive number
    aten.log10.default,  # divides by float32's log(10), also in float64
    aten.log2.default,
    aten.logcumsumexp.default,  # NaN, infinities
    aten.signbit.default,  # takes -0.0 for a positive number
    aten.special_erfcx.default,  # overflows
    aten.trunc.default,  # signs of zeros
}
"""Operators of which torchlib's translations are wrong, and that models hardly use."""


def _is_integer(node: fx.Node) -> bool:
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and not result.is_floating_point()


_EXACT_IN_SUMS = (torch.bool, torch.uint8, torch.int8, torch.int16)
"""Integers so small that no sum of them that fits into memory leaves double's 53 bits."""

_REDUCTIONS = overloads_of(aten.sum, aten.prod)
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def _leaves_double(node: fx.Node) -> bool:
    """Whether a sum or product of integers may need more than the 53 bits of a double, or wrap."""
    result, reduced = node.meta.get("val"), node.args[0]
    if not isinstance(result, torch.Tensor) or result.dtype not in (torch.int32, torch.int64):
        return False
    if getattr(node.target, "overloadpacket", None) is aten.sum and result.dtype is torch.int64:
        while isinstance(reduced, fx.Node):
            if reduced.meta["val"].dtype in _EXACT_IN_SUMS:
                return False
            reduced = reduced.args[0] if reduced.target in _CASTS else None
    return True


_RIGHT_ON_EMPTY = overloads_of(aten.cat, aten.mm, aten.bmm, aten.addmm, aten.clone, aten.lift_fresh_copy)


def _reduces_nothing(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in _RIGHT_ON_EMPTY:
        return False
    if torch.Tag.pointwise in target.tags or is_view(target):
        return False
    return any(_may_be_empty(arg.meta.get("val")) for arg in node.all_input_nodes)


def _multiplies_nothing(node: fx.Node) -> bool:
    if node.kwargs.get("beta", 1) == 1:
        return False
    inner = node.args[1].meta["val"].shape[1]
    return not statically_known_true(inner > 0)


def _may_be_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not all(statically_known_true(size > 0) for size in value.shape)


def _includes_self(node: fx.Node) -> bool:
    return bool(node.kwargs.get("include_self", node.args[5] if len(node.args) > 5 else True))


def _quantizes_to_a_part(node: fx.Node) -> bool:
    """``quantize_per_tensor(input, scale, zero_point, quant_min, quant_max, dtype)`` with other bounds than its dtype;
    the operator is there only where ``torch.ao.quantization`` was imported."""
    target = node.target
    if getattr(target, "namespace", "") != "quantized_decomposed" or "quantize_per_tensor" not in str(target):
        return False
    result = node.meta["val"]
    if str(target).startswith("quantized_decomposed.dequantize") or result.dtype.is_floating_point:
        return False
    limits = torch.iinfo(result.dtype)
    return node.args[3:5] != (limits.min, limits.max)


_translation = functools.partial(Fault[fx.Node], library="onnxscript", versions=">=0.7")
"""A fault of torchlib, seen in onnxscript 0.7."""

FAULTS: tuple[Fault[fx.Node], ...] = (
    Fault(
        "gelu by tanh in double precision",
        {aten.gelu.default},
        "its kernel rounds the constants of a float64 result to float32",
        lambda node: node.kwargs.get("approximate") == "tanh" and node.meta["val"].dtype is torch.float64,
    ),
    Fault(
        "the smallest integer divided by -1",
        _INTEGER_DIVISIONS,
        "an integer division of the smallest integer by -1 ends the process in ONNX Runtime",
        _may_divide_by(-1),
    ),
    Fault(
        "integer division by zero",
        _INTEGER_DIVISIONS,
        "an integer division by zero ends the process in ONNX Runtime",
        _may_divide_by(0),
        versions=">=1.24,<1.25",
    ),
    # ``ScatterElements`` is right. It wants an index for each number, and takes 10 ms where PyTorch takes 0.5 (4,096
    # rows of 512 added into 512 rows; AMD EPYC, 4 threads). ``ScatterND`` is in ``runtime/kernel_faults.py``.
    Fault(
        "a sum at repeated indices loses updates",
        {*SUMS_AT_INDICES, *_PUTS},
        "PyTorch adds at repeated indices; of ONNX Runtime's kernels one loses sums and the other is slow",
        _sums_at_indices,
        kind=Kind.FASTER_IN_PYTORCH,
    ),
    _translation(
        "special values of operators that models hardly use",
        _WRONG_VALUES,
        "its translation is wrong for some values: NaN, infinities, negative zeros or large numbers",
    ),
    _translation(
        "results for the gradient of a sum of embeddings",
        {aten._embedding_bag.default},
        "its translation does not compute what the gradient needs",
    ),
    _translation(
        "product added to NaN without weight",
        {aten.baddbmm.default, aten.addbmm.default, aten.addr.default},
        "its translation multiplies NaN by zero where eager leaves it out",
        lambda node: node.kwargs.get("beta", 1) == 0,
    ),
    _translation(
        "mean of scattered numbers",
        {aten.scatter_reduce.two},
        "its translation does not average, and of extrema starts at the largest number, not at infinity",
        lambda node: node.args[4] == "mean" or (node.args[4] in ("amax", "amin") and not _includes_self(node)),
    ),
    _translation(
        "quantization to a part of a dtype",
        set(),
        "its translation quantizes to all numbers of the dtype, whatever the bounds are",
        _quantizes_to_a_part,
    ),
    Fault("sort of equal numbers", {aten.sort.default}, "equal values come in another order, and NaN before 1.32"),
    Fault("topk of equal numbers", {aten.topk.default}, "equal values and NaN come in another order"),
    Fault(
        "power of integers",
        {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.fmod.Scalar, aten.fmod.Tensor},
        "ONNX Runtime computes it in double precision, and saturates where eager wraps",
        _is_integer,
    ),
    _translation(
        "antialiased interpolation with aligned corners",
        {aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default},
        "its translation takes other weights than eager: of corners, factors and integers",
    ),
    Fault(
        "clip of large integers",
        {aten.hardtanh.default, aten.relu6.default},
        "ONNX Runtime's Clip compares 32 bits of an int64",
        _is_integer,
        versions=">=1.24,<1.32",
    ),
    Fault(
        "sum and product of large integers",
        _REDUCTIONS,
        "ONNX Runtime sums and multiplies int32 and int64 in double precision and saturates, where eager wraps",
        _leaves_double,
    ),
    # The mean of nothing is NaN in PyTorch and 0 in ONNX Runtime, ``any`` of nothing is true there, and the sum of the
    # rows of a tensor without rows has the shape of that tensor. Any operator may reduce.
    Fault("reductions of nothing", set(), "ONNX Runtime computes something else of an empty tensor", _reduces_nothing),
    Fault(
        "product of empty matrices added with a weight",
        {aten.addmm.default},
        "ONNX Runtime's Gemm of empty matrices leaves out beta",
        _multiplies_nothing,
        versions=">=1.24,<1.32",
    ),
)
"""Those of ONNX Runtime's CPU provider were seen in 1.31 and 1.32, and are assumed in all versions not known to be
mended."""
