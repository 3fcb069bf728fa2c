"""The time of each operator in a dumped graph: ONNX Runtime's profile, attributed to FX nodes, modules and lines.

::

    for times in operator_times(run.graphs[0]):
        for row in times.rows:                      # in execution order
            print(row.node, row.operator, row.milliseconds, row.fx_nodes, row.modules, row.sources)

The session of the run is created again and profiled on the recorded inputs. Its nodes are not those of ``model.onnx``:
passes and ONNX Runtime fuse, split and add nodes. A node of the session is attributed to the FX node in its metadata,
and to the nodes of the dumped models between the values that it reads and returns, found by name. A node whose results
have new names (a layout change, a part of a matrix product) is attributed to the FX nodes of its readers. If no name
leads to an FX node, ``fx_nodes`` is empty.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from .model_sessions import operator_of, region_settings, session_of_region
from .models import load_ir, load_model
from .reading import DumpedGraph, DumpedRegion
from .submodels import Parts

NOT_ATTRIBUTED = ""  # the module of nodes without known FX nodes

WHOLE_MODEL = "(the model)"  # the outermost module

_KERNEL = "_kernel_time"  # the suffix of a node's name in ONNX Runtime's profile


@dataclasses.dataclass(frozen=True)
class NodeTime:
    """A node of the session."""

    node: str  # its name in ONNX Runtime
    operator: str  # see ``operator_of``
    provider: str  # the execution provider that runs it
    milliseconds: float  # of one run
    share: float  # of the time of all nodes of the graph, from 0 to 1
    fx_nodes: tuple[str, ...]  # in their order; empty if unknown
    aten_operators: tuple[str, ...]  # of the FX nodes, each once; modules and sources too
    modules: tuple[str, ...]  # paths of ``nn.Module``; ``""`` is the model itself
    sources: tuple[str, ...]  # the user's lines
    module: str  # the innermost module that contains all of ``modules``; ``""`` is the model itself


@dataclasses.dataclass(frozen=True)
class RegionTimes:
    """The times of one region."""

    region: int  # its number
    threads: int  # of the session
    runs: int
    milliseconds: float  # of one run of the session, including the time between nodes
    rows: Sequence[NodeTime]  # in execution order

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GroupTime:
    """The time of all nodes of one operator, or in one module."""

    name: str  # of the operator or module
    nodes: int  # how many
    milliseconds: float
    share: float


def operator_times(graph: DumpedGraph, *, runs: int = 20, threads: int | None = None) -> list[RegionTimes]:
    """Profiles the regions of a graph on their recorded inputs.

    A time is the mean of the middle half of the runs. ONNX Runtime measures whole microseconds with an overhead of
    about one, so small nodes seem slower than they are. Nodes in PyTorch are not measured. Each region runs once to
    warm up and then ``runs`` times, with the ``threads`` of the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be created or run.
        ValueError: ``runs`` is less than 1.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least one run must be measured")
    found = [_times_of(region, runs, threads) for region in graph.regions]
    everything = sum(row.milliseconds for item in found for row in item.rows) or 1.0
    return [
        dataclasses.replace(
            item, rows=[dataclasses.replace(row, share=row.milliseconds / everything) for row in item.rows]
        )
        for item in found
    ]


def by_operator(times: Iterable[RegionTimes]) -> list[GroupTime]:
    """The time of each operator, the slowest first."""
    return _grouped(times, lambda row: row.operator)


def by_module(times: Iterable[RegionTimes]) -> list[GroupTime]:
    """The time of each module without its submodules, the slowest first.

    A node of several modules counts for the innermost module that contains them all.
    """
    return _grouped(times, lambda row: (row.module or WHOLE_MODEL) if row.fx_nodes else NOT_ATTRIBUTED)


def _grouped(times: Iterable[RegionTimes], name_of: Callable[[NodeTime], str]) -> list[GroupTime]:
    groups: dict[str, list[NodeTime]] = {}
    for item in times:
        for row in item.rows:
            groups.setdefault(name_of(row), []).append(row)
    found = [
        GroupTime(name, len(rows), sum(row.milliseconds for row in rows), sum(row.share for row in rows))
        for name, rows in groups.items()
    ]
    return sorted(found, key=lambda group: -group.milliseconds)


