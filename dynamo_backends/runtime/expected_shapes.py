"""The shapes that eager's results have, for the shapes of a call's arguments.

A size is a number, or where it is symbolic a Python expression of symbols, as text: ``"s0"``, ``"2*s0 + 1"``. What a
symbol is in a call is read off the arguments.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from types import CodeType
from typing import TypeAlias

import torch

Size: TypeAlias = "int | str"
Argument: TypeAlias = "torch.Tensor | int | bool"


class Sizes:
    """Where the arguments of a call say what each symbolic size is.

    Args:
        arguments: for each argument the sizes of its dimensions; for one that is a number itself, that number as a
            single size; ``None`` where nothing is known.
    """

    def __init__(self, arguments: Sequence[Sequence[Size] | None]) -> None:
        sources: dict[str, tuple[int, int]] = {}
        for i, sizes in enumerate(arguments):
            for dim, size in enumerate(sizes or ()):
                if isinstance(size, str):
                    sources.setdefault(size, (i, dim))
        self._sources = list(sources.items())

    def of(self, args: Sequence[Argument]) -> tuple[int, ...]:
        """The sizes that tell two calls apart, each once; ``()`` if none is symbolic."""
        return tuple([_size(args[i], dim) for _, (i, dim) in self._sources])

    def known(self, values: Sequence[int]) -> dict[str, int]:
        """From each symbolic size to its value; ``values`` is what ``of`` returned."""
        return {size: value for (size, _), value in zip(self._sources, values, strict=True)}


def _size(arg: Argument, dim: int) -> int:
    return arg.shape[dim] if isinstance(arg, torch.Tensor) else arg


def differs(actual: Sequence[int], expected: Sequence[Size], known: dict[str, int]) -> bool:
    """Whether a result's shape is another than eager's.

    Args:
        actual: the shape.
        expected: eager's sizes.
        known: the values of symbolic sizes. A size that does not follow from them (the number of nonzero elements) is
            taken from ``actual`` and put in here, so that all results agree on it.
    """
    if len(actual) != len(expected):
        return True
    return any(_value(size, number, known) != number for number, size in zip(actual, expected, strict=True))


def follow(sizes: Sequence[Size] | None, known: dict[str, int]) -> bool:
    """Whether sizes are known before the call, where ``known`` has those of the arguments."""
    return sizes is not None and all(isinstance(size, int) or _follows(size, known) for size in sizes)


def _follows(size: str, known: dict[str, int]) -> bool:
    try:
        eval(_compiled(size), _FUNCTIONS, known)
    except NameError:
        return False
    return True


def _value(size: Size, actual: int, known: dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size not in known:
        try:
            known[size] = int(eval(_compiled(size), _FUNCTIONS, known))
        except NameError:  # a symbol that no argument tells
            known[size] = actual
    return known[size]


_FUNCTIONS: dict[str, object] = {
    "__builtins__": {},
    **{function.__name__: function for function in (abs, float, int, max, min, round)},
    "math": math,
    "torch": types.SimpleNamespace(
        sym_float=float, sym_int=int, sym_max=max, sym_min=min, sym_sum=sum, _sym_sqrt=math.sqrt
    ),
}
"""What the text of a size may call: that is how PyTorch prints one, see ``PythonPrinter`` of ``torch.utils._sympy``."""


@functools.lru_cache(maxsize=10_000)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<size>", "eval")


def written(shape: Sequence[Size], known: dict[str, int]) -> str:
    """A shape for people, symbolic sizes with their values: ``(s0=2, 3)``."""
    sizes = [str(size) if isinstance(size, int) else f"{size}={known.get(size, '?')}" for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
