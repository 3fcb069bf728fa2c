"""Corrects fake tensors (PyTorch 2.13) whose strides or dtype differ from what the CPU kernels return.

Strides: results of a compiled graph get the strides of its fake tensors. These come from meta kernels, some of which
disagree with the real kernels: ``x.permute(0, 3, 1, 2).roll(1, 2)`` is row-major as a fake tensor, and channels last in
eager. A later view of it raises, or shares memory that it does not share in eager. So the real kernel is probed: it
runs once for each set of sizes and strides, on dummy data. No probe is needed for operators in
``agreeing_operators.json``, which ``tests/strides_sweep.py`` found to agree in many layouts. A kernel for which
``example_values`` has no valid data, as for the workspace of a recurrent layer, is not run: fake strides are used.

Dtypes: for a half-precision input with float32 weights, as under autocast, normalizations save float32 statistics for
the backward, but their fake tensors say half. So decompositions compute them from a float32 input, and
``correct_statistics`` corrects joint graphs.

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

from ..common.random_state import unchanged_random_state
from ..common.strides import strides_in_order
from ..events import count
from .example_values import valid_integers
from .layout import hint_of, memory_extent, order_of

logger = logging.getLogger(__name__)

aten = torch.ops.aten

Strides = tuple[int, ...]
Table = Mapping[Any, Callable[..., Any]]

_MAX_PROBES = 20_000
"""Entries of ``_probes``; when full, it is cleared."""

_MAX_BYTES = 2**31
"""Size of the arguments of a probe; most of this memory is never touched."""

_probes: dict[object, tuple[Strides | None, ...] | None] = {}
"""The strides of results by operator and sizes, strides and dtypes of its arguments; ``None`` if unknown."""


@functools.cache
def _agreeing() -> dict[str, frozenset[str]]:
    """The operators whose strides agree if all arguments are ``row_major``, or if no size is 1 (``without_ones``)."""
    text = (importlib.resources.files(__package__) / "agreeing_operators.json").read_text(encoding="utf-8")
    return {kind: frozenset(names) for kind, names in json.loads(text).items()}


@functools.cache
def may_differ(target: object) -> bool:
    """Whether an operator's fake results may have wrong strides at all."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def _needs_probe(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator's fake results may have wrong strides for these arguments."""
    if not may_differ(target):
        return False
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(type(leaf) is FakeTensor and leaf.layout is torch.strided for leaf in tensors):
        return False
    if any(leaf.device.type != "cpu" for leaf in tensors):
        return _may_run_on_gpu(target, tensors)  # its kernels were not swept
    if target is aten.view.default and list(args[0].shape) == list(args[1]):
        return False  # AOTAutograd makes tangents with it, and expects all strides of the results
    name = target.name()  # type: ignore[attr-defined]
    if name in _agreeing()["without_ones"] and not any(map(_is_ambiguous, tensors)):
        return False
    return not (name in _agreeing()["row_major"] and all(map(_is_exactly_row_major, tensors)))


def _may_run_on_gpu(target: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an operator can be probed on a GPU, where an index that is out of range, or an assertion that fails, ends
    all work of the process: operators of PyTorch's core set and elementwise ones, on numbers, draw and assert nothing.
    """
    is_known = torch.Tag.core in target.tags or torch.Tag.pointwise in target.tags
    if not is_known or torch.Tag.nondeterministic_seeded in target.tags or target is aten.view.default:
        return False
    are_numbers = all(leaf.is_floating_point() or leaf.dtype is torch.bool for leaf in tensors)
    return are_numbers and {leaf.device.type for leaf in tensors} == {"cuda"} and torch.cuda.is_available()


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Whether strides do not determine an order of dimensions: a size is one, or the tensor is expanded."""
    return any(hint_of(size) == 1 for size in tensor.shape) or any(hint_of(stride) == 0 for stride in tensor.stride())


def _is_exactly_row_major(tensor: torch.Tensor) -> bool:
    """Whether all strides are those of a new tensor, also in dimensions of size one."""
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
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: object = None
) -> tuple[Strides | None, ...] | None:
    """The strides of what a kernel returns, from a probe or the cache of probes.

    Args:
        target: an operator that changes no argument.
        args, kwargs: fake tensors and numbers; symbolic sizes count as their hints.
        results: its fake results.

    Returns:
        The strides of each leaf of the results, ``None`` for one that is not a strided tensor. ``None`` altogether if
        sizes are unknown or too large, if no dummy data is valid, or if the kernel fails on it.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    described = tuple(map(_described, leaves))
    key = (target, structure, described)
    if key not in _probes:
        if len(_probes) >= _MAX_PROBES:
            _probes.clear()
        strides = None
        integers = valid_integers(target, args, kwargs, results)
        if integers is not None and _UNKNOWN not in described:
            strides = _probe(target, leaves, integers, structure)
        _probes[key] = strides
        if strides is None:
            count("strides_not_known")
        else:
            count("strides_probed")
    return _probes[key]


