"""The table of decompositions that our backends pass to AOTAutograd.

An operator with a converter is kept, as ONNX Runtime may have a kernel for it (GELU, layer norm, softmax, attention).
Any other is decomposed if PyTorch has a decomposition. Two kinds are never decomposed:

- random operators, whose decompositions draw other numbers than eager's kernels;
- operators that mutate an argument, whose decompositions use ``prims.copy_to``, which AOTAutograd does not recognize as
  a mutation. AOTAutograd functionalizes these operators itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import _decomp, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import is_view

from ..graphs.fake_tensors import decompositions_as_kernels
from ..graphs.layout import ROW_MAJOR, layout_of
from ..versions import MINIMUM_OPSET
from .recurrent_layers import kept_layers
from .registration import registered_targets
from .scalar_range import nonfinite_coefficient, number_out_of_range

aten = torch.ops.aten


def overloads_of(*packets: torch._ops.OpOverloadPacket) -> set[object]:
    """All overloads of the operators."""
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


_DECOMPOSE_ANYWAY = {
    # Torchlib's converter differs from eager in training mode,
    *overloads_of(aten.native_batch_norm, aten._native_batch_norm_legit, aten.instance_norm),
    # for NaN, infinities or large numbers,
    *overloads_of(aten.celu, aten.hardtanh_backward, aten.logit, aten.sinc, aten.xlogy),
    *overloads_of(aten.logaddexp, aten.logaddexp2, aten.logsumexp),
    # for large negative numbers (glu), norms that overflow float32, a transposed matrix or a long vector, or rounded
    # quotients.
    *overloads_of(aten.glu, aten.linalg_vector_norm, aten.addmv, aten.dot, aten.mv, aten.floor_divide),
}
"""Operators that are decomposed although they have a converter."""

SUMS_AT_INDICES = {aten.index_add.default, aten.embedding_dense_backward.default, aten.unfold_backward.default}
"""Operators that add values at indices, which may repeat."""

_NOT_DECOMPOSED = {
    *SUMS_AT_INDICES,  # decomposed to index_put, which is slower in PyTorch than their own kernels
    # Decomposed to one operator of prims, which has no converter either.
    *overloads_of(aten.digamma, aten.erfinv, aten.fmax, aten.fmin, aten.frexp, aten.gcd, aten.hypot, aten.lgamma),
    *overloads_of(aten.i0, aten.special_i0e, aten.special_i1, aten.special_i1e, aten.special_ndtri, aten.special_zeta),
    *overloads_of(aten.special_bessel_j0, aten.special_bessel_j1, aten.special_spherical_bessel_j0),
    # AOTAutograd calls them with real tensors, for which a decomposition fails ("convert all Tensors to FakeTensors
    # first"). ONNX Runtime removes them.
    *overloads_of(aten.alias, aten.detach, aten.lift, aten.lift_fresh),
    # Decomposed to prims.copy_to, a write into a view of a copy. AOTAutograd fails, as the graph is not functional, and
    # the process can no longer compile graphs with constants.
    *overloads_of(aten.as_strided_scatter, aten.diagonal_scatter),
    # Decomposed to a product with a square matrix: 6 GB for 20,000 elements.
    *overloads_of(aten.cumprod),
    # Decomposed to index_put, which counts negative indices from the end, and writes indices beyond a plane into the
    # next; eager's kernel rejects both, and is faster.
    *overloads_of(aten.max_unpool2d, aten.max_unpool3d),
    # Decomposed to prims.signbit, whose fake result has the dtype of its argument instead of bool (PyTorch 2.13).
    *overloads_of(aten.copysign),
}


def native_dropout(input: torch.Tensor, probability: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as a product with a mask. Returns the result and the mask, of the input's shape.

    PyTorch draws the mask, with the same numbers as eager's kernel (``native_dropout_cpu`` in
    ``aten/src/ATen/native/Dropout.cpp``). The mask depends only on the shape, so all masks of a graph are drawn before
    its first region, and dropout does not split the graph.
    """
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = 1.0 - probability
    order = layout_of(torch.empty_like(input)).permutation or range(input.ndim)  # eager draws in the order of memory
    unset = torch.empty([input.shape[i] for i in order], dtype=torch.bool, device=input.device)
    mask = aten.bernoulli.p(unset, keep).permute([list(order).index(i) for i in range(input.ndim)])
    return input * mask * (0.0 if keep == 0 else 1.0 / keep), mask


