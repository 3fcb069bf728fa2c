"""Which operators AOTAutograd takes apart before we see them.

Operators with a translation stay whole (GELU, layer norm, softmax, attention: the runtime has kernels for them), all
others are decomposed where PyTorch knows how. Two kinds are never decomposed:

- random operators: their decompositions draw other numbers than eager's kernels;
- operators that change an argument: their decompositions write through ``prims.copy_to``, which AOTAutograd does not
  see as a mutation, so the graph would not be functional. It functionalizes them by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import _decomp
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import is_view

from ..graphs.fake_tensors import decompositions_as_kernels
from ..graphs.layout import layout_of
from ..versions import MINIMUM_OPSET
from .registration import registered_targets

aten = torch.ops.aten

_DECOMPOSE_ANYWAY = {
    # Torchlib's translation differs from eager in training mode; the decomposition is exact.
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.instance_norm.default,
    # Torchlib's translation is wrong for NaN, infinities, large numbers, or, of glu, far below zero, of norms beyond
    # the digits of float32, of products with a vector where it is a transposed matrix or a long one, of quotients that
    # are rounded.
    aten.addmv.default,
    aten.celu.default,
    aten.clamp_max.Tensor,
    aten.clamp_max.default,
    aten.clamp_min.Tensor,
    aten.clamp_min.default,
    aten.dot.default,
    aten.floor_divide.default,
    aten.glu.default,
    aten.hardtanh_backward.default,
    aten.linalg_vector_norm.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logit.default,
    aten.logsumexp.default,
    aten.mv.default,
    aten.sinc.default,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Scalar_Self,
    aten.xlogy.Tensor,
}

SUMS_AT_INDICES = {aten.index_add.default, aten.embedding_dense_backward.default, aten.unfold_backward.default}
"""They add several numbers at one place of a tensor that indices choose, as ``index_put`` may."""


def overloads_of(*packets: torch._ops.OpOverloadPacket) -> set[object]:
    """All overloads of operators."""
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


_PRIMS = overloads_of(
    aten.digamma,
    aten.erfinv,
    aten.fmax,
    aten.fmin,
    aten.frexp,
    aten.gcd,
    aten.hypot,
    aten.i0,
    aten.lgamma,
    aten.special_bessel_j0,
    aten.special_bessel_j1,
    aten.special_i0e,
    aten.special_i1,
    aten.special_i1e,
    aten.special_ndtri,
    aten.special_spherical_bessel_j0,
    aten.special_zeta,
)
"""Operators without a translation whose decomposition is one operator of ``prims``, which has none either."""

_NEVER = {
    *SUMS_AT_INDICES,  # theirs add by index_put, in PyTorch slower than the kernel of each
    *_PRIMS,
    # They mark constants and ends of autograd for AOTAutograd, which meets real tensors in them: a decomposition then
    # fails ("convert all Tensors to FakeTensors first"). ONNX Runtime takes them away.
    aten.alias.default,
    aten.detach.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    # Theirs write into a view of their copy (prims.copy_to); AOTAutograd wants a functional graph, and having failed
    # leaves the process unable to compile graphs with constants.
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
    # Theirs are max pooling where the windows are of one size: a window with infinity and NaN stays infinite there.
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    # Theirs multiplies a square of as many rows as there are numbers: 20,000 take 6 GB.
    aten.cumprod.default,
    # Theirs use prims.signbit, whose fake result has the dtype of its argument instead of bool (PyTorch 2.13).
    aten.copysign.Scalar,
    aten.copysign.Tensor,
}


def native_dropout(input: torch.Tensor, probability: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as a mask that depends on no value, and products.

    The mask is drawn by PyTorch, with the numbers eager's kernel draws (``native_dropout_cpu`` in
    ``aten/src/ATen/native/Dropout.cpp``). As it needs only the shape, all masks of a graph are drawn before its first
    region, and dropout does not split the graph.
    """
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = 1.0 - probability
    order = layout_of(torch.empty_like(input)).permutation or range(input.ndim)  # eager draws in the order of memory
    unset = torch.empty([input.shape[i] for i in order], dtype=torch.bool, device=input.device)
    mask = aten.bernoulli.p(unset, keep).permute([list(order).index(i) for i in range(input.ndim)])
    return input * mask * (0.0 if keep == 0 else 1.0 / keep), mask


