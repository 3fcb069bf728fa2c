"""Gives the models of a Program from the cache the source lines, modules and names of weights of the graph at hand.

Other code may trace to the same graph, with the same names of nodes. If it was compiled first, the models have its
lines. Sessions do not need them, so they are exchanged only where people read a model: in logs, and in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx
from torch import fx

from ..graphs.artifacts import region_name
from ..graphs.locations import module_path, source_line, user_name
from ..runtime.constants import TABLE
from ..runtime.executable import Executable
from .program import Program

_LINES = {"module": module_path, "source": source_line}
_MEMORY = "__memory"
"""Suffix of a value with its dimensions in the order of the memory, see ``exporter/translate``."""


def with_lines_of(program: Program, graph: fx.Graph) -> Program:
    """The Program with the lines, modules and names of weights of a graph in its models.

    Args:
        program: what the graph is compiled to.
        graph: before its passes. What a pass added to it has no line.
    """
    nodes = {node.name: node for node in graph.nodes}
    regions = []
    for index, region in enumerate(program.regions):
        executable = _with_lines(region.executable, nodes, _weights(program, index, graph))
        regions.append(dataclasses.replace(region, executable=executable))
    return dataclasses.replace(program, regions=tuple(regions))


def _with_lines(executable: Executable, nodes: Mapping[str, fx.Node], weights: Mapping[str, str]) -> Executable:
    model = onnx.load_model_from_string(executable.model)
    taken = {name for node in _nodes(model.graph) for name in (*node.input, *node.output)} - {*weights}
    taken |= {value.name for value in model.graph.output}
    renamed = weights if taken.isdisjoint({*weights, *weights.values()}) else {}
    for node in _nodes(model.graph):
        kept: Mapping[str, str] = {item.key: item.value for item in node.metadata_props if item.key not in _LINES}
        found = nodes.get(kept.get("fx_node", ""))
        lines = {key: text for key, of_node in _LINES.items() if found is not None and (text := of_node(found))}
        del node.metadata_props[:]
        for key, text in {**kept, **lines}.items():
            node.metadata_props.add(key=key, value=text)
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for value in (*model.graph.input, *model.graph.value_info):
        value.name = renamed.get(value.name, value.name)
    inputs = tuple(dataclasses.replace(spec, name=renamed.get(spec.name, spec.name)) for spec in executable.inputs)
    return dataclasses.replace(executable, model=model.SerializeToString(), inputs=inputs)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _nodes(subgraph)


def _weights(program: Program, index: int, graph: fx.Graph) -> dict[str, str]:
    """The names in a graph of the weights that a region reads, by the names of the values in its model."""
    [call] = program.code.find_nodes(op="call_module", target=region_name(index))
    placeholders = list(graph.find_nodes(op="placeholder"))
    names: dict[str, str] = {}
    for spec, argument in zip(program.regions[index].executable.inputs, call.args, strict=True):
        position = program.arguments.get(argument)
        name = user_name(placeholders[position], static_only=True) if position is not None else ""
        old = spec.name if spec.permutation is None else spec.name.removesuffix(_MEMORY)
        if name and name not in names.values():
            names |= {old + suffix: name + suffix for suffix in ("", TABLE, _MEMORY)}
    return names
