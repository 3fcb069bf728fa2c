"""Where an FX node comes from in the user's code: the ``nn.Module`` path and ``file:line``."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str:
    """``path/to/model.py:17`` of the innermost user frame, or ``""``.

    Backward nodes carry the line of the forward operator they are the gradient of.
    """
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    frames = _FRAME.findall(trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def module_path(node: fx.Node) -> str:
    """``layers.0.mlp.up_proj``, the path of the module that called the operator, or ``""``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]|^L__\w+?__", "", path)  # Dynamo's name of the root module
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")
