"""Which operators AOTAutograd takes apart before we see them.

Operators with a translation stay whole (GELU, layer norm, softmax, attention: the runtime has kernels for them), all
others are decomposed where PyTorch knows how. Random operators are never decomposed: their decompositions draw other
numbers than eager's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import _decomp

from .converters import CONVERTERS
from .torch_internals import torchlib_operators

aten = torch.ops.aten

_DECOMPOSE_ANYWAY = {
    # Torchlib's translation differs from eager in training mode; the decomposition is exact.
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten.instance_norm.default,
}


@functools.cache
def _decompositions(opset: int) -> dict[object, Callable[..., object]]:
    whole = (set(torchlib_operators(opset)) | set(CONVERTERS)) - _DECOMPOSE_ANYWAY
    table: dict[object, Callable[..., object]] = {}
    for source in (_decomp.core_aten_decompositions(), _decomp.decomposition_table):
        for target, function in source.items():
            if not isinstance(target, torch._ops.OpOverload) or target in whole:
                continue
            if torch.Tag.nondeterministic_seeded in target.tags:
                continue
            table.setdefault(target, function)
    return table


def decomposition_table(opset: int = 20) -> dict[object, Callable[..., object]]:
    """The decompositions our backends use, for ``aot_autograd(decompositions=...)``: ATen overload to function.

    Args:
        opset: the ONNX opset the graphs will be translated to; a newer one has more operators that stay whole.
    """
    return dict(_decompositions(opset))
