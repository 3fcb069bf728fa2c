"""A graph as PyTorch runs it, one operator after the other."""

from __future__ import annotations

import torch
from torch import fx

from ..events import count
from .artifacts import Runner, is_operator, without_graph

aten = torch.ops.aten

_CALLED_FASTER = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
}
"""Functions that call the same operators on the same arguments, and read these faster: 1.2 microseconds instead of 2.2
(PyTorch 2.13). They are half to three quarters of the nodes of a training step: 540 of 705 of a BERT of 4 layers."""


def boxed_code(module: fx.GraphModule) -> Runner:
    """A graph as PyTorch runs it, one operator after the other; it takes its arguments boxed."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            node.target = _CALLED_FASTER.get(node.target, node.target)
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    count("nodes_in_pytorch", sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes))
    return without_graph(module)
