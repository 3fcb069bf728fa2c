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

from .safety_net import caught, never_fails

Backend = Callable[..., Any]

_WHAT = "PyTorch's registry", "Threads that compile first at the same time may fail"


@never_fails(*_WHAT, lambda: None)
def allow_repetition() -> None:
    """Makes registering a backend again under its name return the backend, in all threads."""
    function = registry.register_backend
    code = function.__code__
    if code.co_varnames[: code.co_argcount] != ("compiler_fn", "name", "tags") or code.co_freevars:
        return  # of another PyTorch
    if not hasattr(function, "__wrapped__"):
        original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        function.__wrapped__ = original
    function.after_failure = _after_failure  # the globals of this module are not those of the code
    function.__code__ = _code_in_the_registry.__code__


def _code_in_the_registry(
    compiler_fn: Backend | None = None, name: str | None = None, tags: Sequence[str] = ()
) -> Backend:
    try:
        return register_backend.__wrapped__(compiler_fn, name, tags)  # type: ignore[name-defined] # noqa: F821
    except Exception as error:
        return register_backend.after_failure(error, compiler_fn, name, tags)  # type: ignore[name-defined] # noqa: F821


def _after_failure(error: Exception, compiler_fn: Backend | None, name: str | None, tags: Sequence[str]) -> Backend:
    """The backend, if it is registered under its name already; what PyTorch raises again, if the error was PyTorch's.

    Nothing of ours runs before PyTorch's function succeeded or failed.
    """
    if compiler_fn is not None and name is not None and registry._COMPILER_FNS.get(name) is compiler_fn:
        return compiler_fn
    registered: Backend = registry.register_backend.__wrapped__(compiler_fn, name, tags)
    caught(_WHAT[0], error, _WHAT[1])
    return registered
