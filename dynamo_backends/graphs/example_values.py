"""Values that are made up where no real ones are known."""

from __future__ import annotations

import torch

_SEED = 0
"""Equal types have equal values, in each process."""


def synthetic(value: object) -> object:
    """A real value of a fake one's type: normal random numbers, zeros for integers, the hint of a symbolic number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = ([_as_int(item) for item in items] for items in (value.shape, value.stride()))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    memory = torch.zeros(elements, dtype=value.dtype, device=value.device)
    if value.is_floating_point():
        memory.normal_(generator=torch.Generator(value.device).manual_seed(_SEED))
    return memory.as_strided(sizes, strides)  # not filled as it reads: where it is expanded it may not be written


def _as_int(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
