"""The one module that touches private parts of Dynamo and AOTAutograd.

Written against PyTorch 2.13, ``torch/_functorch``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, ViewBaseAOTInput
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.manager import PassManager

from .observer import Runner
from .options import parse_options
from .pass_target import pass_target
from .regions import Support
from .verification import synthetic

_GRAPH_NAME = re.compile(r"__(?P<id>\d+)_(?P<direction>forward|backward|inference)")


def graph_being_compiled() -> tuple[str, str]:
    """AOTAutograd's number of the graph it is compiling, the same for a forward and its backward, and the direction."""
    match = _GRAPH_NAME.search(get_aot_graph_name())
    return (match["id"], match["direction"]) if match else ("", "inference")


def is_recompile() -> bool:
    """Whether Dynamo is compiling a frame again because a guard of an earlier compile failed."""
    compile_id = CompileContext.current_compile_id()
    return bool(compile_id is not None and compile_id.frame_compile_id)


def real_arguments(module: fx.GraphModule, arguments: Sequence[object]) -> list[object]:
    """Real values for the placeholders of one of AOTAutograd's graphs, from those of Dynamo's graph.

    Args:
        module: the joint graph.
        arguments: what Dynamo's graph is called with.

    Returns:
        One value for each placeholder. What Dynamo's graph does not take, such as the gradients of the results, is made
        up: random numbers of the right shape, dtype and strides.
    """
    with _disable_current_modes():  # AOTAutograd's fake mode
        return [_real_argument(node, arguments) for node in module.graph.find_nodes(op="placeholder")]


def _real_argument(node: fx.Node, arguments: Sequence[object]) -> object:
    descriptor = node.meta.get("desc")
    if isinstance(descriptor, PlainAOTInput):
        return arguments[descriptor.idx]
    if isinstance(descriptor, ViewBaseAOTInput) and isinstance(descriptor.base_of, PlainAOTInput):
        view = arguments[descriptor.base_of.idx]
        if isinstance(view, torch.Tensor) and view._base is not None:
            return view._base
    return synthetic(node.meta["val"])


def min_cut_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's min-cut partitioner: the forward and the backward graph of a joint graph.

    Views are recomputed in the backward rather than handed over: there they cost nothing, and the runtime folds a
    transposition into the product that reads it.

    Equal subexpressions are the pass ``joint.common_subexpressions``'s to merge: the partitioner of PyTorch 2.13 merges
    two equal ``randn_like``, ``randint_like`` or ``exponential`` too (its list of random operators lacks them).
    """
    with functorch_config.patch(recompute_views=True, cse=False):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def boxed(runner: Runner) -> Runner:
    """Marks a callable as taking its arguments in one list, which AOTAutograd then does not keep alive."""

    def run(args: list[object]) -> object:
        return runner(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def partition_joint_graph(
    joint: fx.GraphModule, inputs: object, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The stage ``joint`` for ``aot_autograd(partition_fn=...)``: our joint passes, then PyTorch's min-cut partitioner.

    Args:
        joint: forward and backward in one graph; changed in place by the passes.
        inputs: the joint graph's inputs.
        **kwargs: what AOTAutograd passes on, ``num_fwd_outputs`` among it.

    Returns:
        The forward and the backward graph.
    """
    options = parse_options()
    target = pass_target(options, Support(options.opset, options.providers))
    PassManager(options.passes, target).run("joint", joint)
    return min_cut_partition(joint, inputs, **kwargs)
