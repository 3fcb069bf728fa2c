"""The user's names of the arguments of Dynamo's graphs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from .dynamo_frames import translator, wrapped_function
from .locations import UserName, set_user_name
from .static_inputs import is_static, lifted_attributes


def argument_names(module: fx.GraphModule) -> list[UserName]:
    """The user's names of a Dynamo graph's arguments, without lifted attributes; also sets them on its placeholders."""
    placeholders = module.graph.find_nodes(op="placeholder")
    names = _names(placeholders, lifted_attributes(module))
    for node, name in zip(placeholders, names, strict=True):
        set_user_name(node, name)
    return names


def argument_names_of_frame() -> list[UserName]:
    """``argument_names`` of the graph that Dynamo is compiling in this thread; empty outside of Dynamo."""
    frame = translator()
    return _names(frame.output.graph.find_nodes(op="placeholder")) if frame is not None else []


def _names(placeholders: Iterable[fx.Node], others: Iterable[str] = ()) -> list[UserName]:
    """The names of placeholders, made unique: an input may have the name of a parameter."""
    taken = set(others)
    found = []
    for i, node in enumerate(placeholders):
        text = _source_of(node)
        for other in (f"self.{text}", f"{text} ({i})"):
            if text and text in taken:
                text = other
        taken.add(text)
        found.append(UserName(text, is_static(node)))
    return found


_SOURCE_REWRITES = (
    (r"dict\(type\((.*?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2"),  # an attribute of a class
    (r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1"),
    (r"\.__(?:dict|kwdefaults)__\['(\w+)'\]", r".\1"),
    (r"\.__(?:self|func)__\b|\.__closure__\[\d+\]\.cell_contents", ""),
    (r"^G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", ".")),
    (r"^[LG]\['([^']*)'\]", r"\1"),
    (r"^kwargs\['(\w+)'\]", r"\1"),
    (r"^(?:__main__|self)\.", ""),
)
"""Regular expressions and replacements that make the user's name from Dynamo's, in this order."""


def _source_of(placeholder: fx.Node) -> str:
    """The user's name of an argument, from Dynamo's: a path from ``L`` or ``G``, the frame's locals and globals::

        L['self']._modules['fc']._parameters['weight']    fc.weight
        L['model'].scale                                  model.scale
        G['batch']['ids']                                 batch['ids']
        G['__import_package_dot_module'].scale            package.module.scale

    An item of ``*args`` or ``**kwargs`` of Dynamo's own wrapper has the wrapped function's name of the parameter.
    """
    source = getattr(placeholder, "_dynamo_source", None)  # set last; the other is gone for ``aot_compile``
    source = source or getattr(placeholder.meta.get("grapharg"), "source", None)
    text = str(source.name) if source is not None else ""
    for pattern, replacement in _SOURCE_REWRITES:
        text = re.sub(pattern, replacement, text)
    frame = translator()
    wrapped = wrapped_function(frame) if frame is not None else None
    if wrapped is None:
        return text
    if by_position := re.match(r"args\[(\d+)\]", text):
        positional = dict(enumerate(_positional_parameters(wrapped)))
        return positional.get(int(by_position[1]), by_position[0]) + text[by_position.end() :]
    return re.sub(r"^fn\.(?:func\.|keywords\['(\w+)'\])?", r"\1", text)


def _positional_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of positional parameters; empty if the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return []
    return [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
