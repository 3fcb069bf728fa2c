"""What PyTorch runs between the regions of a graph, compiled by Inductor instead of run node by node."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from passes.engine.fx.editing import is_view

from .artifacts import Runner
from .errors import first_line
from .events import count
from .inductor import compile_with_inductor
from .regions import ORIGINAL, is_ordered

logger = logging.getLogger(__name__)

_FEWEST = 2
"""Operators of a group that is worth a compile; one alone runs the same kernel in PyTorch."""


def compile_groups(assembled: fx.GraphModule, direction: str) -> int:
    """Replaces, in place, operators that follow each other in PyTorch by one call of what Inductor makes of them.

    Operators that draw random numbers or have side effects stay; so does a group that Inductor cannot compile.

    Args:
        assembled: a graph whose regions are calls.
        direction: ``forward``, ``backward`` or ``inference``.

    Returns:
        How many groups there are.
    """
    _move_items(assembled.graph)
    compiled = 0
    for group in _groups(assembled.graph):
        module, inputs, results = _extracted(assembled, group)
        try:
            runner = compile_with_inductor(module, direction, keeps_arguments=True)
        except Exception as error:  # whatever Inductor raises, without a C++ compiler for instance: PyTorch runs them
            logger.warning(
                "Inductor cannot compile %d operators, which run in PyTorch: %s", len(group), first_line(str(error))
            )
            count("inductor_failures")
            continue
        _replace(assembled.graph, group, inputs, results, runner)
        count("nodes_by_inductor", sum(map(_computes, group)))
        compiled += 1
    if compiled:
        assembled.recompile()
    return compiled


def _move_items(graph: fx.Graph) -> None:
    """Puts what takes one of several results right behind what computes them: into the same group."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        node.args[0].append(node)


def _groups(graph: fx.Graph) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if _may_be_compiled(node, found[-1]):
            found[-1].append(node)
        else:
            found.append([])
    return [group for group in found if sum(map(_computes, group)) >= _FEWEST]


def _may_be_compiled(node: fx.Node, group: Sequence[fx.Node]) -> bool:
    if node.op != "call_function" or not all("val" in _meta(source) for source in (node, *node.all_input_nodes)):
        return False
    if node.target is operator.getitem:
        return node.args[0] in group
    is_operator = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
    return is_operator and not is_ordered(node)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view(node.target)


def _meta(node: fx.Node) -> dict[str, object]:
    return node.meta if "val" in node.meta or ORIGINAL not in node.meta else node.meta[ORIGINAL].meta


def _extracted(
    assembled: fx.GraphModule, group: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A group as a graph, what it reads, and what of it is read by others."""
    inside = set(group)
    inputs = list(dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside))
    results = [node for node in group if any(user not in inside for user in node.users)]
    results = [node for node in results if not isinstance(_meta(node)["val"], (tuple, list))]
    graph = fx.Graph()
    copies = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = _meta(node)["val"]
    for node in group:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(assembled, graph), inputs, results


def _replace(
    graph: fx.Graph, group: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node], runner: Runner
) -> None:
    with graph.inserting_after(group[-1]):
        call = graph.call_function(_unboxed(runner), tuple(inputs))
    after = call
    for i, node in enumerate(results):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, i))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after)
    for node in reversed(group):
        graph.erase_node(node)


def _unboxed(runner: Runner) -> Callable[..., object]:
    def compiled_by_inductor(*args: object) -> object:
        return runner(list(args))

    return compiled_by_inductor
