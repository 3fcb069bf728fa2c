"""How long something takes on a device."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Measures one interval: with the processor's clock, or on an accelerator with events in its stream.

    Args:
        device: where the operator runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        self.began = 0.0
        self._ended = 0.0

    def start(self) -> Clock:
        """Begins the interval; returns itself."""
        self._mark()
        self.began = time.perf_counter()
        return self

    def stop(self) -> None:
        """Ends it."""
        self._ended = time.perf_counter()
        self._mark()

    @property
    def seconds(self) -> float:
        """Its length; waits for an accelerator."""
        if len(self._events) == 2:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._ended - self.began

    def _mark(self) -> None:
        if self._device.type in ("cpu", "meta"):
            return
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        self._events.append(event)


def device_of(tensors: object) -> torch.device:
    """The device of the first tensor that is not on the CPU; else the CPU."""
    for value in tensors if isinstance(tensors, (list, tuple)) else ():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")
