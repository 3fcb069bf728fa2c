"""Facts about ATen operators that tolerances depend on: which add up many terms, only move elements, or round inside.

Most functions take a node and the values that it reads; those that take a ``function`` are for calls without a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree

from .exact import Environment, called, is_floating, run_eager

SUMS = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot", "convolution",
        "convolution_backward", "sum", "mean", "cumsum", "index_add", "scatter_add", "scatter_reduce",
        "index_put", "_unsafe_index_put", "embedding_dense_backward", "_embedding_bag",
        "avg_pool1d", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_adaptive_avg_pool2d_backward",
        "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_linear1d", "upsample_trilinear3d",
        "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_bilinear2d_backward",
        "native_layer_norm", "native_group_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
        "native_layer_norm_backward", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip
"""Operators that add up elements of their arguments, or products of them."""

_NORMS = frozenset(
    {"native_layer_norm", "native_group_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
)
"""Operators that subtract means of their argument, and return these."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""By operator, the argument whose last dimension is summed over."""

_LIMITS = frozenset({"relu", "hardtanh", "clamp", "clamp_min", "leaky_relu"})
"""Operators that return their argument, or a limit of it."""

_AFFINE = _LIMITS | {"mul", "div", "_native_batch_norm_legit_no_training"}
"""Operators beside which the sum of the magnitudes of a segment's terms is still known."""

_MOVES = frozenset(
    {
        "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "clone", "alias",
        "detach", "expand", "slice", "select", "cat", "split", "split_with_sizes", "unbind", "constant_pad_nd",
        "flip", "index", "index_select", "gather", "embedding", "lift_fresh_copy", "repeat", "stack",
    }
)  # fmt: skip
"""Operators that return elements of their arguments, and compute none."""

_ADDS = frozenset({"add", "sub", "rsub", "neg", "_to_copy", "convert_element_type"})
"""Operators that round, and keep the magnitudes of terms."""

_OF_ARGUMENT = frozenset({"silu", "gelu", "mish", "hardswish"})
_OF_ONE = frozenset(
    {
        "sigmoid",
        "tanh",
        "erf",
        "elu",
        "celu",
        "selu",
        "hardsigmoid",
        "log_sigmoid_forward",
        "_softmax",
        "_log_softmax",
        "logsumexp",
    }
)
"""Functions that kernels compute from numbers as large as the argument, or near one. ``log1p`` and ``expm1`` are
accurate at small arguments."""

_EXACT = frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "max", "min", "amax", "amin", "where",
        "masked_fill", "floor", "ceil", "round", "trunc", "sign", "sgn", "abs", "neg", "relu", "clamp", "clamp_min",
        "clamp_max", "minimum", "maximum", "threshold", "any", "all", "isnan", "isinf", "logical_and", "logical_or",
        "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "searchsorted",
        "bucketize", "nonzero",
    }
)  # fmt: skip
"""Operators that compare, select or round to whole numbers: on the same numbers, no rounding changes their result."""

_ROUNDED_ONCE = frozenset({"add", "sub", "rsub", "mul", "div", "sqrt", "reciprocal"})

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)

POOLS = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}

_WRITES = frozenset({"index_put", "_unsafe_index_put", "index_copy", "put", "scatter"})
"""Operators that may write several values to one place; PyTorch does not say which of them stays."""


_KNOWN = ("aten", "prims", "dynamo_backends")
"""The namespaces of operators that the names in this file mean."""


def base_name(node: fx.Node) -> str:
    """The name of a node's operator, of PyTorch or ours, without its overload; ``""`` for anything else."""
    return name_of(node.target)


def name_of(function: object) -> str:
    """The same of a function, or of Python's comparison. Of a user's operator nothing is known, whatever its name."""
    if function in _COMPARISONS:
        return function.__name__
    is_known = isinstance(function, torch._ops.OpOverload) and function.namespace in _KNOWN
    return function.overloadpacket.__name__ if is_known else ""  # type: ignore[attr-defined]