def nan_to_num(input: torch.Tensor, *numbers: float | None, **named: float | None) -> torch.Tensor:
    """Numbers beyond the dtype are infinite, as in the kernel; in PyTorch's decomposition they are an error."""
    if not input.is_floating_point():
        return NotImplemented if input.is_complex() else input.clone()
    largest = torch.finfo(input.dtype).max

    def rounded(number: float | None) -> float | None:
        return number if number is None or not abs(number) > largest else math.copysign(math.inf, number)

    given = [rounded(number) for number in numbers], {name: rounded(number) for name, number in named.items()}
    result: torch.Tensor = _decomp.decomposition_table[aten.nan_to_num.default](input, *given[0], **given[1])
    return result


@_decomp.decompositions.pw_cast_for_opmath
def soft_margin_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """Without the ``sigmoid(x) - 1`` of PyTorch's decomposition, which cancels where the loss is small."""
    gradient = -target * grad_output * torch.sigmoid(-target * input)
    return gradient / input.numel() if reduction == _decomp.decompositions.Reduction.MEAN.value else gradient


def in_its_own_memory(function: Callable[..., object]) -> Callable[..., object]:
    """A decomposition that returns no argument and no view of one, and leaves operators of complex or empty tensors.

    The operator returns new memory, and so may be changed in place, or its argument. Some decompositions return a view
    where there is nothing to compute: ``channel_shuffle`` with one group, ``take`` of the only number.

    These run in PyTorch, whole: some decompositions refuse what eager takes (``nan_to_num`` of complex numbers,
    ``index_fill`` of nothing), or return another dtype (``bucketize`` without boundaries).
    """

    @functools.wraps(function)
    def decomposition(*args: Any, **kwargs: Any) -> object:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_complex() or statically_known_true(tensor.numel() == 0) for tensor in given):
            return NotImplemented

        def own(value: object) -> object:
            if isinstance(value, torch.Tensor) and any(torch._C._is_alias_of(value, other) for other in given):
                return value.clone()
            return value

        result = function(*args, **kwargs)
        return result if result is NotImplemented else pytree.tree_map(own, result)

    return decomposition


Decompositions = dict[object, Callable[..., object]]
"""ATen overloads, each with the function it is taken apart by."""

_OURS: Decompositions = {
    aten.native_dropout.default: native_dropout,
    aten.nan_to_num.default: nan_to_num,
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
}


_SOURCES: tuple[Callable[[], Mapping[Any, Callable[..., Any]]], ...] = (
    _decomp.core_aten_decompositions,
    lambda: _decomp.decomposition_table,
)
"""PyTorch's decompositions; the first that has an operator counts."""


@functools.cache
def translated_operators(opset: int) -> frozenset[str]:
    """The names (``aten::add.Tensor``) of those operators with a decomposition that have a translation, too.

    To know them, all translations are imported; the answer depends on nothing but the versions of the libraries.
    """
    from .translate import find_translation

    targets = {target for source in _SOURCES for target in source() if isinstance(target, torch._ops.OpOverload)}
    return frozenset(target.name() for target in targets if find_translation(target, opset) is not None)


@functools.cache
def whole_table(translated: frozenset[str]) -> Decompositions:
    """The table without regard to what is registered; these operators stay whole."""
    table = dict(_OURS)
    for source in _SOURCES:
        for target, function in source().items():
            if not isinstance(target, torch._ops.OpOverload):
                continue
            if target not in _DECOMPOSE_ANYWAY and target.name() in translated:
                continue
            if target in _NEVER or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
                continue
            table.setdefault(target, function if is_view(target) else in_its_own_memory(function))
    return decompositions_as_kernels(table)


def decomposition_table(opset: int = 23, translated: frozenset[str] | None = None) -> Decompositions:
    """The decompositions our backends use, for ``aot_autograd(decompositions=...)``: ATen overload to function.

    Args:
        opset: the ONNX opset the graphs will be translated to, that of the compiler's option; a newer one has more
            operators that stay whole.
        translated: what ``translated_operators`` says, if that is known already.

    Raises:
        TypeError: the opset is no whole number.
        ValueError: it is older than 18, which no translation is written for.
    """
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise TypeError(f"opset must be a whole number, not {opset!r}")
    if opset < MINIMUM_OPSET:
        raise ValueError(f"opset {opset} is older than {MINIMUM_OPSET}, the oldest that is translated to")
    table = whole_table(translated_operators(opset) if translated is None else translated)
    whole = registered_targets()
    return {target: function for target, function in table.items() if target not in whole}
