"""Type promotion: which dtype each argument of an elementwise operator has to be cast to before the
translation.

PyTorch promotes inside its kernels, so an ATen graph holds ``mul(float32, bool)``. ONNX operators take one
type. Converters of ours promote themselves where that differs from this rule.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

_NOT_PROMOTED = {"condition", "mask"}
"""Names of boolean arguments that select rather than compute."""

aten = torch.ops.aten

_REDUCTIONS = {
    aten.sum,
    aten.prod,
    aten.mean,
    aten.cumsum,
    aten.linalg_vector_norm,
}


def promoted_dtypes(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The dtype each tensor argument must be cast to; only arguments whose dtype differs are in the result.

    Rule, for operators tagged ``pointwise`` in ATen:

    1. a result that is not boolean: the arguments are cast to its dtype; to float32 for a float16 result if a number
       beside them does not fit float16, as PyTorch's kernels compute with (the gradient of a mean divides by a count);
    2. a boolean result (comparisons): the arguments are cast to the dtype they promote to together, by
       ``torch.result_type``; nothing is cast where that is the same for all.

    A symbolic integer in the place of a tensor is cast like one; it promotes as a Python integer does.

    And for the reductions that take a ``dtype``, or sum integers up in int64: the argument is cast to the
    dtype of the result first, as in ``at::native::make_reduction``, so that it does not overflow before the
    cast. And for ``cat`` and ``stack``: all they join is cast to the dtype of the result.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return {}
    if target in (aten.cat.default, aten.stack.default):
        joined = node.args[0]
        assert isinstance(joined, (list, tuple))
        return {arg: result.dtype for arg in joined if isinstance(arg, fx.Node) and _dtype(arg) != result.dtype}
    if target.overloadpacket in _REDUCTIONS:
        reduced = node.args[0]
        assert isinstance(reduced, fx.Node)
        return {reduced: result.dtype} if reduced.meta["val"].dtype != result.dtype else {}
    if torch.Tag.pointwise not in target.tags:
        return {}
    computing = [
        arg
        for parameter, arg in zip(target._schema.arguments, node.args, strict=False)
        if parameter.name not in _NOT_PROMOTED and isinstance(arg, fx.Node)
    ]
    tensors = [arg for arg in computing if isinstance(arg.meta["val"], torch.Tensor)]
    numbers = _symbolic_integers(target, node)
    dtype = result.dtype if result.dtype is not torch.bool else _common_dtype(node, tensors, bool(numbers))
    if dtype is torch.float16 and any(map(_is_no_half, (*node.args, *node.kwargs.values()))):
        dtype = torch.float32
    casts = {arg: dtype for arg in tensors if arg.meta["val"].dtype != dtype}
    return casts if dtype is torch.int64 else {**casts, **dict.fromkeys(numbers, dtype)}


def _is_no_half(number: object) -> bool:
    """Whether a number is infinite, or loses digits or all of itself, in float16."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    limits = torch.finfo(torch.float16)
    return math.isfinite(number) and number != 0 and not limits.tiny <= abs(number) <= limits.max


def _dtype(node: fx.Node) -> object:
    return node.meta["val"].dtype


def _symbolic_integers(target: torch._ops.OpOverload, node: fx.Node) -> list[fx.Node]:
    """Arguments that are symbolic integers where the operator takes a tensor; in ONNX they are int64
    scalars."""
    return [
        arg
        for parameter, arg in zip(target._schema.arguments, node.args, strict=False)
        if isinstance(parameter.type, torch.TensorType)
        and isinstance(arg, fx.Node)
        and isinstance(arg.meta["val"], (int, torch.SymInt))
    ]


def _common_dtype(node: fx.Node, tensors: list[fx.Node], with_integers: bool) -> torch.dtype:
    values: list[object] = [arg.meta["val"] for arg in tensors]
    values += [arg for arg in node.args if isinstance(arg, (bool, int, float, complex))]
    values += [1] * with_integers
    if not tensors:
        return torch.bool
    promotion = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return elementwise_dtypes(*values, type_promotion_kind=promotion)[1]
