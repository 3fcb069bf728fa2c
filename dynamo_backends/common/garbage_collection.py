"""Python's garbage collector while a graph is compiled."""

from __future__ import annotations

import contextlib
import gc
from types import TracebackType

from passes.engine.locks import Lock

from .fork_safety import renew_in_children


class _OnlyNew(contextlib.ContextDecorator):
    """Lets the collector look at new objects only, as long as a thread is in a ``with`` block of this object.

    It is a decorator too, of functions that are such a block.

    A process that has imported PyTorch has some million objects, and a compile makes so many that the collector looks
    at all of them several times. Where somebody froze objects (``gc.freeze``), they stay frozen, and nothing changes.
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
        """Another thread of the parent may have been inside."""
        self._inside = 0
        self._thaw()

    def _thaw(self) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False


only_new = _OnlyNew()
