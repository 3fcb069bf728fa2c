"""The arguments of a call in one order, however the user passes them, so that each is fed to its own input.

``torch.export`` gives each tensor of the example call an input, in the order in which pytree flattens the call. Later
calls must have the same structure.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
"""Positional and keyword arguments."""


def ordered(module: torch.nn.Module, call: Call) -> Call:
    """The same call with arguments in the order of the signature of ``module.forward``, positional where possible.

    Raises:
        TypeError: the module cannot be called so.
    """
    bound = inspect.signature(module.forward).bind(*call[0], **call[1])
    return bound.args, bound.kwargs


def like(module: torch.nn.Module, call: Call, example: Call) -> Call:
    """The call ``ordered``, with the same arguments as an example; the example's structure, and other tensors.

    Arguments that are missing have their defaults, and others that have their defaults are left out.

    Raises:
        TypeError: the module cannot be called so, or the structure is another one.
        ValueError: an argument that is no tensor, and so a constant of the file, has another value.
    """
    signature = inspect.signature(module.forward)
    bound, wanted = signature.bind(*call[0], **call[1]), signature.bind(*example[0], **example[1])
    bound.apply_defaults()
    for name, value in list(bound.arguments.items()):
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD and name in wanted.arguments:
            bound.arguments[name] = {key: value[key] for key in wanted.arguments[name] if key in value} | value
        if name not in wanted.arguments:
            if value is not parameter.default and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise TypeError(f"the model was exported without the argument {name}")
            del bound.arguments[name]
    found: Call = bound.args, bound.kwargs
    (leaves, structure), (known, expected) = (pytree.tree_flatten_with_path(item) for item in (found, example))
    if structure != expected:
        raise TypeError("the arguments have another structure than in the export: other dicts, lists or their lengths")
    for (path, leaf), (_, constant) in zip(leaves, known, strict=True):
        if not isinstance(constant, torch.Tensor) and not isinstance(leaf, torch.Tensor) and leaf != constant:
            where = pytree.keystr(path)
            raise ValueError(f"argument {where} is {leaf!r}, and {constant!r} is a constant of the file")
    return found


def without_sharing(module: torch.nn.Module, call: Call) -> Call:
    """The call with copies of tensors that it passes twice, or that are the module's own.

    ``torch.export`` makes one input, or none, of the same tensor.
    """
    known = {id(item) for item in (*module.parameters(), *module.buffers())}
    leaves, structure = pytree.tree_flatten(call)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.detach().clone() if id(leaf) in known else leaf
            known.add(id(leaf))
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result
