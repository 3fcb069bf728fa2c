"""Makes real example values from fake ones, if the real arguments are unknown."""

from __future__ import annotations

import torch

from .layout import hint_of, memory_extent

_SEED = 0
"""All processes make equal values."""


def synthetic(value: object) -> object:
    """A real tensor like a fake one, of normal random numbers, or zeros for integers; the hint of a symbolic number."""
    if not isinstance(value, torch.Tensor):
        return hint_of(value)
    memory = torch.zeros(memory_extent(value), dtype=value.dtype, device=value.device)
    if value.is_floating_point():  # fills the memory, because an expanded tensor cannot be written
        memory.normal_(generator=torch.Generator(value.device).manual_seed(_SEED))
    return memory.as_strided([hint_of(size) for size in value.shape], [hint_of(stride) for stride in value.stride()])