def _times_of(region: DumpedRegion, runs: int, threads: int | None) -> RegionTimes:
    """The times of a region, with shares of 0."""
    settings, inputs = region_settings(region, threads), region.recorded("input")
    model = load_model(region.optimized_model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        session = session_of_region(region, model, settings, inputs, write=folder, profile=folder / "profile")
        for _ in range(runs + 1):
            session(inputs)
        events = json.loads(session.end_profiling().read_text())
        graph = load_ir(folder / "model.onnx").graph
    attribution = _Attribution(region, graph)
    rows = []
    for node, provider, milliseconds in _timed(graph, events, runs):
        found = attribution.of(node)
        modules = tuple(dict.fromkeys(item.get("module", "") for item in found))
        rows.append(
            NodeTime(
                node=node.name,
                operator=operator_of(node),
                provider=provider,
                milliseconds=milliseconds,
                share=0.0,
                fx_nodes=tuple(dict.fromkeys(item["fx_node"] for item in found)),
                aten_operators=tuple(dict.fromkeys(item.get("aten_op", "") for item in found)),
                modules=modules,
                sources=tuple(dict.fromkeys(item.get("source", "") for item in found)),
                module=".".join(os.path.commonprefix([path.split(".") for path in modules])),
            )
        )
    whole = [event["dur"] for event in events if event["cat"] == "Session" and event["name"] == "model_run"]
    return RegionTimes(region.index, settings.threads, runs, _middle(whole[1:]), rows)


def _timed(graph: ir.Graph, events: Sequence[Mapping[str, Any]], runs: int) -> Iterator[tuple[ir.Node, str, float]]:
    """The nodes of a graph, with providers and times in milliseconds that include their subgraphs."""
    nodes = collections.defaultdict(list)
    for node in graph:
        nodes[node.name].append(node)
    by_index: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        name = event["name"].removesuffix(_KERNEL)
        if event["cat"] == "Node" and name != event["name"] and name in nodes:
            by_index.setdefault((name, event["args"]["node_index"]), []).append(event)
    for (name, _), found in by_index.items():
        # Fused nodes may share a name. Each has its own node_index, in the same order.
        if nodes[name] and len(found) == runs + 1:
            durations = [event["dur"] for event in found[1:]]
            yield nodes[name].pop(0), found[0]["args"]["provider"], _middle(durations)


def _middle(durations: Sequence[int]) -> float:
    """The mean of the middle half of microseconds, in milliseconds."""
    ordered = sorted(durations)
    return statistics.fmean(ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]) / 1000


class _Attribution:
    """Finds the FX nodes of each node of the session, in the metadata of the dumped models of the region."""

    def __init__(self, region: DumpedRegion, session: ir.Graph) -> None:
        self._exported, self._optimized = (Parts(load_ir(path)) for path in (region.model, region.optimized_model))
        self._results_of: dict[str, list[str]] = {}  # by FX node, in order
        for name in self._exported.by_name:
            self._results_of.setdefault(_metadata(self._exported, name).get("fx_node", ""), []).append(name)
        self._computed = {value.name for node in session for value in node.outputs if value.name}
        self._stops = self._computed.union(*map(self._exported_names, self._computed))

    def of(self, node: ir.Node) -> list[Mapping[str, str]]:
        """The metadata of a node's FX nodes, each once, in the order of the FX graph."""
        seen, nodes = {node}, [node]
        while nodes:
            found = {item["fx_node"]: item for current in nodes for item in self._between(current)}
            if found:
                order = {name: i for i, name in enumerate(self._results_of)}
                return sorted(found.values(), key=lambda item: order.get(item["fx_node"], len(order)))
            nodes = [reader for current in nodes for reader in current.successors() if reader not in seen]
            seen.update(nodes)
        return []

    def _exported_names(self, result: str) -> set[str]:
        """The values of ``model.onnx`` that a result of the session belongs to."""
        if result in self._exported.by_name:
            return {result}
        node = _metadata(self._optimized, result).get("fx_node", "")
        return {name for name in self._results_of.get(node, ()) if name not in self._computed}

    def _between(self, node: ir.Node) -> list[Mapping[str, str]]:
        """The metadata of the nodes of the dumped models between a node's results and the results of other nodes."""
        own = {value.name for value in node.outputs if value.name}
        exported = set().union(*map(self._exported_names, own))
        pairs = ((self._exported, exported), (self._optimized, own))
        nodes = (parts.nodes[i] for parts, names in pairs for i in parts.before(names, self._stops))
        return [
            node.metadata_props for node in nodes if node.op_type != "Constant" and node.metadata_props.get("fx_node")
        ]


def _metadata(parts: Parts, value: str) -> Mapping[str, str]:
    """The metadata of the node that computes a value; empty for constants, which several FX nodes may share."""
    node = parts.nodes[parts.by_name[value]] if value in parts.by_name else None
    return {} if node is None or node.op_type == "Constant" else node.metadata_props