_UNKNOWN = object()
"""Describes an argument whose size depends on data, and one of which no copy can be made, such as a generator."""

_CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _described(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        numbers = tuple(map(hint_of, (*leaf.shape, *leaf.stride())))
        return _UNKNOWN if None in numbers else (numbers, leaf.dtype, leaf.device)
    known = hint_of(leaf)
    is_known = isinstance(known, _CONSTANTS) and (known is not None or leaf is None)
    return (type(known), str(known)) if is_known else _UNKNOWN


def _probe(
    target: torch._ops.OpOverload,
    leaves: Sequence[object],
    integers: Sequence[int | None],
    structure: pytree.TreeSpec,
) -> tuple[Strides | None, ...] | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    size = sum(memory_extent(tensor) * tensor.itemsize for tensor in tensors)
    if size > _MAX_BYTES:
        logger.info("%s is not probed, its fake strides are used: its arguments have %d MiB", target, size >> 20)
        return None
    with contextlib.ExitStack() as stack:
        for context in (_disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast()):
            stack.enter_context(context)
        if torch.Tag.nondeterministic_seeded in target.tags:
            stack.enter_context(unchanged_random_state())
        for make in (_zeros, _numbers):  # some kernels fail on zeros: a matrix inverse, a division of integers
            try:
                real = [
                    make(leaf, integer) if isinstance(leaf, torch.Tensor) else hint_of(leaf)
                    for leaf, integer in zip(leaves, integers, strict=True)
                ]
            except Exception as error:  # no memory, or a dtype that has no zeros, as those of quantized tensors
                logger.info("%s is not probed, its fake strides are used: no dummy data: %s", target, error)
                return None
            args, kwargs = pytree.tree_unflatten(real, structure)
            try:
                results = target(*args, **kwargs)
            except Exception as error:  # dummy data may be invalid for it
                logger.debug("the probe of %s failed: %s", target, error)
                continue
            return tuple(map(_strides, pytree.tree_leaves(results)))
    return None


def _zeros(tensor: torch.Tensor, integer: int | None) -> torch.Tensor:
    """Zeros like a fake tensor, or ``integer``; the system allocates large memory only when it is used."""
    memory = torch.zeros(memory_extent(tensor), dtype=tensor.dtype, device=tensor.device)
    if integer:
        memory.fill_(integer)
    return memory.as_strided(list(map(hint_of, tensor.shape)), list(map(hint_of, tensor.stride())))


def _numbers(tensor: torch.Tensor, integer: int | None) -> torch.Tensor:
    """Nonzero numbers like a fake tensor, or ``integer``."""
    if not tensor.is_floating_point():
        return _zeros(tensor, 1 if integer is None else integer)
    result = _zeros(tensor, None)
    if result.numel():
        memory = result.as_strided((memory_extent(tensor),), (1,))
        memory.copy_(torch.linspace(0.5, 1.5, len(memory)).cos())
    return result


def _strides(value: object) -> Strides | None:
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


@contextlib.contextmanager
def fake_tensors_as_kernels(mode: FakeTensorMode | None) -> Iterator[None]:
    """A context in which a mode's fake tensors have the strides of the real kernels; ``None`` changes nothing."""
    if mode is None or "dispatch" in vars(mode):  # already inside such a context
        yield
        return
    dispatch = mode.dispatch

    def dispatch_as_kernels(
        func: torch._ops.OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        result = dispatch(func, types, args, kwargs or {})
        if not _needs_probe(func, args, kwargs or {}):
            return result
        strides = strides_of_kernel(func, args, kwargs or {}, result)
        if strides is None:
            return result
        leaves, structure = pytree.tree_flatten(result)
        if len(leaves) != len(strides):
            return result
        is_view = any(item.alias_info is not None for item in func._schema.returns)
        corrected = [_with_strides(mode, is_view, leaf, item) for leaf, item in zip(leaves, strides, strict=True)]
        return pytree.tree_unflatten(corrected, structure)

    mode.dispatch = dispatch_as_kernels
    try:
        yield
    finally:
        del mode.dispatch


def _with_strides(mode: FakeTensorMode, is_view: bool, value: object, strides: Strides | None) -> object:
    """A new fake tensor with these strides; the given one if it has them."""
    if strides is None or not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return value
    new = _new_strides(value, strides)
    if new is None:
        return value
    with mode:
        if is_view:
            return torch.as_strided(value, value.shape, new)
        return torch.empty_strided(value.shape, new, dtype=value.dtype, device=value.device)


def _new_strides(value: torch.Tensor, strides: Strides) -> Sequence[Any] | None:
    """The strides in terms of a tensor's symbolic sizes; ``None`` if it has them, or if they do not follow."""
    if [hint_of(stride) for stride in value.stride()] == list(strides) or len(strides) != value.ndim:
        return None
    if not any(isinstance(item, torch.SymInt) for item in (*value.shape, *value.stride())):
        return strides
    new = strides_in_order(order_of(value, strides), value.shape)
    return new if [hint_of(stride) for stride in new] == list(strides) else None


def decompositions_as_kernels(table: Table) -> dict[Any, Callable[..., Any]]:
    """Decompositions whose results have the strides and dtypes of the decomposed operators' kernels.

    Like those of ``table``, they may return ``NotImplemented``: then the operator is not decomposed.
    """
    ours: Table = {target: functools.partial(_normalization, target, table.get(target)) for target in _NORMALIZATIONS}
    return {
        target: functools.partial(_decomposed, target, function) if may_differ(target) else function
        for target, function in {**table, **ours}.items()
    }


def _decomposed(target: torch._ops.OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if result is NotImplemented or not _needs_probe(target, args, kwargs):
        return result
    strides = strides_of_kernel(target, args, kwargs, result)
    leaves, structure = pytree.tree_flatten(result)
    if strides is None or len(leaves) != len(strides):
        return result
    return pytree.tree_unflatten(list(map(_copied_to_strides, leaves, strides)), structure)


def _copied_to_strides(value: object, strides: Strides | None) -> object:
    """A copy of a tensor with these strides; the tensor if it has them, or a copy would not."""
    if strides is None or not isinstance(value, torch.Tensor) or len(strides) != value.ndim:
        return value
    sizes = [hint_of(size) for size in value.shape]
    now = [hint_of(stride) for stride in value.stride()]
    order = order_of(value, strides)
    addressed = [dim for dim, size in enumerate(sizes) if size != 1]
    if 0 in sizes or now == list(strides):
        return value
    if strides_in_order(order, sizes) != list(strides) and all(now[dim] == strides[dim] for dim in addressed):
        return value
    return (
        value.permute(order)
        .clone(memory_format=torch.contiguous_format)
        .permute([order.index(dim) for dim in range(value.ndim)])
    )


def correct_strides(module: fx.GraphModule) -> int:
    """Corrects strides in ``meta["val"]`` of a functional ATen graph that is already traced; returns how many nodes."""
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
            if not (corrected.intersection(node.all_input_nodes) or _needs_probe(node.target, args, kwargs)):
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
"""Each returns the result, two statistics of the input, and some also new running statistics."""

_STATISTICS = (1, 2)
"""Positions of the statistics."""
_ALIASES = (aten.detach.default, aten.alias.default)
"""Operators that autograd inserts before it saves the statistics."""
_HALF = (torch.float16, torch.bfloat16)


def _normalization(
    target: Callable[..., Any], decomposition: Callable[..., Any] | None, input: torch.Tensor, *args: Any
) -> Any:
    if not _is_mixed(input, args):
        return NotImplemented if decomposition is None else decomposition(input, *args)
    result, *statistics = target(input.float(), *args)
    return (result.to(input.dtype), *statistics)


def _is_mixed(input: torch.Tensor, others: Iterable[object]) -> bool:
    """Whether the input is half and the weights float32 (``aten/src/ATen/native/cpu/mixed_data_type.h``)."""
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return input.dtype in _HALF and any(other.dtype == torch.float32 for other in tensors)


def correct_statistics(module: fx.GraphModule) -> None:
    """Corrects the dtype of statistics in ``meta["val"]``, before normalizations are decomposed."""
    for node in module.graph.nodes:
        if node.target in _NORMALIZATIONS:
            input, *others = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            if _is_mixed(input, others):
                node.meta["val"] = tuple(
                    _as_float32(value) if i in _STATISTICS else value for i, value in enumerate(node.meta["val"])
                )
        elif node.target is operator.getitem and node.args[0].target in _NORMALIZATIONS:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif node.target in _ALIASES and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            node.meta["val"] = _as_float32(node.meta["val"])


def _as_float32(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return value.to(torch.float32)


def unlike_fake(value: object, dtype: torch.dtype | None, sizes: Sequence[object]) -> str:
    """How a tensor differs from the dtype and the sizes that a fake implementation said; ``""`` if it does not.

    Sizes that are no integers are symbolic.
    """
    if not isinstance(value, torch.Tensor) or dtype is None:
        return ""
    fixed = all(size == known for size, known in zip(value.shape, sizes, strict=False) if isinstance(known, int))
    if value.dtype == dtype and value.ndim == len(sizes) and fixed:
        return ""
    return (
        f"{value.dtype} {tuple(value.shape)}, and its fake implementation (register_fake) said {dtype} {tuple(sizes)}"
    )
