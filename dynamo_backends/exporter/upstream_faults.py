"""Finds the FX nodes that must run in PyTorch although they have a converter.

``reason_not_to_translate`` rejects what ONNX cannot represent: random numbers, mutation, complex tensors. ``faults_of``
looks a node up in ``FAULTS``: ATen operators for which torchlib's converter or ONNX Runtime's kernel differs from
eager. ``runtime/kernel_faults.py`` lists faults of ONNX nodes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.functions import Max

from passes.engine.fx.editing import UNINITIALIZED, is_view

from ..common.upstream_faults import Fault
from ..errors import Kind, Reason
from ..graphs.in_place import is_write_back
from .converters import converter_of
from .decompositions import SUMS_AT_INDICES, overloads_of
from .recurrent_layers import RECURRENT
from .scalar_range import nonfinite_coefficient, number_out_of_range

aten = torch.ops.aten

IN_A_FILE = "in_a_file"
"""Key in the ``meta`` of the nodes of a graph that is exported: none can run in PyTorch."""

RANDOM = Reason(Kind.RANDOM, "random numbers come from PyTorch's generator")

DROPOUT = Reason(
    Kind.RANDOM,
    "dropout is active, which model.eval() turns off",
    "model.eval(), or functional.dropout's training=False",
)


def reason_not_to_translate(node: fx.Node) -> Reason | None:
    """Why ONNX cannot represent a node, or ``None``."""
    result, tensors = node.meta.get("val"), list(_tensors(node))
    if is_uninitialized(node):
        return Reason(Kind.UNINITIALIZED, "ONNX cannot represent uninitialized memory")
    if draws_random_numbers(node):
        return DROPOUT if _is_of_dropout(node) else RANDOM
    if is_write_back(node):
        return Reason(Kind.SHARED_MEMORY, "it copies a new value into an argument")
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return Reason(Kind.NOT_IN_ONNX, "it changes an argument in place")
    for tensor in tensors:
        if tensor.is_complex():
            return Reason(Kind.NOT_IN_ONNX, "ONNX Runtime has no complex tensors")
        if tensor.is_floating_point() and tensor.element_size() == 1:
            return Reason(Kind.NOT_IN_ONNX, "ONNX Runtime cannot bind tensors of float8")
        if tensor.layout is not torch.strided:
            return Reason(Kind.NOT_IN_ONNX, f"ONNX has no {tensor.layout} tensors")
        if tensor.is_quantized:
            return Reason(Kind.NOT_IN_ONNX, "ONNX has no counterpart of PyTorch's quantized tensors")
    if any(isinstance(value, (float, torch.SymFloat)) for value in (result, *_arguments(node))):
        against = _reason_against_floats(node)
        if against is not None:
            return against
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    misfit = number_out_of_range(node.target, args, kwargs, result)
    return Reason(Kind.NO_TRANSLATION, misfit) if misfit else None


_FLOAT_ARITHMETIC = {
    **dict.fromkeys((torch.sym_float, operator.add, operator.sub, operator.mul, math.floor, math.ceil, math.trunc)),
    operator.truediv: 1,
    operator.pow: 0,
    torch._sym_sqrt: 0,
}
"""Functions of symbolic floats that have a converter, with the position of the argument for which Python raises an
error if it is 0 or negative."""


def _reason_against_floats(node: fx.Node) -> Reason | None:
    """Rejects a node with symbolic floats whose translation is not known to compute as Python and PyTorch do.

    A pointwise operator's number is cast to the dtype of the computation, as in PyTorch's kernels.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        parameters = zip(target._schema.arguments, node.args, strict=False)
        cast = {arg for item, arg in parameters if isinstance(item.type, (torch.TensorType, torch.NumberType))}
        floats = {arg for arg in node.all_input_nodes if isinstance(arg.meta["val"], (float, torch.SymFloat))}
        if torch.Tag.pointwise in target.tags and floats <= cast:
            return None
    elif target in _FLOAT_ARITHMETIC:
        position = _FLOAT_ARITHMETIC[target]
        if position is None or _is_above_zero(node.args[position]):
            return None
        return Reason(Kind.NOT_IN_ONNX, f"Python raises an error if {node.args[position]} is 0 or negative")
    return Reason(Kind.UNKNOWN_SHAPE, "its translation would round a symbolic float, which has double precision")


