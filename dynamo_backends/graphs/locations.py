"""Where an FX node comes from in the user's code: names of parameters and inputs, the ``nn.Module`` path, the lines.

A node's *own line* is that of the innermost frame in the user's files, not that of the library that the user's code
calls: the file is not PyTorch's, not of the standard library, and not installed. ``where`` is how both are said
everywhere: in tables, verdicts, errors and files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
import sysconfig
from collections.abc import Callable, Sequence

import torch
from torch import fx

_USER_NAME = "dynamo_backends_user_name"

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?(?:\n(?! *File ")(?P<code>[^\n]*))?',
    re.MULTILINE,
)
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_ROOT = re.compile(
    r"^L__\w+?__|^L\['fn'\]\.(?:func\b|args\[\d+\]|keywords\['\w+'\])"
    r"|^[LG]\['\w+'\](?:\.__self__|\.__closure__\[\d+\]\.cell_contents|\.__defaults__\[\d+\])*"
)
"""Dynamo's name of the outermost module."""

_MOST_LOOKED_AT = 32
"""Nodes among which the nearest with a line is looked for."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call on the way from the user's call to an operator.

    Attributes:
        file, line: where.
        function: in which function.
        code: the line, without its indent.
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def user(self) -> bool:
        """Whether the file is the user's."""
        return is_user_file(self.file)

    def __str__(self) -> str:
        return f"{short_file(self.file)}:{self.line}"


def stack(node: fx.Node) -> list[Frame]:
    """The calls that led to a node, outermost first; empty where PyTorch noted none.

    Backward nodes have those of the forward operator they are the gradient of. An operator without any has those of the
    nearest one that it is computed of, or else of the nearest that reads it.
    """
    trace = _trace(node)
    if not trace and node.op not in ("placeholder", "get_attr", "output"):
        trace = _nearest(node, lambda item: item.all_input_nodes) or _nearest(node, lambda item: list(item.users))
    return [
        Frame(found["file"], int(found["line"]), function_name(found["function"] or ""), (found["code"] or "").strip())
        for found in _FRAME.finditer(trace)
    ]


def _trace(node: fx.Node) -> str:
    return node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""


def _nearest(node: fx.Node, following: Callable[[fx.Node], Sequence[fx.Node]]) -> str:
    """The trace of the nearest of the nodes that are reached by ``following``."""
    seen, reached = {node}, collections.deque([node])
    while reached and len(seen) < _MOST_LOOKED_AT:
        for item in following(reached.popleft()):
            if _trace(item):
                return _trace(item)
            if item not in seen and item.op != "output":
                seen.add(item)
                reached.append(item)
    return ""


def source_frame(node: fx.Node) -> Frame | None:
    """The innermost frame in the user's own files; the innermost of all if none is."""
    frames = stack(node)
    return next((frame for frame in reversed(frames) if frame.user), frames[-1] if frames else None)


def source_line(node: fx.Node) -> str:
    """``path/to/model.py:17`` of ``source_frame``, or ``""``."""
    frame = source_frame(node)
    return str(frame) if frame is not None else ""


def where(node: fx.Node) -> str:
    """A node's own line, and the library's that it led to if the node is not there; see ``place``."""
    frames = stack(node)
    return place(source_line(node), str(frames[-1]) if frames else "")


def place(source: str, innermost: str) -> str:
    """How a place in the code is said.

    ``model.py:17`` in the user's own file, ``transformers/models/bert/modeling_bert.py:9, called from model.py:17`` in
    a library's; ``""`` where it is not known.

    Args:
        source: the own line.
        innermost: the line of the innermost call, or ``""``.
    """
    return source if not innermost or innermost == source else f"{innermost}, called from {source}"


def set_call(module: fx.GraphModule, frame: Frame) -> None:
    """Notes the user's call of a model for the nodes of one of Dynamo's graphs, none of whose lines is the user's.

    It is the outermost call of each then, in this graph and in what AOTAutograd makes of it.
    """
    text = f'  File "{frame.file}", line {frame.line}, in {frame.function}\n    {frame.code}\n'
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            node.meta["stack_trace"] = text + (node.meta.get("stack_trace") or "")  # PyTorch notes none of its own


def short_file(file: str) -> str:
    """A path as it is said: ``transformers/models/bert/modeling_bert.py`` of what is installed, relative to the working
    folder what is in it, else as it is."""
    return _short_file(file, working_folder())


def working_folder() -> str:
    """The folder that relative paths begin in; ``""`` if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@functools.cache
def _short_file(file: str, folder: str) -> str:
    if file.startswith("<"):
        return file
    path = os.path.abspath(file) if folder else file
    installed = _INSTALLED.match(path)
    if installed:
        return path[installed.end() :]
    roots = [os.path.join(os.path.dirname(item.rstrip(os.sep)), "") for item in _library_folders()]
    if not is_user_file(path):
        root = max((item for item in roots if path.startswith(item)), key=len, default="")
        return path.removeprefix(root)
    return path.removeprefix(os.path.join(folder, "")) if folder else path


def function_name(name: str) -> str:
    """A function's name as the user wrote it: that of the function which Dynamo goes on with after a graph break has
    one of its own."""
    resumed = _RESUMED.fullmatch(name)
    return resumed["function"] if resumed else name


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file is of the user's own code."""
    if file.startswith("<"):  # code that was never in a file; only what a person typed is a user's
        return file.startswith(("<stdin>", "<string>", "<ipython"))
    path = os.path.abspath(file)
    return not _INSTALLED.match(path) and not path.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(torch.__file__)}
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in found)


def module_path(node: fx.Node) -> str:
    """``layers.0.mlp.up_proj``, the path of the module that called the operator, or ``""``."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not modules:
        return ""
    path = list(modules.values())[-1][0]
    path = _ROOT.sub("", path)
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")


@dataclasses.dataclass(frozen=True)
class UserName:
    """What the user calls a value that a graph takes.

    Attributes:
        text: ``encoder.layer.0.weight``, ``input_ids``; ``""`` if it has none.
        is_static: whether it is a parameter, a buffer or another tensor that a module holds.
    """

    text: str
    is_static: bool = False


def set_user_name(node: fx.Node, name: UserName) -> None:
    """Notes what the user calls the value of a placeholder."""
    node.meta[_USER_NAME] = name


def user_name(node: fx.Node, *, static_only: bool = False) -> str:
    """What the user calls the value of a placeholder, or ``""``; ``static_only``: of what a module holds alone."""
    name: UserName | None = node.meta.get(_USER_NAME) if node.op == "placeholder" else None
    return name.text if name is not None and (name.is_static or not static_only) else ""
