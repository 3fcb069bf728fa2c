"""Takes apart the operators of a graph that AOTAutograd left whole."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.engine.fx.editing import origin

from ..graphs.fake_tensors import fake_tensors_as_kernels
from .signature import signature

_Table = Mapping[object, Callable[..., Any]]


def decompose(module: fx.GraphModule, table: _Table) -> int:
    """Replaces, in place, each operator of a functional ATen graph by its decomposition, and those in it by theirs.

    Args:
        module: the graph, with ``meta["val"]`` on every node.
        table: from an operator to a function of its arguments, which may return ``NotImplemented``: it stays.

    Returns:
        How many were replaced.
    """
    traced: dict[object, fx.GraphModule | None] = {}
    names = (f"_of_decomposition_{i}" for i in itertools.count())
    fired = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in table:
            continue
        kind = (signature(node), *map(_layout, (*node.all_input_nodes, node)))
        if kind not in traced:
            traced[kind] = _traced(node, table)
        parts = traced[kind]
        if parts is not None:
            _graft(module, node, parts, names)
            fired += 1
    if fired:
        module.recompile()
    return fired


def _layout(node: fx.Node) -> tuple[str, ...]:
    """How a node's tensors lie in memory: the results of its parts lie accordingly."""
    leaves = torch.utils._pytree.tree_leaves(node.meta["val"])
    strided = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return tuple([str(leaf.stride()) for leaf in strided])


def _traced(node: fx.Node, table: _Table) -> fx.GraphModule | None:
    """The decomposition of a node as a graph of the nodes it reads; ``None`` if there is none."""
    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        by_node = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return node.target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    leaves = torch.utils._pytree.tree_leaves((values, node.meta["val"]))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None) or FakeTensorMode()
    with fake_tensors_as_kernels(mode), mode:
        parts = make_fx(call, decomposition_table=dict(table))(*values)
    computed = {part.target for part in parts.graph.nodes if part.op == "call_function"}
    return None if computed <= {node.target, operator.getitem} else parts


def _graft(module: fx.GraphModule, node: fx.Node, parts: fx.GraphModule, names: Any) -> None:
    copies: dict[fx.Node, Any] = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    about = origin(node)
    result: Any = None
    with module.graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "output":
                result = fx.map_arg(part.args[0], copies.__getitem__)
            elif part.op == "get_attr":
                name = next(name for name in names if not hasattr(module, name))
                module.register_buffer(name, getattr(parts, str(part.target)), persistent=False)
                copies[part] = module.graph.get_attr(name)
                copies[part].meta = {**about, "val": part.meta.get("val", getattr(module, name))}
            elif part.op != "placeholder":
                copies[part] = module.graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {**about, "val": part.meta.get("val")}
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