def _is_above_zero(number: object) -> bool:
    value = number.meta["val"] if isinstance(number, fx.Node) else number
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return bool(value.node.shape_env.bound_sympy(value.node.expr).lower > 0)
    return isinstance(value, (int, float)) and value > 0


def faults_of(node: fx.Node) -> Iterator[Fault[fx.Node]]:
    """The faults of the installed versions that apply to a node; of a file, those that it must not have."""
    for fault in _faults_of(node):
        if fault.is_refused_in_a_file or IN_A_FILE not in node.meta:
            yield fault


def tolerated_in_a_file(node: fx.Node) -> Iterator[str]:
    """How a node of a file may differ from eager."""
    for fault in _faults_of(node):
        if not fault.is_refused_in_a_file and fault.kind is Kind.UPSTREAM_FAULT:
            yield fault.text


def _faults_of(node: fx.Node) -> Iterator[Fault[fx.Node]]:
    for fault in FAULTS:
        if (not fault.operators or node.target in fault.operators) and fault.is_installed and fault.applies(node):
            yield fault


def _arguments(node: fx.Node) -> list[object]:
    return [arg.meta.get("val") for arg in node.all_input_nodes]


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors of a node's arguments and results."""
    for value in [*_arguments(node), node.meta.get("val")]:
        items = value if isinstance(value, (tuple, list)) else [value]
        yield from (item for item in items if isinstance(item, torch.Tensor))


_DISABLES_RANDOMNESS = {"dropout": 0.0, "dropout_p": 0.0, "train": False, "training": False}
"""Arguments of random operators, with the value that disables randomness."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node draws from PyTorch's random number generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = dict(zip((parameter.name for parameter in target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    for parameter in target._schema.arguments:
        if parameter.name in _DISABLES_RANDOMNESS:
            value = given.get(parameter.name, parameter.default_value)
            if isinstance(value, (bool, int, float)) and value == _DISABLES_RANDOMNESS[parameter.name]:
                return False
    return True


def _is_of_dropout(node: fx.Node) -> bool:
    """Whether the operator, the operator that was decomposed, or the layer or function that called it is a dropout."""
    callers = (node.meta.get(key) for key in ("original_aten", "source_fn_stack", "torch_fn"))
    return "dropout" in f"{node.target} {list(callers)}".lower()


def is_uninitialized(node: fx.Node) -> bool:
    """Whether a node returns uninitialized memory, as ``aten.empty`` does."""
    return node.target in UNINITIALIZED


_INDEX_PUTS = {aten.index_put.default, aten._unsafe_index_put.default, aten.put.default}


def _sums_at_indices(node: fx.Node) -> bool:
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    return node.target in SUMS_AT_INDICES or bool(accumulates)


_WRONG_VALUES = {
    aten.angle.default,  # loses NaN
    aten.atan2.default,  # NaN, signs of zeros
    aten.erfc.default,  # 1 - erf(x) cancels above 4
    aten.frac.default,  # signs of zeros
    aten.heaviside.default,  # treats NaN as positive
    aten.log10.default,  # divides by float32's log(10), also in float64
    aten.log2.default,  # as log10
    aten.logcumsumexp.default,  # NaN, infinities
    aten.signbit.default,  # treats -0.0 as positive
    aten.special_erfcx.default,  # overflows
    aten.trunc.default,  # signs of zeros
}
"""Operators with a wrong torchlib converter. Models hardly use them, so we have no converter either."""


def _has_nonfinite_coefficient(node: fx.Node) -> bool:
    """Whether torchlib's converter of a node gets a coefficient that is not finite; ours are written for them."""
    return converter_of(node.target) is None and nonfinite_coefficient(node.target, node.args, node.kwargs) is not None


def _is_integer(node: fx.Node) -> bool:
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and not result.is_floating_point()


