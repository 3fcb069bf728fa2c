"""What a forked child must not share with its parent: threads, which are not in the child, locks, files.

::

    class Session:
        def __init__(self):
            renew_in_children(self)

        def renew_in_child(self):
            self._lock = threading.Lock()  # a thread that is not here may have held it
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something with a state that belongs to one process."""

    def renew_in_child(self) -> None:
        """Called in a forked child, where no other thread runs, before anything else."""
        ...


_items: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(item: Renewable) -> None:
    """Has ``item.renew_in_child`` called in each child that this process forks, as long as the item lives."""
    _items.add(item)


def never_free(item: object) -> None:
    """Keeps an object of the parent for ever, whose end would wait for threads that are not in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _renew() -> None:
    for item in list(_items):
        item.renew_in_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew)
