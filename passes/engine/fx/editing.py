"""Functions with which passes change FX graphs: new nodes with their values, and checked replacement.

::

    new = call(node, torch.ops.aten.permute.default, (x, [1, 0]))   # inserted before node, with its source line
    fired += replace(node, new, context)                            # takes the name of node

``replace`` rejects, with a reason that the dump shows, another dtype, device, shape or strides, and shared memory that
may be written. In an inference graph ``neg(neg(x))`` may become ``x``, but not if it is returned: a caller that changes
the result in place would change the input. ``replace`` also calls ``context.allows``. The manager recompiles, erases
unused nodes and lints; a pass need not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._library.utils import is_impure
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree

from ..context import PassContext

aten = torch.ops.aten

_OF_ITS_ORIGIN = (
    *("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "original_aten", "from_node", "custom"),
    *("seq_nr", "partitioner_tag", "autograd_backward", "fwd_nn_module_stack", "fwd_source_fn_stack"),
    *("recompute", "ac_graph_id", "has_backward_hook"),
)
"""Keys of a node's ``meta`` for its origin: source line, module, forward or backward, checkpoint."""


class NotComputable(ValueError):
    """An operator raises an error for the fake tensors of its arguments."""


def value_in(meta: Mapping[str, Any]) -> Any:
    """A node's value in its ``meta``: a fake tensor, a number, several of them, or ``None``."""
    return meta.get("val", meta.get("example_value"))


def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node returns, else ``None``."""
    value = value_in(node.meta) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def call(before: fx.Node, target: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Inserts a call right before a node, with the node's source line; runs it on fake tensors for ``meta["val"]``.

    Raises:
        NotComputable: the operator rejects these arguments; the graph is unchanged.
    """
    kwargs = kwargs or {}
    try:
        value = fake_result(target, args, kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
        raise NotComputable(f"{target}: {str(error).splitlines()[0]}") from error
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = {**origin(before), "val": value}
    return node


def origin(node: fx.Node) -> dict[str, Any]:
    """The part of a node's ``meta`` about its origin: source line, module, operator, forward or backward."""
    return {key: node.meta[key] for key in _OF_ITS_ORIGIN if key in node.meta}


def fake_result(target: Any, args: tuple, kwargs: dict[str, Any]) -> object:
    """The result of an operator for the fake tensors of its arguments, which are nodes or values."""
    values = fx.map_arg((args, kwargs), lambda node: value_in(node.meta))
    modes = (leaf.fake_mode for leaf in _pytree.tree_leaves(values) if isinstance(leaf, FakeTensor))
    mode = next(modes, None) or detect_fake_mode() or FakeTensorMode()

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)

    fake_args, fake_kwargs = _pytree.tree_map_only(torch.Tensor, faked, values)
    with mode:
        return target(*fake_args, **fake_kwargs)


def replace(node: fx.Node, new: fx.Node, context: PassContext) -> bool:
    """Replaces ``node`` by ``new`` for all users if both are equivalent; returns whether it did.

    A new node without users takes the name of ``node``.

    Args:
        node: the node to replace; it is erased.
        new: its replacement, computed before the users of ``node``.
        context: allows the change, and records a rejection.
    """
    return replace_all([(node, new)], context)


def replace_all(
    pairs: Sequence[tuple[fx.Node, fx.Node]],
    context: PassContext,
    *,
    at: fx.Node | None = None,
    strides: bool = True,
) -> bool:
    """``replace`` for several nodes of one match: all of them, or none.

    Args:
        pairs: nodes and their replacements.
        context: allows the change, once for all, and records a rejection.
        at: the node that names the match; by default the first one replaced.
        strides: whether all strides must be equal; else only those of the graph's results other than gradients, whose
            layout autograd sets.
    """
    if not pairs:
        return False
    at = at or pairs[0][0]
    replaced = {node for node, _ in pairs}
    for node, new in pairs:
        reason = _reason_by_value(node, new, strides) or _reason_by_memory(node, new, replaced, context.stage)
        if reason is not None:
            context.record_near_miss(at, reason, matched=1, of=1)
            return drop(new for _, new in pairs)
    if not context.allows(at):
        return drop(new for _, new in pairs)
    for node, new in pairs:
        is_made_for_this = not new.users and not is_input(new)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        if is_made_for_this:  # ``fx.Node._rename`` would find the name taken
            new.name = node.name
            new.graph._graph_namespace._rename_object(new, node.name)
    return True