def is_product(function: object) -> bool:
    """Whether a function returns a product of matrices, or a convolution: its time is a multiple of reading them."""
    schema = getattr(function, "_schema", None)
    if schema is not None and schema.is_mutable:  # it returns what it was given
        return False
    return name_of(function) in _PRODUCTS or name_of(function) == "convolution"


def moves(node: fx.Node) -> bool:
    """Whether a node returns elements of its arguments, and rounds nothing."""
    return base_name(node) in _MOVES or node.target is operator.getitem


def is_exact(node: fx.Node) -> bool:
    """Whether a node computes nothing that may be rounded otherwise."""
    return base_name(node) in _EXACT or moves(node)


def is_rounded_once(node: fx.Node) -> bool:
    """Whether each element of a node's result is the rounding of the exact one."""
    return base_name(node) in _ROUNDED_ONCE and len(node.args) <= 2 and not node.kwargs


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a node's result depends on one element of each argument."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def keeps_magnitudes(node: fx.Node) -> bool:
    """Whether ``magnitudes`` is known for a node."""
    name = base_name(node)
    return name in SUMS or name in _AFFINE or name in _ADDS or moves(node)


def only_adds(node: fx.Node) -> bool:
    """Whether ``magnitudes`` bounds all that a node may round; not for normalizations and attention."""
    name = base_name(node)
    return keeps_magnitudes(node) and "norm" not in name and "attention" not in name


def adds_up(function: object) -> bool:
    """Whether a function returns sums of products of its arguments: on magnitudes, the sums of the magnitudes."""
    return adds_up_named(name_of(function))


def adds_up_named(name: str) -> bool:
    is_sum = name in SUMS and name != "native_layer_norm_backward" and "attention" not in name
    return is_sum or name in _MOVES or name in ("add", "_to_copy")


def magnitudes(node: fx.Node, sizes: Environment, values: Environment) -> Any:
    """The result of a node on magnitudes: each element is the sum of the magnitudes of its terms.

    ``sizes`` are the magnitudes of what the node reads, ``values`` the values themselves.
    """
    name = base_name(node)
    if node.target is operator.getitem:
        return sizes[node.args[0]][node.args[1]]  # type: ignore[index]
    if name.startswith("_scaled_dot_product"):  # it adds up the values with weights between 0 and 1
        weighted = fx.map_arg(node.args, lambda arg: (sizes if arg is node.args[2] else values)[arg])
        return called(node.target, weighted, fx.map_arg(node.kwargs, values.__getitem__))
    if name == "native_layer_norm_backward":  # the gradients of weight and bias are sums over rows
        grad, input, shape, mean, rstd = fx.map_arg(
            node.args[:5], lambda arg: (sizes if arg is node.args[0] else values)[arg]
        )
        rows = tuple(range(grad.dim() - len(shape)))
        weighted = grad * ((input.float() - mean) * rstd).abs()
        first: Any = values[node] if node in values else run_eager(node, values)
        return (None if first[0] is None else first[0].float().abs(), weighted.sum(rows), grad.sum(rows))
    if name in _NORMS:
        return _norm_magnitudes(node, sizes, values)
    if name in _LIMITS:
        return sizes[node.args[0]]
    if name == "_native_batch_norm_legit_no_training":
        input, weight, bias, mean, *rest = fx.map_arg(node.args, sizes.__getitem__)
        return called(node.target, (input, weight, bias, -mean, *rest), {})
    if name in ("sub", "rsub", "neg"):
        read = [sizes[arg] for arg in node.all_input_nodes]
        return sum(read[1:], read[0]).expand(_shape(values[node]))  # type: ignore[call-overload]
    return run_eager(node, sizes)


