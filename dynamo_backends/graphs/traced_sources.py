"""Records the functions that a saved graph was traced from, and detects changed source.

A function is compared by its syntax tree, so comments and other lines may change. Of a line outside functions, as in a
lambda of a module, the whole statement is compared.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import fx

from .locations import stack

_Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class TracedFunction(NamedTuple):
    """A function of which a node's stack trace has a frame.

    Attributes:
        module: that it is in; a script's is its file's name.
        name: in the module, as ``Block.forward``; ``""`` for a statement outside functions.
        digest: of its syntax tree.
    """

    module: str
    name: str
    digest: str


def traced_functions(graph: fx.Graph) -> list[TracedFunction]:
    """The functions in the nodes' stack traces, but PyTorch's; those without a module or source are left out."""
    modules = {file: name for name, item in [*sys.modules.items()] if (file := getattr(item, "__file__", None))}
    lines = collections.defaultdict(set)
    for node in graph.nodes:
        for frame in stack(node):
            lines[frame.file].add(frame.line)
    found: set[TracedFunction] = set()
    for file, numbers in lines.items():
        module = modules.get(file, "torch")
        if module in ("__main__", "__mp_main__"):  # the second is multiprocessing's name of the first
            module = Path(file).stem
        if module.partition(".")[0] != "torch":
            defined = [*_defined(_source(module))]
            for line in numbers:
                around = [item for item in defined if item[0] <= line <= item[1]]
                found.update(TracedFunction(module, name, digest) for _, _, name, digest in around[-1:])
    return sorted(found)


def changed_function(functions: Iterable[TracedFunction]) -> str | None:
    """The module and name of a function whose source is another today, ``None`` if there is none.

    Modules whose source is not found are not compared.
    """
    by_module = collections.defaultdict(list)
    for function in functions:
        by_module[function.module].append(function)
    for module, traced in by_module.items():
        source = _source(module)
        today = {(name, digest) for _, _, name, digest in _defined(source)} if source else set()
        for function in traced if source else ():
            if (function.name, function.digest) not in today:
                return f"{module}.{function.name}" if function.name else f"a statement of {module}"
    return None


def _source(module: str) -> str:
    """A module's source; ``""`` if it has none. The module is not imported, but the packages that it is in are."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is not None and Path(main).stem == module:
        return Path(main).read_text(encoding="utf-8", errors="replace")
    try:
        spec = importlib.util.find_spec(module)
        return getattr(spec.loader, "get_source", lambda name: "")(module) or "" if spec is not None else ""
    except (ImportError, ValueError, OSError):
        return ""


def _defined(source: str) -> Iterator[tuple[int, int, str, str]]:
    """First and last line, name and digest of each statement outside functions, then of each function."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    waiting: list[tuple[str, ast.AST]] = [("", item) for item in tree.body]
    functions = []
    for prefix, item in waiting:  # grows
        name = prefix
        if isinstance(item, _Defined):
            name = f"{prefix}.{item.name}".lstrip(".")
            if not isinstance(item, ast.ClassDef):
                functions.append((name, item))
        elif not prefix:
            yield _described("", item)
        waiting += [(name, child) for child in ast.iter_child_nodes(item) if isinstance(child, ast.stmt)]
    for name, function in functions:
        yield _described(name, function)


def _described(name: str, item: ast.AST) -> tuple[int, int, str, str]:
    first = min([item.lineno, *(each.lineno for each in getattr(item, "decorator_list", ()))])  # type: ignore[attr-defined]
    digest = hashlib.blake2b(ast.dump(item).encode(), digest_size=16).hexdigest()
    return first, item.end_lineno, name, digest  # type: ignore[attr-defined]
