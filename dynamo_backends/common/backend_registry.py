"""Lets several threads compile first at the same time: PyTorch's registry of backends has no lock.

``lookup_backend`` loads the entry point of a name that is not registered yet, and registers what it loaded. If another
thread did so meanwhile, that is an ``AssertionError: duplicate name`` (PyTorch 2.13 to 2.15). Importing our backends
takes a second, so that threads which compile first at the same time nearly always fail. After ``allow_repetition``, a
backend may be registered again under its name.

``backends`` calls it while it is imported, before any thread gets a function to register. By then, these threads hold
``register_backend`` already. So its code is replaced, and not its name.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.backends import registry

from passes.engine.locks import Lock

from .safety_net import never_fails

Backend = Callable[..., Any]

_lock = Lock()


@never_fails("PyTorch's registry", "Threads that compile first at the same time may fail", lambda: None)
def allow_repetition() -> None:
    """Makes registering a backend again under its name return the backend, in all threads."""
    function = registry.register_backend
    code = function.__code__
    if code.co_varnames[: code.co_argcount] != ("compiler_fn", "name", "tags") or code.co_freevars:
        return  # of another PyTorch
    if not hasattr(function, "__wrapped__"):
        original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        function.__wrapped__ = original
    function.__code__ = _code_in_the_registry.__code__


def _code_in_the_registry(
    compiler_fn: Backend | None = None, name: str | None = None, tags: Sequence[str] = ()
) -> Backend:
    from dynamo_backends.common.backend_registry import register_once  # not a global where this code runs

    return register_once(compiler_fn, name, tags)


def register_once(compiler_fn: Backend | None, name: str | None, tags: Sequence[str]) -> Backend:
    """As PyTorch's ``register_backend``, but a function that has the name already is no error."""
    with _lock:
        if compiler_fn is not None and name is not None and registry._COMPILER_FNS.get(name) is compiler_fn:
            return compiler_fn
        return registry.register_backend.__wrapped__(compiler_fn, name, tags)
