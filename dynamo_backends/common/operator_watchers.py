"""Reports calls that PyTorch's modes cannot see, such as a region on ONNX Runtime, to the watchers of this thread.

A watcher gets a call as a PyTorch mode gets an operator: it runs the call and returns the result. While it runs, the
watchers added before it are active, and so on.
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
"""Whether this process ever had a watcher: a fast check before ``has_watchers``."""


def add(watcher: Watcher) -> Watcher:
    """Adds a watcher to this thread; returns it."""
    global is_watched
    is_watched = True
    _watchers.stack = (*_watchers.stack, watcher)
    return watcher


def remove(watcher: Watcher) -> None:
    """Removes a watcher of this thread."""
    _watchers.stack = tuple(item for item in _watchers.stack if item is not watcher)


def has_watchers() -> bool:
    """Whether this thread has active watchers."""
    return bool(_watchers.stack)


@contextlib.contextmanager
def watchers_disabled(*, while_compiling: bool = False) -> Iterator[None]:
    """Disables all watchers and PyTorch's modes.

    Args:
        while_compiling: keep function modes, for code that traces with FX: its proxies need ``__torch_function__``.
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


@contextlib.contextmanager
def transforms_undone() -> Iterator[None]:
    """Undoes what a graph that raised half-way has left: levels of ``torch.func``, and that hooks are disabled."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if is_enabled:
            torch._C._autograd._saved_tensors_hooks_enable()


def without_saved_tensors_hooks() -> contextlib.AbstractContextManager[object]:
    """A context in which the user's hooks of saved tensors do not run. Without such hooks it does nothing:
    ``torch.func`` rejects any."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Passes a call to this thread's last watcher. ``function`` must come here again while watchers are active."""
    stack = _watchers.stack
    _watchers.stack = stack[:-1]
    try:
        return stack[-1](function, args, {})
    finally:
        _watchers.stack = stack
