"""Operators whose translation is known to compute something else than eager, and so run in PyTorch.

Each rule looks at one node and returns the reason, or ``None``. A rule is there because a translation or a
kernel was seen to differ; the tests of the operator database show each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..aliases import is_view
from ..reasons import Kind, Reason

aten = torch.ops.aten

Rule = Callable[[fx.Node], "Reason | str | None"]

RANDOM = Reason(Kind.RANDOM, "random numbers come from PyTorch's generator")
_REPEATED_INDICES = Reason(
    Kind.FASTER_IN_PYTORCH,
    "PyTorch adds at repeated indices; of ONNX Runtime's kernels one loses sums and the other is slow",
)
_UNINITIALIZED = Reason(Kind.UNINITIALIZED, "memory without values has no place in ONNX")


def reason_not_to_translate(node: fx.Node) -> Reason | None:
    """Why a node must not go to ONNX although a translation exists, or ``None``."""
    for rule in _RULES:
        reason = rule(node)
        if reason is not None:
            return reason if isinstance(reason, Reason) else Reason(Kind.UPSTREAM_FAULT, reason)
    return None


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors a node takes and returns."""
    for value in [*(arg.meta.get("val") for arg in node.all_input_nodes), node.meta.get("val")]:
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


def _random_or_impure(node: fx.Node) -> Reason | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if draws_random_numbers(node):
        return RANDOM
    if node.target._schema.is_mutable:
        return Reason(Kind.NOT_IN_ONNX, "it changes an argument in place")
    return None


def _complex(node: fx.Node) -> Reason | None:
    if any(tensor.is_complex() for tensor in _tensors(node)):
        return Reason(Kind.NOT_IN_ONNX, "ONNX Runtime has no complex tensors")
    return None


def _not_strided(node: fx.Node) -> Reason | None:
    for tensor in _tensors(node):
        if tensor.layout is not torch.strided:
            return Reason(Kind.NOT_IN_ONNX, f"{tensor.layout} tensors have no place in ONNX")
        if tensor.is_quantized:
            return Reason(Kind.NOT_IN_ONNX, "quantized tensors of PyTorch have no place in ONNX")
    return None


def _symbolic_float(node: fx.Node) -> Reason | None:
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    if any(isinstance(value, (float, torch.SymFloat)) for value in values):
        return Reason(Kind.NOT_IN_ONNX, "a symbolic float has double precision, which its translation loses")
    return None


_INTEGER_DIVISIONS = {
    getattr(packet, overload)
    for packet in (aten.div, aten.floor_divide, aten.remainder, aten.fmod)
    for overload in packet.overloads()
} | {operator.floordiv, operator.mod}


def _integer_division(node: fx.Node) -> str | None:
    """ONNX Runtime ends the process on an integer division by zero; PyTorch raises."""
    if node.target not in _INTEGER_DIVISIONS:
        return None
    divisor, result = node.args[1], node.meta.get("val")
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        return None
    if isinstance(divisor, fx.Node):
        unknown = isinstance(divisor.meta.get("val"), torch.Tensor)
        return "an integer division by zero ends the process in ONNX Runtime" if unknown else None
    if divisor in (0, -1):  # -1: the smallest integer has no negative, and the processor traps
        return f"an integer division by {divisor} can end the process in ONNX Runtime"
    return None


_WRONG_AT_SPECIAL_VALUES = {
    # Torchlib of onnxscript 0.7; the database's tests and tests/test_known_wrong.py show each.
    aten.addmv.default: "ONNX Runtime 1.31 multiplies a vector by a matrix that it forgot to transpose",
    aten.angle.default: "its translation loses NaN",
    aten.celu.default: "its translation overflows at the largest double",
    aten.atan2.default: "its translation is wrong for NaN and for signed zeros",
    aten.heaviside.default: "its translation takes NaN for a positive number",
    aten.logaddexp.default: "its translation is wrong for infinities",
    aten.logaddexp2.default: "its translation is wrong for infinities",
    aten.logcumsumexp.default: "its translation is wrong for infinities and NaN",
    aten.signbit.default: "its translation takes -0 for a positive number",
    aten.special_erfcx.default: "its translation overflows",
    aten.sort.default: "NaN comes in another order",
    aten.topk.default: "equal values and NaN come in another order",
}


SUMS_AT_INDICES = {aten.index_add.default, aten.embedding_dense_backward.default, aten.unfold_backward.default}
"""Operators that add several numbers at one place of a tensor that indices choose, as ``index_put`` may."""

_PUTS = {aten.index_put.default, aten._unsafe_index_put.default, aten.put.default}


def _sums_at_indices(node: fx.Node) -> Reason | None:
    """Sums that ``ScatterND`` would lose (``runtime/kernels.py``).

    ``ScatterElements`` is right. It wants an index for each number, and takes 10 ms where PyTorch takes 0.5 (4,096 rows
    of 512 added into 512 rows; AMD EPYC, 4 threads).
    """
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    if node.target in SUMS_AT_INDICES or (node.target in _PUTS and accumulates):
        return _REPEATED_INDICES
    return None


