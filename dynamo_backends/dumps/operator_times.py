"""The time of each node of a dumped graph, measured by ONNX Runtime's profiler, with its FX node, module and line.

::

    for row in operator_times(run.graphs[0]).rows:
        print(row.node, row.operator, row.milliseconds, row.fx_node, row.module, row.source)

The session of the run is created again and profiled on the recorded inputs. Its nodes are not those of ``model.onnx``:
passes and ONNX Runtime fuse, split and add nodes. A node belongs to the FX node whose result it computes; if its
results have new names, as those of a layout change, to the FX node of its first reader.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from .model_sessions import ModelSession, operator_of, region_settings
from .models import load_ir, load_model
from .reading import DumpedGraph, DumpedRegion

_KERNEL = "_kernel_time"  # the suffix of a node's name in ONNX Runtime's profile


@dataclasses.dataclass(frozen=True)
class NodeTime:
    """A node of a session."""

    region: int
    node: str  # its name in ONNX Runtime
    operator: str  # see ``operator_of``
    provider: str  # the execution provider that runs it
    milliseconds: float  # of one run, with its subgraphs
    fx_node: str  # empty if unknown, as the next two
    module: str  # the path of the ``nn.Module``; also empty for the model itself
    source: str  # the user's line


@dataclasses.dataclass(frozen=True)
class OperatorTimes:
    """The times of a graph's nodes on ONNX Runtime."""

    threads: int  # of a session
    runs: int
    milliseconds: float  # of one run of the sessions, including the time between nodes
    rows: Sequence[NodeTime]  # the slowest first


def operator_times(graph: DumpedGraph, *, runs: int = 20, threads: int | None = None) -> OperatorTimes:
    """Profiles the regions of a graph on their recorded inputs.

    A time is the mean of the middle half of the runs. ONNX Runtime measures whole microseconds with an overhead of
    about one, so small nodes seem slower than they are. Nodes in PyTorch are not measured. Each region runs once to
    warm up and then ``runs`` times, with the ``threads`` of the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be created or run.
    """
    found, used, rows = 0.0, threads or 1, list[NodeTime]()
    for region in graph.regions:
        settings, inputs = region_settings(region, threads), region.recorded("input")
        constants = {name: inputs[name] for name in region.entry.constants if name in inputs}
        with tempfile.TemporaryDirectory() as name:
            folder, model = Path(name), load_model(region.optimized_model)
            session = ModelSession(model, settings, constants, write=folder, profile=folder / "profile")
            for _ in range(runs + 1):
                session(inputs)
            events = json.loads(session.end_profiling().read_text())
            nodes = list(load_ir(folder / "model.onnx").graph)
        rows += _rows(region, events, nodes, runs)
        whole = [event for event in events if event["cat"] == "Session" and event["name"] == "model_run"]
        found, used = found + _middle(whole[1:]), settings.threads
    return OperatorTimes(used, runs, found, sorted(rows, key=lambda row: -row.milliseconds))


def _rows(
    region: DumpedRegion, events: Sequence[Mapping[str, Any]], session_nodes: Sequence[ir.Node], runs: int
) -> Iterator[NodeTime]:
    # Fused nodes may share a name. Each has its own node_index, in the same order.
    nodes, events_of = collections.defaultdict[str, list[ir.Node]](list), collections.defaultdict[Any, list[Any]](list)
    for node in session_nodes:
        nodes[str(node.name)].append(node)
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith(_KERNEL):
            events_of[event["name"].removesuffix(_KERNEL), event["args"]["node_index"]].append(event)
    metadata = _metadata(region)
    for (name, _), found in events_of.items():
        if nodes[name] and len(found) == runs + 1:
            node, provider = nodes[name].pop(0), found[0]["args"]["provider"]
            known = _origin(node, metadata)
            origin = (known.get(key, "") for key in ("fx_node", "module", "source"))
            yield NodeTime(region.index, name, operator_of(node), provider, _middle(found[1:]), *origin)


def _middle(events: Sequence[Mapping[str, Any]]) -> float:
    """The mean of the middle half of the durations, in milliseconds."""
    ordered = sorted(event["dur"] for event in events)
    return statistics.fmean(ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]) / 1000


def _metadata(region: DumpedRegion) -> dict[str, Mapping[str, str]]:
    """The metadata of the nodes of the dumped models that have an FX node, by the values that they compute."""
    nodes = [node for path in (region.model, region.optimized_model) for node in load_ir(path).graph]
    return {str(value.name): node.metadata_props for node in nodes for value in node.outputs if _has_origin(node)}


def _has_origin(node: ir.Node) -> bool:
    return "fx_node" in node.metadata_props and node.op_type != "Constant"  # which several FX nodes may share


def _origin(node: ir.Node, metadata: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """The metadata of a node of the session, or of its first reader that has some."""
    nodes = [node]
    for current in nodes:  # grows
        for value in current.outputs:
            if value.name in metadata:
                return metadata[value.name]
        nodes += [reader for reader in current.successors() if reader not in nodes]
    return {}
