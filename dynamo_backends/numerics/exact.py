"""Runs one call of PyTorch, such as a node of an FX graph, in eager or in float64.

In float64, more than the tensors is widened: dtype arguments, tensor constants, and results in the default dtype (a
quotient of integers, a tensor of Python numbers). The default dtype itself is global and is not changed. Integers and
booleans are computed from float64 too. A tiny difference of the inputs can change them completely, so callers that need
eager's use ``keep_discrete``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Environment: TypeAlias = "dict[fx.Node, object]"
Function: TypeAlias = "Callable[..., object]"

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

KERNEL_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
"""What a whole run in PyTorch may raise: an operator's exception is an ``OperatorError``."""


class OperatorError(RuntimeError):
    """An operator does not take its arguments: a dtype, a shape, an index. It may raise anything, a user's own too."""


def called(function: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator.

    Raises:
        OperatorError: whatever the operator raises.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise OperatorError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


BIT_CASTS = {aten.view.dtype}


def _layer_norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *rest: object,
) -> object:
    """With the statistics in the weight's dtype, which the kernel expects for a half input with float32 weights."""
    if weight is not None:
        mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
    return aten.native_layer_norm_backward.default(grad, input, shape, mean, rstd, weight, *rest)


def _batch_norm_functional(input: torch.Tensor, *args: object) -> object:
    """With the new running statistics of a half input in float32."""
    *results, mean, variance = aten._native_batch_norm_legit_functional.default(input, *args)
    if input.dtype in (torch.float16, torch.bfloat16):
        mean, variance = (value.float() for value in (mean, variance))
    return (*results, mean, variance)


def _attention_on_gpu(operator: torch._ops.OpOverload) -> Function:
    """Attention by a kernel that a GPU has for lower precisions only: in float64, its definition."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if query.dtype is not torch.float64:
            return operator(query, key, value, *args, **kwargs)
        given = _by_name(operator, (query, key, value, *args), kwargs)
        _, value, scores = _attention_scores(given)
        logsumexp = scores.logsumexp(-1)
        logsumexp = torch.where(logsumexp == -math.inf, 0.0, logsumexp)
        if operator is aten._scaled_dot_product_efficient_attention.default:
            rows = -query.shape[2] % 32 if given["compute_log_sumexp"] else 0
            logsumexp = torch.nn.functional.pad(logsumexp, (0, rows), value=math.inf)
        elif operator is aten._scaled_dot_product_cudnn_attention.default:
            logsumexp = logsumexp.unsqueeze(-1)
        others = [torch.zeros((), dtype=torch.int64)] * (len(operator._schema.returns) - 2)
        return (aten._safe_softmax.default(scores, -1) @ value, logsumexp, *others)

    return attention


def _attention_on_gpu_backward(operator: torch._ops.OpOverload) -> Function:
    """The gradients of ``_attention_on_gpu``."""

    def backward(grad: torch.Tensor, query: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if query.dtype is not torch.float64:
            return operator(grad, query, *args, **kwargs)
        given = _by_name(operator, (grad, query, *args), kwargs)
        key, value, scores = _attention_scores(given)
        probabilities = aten._safe_softmax.default(scores, -1)
        row_sums = (grad * given["out"]).sum(-1, keepdim=True)
        of_scores = probabilities * (grad @ value.mT - row_sums)
        factor = _attention_factor(given)
        of_keys = [of_scores.mT @ query * factor, probabilities.mT @ grad]
        shared = [item.unflatten(1, (given["key"].shape[1], -1)).sum(2) for item in of_keys]
        return (of_scores @ key * factor, *shared, of_scores)[: len(operator._schema.returns)]

    return backward


def _by_name(operator: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = operator._schema.arguments
    defaults = {item.name: item.default_value for item in schema if item.has_default_value()}
    return {**defaults, **{item.name: value for item, value in zip(schema, args, strict=False)}, **kwargs}


def _attention_factor(given: dict[str, Any]) -> float:
    scale: float | None = given["scale"]
    return given["query"].shape[-1] ** -0.5 if scale is None else scale


def _attention_scores(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values, repeated for the heads that share them, and the masked scores.

    Raises:
        OperatorError: a kernel would draw random numbers, which are not those of a definition.
    """
    if given["dropout_p"]:
        raise OperatorError("attention with dropout has no float64")
    query, mask = given["query"], given.get("attn_bias")
    key, value = (given[name].repeat_interleave(query.shape[1] // given[name].shape[1], 1) for name in ("key", "value"))
    scores = query @ key.mT * _attention_factor(given)
    if given["is_causal"]:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return key, value, scores if mask is None else scores + mask


_GPU_ATTENTION = {
    **{
        operator: _attention_on_gpu(operator)
        for operator in (
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
        )
    },
    **{
        operator: _attention_on_gpu_backward(operator)
        for operator in (
            aten._scaled_dot_product_efficient_attention_backward.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
        )
    },
}

TOLERANT_REPLACEMENTS = {
    **_GPU_ATTENTION,
    aten.view.default: aten.reshape.default,
    aten._native_batch_norm_legit_functional.default: _batch_norm_functional,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
"""Replacements for operators that fail when a real argument differs from its fake tensor, which the graph was traced
with (PyTorch 2.13). Strides: batch normalization of a transposed tensor in training. Dtypes, for a half input: the
statistics of layer normalization with float32 weights, the running statistics of batch normalization. Also attention
on a GPU, which has no kernel for float64."""


class TolerantInterpreter(fx.Interpreter):
    """Runs a graph with ``TOLERANT_REPLACEMENTS``."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(TOLERANT_REPLACEMENTS.get(target, target), args, kwargs)


def is_floating(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a floating-point or complex tensor, and not one of packed numbers."""
    if not isinstance(value, torch.Tensor) or value.dtype is torch.float4_e2m1fn_x2:
        return False
    return value.is_floating_point() or value.is_complex()


def floats(values: object) -> list[torch.Tensor]:
    """The floating-point and complex tensors in nested values."""
    return [leaf for leaf in pytree.tree_leaves(values) if is_floating(leaf)]


def widen(value: object) -> Any:
    """A tensor in float64 or complex128; integers, booleans and anything else unchanged."""
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype])
    return value


def widened(values: object) -> Any:
    """``widen`` for nested values."""
    return pytree.tree_map(widen, values)


def wider_dtype(value: object) -> object:
    """float64 or complex128 for a dtype argument of lower precision; anything else unchanged."""
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _arguments(node: fx.Node, environment: Environment) -> tuple[tuple[object, ...], dict[str, object]]:
    return fx.map_arg((node.args, node.kwargs), environment.__getitem__)


def _function_of(node: fx.Node) -> Function:
    """What a call node calls."""
    if node.op == "call_method":
        return _method(node.args[0], str(node.target))
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return node.graph.owning_module.get_submodule(str(node.target))
    function = TOLERANT_REPLACEMENTS.get(node.target, node.target)
    assert callable(function)
    return function


def _method(value: object, name: str) -> Function:
    """A method of ``torch.Tensor``, or of whatever the node's value is."""
    meta = value.meta if isinstance(value, fx.Node) else {}
    if isinstance(meta.get("val", meta.get("example_value")), torch.Tensor) and hasattr(torch.Tensor, name):
        return getattr(torch.Tensor, name)
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def run_eager(node: fx.Node, environment: Environment) -> object:
    """Runs a call node in PyTorch on the values of ``environment``.

    Raises:
        OperatorError: it does not run on these values.
    """
    return called(_function_of(node), *_arguments(node, environment))


def run_only_exact(node: fx.Node, environment: Environment) -> object:
    """Runs a call node of any stage on the float64 values of ``environment``: float64 decides comparisons too.

    A function composed of several operators is called as a whole, so its intermediate results in the default dtype are
    not widened; ``function_runs.Rerun`` widens these too.

    Raises:
        OperatorError: PyTorch has no float64 kernel.
    """
    function = _function_of(node)
    if not _has_float64(function):
        raise OperatorError(f"no float64 of {function}")
    args, kwargs = pytree.tree_map(wider_dtype, _arguments(node, environment))
    return call_wide(_NARROWING.get(function, function), args, kwargs)


_NARROWING = dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double)
"""Methods that convert to a dtype, with their replacement in float64."""


