"""PyTorch's function and dispatch modes for the tools. Their private parts are used only here.

A tool is on the mode stack of each thread that started it. While a compiled function is traced, the modes pass all
calls through: Dynamo compiles as without the tool, and the compiled graphs are observed when they run.

Only the dispatch mode sees what runs inside ``backward()``, such as the second forward of a checkpoint: PyTorch
disables function modes inside a function that one of them sees.

PyTorch passes a call of a user's ``autograd.Function`` to no mode. ``Function.apply`` calls the next ``apply`` of its
method resolution order. While a tool is on, ours comes before PyTorch's there, and passes the call to function modes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _is_torch_function_mode_enabled,
    _pop_mode,
    _push_mode,
    handle_torch_function,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..common import operator_watchers
from ..common.operator_watchers import watchers_disabled

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], object]
"""Takes a function, its arguments and keyword arguments; calls it and returns its result."""


def _apply(cls: Any, *args: Any) -> Any:
    """``Function.apply`` while a tool is on."""
    modes = _get_current_function_mode_stack() if _is_torch_function_mode_enabled() else []
    is_of_pytorch = cls.__module__.startswith("torch.")  # a compiled graph, a checkpoint: not an operator
    if not is_of_pytorch and any(isinstance(mode, _FunctionMode) for mode in modes):
        return handle_torch_function(cls.apply, (), *args)
    return super(_SingleLevelFunction, cls).apply(*args)


class _FunctionMode(TorchFunctionMode):
    _lock = threading.Lock()
    _active = 0  # in all threads

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __enter__(self) -> Any:
        with _FunctionMode._lock:
            _FunctionMode._active += 1
            _SingleLevelFunction.apply = classmethod(_apply)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        with _FunctionMode._lock:
            _FunctionMode._active -= 1
            if not _FunctionMode._active:
                del _SingleLevelFunction.apply

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if torch.compiler.is_compiling():  # Dynamo evaluates this while tracing
            return func(*args, **(kwargs or {}))
        return self._handler(func, tuple(args), kwargs or {})


class _DispatchMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if torch._guards.CompileContext.current_compile_id() is not None:
            return func(*args, **(kwargs or {}))
        return self._handler(func, tuple(args), kwargs or {})


class InstalledMode:
    """A handler on this thread's mode stack, from its construction until ``remove``; for the levels see ``OpTool``."""

    def __init__(self, handler: Handler, level: str) -> None:
        self._mode = _FunctionMode(handler) if level == "torch" else _DispatchMode(handler)
        self._mode.__enter__()
        self._watcher = operator_watchers.add(handler)

    def remove(self) -> None:
        """Removes it from any position of the stack, in the thread that made it.

        Raises:
            RuntimeError: the handler is running.
        """
        stack: Callable[[], Sequence[object]] = _python_dispatch._get_current_dispatch_mode_stack
        pop: Callable[[], Any] = _python_dispatch._pop_mode
        push: Callable[[Any], object] = _python_dispatch._push_mode
        if isinstance(self._mode, TorchFunctionMode):
            stack, pop, push = _get_current_function_mode_stack, _pop_mode, _push_mode
        if not any(mode is self._mode for mode in stack()):
            raise RuntimeError(
                "a tool cannot be stopped inside an operator that it sees, such as in a hook of backward(). "
                "Stop it after the call."
            )
        operator_watchers.remove(self._watcher)
        above = []
        while stack()[-1] is not self._mode:
            above.append(pop())
        self._mode.__exit__(None, None, None)
        for mode in reversed(above):
            push(mode)


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode AD is active. A tool must not compute with their tensors:
    PyTorch 2.13 crashes where tensors with tangents are written to."""
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context for a tool's own computation: without modes, autograd, autocast and inference mode."""
    with watchers_disabled(), torch._C._DisableAutocast(), torch.inference_mode(False), torch.no_grad():
        yield
