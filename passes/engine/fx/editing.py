"""What the passes on FX graphs share: new nodes with their meta, replacement that keeps names, whose memory is whose.

::

    new = call(node, torch.ops.aten.permute.default, (x, [1, 0]))   # stands before node, has node's source line
    if same_tensor(new, node):
        replace(node, new)                                          # and bears its name
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._library.utils import is_impure
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

_OF_ITS_ORIGIN = (
    *("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "original_aten", "from_node", "custom"),
    *("seq_nr", "partitioner_tag", "autograd_backward", "fwd_nn_module_stack", "fwd_source_fn_stack"),
    *("recompute", "ac_graph_id", "has_backward_hook"),
)
"""Keys of a node's ``meta`` that tell where it comes from: source line, module, forward or backward, checkpoint."""


def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node returns, ``None`` if it returns anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def call(
    before: fx.Node, target: Any, args: tuple, kwargs: dict[str, Any] | None = None, *, value: object = None
) -> fx.Node:
    """A new node right before ``before``, with its source line and the like, and ``meta["val"]``.

    Args:
        before: the node it stands before.
        target, args, kwargs: what it calls.
        value: its ``meta["val"]`` where that is known; otherwise the operator is run on fake tensors, which takes about
            a millisecond.

    Raises:
        Exception: whatever the operator raises on these arguments; then the graph is as it was.
    """
    kwargs = kwargs or {}
    if value is None:
        value = fake_result(target, args, kwargs)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = {**origin(before), "val": value}
    return node


def origin(node: fx.Node) -> dict[str, Any]:
    """What a node's ``meta`` says of where it comes from: source line, module, operator, forward or backward."""
    return {key: node.meta[key] for key in _OF_ITS_ORIGIN if key in node.meta}


def fake_result(target: Any, args: tuple, kwargs: dict[str, Any]) -> object:
    """What an operator returns for the fake tensors of its arguments."""
    values = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = detect_fake_mode(_leaves(values)) or FakeTensorMode()
    fake_args, fake_kwargs = torch.utils._pytree.tree_map(
        lambda item: (
            mode.from_tensor(item, static_shapes=True)
            if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor)
            else item
        ),
        values,
    )
    with mode:
        return target(*fake_args, **fake_kwargs)


def _leaves(values: object) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Puts ``new``, made for this, in the place of ``node``, whose name it takes."""
    node.replace_all_uses_with(new)
    take_name(new, node)


def take_name(new: fx.Node, node: fx.Node) -> None:
    """Erases ``node``, which has no users, and gives its name to ``new``; ``fx.Node._rename`` would find it taken."""
    node.graph.erase_node(node)
    new.name = node.name
    new.graph._graph_namespace._rename_object(new, node.name)


def remove(node: fx.Node, argument: fx.Node) -> None:
    """Takes ``node`` out; its users read ``argument``, which keeps its own name."""
    node.replace_all_uses_with(argument)
    node.graph.erase_node(node)


def erase_unused(nodes: Sequence[fx.Node]) -> None:
    """Erases those of the nodes that nobody reads, the last first."""
    for node in reversed(nodes):
        if not node.users:
            node.graph.erase_node(node)


def known_equal(first: object, second: object) -> bool:
    """Whether two sizes are equal whatever the symbols in them are; symbols get no guards."""
    return type(first) is type(second) is int and first == second or statically_known_true(first == second)


def same_sizes(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(known_equal, first, second))


def same_tensor(first: object, second: object) -> bool:
    """Whether two nodes return tensors, or two values are, of one dtype, device, shape and strides."""
    a, b = (item if isinstance(item, torch.Tensor) else value_of(item) for item in (first, second))
    if a is None or b is None or a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and same_sizes(a.shape, b.shape)
        and same_sizes(a.stride(), b.stride())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def is_view(target: object) -> bool:
    """Whether an ATen operator returns its argument's memory, by its schema."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns)


def viewed(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of, ``None`` if it has memory of its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        return source if viewed(source) is not None else None
    if node.target is aten._unsafe_view.default:  # in fact a view, whatever its schema says
        return source
    return source if is_view(node.target) and node.args and node.args[0] is source else None


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node's result lies in."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


_READS_MEMORY = {aten.as_strided.default, aten.view.dtype}
"""Operators whose result depends on where in memory their argument lies."""


def shared_memory(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that must keep their memory.

    That are the results of the graph and what they are views of, as AOTAutograd counts on results being other tensors
    than inputs and than each other; and what is read as memory (``as_strided``), or written.
    """
    kept: set[fx.Node] = set()
    roots = list(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target in _READS_MEMORY or changes_memory(node) or not isinstance(node.target, torch._ops.OpOverload):
            roots += node.all_input_nodes
    for root in roots:
        memory: fx.Node | None = root
        while memory is not None and memory not in kept:
            kept.add(memory)
            memory = viewed(memory)
    return kept


def changes_memory(node: fx.Node) -> bool:
    """Whether a node is an operator that changes an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_pure(node: fx.Node) -> bool:
    """Whether a node is an operator that only computes: it draws no random numbers, has no side effects, and its
    result's shape and values depend on its arguments alone.

    Of operators of higher order, whose subgraphs may do anything, and of other packages' operators it is not known.
    """
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return _is_pure_operator(node.target)
    return is_python_function(node.target)


@functools.cache
def _is_pure_operator(target: torch._ops.OpOverload) -> bool:
    return target.namespace in ("aten", "prims") and not (
        target in _UNINITIALIZED
        or torch.Tag.nondeterministic_seeded in target.tags
        or torch.Tag.data_dependent_output in target.tags
        or torch.Tag.dynamic_output_shape in target.tags
        or is_impure(target)
    )


def is_python_function(target: object) -> bool:
    """Whether a node's target computes with sizes, or takes one of several results."""
    return getattr(target, "__module__", "") in ("_operator", "operator", "math")


_UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
