"""Timing on a device."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class Clock:
    """Measures one interval, on an accelerator with events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        self._began = self._ended = 0.0

    def __enter__(self) -> Clock:
        self._mark()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = time.perf_counter()
        self._mark()

    @property
    def seconds(self) -> float:
        """The length of the interval; synchronizes with an accelerator."""
        if len(self._events) == 2:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._ended - self._began

    def _mark(self) -> None:
        if self._device.type not in ("cpu", "meta"):
            self._events.append(torch.Event(device=self._device, enable_timing=True))
            self._events[-1].record()


def device_of(values: Iterable[object]) -> torch.device:
    """The device of the first tensor on an accelerator; the CPU if there is none."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
