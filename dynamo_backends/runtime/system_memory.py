"""The memory of the machine: how much is free, and giving back what was freed.

The C library of most Linux systems (glibc) keeps what was freed for later. After a graph is compiled that is a lot:
ONNX Runtime copies each weight before it packs it. (240 MB of BERT base, 110 million parameters.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_STATISTICS = Path("/sys/fs/cgroup/memory.stat")


def _trim_of_the_c_library() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc; Windows
        return None


_trim = _trim_of_the_c_library()


holders: list[Callable[[], None]] = []
"""What else gives back what it holds and does not use."""


def give_back() -> None:
    """Gives freed memory back, where the C library can; takes a millisecond or so."""
    for let_go in holders:
        let_go()
    if _trim is not None:
        _trim(0)


def available() -> int | None:
    """Bytes that this process can still take, without the machine or its container running out; ``None`` if not known.

    It is what Linux says (``/proc/meminfo``) and the limit of a container (cgroup v2), whose use counts the files that
    were read as well, such as checkpoints: what of these was not used again goes when memory is needed.
    """
    amounts = [1024 * number for number in _numbers(_MEMORY, "MemAvailable:")]
    limit, used = _lines(_LIMIT), _lines(_USED)
    if limit and used and limit[0].isdigit():
        files = sum(_numbers(_STATISTICS, "inactive_file"))
        amounts.append(int(limit[0]) - int(used[0]) + files)
    return min(amounts, default=None)


def _numbers(path: Path, name: str) -> list[int]:
    """What stands behind a name in a file of names and numbers."""
    return [int(words[1]) for words in map(str.split, _lines(path)) if words[:1] == [name]]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
