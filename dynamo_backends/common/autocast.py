"""The state of autocast on the CPU and on GPUs."""

from __future__ import annotations

import torch

_DEVICES = ("cpu", "cuda")


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The dtypes to which operators are cast, by the type of device; empty if autocast is off."""
    return {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}
