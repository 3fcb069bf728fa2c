"""The functions that a graph was traced from, and whether they are still the same, for graphs that are saved."""

from __future__ import annotations

import ast
import functools
import importlib.util
import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import fx

from .locations import stack


class TracedFunction(NamedTuple):
    """A function of which a node's stack trace has a frame.

    Attributes:
        module: that it is in.
        text: its source.
        number: how often the module's source has this text.
    """

    module: str
    text: str
    number: int


def traced_functions(graph: fx.Graph) -> list[TracedFunction]:
    """The functions in the nodes' stack traces, but PyTorch's; those without a module or source are left out."""
    modules = {file: name for name, item in [*sys.modules.items()] if (file := getattr(item, "__file__", None))}
    frames = {(frame.file, frame.line) for node in graph.nodes for frame in stack(node)}
    found = set()
    for file, line in frames:
        module = modules.get(file, "torch")
        text = "" if module.partition(".")[0] == "torch" else _function_at(file, line)
        if text:
            found.add(TracedFunction(module, text, _source(file).count(text)))
    return sorted(found)


def changed_function(functions: Iterable[TracedFunction]) -> str | None:
    """The module and first line of a function whose source is another today, ``None`` if there is none.

    A module that is not found is not compared, nor is a function that another ``__main__`` does not have.
    """
    for module, text, number in functions:
        file = _file(module)
        times = number if file is None else _source(file).count(text)
        if times != number and not (module == "__main__" and not times):
            (line, *_) = [line for line in text.splitlines() if not line.lstrip().startswith("@")]
            return f"{module}: {line.strip()}"
    return None


def _file(module: str) -> str | None:
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None else None


def _source(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "".join(linecache.getlines(file))


@functools.cache
def _functions(file: str, source: str) -> list[tuple[int, int]]:
    """The first and last line of each function in a file, inner ones after outer ones."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    defined = [item for item in ast.walk(tree) if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [
        (min([item.lineno, *(each.lineno for each in item.decorator_list)]), item.end_lineno or item.lineno)
        for item in defined
    ]


def _function_at(file: str, line: int) -> str:
    source = _source(file)
    around = [(first, last) for first, last in _functions(file, source) if first <= line <= last]
    return "".join(source.splitlines(keepends=True)[around[-1][0] - 1 : around[-1][1]]) if around else ""