def call_wide(function: Function, args: Any, kwargs: dict[str, object]) -> Any:
    """Calls a function with float64 arguments, and widens the result.

    A result in the default dtype, which is computed in float32, is computed again in float64.

    Raises:
        OperatorError: it has no float64 kernel.
    """
    result = called(function, args, kwargs)
    if _is_narrow(result) and _may_be_called_again(function):
        function = _ALSO_OF_TENSORS.get(function, function)
        for other_args, other_kwargs in _equivalent_calls(function, args, kwargs):
            try:
                wide = called(function, other_args, other_kwargs)
            except OperatorError:  # it does not accept these arguments
                continue
            if not _is_narrow(wide):
                return wide
    return widened(result)


def is_decision(value: object) -> bool:
    """Whether a result is an integer or boolean, or a tensor of such."""
    return not is_floating(value) if isinstance(value, torch.Tensor) else isinstance(value, int)


def keep_discrete(exact: object, eager: object) -> object:
    """The result in float64, or eager's if that is an integer or boolean, or a tensor of such."""
    return eager if is_decision(eager) else exact


def _has_float64(function: Function) -> bool:
    return function not in BIT_CASTS and not isinstance(function, torch._ops.HigherOrderOperator)


def _is_narrow(value: object) -> bool:
    return any(leaf.dtype in WIDER for leaf in floats(value))


def _may_be_called_again(function: Any) -> bool:
    """Whether a function is PyTorch's; a user's own may have side effects."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace in ("aten", "prims")
    if function in TOLERANT_REPLACEMENTS.values():
        return True
    if isinstance(getattr(function, "__objclass__", None), type):  # a method of tensors
        return issubclass(torch.Tensor, function.__objclass__)
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "_operator")


_ALSO_OF_TENSORS = dict.fromkeys((aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), torch.where)
"""Overloads that accept only Python numbers, with a function that accepts tensors too."""


def _equivalent_calls(
    function: Function, args: Any, kwargs: dict[str, object]
) -> Iterator[tuple[Any, dict[str, object]]]:
    """Calls with the same meaning whose result dtype is float64, not the default dtype."""
    if isinstance(function, torch._ops.OpOverload):
        takes_dtype = any(argument.name == "dtype" for argument in function._schema.arguments)
    else:
        takes_dtype = inspect.isbuiltin(function)  # it has no signature, and raises if it has no such argument
    if takes_dtype:
        yield args, {**kwargs, "dtype": torch.float64}
    for convert in (_float_number, _float_integers, _float_discrete):
        yield pytree.tree_map(convert, (args, kwargs))


def _float_number(value: object) -> object:
    """A Python number as a tensor, which takes part in type promotion."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value, dtype=torch.complex128) if isinstance(value, complex) else value


def _float_integers(value: object) -> object:
    is_boolean = isinstance(value, torch.Tensor) and value.dtype is torch.bool
    return value if is_boolean else _float_discrete(value)


def _float_discrete(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and not is_floating(value) else value
