"""Properties of a graph that its placement depends on: its identity, its writes, its random numbers, its dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from passes.engine.fx.editing import changes_memory

from ..graphs.in_place import is_write_back
from ..graphs.operators import is_collective
from ..numerics.randomness import is_random

_KNOWN_LIBRARIES = frozenset({"aten", "prims", "dynamo_backends"})
"""Libraries whose operators declare their side effects."""


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with its own nodes; attributes and fake tensors are shared."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    assert output is not None
    results, original = output
    graph.output(results).meta = dict(original.meta)
    return fx.GraphModule(module, graph)


def describe_frame(module: fx.GraphModule, arguments: Sequence[object]) -> str:
    """Identifies one of Dynamo's graphs for timing: by its code, the types of its arguments, and autocasting."""
    code = [part.code for part in module.modules() if isinstance(part, fx.GraphModule)]
    autocast = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else ""
    return "\n".join([*code, autocast, *map(_describe_argument, arguments)])


def _describe_argument(arg: object) -> str:
    if not isinstance(arg, torch.Tensor):
        return str(type(arg))
    strides = [str(stride) for stride in arg.stride()] if arg.layout is torch.strided else arg.layout
    return f"{arg.dtype} {arg.device} {[str(size) for size in arg.shape]} {strides} {arg.requires_grad}"


def written_arguments(module: fx.GraphModule) -> list[int] | None:
    """Positions of the arguments that a graph writes to; ``None`` if it writes to anything else."""
    placeholders = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = []
    for node in filter(changes_memory, module.graph.nodes):
        if not is_write_back(node):
            return None
        written.append(placeholders[node.args[0]])
    return written


def may_run_twice(module: fx.GraphModule) -> bool:
    """Whether a graph has no side effects but writes to arguments and random numbers of the CPU, whose generator the
    autotuner restores. Operators of unknown libraries may have some: they may count calls, or draw numbers."""
    for node in module.graph.nodes:
        if node.op == "call_module" or (
            node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
        ):
            return False
        if is_collective(node.target) or (_may_draw(node) and not _is_on_cpu(node)):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) or is_write_back(node):
            continue
        if node.target.namespace not in _KNOWN_LIBRARIES or node.is_impure(impure_random=False):
            return False
    return True


def draws(module: fx.GraphModule) -> bool:
    """Whether a graph may draw random numbers."""
    return any(map(_may_draw, module.graph.nodes))


def _may_draw(node: fx.Node) -> bool:
    """Operators of other libraries count: few are marked as random."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in ("aten", "prims") or is_random(node.target)


def _is_on_cpu(node: fx.Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor))


def symbolic_arguments(module: fx.GraphModule) -> list[int]:
    """Positions of the tensors with symbolic sizes."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return [
        i
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
    ]
