"""Limits Python's garbage collector to new objects while a graph is compiled."""

from __future__ import annotations

import contextlib
import gc
from types import TracebackType

from passes.engine.locks import Lock

from .fork_safety import renew_in_children


class _OnlyNew(contextlib.ContextDecorator):
    """A context manager and decorator: while a thread is inside, all older objects are frozen (``gc.freeze``).

    A process with PyTorch has about a million objects, and a compile allocates so much that the collector would scan
    them several times. If the user has frozen objects, they stay frozen and this does nothing.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._froze = False
        renew_in_children(self)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0 and gc.get_freeze_count() == 0:
                gc.freeze()
                self._froze = True
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)  # a forked child starts at 0
            if self._inside == 0:
                self._thaw()

    def renew_in_child(self) -> None:
        """Drops the state of the parent's threads."""
        self._inside = 0
        self._thaw()

    def _thaw(self) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False


only_new = _OnlyNew()
