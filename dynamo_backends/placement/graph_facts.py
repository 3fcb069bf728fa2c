"""What a graph is and does, as far as its placement depends on it: its description, its writes, its random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..graphs.operators import is_collective

_COPY = torch.ops.aten.copy_.default

_OURS_AND_PYTORCHS = frozenset({"aten", "prims", "dynamo_backends"})
"""Libraries of operators that say what they do besides computing; of others nobody knows."""


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that may be changed while the other stays; they share attributes and fake tensors."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    assert output is not None
    results, original = output
    graph.output(results).meta = dict(original.meta)
    return fx.GraphModule(module, graph)


def describe_frame(module: fx.GraphModule, arguments: Sequence[object]) -> str:
    """What tells a captured graph from others where it is timed: its code, what it is called with, and autocasting.

    Args:
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
    """
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
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            if node.args[0] not in placeholders or node.target is not _COPY:
                return None
            found.append(placeholders[node.args[0]])
    return found


def may_run_twice(module: fx.GraphModule) -> bool:
    """Whether a graph only computes, writes to arguments and draws random numbers on the CPU, whose generator alone
    an autotuner puts back, as far as is known: an operator of another library may count its calls, or draw random
    numbers and not say so."""
    for node in module.graph.nodes:
        if node.op == "call_module" or (
            node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
        ):
            return False
        if is_collective(node.target) or (_may_draw(node) and not _is_on_cpu(node)):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) or node.target is _COPY:
            continue
        if node.target.namespace not in _OURS_AND_PYTORCHS or node.is_impure(impure_random=False):
            return False
    return True


def draws(module: fx.GraphModule) -> bool:
    return any(map(_may_draw, module.graph.nodes))


def _may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers: who writes an operator seldom tells PyTorch that it does."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_torchs = node.target.namespace in ("aten", "prims")
    return not is_torchs or torch.Tag.nondeterministic_seeded in node.target.tags


def _is_on_cpu(node: fx.Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor))


def symbolic_arguments(module: fx.GraphModule) -> list[int]:
    """Positions of the tensors whose sizes change from call to call."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return [
        i
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
    ]


def least_precise(module: fx.GraphModule) -> torch.dtype:
    """The floating-point dtype in which a graph rounds most; float32 or a shorter one."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return max({torch.float32, *dtypes}, key=lambda dtype: torch.finfo(dtype).eps)
