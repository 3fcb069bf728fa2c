"""Tells whether a function is the new definition of another one, or a different function.

A registered name belongs to what was registered first. A reloaded module or a notebook cell that runs again defines
the same function again, which may replace the first; a different function may not::

    def fold(module, context): ...      # same module and qualified name
    lambda module, context: 0           # a lambda or a local function: same code and captured values as well
    functools.partial(scale, 2)         # same function and arguments
"""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path


def is_defined_again(first: object, second: object) -> bool:
    """Whether the second is the first, or its new definition: a function, or something that is made of functions."""
    try:
        return first is second or bool(_identity(first) == _identity(second))
    except (RuntimeError, TypeError, ValueError):  # an array of several elements, for instance
        return False


def described(value: object) -> str:
    """A function's name and where it was written, for a message: ``fold (my_passes.py:12)``; of several, the first."""
    function, line = _innermost(value), written_at(value)
    name = getattr(function, "__qualname__", None) or repr(function)
    return f"{name} ({line})" if line else name


def written_at(value: object) -> str:
    """Where a function was written, ``my_passes.py:12``, of several the first; ``""`` if that is not known."""
    file, line = position_of(value)
    return f"{Path(file).name}:{line}" if file else ""


def position_of(value: object) -> tuple[str, int]:
    """The file a function was written in, as Python knows it, and the line; ``("", 0)`` if that is not known."""
    function = _innermost(value)
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


def _innermost(value: object) -> object:
    while isinstance(value, (functools.partial, list, tuple)):
        value = value.func if isinstance(value, functools.partial) else next(iter(value), None)
    return inspect.unwrap(value) if callable(value) else value


def _identity(value: object, parents: tuple[int, ...] = ()) -> object:
    """What two definitions of the same value have in common; a value that contains itself is a number inside."""
    if id(value) in parents:
        return parents.index(id(value))

    def parts(*items: object) -> tuple[object, ...]:
        return tuple(_identity(item, (*parents, id(value))) for item in items)

    if isinstance(value, types.FunctionType):
        is_unique = "<" not in value.__qualname__  # else ``<lambda>``, or a local function
        captured = parts(_captured(value), value.__defaults__, value.__kwdefaults__)
        return value.__module__, value.__qualname__, None if is_unique else _code(value.__code__), captured
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


def _code(code: types.CodeType) -> tuple[object, ...]:
    """What a code object does, wherever in a file it stands."""
    constants = [
        _code(item) if isinstance(item, types.CodeType) else (type(item), repr(item)) for item in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def _captured(function: types.FunctionType) -> list[object]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # empty while a decorator runs: the function calls itself
            found.append(function)
    return found
