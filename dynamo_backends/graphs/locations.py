"""Finds where an FX node comes from in the user's code: source lines, ``nn.Module`` path, user's name of an input.

A node's *source line* is the innermost frame in a user's file: not PyTorch's, not of the standard library, and not
installed. ``where`` formats it for tables, verdicts and errors, with the library's line that it leads to.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
import sysconfig
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

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

_MAX_NODES_SEARCHED = 32
"""In a search for the nearest node with a stack trace."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame of a node's stack trace.

    Attributes:
        file, line: where.
        function: the name of the function.
        code: the text of the line, without indentation.
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
    """The frames of a node's stack trace, outermost first; empty if there are none.

    A backward node has the trace of its forward operator. A node without a trace gets that of the nearest node that it
    is computed from, or else of the nearest node that uses it.
    """
    trace = _trace(node)
    if not trace and node.op not in ("placeholder", "get_attr", "output"):
        trace = _nearest(node, lambda item: item.all_input_nodes) or _nearest(node, lambda item: list(item.users))
    return frames_of(trace)


def frames_of(trace: str) -> list[Frame]:
    """The frames of a stack trace as PyTorch writes it, outermost first."""
    return list(_frames(trace))


@functools.lru_cache(256)  # nodes of one line, and their rows, are read one after the other
def _frames(trace: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(found["file"], int(found["line"]), function_name(found["function"] or ""), (found["code"] or "").strip())
        for found in _FRAME.finditer(trace)
    )


def _trace(node: fx.Node) -> str:
    return node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""


def _nearest(node: fx.Node, following: Callable[[fx.Node], Sequence[fx.Node]]) -> str:
    """The trace of the nearest node with one; breadth-first, ``following`` gives the neighbours."""
    seen, reached = {node}, collections.deque([node])
    while reached and len(seen) < _MAX_NODES_SEARCHED:
        for item in following(reached.popleft()):
            if _trace(item):
                return _trace(item)
            if item not in seen and item.op != "output":
                seen.add(item)
                reached.append(item)
    return ""


def source_frame(node: fx.Node) -> Frame | None:
    """The innermost frame in a user's file; the innermost of all if there is none."""
    return _source_of(stack(node))


def _source_of(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if frame.user), frames[-1] if frames else None)


def source_line(node: fx.Node) -> str:
    """``path/to/model.py:17`` of ``source_frame``, or ``""``."""
    frame = source_frame(node)
    return str(frame) if frame is not None else ""


def where(node: fx.Node) -> str:
    """``location_text`` of a node."""
    frames = stack(node)
    return location_text(source_line(node), str(frames[-1]) if frames else "")


def line_of_layer(node: fx.Node) -> str:
    """As ``where``, but of the innermost frame outside PyTorch and torchao: the line that called the layer."""
    return line_of_layer_in(stack(node))


def line_of_layer_in(frames: Sequence[Frame]) -> str:
    """``line_of_layer`` of frames."""
    outside = [frame for frame in frames if frame.user or not short_file(frame.file).startswith(("torch/", "torchao/"))]
    source = _source_of(outside)
    return location_text(str(source), str(outside[-1])) if source is not None else ""


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in the order of its arguments, with repetitions."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]


class Place(NamedTuple):
    """Where a node is: its name, its ``where``, and its ``module_path``."""

    name: str
    source: str
    module: str


def place_of(node: fx.Node, replaced: fx.Node | None = None) -> Place:
    """The place of a node; if it has no source line or no module, those of the node that it replaces."""
    nodes = (node,) if replaced is None else (node, replaced)
    sources, modules = filter(None, map(where, nodes)), filter(None, map(module_path, nodes))
    return Place(node.name, next(sources, ""), next(modules, ""))


def changed_nodes(before: fx.Node, after: fx.Node, names: Container[str]) -> tuple[fx.Node, fx.Node]:
    """What a pass changed, if ``after`` has another value than ``before``: the node replaced, and the new node.

    It is the first node added by the pass that ``after`` reads; else ``after``.

    Args:
        before, after: nodes of the graph before and after the pass, of the same name or the same result.
        names: those of the nodes before the pass.
    """
    pairs = zip(operands(before), operands(after), strict=False)
    added = ((old, new) for old, new in pairs if new.name not in names and before.target == after.target)
    return next(added, (before, after))  # another operator under the same name is what was changed


def location_text(source: str, innermost: str) -> str:
    """A location for people: ``model.py:17`` in a user's file, else
    ``transformers/models/bert/modeling_bert.py:9, called from model.py:17``; ``""`` if it is unknown.

    Args:
        source: the source line.
        innermost: the line of the innermost frame, or ``""``.
    """
    return source if not innermost or innermost == source else f"{innermost}, called from {source}"


def prepend_call(module: fx.GraphModule, frame: Frame) -> None:
    """Adds a frame as the outermost to the stack traces of a Dynamo graph; AOTAutograd copies them to its graphs."""
    text = f'  File "{frame.file}", line {frame.line}, in {frame.function}\n    {frame.code}\n'
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            node.meta["stack_trace"] = text + (node.meta.get("stack_trace") or "")  # none for calls into PyTorch


def short_file(file: str) -> str:
    """A path for people: ``transformers/models/bert/modeling_bert.py`` for an installed file, relative to the working
    folder for a file in it, else unchanged."""
    return _short_file(file, working_folder())


def working_folder() -> str:
    """The working folder; ``""`` if it was removed."""
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
    """A function's name as the user wrote it; Dynamo renames a function that it resumes after a graph break."""
    resumed = _RESUMED.fullmatch(name)
    return resumed["function"] if resumed else name


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file is the user's code."""
    if file.startswith("<"):  # not a file; only typed code is the user's, not generated code
        return file.startswith(("<stdin>", "<string>", "<ipython"))
    path = os.path.abspath(file)
    return not _INSTALLED.match(path) and not path.startswith(_library_folders())


@functools.cache
def is_of_pytorch_or_ours(file: str) -> bool:
    """Whether a file belongs to PyTorch or to this package, rather than to the model or a library it comes from."""
    folders = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.abspath(file).startswith(tuple(os.path.join(folder, "") for folder in folders))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(torch.__file__)}
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in found)


def module_path(node: fx.Node) -> str:
    """The path of the module that called the operator, ``layers.0.mlp.up_proj``; ``""`` if there is none."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not modules:
        return ""
    path = list(modules.values())[-1][0]
    path = _ROOT.sub("", path)
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")


@dataclasses.dataclass(frozen=True)
class UserName:
    """The user's name of an argument of a graph.

    Attributes:
        text: ``encoder.layer.0.weight``, ``input_ids``; ``""`` if there is none.
        is_static: whether it is a parameter, a buffer or another tensor that a module holds.
    """

    text: str
    is_static: bool = False


def set_user_name(node: fx.Node, name: UserName) -> None:
    """Sets the user's name of a placeholder."""
    node.meta[_USER_NAME] = name


def user_name(node: fx.Node, *, static_only: bool = False) -> str:
    """The user's name of a placeholder; ``""`` if there is none, or if it is not static but ``static_only`` is set."""
    name: UserName | None = node.meta.get(_USER_NAME) if node.op == "placeholder" else None
    return name.text if name is not None and (name.is_static or not static_only) else ""