def _norm_magnitudes(node: fx.Node, sizes: Environment, values: Environment) -> tuple[Any, ...]:
    """Of a normalization: ``(|x| + mean |x|) / deviation * |weight| + |bias|``, and the mean of the magnitudes."""
    name = base_name(node)
    results: Any = values[node] if node in values else run_eager(node, values)
    mean, inverse, *rest = results[1:]
    size, *given = fx.map_arg(node.args, sizes.__getitem__)
    weight, bias = given[1:3] if name == "native_layer_norm" else given[:2]
    if name == "native_layer_norm":
        grouped, dims = size, list(range(-len(given[0]), 0))
    elif name == "native_group_norm":
        grouped, dims = size.reshape(*mean.shape, -1), [-1]
    else:
        grouped, dims = size, [dim for dim in range(size.dim()) if dim != 1]
    columns = [1, -1] + [1] * (size.dim() - 2)
    scales = [item if item is None or name == "native_layer_norm" else item.reshape(columns) for item in (weight, bias)]
    means = grouped.mean(dims, keepdim=True)
    inner = scaled(grouped, means, inverse.to(grouped.dtype).abs().reshape(means.shape), size.shape, *scales)
    others = [magnitude(item) for item in (inverse, *rest)]
    return (inner, means.reshape(mean.shape), *others)


def scaled(
    sizes: torch.Tensor,
    means: torch.Tensor,
    inverse: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``(|x| + mean |x|) / deviation * |weight| + |bias|``, of magnitudes and the inverse of the deviation."""
    inner = ((sizes + means) * inverse).reshape(shape)
    inner = inner if weight is None else inner * weight
    return inner if bias is None else inner + bias


def magnitude(value: Any) -> Any:
    """The magnitudes of a floating-point tensor, in float32 at least; anything else unchanged."""
    if not is_floating(value):
        return value
    return (value if value.dtype in (torch.float64, torch.complex128) else _single(value)).abs()


def _single(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex64) if value.is_complex() else value.float()


def terms(node: fx.Node, values: Environment) -> int:
    """How many terms a node adds up for an element of its result; 1 if it adds none up."""
    return terms_of(node.target, fx.map_arg(node.args, values.get), values.get(node))


def terms_of(function: object, args: Sequence[Any], result: object) -> int:
    """The same of a call of a function."""
    name = name_of(function)
    if not isinstance(function, torch._ops.OpOverload) or name in _MOVES or torch.Tag.pointwise in function.tags:
        return 1

    def shape(position: int) -> tuple[int, ...]:
        return _shape(args[position]) if position < len(args) else ()

    if name in _PRODUCTS:
        return int((shape(_PRODUCTS[name]) or (1,))[-1])
    if name in ("convolution", "convolution_backward"):
        input, weight = (0, 1) if name == "convolution" else (1, 2)
        pixels = math.prod(shape(input)) // max(shape(input)[1], 1)
        of_result = terms_of_weight(shape(weight))
        return of_result if name == "convolution" else max(of_result, pixels)
    read = [tuple(leaf.shape) for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if name in _NORMS:  # as many as one of its means is of
        means = result[1].numel() if isinstance(result, (tuple, list)) else 1
        return max(1, math.prod(shape(0)) // max(1, means))
    if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
        return int(shape(1)[-2])
    largest = max(map(math.prod, read), default=1)
    reduced = max(1, largest // max(1, math.prod(_shape(result))))
    if name not in SUMS:  # it may add up a row, as a softmax, or several, as a normalization
        return max(reduced, max((max(item[-2:], default=1) for item in read), default=1))
    return reduced if name in ("sum", "mean") or "pool" in name else largest


def terms_of_weight(shape: Sequence[int]) -> int:
    """The terms of a convolution with a weight of this shape, or of its transposed form."""
    return math.prod(shape) // max(min(shape[:2]), 1)


def _shape(value: object) -> tuple[int, ...]:
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def size_inside(function: object, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """For each element of a function's result, the largest number inside its computation; ``None`` if its kernels are
    accurate relative to their result. The derivative of such a function multiplies the gradient, read first.

    An interpolation computes its weights from coordinates, which are as large as the image, and evenly spaced numbers
    are computed from the ends of their range."""
    name, read = name_of(function), [item for item in pytree.tree_leaves((args, kwargs)) if is_floating(item)]
    if name in ("linspace", "logspace"):
        largest = max(1.0, *(abs(float(item)) for item in args[:2]))
        return torch.full((int(args[2]),), largest, dtype=torch.float64, device=kwargs.get("device"))
    if not read:
        return None
    if ("upsample_" in name or name == "interpolate") and not name.endswith("_backward"):
        # a cubic function reads two elements on each side; what is infinite is so in the result
        near = POOLS[read[0].dim()](read[0].abs().nan_to_num(0.0, 0.0, 0.0), 5, 1, 2)
        size = function(near, *args[1:], **kwargs)  # type: ignore[operator]
        return size.abs().double() * max(*size.shape[2:], *read[0].shape[2:])
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return _before_cancelling(name, *args[:3])
    if (size := size_inside_named(name, read[0])) is not None:
        return size
    is_derivative = name.removesuffix("_backward") in _OF_ARGUMENT | _OF_ONE and len(read) > 1
    return read[0].double().abs() * read[1].double().abs().clamp(min=1.0) if is_derivative else None


def size_inside_named(name: str, argument: torch.Tensor) -> torch.Tensor | None:
    """``size_inside`` of an activation of this name."""
    if name in _OF_ARGUMENT:
        return argument.double().abs()
    return torch.ones(argument.shape, dtype=torch.float64, device=argument.device) if name in _OF_ONE else None


def _before_cancelling(name: str, grad: torch.Tensor, output: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers whose difference is the gradient of a softmax or of its logarithm."""
    size, output = grad.double().abs(), output.double()
    if name == "_softmax_backward_data":
        return (size + (size * output).sum(dim, keepdim=True)) * output.abs()
    return size + output.exp() * size.sum(dim, keepdim=True)


def subtracts_a_mean(function: object) -> bool:
    """Whether a function subtracts one rounded sum from many elements: the error of all is of one sign, and what adds
    them up later may be nothing else."""
    name = name_of(function)
    return "_norm" in name or name in ("_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data")


def size_of_scaled_gradient(function: object, args: Sequence[Any]) -> float:
    """The mean size of what the derivative of a normalization subtracts means from, of which little may be left; 0 for
    other functions."""
    at = {"native_layer_norm_backward": (4, 5), "native_group_norm_backward": (3, 4)}.get(name_of(function))
    factors = [args[0], *(args[i] for i in at)] if at is not None else []
    sizes = [float(item.abs().double().mean()) for item in factors if isinstance(item, torch.Tensor)]
    return math.prod(size for size in sizes if math.isfinite(size)) if sizes else 0.0


def may_overwrite(node: fx.Node) -> bool:
    """Whether a node may write several values to one place, one of which stays."""
    accumulates = node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False) is True
    return base_name(node) in _WRITES and not accumulates


