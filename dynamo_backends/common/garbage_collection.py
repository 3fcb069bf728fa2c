"""Limits Python's garbage collector: to new objects while a graph is compiled, and to nothing during imports."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .fork_safety import Lock, renew_in_children


class Freezer:
    """Freezes all objects (``gc.freeze``) while somebody is inside. If the user has frozen objects, it does nothing."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside: set[object] = set()
        self._froze = False
        renew_in_children(self)

    def enter(self, who: object) -> None:
        """Adds somebody."""
        with self._lock:
            if not self._inside and gc.get_freeze_count() == 0:
                gc.freeze()
                self._froze = True
            self._inside.add(who)

    def leave(self, who: object) -> None:
        """Removes somebody, who may not have arrived: an interrupt can come anywhere."""
        self._inside.discard(who)
        with self._lock:
            if not self._inside:
                self._thaw()

    def renew_in_child(self) -> None:
        """Drops the state of the parent's threads."""
        self._inside.clear()
        self._thaw()

    def _thaw(self) -> None:
        if self._froze:
            gc.unfreeze()
            self._froze = False


FREEZER = Freezer()


@contextlib.contextmanager
def only_new() -> Iterator[None]:
    """A context manager and decorator: while a thread is inside, the collector leaves all older objects alone.

    A process with PyTorch has about a million objects, and a compile allocates so much that the collector would scan
    them several times.
    """
    who = object()
    try:
        FREEZER.enter(who)
        yield
    finally:
        FREEZER.leave(who)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A context manager for imports in a command: their objects stay. The collector took a quarter of the time that
    importing PyTorch and transformers takes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
