"""``signature``: a hashable key of an FX node. Nodes with equal keys are decomposed and checked once."""

from __future__ import annotations

import operator

import torch
from torch import fx


def signature(node: fx.Node) -> tuple[object, ...]:
    """A node's operator and constants; dtype, layout, device type and shape of its arguments and results; which results
    are read.

    Args:
        node: a call with ``meta["val"]`` on itself and on its arguments.
    """
    positions = {arg: i for i, arg in enumerate(node.all_input_nodes)}

    def describe(arg: object) -> object:
        if isinstance(arg, fx.Node):
            return ("node", positions[arg], _describe_value(arg.meta["val"]))
        if isinstance(arg, (list, tuple)):
            return tuple([describe(item) for item in arg])
        return (type(arg), str(arg))

    kwargs = tuple([(key, describe(arg)) for key, arg in sorted(node.kwargs.items())]) if node.kwargs else ()
    return (node.target, describe(node.args), kwargs, _describe_value(node.meta["val"]), used_results(node))


def used_results(node: fx.Node) -> tuple[int, ...]:
    """The positions of a node's results that are read; all, if it has one, none is read, or one is read otherwise than
    by ``getitem``."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return (0,)
    every = tuple(range(len(value)))
    read = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    known = [index for index in read if isinstance(index, int) and index in every]
    return tuple(sorted(set(known))) if known and len(known) == len(read) else every


def _describe_value(value: object) -> object:
    if isinstance(value, torch.Tensor):
        sizes = tuple([size if type(size) is int else str(size) for size in value.shape])
        return (value.dtype, value.layout, value.device.type, sizes)
    if isinstance(value, (list, tuple)):
        return tuple([_describe_value(item) for item in value])
    return type(value)
