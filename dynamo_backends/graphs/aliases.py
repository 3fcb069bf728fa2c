"""Finds nodes that depend on shared memory, which ONNX values do not have, and marks those that must run in PyTorch.

A region returns each result in new memory. But after ``y = x + 1; return y, y.t()``, an in-place change of one result
must change the other. So returned views run in PyTorch if they share memory with an input or another result. This also
saves copies: a forward graph returns many views of weights and activations.
"""

from __future__ import annotations

import collections

import torch
from torch import fx

from passes.engine.fx.editing import owner, same_value, viewed

from ..errors import Kind, Reason
from .in_place import write_backs
from .layout import Layout, layout_of

aten = torch.ops.aten

SHARED_MEMORY = Reason(Kind.SHARED_MEMORY, "its result shares memory with an input or another result")

IN_PYTORCH = "in_pytorch"
"""Key in a node's ``meta``: the ``Reason`` why the node must run in PyTorch."""

_UNKNOWN_MEMORY = Reason(Kind.UNKNOWN_SHAPE, "it may read memory outside of its argument")


def separate_returned_views(module: fx.GraphModule) -> int:
    """Marks returned views that share memory with ``IN_PYTORCH``, in place; returns how many.

    Those of an argument's new value become views of the argument, after the value was copied into it. AOTAutograd makes
    the view that eager returns; if sizes are symbolic, by the strides and the offset in memory of the graph's result.

    If other nodes use a view too, only a copy of it is marked, so that no region is split. Before and after::

        y = add(x, 1); t = transpose(y, 0, 1); s = sin(t);                            return y, t, s
        y = add(x, 1); t = transpose(y, 0, 1); s = sin(t); t_1 = transpose(y, 0, 1);  return y, t_1, s
    """
    output = module.graph.output_node()
    returned = list(output.all_input_nodes)
    written = {
        new: copy for argument, new, copy in write_backs(module) if same_value(argument.meta["val"], new.meta["val"])
    }
    sharing = collections.Counter(owner(node) for node in returned)
    separated: dict[fx.Node, fx.Node] = {}

    def separate(node: fx.Node) -> fx.Node:
        """Marks a view, or a copy of it, and all views that it is a view of; returns the marked node."""
        source = viewed(node)
        if source is None:
            return written.get(node, node)
        if node not in separated:
            result = node
            if any(user is not output and user not in own for user in node.users):
                with module.graph.inserting_after(node):
                    result = module.graph.node_copy(node)
            own.add(result)
            result.meta[IN_PYTORCH] = SHARED_MEMORY
            separated[node] = result
            result.replace_input_with(source, separate(source))
        return separated[node]

    own: set[fx.Node] = set()
    for node in reversed(returned):
        root = owner(node)
        if root is not node and (sharing[root] > 1 or root in written or root.op in ("placeholder", "get_attr")):
            output.replace_input_with(node, separate(node))
    for node in separated:  # in this order, a view comes before its source
        if not node.users:
            module.graph.erase_node(node)
    for view in reversed(separated.values()):
        if owner(view) in written.values():  # it was before the copy
            output.prepend(view)
    if own:
        module.graph.lint()
        module.recompile()
    return len(own)


def read_memory_of_owners(module: fx.GraphModule) -> int:
    """Makes ``as_strided`` read the owner of its argument's memory, in place; returns how many nodes changed.

    ``as_strided`` addresses memory, but ONNX values have no memory layout. So its argument must be the whole memory, in
    its order. Before and after, where ``x`` is computed and row-major::

        t: f32[3, 2] = transpose(x, 0, 1); y: f32[2, 2] = as_strided(t, [2, 2], [1, 1])
        y: f32[2, 2] = as_strided(x, [2, 2], [1, 1], 0)

    The node is marked with ``IN_PYTORCH`` if the memory is that of an input, which may be a view of a larger tensor, if
    it has gaps, an offset or symbolic strides, or if the owner has another dtype.
    """
    changed = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        source, root = node.args[0], owner(node)
        offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        offset = source.meta["val"].storage_offset() if offset is None else offset
        value = root.meta.get("val")
        is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        layout = layout_of(value) if is_strided else Layout(is_symbolic=True)
        if (
            root.op != "call_function"
            or layout.strides is not None
            or layout.is_symbolic
            or value.dtype != source.meta["val"].dtype
            or value.storage_offset() != 0
            or not isinstance(offset, (int, fx.Node))
        ):
            node.meta[IN_PYTORCH] = _UNKNOWN_MEMORY
            continue
        memory = root
        if layout.permutation is not None:
            with module.graph.inserting_before(node):
                memory = module.graph.call_function(aten.permute.default, (root, list(layout.permutation)))
            memory.meta.update(source.meta, val=value.permute(layout.permutation))
        if memory is not source:
            node.args, node.kwargs = (memory, *node.args[1:3], offset), {}
            changed += 1
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()
    return changed