def drop(nodes: Iterable[fx.Node]) -> bool:
    """Erases new nodes that are not used after all, and their inputs that then have no users; returns ``False``."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if not node._erased and not node.users and is_functional(node):
            waiting += node.all_input_nodes
            node.graph.erase_node(node)
    return False


def _reason_by_value(node: fx.Node, new: fx.Node, strides: bool) -> str | None:
    """Why the value of ``new``, which is inferred if missing, is unlike that of ``node``, or ``None``."""
    if value_in(new.meta) is None and new.op == "call_function":
        new.meta["val"] = fake_result(new.target, new.args, new.kwargs)
    old_value, new_value = value_in(node.meta), value_in(new.meta)
    strides = strides or (is_needed(node) and not is_gradient(node))
    if same_value(old_value, new_value, strides):
        return None
    return f"{new.name} would be {described(new_value)}, {node.name} is {described(old_value)}"


def _reason_by_memory(node: fx.Node, new: fx.Node, replaced: Set[fx.Node], stage: str) -> str | None:
    """Why the memory of ``new`` cannot replace that of ``node``, or ``None``.

    Args:
        node: the node to replace.
        new: its replacement.
        replaced: all nodes replaced with it.
        stage: the stage of the pass.
    """
    if stage == "pre_grad":  # its graphs change tensors in place
        if _is_made_for_this(new) and not _reads_its_own_memory(new) and not _reads_its_own_memory(node):
            return None
        return f"{node.name} may be changed in place before AOTAutograd, and would share other memory"
    is_made_for_this = _is_made_for_this(new)
    if not is_made_for_this and any(user.op == "output" for user in node.users):
        return "it is a result of the graph, which must have memory of its own"
    old_memory, new_memory = owner(node), owner(new)
    if old_memory is new_memory:
        return None
    if is_made_for_this:
        if not is_needed(node) or (not is_input(old_memory) and not is_needed(old_memory, replaced)):
            return None
        return f"it shares memory with {old_memory.name}, which is returned, written, or read through its strides"
    if is_needed(node):
        return f"its memory is returned, written, or read through its strides; it cannot be that of {new_memory.name}"
    if stage == "joint" and (is_input(new_memory) or is_needed(new_memory)):
        return f"the memory of {new_memory.name} is an input's or a result's, which may change before the backward"
    if any(view in written_nodes(user) for view in _views_of(new_memory) for user in view.users):
        return f"the memory of {new_memory.name} is written"
    return None


def _is_made_for_this(new: fx.Node) -> bool:
    """Whether a node has no users yet, and only the nodes that compute it read its memory."""
    if new.users or is_input(new):
        return False
    while (source := viewed(new)) is not None:
        if is_input(source) or len(source.users) > 1:
            return False
        new = source
    return True


def _reads_its_own_memory(node: fx.Node) -> bool:
    """Whether a node's fake result shares memory with an argument, or that is not known."""
    value = value_of(node)
    if value is None or node.op not in ("call_function", "call_method"):
        return True
    arguments = (value_of(item) for item in node.all_input_nodes)
    return any(item is not None and storage_of(item) == storage_of(value) for item in arguments)


