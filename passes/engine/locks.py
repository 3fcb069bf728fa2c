"""A lock that a forked child can take."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class Lock:
    """A lock that is free in a forked child: the thread of the parent that held it is not there to let it go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._lock.release()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Takes it; whether it did, where it is not ``blocking``."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Lets it go."""
        self._lock.release()

    def renew(self) -> None:
        """Makes it free; for a child, where no other thread runs."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_all)
