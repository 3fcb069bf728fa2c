"""Decomposes operators of an ATen graph that AOTAutograd has already traced."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from passes.engine.fx.editing import origin

from ..graphs.fake_tensors import fake_tensors_as_kernels
from .signature import signature

_Table = Mapping[object, Callable[..., Any]]


def decompose(module: fx.GraphModule, table: _Table) -> int:
    """Replaces nodes by the decompositions of their operators, recursively and in place.

    Args:
        module: a functional ATen graph, with ``meta["val"]`` on every node.
        table: the decompositions by operator. Where one returns ``NotImplemented``, the node stays.

    Returns:
        The number of nodes replaced.
    """
    decompositions: dict[object, fx.GraphModule | None] = {}  # by what decides the trace: equal nodes are traced once
    buffer_names = (f"_of_decomposition_{i}" for i in itertools.count())
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in table:
            continue
        key = (signature(node), *map(_strides, (*node.all_input_nodes, node)))
        if key not in decompositions:
            decompositions[key] = _trace(node, table)
        decomposition = decompositions[key]
        if decomposition is not None:
            _replace(module, node, decomposition, buffer_names)
            count += 1
    if count:
        module.recompile()
    return count


def _strides(node: fx.Node) -> tuple[str, ...]:
    leaves = tree_leaves(node.meta["val"])
    strided = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return tuple([str(leaf.stride()) for leaf in strided])


def _trace(node: fx.Node, table: _Table) -> fx.GraphModule | None:
    """The decomposition of a node as a graph, whose inputs are the node's input nodes; ``None`` if there is none."""
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        by_node = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return node.target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    leaves = tree_leaves((values, node.meta["val"]))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None) or FakeTensorMode()
    with fake_tensors_as_kernels(mode), mode:
        decomposition = make_fx(call, decomposition_table=dict(table))(*values)
    targets = {part.target for part in decomposition.graph.nodes if part.op == "call_function"}
    return None if targets <= {node.target, operator.getitem} else decomposition


def _replace(module: fx.GraphModule, node: fx.Node, decomposition: fx.GraphModule, buffer_names: Iterator[str]) -> None:
    placeholders = decomposition.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, node.all_input_nodes, strict=True))
    provenance = origin(node)
    result: Any = None
    with module.graph.inserting_before(node):
        for part in decomposition.graph.nodes:
            if part.op == "output":
                result = fx.map_arg(part.args[0], copies.__getitem__)
            elif part.op == "get_attr":
                name = next(name for name in buffer_names if not hasattr(module, name))
                module.register_buffer(name, getattr(decomposition, str(part.target)), persistent=False)
                copies[part] = module.graph.get_attr(name)
                copies[part].meta = {**provenance, "val": part.meta.get("val", getattr(module, name))}
            elif part.op != "placeholder":
                copies[part] = module.graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {**provenance, "val": part.meta.get("val")}
    if isinstance(result, (list, tuple)):
        for user in list(node.users):
            assert user.target is operator.getitem
            chosen = result[user.args[1]]
            if isinstance(chosen, fx.Node):
                user.replace_all_uses_with(chosen)
            module.graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    module.graph.erase_node(node)
