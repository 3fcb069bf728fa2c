"""Removes nodes whose result nobody reads.

Not if they draw random numbers (the next draw must get eager's numbers), have side effects, run a subgraph, or define a
symbolic size.

Needed: what other passes leave behind would be translated and run.
"""

from __future__ import annotations

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import is_python_function
from ..engine.registry import Pass


def remove_unused(module: fx.GraphModule, context: PassContext) -> int:
    """Removes dead nodes in place; returns how many."""
    fired = 0
    for node in reversed(list(module.graph.nodes)):
        if not node.users and _may_go(node) and context.allows(node):
            module.graph.erase_node(node)
            fired += 1
    return fired


def _may_go(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.is_impure() or "unbacked_bindings" in node.meta:
        return False
    return isinstance(node.target, torch._ops.OpOverload) or is_python_function(node.target)


PASS = Pass("post_grad.remove_unused", "Removes nodes whose result nobody reads.", remove_unused, cleans_up=True)