_CORRECT_FOR_EMPTY = overloads_of(
    aten.cat, aten.mm, aten.bmm, aten.addmm, aten.clone, aten.lift_fresh_copy,
    aten.constant_pad_nd, aten.gather, aten._softmax, aten._log_softmax, aten.sym_size,
)  # fmt: skip

_SUMS = overloads_of(aten.sum)
"""Sums of integers are products with ones, which are right for empty tensors too (``converters/sums.py``)."""


def _may_reduce_empty(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in _CORRECT_FOR_EMPTY:
        return False
    if torch.Tag.pointwise in target.tags or is_view(target):
        return False
    if target in _SUMS and node.meta["val"].dtype in (torch.int32, torch.int64):
        return False
    return any(_may_be_empty(arg.meta.get("val")) for arg in node.all_input_nodes)


def _may_multiply_empty(node: fx.Node) -> bool:
    if node.kwargs.get("beta", 1) == 1:
        return False
    inner = node.args[1].meta["val"].shape[1]
    return not statically_known_true(inner > 0)


def _may_be_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not all(map(_is_positive, value.shape))


def _is_positive(size: int | torch.SymInt) -> bool:
    """Whether a size is known to be larger than 0."""
    if isinstance(size, int) or statically_known_true(size > 0):
        return size > 0
    return _is_above_0(size.node.expr, size.node.shape_env)


def _is_above_0(size: sympy.Expr, environment: ShapeEnv) -> bool:
    """The same of an expression such as ``Max(0, s - Max(0, s - 4))``, the length of ``x[-4:]``."""
    if isinstance(size, Max):
        return any(_is_above_0(item, environment) for item in size.args)
    for term in sympy.Add.make_args(size):
        if isinstance(-term, Max):  # a - Max(b, c) is the smaller one of a - b and a - c
            return all(_is_above_0(size - term - item, environment) for item in (-term).args)
    return bool(environment.bound_sympy(size).lower > 0)


_translation = functools.partial(Fault[fx.Node], library="onnxscript", versions=">=0.7")
"""A fault of torchlib, first observed in onnxscript 0.7."""

FAULTS: tuple[Fault[fx.Node], ...] = (
    Fault(
        "gelu by tanh in double precision",
        {aten.gelu.default},
        "ONNX Runtime's kernel rounds its float64 constants to float32",
        lambda node: node.kwargs.get("approximate") == "tanh" and node.meta["val"].dtype is torch.float64,
    ),
    Fault(
        "the smallest integer divided by -1",
        {operator.floordiv, operator.mod},
        "ONNX Runtime crashes when it divides the smallest integer by -1",
        lambda node: node.args[1] == -1,
    ),
    # ``ScatterND`` loses sums (``runtime/kernel_faults.py``). ``ScatterElements`` is correct but slow, as it needs an
    # index for each element: 10 ms, PyTorch 0.5 ms (4,096 rows of 512 added into 512 rows; AMD EPYC, 4 threads).
    Fault(
        "a sum at repeated indices loses updates",
        {*SUMS_AT_INDICES, *_INDEX_PUTS} - {aten.index_add.default},
        "it adds at indices that may repeat, where ONNX Runtime's kernels lose sums or are slow",
        _sums_at_indices,
        kind=Kind.FASTER_IN_PYTORCH,
    ),
    Fault(
        "a sum at repeated indices loses updates",
        {aten.index_add.default},
        "it adds at indices, for which ONNX Runtime needs an index for each element",
        kind=Kind.FASTER_IN_PYTORCH,
        is_refused_in_a_file=False,
    ),
    _translation(
        "special values of operators that models hardly use",
        _WRONG_VALUES,
        "its translation is wrong for some values: NaN, infinities, negative zeros or large numbers",
    ),
    _translation(
        "coefficients that are infinite or NaN",
        set(),
        "its translation is not known to be right with a number that is infinite or NaN",
        _has_nonfinite_coefficient,
    ),
    _translation(
        "embedding_bag results that its gradient needs",
        {aten._embedding_bag.default},
        "its translation does not compute the results that the gradient needs",
    ),
    _translation(
        "embedding_bag in double precision",
        {aten._embedding_bag_forward_only.default},
        "its translation rounds to float32",
        lambda node: node.meta["val"][0].dtype is torch.float64,
    ),
    _translation(
        "embedding_bag as a loop",
        {aten._embedding_bag_forward_only.default},
        "its translation is a loop over the bags, 30 times slower than eager",
        kind=Kind.FASTER_IN_PYTORCH,
        is_refused_in_a_file=False,
    ),
    _translation(
        "baddbmm with beta=0 and NaN",
        {aten.baddbmm.default, aten.addbmm.default, aten.addr.default},
        "with beta=0 its translation multiplies NaN by zero, and eager ignores the input",
        lambda node: node.kwargs.get("beta", 1) == 0,
    ),
    Fault(
        "sort of equal numbers",
        {aten.sort.default},
        "ONNX Runtime orders equal values (before 1.32 also NaN) differently",
        is_refused_in_a_file=False,
    ),
    Fault(
        "topk of equal numbers",
        {aten.topk.default},
        "ONNX Runtime orders equal values (before 1.32 also NaN) differently",
        is_refused_in_a_file=False,
    ),
    Fault(
        "topk of equal numbers",
        {aten.topk.default},
        "PyTorch does not define the order of its values, as sorted=False",
        lambda node: not node.kwargs.get("sorted", node.args[4] if len(node.args) > 4 else True),
        is_refused_in_a_file=False,
    ),
    Fault(
        "NaN among the elements of unique",
        {aten._unique2.default},
        "ONNX Runtime's Unique is wrong if there are NaN",
        lambda node: node.args[0].meta["val"].is_floating_point(),
        is_refused_in_a_file=False,
    ),
    Fault(
        "closed gates of recurrent layers",
        RECURRENT,
        "ONNX Runtime's sigmoid in it is inexact where a gate is nearly closed: by half at -16",
        is_refused_in_a_file=False,
    ),
    Fault(
        "NaN in a recurrent layer with a bias",
        {aten.gru.input},
        "ONNX Runtime loses NaN in a GRU with a bias",
        lambda node: bool(node.args[3]),
        is_refused_in_a_file=False,
    ),
    Fault(
        "power of integers",
        {aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.fmod.Scalar, aten.fmod.Tensor},
        "ONNX Runtime computes it in double precision and saturates where eager wraps",
        _is_integer,
    ),
    Fault(
        "antialiased interpolation to a smaller size",
        {aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default},
        "ONNX Runtime's Resize has other weights than eager, and gathering the elements takes ten times as long",
        kind=Kind.FASTER_IN_PYTORCH,
        is_refused_in_a_file=False,
    ),
    Fault(
        "clip of large integers",
        {aten.hardtanh.default, aten.relu6.default},
        "ONNX Runtime's Clip compares only 32 bits of an int64",
        _is_integer,
        versions=">=1.24,<1.32",
    ),
    Fault(
        "product of large integers",
        overloads_of(aten.prod),
        "ONNX Runtime multiplies int32 and int64 in double precision and saturates, where eager wraps",
        _is_integer,
    ),
    # For an empty tensor, ONNX Runtime's mean is 0 instead of NaN, its ``any`` is true, and its sum over rows keeps the
    # shape. Applies to all operators, as any may reduce.
    Fault(
        "reductions of empty tensors", set(), "ONNX Runtime's result for an empty tensor may differ", _may_reduce_empty
    ),
    Fault(
        "samples at infinite coordinates",
        overloads_of(aten.grid_sampler_2d),
        "ONNX Runtime samples wrongly at coordinates that are NaN, infinite or huge",
    ),
    Fault(
        "addmm of empty matrices with beta",
        {aten.addmm.default},
        "ONNX Runtime's Gemm ignores beta for empty matrices",
        _may_multiply_empty,
        versions=">=1.24,<1.32",
    ),
)
"""A fault of ONNX Runtime without ``versions`` was observed in 1.31 and 1.32 and is assumed in all later versions."""
