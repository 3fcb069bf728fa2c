"""Compiles the operators between the regions of a graph with Inductor: the option ``fallback="inductor"``."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

import torch
from torch import fx

from passes.engine.fx.editing import is_view

from ..errors import first_line
from ..events import count
from ..graphs.artifacts import Region, Runner, Split
from ..graphs.inductor import compile_with_inductor
from ..partition.regions import execution_order, is_ordered, make_region, region_module

logger = logging.getLogger(__name__)


def compile_groups(module: fx.GraphModule, split: Split, direction: str) -> list[tuple[Region, Callable[..., object]]]:
    """Compiles groups of consecutive operators in PyTorch; returns each as a region, with the function to call.

    Single operators stay in PyTorch, which runs the same kernel; and so do random operators, side effects and groups
    that Inductor cannot compile.

    Args:
        module: the graph that was split.
        split: its regions on ONNX Runtime.
        direction: ``forward``, ``backward`` or ``inference``.
    """
    groups: list[list[fx.Node]] = [[]]
    for unit in execution_order(module, split.regions):
        if isinstance(unit, fx.Node) and _may_be_compiled(unit):
            groups[-1] += [unit, *(user for user in unit.users if user.target is operator.getitem)]
        elif isinstance(unit, Region) or unit.target is not operator.getitem:
            groups.append([])
    compiled: list[tuple[Region, Callable[..., object]]] = []
    for group in groups:
        operators = sum(node.target is not operator.getitem and not is_view(node.target) for node in group)
        if operators < 2:
            continue
        try:
            region = make_region(len(split.regions) + len(compiled), group)
            runner = compile_with_inductor(region_module(module, region), direction, keeps_arguments=True)
        except Exception as error:  # of any type, for instance if there is no C++ compiler
            logger.warning(
                "Inductor cannot compile %d operators, which run in PyTorch: %s", len(group), first_line(str(error))
            )
            count("inductor_failures")
            continue
        count("nodes_by_inductor", operators)
        compiled.append((region, _unboxed(runner)))
    return compiled


def _may_be_compiled(node: fx.Node) -> bool:
    is_operator = isinstance(node.target, torch._ops.OpOverload) and not is_ordered(node)
    return is_operator and all("val" in item.meta for item in (node, *node.all_input_nodes))


def _unboxed(runner: Runner) -> Callable[..., object]:
    def compiled_by_inductor(*args: object) -> object:
        return runner(list(args))

    return compiled_by_inductor
