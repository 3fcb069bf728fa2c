"""Removes operators that return their argument.

Rule: ``y = f(x)`` becomes ``y = x`` for

1. ``detach`` and ``alias``, after AOTAutograd, where autograd is over;
2. ``lift_fresh``, which only marks a constant.

Not if ``y`` is a result of the graph: AOTAutograd counts on that being another tensor than ``x``.
"""

from __future__ import annotations

import torch
from torch import fx

from ..context import PassContext
from ..registry import Pass

_NOOPS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
}


def remove_noops(module: fx.GraphModule, context: PassContext) -> int:
    """Removes no-ops in place; returns how many."""
    results = set(module.graph.output_node().all_input_nodes)
    fired = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _NOOPS and node not in results and context.allows(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            fired += 1
    if fired:
        module.recompile()
    return fired


PASS = Pass("post_grad.remove_noops", "Removes operators that return their argument, such as detach.", remove_noops)
