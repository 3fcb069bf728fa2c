"""Timing of a block."""

from __future__ import annotations

import time

import torch


class Clock:
    """Measures the seconds of a block; waits for the accelerator, if there is one."""

    seconds = 0.0

    def __enter__(self) -> Clock:
        self._began = _now()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = _now() - self._began


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
