"""Makes real example values from fake ones, for runs where the real arguments are unknown."""

from __future__ import annotations

import torch

from .layout import hint_of, memory_extent

_SEED = 0
"""Fixed, so that all processes make equal values."""


def synthetic(value: object) -> object:
    """A real value for a fake one.

    A tensor gets the same shape, dtype, device and strides, with normal random numbers if it is floating-point, else
    zeros. A symbolic number becomes its hint. Anything else is returned.
    """
    if not isinstance(value, torch.Tensor):
        return hint_of(value)
    memory = torch.zeros(memory_extent(value), dtype=value.dtype, device=value.device)
    if value.is_floating_point():  # fills the memory, because an expanded tensor cannot be written
        memory.normal_(generator=torch.Generator(value.device).manual_seed(_SEED))
    return memory.as_strided([hint_of(size) for size in value.shape], [hint_of(stride) for stride in value.stride()])
