"""Type promotion: the dtype that each argument of an elementwise operator is cast to before the translation.

PyTorch promotes inside its kernels, so an ATen graph contains ``mul(float32, bool)``. ONNX operators take one dtype.
Our converters promote by themselves where this rule does not fit.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

_NOT_PROMOTED = {"condition", "mask"}  # boolean arguments that select

aten = torch.ops.aten

_REDUCTIONS = {aten.sum, aten.prod, aten.mean, aten.cumsum, aten.linalg_vector_norm}


def promoted_dtypes(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The dtype each argument must be cast to; arguments that already have it are left out.

    Operators tagged ``pointwise`` in ATen:

    1. The result is not boolean: arguments are cast to the result's dtype. With a float16 result and a number that
       float16 cannot hold, they are cast to float32, which PyTorch's kernels compute in (the gradient of a mean divides
       by a count).
    2. The result is boolean (comparisons): arguments are cast to their common dtype, by ``torch.result_type``.

    A symbolic integer in the place of a tensor is cast too; it promotes as a Python integer does.

    Reductions that take a ``dtype`` or sum integers in int64: the argument is cast to the result's dtype first, as in
    ``at::native::make_reduction``, so that it does not overflow. ``cat`` and ``stack``: all parts are cast to the
    result's dtype.
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
    integers = [  # symbolic ones, int64 scalars in ONNX
        arg
        for parameter, arg in parameters
        if isinstance(parameter.type, torch.TensorType) and isinstance(arg.meta["val"], (int, torch.SymInt))
    ]
    dtype = result.dtype if result.dtype is not torch.bool else _common_dtype(node, tensors, bool(integers))
    if dtype is torch.float16 and any(map(_needs_more_than_half, (*node.args, *node.kwargs.values()))):
        dtype = torch.float32
    casts = {arg: dtype for arg in tensors if _dtype(arg) != dtype}
    return casts if dtype is torch.int64 else {**casts, **dict.fromkeys(integers, dtype)}


def _needs_more_than_half(number: object) -> bool:
    """Whether a finite number overflows or is denormal in float16."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    limits = torch.finfo(torch.float16)
    return math.isfinite(number) and number != 0 and not limits.tiny <= abs(number) <= limits.max


def _dtype(node: fx.Node) -> object:
    return node.meta["val"].dtype


def _common_dtype(node: fx.Node, tensors: list[fx.Node], with_integers: bool) -> torch.dtype:
    if not tensors:
        return torch.bool
    values: list[object] = [arg.meta["val"] for arg in tensors]
    values += [arg for arg in node.args if isinstance(arg, (bool, int, float, complex))]
    values += [1] * with_integers
    promotion = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return elementwise_dtypes(*values, type_promotion_kind=promotion)[1]
