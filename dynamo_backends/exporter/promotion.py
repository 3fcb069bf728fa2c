"""Type promotion: the dtype that each argument of an operator is cast to before its converter is called.

PyTorch promotes inside its kernels, so an ATen graph may contain ``mul(float32, bool)``. ONNX operators take arguments
of one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

_NOT_PROMOTED = {"condition", "mask"}  # parameters that stay boolean

aten = torch.ops.aten

_REDUCTIONS = {aten.sum, aten.prod, aten.mean, aten.cumsum, aten.linalg_vector_norm}

_NUMBERS_IN_FLOAT32 = {aten.mul.Tensor, aten.div.Tensor}


def promoted_dtypes(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The arguments that must be cast, with the dtype to cast to.

    1. Pointwise operators (ATen's tag) whose result is not boolean: to the result's dtype. If that is float16 and a
       number is outside its range, to float32, in which PyTorch's kernels compute. So it is if that is float16 or
       bfloat16, and a factor or divisor is a number that it would round: those kernels take the number in float32
       (``mul_kernel``, ``div_true_kernel`` of ``BinaryOpsKernel.cpp``), where others round it first.
    2. Pointwise operators whose result is boolean (comparisons): to the common dtype, as ``torch.result_type`` gives.
    3. Reductions that take a ``dtype`` or sum integers in int64: to the result's dtype, as in
       ``at::native::make_reduction``, so that the sum does not overflow.
    4. ``cat`` and ``stack``: to the result's dtype.

    A symbolic number in place of a tensor or a number is cast too, and promotes like a Python number.
    """
    target = node.target
    result = node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(result, torch.Tensor):
        return {}
    if target in (aten.cat.default, aten.stack.default):
        joined = node.args[0]
        assert isinstance(joined, (list, tuple))
        return {arg: result.dtype for arg in joined if isinstance(arg, fx.Node) and _dtype(arg) != result.dtype}
    if target.overloadpacket in _REDUCTIONS:
        reduced = node.args[0]
        assert isinstance(reduced, fx.Node)
        return {reduced: result.dtype} if _dtype(reduced) != result.dtype else {}
    if torch.Tag.pointwise not in target.tags:
        return {}
    parameters = [
        (parameter, arg)
        for parameter, arg in zip(target._schema.arguments, node.args, strict=False)
        if isinstance(arg, fx.Node) and parameter.name not in _NOT_PROMOTED
    ]
    tensors = [arg for _, arg in parameters if isinstance(arg.meta["val"], torch.Tensor)]
    numbers = {  # scalars in ONNX
        arg: torch.float64 if _is_symbolic_float(arg) else torch.int64
        for parameter, arg in parameters
        if isinstance(parameter.type, (torch.TensorType, torch.NumberType))
        and not isinstance(arg.meta["val"], torch.Tensor)
    }
    dtype = result.dtype if result.dtype is not torch.bool else _common_dtype(node, tensors, numbers.values())
    if target in _NUMBERS_IN_FLOAT32 and _is_rounded(node.args[1], dtype):
        dtype = torch.float32
    if dtype is torch.float16 and any(map(_is_outside_float16, (*node.args, *node.kwargs.values()))):
        dtype = torch.float32
    casts = {arg: dtype for arg in tensors if _dtype(arg) != dtype}
    return casts | {arg: dtype for arg, own in numbers.items() if own != dtype}


def _is_symbolic_float(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (float, torch.SymFloat))


def _is_rounded(number: object, dtype: torch.dtype) -> bool:
    """Whether float16 or bfloat16 may round a number."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if isinstance(number, fx.Node):
        return _is_symbolic_float(number)
    return isinstance(number, float) and math.isfinite(number) and torch.tensor(number, dtype=dtype).item() != number


def _is_outside_float16(number: object) -> bool:
    """Whether a number overflows or is denormal in float16."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    limits = torch.finfo(torch.float16)
    return math.isfinite(number) and number != 0 and not limits.tiny <= abs(number) <= limits.max


def _dtype(node: fx.Node) -> object:
    return node.meta["val"].dtype


def _common_dtype(node: fx.Node, tensors: list[fx.Node], numbers: Iterable[torch.dtype]) -> torch.dtype:
    if not tensors:
        return torch.bool
    values: list[object] = [arg.meta["val"] for arg in tensors]
    values += [arg for arg in node.args if isinstance(arg, (bool, int, float, complex))]
    values += [1.0 if dtype is torch.float64 else 1 for dtype in numbers]
    promotion = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return elementwise_dtypes(*values, type_promotion_kind=promotion)[1]
