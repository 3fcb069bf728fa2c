"""Which tensors can be constants of a session, because every write to them can be detected; what all watches share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    }
)

CALLS = 256
"""Number of calls in which every byte is read once. A call of a model that does nothing but read its weights then takes
0.4 % longer."""

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


class VersionWatch:
    """What tells of a write without reading memory.

    Args:
        tensors: tensors that ``can_be_watched``.

    Attributes:
        addresses: of the tensors.
        written_meanwhile: positions of tensors that were written while the session read them, see ``session_was_made``.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.addresses = addresses_of(tensors)
        self.written_meanwhile: list[int] = []
        self._first_versions = [tensor._version for tensor in tensors]

    def session_was_made(self, tensors: Sequence[torch.Tensor]) -> None:
        """Must be called when the session has read the tensors, which are those of the construction.

        Another thread may have written to them meanwhile, and then back, as one does that swaps moving averages in and
        out. Then nothing tells which values the session has, and they count as changed for good.
        """
        pairs = zip(tensors, self._first_versions, strict=True)
        self.written_meanwhile = [i for i, (tensor, before) in enumerate(pairs) if tensor._version != before]
