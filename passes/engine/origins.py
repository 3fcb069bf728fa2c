"""Tells a function's new definition, by a reloaded module or a notebook cell that runs again, from another function.

A registered name belongs to what registered it first. Its new definition may take its place; anything else may not::

    def fold(module, context): ...      # in the same module under the same name: the new definition
    lambda module, context: 0           # has no name: the new definition if its code is the same
    functools.partial(scale, 2)         # the new definition if the function is, and all that it is given
    make(2)                             # two functions of one ``def``: the same if what they captured is
"""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path


def is_defined_again(first: object, second: object) -> bool:
    """Whether the second is the first, or its new definition: a function, or something that is made of functions."""
    return _is_again(first, second, set())


def described(value: object) -> str:
    """A function's name and where it was written, for a message: ``fold (my_passes.py:12)``; of several, the first."""
    while isinstance(value, (functools.partial, list, tuple)):
        value = value.func if isinstance(value, functools.partial) else next(iter(value), None)
    inner = inspect.unwrap(value) if callable(value) else value
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    name = getattr(inner, "__qualname__", None) or repr(inner)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _is_again(first: object, second: object, seen: set[tuple[int, int]]) -> bool:
    if first is second or (id(first), id(second)) in seen:
        return True
    seen.add((id(first), id(second)))  # a function may have captured itself
    if isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType):
        if first.__code__ is second.__code__:  # one ``def``, executed twice
            return _is_again(_captured(first), _captured(second), seen)
        return _name(first) == _name(second) and (first.__name__ != "<lambda>" or first.__code__ == second.__code__)
    if type(first) is not type(second):
        return _name(type(first)) == _name(type(second))  # of a class that is defined again
    ours, theirs = _parts(first), _parts(second)
    if ours is None or theirs is None:
        try:
            return bool(first == second)
        except (RuntimeError, TypeError, ValueError):  # an array of several elements, for instance
            return False
    return len(ours) == len(theirs) and all(_is_again(*pair, seen) for pair in zip(ours, theirs, strict=True))


def _name(value: type | types.FunctionType) -> tuple[str, str]:
    return value.__module__, value.__qualname__


def _captured(function: types.FunctionType) -> list[object]:
    """What two functions of one ``def`` differ in."""
    return [
        _name(function),
        [_content(cell, function) for cell in function.__closure__ or ()],
        function.__defaults__,
        function.__kwdefaults__,
    ]


def _content(cell: types.CellType, function: types.FunctionType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty while a decorator runs: the function calls itself
        return function


def _parts(value: object) -> list[object] | None:
    """What a value is made of; ``None`` if it is compared as a whole."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, getattr(value.__self__, "__dict__", value.__self__)]
    if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        return [vars(value)]
    return None
