"""Runs calls of PyTorch's functions, and through these the nodes of an FX graph: as eager does, and in float64.

The float64 run changes more than the inputs: dtype arguments of lower precision, tensor constants, and calls whose
result has the default dtype (a quotient of integers, a tensor made of Python numbers); the default dtype itself is the
whole process's, and stays as it is. Results that are not continuous (booleans, indices, integers), random numbers and
bit-casts are taken from eager's run, or a comparison that flips would read as an error of the values.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Environment: TypeAlias = "dict[fx.Node, object]"

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
"""What an operator raises of arguments in a dtype that it does not take; one that is written in Python asserts."""

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
    """With the statistics in the weight's dtype, as the kernel wants them of a half input with float32 weights."""
    if weight is not None:
        mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
    return aten.native_layer_norm_backward.default(grad, input, shape, mean, rstd, weight, *rest)


def _batch_norm_functional(input: torch.Tensor, *args: object) -> object:
    """With the new running statistics of a half input in float32."""
    *results, mean, variance = aten._native_batch_norm_legit_functional.default(input, *args)
    if input.dtype in (torch.float16, torch.bfloat16):
        mean, variance = (value.float() for value in (mean, variance))
    return (*results, mean, variance)


WHATEVER_THE_FAKE_RESULT = {
    aten.view.default: aten.reshape.default,
    aten._native_batch_norm_legit_functional.default: _batch_norm_functional,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
"""What computes the same values where an argument is not what its fake tensor, which made the graph, foretold (PyTorch
2.13): the strides of batch normalization of a transposed tensor in training; the dtype of layer normalization's
statistics, float32 for a half input with float32 weights and half according to the fake tensor; that of the running
statistics of batch normalization in half, the other way round."""


def widen(value: object) -> object:
    """The same value in float64 or complex128; integers, booleans and anything else as they are."""
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype])
    return value


def widened_copy(value: object) -> object:
    """``widen`` into memory of its own, so that what one run writes into its value the other run does not see."""
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.detach().to(WIDER.get(value.dtype, value.dtype), copy=True)
    return value


def attribute(module: torch.nn.Module, name: str) -> object:
    """What a ``get_attr`` node reads: ``name`` may lead through submodules."""
    return operator.attrgetter(name)(module)


def arguments(node: fx.Node, environment: Environment) -> tuple[tuple[object, ...], dict[str, object]]:
    """A node's arguments with the values of the nodes they name."""
    return fx.map_arg((node.args, node.kwargs), environment.__getitem__)


Function: TypeAlias = "Callable[..., object]"


def _method(value: object, name: str) -> Function:
    """The method of tensors of that name, or of what the value of a node is, if that is none."""
    is_tensor = isinstance(value, fx.Node) and isinstance(
        value.meta.get("val", value.meta.get("example_value")), torch.Tensor
    )
    if is_tensor and hasattr(torch.Tensor, name):
        return getattr(torch.Tensor, name)
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


_NARROWING = {torch.Tensor.float: torch.Tensor.double, torch.Tensor.half: torch.Tensor.double}
_NARROWING[torch.Tensor.bfloat16] = torch.Tensor.double
"""Methods that are a dtype, and what they are in float64."""


def function_of(node: fx.Node) -> Function:
    """What a call node calls."""
    if node.op == "call_method":
        return _method(node.args[0], str(node.target))
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return node.graph.owning_module.get_submodule(str(node.target))
    function = WHATEVER_THE_FAKE_RESULT.get(node.target, node.target)
    assert callable(function)
    return function


def run_eager(node: fx.Node, environment: Environment) -> object:
    """What PyTorch computes for a call node on the values of ``environment``."""
    args, kwargs = arguments(node, environment)
    return function_of(node)(*args, **kwargs)