def nan_to_num(input: torch.Tensor, *numbers: float | None, **named: float | None) -> torch.Tensor:
    """PyTorch's decomposition, except that a number that overflows the dtype becomes infinite, as in the kernel."""
    if not input.is_floating_point():
        return NotImplemented if input.is_complex() else input.clone()
    largest = torch.finfo(input.dtype).max

    def rounded(number: float | None) -> float | None:
        return number if number is None or not abs(number) > largest else math.copysign(math.inf, number)

    result: torch.Tensor = _decomp.decomposition_table[aten.nan_to_num.default](
        input, *map(rounded, numbers), **{name: rounded(number) for name, number in named.items()}
    )
    return result


def adaptive_max_pool(input: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """``adaptive_max_pool_in_a_file`` of a row-major tensor; of others PyTorch is faster, and keeps the strides."""
    return adaptive_max_pool_in_a_file(input, output_size) if layout_of(input) == ROW_MAJOR else NotImplemented


def adaptive_max_pool_in_a_file(input: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima of windows of one size, in two or three dimensions, and their indices in the plane.

    The index is that of the last NaN, or else of the first maximum. PyTorch's decomposition is a max pooling, which in
    ONNX Runtime prefers infinity to NaN. Windows of different sizes, or none, are not decomposed.
    """
    dims = len(output_size)
    planes, sizes = input.shape[:-dims], input.shape[-dims:]
    if 0 in output_size or not all(
        statically_known_true(size % number == 0) for size, number in zip(sizes, output_size, strict=True)
    ):
        return NotImplemented
    windows = [size // number for size, number in zip(sizes, output_size, strict=True)]
    parts = [item for pair in zip(output_size, windows, strict=True) for item in pair]
    rank, count = len(planes), math.prod(windows)
    order = [*range(rank), *range(rank, rank + 2 * dims, 2), *range(rank + 1, rank + 2 * dims, 2)]
    elements = input.reshape(*planes, *parts).permute(order).reshape(*planes, *output_size, count)
    is_nan = elements.isnan()
    last_nan = count - 1 - is_nan.flip(-1).int().argmax(-1)
    within = torch.where(is_nan.any(-1), last_nan, elements.argmax(-1))
    index = torch.zeros_like(within)
    for i, (number, window) in enumerate(zip(output_size, windows, strict=True)):
        start = torch.arange(number, device=input.device).reshape(-1, *[1] * (dims - 1 - i)) * window
        position = start + within // math.prod(windows[i + 1 :]) % window
        index = index + position * math.prod(sizes[i + 1 :])
    return elements.amax(-1), index


def max_unpool_in_a_file(input: torch.Tensor, indices: torch.Tensor, *sizes: Sequence[int]) -> torch.Tensor:
    """PyTorch's decomposition, for indices that are in the plane; with others, ONNX Runtime fails.

    ``sizes`` are those of the result; in three dimensions also strides and padding, which change nothing.
    """
    target = aten.max_unpool2d.default if len(sizes) == 1 else aten.max_unpool3d.default
    is_inside = (indices >= 0) & (indices < math.prod(sizes[0]))
    result: torch.Tensor = _decomp.decomposition_table[target](input, torch.where(is_inside, indices, 2**62), *sizes)
    return result


def index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor | complex) -> torch.Tensor:
    """A write at indices, which may be negative; those of ``index_copy``, to which PyTorch decomposes it, may not."""
    if not isinstance(value, torch.Tensor):
        value = torch.scalar_tensor(value, dtype=input.dtype, device=input.device)
    memory = input if input.ndim else input.unsqueeze(0)
    indices = [*[None] * (dim % memory.ndim), index.reshape(-1)]
    return aten.index_put(memory, indices, value.to(input.dtype)).reshape(input.shape)


@_decomp.decompositions.pw_cast_for_opmath
def soft_margin_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """``-t * g * sigmoid(-t * x)``; the ``sigmoid(x) - 1`` of PyTorch's decomposition cancels for a small loss."""
    gradient = -target * grad_output * torch.sigmoid(-target * input)
    return gradient / input.numel() if reduction == _decomp.decompositions.Reduction.MEAN.value else gradient


def without_aliases(target: torch._ops.OpOverload, function: Callable[..., object]) -> Callable[..., object]:
    """A decomposition whose results do not alias its arguments.

    Some decompositions return a view of an argument if nothing has to be computed (``channel_shuffle`` with one group,
    ``take`` of the only element). The operator returns new memory, which the program may change in place.

    Operators with complex or empty tensors are not decomposed: some decompositions reject them (``nan_to_num`` of
    complex, ``index_fill`` of empty tensors) or return another dtype (``bucketize`` without boundaries). Nor are those
    with a number with which a decomposition may differ, see ``scalar_range``.
    """

    @functools.wraps(function)
    def decomposition(*args: Any, **kwargs: Any) -> object:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_complex() or statically_known_true(tensor.numel() == 0) for tensor in tensors):
            return NotImplemented
        if number_out_of_range(target, args, kwargs) or nonfinite_coefficient(target, args, kwargs) is not None:
            return NotImplemented

        def copy_alias(value: object) -> object:
            if isinstance(value, torch.Tensor) and any(torch._C._is_alias_of(value, tensor) for tensor in tensors):
                return value.clone()
            return value

        result = function(*args, **kwargs)
        return result if result is NotImplemented else pytree.tree_map(copy_alias, result)

    return decomposition


Decompositions = dict[object, Callable[..., object]]
"""From an ATen overload to its decomposition."""

_ADAPTIVE_MAX_POOLS = (aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)

_OUR_DECOMPOSITIONS: Decompositions = {
    aten.native_dropout.default: native_dropout,
    aten.nan_to_num.default: nan_to_num,
    **dict.fromkeys(_ADAPTIVE_MAX_POOLS, adaptive_max_pool),
    **{
        target: without_aliases(target, index_fill)
        for target in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
    },
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
}


_SOURCES: tuple[Callable[[], Mapping[Any, Callable[..., Any]]], ...] = (
    _decomp._core_aten_decompositions_post_autograd,
    lambda: _decomp.decomposition_table,
)
"""PyTorch's tables, in order of precedence. ``core_aten_decompositions`` would add composite operators, which PyTorch
decomposes while it traces: 0.15 s of each process."""


@functools.cache
def translated_operators(opset: int) -> frozenset[str]:
    """The names (``aten::add.Tensor``) of the operators that have both a decomposition and a converter at ``opset``.

    Depends only on the versions of the libraries. Slow: imports all converters.
    """
    from .translate import find_translation

    targets = {target for source in _SOURCES for target in source() if isinstance(target, torch._ops.OpOverload)}
    return frozenset(target.name() for target in targets if find_translation(target, opset) is not None)


@functools.cache
def whole_table(translated: frozenset[str]) -> Decompositions:
    """The decompositions of all operators but ``translated``; registered converters are not considered."""
    table = dict(_OUR_DECOMPOSITIONS)
    for source in _SOURCES:
        for target, function in source().items():
            if not isinstance(target, torch._ops.OpOverload):
                continue
            if target not in _DECOMPOSE_ANYWAY and target.name() in translated:
                continue
            if (
                target in _NOT_DECOMPOSED
                or target._schema.is_mutable
                or torch.Tag.nondeterministic_seeded in target.tags
            ):
                continue
            table.setdefault(target, function if is_view(target) else without_aliases(target, function))
    return decompositions_as_kernels(table)


def decomposition_table(opset: int = 23, translated: frozenset[str] | None = None) -> Decompositions:
    """The decompositions of our backends by ATen overload, for ``aot_autograd(decompositions=...)``.

    Args:
        opset: the ONNX opset of the models, as in the option ``opset``; a newer one has more converters.
        translated: the result of ``translated_operators``, if it is known.

    Raises:
        TypeError: the opset is not an integer.
        ValueError: it is older than 18, the oldest that converters support.
    """
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise TypeError(f"opset must be an integer, not {opset!r}")
    if opset < MINIMUM_OPSET:
        raise ValueError(f"opset {opset} is not supported; the oldest supported opset is {MINIMUM_OPSET}")
    table = whole_table(translated_operators(opset) if translated is None else translated)
    registered = registered_targets()
    return {target: function for target, function in table.items() if target not in registered}


@contextlib.contextmanager
def registered_operators_kept() -> Iterator[None]:
    """A context in which AOTAutograd does not decompose operators with a registered converter.

    Some, such as ``upsample_bilinear2d``, are decomposed by kernels of PyTorch's in Python, whatever table AOTAutograd
    gets. Without these, PyTorch calls its kernels in C++.
    """
    composite, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    with contextlib.ExitStack() as stack:
        packets = {item.overloadpacket for item in registered_targets() if isinstance(item, torch._ops.OpOverload)}
        for overload in (getattr(packet, name) for packet in packets for name in packet.overloads()):
            kernels = {key: how for key, how in overload.py_kernels.items() if key in (composite, autograd)}
            in_cpp = torch._C._dispatch_has_kernel_for_dispatch_key
            if not kernels or not any(in_cpp(overload.name(), key.name) for key in (composite, autograd)):
                continue
            stack.callback(overload._dispatch_cache.clear)  # of the kernels that PyTorch found
            stack.callback(overload.py_kernels.update, kernels)
            for key in kernels:
                del overload.py_kernels[key]
            overload._dispatch_cache.clear()
        yield


def table_for_export(opset: int, program: fx.GraphModule) -> Decompositions:
    """``decomposition_table`` and the composite operators, for ``ExportedProgram.run_decompositions``.

    AOTAutograd decomposes composite operators while it traces; an exported program keeps those without an entry. Their
    decompositions run before functionalization, which rejects the views of ``prims`` in PyTorch's other tables.

    LSTM and GRU are kept if ONNX Runtime has all of the program; decomposed, they are copied for each time step.

    Raises:
        ValueError: the length of a layer that is decomposed is symbolic.
    """
    kept = kept_layers(program)
    composites = {target: how for target, how in composite_operators().items() if target not in kept}
    pools: Decompositions = {
        **dict.fromkeys(_ADAPTIVE_MAX_POOLS, adaptive_max_pool_in_a_file),
        **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default), max_unpool_in_a_file),
    }
    return {**decomposition_table(opset), **pools, **composites}


def decomposed(program: ExportedProgram, table: Decompositions) -> ExportedProgram:
    """``program.run_decompositions(table)`` without PyTorch's warning about itself: in 2.13, it copies instances of
    ``pytree.LeafSpec``, which it has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
        return program.run_decompositions(table)


def table_of_extensions() -> Decompositions:
    """The composite operators that are not PyTorch's, such as torchao's, which may take float32 only."""
    return {target: how for target, how in composite_operators().items() if target.namespace != "aten"}


def composite_operators() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The operators that PyTorch computes with others, and their decompositions."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    decompositions = torch.export.default_decompositions().items()
    return {target: how for target, how in decompositions if target.has_kernel_for_dispatch_key(composite)}
