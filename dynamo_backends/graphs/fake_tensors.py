"""What PyTorch's kernels return where its fake tensors (2.13) say something else: strides, and dtypes of statistics.

A compiled graph presents its results with the strides of its fake tensors. Those come from PyTorch's meta kernels,
which for some operators do not agree with the real kernels, above all where the order of dimensions in memory is
ambiguous (a size is 1): ``x.permute(0, 3, 1, 2).roll(1, 2)`` is row-major as a fake tensor, and channels last in eager.
A later view of such a result raises, or shares memory that it does not share in eager.

So the real kernel is asked: it runs once for each set of sizes and strides, on memory without values, and what it
returns is what the fake tensor gets. ``tests/strides_sweep.py`` runs the whole operator database in many layouts, and
lists in ``agreeing_operators.json`` the operators whose meta kernel and decomposition were right: of row-major
arguments, and of arguments without a size of 1. Those are not asked there. Expanded arguments are always ambiguous.

Normalizations save statistics for the gradients. Of a half input with float32 weights, as autocasting leaves them, the
kernels' statistics are float32, the fake tensors' are half. So a compiler is given the normalization of a float32 input
between casts, which computes the same; and graphs that PyTorch may run are told the dtype of their statistics.

Example:

    with fake_tensors_as_kernels(mode):  # a FakeTensorMode
        graph = make_fx(function, decomposition_table=decompositions_as_kernels(table))(*fake_arguments)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..common.strides import strides_in_order
from ..events import count
from .layout import hint_of, order_of

logger = logging.getLogger(__name__)

aten = torch.ops.aten

Strides = tuple[int, ...]
Table = Mapping[Any, Callable[..., Any]]

_MOST_ANSWERS = 20_000

_MOST_BYTES = 2**31
"""Of arguments on which a kernel is tried; most of their memory is never touched."""

_answers: dict[object, tuple[Strides | None, ...] | None] = {}
"""The strides of an operator's results, by the operator and the sizes, strides and dtypes of its arguments."""


@functools.cache
def _agreeing() -> dict[str, frozenset[str]]:
    """Names of overloads whose fake tensors have the kernels' strides: of ``row_major`` arguments, and of arguments
    ``without_ones``, without a dimension of size one. Of others, which are ambiguous, the kernel is always asked."""
    text = (importlib.resources.files(__package__) / "agreeing_operators.json").read_text(encoding="utf-8")
    return {kind: frozenset(names) for kind, names in json.loads(text).items()}


@functools.cache
def may_differ(target: object) -> bool:
    """Whether an operator's results may have other strides than its fake tensors, for some layout of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def _is_asked(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the kernel is to be asked for the strides of an operator's results."""
    if not may_differ(target):
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(type(leaf) is FakeTensor and leaf.layout is torch.strided for leaf in tensors):
        return False
    if not all(leaf.device.type == "cpu" for leaf in tensors):
        return False
    if target is aten.view.default and list(args[0].shape) == list(args[1]):
        return False  # AOTAutograd makes tangents so, which shall have all strides of the results
    name = target.name()  # type: ignore[attr-defined]
    if name in _agreeing()["without_ones"] and not any(map(_is_ambiguous, tensors)):
        return False
    return not (name in _agreeing()["row_major"] and all(map(_is_row_major, tensors)))


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Whether the order of dimensions in memory cannot be told: a size is one, or elements share memory."""
    return any(hint_of(size) == 1 for size in tensor.shape) or any(hint_of(stride) == 0 for stride in tensor.stride())


def _is_row_major(tensor: torch.Tensor) -> bool:
    """Whether strides are exactly those of new row-major memory, in dimensions of size one too."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if hint_of(stride) != expected:
            return False
        size = hint_of(size)
        if size is None:
            return False
        expected *= max(size, 1)
    return True


