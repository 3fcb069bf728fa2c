"""Renews objects in forked processes: locks, files and threads of the parent cannot be used there.

::

    class Session:
        def __init__(self):
            renew_in_children(self)

        def renew_in_child(self):
            self._threads = []  # those of the parent are not here

``Lock`` is a lock that is free in a forked child. It is of ``passes``, which imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol

from passes.engine.locks import Lock

__all__ = ["Lock", "Renewable", "never_free", "renew_in_children"]


class Renewable(Protocol):
    """An object with state that belongs to one process."""

    def renew_in_child(self) -> None:
        """Called first in a forked process, where no other thread runs."""
        ...


_items: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(item: Renewable) -> None:
    """Registers an object whose ``renew_in_child`` is called in each forked process, while the object lives."""
    _items.add(item)


def never_free(item: object) -> None:
    """Never frees an object of the parent whose destructor would wait for threads that do not exist here."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _renew() -> None:
    for item in list(_items):
        item.renew_in_child()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew)
