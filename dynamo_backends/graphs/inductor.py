"""Compiles an ATen graph with Inductor, for the autotuner.

It uses private parts of ``torch/_inductor/compile_fx.py``, checked with the versions in ``versions.py``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from ..events import count
from .artifacts import Runner
from .fake_tensors import decompositions_as_kernels, fake_tensors_as_kernels
from .pytorch_runner import without_graph

_graph_ids = itertools.count(1_000_000)  # Inductor's start at 0


def compile_with_inductor(module: fx.GraphModule, direction: str) -> Runner:
    """A boxed runner of a functional ATen graph with eager's random numbers and the strides of its fake tensors.

    Inside forward-mode AD, PyTorch runs the graph, because Inductor's kernels lose tangents.

    Args:
        module: the graph, with ``meta["val"]`` on its placeholders; its code becomes boxed.
        direction: ``forward``, ``backward`` or ``inference``.

    Raises:
        Exception: whatever Inductor raises, for instance if there is no C++ compiler.
    """
    compiled = _compiled(module, direction)
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    in_pytorch = without_graph(module)

    def run(args: list[object]) -> object:
        if forward_ad._current_level >= 0:
            count("calls_inside_forward_ad")
            return in_pytorch(args)
        return compiled(args)

    return run


def _compiled(module: fx.GraphModule, direction: str) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import (
        _recursive_joint_graph_passes,
        compile_fx_inner,
        record_original_output_strides,
    )
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
    with _disable_current_modes(), config.patch(fallback_random=True), torch.no_grad():
        with fake_tensors_as_kernels(mode), mode:
            table = decompositions_as_kernels(select_decomp_table())
            graph = make_fx(fx.Interpreter(module).run, decomposition_table=table)(*values)
        output = graph.graph.output_node()
        results = output.args[0]
        assert isinstance(results, (list, tuple))
        output.meta["user_visible_output_idxs"] = [i for i, item in enumerate(results) if isinstance(item, fx.Node)]
        with tracing(TracingContext(mode)), V.set_fake_mode(mode):
            if direction == "inference":
                _recursive_joint_graph_passes(graph)
            record_original_output_strides(graph)
            return compile_fx_inner(
                graph,
                values,
                is_inference=direction == "inference",
                is_backward=direction == "backward",
                graph_id=next(_graph_ids),
            )