def run_exact(node: fx.Node, environment: Environment, eager: object, inexact: dict[str, str] | None = None) -> object:
    """What PyTorch computes for a call node in float64.

    Args:
        node: a call node of any stage.
        environment: the float64 values of what it reads.
        eager: its result in the model's dtype, kept where float64 would not be the same function.
        inexact: gets the node's name and the reason, where PyTorch has no float64 of it and eager's result is returned.
    """
    if not _has_float(eager) or not _has_float64(function_of(node)):
        return pytree.tree_map(widened_copy, eager)
    try:
        result = run_only_exact(node, environment)
    except REFUSALS as error:  # a kernel for the low precision only
        if inexact is not None:
            inexact[node.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return pytree.tree_map(widened_copy, eager)
    return pytree.tree_map(_keep_discrete, result, eager)


def run_only_exact(node: fx.Node, environment: Environment) -> object:
    """What PyTorch computes for a call node in float64, with no eager run beside it: float64 decides comparisons too.

    A function made of several operators is called as a whole, so that what it makes in the default dtype is not widened
    inside; see ``CallAgain`` for one of which that matters.

    Args:
        node: a call node of any stage.
        environment: the float64 values of what it reads.

    Raises:
        REFUSALS: PyTorch has no float64 of it.
    """
    function = function_of(node)
    if not _has_float64(function):
        raise NotImplementedError(f"no float64 of {function}")
    function = _NARROWING.get(function, function)
    args, kwargs = pytree.tree_map(wider_dtype, arguments(node, environment))
    result = function(*args, **kwargs)
    if _is_narrow(result) and _is_of_pytorch(function):
        result = of_default_dtype(function, args, kwargs, result)
    return pytree.tree_map(widen, result)


def _has_float64(function: Function) -> bool:
    return function not in BIT_CASTS and not isinstance(function, torch._ops.HigherOrderOperator)


def _is_narrow(value: object) -> bool:
    """Whether a tensor has less than float64's precision."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in WIDER for leaf in pytree.tree_leaves(value))


def _is_of_pytorch(function: Any) -> bool:
    """Whether a function may be called twice; one of a user's own may do more than compute."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace in ("aten", "prims")
    if function in WHATEVER_THE_FAKE_RESULT.values():
        return True
    if isinstance(getattr(function, "__objclass__", None), type):  # a method of tensors
        return issubclass(torch.Tensor, function.__objclass__)
    return (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "_operator")


_ALSO_OF_TENSORS = dict.fromkeys((aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), torch.where)
"""Overloads that take a number only as a number, and what takes it as a tensor too."""


def of_default_dtype(function: Callable[..., object], args: Any, kwargs: dict[str, object], narrow: object) -> object:
    """The result in float64 of a function that on arguments without float tensors returned the default dtype.

    ``narrow`` is what it returned; that is returned again if no other way of calling it gives float64.
    """
    function = _ALSO_OF_TENSORS.get(function, function)
    for other_args, other_kwargs in _other_calls(function, args, kwargs):
        try:
            result = function(*other_args, **other_kwargs)
        except REFUSALS:  # it does not take its arguments that way
            continue
        if not _is_narrow(result):
            return result
    return narrow


def _other_calls(
    function: Callable[..., object], args: Any, kwargs: dict[str, object]
) -> Iterator[tuple[Any, dict[str, object]]]:
    """Calls of the same meaning that let a function know what the default dtype would: float64."""
    if _takes_dtype(function):
        yield args, {**kwargs, "dtype": torch.float64}
    for wider in (_float_number, _float_integers, _float_discrete):
        yield pytree.tree_map(wider, (args, kwargs))


def _takes_dtype(function: Callable[..., object]) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return any(argument.name == "dtype" for argument in function._schema.arguments)
    return inspect.isbuiltin(function)  # it has no signature to read, and says at the call what it does not take


def _float_number(value: object) -> object:
    """A Python number as a tensor of its own dtype, which takes part in type promotion."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value, dtype=torch.complex128) if isinstance(value, complex) else value


def _float_integers(value: object) -> object:
    is_integer = isinstance(value, torch.Tensor) and value.dtype is not torch.bool
    return _float_discrete(value) if is_integer else value


def _float_discrete(value: object) -> object:
    """A tensor of integers or booleans in float64."""
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value.to(torch.float64)
    return value


def wider_dtype(value: object) -> object:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _has_float(value: object) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        for leaf in pytree.tree_leaves(value)
    )


def _keep_discrete(exact: object, eager: object) -> object:
    is_discrete = isinstance(eager, torch.Tensor) and not (eager.is_floating_point() or eager.is_complex())
    return eager if is_discrete else exact
