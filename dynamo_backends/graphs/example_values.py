"""Makes real example values from fake ones, if the real arguments are unknown.

Kernels run on them in this process, so they must be valid. Floating-point and boolean tensors are: no kernel addresses
memory by their content. An integer tensor has elements (as of ``roll``), or indices, or bytes that only another kernel
can write, such as a workspace. The schemas of ATen have one type for these, but the arguments' names tell them apart.
``tests/strides_sweep.py`` reads the names from PyTorch's operator database: an argument to which it passes
floating-point tensors has elements, whatever their dtype; one to which it passes only integers of 32 or 64 bits has
indices. To any other an integer tensor is opaque, and the operator does not run on example values.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .descriptors import argument_of, number_of_lifted, part_of, viewing_argument, whole_of
from .layout import hint_of, memory_extent

_SEED = 0
"""All processes make equal values."""

_ONE_BASED = {"pivots", "LU_pivots"}
"""Indices as LAPACK counts them: 0 is the row in front of the matrix."""


@functools.cache
def _argument_names() -> dict[str, frozenset[str]]:
    """The names of arguments with elements and of those with indices."""
    text = (importlib.resources.files(__package__) / "argument_names.json").read_text(encoding="utf-8")
    return {kind: frozenset(names) for kind, names in json.loads(text).items()}


def synthetic(value: object, integer: int = 0) -> object:
    """A real tensor like a fake one, of normal random numbers or of ``integer``; the hint of a symbolic number."""
    if not isinstance(value, torch.Tensor):
        return hint_of(value)
    memory = torch.full((memory_extent(value),), integer, dtype=value.dtype, device=value.device)
    if value.is_floating_point():  # fills the memory, because an expanded tensor cannot be written
        memory.normal_(generator=torch.Generator(value.device).manual_seed(_SEED))
    return memory.as_strided([hint_of(size) for size in value.shape], [hint_of(stride) for stride in value.stride()])


def valid_integers(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any], results: object = None
) -> list[int | None] | None:
    """An integer for each leaf of an operator's arguments that is valid as the only content of this tensor.

    Args:
        target: the operator. If it is not one of ATen's, the names of its arguments tell nothing.
        args, kwargs: its arguments, with fake tensors.
        results: its fake results.

    Returns:
        ``None`` for a leaf of which any content is valid. ``None`` altogether if an integer tensor is opaque, or if
        there are indices, and a tensor that they may be indices of is empty.
    """
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return [None] * len(leaves)
    names = [argument.name for argument in target._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    named = [(name, leaf) for name, value in given for leaf in pytree.tree_leaves(value)]
    integers = {name for name, leaf in named if _is_integer(leaf)}
    indices = integers & _argument_names()["indices"]
    if not integers <= indices | _argument_names()["elements"]:
        return None
    indexed = [leaf for name, leaf in named if name not in indices]
    if indices and any(map(_is_empty, (*indexed, *pytree.tree_leaves(results)))):
        return None
    return [int(name in _ONE_BASED) if name in indices and _is_integer(leaf) else None for name, leaf in named]


def valid_indices(node: fx.Node) -> dict[fx.Node, int] | None:
    """``valid_integers`` of a node with ``meta["val"]``, by the arguments that are indices."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    integers = valid_integers(node.target, args, kwargs, node.meta.get("val"))
    if integers is None:
        return None
    leaves = zip(pytree.tree_leaves((node.args, node.kwargs)), integers, strict=True)
    return {leaf: integer for leaf, integer in leaves if isinstance(leaf, fx.Node) and integer is not None}


def _is_integer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and 0 in map(hint_of, value.shape)


def real_arguments(module: fx.GraphModule, arguments: Sequence[object] | None) -> list[object] | None:
    """Real values for the placeholders of a joint graph, from the ``arguments`` of Dynamo's graph.

    Other values, such as gradients of results, are ``synthetic``; all are if ``arguments`` is ``None``. The result is
    ``None`` if no synthetic integers are valid for an operator that reads them.
    """
    nodes = list(module.graph.find_nodes(op="placeholder"))
    with _disable_current_modes():  # AOTAutograd's fake mode
        known = _known_arguments(nodes, arguments) if arguments is not None else {}
        indices = {node: [valid_indices(user) for user in node.users] for node in nodes if node not in known}
        if any(None in found for found in indices.values()):
            return None
        for node, found in indices.items():
            known[node] = synthetic(node.meta["val"], max((item.get(node, 0) for item in found if item), default=0))
    return [known[node] for node in nodes]


def _known_arguments(nodes: Sequence[fx.Node], arguments: Sequence[object]) -> dict[fx.Node, object]:
    known, lifted = {}, number_of_lifted()
    for node in nodes:
        descriptor = node.meta.get("desc")
        argument, view = argument_of(descriptor), viewing_argument(descriptor)
        if isinstance(argument, int):
            known[node] = part_of(arguments[lifted + argument], whole_of(descriptor)[1])
        elif view is not None and getattr(arguments[lifted + view], "_base", None) is not None:
            known[node] = arguments[lifted + view]._base  # type: ignore[attr-defined]
    return known
