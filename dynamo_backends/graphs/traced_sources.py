"""Records the functions that a saved graph was traced from, and detects changed source.

A function is compared by its syntax tree, so comments and other lines may change. Of a line outside functions, as in a
lambda of a module, the whole statement is compared.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import fx

from ..events import count
from .locations import stack

logger = logging.getLogger(__name__)

_Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class TracedModule(NamedTuple):
    """A module of which nodes' stack traces have frames.

    Attributes:
        name: of the module; a script's is its file's name.
        is_script: whether it is the program that was run.
        digest: of its source.
        functions: names, as ``Block.forward``, and digests of the syntax trees of the functions in the traces; the name
            is ``""`` for a statement outside functions.
    """

    name: str
    is_script: bool
    digest: str
    functions: Sequence[Sequence[str]]


def traced_modules(graph: fx.Graph) -> list[TracedModule]:
    """The modules in the nodes' stack traces, but PyTorch's; those without source are left out."""
    modules = {file: name for name, item in [*sys.modules.items()] if (file := getattr(item, "__file__", None))}
    lines = collections.defaultdict(set)
    for node in graph.nodes:
        for frame in stack(node):
            module = modules.get(frame.file, "torch")
            is_script = module in ("__main__", "__mp_main__")  # the second is multiprocessing's name of the first
            lines[Path(frame.file).stem if is_script else module, is_script].add(frame.line)
    found = []
    for (module, is_script), numbers in sorted(lines.items()):
        source = "" if module.partition(".")[0] == "torch" else _source(module)
        functions: set[tuple[str, str]] = set()
        defined = [*_defined(source)]
        for line in numbers:
            around = [(name, digest) for first, last, name, digest in defined if first <= line <= last]
            functions.update(around[-1:])
        if functions:
            found.append(TracedModule(module, is_script, _digest(source), sorted(functions)))
    return found


def changed_function(modules: Iterable[TracedModule]) -> str | None:
    """The module and name of a function whose source is another today, ``None`` if there is none.

    A script is compared with the program that runs if that defines functions of these names, else with the script's
    file. A module whose source is not found is not compared, and a warning says so.
    """
    for module in modules:
        name, source = _today(module)
        if not source:
            logger.warning("the source of %s is not found: whether it has changed is not checked", module.name)
            count("unchecked_sources")
        if not source or _digest(source) == module.digest:
            continue
        today = {(function, digest) for _, _, function, digest in _defined(source)}
        for function, digest in module.functions:
            if (function, digest) not in today:
                return f"{name}.{function}" if function else f"a statement of {name}"
    return None


def _today(module: TracedModule) -> tuple[str, str]:
    """The name and the source of what a module is in this process."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if module.is_script and main is not None:
        source = _source(Path(main).stem)
        if {function for function, _ in module.functions} <= {function for _, _, function, _ in _defined(source)}:
            return Path(main).stem, source
    return module.name, _source(module.name)


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
    return first, item.end_lineno, name, _digest(ast.dump(item))  # type: ignore[attr-defined]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
