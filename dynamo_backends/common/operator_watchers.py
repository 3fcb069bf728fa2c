"""Who watches the operators of this thread: what our backends run that PyTorch's modes cannot see is told here.

A region on ONNX Runtime is one call. While somebody watches, it is given to the watcher as PyTorch's modes give an
operator to theirs: the watcher makes the call, and those before it see it then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Watcher = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], object]


class _Watchers(threading.local):
    def __init__(self) -> None:
        self.stack: tuple[Watcher, ...] = ()


_watchers = _Watchers()
is_watched = False
"""Whether any thread ever watched since the start of the process; read before the slower question."""


def add(watcher: Watcher) -> Watcher:
    """Adds a watcher to this thread; returns it."""
    global is_watched
    is_watched = True
    _watchers.stack = (*_watchers.stack, watcher)
    return watcher


def remove(watcher: Watcher) -> None:
    """Removes a watcher of this thread."""
    _watchers.stack = tuple(item for item in _watchers.stack if item is not watcher)


def watch_this_thread() -> bool:
    """Whether this thread has watchers that were not told yet."""
    return bool(_watchers.stack)


@contextlib.contextmanager
def unseen(*, while_compiling: bool = False) -> Iterator[None]:
    """No watcher, and none of PyTorch's modes, sees what is computed; nothing else is different.

    Args:
        while_compiling: for what traces graphs with FX, whose proxies need ``__torch_function__``: modes of functions
            stay.
    """
    stack, _watchers.stack = _watchers.stack, ()
    try:
        with contextlib.ExitStack() as entered:
            if not while_compiling:
                entered.enter_context(torch._C.DisableTorchFunction())
            entered.enter_context(_disable_current_modes())
            yield
    finally:
        _watchers.stack = stack


def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Gives a call to this thread's last watcher; inside, those before it are left to be told.

    Args:
        function: asks ``watch_this_thread`` when it is called, and comes here again if there are more.
        args: of the call.
    """
    stack = _watchers.stack
    _watchers.stack = stack[:-1]
    try:
        return stack[-1](function, args, {})
    finally:
        _watchers.stack = stack
