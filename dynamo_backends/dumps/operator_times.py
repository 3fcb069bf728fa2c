"""The time of each operator in a dumped graph: ONNX Runtime's profile, brought back to FX nodes, modules and lines.

::

    for times in operator_times(run.graphs[0]):
        for row in times.rows:                      # in the order they run
            print(row.node, row.operator, row.milliseconds, row.fx_nodes, row.modules, row.sources)

The session is made again as the run had it, and runs on the recorded inputs. What it runs are not the nodes of
``model.onnx``: our passes and ONNX Runtime fuse, split and add nodes. A node of the session stands for what lies in the
dumped models between the values it reads and those it returns, found by their names; and for the FX node in the
metadata of the model it was given. A node that ONNX Runtime added and whose results have names of its own (a change of
layout, a part of a product) stands for what the nodes that read it stand for. Where no name leads anywhere, the row's
``fx_nodes`` are empty.
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

from .model_sessions import region_settings, session_of_region
from .models import load_ir, load_model
from .reading import DumpedGraph, DumpedRegion

NOT_ATTRIBUTED = ""  # the module of time that no FX node is known for

WHOLE_MODEL = "(the model)"  # what is in no module but the outermost

_KERNEL = "_kernel_time"  # what ONNX Runtime adds to a node's name in its profile


@dataclasses.dataclass(frozen=True)
class OperatorTime:
    """A node of the session that runs."""

    node: str  # its name in ONNX Runtime
    operator: str  # its operator, with the domain unless that is ONNX's own: ``com.microsoft.FusedMatMul``
    provider: str  # the execution provider that runs it
    milliseconds: float  # of one run
    share: float  # of the time of all nodes of the graph, from 0 to 1
    fx_nodes: tuple[str, ...]  # the FX nodes it stands for, in their order; empty if that is not known
    aten_operators: tuple[str, ...]  # theirs, each once
    modules: tuple[str, ...]  # the paths of the ``nn.Module`` they are in, each once; ``""`` is the model itself
    sources: tuple[str, ...]  # the user's lines, each once
    module: str  # the innermost module that all of it is in; ``""`` is the model itself


@dataclasses.dataclass(frozen=True)
class RegionTimes:
    """The times of one region."""

    region: int  # its number
    threads: int  # of the session
    runs: int  # how often it ran
    milliseconds: float  # one run of the session, with what the runtime does between nodes
    rows: Sequence[OperatorTime]  # its nodes, in the order they run

    def as_json(self) -> dict[str, object]:
        """For a report and ``--json``."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class GroupTime:
    """The time of all nodes (``nodes`` says how many) with the same operator, or in the same module (``name``)."""

    name: str
    nodes: int
    milliseconds: float
    share: float


def operator_times(graph: DumpedGraph, *, runs: int = 20, threads: int | None = None) -> list[RegionTimes]:
    """Profiles the regions of a graph on their recorded inputs.

    A time is the mean of the middle half of the runs. ONNX Runtime measures whole microseconds, and measuring costs
    about one itself: many small nodes seem slower than they are. What PyTorch runs is not measured.

    Each region runs so often, after a first run that does not count; with the threads of the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be made or run.
        ValueError: no run was asked for.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least one run is measured")
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
    """The time of each module, the slowest first, without that of the modules in it.

    A node that stands for several modules counts for the innermost that they are all in; ``NOT_ATTRIBUTED`` is the time
    that no FX node is known for.
    """
    return _grouped(times, lambda row: (row.module or WHOLE_MODEL) if row.fx_nodes else NOT_ATTRIBUTED)


def _grouped(times: Iterable[RegionTimes], name_of: Callable[[OperatorTime], str]) -> list[GroupTime]:
    groups: dict[str, list[OperatorTime]] = {}
    for item in times:
        for row in item.rows:
            groups.setdefault(name_of(row), []).append(row)
    found = [
        GroupTime(name, len(rows), sum(row.milliseconds for row in rows), sum(row.share for row in rows))
        for name, rows in groups.items()
    ]
    return sorted(found, key=lambda group: -group.milliseconds)


def _times_of(region: DumpedRegion, runs: int, threads: int | None) -> RegionTimes:
    """The times of a region; the shares are 0."""
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
            OperatorTime(
                node=node.name,
                operator=f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type,
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
    """The nodes of a graph with their providers and times; a node's time includes that of its subgraphs."""
    nodes = collections.defaultdict(list)
    for node in graph:
        nodes[node.name].append(node)
    by_index: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        name = event["name"].removesuffix(_KERNEL)
        if event["cat"] == "Node" and name != event["name"] and name in nodes:
            by_index.setdefault((name, event["args"]["node_index"]), []).append(event)
    for (name, _), found in by_index.items():
        # What fusions make may all have one name: there are as many nodes as there are numbers, both in order.
        if nodes[name] and len(found) == runs + 1:
            durations = [event["dur"] for event in found[1:]]
            yield nodes[name].pop(0), found[0]["args"]["provider"], _middle(durations)


def _middle(durations: Sequence[int]) -> float:
    """The mean of the middle half, in milliseconds, of microseconds."""
    ordered = sorted(durations)
    return statistics.fmean(ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]) / 1000


class _Attribution:
    """What in the dumped models of a region, which have the metadata, each node of the session's graph stands for."""

    def __init__(self, region: DumpedRegion, session: ir.Graph) -> None:
        self._exported, self._optimized = (
            _makers(load_ir(path).graph) for path in (region.model, region.optimized_model)
        )
        self._results_of: dict[str, list[str]] = {}  # for each FX node, in order, the values that are made for it
        for name, node in self._exported.items():
            self._results_of.setdefault(node.metadata_props.get("fx_node", ""), []).append(name)
        self._computed = set(_makers(session))
        self._stops = self._computed.union(*map(self._exported_names, self._computed))

    def of(self, node: ir.Node) -> list[Mapping[str, str]]:
        """The metadata of what a node stands for, each FX node once, in the order of the FX graph."""
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
        """The values of ``model.onnx`` that a result of the session is, or is a part of."""
        if result in self._exported:
            return {result}
        node = _fx_node(self._optimized.get(result))
        return {name for name in self._results_of.get(node, ()) if name not in self._computed}

    def _between(self, node: ir.Node) -> list[Mapping[str, str]]:
        """The metadata of all that lies between a node's results and what other nodes compute."""
        own = {value.name for value in node.outputs if value.name}
        exported = set().union(*map(self._exported_names, own))
        found = []
        for makers, results in ((self._exported, exported), (self._optimized, own)):
            names, seen = list(results), set(results)
            while names:
                maker = makers.get(names.pop())
                if maker is None:
                    continue
                if _fx_node(maker):
                    found.append(maker.metadata_props)
                new = {value.name for value in maker.inputs if value is not None} - self._stops - seen
                seen |= new
                names.extend(new)
        return found


def _makers(graph: ir.Graph) -> dict[str, ir.Node]:
    """The node that computes each value."""
    return {value.name: node for node in graph for value in node.outputs if value.name}


def _fx_node(node: ir.Node | None) -> str:
    """The FX node of an ONNX node; ``""`` for a constant, which several FX nodes may share."""
    return "" if node is None or node.op_type == "Constant" else node.metadata_props.get("fx_node", "")
