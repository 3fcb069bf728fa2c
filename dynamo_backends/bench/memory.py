"""The resident memory of this process, and its peak. Linux only (``/proc``); ``None`` elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

_RESET_PEAK = "5"
"""What ``/proc/self/clear_refs`` takes to reset the peak; see proc(5)."""


def resident() -> int | None:
    """The resident memory in bytes."""
    return _field("VmRSS")


def peak() -> int | None:
    """The peak of the resident memory since ``reset_peak``, in bytes."""
    return _field("VmHWM")


def reset_peak() -> bool:
    """Resets the peak; returns whether the system can."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
