"""Computes the shapes of eager's results from the shapes of a call's arguments.

A size is a number, or a Python expression of symbols as text: ``"s0"``, ``"2*s0 + 1"``. The values of symbols come
from the arguments.
"""

from __future__ import annotations

import ast
import functools
import math
import types
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TypeAlias

import torch

Size: TypeAlias = "int | str"
Argument: TypeAlias = "torch.Tensor | int | bool"
Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"


class SymbolicSizes:
    """Reads the values of symbolic sizes from the arguments of a call.

    Args:
        arguments: for each argument the sizes of its dimensions; for a number, the number as a single size; ``None``
            if not known.
    """

    def __init__(self, arguments: Sequence[Sequence[Size] | None]) -> None:
        sources: dict[str, tuple[int, int]] = {}
        for i, sizes in enumerate(arguments):
            for dim, size in enumerate(sizes or ()):
                if isinstance(size, str):
                    sources.setdefault(size, (i, dim))
        self._sources = list(sources.items())

    def of(self, args: Sequence[Argument]) -> tuple[int, ...]:
        """The value of each symbolic size in a call; ``()`` if there are none."""
        return tuple([_read_size(args[i], dim) for _, (i, dim) in self._sources])

    def known(self, values: Sequence[int]) -> dict[str, int]:
        """Symbolic sizes with their ``values``, which ``of`` returned."""
        return {size: value for (size, _), value in zip(self._sources, values, strict=True)}

    def shapes(self, results: Sequence[Sequence[Size] | None]) -> Callable[[Sequence[int]], Shapes] | None:
        """A function from the ``values`` that ``of`` returned to the shapes of results.

        ``None`` if the shape of a result does not follow from them, or any is right (``None``). The function evaluates
        all sizes at once, because a model that generates text has new sizes in each call.
        """
        # A size of an argument that is not a symbol, as "2*s0", is known by its text only.
        names = {size: size if size.isidentifier() else f"_{i}" for i, (size, _) in enumerate(self._sources)}
        known = {*names.values(), *_FUNCTIONS}
        shapes = []
        for sizes in results:
            texts = [str(size) if isinstance(size, int) else names.get(size, f"int({size})") for size in sizes or ()]
            if sizes is None or not all(_symbols(text) <= known for text in texts):
                return None
            shapes.append(f"({' '.join(f'{text},' for text in texts)})")
        code = f"lambda {', '.join(names.values())}: ({' '.join(f'{shape},' for shape in shapes)})"
        function = eval(code, dict(_FUNCTIONS))
        return lambda values: function(*values)


def _symbols(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}


def _read_size(arg: Argument, dim: int) -> int:
    return arg if isinstance(arg, int) else arg.size(dim)


def differs(actual: Sequence[int], expected: Sequence[Size], known: dict[str, int]) -> bool:
    """Whether a result's shape differs from eager's.

    Args:
        actual: the shape.
        expected: eager's sizes.
        known: the values of symbolic sizes. A size that does not follow from them (the number of nonzero elements) is
            taken from ``actual`` and added here, so that all results must agree on it.
    """
    if len(actual) != len(expected):
        return True
    for number, size in zip(actual, expected, strict=True):
        value = _value(size, known)
        if value is None:
            known[str(size)] = number
        elif value != number:
            return True
    return False


def _value(size: Size, known: dict[str, int]) -> int | None:
    """The value of a size, which is added to ``known``; ``None`` if a symbol in it is not known."""
    if isinstance(size, int):
        return size
    if size not in known:
        try:
            known[size] = int(eval(_compiled(size), _FUNCTIONS, known))
        except NameError:
            return None
    return known[size]


_FUNCTIONS: dict[str, object] = {
    "__builtins__": {},
    **{function.__name__: function for function in (abs, float, int, max, min, round)},
    "math": math,
    "torch": types.SimpleNamespace(
        sym_float=float, sym_int=int, sym_max=max, sym_min=min, sym_sum=sum, _sym_sqrt=math.sqrt
    ),
}
"""The functions in a size's text, as ``PythonPrinter`` of ``torch.utils._sympy`` prints it."""


@functools.lru_cache(maxsize=10_000)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<size>", "eval")


def format_shape(shape: Sequence[Size], known: dict[str, int]) -> str:
    """A shape as text, symbolic sizes with their values: ``(s0=2, 3)``."""
    sizes = [str(size) if isinstance(size, int) else f"{size}={known.get(size, '?')}" for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