def storage_of(value: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return int(value.untyped_storage()._cdata)


def _views_of(memory: fx.Node, without: Set[fx.Node] = frozenset()) -> Iterator[fx.Node]:
    """A node and all direct and indirect views of it, without some nodes and their views."""
    waiting = [memory]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [user for user in node.users if user not in without and viewed(user) is node]


def is_needed(memory: fx.Node, without: Set[fx.Node] = frozenset()) -> bool:
    """Whether a node or a view of it is returned, written, or read through its strides.

    Args:
        memory: the node.
        without: nodes to ignore, because they are replaced.
    """
    if memory in without:
        return False
    return any(_needs_memory(user, view) for view in _views_of(memory, without) for user in view.users)


def _needs_memory(user: fx.Node, view: fx.Node) -> bool:
    if user.op != "call_function":
        return True
    if user.target is operator.getitem:
        return False
    if not isinstance(user.target, torch._ops.OpOverload) or user.target in _READS_MEMORY:
        return True
    return view in written_nodes(user)


def known_equal(first: object, second: object) -> bool:
    """Whether two sizes are equal for all values of their symbols; adds no guards."""
    return statically_known_true(first == second)


def same_sizes(first: Sequence[object], second: Sequence[object]) -> bool:
    return len(first) == len(second) and all(map(known_equal, first, second))


def same_value(first: object, second: object, strides: bool = True) -> bool:
    """Whether tensors have equal dtype, device and shape, and equal strides where sizes are above 1.

    Lists and tuples are compared item by item. Of other values only the kind is compared.

    Args:
        first, second: the values.
        strides: whether strides are compared.
    """
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _same_tensors(first, second, strides)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(
            same_value(one, other, strides) for one, other in zip(first, second, strict=True)
        )
    return isinstance(first, torch.Tensor) == isinstance(second, torch.Tensor) and (first is None) == (second is None)


def _same_tensors(first: torch.Tensor, second: torch.Tensor, strides: bool) -> bool:
    if first.layout is not second.layout or first.dtype != second.dtype or first.device != second.device:
        return False
    if not same_sizes(first.shape, second.shape):
        return False
    if first.layout is not torch.strided:
        return True
    if first.is_conj() != second.is_conj() or first.is_neg() != second.is_neg():
        return False
    if not strides or any(known_equal(size, 0) for size in first.shape):
        return True
    both = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(one, other) for size, one, other in both)


def described(value: object) -> str:
    """A value for a message: dtype, shape, device unless CPU, strides unless row-major."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if not isinstance(value, torch.Tensor):
        return "nothing known" if value is None else str(value)
    text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.device.type != "cpu":
        text += f" on {value.device}"
    if value.layout is not torch.strided:
        return f"{text} ({value.layout})"
    is_row_major = same_sizes(value.stride(), make_contiguous_strides_for(value.shape))
    return text + ("" if is_row_major else f" with strides {list(value.stride())}")


_UNMARKED_VIEWS = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
"""Views whose schemas do not declare the alias."""


def is_view(target: object) -> bool:
    """Whether an ATen operator returns a view of an argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _UNMARKED_VIEWS or any(
        result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns
    )


def viewed(node: fx.Node) -> fx.Node | None:
    """The node that ``node`` is a view of, ``None`` if it has its own memory."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        return source if viewed(source) is not None else None
    return source if is_view(node.target) and node.args and node.args[0] is source else None


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory a node's result shares, maybe the node itself."""
    while (source := viewed(node)) is not None:
        node = source
    return node


def is_gradient(node: fx.Node) -> bool:
    """Whether AOTAutograd marks a node as part of the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


_READS_MEMORY = {aten.as_strided.default, aten.view.dtype}
"""Operators that read memory through its strides."""


def changes_memory(node: fx.Node) -> bool:
    """Whether a node's operator writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_by(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that its operator writes to, by name; nodes or values."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return {}
    given = {item.name: value for item, value in zip(target._schema.arguments, args, strict=False)} | dict(kwargs)
    return {
        item.name: given[item.name]
        for item in target._schema.arguments
        if item.alias_info is not None and item.alias_info.is_write and item.name in given
    }


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node's operator writes to."""
    written = _pytree.tree_leaves(written_by(node.target, node.args, node.kwargs))
    return [item for item in written if isinstance(item, fx.Node)]


def is_functional(node: fx.Node) -> bool:
    """Whether a node's operator, of any package, neither draws random numbers nor writes to an argument."""
    if is_python_function(node.target):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def is_pure(node: fx.Node) -> bool:
    """Whether a node's result depends on its arguments alone, without random numbers, side effects, or a shape that
    depends on data. ``False`` for higher-order operators and operators of other packages.
    """
    if node.op != "call_function":
        return False
    return is_python_function(node.target) or (
        isinstance(node.target, torch._ops.OpOverload) and _is_pure_operator(node.target)
    )


@functools.cache
def _is_pure_operator(target: torch._ops.OpOverload) -> bool:
    return target.namespace in ("aten", "prims") and not (
        target in UNINITIALIZED
        or torch.Tag.nondeterministic_seeded in target.tags
        or torch.Tag.data_dependent_output in target.tags
        or torch.Tag.dynamic_output_shape in target.tags
        or is_impure(target)
    )


def is_python_function(target: object) -> bool:
    """Whether a target is a function of ``operator`` or ``math``: size arithmetic, or ``getitem``."""
    return getattr(target, "__module__", "") in ("_operator", "operator", "math")


UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""Operators that return memory without initializing it."""
