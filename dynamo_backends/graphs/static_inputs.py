"""Static inputs: the arguments of a graph that PyTorch expects to be the same tensors in each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch._guards import TracingContext

from .descriptors import argument_of, changed_arguments, number_of_lifted, part_of, whole_of
from .locations import user_name


@dataclasses.dataclass(frozen=True)
class StaticInput:
    """A parameter, buffer or other attribute.

    Attributes:
        name: the user's name, ``encoder.layer.0.weight``.
        value: the tensor; ``None`` if it is unknown before the call.
    """

    name: str
    value: object = None


NO_WEIGHTS: Mapping[int, StaticInput] = MappingProxyType({})
"""For graphs without weights."""


def is_static(placeholder: fx.Node) -> bool:
    """Whether a module holds an argument of a Dynamo graph."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})


def lifted_attributes(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers that are attributes of a Dynamo graph: AOTAutograd's first arguments.

    They are constants, and parameters that an optimizer's step changes. Other parameters are arguments already.
    """
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def weights(module: fx.GraphModule, arguments: Sequence[object]) -> dict[int, StaticInput]:
    """The static inputs of a Dynamo graph by position in ``arguments``: its lifted attributes, then its arguments."""
    lifted = list(lifted_attributes(module))
    found = {i: StaticInput(name, arguments[i]) for i, name in enumerate(lifted)}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder"), start=len(lifted)):
        if is_static(node):
            found[i] = StaticInput(user_name(node) or node.name, arguments[i])
    return found


def at_placeholders(module: fx.GraphModule, weights: Mapping[int, StaticInput]) -> dict[int, StaticInput]:
    """The ``weights`` of Dynamo's graph by position in an AOTAutograd graph, without those that it changes."""
    lifted = number_of_lifted()
    by_argument = {weight.name if i < lifted else i - lifted: weight for i, weight in weights.items()}
    changed = set(map(argument_of, changed_arguments(module)))
    found = {}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        descriptor = node.meta.get("desc")
        argument, (_, path) = argument_of(descriptor), whole_of(descriptor)
        weight = by_argument.get(argument) if argument is not None else None
        if weight is not None and argument not in changed:
            found[i] = StaticInput(".".join((weight.name, *path)), part_of(weight.value, path))
    return found


def static_arguments(module: fx.GraphModule) -> dict[int, StaticInput]:
    """The weights of an AOTAutograd graph by position, without values, if Dynamo's graph is not at hand."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    placeholders = dict(enumerate(module.graph.find_nodes(op="placeholder")))
    changed = set(map(argument_of, changed_arguments(module)))
    found = {}
    for i in metadata.static_input_indices if metadata is not None else []:
        descriptor = placeholders[i].meta.get("desc") if i in placeholders else None
        argument = argument_of(descriptor)
        if isinstance(argument, int) and whole_of(descriptor)[0] is descriptor and argument not in changed:
            found[i] = StaticInput(user_name(placeholders[i]) or placeholders[i].name)
    return found