def strides_of_kernel(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Strides | None, ...] | None:
    """The strides of what a kernel returns; of symbolic sizes those of their hints.

    Args:
        target: an operator that changes no argument.
        args, kwargs: fake tensors and numbers.

    Returns:
        One for each leaf of the results, ``None`` for what is no strided tensor. ``None`` altogether if the kernel
        cannot run on memory without values, or there is no room for it.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    described = tuple(map(_described, leaves))
    key = (target, structure, described)
    if key not in _answers:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = None if any(item is _UNKNOWN for item in described) else _asked(target, leaves, structure)
        if _answers[key] is not None:
            count("strides_asked")
        else:
            count("strides_not_known")
    return _answers[key]


_UNKNOWN = object()
"""Stands for an argument whose sizes only the data will tell."""


def _described(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        numbers = tuple(map(hint_of, (*leaf.shape, *leaf.stride())))
        return _UNKNOWN if None in numbers else (numbers, leaf.dtype)
    known = hint_of(leaf)
    return _UNKNOWN if known is None and leaf is not None else (type(known), str(known))


def _asked(
    target: torch._ops.OpOverload, leaves: Sequence[object], structure: pytree.TreeSpec
) -> tuple[Strides | None, ...] | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    size = sum(_extent(tensor) * tensor.itemsize for tensor in tensors)
    if size > _MOST_BYTES:
        logger.info("%s has the strides of its fake tensors: %d MB are too much to try it on", target, size >> 20)
        return None
    random = torch.Tag.nondeterministic_seeded in target.tags
    with contextlib.ExitStack() as stack:
        for context in (_disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast()):
            stack.enter_context(context)
        stack.enter_context(torch.random.fork_rng(devices=(), enabled=random))
        for fill in (_zeros, _numbers):  # a kernel may refuse zeros: a matrix without an inverse
            real = [fill(leaf) if isinstance(leaf, torch.Tensor) else hint_of(leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(real, structure)
            try:
                results = target(*args, **kwargs)
            except Exception as error:  # whatever a kernel says of such values: the fake tensor is all there is
                logger.debug("%s cannot be tried: %s", target, error)
                continue
            return tuple(map(_strides, pytree.tree_leaves(results)))
    return None


def _extent(tensor: torch.Tensor) -> int:
    """How many elements the memory of a tensor has, from its first to its last."""
    sizes, strides = list(map(hint_of, tensor.shape)), list(map(hint_of, tensor.stride()))
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that the system has not given yet: it costs nothing to make."""
    memory = torch.zeros(_extent(tensor), dtype=tensor.dtype)
    return memory.as_strided(list(map(hint_of, tensor.shape)), list(map(hint_of, tensor.stride())))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    result = _zeros(tensor)
    if result.is_floating_point() and result.numel():
        memory = result.as_strided((_extent(tensor),), (1,))
        memory.copy_(torch.linspace(0.5, 1.5, len(memory)).cos())
    return result


def _strides(value: object) -> Strides | None:
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


