"""The memory of this process: its resident set, and the highest that was.

Both are of Linux (``/proc``). Elsewhere they are ``None``, and the table says ``-``.
"""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What ``/proc/self/clear_refs`` takes to start the highest resident set anew; see proc(5)."""


def resident() -> int | None:
    """Bytes of memory that are resident now."""
    return _field("VmRSS")


def highest() -> int | None:
    """The most bytes that were resident since ``forget_highest``."""
    return _field("VmHWM")


def forget_highest() -> bool:
    """Starts ``highest`` anew; whether the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
