"""Tells a function's new definition, by a reloaded module or a notebook cell that runs again, from another function.

A registered name belongs to what registered it first. Its new definition may take its place; anything else may not::

    def fold(module, context): ...      # in the same module under the same name: the new definition
    lambda module, context: 0           # has no name: the new definition if its code is the same
    functools.partial(scale, 2)         # the new definition if the function is, and all that it is given
    make(2)                             # a function of a function: if what it captured is the same, too
"""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path

_DEPTH = 8
"""How far parts of parts are compared; a function may have captured itself."""


def is_defined_again(first: object, second: object) -> bool:
    """Whether the second is the first, or its new definition: a function, or something that is made of functions."""
    try:
        return first is second or bool(_identity(first, _DEPTH) == _identity(second, _DEPTH))
    except (RuntimeError, TypeError, ValueError):  # an array of several elements, for instance
        return False


def described(value: object) -> str:
    """A function's name and where it was written, for a message: ``fold (my_passes.py:12)``; of several, the first."""
    inner, line = _innermost(value), written_at(value)
    name = getattr(inner, "__qualname__", None) or repr(inner)
    return f"{name} ({line})" if line else name


def written_at(value: object) -> str:
    """Where a function was written: ``my_passes.py:12``; of several, the first; ``""`` if that is not told."""
    inner = _innermost(value)
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _innermost(value: object) -> object:
    while isinstance(value, (functools.partial, list, tuple)):
        value = value.func if isinstance(value, functools.partial) else next(iter(value), None)
    return inspect.unwrap(value) if callable(value) else value


def _identity(value: object, depth: int) -> object:
    """What is equal of two definitions of a value."""

    def parts(*items: object) -> tuple[object, ...]:
        return tuple(_identity(item, depth - 1) for item in items) if depth else ()

    if isinstance(value, types.FunctionType):
        code = value.__code__ if value.__name__ == "<lambda>" else None
        captured = parts(_captured(value), value.__defaults__, value.__kwdefaults__)
        return value.__module__, value.__qualname__, code, captured
    if isinstance(value, type):
        return value.__module__, value.__qualname__
    if isinstance(value, (list, tuple)):
        return parts(*value)
    if isinstance(value, dict):
        return tuple(value), parts(*value.values())
    if isinstance(value, functools.partial):
        return parts(value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return parts(value.__func__, getattr(value.__self__, "__dict__", value.__self__))
    if callable(value) and hasattr(value, "__dict__"):
        return parts(type(value), vars(value))
    return value


def _captured(function: types.FunctionType) -> list[object]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # empty while a decorator runs: the function calls itself
            found.append(function)
    return found