@contextlib.contextmanager
def fake_tensors_as_kernels(mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, the results of a mode's operators have the strides of the real kernels.

    Args:
        mode: the mode; with ``None``, nothing changes.
    """
    if mode is None or "dispatch" in vars(mode):  # the second: one inside another
        yield
        return
    dispatch = mode.dispatch

    def dispatch_as_kernels(
        func: torch._ops.OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        result = dispatch(func, types, args, kwargs or {})
        if not _is_asked(func, args, kwargs or {}):
            return result
        strides = strides_of_kernel(func, args, kwargs or {})
        if strides is None:
            return result
        leaves, structure = pytree.tree_flatten(result)
        if len(leaves) != len(strides):
            return result
        is_view = any(item.alias_info is not None for item in func._schema.returns)
        return pytree.tree_unflatten(list(map(functools.partial(_relaid, mode, is_view), leaves, strides)), structure)

    mode.dispatch = dispatch_as_kernels
    try:
        yield
    finally:
        del mode.dispatch


def _relaid(mode: FakeTensorMode, is_view: bool, value: object, strides: Strides | None) -> object:
    """A new fake tensor with other strides; itself if it has these."""
    if strides is None or not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    wanted = _wanted(value, strides)
    if wanted is None:
        return value
    with mode:
        if is_view:
            return torch.as_strided(value, value.shape, wanted)
        return torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)


def _wanted(value: torch.Tensor, strides: Strides) -> Sequence[Any] | None:
    """The strides that a fake tensor should have, symbolic if its sizes are; ``None`` if it has them, or it cannot be
    told how they follow from its sizes."""
    if [hint_of(stride) for stride in value.stride()] == list(strides) or len(strides) != value.ndim:
        return None
    if not any(isinstance(item, torch.SymInt) for item in (*value.shape, *value.stride())):
        return strides
    wanted = strides_in_order(order_of(value, strides), value.shape)
    return wanted if [hint_of(stride) for stride in wanted] == list(strides) else None


def decompositions_as_kernels(table: Table) -> dict[Any, Callable[..., Any]]:
    """Decompositions whose results have the strides of the real kernels of what they decompose.

    Args:
        table: from an operator to a function of its arguments, which may return ``NotImplemented``: the operator stays.
    """
    ours: Table = {target: functools.partial(_normalized, target, table.get(target)) for target in _NORMALIZATIONS}
    return {
        target: functools.partial(_decomposed, target, function) if may_differ(target) else function
        for target, function in {**table, **ours}.items()
    }


def _decomposed(target: torch._ops.OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if result is NotImplemented or not _is_asked(target, args, kwargs):
        return result
    strides = strides_of_kernel(target, args, kwargs)
    leaves, structure = pytree.tree_flatten(result)
    if strides is None or len(leaves) != len(strides):
        return result
    return pytree.tree_unflatten(list(map(_copied_to, leaves, strides)), structure)


def _copied_to(value: object, strides: Strides | None) -> object:
    """A tensor copied to memory in another order, where its strides would be others."""
    if strides is None or not isinstance(value, torch.Tensor) or len(strides) != value.ndim:
        return value
    sizes = [hint_of(size) for size in value.shape]
    now = [hint_of(stride) for stride in value.stride()]
    order = order_of(value, strides)
    addressed = [dim for dim, size in enumerate(sizes) if size != 1]
    if 0 in sizes or now == list(strides):
        return value
    if strides_in_order(order, sizes) != list(strides) and all(now[dim] == strides[dim] for dim in addressed):
        return value  # a copy would not have them either
    return (
        value.permute(order)
        .clone(memory_format=torch.contiguous_format)
        .permute([order.index(dim) for dim in range(value.ndim)])
    )


def correct(module: fx.GraphModule) -> int:
    """Gives the nodes of a graph the strides of the real kernels; for graphs that were traced without the above.

    Args:
        module: a functional ATen graph with ``meta["val"]`` on its nodes, which is changed in place.

    Returns:
        How many nodes got other strides.
    """
    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((leaf.fake_mode for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor)), None)
    corrected: set[fx.Node] = set()
    if mode is None:
        return 0
    with fake_tensors_as_kernels(mode), mode:
        for node in module.graph.nodes:
            if node.op != "call_function" or "val" not in node.meta:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            if not (corrected.intersection(node.all_input_nodes) or _is_asked(node.target, args, kwargs)):
                continue
            value = node.target(*args, **kwargs)
            if _all_strides(value) != _all_strides(node.meta["val"]):
                node.meta["val"] = value
                corrected.add(node)
    return len(corrected)


def _all_strides(value: object) -> list[Strides | None]:
    return [_strides(leaf) for leaf in pytree.tree_leaves(value)]


_NORMALIZATIONS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)
"""They return the result, two statistics of the input, and some new running statistics."""

_STATISTICS = (1, 2)
_SAME = (aten.detach.default, aten.alias.default)
"""What autograd puts between the statistics and where they are saved."""
_HALF = (torch.float16, torch.bfloat16)


def _normalized(
    target: Callable[..., Any], decomposition: Callable[..., Any] | None, input: torch.Tensor, *args: Any
) -> Any:
    if not _is_mixed(input, args):
        return NotImplemented if decomposition is None else decomposition(input, *args)
    result, *statistics = target(input.float(), *args)
    return (result.to(input.dtype), *statistics)


def _is_mixed(input: torch.Tensor, others: Iterable[object]) -> bool:
    """Whether a normalization computes its statistics in another dtype than its input's (``is_mixed_type`` of
    ``aten/src/ATen/native/cpu/mixed_data_type.h``)."""
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return input.dtype in _HALF and any(other.dtype == torch.float32 for other in tensors)


def tell_statistics(module: fx.GraphModule) -> None:
    """Gives the statistics in a graph in which normalizations are whole, a joint one for instance, the dtype that they
    have; ``meta["val"]`` of what is not computed from them stays."""
    for node in module.graph.nodes:
        if node.target in _NORMALIZATIONS:
            input, *others = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            if _is_mixed(input, others):
                node.meta["val"] = tuple(
                    _as_float32(value) if i in _STATISTICS else value for i, value in enumerate(node.meta["val"])
                )
        elif node.target is operator.getitem and node.args[0].target in _NORMALIZATIONS:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif node.target in _SAME and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            node.meta["val"] = _as_float32(node.meta["val"])


def _as_float32(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return value.to(torch.float32)
