"""The arguments of a call in one order, however the user passes them, so that each is fed to its own input.

``torch.export`` gives each tensor of the example call an input, in the order in which pytree flattens the call. Later
calls must have the same structure.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
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


def like(module: torch.nn.Module, call: Call, example: Call, inputs: Collection[int]) -> Call:
    """The call ``ordered``, with the same arguments as an example; the example's structure, and other tensors.

    Arguments that are missing have their defaults, and others that have their defaults are left out. ``inputs`` are
    the positions of the leaves that are inputs of the file; the others are constants.

    Raises:
        TypeError: the module cannot be called so, the structure is another one, or an input is no tensor where the
            example's is one, or no number of its type.
        ValueError: an argument that is no tensor, and so a constant of the file, has another value or type.
    """
    signature = inspect.signature(module.forward)
    bound, wanted = signature.bind(*call[0], **call[1]), signature.bind(*example[0], **example[1])
    bound.apply_defaults()
    for name, value in list(bound.arguments.items()):
        parameter = signature.parameters[name]
        if name in wanted.arguments:
            bound.arguments[name] = _in_order(value, wanted.arguments[name])
        if name not in wanted.arguments:
            if not _is_same(value, parameter.default) and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise TypeError(f"the model was exported without the argument {name}")
            del bound.arguments[name]
    found: Call = bound.args, bound.kwargs
    (leaves, structure), (known, expected) = (pytree.tree_flatten_with_path(item) for item in (found, example))
    if structure != expected:
        raise TypeError("the arguments have another structure than in the export: other dicts, lists or their lengths")
    for i, ((path, leaf), (_, constant)) in enumerate(zip(leaves, known, strict=True)):
        name, is_tensor = _name(signature, path), isinstance(leaf, torch.Tensor)
        if i in inputs and not (is_tensor and isinstance(constant, torch.Tensor)) and type(leaf) is not type(constant):
            kinds = [f"a {type(item).__name__}" for item in (leaf, constant)]
            raise TypeError(f"argument {name} is {kinds[0]}, and was {kinds[1]} in the export")
        if i not in inputs and not _is_same(leaf, constant):
            text = "a tensor" if is_tensor else repr(leaf)
            raise ValueError(f"argument {name} is {text}, and {constant!r} is a constant of the file")
    return found


def _is_same(value: Any, constant: Any) -> bool:
    """Whether two values have the same type and value. NaN is the same as NaN, and -0.0 is not the same as 0.0."""
    if value is constant or type(value) is not type(constant):
        return value is constant
    if isinstance(value, (float, complex)):
        return repr(value) == repr(constant)
    return not isinstance(value, torch.Tensor) and bool(value == constant)


def _in_order(value: Any, example: Any) -> Any:
    """A value whose dicts have the order of an example's; other keys come last."""
    if type(value) is dict and type(example) is dict:
        return {key: _in_order(value[key], example[key]) for key in example if key in value} | {
            key: item for key, item in value.items() if key not in example
        }
    if type(value) is type(example) and type(value) in (list, tuple) and len(value) == len(example):
        return type(value)(map(_in_order, value, example))
    return value


def _name(signature: inspect.Signature, path: Sequence[Any]) -> str:
    """The name of an argument, or of a part of it, from its path in a call."""
    kind, argument, *rest = path
    key = argument.key if kind.idx else [*signature.parameters][min(argument.idx, len(signature.parameters) - 1)]
    return f"{key}{pytree.keystr(tuple(rest))}"


def without_sharing(module: torch.nn.Module, call: Call) -> Call:
    """The call with tensors that share the memory, and with copies of those that it passes twice, or that are the
    module's own.

    ``torch.export`` makes one input, or none, of the same tensor, and leaves marks on the tensors that it gets.
    """
    known = {id(item) for item in (*module.parameters(), *module.buffers())}
    leaves, structure = pytree.tree_flatten(call)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.detach().clone() if id(leaf) in known else leaf.detach()
            known.add(id(leaf))
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result
