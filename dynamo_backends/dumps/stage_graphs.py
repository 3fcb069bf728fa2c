"""The stages of a graph in a dump: which there are, where their files are, their graphs as text and as nodes.

::

    run = find_run()
    (graph,) = run.graphs_of("0/forward")
    for stage in stages_of(run, graph):
        print(stage.name, stage.nodes, stage.same_as)
    print(stage_graphs(run, graph, "onnx")[0].text)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from ..common.suggestions import unknown_name
from ..graphs.graph_text import GraphNode, model_text, onnx_nodes, without_freeing
from .models import load_ir
from .reading import DumpedGraph, DumpError, Run, read_json
from .schema import FxGraphEntry, StageEntry, stage_named

FX_STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad")
"""Stages that are FX graphs; the first three are of Dynamo's graph, which its forward and its backward share."""

ONNX_STAGES = ("onnx", "onnx_optimized", "session")  # stages that are an ONNX model for each region

STAGES = (*FX_STAGES, *ONNX_STAGES)  # all that can be shown, in order


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """The graph of a stage, or of a region in an ONNX stage."""

    path: Path  # the file that it is in
    file: str  # the same in the run folder, for people
    text: str  # it as text: Python for FX
    region: int | None = None  # which region; ``None`` for an FX graph
    # what the user calls the arguments of the graph, by their FX names
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def nodes(self) -> list[GraphNode]:
        """Its nodes, with inputs, initializers and outputs."""
        if self.region is None:
            return _fx_nodes(self.path.with_suffix(".json"))
        known = {**self.names, **{name: name for name in self.names.values()}}  # a model's weights bear them already
        nodes = onnx_nodes(_model(self.path))
        of_user = {node.name: known.get(node.name, "") for node in nodes if node.kind in ("input", "initializer")}
        return [dataclasses.replace(node, user_name=of_user.get(node.name, node.user_name)) for node in nodes]

    @property
    def operators(self) -> int:
        """How many nodes it has without inputs, initializers and outputs."""
        return sum(node.kind == "node" for node in self.nodes)


def stages_of(run: Run, graph: DumpedGraph) -> list[StageEntry]:
    """The stages that a graph went through, in order; ``DumpError`` if the manifest is damaged."""
    found = [entry for name in FX_STAGES if (entry := _entry(run, graph, name)) is not None]
    for name in ONNX_STAGES:
        entries = [entry for region in graph.regions if (entry := stage_named(region.entry.stages, name)) is not None]
        if not entries or len(entries) < len(graph.regions):
            continue
        nodes, same_as = sum(entry.nodes for entry in entries), {entry.same_as for entry in entries}
        if len(same_as) == 1 and None not in same_as:
            found.append(StageEntry(name, nodes, None, same_as.pop()))
            continue
        indices = ",".join(str(region.index) for region in graph.regions)
        places = f"region_{{{indices}}}" if len(entries) > 1 else f"region_{indices}"
        file = next((Path(entry.file).name for entry in entries if entry.file is not None), "")
        found.append(StageEntry(name, nodes, f"{graph.reference}/{places}/{file}"))
    return found


def stage_graphs(run: Run, graph: DumpedGraph, name: str) -> list[StageGraph]:
    """The graph of a stage, or those of the regions; of one that changed nothing that of the stage before it.

    Raises:
        DumpError: there is no such stage, the graph did not go through it, or its file cannot be read.
    """
    if name not in STAGES:
        raise DumpError(unknown_name("stage", name, STAGES))
    if name in ONNX_STAGES:
        if not graph.regions:
            why = f"nothing of it ran on ONNX Runtime; {graph.folder / 'regions.txt'} says why"
            raise DumpError(f"{graph.reference} has no stage {name}: {why}")
        found = []
        for region in graph.regions:
            path = region.model_of(name)
            file = f"{graph.reference}/region_{region.index}/{path.name}"
            found.append(StageGraph(path, file, model_text(_model(path)), region.index, graph.entry.names))
        return found
    entry = _entry(run, graph, name)
    if entry is not None and entry.same_as is not None:
        entry = _entry(run, graph, entry.same_as)
    if entry is None or entry.file is None:
        have = [stage for stage in FX_STAGES if _entry(run, graph, stage) is not None]
        raise DumpError(f"{graph.reference} did not go through the stage {name}; it has {', '.join(have)}")
    path = run.file_of(graph, entry.file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {error}; dump again") from None
    return [StageGraph(path, entry.file, without_freeing(text))]


def _entry(run: Run, graph: DumpedGraph, name: str) -> StageEntry | None:
    """What the manifest says of a stage that is an FX graph."""
    if name not in ("dynamo", "pre_grad", "joint"):
        return stage_named(graph.entry.stages, name)
    of_dynamo = next((entry for entry in run.dynamo_graphs if entry.index == graph.index), None)
    return stage_named(of_dynamo.stages, name) if of_dynamo else None


def _fx_nodes(path: Path) -> list[GraphNode]:
    """The nodes of an FX graph, subgraphs after their graph; what is in one bears its name: ``true_graph_0.sin``."""
    graph = read_json(path, FxGraphEntry)
    found = []
    for node in graph.nodes:
        code = graph.lines.get(node.source, "")
        given = (node.operator, node.arguments, (node.type,), node.source, code)
        found.append(GraphNode(node.kind, (node.name,), *given, user_name=node.user_name))
    return found


_model = functools.lru_cache(maxsize=16)(load_ir)  # a model that is read once for its text and its nodes
