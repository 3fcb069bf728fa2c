"""Splits a joint graph into forward and backward by PyTorch's min-cut partitioner, and corrects what it saves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch._functorch import config

from passes.engine.fx.editing import call, is_input, owner

from ..common.safety_net import never_fails
from .descriptors import changed_arguments
from .fake_tensors import correct_statistics
from .in_place import write_backs


def min_cut_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into forward and backward.

    Views are recomputed in the backward instead of saved: they cost nothing there, and ONNX Runtime fuses a
    transposition into the matrix product that reads it.
    """
    correct_statistics(joint)
    with config.patch(recompute_views=True):
        return plain_partition(joint, inputs, **kwargs)


def plain_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's partitioner alone, for use if ``min_cut_partition`` failed.

    Its common-subexpression elimination is off, because in PyTorch 2.13 it merges two equal ``randn_like``,
    ``randint_like`` or ``exponential`` (fixed in 2.14). The pass ``joint.common_subexpressions`` does it instead.
    """
    # Imported lazily: a process that loads a saved graph partitions none, and it imports networkx.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def backward_may_run_twice() -> contextlib.AbstractContextManager[object]:
    """Until the context ends, AOTAutograd does not refuse a backward that keeps what it read: with dynamic sizes it was
    compiled before, to run once. No graph of ours writes into what it reads."""
    context: contextlib.AbstractContextManager[object] = config.patch(donated_buffer=False)
    return context


@never_fails("saving copies of changed arguments", "A backward may read their new values", lambda: None)
def save_copies_of_changed_arguments(forward: fx.GraphModule) -> None:
    """Makes a forward graph save a copy of each argument that the function changes in place; changes the graph.

    The new value is written into the argument at the end of the forward, or after it. The min-cut partitioner of
    PyTorch 2.13 ignores that and saves the argument itself, or a view of it. The backward then reads the new value, and
    gradients are silently wrong, also with Inductor; or autograd raises that a saved tensor was modified.
    """
    output = forward.graph.output_node()
    later = changed_arguments(forward)
    changed = {node for node in forward.graph.find_nodes(op="placeholder") if node.meta.get("desc") in later}
    changed |= {argument for argument, _, _ in write_backs(forward)}
    saved = [node for node in output.all_input_nodes if owner(node) in changed]
    for node in saved:
        after = next(item for item in forward.graph.nodes if item.op != "placeholder") if is_input(node) else node.next
        output.replace_input_with(node, call(after, torch.ops.aten.clone.default, (node,)))
    if saved:
        forward.recompile()
