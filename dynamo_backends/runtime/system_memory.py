"""The machine's memory: how much is available, and returning freed memory to the system.

The C library of most Linux systems (glibc) keeps freed memory for later. After a compile that is a lot, because ONNX
Runtime copies each weight before it packs it: 240 MB for BERT base (110 million parameters).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_STATISTICS = Path("/sys/fs/cgroup/memory.stat")


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc; Windows
        return None


_trim = _malloc_trim()


holders: list[Callable[[], None]] = []
"""Functions that free caches; ``give_back`` calls them."""


def give_back() -> None:
    """Returns freed memory to the system, if the C library can; takes about a millisecond."""
    for free in holders:
        free()
    if _trim is not None:
        _trim(0)


def available() -> int | None:
    """Bytes that this process can still allocate on this machine, or in its container; ``None`` if not known.

    From Linux (``/proc/meminfo``) and the limit of a container (cgroup v2). The container's use includes files that
    were read, such as checkpoints; those not read again are freed when memory is needed.
    """
    amounts = [1024 * number for number in _numbers(_MEMORY, "MemAvailable:")]
    limit, used = _lines(_LIMIT), _lines(_USED)
    if limit and used and limit[0].isdigit():
        files = sum(_numbers(_STATISTICS, "inactive_file"))
        amounts.append(int(limit[0]) - int(used[0]) + files)
    return min(amounts, default=None)


def _numbers(path: Path, name: str) -> list[int]:
    """The number after a name, in a file with one name and number a line."""
    return [int(words[1]) for words in map(str.split, _lines(path)) if words[:1] == [name]]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