def _special_values(node: fx.Node) -> str | None:
    if node.target in _ADDED_PRODUCTS and node.kwargs.get("beta", 1) == 0:
        return "its translation multiplies NaN by zero where eager leaves it out"
    if node.target is aten.scatter_reduce.two and node.args[4] == "mean":
        return "its translation does not average"
    return _WRONG_AT_SPECIAL_VALUES.get(node.target)


_ADDED_PRODUCTS = {aten.baddbmm.default, aten.addbmm.default, aten.addr.default}
_POWERS = {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor}
_AVERAGES = {aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default}
_INTERPOLATIONS = {aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default}
_CLIPS = {aten.hardtanh.default, aten.relu6.default}


def _integer_kernels(node: fx.Node) -> str | None:
    """Kernels of ONNX Runtime 1.31 that are wrong for integers."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return None
    if node.target in _POWERS and not result.is_floating_point():
        return "ONNX Runtime computes powers of integers in double precision, and saturates where eager wraps"
    if node.target in _AVERAGES and not result.is_floating_point():
        return "the averages of integers are not truncated to integers as in eager"
    if node.target in _INTERPOLATIONS and not result.is_floating_point():
        return "eager interpolates integers in fixed point"
    if node.target in _CLIPS and result.dtype is torch.int64:
        return "ONNX Runtime's Clip compares 32 bits of an int64"
    return None


def _number_out_of_range(node: fx.Node) -> str | None:
    """Eager wraps a number around that does not fit the integer dtype an operator computes in (-1 in uint8 is
    255)."""
    result = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None
    for tensor in _tensors(node):
        if tensor.is_floating_point() or tensor.dtype is torch.bool:
            continue
        if isinstance(result, torch.Tensor) and result.dtype not in (tensor.dtype, torch.bool):
            continue
        limits = torch.iinfo(tensor.dtype)
        for number in node.args:
            if isinstance(number, int) and not limits.min <= number <= limits.max:
                return f"{number} does not fit into {tensor.dtype}"
    return None


_EXACT_IN_SUMS = (torch.bool, torch.uint8, torch.int8, torch.int16)
"""Integers so small that no sum of them that fits into memory leaves double's 53 bits."""


def _integer_reductions(node: fx.Node) -> str | None:
    """ONNX Runtime 1.31 sums and multiplies int32 and int64 in double precision and saturates, where eager
    wraps."""
    if getattr(node.target, "overloadpacket", None) not in (aten.sum, aten.prod):
        return None
    result, reduced = node.meta.get("val"), node.args[0]
    if not isinstance(result, torch.Tensor) or result.dtype not in (torch.int32, torch.int64):
        return None
    if node.target.overloadpacket is aten.sum and result.dtype is torch.int64:
        while isinstance(reduced, fx.Node):
            if reduced.meta["val"].dtype in _EXACT_IN_SUMS:
                return None
            reduced = reduced.args[0] if reduced.target in _CASTS else None
    return "ONNX Runtime computes it in double precision"


_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _uninitialized(node: fx.Node) -> Reason | None:
    return _UNINITIALIZED if node.target in _EMPTY else None


_RIGHT_ON_EMPTY = {
    getattr(packet, overload)
    for packet in (aten.cat, aten.mm, aten.bmm, aten.addmm, aten.clone, aten.lift_fresh_copy)
    for overload in packet.overloads()
}


def _empty(node: fx.Node) -> str | None:
    """Reductions of an empty tensor.

    The mean of nothing is NaN in PyTorch and 0 in ONNX Runtime, ``any`` of nothing is true there, and the sum
    of the rows of a tensor without rows has the shape of that tensor.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in _RIGHT_ON_EMPTY:
        return None
    if torch.Tag.pointwise in target.tags or is_view(target):
        return None
    if any(_may_be_empty(arg.meta.get("val")) for arg in node.all_input_nodes):
        return "ONNX Runtime computes something else of an empty tensor"
    return None


def _empty_products(node: fx.Node) -> str | None:
    """ONNX Runtime's ``Gemm`` of matrices with nothing between them takes ``beta`` for 1."""
    if node.target is not aten.addmm.default or node.kwargs.get("beta", 1) == 1:
        return None
    inner = node.args[1].meta["val"].shape[1]
    return None if statically_known_true(inner > 0) else "ONNX Runtime's Gemm of empty matrices leaves out beta"


def _may_be_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not all(statically_known_true(size > 0) for size in value.shape)


def _gelu_tanh_in_double(node: fx.Node) -> str | None:
    """ONNX's Gelu is a function whose constants ONNX Runtime 1.31 holds in float32."""
    if node.target is not aten.gelu.default or node.kwargs.get("approximate") != "tanh":
        return None
    is_double = any(tensor.dtype is torch.float64 for tensor in _tensors(node))
    return "its kernel rounds the constants of a float64 result to float32" if is_double else None


_RULES: tuple[Rule, ...] = (
    _gelu_tanh_in_double,
    _uninitialized,
    _random_or_impure,
    _complex,
    _not_strided,
    _symbolic_float,
    _integer_division,
    _sums_at_indices,
    _special_values,
    _integer_kernels,
    _number_out_of_range,
    _integer_reductions,
    _empty,
    _empty_products,
)
