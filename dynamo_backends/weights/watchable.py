"""Which tensors can be constants of a session, because every write to them can be detected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    }
)

Addresses: TypeAlias = tuple[int, ...]


def addresses_of(tensors: Iterable[torch.Tensor]) -> Addresses:
    return tuple(map(torch.Tensor.data_ptr, tensors))


def can_be_watched(tensor: torch.Tensor) -> bool:
    """Whether every write to a tensor can be detected.

    It must be a non-empty, dense tensor, parameter or buffer, of no other class, on the CPU or a GPU of NVIDIA, with a
    version counter, which tensors made under ``torch.inference_mode()`` lack.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
        return False
    if tensor.numel() == 0 or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_inference():
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
