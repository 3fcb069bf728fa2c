"""Writes to a graph's arguments: which of them write only a part, and may do so in place.

AOTAutograd makes a graph functional, and copies new values of arguments back at its end. For
``cache.index_copy_(2, position, key)``, which writes one row of thousands::

    new = index_put(cache, [None, None, position], key); y = attention(query, new); copy_(cache, new)

A session, and PyTorch, would copy the whole cache twice. If nothing reads the old values after ``new`` is computed, and
``new`` is not returned, the row may be written into the memory of ``cache`` instead: ``copy_`` then finds its source in
its target, and does nothing. Such writes are found here (``mark_partial_writes``). A session writes in place if its
model allows it (``pipeline.emission``), PyTorch if it runs the node (``write_in_place``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes.engine.fx.editing import owner, same_value, value_of, viewed, written_nodes

aten = torch.ops.aten

AFTER = "runs_after"
"""Key in a node's ``meta``: nodes that must run before it, because it overwrites what they read, or because what they
read would be a copy as large as what it overwrites."""

_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_add.default: aten.index_add_.default,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
}
"""Operators that return their first argument with a part of it written, and the same in place."""

_VIEWS = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Operators that return their first argument with their second written into a view of it, and the view."""


_OF_METADATA = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
"""Operators that read no elements."""


def is_write_back(node: fx.Node) -> bool:
    """Whether a node is AOTAutograd's copy of a new value into an argument of the graph."""
    return node.target is aten.copy_.default and isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder"


def write_backs(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """The arguments that a graph copies new values into: the placeholder, the new value and the ``copy_``."""
    for node in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if is_write_back(node) and isinstance(node.args[1], fx.Node):
            yield node.args[0], node.args[1], node


@dataclasses.dataclass(frozen=True)
class PartialWrite:
    """An argument of which a graph writes only parts, and may do so in place.

    Attributes:
        argument: its placeholder.
        writes: the nodes that write, in order: each returns what the one before returned, with a part written.
    """

    argument: fx.Node
    writes: tuple[fx.Node, ...]


def mark_partial_writes(module: fx.GraphModule) -> list[PartialWrite]:
    """Finds the writes that may be in place, and marks them with ``AFTER``.

    The graph's order decides what reads old values, since AOTAutograd keeps the order of the program. A write may be in
    place if

    1. the readers of the old values come before it; neither they nor their views are among its own other arguments;
    2. nothing that it would overwrite or share memory with is returned: a result, or a value saved for the backward;
    3. the argument is written back once, with its own dtype, shape and strides.
    """
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    returned = {owner(node) for node in module.graph.output_node().all_input_nodes}
    written = [node for item in module.graph.nodes for node in written_nodes(item)]
    found = []
    for argument, new, copy in write_backs(module):
        value = value_of(argument)
        if value is None or written.count(argument) > 1 or not same_value(value, value_of(new)):
            continue
        chain: list[fx.Node] = []
        while new is not argument and (new.target in _IN_PLACE or new.target in _VIEWS):
            chain.insert(0, new)
            new = new.args[0]
        if new is not argument or not chain or not returned.isdisjoint([argument, *chain]):
            continue
        readers = {
            write: [node for node in _readers(before) if node not in (write, copy)]
            for before, write in zip([argument, *chain], chain, strict=False)
        }
        if all(
            all(position[reader] < position[write] for reader in readers[write])
            and not any(owner(source) in (argument, *chain) for source in _sources(write))
            for write in chain
        ):
            for write in chain:
                write.meta[AFTER] = _with_readers_of_copies(readers[write], value.numel(), write, position)
            found.append(PartialWrite(argument, tuple(chain)))
    return found


def _readers(memory: fx.Node) -> list[fx.Node]:
    """The nodes that read the elements of a node's result, directly or through views of it."""
    readers, waiting = [], [memory]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if viewed(user) is node:
                waiting.append(user)
            elif user.target not in _OF_METADATA:
                readers.append(user)
    return readers


def _with_readers_of_copies(
    readers: Sequence[fx.Node], size: int | torch.SymInt, write: fx.Node, position: Mapping[fx.Node, int]
) -> tuple[fx.Node, ...]:
    """The readers, and what reads results of at least ``size`` elements before the write.

    A norm of old values, ``(x * x).sum()``, would else be computed in two regions, with ``x * x`` kept in between.
    """
    found, waiting = dict.fromkeys(readers), list(readers)
    while waiting:
        node = waiting.pop()
        value = value_of(node)
        if value is not None and statically_known_true(value.numel() >= size):
            new = [user for user in node.users if position[user] < position[write] and user not in found]
            found.update(dict.fromkeys(new))
            waiting += new
    return tuple(found)


def _sources(write: fx.Node) -> list[fx.Node]:
    """The arguments of a write but the first."""
    sources: list[fx.Node] = []
    fx.map_arg((write.args[1:], write.kwargs), sources.append)
    return sources


def write_in_place(write: fx.Node) -> fx.Node:
    """Replaces a node that writes a part by nodes that write in place; returns the one with the new value."""
    with write.graph.inserting_before(write):
        if write.target in _IN_PLACE:
            new = write.graph.call_function(_IN_PLACE[write.target], write.args, dict(write.kwargs))
        else:
            memory, source, *rest = write.args
            view = write.graph.call_function(_VIEWS[write.target], (memory, *rest), dict(write.kwargs))
            write.graph.call_function(aten.copy_.default, (view, source))
            new = write.graph.call_function(aten.alias.default, (memory,))
    new.meta = dict(write.meta)
    write.replace_all_uses_with(new)
    write.graph.erase_node(write)
    return new
