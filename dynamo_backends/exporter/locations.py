"""Where an FX node comes from in the user's code: names of parameters and inputs, the ``nn.Module`` path, the lines.

A node's *own line* is that of the innermost frame in the user's files, not that of the library that the user's code
calls: the file is not PyTorch's, not of the standard library, and not installed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sysconfig

import torch
from torch import fx

_USER_NAME = "dynamo_backends_user_name"

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?(?:\n(?! *File ")(?P<code>[^\n]*))?',
    re.MULTILINE,
)
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
    def is_user(self) -> bool:
        """Whether the file is the user's."""
        return is_user_file(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def as_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "user": self.is_user}


def stack(node: fx.Node) -> list[Frame]:
    """The calls that led to a node, outermost first; empty where PyTorch noted none.

    Backward nodes have those of the forward operator they are the gradient of.
    """
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    return [
        Frame(found["file"], int(found["line"]), function_name(found["function"] or ""), (found["code"] or "").strip())
        for found in _FRAME.finditer(trace)
    ]


def source_frame(node: fx.Node) -> Frame | None:
    """The innermost frame in the user's own files; the innermost of all if none is."""
    frames = stack(node)
    return next((frame for frame in reversed(frames) if frame.is_user), frames[-1] if frames else None)


def source_line(node: fx.Node) -> str:
    """``path/to/model.py:17`` of ``source_frame``, or ``""``."""
    frame = source_frame(node)
    return str(frame) if frame is not None else ""


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
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not path.startswith(_library_folders())


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
    path = re.sub(r"^L\['\w+'\]|^L__\w+?__", "", path)  # Dynamo's name of the root module
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


def user_name(node: fx.Node) -> str:
    """What the user calls the value of a placeholder, or ``""``."""
    name: UserName | None = node.meta.get(_USER_NAME) if node.op == "placeholder" else None
    return name.text if name is not None else ""


def weight_name(node: fx.Node) -> str:
    """The user's name of a placeholder that is a parameter or a buffer, or ``""``."""
    name: UserName | None = node.meta.get(_USER_NAME) if node.op == "placeholder" else None
    return name.text if name is not None and name.is_static else ""