def with_reversed_writes(node: fx.Node, values: Environment) -> object:
    """The result of a node that may overwrite, with its writes in reverse order."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    name, call = base_name(node), node.target
    assert callable(call)
    if name in ("index_put", "_unsafe_index_put"):
        target, indices, source = args[:3]
        if any(index is not None and index.dtype is torch.bool for index in indices):
            return call(*args, **kwargs)
        places = [i for i, index in enumerate(indices) if index is not None]
        found = torch.broadcast_tensors(*(indices[i] for i in places))
        are_adjacent = places == list(range(places[0], places[-1] + 1))
        first = places[0] if are_adjacent else 0  # of their dimensions in the result
        source = source.expand(torch.ops.aten.index(target, indices).shape)
        reversed_indices = dict(zip(places, (index.flip(tuple(range(index.dim()))) for index in found), strict=True))
        order = tuple(range(first, first + found[0].dim()))
        return call(target, [reversed_indices.get(i) for i in range(len(indices))], source.flip(order))
    if name == "put":
        target, index, source = args[:3]
        return call(target, index.flatten().flip(0), source.flatten().flip(0))
    target, dim, index, source = args[:4]
    if name == "index_copy":
        return call(target, dim, index.flip(0), source.flip(dim))
    if isinstance(source, torch.Tensor):
        source = source[tuple(slice(size) for size in index.shape)].flip(dim)
    return call(target, dim, index.flip(dim), source)


def filled(value: Any, number: float) -> Any:
    """Uninitialized memory, filled with a number; if that is NaN, integers with zero."""
    if isinstance(value, (tuple, list)):
        return type(value)(filled(item, number) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.fill_(number if is_floating(value) or number == number else 0)
